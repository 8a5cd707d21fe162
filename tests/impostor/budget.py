"""The budget of rows: costs beyond the unhooked step, in ``budget.yaml``, a line a row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from .rows import STEPS

FILE = Path(__file__).with_name("budget.yaml")
#: End of the names of places in threads of their own, which the step does not wait for.
ASIDE = " (aside)"
_NUMBERS = ("kernels", "to_device", "from_device")
_PLACES = ("synchronisations", "blocking", "pageable")
#: How a number may differ without anybody being asked: what is late over UDP, and when a thread aside looks, is not fixed.
_SHARE, _SLACK, _ASIDE = 0.05, 2.0, 1.0
_HEAD = """\
# Costs of rows on the pretended device, per step, beyond the unhooked step (docs/impostor.md). Missing entries are 0.
# Written by `python -m tests.impostor --write-budget`, but for the reasons: a wait at a place without one is refused.
"""


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


@dataclass(frozen=True)
class Budget:
    """``rows``: what each may cost; ``losses``: the mean loss of its iterations; ``reasons``: of waits, by place."""

    rows: Mapping[str, Cost]
    losses: Mapping[str, float]
    reasons: Mapping[str, str]


def read(file: Path = FILE) -> Budget:
    """Return the committed budget."""
    content = yaml.safe_load(file.read_text(encoding="utf-8"))
    lines = content["rows"]
    costs = {name: Cost(**{k: v for k, v in line.items() if k != "loss"}) for name, line in lines.items()}
    return Budget(costs, {name: line["loss"] for name, line in lines.items()}, content["reasons"] or {})


def places(cost: Cost) -> set[str]:
    """Return the places where the host waits, or a copy does."""
    return {place for name in _PLACES for place in getattr(cost, name)}


def beyond(cost: Cost, allowed: Cost) -> list[str]:
    """Return everything of ``cost`` beyond what is allowed, a line each."""
    lines = [
        f"{name}: {getattr(cost, name):.0f} a step, allowed are {limit:.0f}"
        for name in _NUMBERS
        if getattr(cost, name) > (limit := getattr(allowed, name)) + _slack(limit, allowed)
    ]
    for name in _PLACES:
        limits = getattr(allowed, name)
        lines += [
            f"{name}: {times:.2f} a step at {place}, allowed are {limits.get(place, 0):.2f}"
            for place, times in getattr(cost, name).items()
            if times > limits.get(place, 0) + (_ASIDE if place.endswith(ASIDE) and place in limits else 0)
        ]
    return lines


def as_line(cost: Cost) -> dict[str, Any]:
    """Return the numbers that are not zero, for the file."""
    numbers = {name: round(getattr(cost, name)) for name in _NUMBERS}
    rounded = {
        name: {k: round(v, 2) for k, v in sorted(getattr(cost, name).items()) if round(v, 2)} for name in _PLACES
    }
    return {name: value for name, value in {**numbers, **rounded}.items() if value}


def _slack(limit: float, allowed: Cost) -> float:
    """Return the room above ``limit``: a thread aside may come once more, or less, within the iterations that count."""
    aside = any(place.endswith(ASIDE) for place in allowed.synchronisations)
    return _SLACK + (1 / STEPS if aside else _SHARE) * abs(limit)


def write(budget: Budget, file: Path = FILE) -> None:
    """Write ``budget``, a line a row."""
    lines = [_HEAD, yaml.safe_dump({"reasons": dict(budget.reasons)}, width=10_000, allow_unicode=True), "rows:\n"]
    for name, cost in budget.rows.items():
        line = {"loss": round(budget.losses[name], 4), **as_line(cost)}
        text = yaml.safe_dump(line, default_flow_style=True, sort_keys=False, width=10_000).strip()
        lines.append(f"  {name}: {text}\n")
    file.write_text("".join(lines), encoding="utf-8")
