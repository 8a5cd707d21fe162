"""Datagrams and pieces of tensors on a pretended CUDA device: values of a CPU, and what the device is asked to do."""

import collections
import os
import warnings

import pytest
import torch

from megatron_lossy.config import LossyConfig
from megatron_lossy.transport import BucketSpec, LossyGroup, lossy_all_gather, lossy_reduce_scatter
from tests.ranks import run_ranks

pytestmark = [
    pytest.mark.shows("datagrams on a pretended device: one synchronisation an exchange, few kernels"),
    pytest.mark.usefixtures("pretended"),
]

STEPS, BUCKETS = 4, 2
UDP = {"transport": "udp", "loss_unit": "packet", "packet_bytes": 64, "p_grad": 0.4, "p_param": 0.4}
LITTLE = {"udp_memory": 2**16}


def pretend():
    """Have a pretended device and a process group.

    Return its tracker; counts of streams and of events whose wait spins; and a function that turns counting on and off.
    """
    warnings.simplefilter("ignore")
    os.environ["LOCAL_RANK"] = "0"
    from tests.impostor import device

    tracker = device.tracked()
    from megatron_lossy.base.device import init_process_group

    init_process_group("cpu:gloo,cuda:nccl")
    made, plain = collections.Counter(), (torch.cuda.Stream, torch.cuda.Event)

    class Stream(plain[0]):
        def __new__(cls, *args, **known):
            made["streams"] += "stream_id" not in known
            return super().__new__(cls, *args, **known)

    class Event(plain[1]):
        def __new__(cls, *args, blocking=False, **known):
            made["spinning events"] += not blocking
            return super().__new__(cls, *args, blocking=blocking, **known)

    def watched(on):
        torch.cuda.Stream, torch.cuda.Event = (Stream, Event) if on else plain

    return tracker, made, watched


def exchange(collective, aside, group, outputs, inputs, step):
    """Begin a collective of each bucket on the stream ``aside``, if there is one, and wait for them on the current one."""
    if aside is not None:
        aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        begun = [
            collective(group, bucket, outputs[bucket], inputs[bucket], step, async_op=True) for bucket in range(BUCKETS)
        ]
    for transfer in begun:
        transfer.wait()


def exchanges(rank, size, shard, flags):
    """Exchanges of both phases that begin on a stream of their own, on the device and on the CPU.

    Return whether all values are equal; faults; by kind and whether a thread aside asked, counts of the device's work;
    and how many streams were made, with the events whose wait spins.
    """
    tracker, made, watched = pretend()
    config, results = LossyConfig(**flags), {}
    for kind in ("cpu", "cuda"):
        group = LossyGroup.create(config, [BucketSpec(shard)] * BUCKETS)
        draws = torch.Generator().manual_seed(rank)
        outputs = [torch.empty(shard, device=kind) for _ in range(BUCKETS)]
        replicas = [torch.zeros(size * shard, device=kind) for _ in range(BUCKETS)]
        results[kind] = []
        for step in range(STEPS):
            grads = [torch.randn(size * shard, generator=draws).to(kind) for _ in range(BUCKETS)]
            aside = None
            if kind == "cuda":
                aside = torch.cuda.Stream()
                watched(True)
                tracker.phase = "exchanges"
            exchange(lossy_reduce_scatter, aside, group, outputs, grads, step)
            group.finish_step(step, True)
            owned = [replica.chunk(size)[rank] for replica in replicas]
            for mine, gradient in zip(owned, outputs, strict=True):
                mine.add_(gradient)
            exchange(lossy_all_gather, aside, group, replicas, owned, step)
            tracker.phase = "between"
            watched(False)
            results[kind] += [tensor.cpu().clone() for tensor in (*outputs, *replicas)]
        group.close()
    equal = all(map(torch.equal, results["cpu"], results["cuda"]))
    return equal, tracker.findings().faults, counted(tracker), made


def counted(tracker):
    counts = collections.Counter()
    for one, count in tracker.findings().counts.items():
        if one.phase == "exchanges":
            counts[one.kind, one.place.aside] += count
    return counts


def on_a_device(size, shard=1008, **flags):
    return run_ranks(exchanges, size, size, shard, {**UDP, **flags}, grouped=False)


RULES = ["renormalize", "renormalize-remote", "previous", "zero"]


@pytest.mark.parametrize("rule", RULES)
def test_an_exchange_waits_once_on_a_thread_of_its_own(rule):
    for equal, faults, counts, made in on_a_device(2, grad_recovery=rule):
        assert equal and not faults, faults
        assert not counts["blocking copy", False] and not counts["pageable copy", False]
        assert not counts["blocking copy", True] and not counts["pageable copy", True]
        assert not counts["synchronisation", False]
        assert counts["synchronisation", True] == 2 * BUCKETS * STEPS
        assert made["streams"] == 2 and not made["spinning events"], made


def test_error_feedback_keeps_its_gradients():
    """Pieces do not take the place of gradients of which the lost ones are sent again."""
    flags = {"grad_recovery": "error-feedback", "grad_priority": "packet-mean", "p_grad": 0.0, "p_param": 0.0}
    for equal, faults, _, made in on_a_device(2, udp_deadline="off", **flags):
        assert equal and not faults, faults
        assert made["streams"] == 2 and not made["spinning events"], made


@pytest.mark.parametrize("rule", ["renormalize", "previous"])
def test_windows_wait_once_each_on_a_thread_of_their_own(rule):
    for equal, faults, counts, _ in on_a_device(2, shard=6000, grad_recovery=rule, **LITTLE):
        assert equal and not faults, faults
        assert not counts["synchronisation", False]
        assert counts["synchronisation", True] > 2 * BUCKETS * STEPS
        assert not counts["blocking copy", True] and not counts["pageable copy", True]


def work(transport, size, packet, **flags):
    """Kernels and copies of the first rank. All units have one length, and something is lost in every exchange."""
    [(equal, faults, counts, _), *_] = on_a_device(size, transport=transport, packet_bytes=packet, **flags)
    assert equal and not faults, faults
    kernels, copies = (counts[kind, False] + counts[kind, True] for kind in ("kernel", "copy"))
    return kernels, copies


@pytest.mark.parametrize("transport", ["pieces", "udp"])
def test_work_grows_with_neither_ranks_nor_packets(transport):
    first = work(transport, 2, 64)
    assert work(transport, 2, 16) == first
    assert work(transport, 4, 64) == first
