"""Nothing waits for the device where the host has the answer, or nobody needs it yet, counted on a CPU.

The host waits for values that Python reads, and for shapes that depend on values.
"""

from __future__ import annotations

import collections
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_lossy.channel.corruption import make_corruption
from megatron_lossy.channel.corruption.applied import Errors
from megatron_lossy.config import LossyConfig
from megatron_lossy.mechanisms.islands.mean import Mean
from megatron_lossy.mechanisms.islands.monitor import IslandMonitor
from megatron_lossy.mechanisms.islands.ranks import RankIslands
from megatron_lossy.mechanisms.islands.vector import Places
from tests.rules import reduce
from tests.test_streams import Graph
from tests.test_transport import group_in_memory

pytestmark = pytest.mark.shows("nothing waits for the device where the host has the answer (counted)")

#: How Python reads a tensor's values.
_READS = ("__bool__", "__float__", "__int__", "__index__", "item", "numpy", "tolist")
#: Their results are as long as something is often true.
_COUNTED = ("aten.masked_select", "aten.nonzero", "aten.unique")


class Waits(TorchDispatchMode):
    """A context in which ``found`` counts what waits, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.found: collections.Counter[str] = collections.Counter()
        self._originals = {}

    def __enter__(self):
        for name in _READS:
            self._originals[name] = original = getattr(torch.Tensor, name)
            setattr(torch.Tensor, name, self._counting(name, original))
        return super().__enter__()

    def __exit__(self, *error):
        for name, original in self._originals.items():
            setattr(torch.Tensor, name, original)
        return super().__exit__(*error)

    def _counting(self, name, original):
        def read(tensor, *args, **kwargs):
            self.found[name] += 1
            return original(tensor, *args, **kwargs)

        return read

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func)
        indices = args[1] if name.startswith(("aten.index.", "aten.index_put")) else ()
        if name.startswith(_COUNTED) or any(one is not None and one.dtype == torch.bool for one in indices):
            self.found[name] += 1
        return func(*args, **(kwargs or {}))


def test_the_count_sees_what_waits():
    values = torch.arange(4.0)
    with Waits() as waits:
        float(values[0]), values.tolist(), values[values > 1], values.nonzero()
        values.where(values > 1, 0.0).sum()
    assert sum(waits.found.values()) == 4, waits.found


def test_where_an_exchange_reads_and_writes_is_looked_up_on_the_host():
    with Waits() as waits:
        places = Places(np.array([0, 2, 3]), 4, 15, torch.device("cpu"))
        parts = list(places.parts([(0, 6), (6, 7), (7, 15)]))
        places.write(torch.zeros(15), places.read(torch.arange(15.0)))
    assert len(parts) == 3 and not waits.found, waits.found


def mean_with_loss(seed: int, rate: float) -> tuple[torch.Tensor, Mean]:
    random = torch.Generator().manual_seed(seed)
    arrived = torch.rand(1, 1000, generator=random) >= rate
    return torch.randn(1, 1000, generator=random), Mean(torch.randn(1000, generator=random), arrived)


def test_the_distance_to_a_mean_is_read_when_somebody_asks():
    islands = SimpleNamespace(monitor=IslandMonitor())
    used = [mean_with_loss(seed, 0.4) for seed in range(3)]
    with Waits() as waits:
        for sent, mean in used:
            RankIslands._note(islands, 0.5, sent, mean)
    assert not waits.found, waits.found
    distances = [(mean.values - sent[0])[mean.arrived[0]] for sent, mean in used]
    squares, elements = (sum(sums) for sums in zip(*((float(one.dot(one)), one.numel()) for one in distances)))
    metrics = islands.monitor.metrics()
    assert metrics["sync deviation"] == pytest.approx(squares / elements, rel=1e-5) and metrics["sync wait"] == 0.5


def test_the_distance_to_a_mean_is_one_graph_whatever_is_lost():
    graphs = []
    for seed, rate in enumerate((0.1, 0.5, 0.9, 1.0)):
        sent, mean = mean_with_loss(seed, rate)
        with Graph() as graph:
            RankIslands._note(SimpleNamespace(monitor=IslandMonitor()), 0.5, sent, mean)
        graphs.append(graph.nodes)
    assert graphs[0] and all(graph == graphs[0] for graph in graphs)


def test_the_loss_scale_of_a_shard_is_read_if_an_error_hits_it():
    config = LossyConfig(grad_error="gaussian:0.1", grad_error_rate=0.3)
    group = group_in_memory(config, rank=1)
    group.errors = Errors(make_corruption(config), 1, [np.array([[0, 8]])], 32)
    scale, hits = torch.full((), 1024.0), 0
    for step in range(40):
        buffer, shard = torch.ones(24), torch.ones(8)
        with Waits() as waits:
            reduce(group, 0, buffer, shard, step, lambda: None, loss_scale=lambda: scale).wait()
        [reduction] = group.errors.take(step)
        assert waits.found["__float__"] == len(reduction.hits)
        hits += len(reduction.hits)
    assert 0 < hits < 40
