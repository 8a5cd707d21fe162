"""The exchange between islands of one process each, against that of islands in one process: all of them on threads here."""

from __future__ import annotations

import threading
import types
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lossy.base.errors import UsageError
from megatron_lossy.base.exchange import Stream
from megatron_lossy.config import LossyConfig
from megatron_lossy.lab.virtual import island_mean as means_in_memory
from megatron_lossy.mechanisms.islands import between_ranks as means_of_ranks
from megatron_lossy.mechanisms.islands import vector as vectors
from megatron_lossy.mechanisms.islands.between_ranks import RankExchanges
from megatron_lossy.mechanisms.islands.flags import SYNC_PHASES
from megatron_lossy.mechanisms.islands.mean import Form
from megatron_lossy.mechanisms.islands.vector import Places, Segment, Vector, shard_vector
from megatron_lossy.transport.base import draw

pytestmark = pytest.mark.shows(
    "what a network loses between islands is neither added nor used", "the weights of an island as one vector"
)

STREAM = Stream("islands", expert_rank=1, stage=2)
TWO = {"islands": 2, "sync_method": "parameters"}


class Table:
    """The place where islands meet: each puts down its message, and takes those for it."""

    def __init__(self, islands: int) -> None:
        self.put: list = [None] * islands
        self.barrier = threading.Barrier(islands)

    def exchange(self, island: int, sent: torch.Tensor) -> list[torch.Tensor]:
        self.put[island] = sent.clone()
        self.barrier.wait(timeout=60)
        everyone = [one.clone() for one in self.put]
        self.barrier.wait(timeout=60)
        return everyone


class AtTable:
    """A carrier. ``forgets``: whether it loses the second unit of what island 0 sends to others, and says so."""

    def __init__(self, table: Table, island: int, units: int, forgets: bool) -> None:
        self.table, self.island, self.units, self.observes = table, island, units, forgets
        self.senders, self.place = range(len(table.put)), island

    def arrived(self) -> np.ndarray | None:
        if not self.observes:
            return None
        result = np.ones((len(self.table.put), self.units + 3), dtype=bool)  # with units that only padding would have
        if self.island:
            result[0, 1] = False
        return result

    def scatter(self, pieces):
        return torch.stack([one[self.island] for one in self.table.exchange(self.island, pieces)]), self.arrived()

    def gather(self, own):
        return torch.stack(self.table.exchange(self.island, own)), self.arrived()

    def end(self):
        pass


