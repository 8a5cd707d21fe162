"""The committed budget: what each row asks of a device per step beyond the unhooked step.

``budget.yaml`` is written by ``python -m tests.impostor --write-budget``. It has a row's kernels and bytes; and its stalls, each
with the function that causes it. A place is a file and a function: a line would change with each edit above it.
A stall needs a reason. There is none by default.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

FILE = Path(__file__).with_name("budget.yaml")
#: Kinds of stalls, as they are called in the file.
STALLS = ("synchronisations", "blocking copies", "pageable copies")
_NUMBERS = {"kernels": "kernels", "to device": "to_device", "from device": "from_device"}
#: Datagrams come in any order, and kernels follow them a little.
_LOOSE = 0.1


@dataclass(frozen=True)
class Usage:
    """What is asked of a device in one step. ``stalls``: times, by (place, kind); ``to_device``, ``from_device``: bytes."""

    kernels: float = 0.0
    to_device: float = 0.0
    from_device: float = 0.0
    stalls: Mapping[tuple[str, str], float] = field(default_factory=dict)
    loss: float | None = None

    def beyond(self, unhooked: Usage) -> Usage:
        """This less ``unhooked``. A stall that the unhooked step has more often does not make up for another one."""
        places = {**self.stalls}
        for key, times in unhooked.stalls.items():
            places[key] = places.get(key, 0.0) - times
        return Usage(
            self.kernels - unhooked.kernels,
            self.to_device - unhooked.to_device,
            self.from_device - unhooked.from_device,
            {key: times for key, times in sorted(places.items()) if times > 1e-9},
            self.loss,
        )

    def stalls_of(self, kind: str) -> float:
        """How often a step stalls by ``kind``."""
        return sum(times for (_, one), times in self.stalls.items() if one == kind)


def most(usages: list[Usage]) -> Usage:
    """The most that a rank of several asks."""
    keys = {key for usage in usages for key in usage.stalls}
    return Usage(
        max(usage.kernels for usage in usages),
        max(usage.to_device for usage in usages),
        max(usage.from_device for usage in usages),
        {key: max(usage.stalls.get(key, 0.0) for usage in usages) for key in sorted(keys)},
        usages[0].loss,
    )


@dataclass(frozen=True)
class Budget:
    """``rows`` by name; ``reasons`` for stalls, by place; ``versions``: of what it was counted with."""

    rows: Mapping[str, Usage]
    reasons: Mapping[str, str]
    versions: Mapping[str, str]

    def more(self, name: str, usage: Usage, kernels: bool = True) -> list[str]:
        """What ``usage`` of row ``name`` has more than is allowed, in words. ``kernels``: numbers other than stalls too."""
        allowed = self.rows.get(name, Usage())
        found = [
            f"{place}: {times:g} {kind} per step, allowed are {allowed.stalls.get((place, kind), 0):g}"
            for (place, kind), times in usage.stalls.items()
            if times > allowed.stalls.get((place, kind), 0.0) + 1e-9
        ]
        for text, attribute in _NUMBERS.items() if kernels else ():
            now, limit = getattr(usage, attribute), getattr(allowed, attribute)
            if now > limit * (1 + _LOOSE * ("udp" in name)) + 1e-2:
                found.append(f"{now:g} {_words(text)} per step, allowed are {limit:g}")
        return found

    def less(self, name: str, usage: Usage) -> list[str]:
        """What ``usage`` of row ``name`` has less than is allowed, in words: the budget should be lowered."""
        allowed = self.rows.get(name, Usage())
        found = [
            f"{place}: {usage.stalls.get((place, kind), 0):g} {kind} per step, allowed are {times:g}"
            for (place, kind), times in allowed.stalls.items()
            if usage.stalls.get((place, kind), 0.0) < times - 1e-9
        ]
        for text, attribute in _NUMBERS.items():
            now, limit = getattr(usage, attribute), getattr(allowed, attribute)
            if now < limit * (1 - _LOOSE * ("udp" in name)) - 1e-2:
                found.append(f"{now:g} {_words(text)} per step, allowed are {limit:g}")
        return found

    def without_reason(self) -> list[str]:
        """The places that stall, and nobody said why."""
        places = {place for usage in self.rows.values() for place, _ in usage.stalls}
        return sorted(place for place in places if not self.reasons.get(place))


def _words(text: str) -> str:
    return text if text == "kernels" else f"bytes {text.replace(' ', ' the ')}"


def read_budget(file: Path = FILE) -> Budget:
    """The committed budget."""
    content = yaml.safe_load(file.read_text(encoding="utf-8"))
    rows = {}
    for name, row in content["rows"].items():
        stalls = {(place, kind): n for place, kinds in row.get("stalls", {}).items() for kind, n in kinds.items()}
        numbers = {attribute: row.get(text, 0.0) for text, attribute in _NUMBERS.items()}
        rows[name] = Usage(**numbers, stalls=stalls, loss=row.get("loss"))
    return Budget(rows, content.get("reasons") or {}, content["versions"])


def write_budget(budget: Budget, file: Path = FILE) -> None:
    """Write ``budget``; reasons for places that stall no longer are dropped, and new places get an empty one."""
    places = sorted({place for usage in budget.rows.values() for place, _ in usage.stalls})
    rows: dict[str, Any] = {}
    for name, usage in budget.rows.items():
        row: dict[str, Any] = {
            text: round(getattr(usage, attribute), 2)
            for text, attribute in _NUMBERS.items()
            if abs(getattr(usage, attribute)) > 1e-9
        }
        if usage.loss is not None:
            row["loss"] = round(usage.loss, 4)
        for (place, kind), times in usage.stalls.items():
            row.setdefault("stalls", {}).setdefault(place, {})[kind] = round(times, 2)
        rows[name] = row
    parts = {
        "versions": dict(budget.versions),
        "reasons": {place: budget.reasons.get(place, "") for place in places},
        "rows": rows,
    }
    head = "# Per step beyond the unhooked step. Written by python -m tests.impostor --write-budget; the reasons are by hand.\n"
    with file.open("w", encoding="utf-8") as out:
        out.write(head)
        for part in parts.items():
            yaml.safe_dump(dict([part]), out, sort_keys=False, allow_unicode=True, width=200, default_flow_style=None)
