"""Units are chosen on their device as plain loops and NumPy choose them.

That nobody waits for the device is another test's matter (tests/impostor).
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lossy.base.exchange import Lost
from megatron_lossy.mechanisms.priority.choosing import Protection, choose_top_, keys_of, quantile
from megatron_lossy.recovery import IndexedRows, MaskedRows
from megatron_lossy.recovery.feedback import ErrorFeedback
from tests.rules import gradients, required, send, spared
from tests.test_recovery_feedback import delivery_of, units_of

pytestmark = pytest.mark.shows("priorities chosen on an accelerator are those of NumPy")

#: Equal ones, and some that are not finite.
SIZES = st.sampled_from([0.0, 1.0, 1.0, 2.0, 3.5, 1e-30, np.inf, np.nan])


@settings(deadline=None)
@given(st.integers(1, 4), st.data(), st.floats(0, 1))
def test_top(rows, data, fraction):
    count = data.draw(st.integers(1, 9))
    sizes = np.array(data.draw(st.lists(SIZES, min_size=rows * count, max_size=rows * count)), dtype=np.float32)
    sizes = sizes.reshape(rows, count)
    out = data.draw(st.none() | st.integers(0, rows - 1))
    # Of equal ones the first; a sort is stable.
    finite = sorted(
        (place for place in np.ndindex(sizes.shape) if place[0] != out and np.isfinite(sizes[place])),
        key=lambda place: -sizes[place],
    )
    crossing = (rows - (out is not None)) * count
    expected = ~np.isfinite(sizes)
    expected[[] if out is None else [out]] = False
    for place in finite[: int(fraction * crossing + 0.5)]:
        expected[place] = True
    keys = keys_of(torch.from_numpy(sizes), out)
    chosen = keys == -1
    choose_top_(chosen, keys, int(fraction * crossing + 0.5))
    np.testing.assert_array_equal(chosen.numpy(), expected)


@settings(deadline=None, max_examples=300)
@given(st.lists(SIZES | st.floats(0, 2.0**20, width=32), min_size=1, max_size=40), st.floats(0, 1))
def test_quantile(values, share):
    values = np.array(values, dtype=np.float32)
    finite = values[np.isfinite(values)]
    expected = np.quantile(finite, share) if len(finite) else np.inf
    assert quantile(torch.from_numpy(values), share).item() == np.float32(expected)


def test_a_restart_forgets_a_choice_under_way():
    units = units_of(4, 2)
    rule = spared(ErrorFeedback(units, 0), Protection("packet-mean", 0.25))
    send(rule, torch.ones(8), delivery_of(0, 2, 0, units, np.array([[True, True], [False, False]])))
    rule.restart()
    rule.finish_step(0, True)
    assert rule.final is None and not rule.state_dict()


def test_copies_at_other_ranks_always_arrive():
    units, none = units_of(4, 2), np.zeros((2, 2), dtype=bool)
    rule = spared(ErrorFeedback(units, 0), Protection("none"))
    rule.share(np.array([[True, True], [True, False]]))
    send(rule, torch.ones(8), delivery_of(0, 2, 0, units, none))
    assert rule.final.mask.tolist() == [[True, True], [False, True]]  # what it owns itself crosses nowhere


def test_over_a_network_the_choice_is_on_its_way():
    units = units_of(4, 2)
    rule = required(ErrorFeedback(units, 0), Protection("packet-mean", 0.5))
    chosen = rule.choose(gradients(0, torch.tensor([1.0, 1, 2, 2, 3, 3, 4, 4])))
    rule.reported(0, np.array([[False, False], [True, False]]))
    rule.finish_step(0, True)
    assert chosen.wait().tolist() == [[False, False], [False, True]]
    assert (rule.told.high, rule.told.left, rule.told.residual) == (1, 1, 6.0)


def test_lost_units_that_are_spared_stay():
    """Also infinities: a product would not keep them."""
    units = units_of(5, 2)
    spared_ = torch.tensor([[True, False, False], [False, True, True]])
    lost = Lost(np.array([[True, True, False], [True, True, True]]), spared_)
    for rows in (IndexedRows, MaskedRows):
        buffer = torch.tensor([torch.inf, 1, 2, 3, 4, 5, 6, torch.inf, -torch.inf, 9])
        rows.zero_(buffer, units, lost)
        assert buffer.tolist() == [torch.inf, 1, 0, 0, 4, 0, 0, torch.inf, -torch.inf, 9]
