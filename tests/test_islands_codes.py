"""Exchanges between islands in whole numbers of 8 bits: against plain NumPy, and what owners keep of rounded means."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_lossy.config import LossyConfig
from megatron_lossy.mechanisms.islands.form import bytes_sent
from megatron_lossy.mechanisms.islands.mean import InMemory
from scripts.stability import STREAM, rounds_of
from tests.reference import block_payload, block_values

pytestmark = pytest.mark.shows("islands in 8 bits: values, rests of means")

ISLANDS = {"islands": 3, "sync_method": "parameters", "sync_dtype": "int8", "wire_block": 32}


def flags(**more):
    return LossyConfig(**ISLANDS | more)


def rounded(values, block, unit):
    """Return the form of ``values`` [n] that arrives, unit by unit."""
    parts = [values[first : first + unit] for first in range(0, len(values), unit)]
    return np.concatenate([block_values(block_payload(part, 8, block), len(part), 8, block) for part in parts])


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
        assert mean.owed is None and mean.arrived is None


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


def test_bytes_of_an_exchange():
    """7/8 of the parameters go to others and come back, with a scale for each block, or for the rest of a shard."""
    for islands, size, bytes_of_a_shard in ((2, 4096, 2048 + 2 * 64), (3, 300, 100 + 2 * 4)):
        config = flags(islands=islands)
        count = rounds_of(config, torch.randn(islands, size)).after_iteration(0)
        assert count == size and bytes_sent(config, count) == pytest.approx(2 * (islands - 1) * bytes_of_a_shard)
