"""Properties of an accelerator, simulated on a CPU: copies that wait, HPU's graphs."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_lossy.base.exchange import Delivery, Exchange, Lost, Stream, cut
from megatron_lossy.base.registry import GRAD_RECOVERIES
from megatron_lossy.recovery import MaskedRows, base, rows
from tests.rules import gradients, send

pytestmark = pytest.mark.shows("HPU's graphs stay (simulated)")
copies_to_cuda = pytest.mark.shows("copies to CUDA come from page-locked memory and do not wait")

RULES = ("renormalize", "renormalize-remote", "previous", "zero")
SIZE, SHARD = 3, 9


@copies_to_cuda
def test_copies_to_cuda_come_from_page_locked_memory(monkeypatch):
    """From pageable memory, more than 64 KiB would wait for the backward pass that is queued."""
    asked = []

    def page_locked(tensor):
        def to(device, non_blocking=False):
            asked.append((tensor.clone(), device.type, non_blocking))
            return tensor

        return SimpleNamespace(to=to)

    monkeypatch.setattr(rows, "page_locked", page_locked)
    array = np.arange(100_000, dtype=np.int32)
    rows.to_device(array, torch.device("cuda", 1))
    [(copied, device, non_blocking)] = asked
    assert device == "cuda" and non_blocking and np.array_equal(copied.numpy(), array)
    assert rows.to_device(array, "cpu").data_ptr() == array.ctypes.data and len(asked) == 1


@copies_to_cuda
@pytest.mark.cuda
def test_a_copy_to_cuda_does_not_wait():
    """Queued work delays it, and the host goes on at once."""
    busy = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(busy):
        torch.cuda._sleep(2_000_000_000)
        copied = rows.to_device(np.arange(1_000_000, dtype=np.int32), torch.device("cuda"))
        assert not busy.query()
    torch.cuda.synchronize()
    assert copied.sum().item() == 499999500000


class Graph(TorchDispatchMode):
    """Return the graph that a compiling device sees: operations, shapes, and numbers that are not in tensors."""

    def __init__(self):
        super().__init__()
        self.nodes, self.elements = [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        described = [
            tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else leaf for leaf in tree_leaves((args, kwargs))
        ]
        self.nodes.append((str(func), described))
        read = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves((args, kwargs)) if torch.is_tensor(leaf)}
        for leaf in tree_leaves(result):
            if torch.is_tensor(leaf) and leaf.untyped_storage().data_ptr() not in read and leaf.is_floating_point():
                self.elements += leaf.numel()
        return result


@pytest.mark.parametrize("unit", ["shard", "packet"])
@pytest.mark.parametrize("rule", RULES)
def test_masked_rows_make_one_graph_whatever_is_lost(rule, unit, monkeypatch):
    """Also with one unit per bucket, where the scale is one number."""
    monkeypatch.setattr(base, "rows_for", lambda: MaskedRows)
    [units], total = cut([SHARD], [4], unit, 8)
    graphs = []
    for seed in range(4):
        arrived = np.random.default_rng(seed).random((1, SIZE, total)) > 0.5
        arrived[0, 1] = True
        delivery = Delivery(Exchange("grad", Stream(), 0), range(SIZE), [1], arrived, [units], arrived[0])
        recovery = GRAD_RECOVERIES.load(rule)(units, 1)
        buffer, shard = torch.ones(SIZE * SHARD), torch.ones(SHARD)
        with Graph() as graph:
            kept = send(recovery, buffer, delivery)
            recovery.after(shard, delivery, kept, gradients())
        graphs.append(graph.nodes)
    assert graphs[0] and all(graph == graphs[0] for graph in graphs)


def test_masked_rows_hold_one_copy_of_a_bucket_and_of_a_shard():
    [units], total = cut([1024], [4], "packet", 64)
    lost = Lost(np.random.default_rng(0).random((16, total)) < 0.5)
    buffer = torch.ones(16 * 1024)
    with Graph() as graph:
        MaskedRows.zero_(buffer, units, lost)
    assert graph.elements == 0
    with Graph() as graph:
        saved = MaskedRows.take(buffer, units, lost)
    assert graph.elements == buffer.numel()
    with Graph() as graph:
        MaskedRows.put_(buffer, units, lost, saved)
    shards = [shape for name, shape in graph.nodes if "where" in name]
    assert len(shards) == 16 and graph.elements == buffer.numel()  # one after the other
