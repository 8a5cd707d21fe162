"""``previous`` through whatever can happen to a step, against last received gradients kept in plain NumPy."""

import itertools
import logging

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lossy.config import LossyConfig
from megatron_lossy.recovery.previous import Previous
from tests.rules import gradients, reduce
from tests.test_transport import group_in_memory

pytestmark = pytest.mark.shows("`previous` through skipped, repeated and rejected steps")

SIZE, SHARD = 3, 8
CONFIG = LossyConfig(p_grad=0.5, grad_recovery="previous", loss_unit="packet", packet_bytes=12)

#: Fates of the gradients of an iteration. Only the first two happen in a run without gaps.
EVENTS = ("exchanged", "repeated", "all-reduced", "none", "rejected")


class Run:
    """Iterations at one of the ranks, by the package and by the reference."""

    def __init__(self, gapless, scales=None):
        self.group = group_in_memory(CONFIG, rank=1, size=SIZE, shard=SHARD)
        self.gapless, self.scales = gapless, scales
        self.last = np.zeros(SIZE * SHARD, dtype=np.float32)

    def iteration(self, step, event):
        gradient = np.random.default_rng(step).normal(size=SIZE * SHARD).astype(np.float32)
        scale = torch.tensor(float(self.scales[step])) if self.scales else None
        received = self.last
        for _ in range({"repeated": 2, "exchanged": 1, "rejected": 1}.get(event, 0)):
            arrived = self.group.delivery("grad", step).sent
            elements = np.concatenate([np.repeat(row, 3)[:SHARD] for row in arrived])
            received = np.where(elements, gradient, self.last)
            buffer = torch.from_numpy(gradient * (float(scale) if self.scales else 1))
            reduce(self.group, 0, buffer, buffer[:SHARD], step, lambda: None, False, lambda: scale, self.gapless)
            np.testing.assert_array_equal(buffer.numpy(), received * (float(scale) if self.scales else 1))
        if event == "all-reduced":
            received = gradient
            buffer = torch.from_numpy(gradient * (float(scale) if self.scales else 1))
            x = gradients(step, buffer, buffer, scale, gapless=self.gapless)
            self.group.note_all_reduce(0, step, lambda: x)
        if event not in ("rejected", "none"):
            self.last = received
        self.group.finish_step(step, event not in ("rejected", "none"))


@settings(deadline=None)
@given(
    st.lists(st.sampled_from(EVENTS), min_size=2, max_size=8),
    st.booleans(),
    st.lists(st.sampled_from([2.0, 64.0]), min_size=8, max_size=8),
)
def test_the_last_received_gradient_whatever_happens(events, scaled, scales):
    """Skipped, all-reduced, repeated and rejected steps; with a loss scale that changes, and without one."""
    run = Run(gapless=False, scales=scales if scaled else None)
    for step, event in enumerate(events):
        run.iteration(step, event)


@settings(deadline=None)
@given(st.lists(st.sampled_from(EVENTS[:3]), min_size=2, max_size=8))
def test_less_is_kept_if_the_next_step_is_known(events):
    run = Run(gapless=True)
    for step, event in enumerate(events):
        run.iteration(step, event)
        [rule] = run.group.grads
        lost = run.group.delivery("grad", step + 1).lost_there(rule.units)
        kept = sum(part.numel() for parts in rule.state_dict()["kept"][step + 1][1] for part in parts[-1:])
        assert kept <= 3 * lost.mask.sum() and rule._received is None and rule._pending is None


@pytest.mark.parametrize("event", ["none", "rejected"])
def test_a_broken_promise_is_said_and_gives_zeros(event, caplog, monkeypatch):
    monkeypatch.setattr(Previous, "_warned", False)
    run = Run(gapless=True)
    run.iteration(0, "exchanged")
    with caplog.at_level(logging.WARNING):
        run.iteration(1, event)
    [record] = caplog.records
    assert "step 1 was not used, against expectation" in record.message
    run.last[:] = 0
    run.iteration(2, "exchanged")


def test_state_is_restored_in_either_mode():
    for first, second in itertools.product((True, False), repeat=2):
        run, again = Run(first), Run(second)
        for step in range(3):
            run.iteration(step, "exchanged")
        again.group.load_state_dict(run.group.state_dict(), torch.device("cpu"))
        again.last = run.last
        for step in range(3, 6):
            again.iteration(step, "exchanged")
        assert (again.group.grads[0].state_dict()["received"] is None) == second


def test_other_losses_than_foreseen_are_an_error():
    run = Run(gapless=True)
    run.iteration(0, "exchanged")
    other = group_in_memory(LossyConfig(**{**vars(CONFIG), "loss_seed": 5}), rank=1, size=SIZE, shard=SHARD)
    other.load_state_dict(run.group.state_dict(), torch.device("cpu"))
    assert (other.delivery("grad", 1).sent != run.group.delivery("grad", 1).sent).any()
    buffer = torch.ones(SIZE * SHARD)
    with pytest.raises(RuntimeError, match="step 1 loses other units than was foreseen"):
        reduce(other, 0, buffer, buffer[:SHARD], 1, lambda: None)


def test_saved_places_hold_no_more_than_themselves():
    """Each is a tensor of its own: a view of both columns would be saved whole, twice."""
    run = Run(gapless=True)
    run.iteration(0, "exchanged")
    [(_, saved)] = [kept for step, kept in run.group.grads[0].state_dict()["kept"].items() if step == 1]
    for part in itertools.chain(*saved):
        assert part.untyped_storage().nbytes() == part.numel() * part.element_size()
        assert part.dtype in (torch.int32, torch.float32)