def cross(config: LossyConfig, sent: torch.Tensor, step: int, units: int = 0, forgets: bool = False):
    """Return every island's mean of ``sent`` [M, k], and the deliveries that it got."""
    table, told = Table(len(sent)), [[] for _ in sent]

    def one(island: int):
        carrier = AtTable(table, island, units, forgets)
        crossing = RankExchanges(config, STREAM, island, lambda exchange: carrier, None, told[island].append)
        mean = crossing.begin(step, sent[island : island + 1]).wait()
        crossing.close()
        return mean

    with ThreadPoolExecutor(len(sent)) as pool:
        return list(pool.map(one, range(len(sent)))), told


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int8"])
def test_pieces_are_what_arrives_or_blank(dtype):
    random, form = torch.Generator().manual_seed(0), Form(LossyConfig(**TWO, sync_dtype=dtype))
    for islands, count in ((1, 3), (2, 4), (3, 10), (4, 2)):
        for value in (1.0, torch.inf):
            own = torch.randn(count, generator=random)
            own[count // 2] = value
            pieces = means_of_ranks.Pieces(own, islands, form)
            rows = form.decode(pieces.rows, pieces.units)
            assert pieces.present == (value == 1.0) and rows.shape == (islands, pieces.shard)
            assert torch.equal(rows.view(-1)[:count], own) if pieces.present else rows.isnan().all()


def test_of_what_leaves_a_device_is_told_later(monkeypatch):
    config, sent = LossyConfig(islands=2, sync_method="parameters", p_sync=0.5), torch.ones(2, 8)
    sent[1, 3] = torch.nan
    expected, told_at_once = cross(config, sent, 0)
    monkeypatch.setattr(means_of_ranks, "is_here", lambda vector: False)
    means, told = cross(config, sent, 0)
    table = Table(2)
    later = []
    crossings = [
        RankExchanges(config, STREAM, island, lambda _, seat=seat: seat, None, later.append)
        for island, seat in enumerate([AtTable(table, island, 0, False) for island in (0, 1)])
    ]
    waiting = [crossing.begin(0, sent[island : island + 1]) for island, crossing in enumerate(crossings)]
    assert not later
    for crossing in crossings:
        crossing.tell()
        crossing.tell()
    assert [one.exchange.phase for one in later] == list(SYNC_PHASES) * 2
    for island, (one, mean) in enumerate(zip(waiting, expected, strict=True)):
        for other in (one.wait(), means[island]):
            assert torch.equal(here(other), here(mean)) and torch.equal(
                other.values[here(mean)], mean.values[here(mean)]
            )
        for number, delivery in enumerate(told_at_once[island]):
            for other in (told[island][number], later[2 * island + number]):
                assert np.array_equal(other.arrived, delivery.arrived)
    assert len(later) == 4
    for crossing in crossings:
        crossing.close()


def here(mean, island: int = 0) -> torch.Tensor:
    """Return bool[k]: where ``mean`` arrived."""
    return torch.ones_like(mean.values, dtype=torch.bool) if mean.arrived is None else mean.arrived[island]


@pytest.mark.parametrize("islands", [2, 3, 5])
@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"sync_dtype": "bf16"},
        {"sync_dtype": "int8", "wire_block": 32},
        {"sync_dtype": "int8", "wire_block": 32, "p_sync": 0.4, "loss_unit": "packet", "packet_bytes": 34},
        {"p_sync": 0.4},
        {"p_sync": 0.4, "loss_unit": "packet", "packet_bytes": 64},
        {
            "loss_model": ("gilbert-elliott",),
            "p_sync": 0.3,
            "loss_unit": "packet",
            "packet_bytes": 12,
            "sync_dtype": "bf16",
        },
    ],
    ids=str,
)
@pytest.mark.parametrize("broken", [None, 1])
def test_as_islands_in_one_process(islands, flags, broken):
    """To the bit, also where one of them has a value that is not finite: it neither sends nor gets anything."""
    config = LossyConfig(islands=islands, sync_method="parameters", **flags)
    random = torch.Generator().manual_seed(islands)
    for step in range(4):
        sent = torch.randn(islands, 101, generator=random)
        if broken is not None:
            sent[broken, 7] = torch.inf
        together = means_in_memory.InMemory(config, STREAM, None)
        expected = together.begin(step, together_sent := sent.clone()).wait()
        means, told = cross(config, own_sent := sent.clone(), step)
        if broken is None:
            assert torch.equal(own_sent, together_sent)
        for island, mean in enumerate(means):
            arrived = here(mean)
            assert torch.equal(arrived, here(expected, island))
            assert torch.equal(mean.values[arrived], expected.values[arrived])
            if broken is None:
                for mine, all_of_them in zip(told[island], together.deliveries, strict=True):
                    assert mine.exchange == all_of_them.exchange and list(mine.receivers) == [island]
                    assert np.array_equal(mine.arrived[0], all_of_them.arrived[island])
        if broken is not None:
            assert not means[broken].arrived.any()


def test_what_a_network_loses_is_neither_added_nor_used():
    config = LossyConfig(islands=3, sync_method="parameters", transport="udp", packet_bytes=16)
    sent = torch.arange(36.0).view(3, 12) ** 2  # pieces of 4 elements: a unit each
    means, told = cross(config, sent, 0, 1, True)
    assert all(here(mean).all() for mean in means)  # the second unit is one of padding alone
    config = LossyConfig(islands=3, sync_method="parameters", transport="udp", packet_bytes=8)
    means, told = cross(config, sent, 0, 2, True)  # two units each
    for island, mean in enumerate(means):
        from_first = [2, 3] if island else []  # of the first owner's mean the others get no second unit
        lost = [place for place in range(12) if not here(mean)[place]]
        assert lost == from_first
        reduced, gathered = told[island]
        assert (
            reduced.arrived[0].tolist() == gathered.arrived[0].tolist() == [[True, not island], [True] * 2, [True] * 2]
        )
    # Owners 1 and 2 average the second unit of what the others sent.
    expected = sent.mean(dim=0)
    for owner in (1, 2):
        places = slice(4 * owner + 2, 4 * owner + 4)
        expected[places] = sent[1:, places].mean(dim=0)
    assert torch.allclose(means[0].values, expected, rtol=1e-6)


