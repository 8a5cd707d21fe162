"""Saved state, entry by entry: each is taken away in turn, and the run that continues must differ or refuse.

Entries are found in the state itself, so that a new one is walked too. An entry is a key that is a text, wherever it is
nested. Elements of lists, and keys that are numbers, stand for each other: ``*`` in the name of an entry.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch


def entries(state: Any, place: tuple = ()) -> Iterator[tuple]:
    """Yield the places of all entries of ``state``: keys and numbers from the outermost on."""
    if isinstance(state, dict):
        for key, value in state.items():
            if isinstance(key, str):
                yield (*place, key)
            yield from entries(value, (*place, key))
    elif isinstance(state, (list, tuple)):
        for number, value in enumerate(state):
            yield from entries(value, (*place, number))


def name_of(place: tuple) -> str:
    """Return a name, the same for entries that stand for each other."""
    return "/".join(key if isinstance(key, str) else "*" for key in place)


def at(state: Any, place: tuple) -> Any:
    """Return the value at ``place``. Raise ``LookupError`` if there is none."""
    for key in place:
        if not isinstance(state, (dict, list, tuple)):
            raise LookupError(place)
        state = state[key]
    return state


def emptied(value: Any) -> Any:
    """Return an empty value in the place of ``value``."""
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    if isinstance(value, (dict, list, tuple, str, int, float)):
        return type(value)()
    return None


def equal(a: Any, b: Any) -> bool:
    """Return whether nested lists and dictionaries of arrays, tensors and numbers are the same to the last bit."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return (
            a.dtype == b.dtype
            and a.shape == b.shape
            and a.detach().cpu().numpy().tobytes() == b.detach().cpu().numpy().tobytes()
        )
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    return type(a) is type(b) and (a == b or (a != a and b != b))


def walk(state: Any, fresh: Any, goes_on: Callable[[Any], Any]) -> tuple[bool, dict[str, bool | None]]:
    """Return whether a run continues from ``state`` as it did; and of each entry, by name, whether it is missed.

    ``fresh``: the state of a run that has just begun. ``goes_on(state)``: what becomes of a run that continues from
    ``state``; of none, of the run that was not interrupted. It may raise. An entry is missed if it is noticed that it is gone,
    and that it is as in a fresh run (or empty, if that has none). ``None``: it is that anyway.
    """
    whole = goes_on(None)

    def noticed(change: Callable[[Any], None]) -> bool:
        changed = copy.deepcopy(state)
        change(changed)
        try:
            return not equal(goes_on(changed), whole)
        except Exception:
            return True

    places: dict[str, list[tuple]] = {}
    for place in entries(state):
        places.setdefault(name_of(place), []).append(place)
    missed: dict[str, bool | None] = {}
    for name, alike in places.items():

        def drop(changed: Any, alike: list[tuple] = alike) -> None:
            for place in alike:
                del at(changed, place[:-1])[place[-1]]

        replaced = {}
        for place in alike:
            value = at(state, place)
            try:
                instead = at(fresh, place)
            except LookupError:
                instead = emptied(value)
            if not equal(value, instead):
                replaced[place] = instead

        def reset(changed: Any, replaced: dict[tuple, Any] = replaced) -> None:
            for place, instead in replaced.items():
                at(changed, place[:-1])[place[-1]] = copy.deepcopy(instead)

        missed[name] = (noticed(drop) and noticed(reset)) if replaced else None
    return equal(goes_on(copy.deepcopy(state)), whole), missed


def unmissed(results: dict[str, dict[str, bool | None]], harmless: dict[str, str]) -> str:
    """Return the complaints about the walks of a room, by case: none if every entry is missed in one case at least.

    ``harmless``: entries that need not be missed, and why; with ``*`` at the end, all whose names begin so.
    """
    names = {name for missed in results.values() for name in missed}
    known = {
        name
        for name in names
        for which in harmless
        if name == which or (which[-1] == "*" and name.startswith(which[:-1]))
    }
    problems = []
    for name in sorted(names - known):
        found = {case: missed[name] for case, missed in results.items() if name in missed}
        if not any(found.values()):
            cases = [case for case, was in found.items() if was is False]
            problems.append(
                f"nobody misses {name} in {cases}" if cases else f"{name} is as in a fresh run in all cases"
            )
    unused = [which for which in harmless if not any(name.startswith(which.rstrip("*")) for name in names)]
    return "\n".join(problems + [f"{which} need not be missed, and is in no state" for which in unused])
