"""Exchanges between islands in whole numbers of 8 bits: against plain NumPy, between threads, and what owners keep of rounded means."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from megatron_lossy.config import LossyConfig
from megatron_lossy.lab.theory.islands import STREAM, Row, rounds_of, simulate
from megatron_lossy.mechanisms.islands.between_ranks import BetweenRanks
from megatron_lossy.mechanisms.islands.datagrams import IslandLink
from megatron_lossy.mechanisms.islands.mean import InMemory
from megatron_lossy.mechanisms.islands.shard import Shard
from megatron_lossy.mechanisms.islands.subset import Subset
from megatron_lossy.transport.udp.engine import Engine
from megatron_lossy.transport.udp.process import settings_of
from tests.reference import block_payload, block_scale, block_values
from tests.test_islands_exchange import AtTable, Table

pytestmark = pytest.mark.shows("islands in 8 bits: values, rests of means, apart as together")

ISLANDS = {"islands": 3, "sync_method": "parameters", "sync_dtype": "int8", "wire_block": 32}


def flags(**more):
    return LossyConfig(**ISLANDS | more)


def rounded(values, block, unit):
    """Of ``values`` [n] what arrives, unit by unit."""
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


def test_of_many_means_no_more_than_one_rounding_is_missing():
    crossing, random = InMemory(flags(), STREAM, None), torch.Generator().manual_seed(0)
    exact, crossed, scale, count = np.zeros(96), np.zeros(96), 0.0, 50
    for step in range(count):
        sent = 1 + 0.01 * torch.randn(3, 96, generator=random)
        mean = crossing.begin(step, sent).wait()
        exact += sent.double().mean(dim=0).numpy()
        crossed += mean.values.double().numpy()
        scale = max(scale, *(float(block_scale(block, 127)) for block in mean.values.numpy().reshape(3, 32)))
    assert np.abs(crossed - exact).max() < 0.51 * scale + 1e-5
    assert np.abs(crossed / count - exact / count).max() < scale / count


def test_the_noise_of_rounding():
    """An island is within half a step of what it sent. The mean over islands moves by what owners keep, which does not add up."""
    config, size = flags(islands=4, sync_delay=0), 4 * 4096
    start = 1 + 0.05 * torch.randn(4, size, generator=torch.Generator().manual_seed(0))
    weights, distances = start.clone(), []
    rounds, rows = rounds_of(config, weights)
    for step in range(40):
        rounds.after_iteration(step, rows)
        distances.append((weights.mean(dim=0) - start.mean(dim=0)).square().mean().sqrt().item())
    step = (1.2 / 127) / np.sqrt(12)  # the rms of one rounding, of blocks whose largest is about 1.1
    assert 0.5 * step < distances[0] < 1.5 * step
    assert max(distances) < 1.5 * step
    spread = (weights - weights.mean(dim=0)).square().mean().sqrt()
    assert spread < 1.5 * step


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"delay_correction": "ema"},
        {"sync_delay": 1, "delay_correction": "mixing:0.5"},
        {"sync_delay": 25, "delay_correction": "smith", "sync_fraction": 0.1},
    ],
    ids=str,
)
def test_steps_smaller_than_the_rounding_are_made(how):
    """Of weights of 1, whose codes are 1/127 apart, by 1/2000 in an iteration."""

    def drift(step, weights):
        weights += 5e-4

    before = torch.ones(3, 200) + 0.01 * torch.randn(3, 200, generator=torch.Generator().manual_seed(1))
    after = simulate(flags(**how), before.clone(), 400, drift)
    assert (after - before).mean().item() / 0.2 == pytest.approx(1, abs=0.05)


def test_what_was_not_averaged_leaves_the_rest_as_it_is():
    """A mean of values that are not finite, or of nothing, is lost, and nothing of it is kept."""
    crossing, sent = InMemory(flags(), STREAM, None), torch.randn(3, 96)
    crossing.begin(0, sent.clone()).wait()
    before = {island: row.clone() for island, row in crossing.rest.state_dict().items()}
    crossing.begin(1, torch.full((3, 96), torch.nan)).wait()
    after = crossing.rest.state_dict()
    assert all(torch.equal(after[island], row) and row.any() for island, row in before.items())


CASES = {
    "all at once": {},
    "several under way": {"sync_delay": 5, "delay_correction": "smith"},
    "few, late": {"sync_fraction": 0.3, "sync_delay": 2, "sync_block": 16},
    "partition, lost": {
        "sync_fraction": 0.3,
        "sync_delay": 4,
        "sync_subset": "partition",
        "p_sync": 0.3,
        "loss_unit": "packet",
        "packet_bytes": 70,
        "delay_correction": "smith",
    },
    "ema, bernoulli": {"sync_fraction": 0.4, "sync_delay": 3, "sync_subset": "bernoulli", "delay_correction": "ema"},
}


def apart(config, weights, steps, make_carriers, resume_at=None):
    """``weights`` [M, size] after ``steps`` iterations of islands on a thread each. They are saved and go on at ``resume_at``."""

    def island(number):
        row, generator = weights[number : number + 1], torch.Generator().manual_seed(number)
        subset = Subset(config, row.shape[1], 1, STREAM)
        carriers = make_carriers(number)

        def begin():
            crossing = BetweenRanks(config, STREAM, number, carriers, None, lambda _: None)
            return Shard(config, subset, [Row(row[0])], crossing, 100, row.device)

        shard = begin()
        for step in range(steps):
            if step == resume_at:
                state = shard.rounds.state_dict()
                shard = begin()
                shard.rounds.load_state_dict(state)
            row += 0.1 * torch.randn(row.shape, generator=generator)
            shard.exchange(step)
        for flight in shard.rounds.flights:
            flight.pending.wait()

    with ThreadPoolExecutor(len(weights)) as pool:
        list(pool.map(island, range(len(weights))))
    return weights


def together(config, weights, steps):
    generators = [torch.Generator().manual_seed(number) for number in range(len(weights))]

    def local(step, rows):
        for row, generator in zip(rows, generators, strict=True):
            row += 0.1 * torch.randn((1, len(row)), generator=generator)[0]

    return simulate(config, weights, steps, local)


def start():
    return torch.randn(3, 400, generator=torch.Generator().manual_seed(7))


@pytest.mark.parametrize("resume_at", [None, 7])
@pytest.mark.parametrize("case", CASES)
def test_islands_apart_are_those_of_one_process(case, resume_at):
    """Bit for bit, although their exchanges are under way on several threads, and also if they are saved and go on."""
    config = flags(**CASES[case])
    tables = [Table(3) for _ in range(max(1, min(4, config.rounds_under_way)))]
    found = apart(config, start(), 14, lambda number: [AtTable(table, number, 0, False) for table in tables], resume_at)
    assert torch.equal(found, together(config, start(), 14))


def test_islands_apart_over_udp():
    """Bit for bit what islands of one process have, as long as the network loses nothing."""
    config = flags(sync_fraction=0.5, sync_delay=1, packet_bytes=102, loss_unit="packet", transport="udp")
    store, ready = torch.distributed.HashStore(), threading.Barrier(3)
    most = Subset(config, 400, 1, STREAM).most

    def carriers(number):
        ready.wait(timeout=20)
        link = IslandLink(
            config, "codes", number, 3, store, most, 20.0, engine=Engine(settings_of(config), "127.0.0.1")
        )
        return [link]

    found = apart(config, start(), 10, carriers)
    alike = flags(sync_fraction=0.5, sync_delay=1, packet_bytes=102, loss_unit="packet")
    assert torch.equal(found, together(alike, start(), 10))


def test_bytes_of_an_exchange():
    """7/8 of the parameters go to others and come back, with a scale for each block, or for the rest of a shard."""
    for islands, size, bytes_of_a_shard in ((2, 4096, 2048 + 2 * 64), (3, 300, 100 + 2 * 4)):
        config = flags(islands=islands)
        subset, rows = Subset(config, size, 1, STREAM), [Row(row) for row in torch.randn(islands, size)]
        shard = Shard(config, subset, rows, InMemory(config, STREAM, None), 10, torch.device("cpu"))
        assert shard.exchange(0) == pytest.approx(2 * (islands - 1) * bytes_of_a_shard)
