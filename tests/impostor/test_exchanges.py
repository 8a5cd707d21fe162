"""Exchanges on streams of their own on the pretended device; and that a slip in them is noticed."""

import math

import pytest
import torch

from tests.ranks import RankFailed, run_ranks

from .exchanges import Case, cases, compare, kernels, sequences
from .mutations import MUTATIONS, rows_by_index

pytestmark = [
    pytest.mark.shows("exchanges on side streams, pretended: the CPU's bits, no race", device=False),
    pytest.mark.slow,
]

#: Places where the host waits, and why.
WAITS = {
    "synchronisation at mechanisms/priority/choosing.py:settle": "error feedback learns which packets mattered, two steps later"
}


def _found(some, mutation=None):
    return run_ranks(compare, 2, 2, some, mutation, grouped=False, timeout=240)


def test_exchanges_give_the_bits_of_the_cpu():
    chosen = [
        Case(rule, "packet", wire, None, torch.float32, "element-quantile:0.3")
        for rule in ("zero", "error-feedback")
        for wire in ("torch", "pieces")
    ]
    for found in _found([*cases(), *chosen]):
        assert found.differ == []
        assert found.faults == []
        assert set(found.stalls) <= set(WAITS)


def test_exchanges_over_udp_give_the_bits_of_the_cpu():
    some = [Case(rule, "packet", "udp", None, torch.float32) for rule in ("zero", "previous")]
    for found in _found(some):
        assert found.differ == []
        assert found.faults == []
        assert found.stalls == []


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_slip_is_noticed(mutation):
    """Each detector finds what it is for; a slip that nothing notices fails here."""
    wire = "udp" if mutation == "stage_not_ready" else None
    some = [
        Case(rule, "packet", wire or one, None, torch.float32)
        for rule in ("renormalize", "previous")
        for one in (("torch", "pieces") if wire is None else ("udp",))
    ]
    try:
        found = _found(some, mutation)
    except RankFailed:
        return  # it does not even run
    assert any(one.differ or one.faults or one.stalls for one in found)


#: Kernels that come with the number of units: error feedback halves an interval until it has the largest units.
BY_HALVES = {"error-feedback": 2}


@pytest.mark.shows("kernels do not follow the number of ranks or packets", device=False)
def test_kernels_do_not_follow_ranks_or_packets():
    """Lost packets take the same kernels whatever their number. A sum in pieces adds one per source, and nothing else."""
    some = [case for case in cases() if case.unit == "packet" and case.scale is None]
    few = run_ranks(kernels, 2, 2, some, 64, grouped=False, timeout=240)[0]
    for size, packet_bytes in ((4, 64), (8, 64), (2, 16)):
        found = run_ranks(kernels, size, size, some, packet_bytes, grouped=False, timeout=240)[0]
        doublings = math.log2(size / 2 * 64 / packet_bytes)
        for case, now, before in zip(some, found, few):
            sources = (size - 2) * (case.wire == "pieces")
            allowed = 1 + BY_HALVES.get(case.rule, 0) * doublings + sources
            assert abs(now - before) <= allowed, (case, size, packet_bytes)


@pytest.mark.shows("on Gaudi every step is the same graph, whatever is lost", device=False)
def test_every_step_is_the_same_graph():
    """Operators, shapes and Python numbers are equal in all steps and under other seeds of the losses."""
    some = [case for case in cases() if case.wire == "torch"]
    for found in run_ranks(sequences, 2, 2, some, [1, 2, 3], grouped=False, timeout=240):
        assert [len(one) for one in found] == [1] * len(some)


@pytest.mark.shows("on Gaudi every step is the same graph, whatever is lost", device=False)
def test_graphs_that_follow_the_loss_are_noticed():
    some = [case for case in cases() if case.wire == "torch" and case.unit == "packet" and case.rule == "renormalize"]
    for found in run_ranks(sequences, 2, 2, some, [1, 2, 3], rows_by_index, grouped=False, timeout=240):
        assert min(len(one) for one in found) > 1
