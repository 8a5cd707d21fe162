"""Exchanges on streams of their own on the pretended device; and that a slip in them is noticed."""

import pytest

from tests.ranks import RankFailed, run_ranks

from .build import CannotBuild, library
from .exchanges import Case, cases, compare
from .mutations import MUTATIONS

pytestmark = pytest.mark.shows("exchanges on side streams of a pretended device: the CPU's bits, no race", device=False)

#: Places where the host waits, and why.
WAITS = {"synchronisation at fetch.py:wait": "error feedback learns which packets mattered, two steps later"}


@pytest.fixture(scope="module", autouse=True)
def _compiled():
    try:
        library()
    except CannotBuild as error:
        pytest.skip(str(error))


def _found(some, mutation=None):
    return run_ranks(compare, 2, 2, some, mutation, grouped=False, timeout=240)


def test_exchanges_give_the_bits_of_the_cpu():
    for found in _found(list(cases())):
        assert found.differ == []
        assert found.faults == []
        assert set(found.stalls) <= set(WAITS)


def test_exchanges_over_udp_give_the_bits_of_the_cpu():
    import torch

    some = [Case(rule, "packet", "udp", None, torch.float32) for rule in ("zero", "previous")]
    for found in _found(some):
        assert found.differ == []
        assert found.faults == []
        assert found.stalls == []


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_slip_is_noticed(mutation):
    """Each detector finds what it is for; a slip that nothing notices fails here."""
    import torch

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
