"""Cutting into units, changing units in place; expectations of the rules; ``previous`` against plain NumPy in any order of steps."""

import itertools
import logging

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lossy.base.errors import UsageError
from megatron_lossy.base.exchange import Exchange, Lost, Stream, cut
from megatron_lossy.base.registry import GRAD_RECOVERIES
from megatron_lossy.config import LossyConfig
from megatron_lossy.recovery import IndexedRows, MaskedRows
from megatron_lossy.recovery.previous import Previous
from megatron_lossy.transport import Network
from megatron_lossy.transport.base import CollectiveWire
from tests.rules import gradients, reduce, send
from tests.test_transport import group_in_memory

pytestmark = pytest.mark.shows(
    "units are cut, scaled, removed and put back in place",
    "expectations of the rules against closed forms",
    "`previous` through skipped, repeated and rejected steps",
)

shards = st.lists(st.integers(1, 40), min_size=1, max_size=4)


@given(shards=shards, packet=st.integers(4, 70), itemsize=st.sampled_from([2, 4]))
def test_packets_cover_every_shard_once(shards, packet, itemsize):
    cuts, total = cut(shards, [itemsize] * len(shards), "packet", packet)
    assert cuts[0].first == 0
    for before, after in itertools.pairwise(cuts):
        assert after.first == before.first + before.count
    assert total == cuts[-1].first + cuts[-1].count
    for units, shard in zip(cuts, shards):
        assert units.elements * itemsize <= packet
        assert units.whole * units.elements + units.tail == shard
        assert units.count == units.whole + (units.tail > 0)
        assert units.count == -(-shard * itemsize // (packet // itemsize * itemsize))


def test_buckets_and_shards():
    assert [u.first for u in cut([5, 6], [4, 2], "bucket", 1)[0]] == [0, 1]
    assert [u.first for u in cut([5, 6], [4, 2], "shard", 1)[0]] == [0, 0]
    assert cut([5, 6], [4, 2], "bucket", 1)[1] == 2 and cut([5, 6], [4, 2], "shard", 1)[1] == 1
    with pytest.raises(UsageError, match="--packet-bytes 3: must hold at least one element of 4 bytes"):
        cut([5], [4], "packet", 3)


@st.composite
def buckets(draw):
    """A bucket inside a larger storage, how it is cut, and what of it is lost."""
    size, shard = draw(st.integers(1, 4)), draw(st.integers(1, 30))
    unit = draw(st.sampled_from(["shard", "packet"]))
    [units], _ = cut([shard], [4], unit, 4 * draw(st.integers(1, 12)))
    lost = np.array(draw(st.lists(st.booleans(), min_size=size * units.count, max_size=size * units.count)))
    return size, units, lost.reshape(size, units.count)


def elements(size, units, lost):
    """bool[N * shard]: the elements of the lost units, the slow way."""
    mask = np.zeros((size, units.shard), dtype=bool)
    for shard in range(size):
        for unit in range(units.count):
            if lost[shard, unit]:
                mask[shard, unit * units.elements : (unit + 1) * units.elements] = True
    return mask.ravel()


@settings(deadline=None)
@given(buckets(), st.sampled_from([IndexedRows, MaskedRows]), st.sampled_from([torch.float32, torch.bfloat16]))
def test_rows(bucket, rows, dtype):
    size, units, lost = bucket
    mask = torch.from_numpy(elements(size, units, lost))
    storage = torch.arange(1.0, size * units.shard + 8).to(dtype)
    storage[5] = float("inf")
    before = storage.clone()
    buffer = storage[3 : 3 + size * units.shard]
    saved = rows.take(buffer, units, Lost(lost))
    assert torch.equal(storage, before)
    rows.zero_(buffer, units, Lost(lost))
    assert torch.equal(buffer, torch.where(mask, torch.zeros((), dtype=dtype), before[3 : 3 + mask.numel()]))
    assert torch.equal(storage[:3], before[:3]) and torch.equal(storage[3 + mask.numel() :], before[3 + mask.numel() :])
    buffer.add_(1)
    changed = buffer.clone()
    rows.put_(buffer, units, Lost(lost), saved)
    assert torch.equal(buffer, torch.where(mask, before[3 : 3 + mask.numel()], changed))


@settings(deadline=None)
@given(buckets())
def test_indexed_rows_keep_only_what_was_lost(bucket):
    size, units, lost = bucket
    buffer = torch.ones(size * units.shard)
    saved = IndexedRows.take(buffer, units, Lost(lost))
    kept = sum(part.numel() for parts in saved for part in parts if part.is_floating_point())
    assert kept == elements(size, units, lost).sum()


@settings(deadline=None)
@given(buckets(), st.data(), st.sampled_from([IndexedRows, MaskedRows]))
def test_scale(bucket, data, rows):
    _, units, _ = bucket
    factors = np.array(
        data.draw(st.lists(st.sampled_from([1.0, 2.0, 4 / 3]), min_size=units.count, max_size=units.count))
    )
    shard = torch.arange(1.0, units.shard + 1)
    expected = shard.numpy() * np.repeat(factors.astype(np.float32), units.elements)[: units.shard]
    rows.scale_(shard, units, factors)
    np.testing.assert_array_equal(shard.numpy(), expected)


def test_what_is_taken_holds_no_more_memory_than_it_has_values():
    """Saving a tensor saves all of its storage."""
    [units], _ = cut([30], [4], "packet", 28)
    lost = Lost(np.arange(2 * units.count).reshape(2, -1) % 3 == 0)
    for parts in IndexedRows.take(torch.arange(60.0), units, lost):
        assert parts
        for part in parts:
            assert part.untyped_storage().nbytes() == part.numel() * part.itemsize


# --- expectations over many draws, against closed forms (docs/semantics.md) ------------------------------------------
# Fixed gradients; thousands of independent units, each a draw of the losses. The mean over units has a standard error;
# every comparison allows six of them (false alarm 2e-9 each).


UNITS = 60_000
FOLLOWING = Exchange("grad", Stream(), 1)


def means(size, p, rule, lossy_self=False, averaged=False):
    """Mean and standard error over units of the weight that each rank's gradient gets at owner 0.

    ``averaged``: the collective divides by the number of ranks, and not the program.
    """
    config = LossyConfig(p_grad=p, lossy_self=lossy_self, loss_unit="packet", packet_bytes=4)
    network = Network(config, "grad", size)
    [units], _ = cut([UNITS], [4], "packet", 4)
    ends = [CollectiveWire({"grad": network}, Stream(), range(size), rank, {"grad": [units]}) for rank in range(size)]
    weights = []
    for source in range(size):  # the gradient 1 at one rank shows its weight
        buffers, sent = [], []
        for rank in range(size):
            end = ends[rank]
            delivery = end.foresee(Exchange("grad", Stream(), 0))
            x = gradients(coming=lambda end=end: end.foresee(FOLLOWING).lost_there(units), averaged=averaged)
            buffer = torch.full((size * UNITS,), float(rank == source))
            recovery = GRAD_RECOVERIES.load(rule)(units, rank)
            sent.append((recovery, delivery, send(recovery, buffer, delivery, x), x))
            buffers.append(buffer)
        shard = torch.stack([buffer[:UNITS] for buffer in buffers]).sum(dim=0) / (size if averaged else 1)
        recovery, delivery, kept, x = sent[0]
        recovery.after(shard, delivery, kept, x)
        weights.append(shard.numpy() / (1 if averaged else size))
    weights = np.array(weights, dtype=np.float64)
    return weights.mean(axis=1), weights.std(axis=1) / np.sqrt(UNITS), weights


def close(mean, error, expected):
    assert abs(mean - expected) <= 6 * error + 1e-6, (mean, expected, error)


def expected_weights(rule, p, size, lossy_self):
    """Return the mean weight of the owner's gradient, and of each other one (docs/theory.md)."""
    if rule == "zero":
        return 1 / size, (1 - p) / size
    if lossy_self:
        return ((1 - p**size) / size,) * 2
    if rule == "renormalize":
        own = (1 - p**size) / (size * (1 - p))
        return own, (1 - own) / max(1, size - 1)
    alone = p ** (size - 1)
    return (1 - alone) / size + alone, (1 - alone) / size


@pytest.mark.parametrize(("size", "p"), [(1, 0.5), (2, 0.2), (4, 0.4), (7, 0.3)])
@pytest.mark.parametrize(
    ("rule", "how"),
    [
        ("renormalize", {}),
        ("renormalize", {"lossy_self": True}),
        ("renormalize-remote", {}),
        ("renormalize-remote", {"averaged": True}),
        ("zero", {}),
    ],
)
def test_weights_are_those_of_the_closed_forms(rule, how, size, p):
    """Those of docs/theory.md. Averages of arrived values have them in every unit."""
    mean, error, weights = means(size, p, rule, **how)
    lossy_self = how.get("lossy_self", False)
    own, others = expected_weights(rule, p, size, lossy_self)
    close(mean[0], error[0], own)
    for other in range(1, size):
        close(mean[other], error[other], others)
    if rule != "zero":
        total = weights.sum(axis=0)
        nobody = total < 0.5
        np.testing.assert_allclose(total[~nobody], 1, atol=1e-5)
        missing = p**size if lossy_self else 0.0
        assert abs(nobody.mean() - missing) <= 6 * np.sqrt(missing * (1 - missing) / UNITS)


def test_the_weights_of_the_page():
    """Those of docs/semantics.md, for four workers at 40 %."""
    assert expected_weights("renormalize", 0.4, 4, False) == pytest.approx((0.406, 0.198), abs=5e-4)


def test_renormalize_remote_keeps_out_only_what_lost_something():
    """If everything arrives, the own gradient goes with the others: the sum is then Megatron's, to the last bit."""
    size, network = 3, Network(LossyConfig(p_grad=0.4, loss_unit="packet", packet_bytes=4), "grad", 3)
    [units], _ = cut([200], [4], "packet", 4)
    end = CollectiveWire({"grad": network}, Stream(), range(size), 1, {"grad": [units]})
    delivery = end.foresee(Exchange("grad", Stream(), 0))
    complete = delivery.survivors(units) == size
    buffer = torch.ones(size * 200)
    kept_out, *_ = send(GRAD_RECOVERIES.load("renormalize-remote")(units, 1), buffer, delivery)
    assert complete.any() and not complete.all()
    np.testing.assert_array_equal(kept_out.mask[0], ~complete)
    np.testing.assert_array_equal(buffer[200:400].numpy(), complete)


# --- `previous` through whatever can happen to a step -----------------------------------------------------------------


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
