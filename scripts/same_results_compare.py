"""Two outcomes of a case compared: the part of scripts/same_results.py that judges."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

#: Compared parts, in the order in which differences are printed: closest to the cause first.
PARTS = ("records", "weights", "replicas", "log", "log metadata", "settings")
_UNKNOWN = re.compile(r"unrecognized arguments: (\S+)|(--\S+: invalid choice: \S+)|unknown key (\S+)")
_ITERATION = re.compile(r"(train|valid) (\d+)|iter_(\d+)")


@dataclass(frozen=True)
class Verdict:
    """``kind`` in a word or two, and what there is to say about it."""

    kind: str
    good: bool
    details: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """In one line."""
        return f"{self.kind}: {self.details[0]}" if self.details else self.kind


def unknown(outcome: dict[str, Any]) -> str | None:
    """Return the flag or value that the checkout does not support, if that is why the case did not run."""
    found = _UNKNOWN.search(outcome["errors"]) if _status(outcome) == 2 else None
    return next(filter(None, found.groups())) if found else None


def _status(outcome: dict[str, Any]) -> int:
    statuses = outcome["statuses"][-1]
    # A rank that failed by itself, and not those that were ended because of it.
    return next((status for status in statuses if status > 0), next(filter(None, statuses), 0))


def _failure(outcome: dict[str, Any], expected: int) -> str | None:
    status = _status(outcome)
    if status == expected:
        return None
    lines = [line.strip() for line in outcome["errors"].splitlines() if line.strip()]
    told = [line for line in lines if "rror" in line] or lines or ["no message"]
    return f"exit status {status} instead of {expected}: {told[-1]}"


def verdict(expected: int, old: dict[str, Any], new: dict[str, Any] | None = None, renamed: bool = False) -> Verdict:
    """Return the verdict on two outcomes of a case that should end with the status ``expected``; on one, if it ran."""
    for name, outcome in (("OLD", old), ("NEW", new)):
        if outcome is not None and "absent" in outcome:
            return Verdict(f"{outcome['absent']} in {name}", False)
    if expected == 0 and (flag := unknown(old)):
        return Verdict("not there in OLD", True, (flag,))
    if failure := _failure(old, expected):
        return Verdict("OLD fails", False, (failure,))
    if new is None:
        return Verdict("recorded", True)
    if expected == 0 and (flag := unknown(new)):
        return Verdict("not there in NEW", False, (flag,))
    if failure := _failure(new, expected):
        return Verdict("NEW fails", False, (failure,))
    differences, notes = compare(old, new, renamed)
    if differences:
        return Verdict("DIFFERS", False, tuple(differences))
    return Verdict("same", True, tuple(notes))


def compare(old: dict[str, Any], new: dict[str, Any], renamed: bool = False) -> tuple[list[str], list[str]]:
    """Return (differences, remarks), each in a line. ``renamed``: what names flags is not compared."""
    differences, notes = [], []
    for part in PARTS if not renamed else PARTS[:4]:
        before, after = old[part], new[part]
        if part == "replicas" and before.keys() != after.keys() and before and after:
            notes.append("saved replicas are laid out otherwise; the cases that resume compare them")
            continue
        different = [key for key in before if key not in after or before[key] != after[key]]
        if part != "settings":
            different += [key for key in after if key not in before]
        if different:
            first = min(different, key=_iteration_of)
            differences.append(
                f"{part}: {len(different)} of {len(before | after)}, first {first}: "
                f"{before.get(first, 'not there')} / {after.get(first, 'not there')}"
            )
    if not renamed and old["errors"].strip() != new["errors"].strip():
        differences.append(f"message: {old['errors'].strip()} / {new['errors'].strip()}")
    for number, (line, other) in enumerate(zip(old["console"], new["console"]), start=1):
        if line != other:
            columns = zip(line.split(" | "), other.split(" | "))
            before, after = next((pair for pair in columns if pair[0] != pair[1]), (line, other))
            differences.append(f"console: line {number}: {before.strip()} / {after.strip()}")
            break
    else:
        if len(old["console"]) != len(new["console"]):
            differences.append(f"console: {len(old['console'])} / {len(new['console'])} lines")
    if old["files"] != new["files"]:
        differences.append(f"files: {' '.join(sorted(set(old['files']) ^ set(new['files']))) or 'another order'}")
    return differences, notes


def _iteration_of(key: str) -> int:
    """Return the iteration that a key is about; ``min`` keeps the order of those with the same."""
    found = _ITERATION.search(key)
    return int(next(filter(None, (found[2], found[3])))) if found else 0
