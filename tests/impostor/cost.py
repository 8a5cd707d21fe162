"""Costs of a row beyond those of the unhooked step, from its findings."""

from __future__ import annotations

from collections import Counter

from megatron_lossy.lab.calibration.budget import ASIDE, Cost
from megatron_lossy.lab.calibration.rows import STEPS

from .tracker import Findings

_KINDS = {"synchronisations": "synchronisation", "blocking": "blocking copy", "pageable": "pageable copy"}
_COPIES = ("copy", "blocking copy", "pageable copy")


def _places(findings: Findings, kind: str) -> Counter[str]:
    """Return the counts per step, by place."""
    counted: Counter[str] = Counter()
    for count, times in findings.counts.items():
        if count.phase == "steady" and count.kind == kind:
            counted[count.place.name + ASIDE * count.place.aside] += times / STEPS
    return counted


def _kernels(findings: Findings) -> float:
    return (
        sum(times for count, times in findings.counts.items() if (count.phase, count.kind) == ("steady", "kernel"))
        / STEPS
    )


def _bytes(findings: Findings, direction: str) -> float:
    found = findings.bytes.items()
    return sum(n for one, n in found if one.phase == "steady" and one.kind in _COPIES and one.what == direction) / STEPS


def cost(ranks: list[Findings], unhooked: list[Findings]) -> Cost:
    """Return the costs of the rank with most. ``unhooked``: of fewer ranks, where each island is a job of its own."""
    pairs = [(findings, unhooked[k % len(unhooked)]) for k, findings in enumerate(ranks)]
    places = {}
    for name, kind in _KINDS.items():
        most: Counter[str] = Counter()
        for findings, base in pairs:
            most |= _places(findings, kind) - _places(base, kind)
        places[name] = dict(most)
    return Cost(
        max(_kernels(one) - _kernels(base) for one, base in pairs),
        max(_bytes(one, "to the device") - _bytes(base, "to the device") for one, base in pairs),
        max(_bytes(one, "from the device") - _bytes(base, "from the device") for one, base in pairs),
        **places,
    )
