"""The budget of rows: costs beyond it, and its file (``megatron_lossy.lab.calibration.budget``), written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from megatron_lossy.lab.calibration.budget import ASIDE, FILE, Budget, Cost
from megatron_lossy.lab.calibration.rows import STEPS

_NUMBERS = ("kernels", "to_device", "from_device")
_PLACES = ("synchronisations", "blocking", "pageable")
#: How a number may differ without anybody being asked: what is late over UDP, and when a thread aside looks, is not fixed.
_SHARE, _SLACK, _ASIDE = 0.05, 2.0, 1.0
_HEAD = """\
# Costs of rows on the pretended device, per step, beyond the unhooked step (docs/impostor.md). Missing entries are 0.
# Written by `python -m tests.impostor --write-budget`, but for the reasons: a wait at a place without one is refused.
"""


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
