"""Costs that a row may have beyond the unhooked step: ``budget.yaml``, a line a row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from .rows import STEPS

FILE = Path(__file__).with_name("budget.yaml")
_NUMBERS = ("kernels", "to_device", "from_device")
_PLACES = ("synchronisations", "blocking", "pageable")
#: How a number may differ without anybody being asked: what is late over UDP, and when a thread aside looks, is not fixed.
_SHARE, _SLACK, _ASIDE = 0.05, 2.0, 1.0
#: End of the names of places in threads of their own, which the step does not wait for.
ASIDE = " (aside)"


@dataclass(frozen=True)
class Cost:
    """Per step, beyond the unhooked step, on the rank with most of it.

    ``kernels``: launches; ``to_device``, ``from_device``: bytes; ``synchronisations``, ``blocking``, ``pageable``: how often the
    host waits, copies with the host waiting, and copies asynchronously but not from page-locked memory, by place
    (``file:function``).
    """

    kernels: float = 0.0
    to_device: float = 0.0
    from_device: float = 0.0
    synchronisations: Mapping[str, float] = field(default_factory=dict)
    blocking: Mapping[str, float] = field(default_factory=dict)
    pageable: Mapping[str, float] = field(default_factory=dict)

    @property
    def places(self) -> set[str]:
        """Places where somebody waits, or a copy does."""
        return {place for name in _PLACES for place in getattr(self, name)}

    def beyond(self, allowed: Cost) -> list[str]:
        """Everything beyond what is allowed, a line each."""
        lines = [
            f"{name}: {getattr(self, name):.0f} a step, allowed are {limit:.0f}"
            for name in _NUMBERS
            if getattr(self, name) > (limit := getattr(allowed, name)) + _slack(limit, allowed)
        ]
        for name in _PLACES:
            limits = getattr(allowed, name)
            lines += [
                f"{name}: {times:.2f} a step at {place}, allowed are {limits.get(place, 0):.2f}"
                for place, times in getattr(self, name).items()
                if times > limits.get(place, 0) + (_ASIDE if place.endswith(ASIDE) and place in limits else 0)
            ]
        return lines

    def as_line(self) -> dict[str, Any]:
        """Numbers that are not zero, for the file."""
        numbers = {name: round(getattr(self, name)) for name in _NUMBERS}
        places = {
            name: {k: round(v, 2) for k, v in sorted(getattr(self, name).items()) if round(v, 2)} for name in _PLACES
        }
        return {name: value for name, value in {**numbers, **places}.items() if value}


def _slack(limit: float, allowed: Cost) -> float:
    """The room above ``limit``: a thread aside may come once more, or less, within the iterations that count."""
    aside = any(place.endswith(ASIDE) for place in allowed.synchronisations)
    return _SLACK + (1 / STEPS if aside else _SHARE) * abs(limit)


@dataclass(frozen=True)
class Budget:
    """``rows``: what each may cost; ``losses``: the mean loss of its iterations; ``reasons``: by place, why somebody may wait."""

    rows: Mapping[str, Cost]
    losses: Mapping[str, float]
    reasons: Mapping[str, str]


_HEAD = """\
# What rows cost on the pretended device, per step and beyond the unhooked step (docs/impostor.md). What is not there is 0.
# Written by `python -m tests.impostor --write-budget`, but for the reasons: nobody waits at a place without one.
"""


def read(file: Path = FILE) -> Budget:
    """The committed budget."""
    content = yaml.safe_load(file.read_text(encoding="utf-8"))
    lines = content["rows"]
    costs = {name: Cost(**{k: v for k, v in line.items() if k != "loss"}) for name, line in lines.items()}
    return Budget(costs, {name: line["loss"] for name, line in lines.items()}, content["reasons"] or {})


def write(budget: Budget, file: Path = FILE) -> None:
    """Write ``budget``, a line a row."""
    lines = [_HEAD, yaml.safe_dump({"reasons": dict(budget.reasons)}, width=10_000, allow_unicode=True), "rows:\n"]
    for name, cost in budget.rows.items():
        line = {"loss": round(budget.losses[name], 4), **cost.as_line()}
        text = yaml.safe_dump(line, default_flow_style=True, sort_keys=False, width=10_000).strip()
        lines.append(f"  {name}: {text}\n")
    file.write_text("".join(lines), encoding="utf-8")
