"""Exchanges that begin on one stream and are waited for on another, on the pretended device and on the CPU."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, NamedTuple

import torch

from tests.rules import reduce

from .tracker import Count

#: Elements of a shard: packets of 16 elements leave a shorter last one.
_SHARD = 777
STEPS = 4
#: Kinds of work in which the host waits, or a copy does.
STALLS = ("synchronisation", "blocking copy", "pageable copy")
#: A shard of whole packets of 64 and of 16 bytes: no short packet that may be lost or not.
_EVEN = 768
_BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16}


class Case(NamedTuple):
    """An exchange. ``scale``: of the loss, as with fp16."""

    rule: str
    unit: str
    wire: str
    scale: float | None
    dtype: torch.dtype
    priority: str | None = None


def cases() -> Iterator[Case]:
    """Yield each rule, unit and wire, with a loss scale and bfloat16 or without."""
    rules = ("renormalize", "renormalize-remote", "previous", "zero", "error-feedback")
    for rule, unit, wire, scale in product(rules, ("shard", "packet", "bucket"), ("torch", "pieces"), (None, 8.0)):
        if rule == "error-feedback" and unit != "packet":
            continue
        dtype = torch.float32 if scale is None else torch.bfloat16
        yield Case(rule, unit, wire, scale, dtype)


def exchange(
    rank: int,
    size: int,
    case: Case,
    device: str,
    packet_bytes: int = 64,
    seed: int = 1234,
    begin: Callable[[int], None] = lambda step: None,
    shard: int = _SHARD,
) -> list[torch.Tensor]:
    """Return sums and replicas after each of a few steps, on the host. On "cuda" no stream both begins and waits.

    ``seed``: of the losses. ``begin(step)`` is called before each step, and with -1 before its results are looked at.
    """
    import torch.distributed as dist

    from megatron_lossy.base.device import all_gather_single, reduce_scatter_single
    from megatron_lossy.config import LossyConfig
    from megatron_lossy.transport import BucketSpec, LossyGroup

    lossy: dict[str, Any] = dict(p_grad=0.4, p_param=0.4, grad_recovery=case.rule, loss_unit=case.unit)
    lossy |= {"transport": case.wire} | ({"packet_bytes": packet_bytes} if case.unit == "packet" else {})
    lossy |= {"udp_interface": "lo"} if case.wire == "udp" else {}
    lossy |= {} if case.priority is None else {"grad_priority": case.priority}
    group = LossyGroup.create(LossyConfig(**lossy, loss_seed=seed), [BucketSpec(shard, case.dtype, case.dtype)])
    random = torch.Generator().manual_seed(rank)
    grads, out = (torch.empty(n * shard, dtype=case.dtype, device=device) for n in (size, 1))
    replica = torch.zeros(size * shard, dtype=case.dtype, device=device)
    own = replica[rank * shard : (rank + 1) * shard]
    scale = None if case.scale is None else torch.full((), case.scale, device=device)
    kept = []
    for step in range(STEPS):
        begin(step)
        with _aside(device):
            grads.copy_(torch.randint(-9, 10, (size * shard,), generator=random).to(case.dtype))
            how = {"loss_scale": lambda: scale, "gapless": scale is None}
            torchs = lambda: reduce_scatter_single(out, grads, async_op=True)
            transfer = reduce(group, 0, grads, out, step, torchs, **how)
        transfer.wait()
        group.finish_step(step, True)
        own.add_(out)
        with _aside(device):
            transfer = group.all_gather(0, replica, own, step, lambda: all_gather_single(replica, own, async_op=True))
        transfer.wait()
        del transfer
        begin(-1)
        kept += [out.cpu().clone(), replica.cpu().clone()]
    dist.barrier()
    group.close()
    return [one.view(_BITS[case.dtype]) for one in kept]


def _aside(device: str) -> Any:
    """Return a context on a new stream that waits for the current one; nothing where there are no streams."""
    if device != "cuda":
        return torch.no_grad()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    return torch.cuda.stream(stream)


class Comparison(NamedTuple):
    """Cases that differ from the CPU; faults of the device; lines of the product where the host waited for it."""

    differ: list[Case]
    faults: list[str]
    stalls: list[str]


def compare(rank: int, size: int, some: list[Case], mutation: str | None = None) -> Comparison:
    """Make the exchanges of ``some`` on both devices. ``mutation``: a key of :data:`~tests.impostor.mutations.MUTATIONS`."""
    import torch.distributed as dist

    from . import device
    from .mutations import MUTATIONS

    tracker = device.tracked("cpu:gloo,cuda:nccl")
    if mutation is not None:
        MUTATIONS[mutation]()
    differ = []
    for case in some:
        on_cpu, on_cuda = (exchange(rank, size, case, kind) for kind in ("cpu", "cuda"))
        if not all(torch.equal(one, other) for one, other in zip(on_cpu, on_cuda, strict=True)):
            differ.append(case)
    torch.zeros(1, device="cuda")  # it also reports the blocks freed last
    places = {f"{one.kind} at {one.place.name}" for one in tracker.counts if one.kind in STALLS and _ours(one)}
    dist.destroy_process_group()
    return Comparison(differ, tracker.findings().faults, sorted(places))


def _ours(count: Count) -> bool:
    return count.place.home == "megatron_lossy" and not count.place.aside


def kernels(rank: int, size: int, some: list[Case], packet_bytes: int) -> list[int]:
    """Return the most kernels that this rank launches in a step of each case, from the third on."""
    import torch.distributed as dist

    from . import device

    found: list[int] = []
    for case in some:
        tracker = device.tracked(None if found else "cpu:gloo,cuda:nccl")
        begin = functools.partial(setattr, tracker, "phase")
        exchange(rank, size, case, "cuda", packet_bytes, begin=begin, shard=_EVEN)
        by_step = [
            sum(n for count, n in tracker.counts.items() if count.kind == "kernel" and count.phase == step)
            for step in range(2, STEPS)
        ]
        found.append(max(by_step))
    dist.destroy_process_group()
    return found


def sequences(
    rank: int, size: int, some: list[Case], seeds: list[int], mutation: Callable[[], None] | None = None
) -> list[set[str]]:
    """Return the different sequences of operators, shapes and numbers of each case on Gaudi, from step 3 on."""
    import torch.distributed as dist

    from . import device

    tracker = device.tracked()
    device.add_hpu()
    if mutation is not None:
        mutation()
    dist.init_process_group("cpu:gloo,hpu:hccl")
    found = []
    for case in some:
        different: set[str] = set()

        def begin(step: int, different: set[str] = different) -> None:
            if tracker.sequence:
                different.add("\n".join(tracker.sequence))
            tracker.sequence = [] if step >= 2 else None

        for seed in seeds:
            exchange(rank, size, case, "hpu", seed=seed, begin=begin)
        found.append(different)
    dist.destroy_process_group()
    return found