@pytest.mark.parametrize("gathers", ["lossy", "lossless"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_mean_to_which_nobody_sent_is_lost(dtype, gathers, monkeypatch):
    """Its zeros would be taken for weights. Nothing of a unit reaches owner 1 here, not even its own piece."""
    networks_between = means_in_memory.networks_between

    def drawn(network, exchange, members, receivers, units):
        arrived = draw(network, exchange, members, receivers, units).copy()
        if exchange.phase == "sync-reduce":
            arrived[np.array(receivers) == 1, :, 1] = False
        return arrived

    def networks(*args):
        found = networks_between(*args)
        found["sync-gather"].lossless = gathers == "lossless"
        return found

    for module in (means_in_memory, means_of_ranks):
        monkeypatch.setattr(module, "draw", drawn)
        monkeypatch.setattr(module, "networks_between", networks)
    lost = {"p_sync": 0.3, "loss_unit": "packet", "packet_bytes": 16, "sync_dtype": dtype}
    config = LossyConfig(islands=3, sync_method="parameters", **lost)
    sent, width = torch.randn(3, 99, generator=torch.Generator().manual_seed(0)), 8 if dtype == "bf16" else 4
    together = means_in_memory.InMemory(config, STREAM, None)
    expected = together.begin(0, sent).wait()
    lost = slice(33 + width, 33 + 2 * width)
    assert not expected.arrived[:, lost].any()
    if gathers == "lossless":
        assert expected.arrived[:, :33].all() and not together.deliveries[1].arrived[:, 1, 1].any()
    means, _ = cross(config, sent, 0)
    for island, one in enumerate(means):
        arrived = here(one, 0)
        assert torch.equal(arrived, expected.arrived[island]) and arrived.any()
        assert torch.equal(one.values[arrived], expected.values[arrived])


def test_a_trace_must_last_for_the_exchanges_between_islands(tmp_path):
    trace = tmp_path / "short.npz"
    np.savez(trace, **dict.fromkeys(SYNC_PHASES, np.ones((3, 2, 2, 1), dtype=bool)))
    models = ("bernoulli", "bernoulli", "trace", "trace")
    config = LossyConfig(islands=2, sync_method="parameters", loss_model=models, trace=str(trace))
    means_in_memory.networks_between(config, Stream("islands"), 3)
    with pytest.raises(UsageError, match="has 3 steps in phase sync-reduce, the run needs 4"):
        means_in_memory.networks_between(config, Stream("islands"), 4)


CPU = torch.device("cpu")


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 40)), min_size=1, max_size=5), st.integers(1, 12), st.data()
)
def test_blocks_are_read_and_written_wherever_segments_end(lengths, block, data):
    size = sum(padding + length for padding, length in lengths)
    expected = np.zeros(size, dtype=np.float32)
    rounded_too = data.draw(st.booleans())
    segments, inside, start = [], np.zeros(size, dtype=bool), 0
    for padding, length in lengths:
        start += padding
        main = torch.randn(length)
        segments.append(Segment(start, main, main.bfloat16() if rounded_too else None))
        expected[start : start + length] = main.numpy()
        inside[start : start + length] = True
        start += length
    vector = Vector(segments, size, CPU)
    np.testing.assert_array_equal(vector.read(None), expected)
    for _ in range(3):
        blocks = data.draw(st.sets(st.integers(0, (size - 1) // block), min_size=1))
        elements = np.array([one for number in sorted(blocks) for one in range(number * block, (number + 1) * block)])
        elements = elements[elements < size]
        places = Places(np.array(sorted(blocks)), block, size, CPU)
        np.testing.assert_array_equal(vector.read(places), expected[elements])
        values = torch.randn(len(places))
        vector.write(places, values)
        expected[elements] = np.where(inside[elements], values.numpy(), 0)
        np.testing.assert_array_equal(vector.read(None), expected)
        plain = torch.arange(size)
        np.testing.assert_array_equal(places.read(plain), elements)
        places.write(plain, -plain[elements])
        np.testing.assert_array_equal(plain, np.where(np.isin(np.arange(size), elements), -1, 1) * np.arange(size))
    if rounded_too:
        for one in segments:
            assert torch.equal(one.rounded, one.main.bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_shard_has_its_part_of_weights_that_lie_across_its_ends(dtype, monkeypatch):
    """Two buckets of three shards; in the first one weight lies in all of them, and the last elements are padding."""
    sizes, starts, weights, mains = (12, 6), ([(0, 2), (2, 9)], [(0, 3), (3, 3)]), [], []
    for size, own in zip(sizes, starts, strict=True):
        main = torch.randn(size)
        main[sum(own[-1]) :] = 0
        mains.append(main)
        weights.append(main.clone() if dtype == torch.float32 else main.bfloat16())
    buckets = [types.SimpleNamespace(param_data=kept, number=number) for number, kept in enumerate(weights)]

    def pieces(optimizers, bucket, own, flag):
        found = [(start, mains[bucket.number][start : start + length]) for start, length in starts[bucket.number]]
        return found[::-1]

    monkeypatch.setattr(vectors, "main_pieces", pieces)
    before = [main.clone() for main in mains]
    for shard in range(3):
        vector = shard_vector([], buckets, weights, shard, 3)
        expected = torch.cat([main.view(3, -1)[shard] for main in before])
        assert torch.equal(vector.read(None), expected)
        vector.write(None, expected + 1)
    written = weights if dtype == torch.float32 else mains
    for kept, after, main, own in zip(weights, written, before, starts, strict=True):
        end = sum(own[-1])
        assert torch.equal(after[:end], main[:end] + 1)
        assert torch.equal(kept[:end], after[:end].to(dtype))
