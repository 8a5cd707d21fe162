"""The XOR code: every pattern against a slow count, how often it fails, and bad layouts."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lossy.base.coding import AdaptiveCode, Layout, failure
from megatron_lossy.base.errors import UsageError

pytestmark = pytest.mark.shows(
    "XOR parity: its groups, and how often it fails", "the code that follows the loss", device=False
)


@st.composite
def layouts(draw):
    block = draw(st.integers(1, 12))
    return Layout(draw(st.integers(0, 40)), block, draw(st.integers(1, block)))


def groups(layout):
    """[packets of each parity], written out."""
    result = []
    for first in range(0, layout.packets, layout.block):
        block = list(range(first, min(first + layout.block, layout.packets)))
        short = len(block) < layout.block
        count = max(1, int(np.ceil(layout.parity * len(block) / layout.block))) if short else layout.parity
        result += [block[j::count] for j in range(count)]
    return result


@settings(deadline=None)
@given(layouts())
def test_every_packet_is_in_one_group(layout):
    expected = groups(layout)
    assert layout.parities == len(expected)
    for parity, members in enumerate(expected):
        assert (layout.group[members] == parity).all()


@settings(deadline=None)
@given(layouts(), st.floats(0, 0.6), st.integers(0, 999))
def test_a_group_brings_one_packet_back(layout, p, seed):
    random = np.random.default_rng(seed)
    lost, lost_parity = random.random(layout.packets) < p, random.random(layout.parities) < p
    residual = layout.residual(lost, lost_parity)
    for parity, members in enumerate(groups(layout)):
        missing = int(lost[members].sum()) + lost_parity[parity]
        assert (residual[members] == (lost[members] if missing > 1 else False)).all()


@pytest.mark.parametrize(("block", "parity"), [(10, 0), (0, 1), (-1, -1), (2**16, 10), (1000, 256), (10, 11)])
def test_bad_layouts(block, parity):
    with pytest.raises(UsageError, match=f"{block} {parity}: needs 1 <= C <= B, C at most 255"):
        Layout(10, block, parity)


@pytest.mark.parametrize(
    ("p", "packets", "block", "parity", "bound"),
    [
        (0.02, 4096, 100, 10, 0.01),
        (0.05, 4096, 100, 34, 0.01),
        (0.01, 41, 100, 50, 0.0),
        (0.012, 4096, 100, 0, 0.01),
        (0.2, 30, 100, 100, 0.0),
        (0.2, 300, 100, 250, 0.0),
        (0.3, 600, 100, 150, 0.05),
    ],
)
def test_how_often_a_code_fails(p, packets, block, parity, bound):
    """Against 4,000 messages: within the normal approximation of the sum (0.02) and four standard deviations."""
    random, messages = np.random.default_rng(4), 4000
    lost = random.random((messages, packets)) < p
    if parity > block:  # the others are copies of packets, in their order again and again
        copies = parity // block + (np.arange(packets) % block < parity % block)
        for number in range(int(copies.max())):
            lost &= (random.random((messages, packets)) < p) | (number >= copies)
    elif parity:
        layout = Layout(packets, block, parity)
        lost = layout.residual(lost, random.random((messages, layout.parities)) < p)
    share = (lost.sum(axis=1) > np.floor(bound * packets)).mean()
    expected = failure(p, packets, block, parity, bound)
    assert abs(share - expected) < 0.02 + 4 * np.sqrt(expected * (1 - expected) / messages), (share, expected)


def test_the_code_follows_the_loss():
    code = AdaptiveCode(bound=0.01)
    assert code.parity(4096) == 0
    chosen = []
    for lost in (0, 10, 80, 200, 400):
        for _ in range(32):
            code.report(lost, 4096)
        chosen.append(code.parity(4096))
    assert chosen == sorted(chosen) and chosen[:2] == [0, 0] and 0 < chosen[2] < chosen[3] and chosen[-1] == 50
    for parity, lost in zip(chosen[2:4], (80, 200), strict=True):
        assert failure(code_loss(lost), 4096, 100, parity, 0.01) <= 1e-3
        assert failure(code_loss(lost), 4096, 100, parity - 1, 0.01) > 1e-3
    for _ in range(32):
        code.report(0, 4096)
    assert code.parity(4096) == 0


def code_loss(lost):
    code = AdaptiveCode()
    for _ in range(32):
        code.report(lost, 4096)
    assert lost / 4096 < code.loss < lost / 4096 * 1.1
    return code.loss


@pytest.mark.parametrize("reports", [[(1, 10)], [(3, 20)], [(0, 7), (2, 5)], [(400, 4096)]])
def test_the_loss_is_where_two_standard_errors_reach_what_was_reported(reports):
    """Wilson's bound, by its definition."""
    code = AdaptiveCode()
    for lost, packets in reports:
        code.report(lost, packets)
    lost, packets = np.sum(reports, axis=0)
    assert code.loss > lost / packets
    assert (code.loss - lost / packets) ** 2 == pytest.approx(2**2 * code.loss * (1 - code.loss) / packets)


@settings(deadline=None)
@given(st.floats(0, 0.5), st.integers(1, 5000), st.floats(0, 0.2))
def test_more_parity_fails_less_often(p, packets, bound):
    chances = [failure(p, packets, 100, parity, bound) for parity in (0, 5, 10, 20, 50, 100, 101, 150, 200, 255)]
    assert all(0 <= chance <= 1 for chance in chances)
    slack = 0.02 if int(bound * packets) else 1e-9  # the sum over few groups is not quite normal
    assert all(more <= less + slack for less, more in itertools.pairwise(chances))
