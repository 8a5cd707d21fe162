"""What only an accelerator could show, simulated on a CPU: memory that two streams use, copies that wait, HPU's graphs."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_lossy.base.exchange import Delivery, Exchange, Lost, Stream, cut
from megatron_lossy.base.registry import GRAD_RECOVERIES
from megatron_lossy.config import LossyConfig
from megatron_lossy.recovery import MaskedRows, base, copies
from megatron_lossy.transport import Network
from megatron_lossy.transport.drawn import CollectiveWire
from tests.rules import gradients, send
from tests.test_transport import group_in_memory

pytestmark = pytest.mark.shows("memory that streams share is announced, and HPU's graphs stay (simulated)")
copies_to_cuda = pytest.mark.shows("copies to CUDA come from page-locked memory and do not wait")

RULES = ("renormalize", "renormalize-remote", "previous", "zero")
SIZE, SHARD = 3, 9


class Streams(TorchDispatchMode):
    """Every tensor belongs to the stream on which it was made; reading it on another one must have been announced.

    A caching allocator would otherwise give its memory out again while the other stream still reads it.
    """

    def __init__(self):
        super().__init__()
        self.current = "default"
        self.made = {}  # address: stream, and the storage itself, so that no address comes twice
        self.announced = set()
        self.unannounced = []

    def used_here(self, tensors):
        self.announced |= {(tensor.untyped_storage().data_ptr(), self.current) for tensor in tensors}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        read = [leaf.untyped_storage() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        for storage in read:
            stream, _ = self.made.get(storage.data_ptr(), (self.current, None))
            if stream != self.current and (storage.data_ptr(), self.current) not in self.announced:
                self.unannounced.append(f"{func} on {self.current} reads what was made on {stream}")
        addresses = {storage.data_ptr() for storage in read}
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage().data_ptr() not in addresses:
                self.made[leaf.untyped_storage().data_ptr()] = (self.current, leaf.untyped_storage())
        return result


class Deferred:
    """The handle of a collective that does nothing before it is waited for, as gloo's reduce-scatter copies."""

    def __init__(self, act):
        self.wait = act


def exchange(streams, rule, unit, gapless):
    """Steps that begin on streams of their own, as overlapped ones do, and are waited for on the default one."""
    config = LossyConfig(p_grad=0.5, p_param=0.5, grad_recovery=rule, loss_unit=unit, packet_bytes=8)
    group = group_in_memory(config, rank=1, size=SIZE, shard=SHARD)
    grads, replica = torch.empty(SIZE * SHARD), torch.zeros(SIZE * SHARD)
    shard = torch.empty(SHARD)
    with streams:
        for step in range(6):
            streams.current = f"backward {step}"
            grads.fill_(1.0)
            reduced = group.reduce_scatter(
                0,
                grads,
                shard,
                step,
                lambda: Deferred(lambda: shard.copy_(grads[:SHARD])),
                gapless=gapless,
            )
            streams.current = "default"
            reduced.wait()
            group.finish_step(step, True)
            streams.current = f"gather {step}"
            gathered = group.all_gather(
                0,
                replica,
                replica[SHARD : 2 * SHARD],
                step,
                lambda step=step: Deferred(lambda: replica.fill_(step + 1)),
            )
            streams.current = "default"
            gathered.wait()
    return replica


@pytest.mark.parametrize("rows", ["indexed", "masked"])
@pytest.mark.parametrize("unit", ["shard", "packet"])
@pytest.mark.parametrize("rule", RULES)
def test_no_stream_reads_what_another_one_may_overwrite(rule, unit, rows, monkeypatch):
    if rows == "masked":
        monkeypatch.setattr(base, "rows_for", lambda device: MaskedRows)
    for gapless in (True, False):
        streams = Streams()
        monkeypatch.setattr(copies, "used_here", streams.used_here)
        replica = exchange(streams, rule, unit, gapless)
        assert streams.unannounced == []
        assert replica.unique().numel() > 1  # something is stale, put back after a copy that came with the wait


@pytest.mark.parametrize("rule", RULES)
def test_the_simulation_sees_what_is_not_announced(rule, monkeypatch):
    streams = Streams()
    monkeypatch.setattr(copies, "used_here", lambda tensors: None)
    exchange(streams, rule, "packet", True)
    assert any("on default reads what was made on gather" in seen for seen in streams.unannounced)
    if rule in ("previous", "renormalize-remote"):
        assert any("reads what was made on backward" in seen for seen in streams.unannounced)


# --- copies to the device --------------------------------------------------------------------------------------------


@copies_to_cuda
def test_copies_to_cuda_come_from_page_locked_memory(monkeypatch):
    """From pageable memory, more than 64 KiB would wait for the backward pass that is queued."""
    asked = []

    def page_locked(tensor):
        def to(device, non_blocking=False):
            asked.append((tensor.clone(), device.type, non_blocking))
            return tensor

        return SimpleNamespace(to=to)

    monkeypatch.setattr(copies, "page_locked", page_locked)
    array = np.arange(100_000, dtype=np.int32)
    copies.to_device(array, torch.device("cuda", 1))
    [(copied, device, non_blocking)] = asked
    assert device == "cuda" and non_blocking and np.array_equal(copied.numpy(), array)
    assert copies.to_device(array, "cpu").data_ptr() == array.ctypes.data and len(asked) == 1


@copies_to_cuda
@pytest.mark.cuda
def test_a_copy_to_cuda_does_not_wait():
    """Queued work delays it, and the host goes on at once."""
    busy = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(busy):
        torch.cuda._sleep(2_000_000_000)
        copied = copies.to_device(np.arange(1_000_000, dtype=np.int32), torch.device("cuda"))
        assert not busy.query()
    torch.cuda.synchronize()
    assert copied.sum().item() == 499999500000


def test_places_are_narrow_and_worked_out_where_losses_are_drawn(monkeypatch):
    """Not on the thread that launches collectives."""
    threads = []
    work_out = CollectiveWire._work_out

    def noted(self, delivery):
        work_out(self, delivery)
        threads.append((threading.current_thread().name, delivery))

    monkeypatch.setattr(CollectiveWire, "_work_out", noted)
    parts, units = cut([200_000], [4], "packet", 4)
    config = LossyConfig(p_grad=0.2)
    transport = CollectiveWire({"grad": Network(config, "grad", 2)}, Stream(), range(2), 0, {"grad": parts})
    key = Exchange("grad", Stream(), 0)
    transport.prepare(key)
    delivery = transport.foresee(key)
    [(name, prepared)] = threads
    assert name.startswith("megatron-lossy-draws") and prepared is delivery
    lost = delivery.lost_there(parts[0])
    shards, places = lost._places[(0, units)]
    assert shards.dtype == places.dtype == np.int32 and np.array_equal(np.nonzero(lost.mask)[1], places)
    assert delivery.survivors(parts[0]) is delivery._known[("survivors", 0, units)]


# --- graphs of HPU ---------------------------------------------------------------------------------------------------


class Graph(TorchDispatchMode):
    """What a device that compiles sees: operations, shapes, and numbers that are not in tensors."""

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
    monkeypatch.setattr(base, "rows_for", lambda device: MaskedRows)
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
