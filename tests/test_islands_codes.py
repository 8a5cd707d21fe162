"""Exchanges between islands in whole numbers of 8 or 4 bits: against plain NumPy, and what is kept of rounding."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lossy.config import LossyConfig
from megatron_lossy.lab.virtual.island_mean import InMemory
from megatron_lossy.mechanisms.islands.mean import bytes_sent
from tests.reference import block_payload, block_values
from tests.vectors import STREAM, rounds_of

pytestmark = pytest.mark.shows(
    "islands in 8 bits: values, rests of means", "DiLoCo in 8 and 4 bits, in fragments, late: values, rests"
)

ISLANDS = {"islands": 3, "sync_method": "parameters", "sync_dtype": "int8", "wire_block": 32}


def flags(**more):
    return LossyConfig(**ISLANDS | more)


def rounded(values, block, unit, bits=8):
    """Return the form of ``values`` [n] that arrives, unit by unit."""
    parts = [values[first : first + unit] for first in range(0, len(values), unit)]
    return np.concatenate([block_values(block_payload(part, bits, block), len(part), bits, block) for part in parts])


@pytest.mark.parametrize("packets", [0, 1, 2])
def test_exchanges_against_the_reference(packets):
    """Every half is rounded in blocks of its units, and r goes into the next mean."""
    more = {"loss_unit": "packet", "packet_bytes": 34 * packets} if packets else {}
    random = torch.Generator().manual_seed(packets)
    crossing, rest, shard = InMemory(flags(**more), STREAM, None), np.zeros(210, np.float32), 67
    unit = 32 * packets or shard
    for step in range(3):
        values = torch.randn(3, 200, generator=random)
        padded = np.zeros((3, 3 * shard), np.float32)
        padded[:, :200] = values
        arrived = np.stack(
            [np.concatenate([rounded(piece, 32, unit) for piece in row.reshape(3, shard)]) for row in padded]
        )
        mean = crossing.begin(step, values).wait()
        np.testing.assert_array_equal(values, arrived[:, :200])
        total = (arrived[0] + arrived[1] + arrived[2]) / np.float32(3) + rest[: 3 * shard]
        expected = np.concatenate([rounded(piece, 32, unit) for piece in total.reshape(3, shard)])
        rest[: 3 * shard] = total - expected
        np.testing.assert_array_equal(mean.values, expected[:200])
        assert mean.arrived is None


def test_the_noise_of_rounding():
    """An island is within half a step of what it sent. The mean over islands moves by what owners keep, which does not add up."""
    config, size = flags(islands=4, sync_delay=0), 4 * 4096
    start = 1 + 0.05 * torch.randn(4, size, generator=torch.Generator().manual_seed(0))
    weights, distances = start.clone(), []
    rounds = rounds_of(config, weights)
    for step in range(40):
        rounds.after_iteration(step)
        distances.append((weights.mean(dim=0) - start.mean(dim=0)).square().mean().sqrt().item())
    step = (1.2 / 127) / np.sqrt(12)  # the rms of one rounding, of blocks whose largest is about 1.1
    assert 0.5 * step < distances[0] < 1.5 * step
    assert max(distances) < 1.5 * step
    spread = (weights - weights.mean(dim=0)).square().mean().sqrt()
    assert spread < 1.5 * step


def test_what_was_not_averaged_leaves_the_rest_as_it_is():
    """A mean of values that are not finite, or of nothing, is lost, and nothing of it is kept."""
    crossing, sent = InMemory(flags(), STREAM, None), torch.randn(3, 96)
    crossing.begin(0, sent.clone()).wait()
    before = {island: row.clone() for island, row in crossing.rest.state_dict().items()}
    crossing.begin(1, torch.full((3, 96), torch.nan)).wait()
    after = crossing.rest.state_dict()
    assert all(torch.equal(after[island], row) and row.any() for island, row in before.items())


OUTER = {"sync_method": "diloco", "sync_dtype": "int4"}


@settings(deadline=None, max_examples=30)
@given(
    st.sampled_from([8, 4]),
    st.integers(2, 4),
    st.sampled_from([1, 2, 3]),
    st.sampled_from([1, 2]),
    st.sampled_from([(0.7, 0.9), (1.0, 0.0)]),
    st.data(),
)
def test_outer_steps_against_the_reference(bits, islands, parts, interval, outer, data):
    """Distances v - w of a fragment cross in codes, means with the owners' rests come back, and w keeps the rest of v - w."""
    delay = data.draw(st.integers(0, parts * interval - 1))
    config = flags(
        **OUTER | {"sync_dtype": f"int{bits}", "islands": islands, "sync_interval": interval, "sync_delay": delay},
        sync_fraction=1 / parts,
        outer_optimizer=outer,
    )
    random, size, (lr, momentum) = np.random.default_rng(parts), 210, outer
    weights = torch.from_numpy(random.normal(size=size).astype(np.float32)).repeat(islands, 1)
    rounds, w, v = rounds_of(config, weights), weights.numpy().copy(), weights[0].numpy().copy()
    b, rest, under_way = np.zeros_like(v), np.zeros_like(v), {}
    for step in range(3 * parts * interval):
        progress = 0.1 * random.normal(size=w.shape).astype(np.float32)
        weights += torch.from_numpy(progress)
        w += progress
        rounds.after_iteration(step)
        number, left = divmod(step + 1, interval)
        if not left:
            places = rounds.subset.places(number - 1, weights.device)
            at = slice(None) if places is None else places.read(torch.arange(size)).numpy()
            shard = -(-len(v[at]) // islands)
            sent = np.stack([rounded(row, 32, shard, bits) for row in v[at] - w[:, at]])
            total = sum(sent[1:], sent[0].copy()) / np.float32(islands) + rest[at]
            mean = rounded(total, 32, shard, bits)
            rest[at] = total - mean
            under_way[step + delay] = at, sent, mean
        if step in under_way:
            at, sent, mean = under_way.pop(step)
            b[at] = momentum * b[at] + mean
            after = v[at] - lr * (mean + momentum * b[at])
            w[:, at] = after + (w[:, at] - (v[at] - sent))
            v[at] = after
        for ours, reference in ((weights, w), (rounds.rule.outer, v[None]), (rounds.rule.buffer, b[None])):
            np.testing.assert_allclose(ours, np.broadcast_to(reference, ours.shape), atol=2e-6)
            assert reference is w or all(torch.equal(row, ours[0]) for row in ours)
        # From here the same to the bit: a code may not depend on the order of operations.
        w[:], v[:], b[:] = weights, rounds.rule.outer[0], rounds.rule.buffer[0]


@settings(deadline=None, max_examples=30)
@given(st.sampled_from([8, 4]), st.integers(2, 4), st.sampled_from([1, 2]), st.integers(0, 1), st.data())
def test_outer_steps_with_losses_against_the_reference(bits, islands, parts, delay, data):
    """After each block of 32 codes crosses the outer weight of one of them, in float32, whose mean takes its place."""
    delay, p, packet = delay * (parts - 1), data.draw(st.sampled_from([0.1, 0.5])), data.draw(st.integers(1, 2))
    bytes_of_block = 2 + 32 * bits // 8 + 4
    config = flags(
        **OUTER | {"sync_dtype": f"int{bits}", "islands": islands, "sync_delay": delay, "sync_fraction": 1 / parts},
        p_sync=p,
        loss_unit="packet",
        packet_bytes=packet * bytes_of_block,
    )
    random, size, (lr, momentum) = np.random.default_rng(parts), 210, config.outer_optimizer
    weights = torch.from_numpy(random.normal(size=size).astype(np.float32)).repeat(islands, 1)
    rounds = rounds_of(config, weights)
    rest, under_way = np.zeros(size, np.float32), {}
    w = weights.numpy().copy()
    v, b = w.copy(), np.zeros_like(w)
    for step in range(40):
        progress = 0.1 * random.normal(size=w.shape).astype(np.float32)
        weights += torch.from_numpy(progress)
        w += progress
        rounds.after_iteration(step)
        places = rounds.subset.places(step, weights.device)
        at = np.arange(size) if places is None else places.read(torch.arange(size)).numpy()
        reduced, gathered = (delivery.arrived for delivery in rounds.crossing.deliveries)
        distances = v[:, at] - w[:, at]
        sent, mean = np.zeros_like(distances), np.zeros(len(at), np.float32)
        came, outer = np.zeros(sent.shape, bool), []
        blocks = -(-len(at) // 32)
        shard = -(-blocks // islands)
        for block in range(blocks):
            owner, unit, here = (
                block // shard,
                block % shard // packet,
                slice(32 * block, min(32 * block + 32, len(at))),
            )
            sent[:, here] = [rounded(row, 32, 32, bits) for row in distances[:, here]]
            senders = np.flatnonzero(reduced[owner, :, unit])
            whole = (
                sum(sent[senders[1:], here], sent[senders[0], here].copy()) / np.float32(len(senders)) + rest[at[here]]
            )
            mean[here] = rounded(whole, 32, 32, bits)
            rest[at[here]] = whole - mean[here]
            came[:, here] = gathered[:, owner, unit][:, None]
            turn = 32 * block + step // parts % 32
            if turn < len(at):
                theirs = sum(v[senders[1:], at[turn]], v[senders[0], at[turn]].copy()) / np.float32(len(senders))
                outer.append((turn, v[:, at[turn]].copy(), theirs))
        under_way[step + delay] = at, sent, mean, came, outer, v[:, at].copy()
        if step in under_way:
            at, sent, mean, came, outer, then = under_way.pop(step)
            moved = momentum * b[:, at] + mean
            after = v[:, at] - np.float32(lr) * (mean + momentum * moved)
            b[:, at] = np.where(came, moved, b[:, at])
            w[:, at] = np.where(came, after + (w[:, at] - (then - sent)), w[:, at])
            v[:, at] = np.where(came, after, v[:, at])
            for turn, ours, theirs in outer:
                off = np.where(came[:, turn], theirs - ours, 0)
                w[:, at[turn]] += off
                v[:, at[turn]] += off
        for ours, reference in ((weights, w), (rounds.rule.outer, v), (rounds.rule.buffer, b)):
            np.testing.assert_allclose(ours, reference, atol=4e-6)
        w[:], v[:], b[:] = weights, rounds.rule.outer, rounds.rule.buffer


@pytest.mark.parametrize("more", [{}, {"sync_fraction": 0.5, "sync_delay": 1}, {"wire_block": 128}], ids=str)
def test_outer_weights_that_a_lost_mean_left_apart_meet_again(more):
    """Within as many visits of an element as the outer weights of one in so many cross."""
    config = flags(**OUTER, p_sync=1e-9, **more)
    rounds = rounds_of(config, weights := torch.randn(1, 500).repeat(3, 1))
    rounds.rule.outer[1] += 1.0
    weights[1] += 1.0
    for step in range(32 * config.parts + config.sync_delay):
        assert not torch.allclose(rounds.rule.outer[1], rounds.rule.outer[0], atol=0.3)
        rounds.after_iteration(step)
    for row in (*rounds.rule.outer[1:], *weights):
        assert torch.allclose(row, rounds.rule.outer[0], atol=1e-5)


@pytest.mark.parametrize("dtype", ["int8", "int4"])
@pytest.mark.parametrize("more", [{}, {"sync_fraction": 0.5, "sync_interval": 2, "sync_delay": 3}], ids=str)
def test_progress_smaller_than_the_rounding_crosses_in_the_end(dtype, more):
    """Blocks have 32 elements, of which one moves 1,000 or 50 times as much."""
    config = flags(**OUTER | {"sync_dtype": dtype, "outer_optimizer": (1.0, 0.0)}, **more)
    progress = torch.full((192,), 0.001 if dtype == "int8" else 0.02)
    progress[::32] = 1.0

    rounds = rounds_of(config, weights := torch.zeros(3, 192))
    for step in range(400):
        weights += progress
        rounds.after_iteration(step)
    crossed = rounds.rule.outer[:, 1:32].mean(dim=1)
    assert crossed.tolist() == pytest.approx([400 * progress[1].item()] * 3, rel=0.08)


def test_bytes_of_an_exchange():
    """7/8 of the parameters go to others and come back, with a scale for each block, or for the rest of a shard."""
    for islands, size, bytes_of_a_shard in ((2, 4096, 2048 + 2 * 64), (3, 300, 100 + 2 * 4)):
        config = flags(islands=islands)
        count = rounds_of(config, torch.randn(islands, size)).after_iteration(0)
        assert count == size and bytes_sent(config, count) == pytest.approx(2 * (islands - 1) * bytes_of_a_shard)
