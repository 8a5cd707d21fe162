"""Record on every rank what enters and leaves Megatron's data-parallel exchanges, and check it by value.

The expectation comes from the NumPy reference and from deliveries asked of the channel directly.
"""

import contextlib
from collections import defaultdict

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed import param_and_grad_buffer as pgb

from megatron_lossy import hooks
from megatron_lossy.base.exchange import Exchange, units_of
from megatron_lossy.hooks.seam import slot_of
from megatron_lossy.hooks.versions import full_group
from megatron_lossy.lab.virtual import VirtualCluster
from megatron_lossy.transport import Network
from tests.reference import ReferenceReduce, pieces, reference_gather
from tests.rules import delivered_among
from tests.tiny_gpt import build


@contextlib.contextmanager
def installed(config, **how):
    """The hooks; afterwards the process is as before. ``config`` None leaves Megatron alone.

    Above them, functions of :data:`_SPIED` can be replaced.
    """
    before = [getattr(owner, name) for owner, name in _SPIED]
    lossy = None if config is None else hooks.install(config, **how)
    hooked = [getattr(owner, name) for owner, name in _SPIED]
    try:
        yield lossy
    finally:
        _put(hooked)
        if lossy is not None:
            lossy.uninstall()
        _put(before)


_SPIED = (
    (pgb, "dist_reduce_scatter_func"),  # of which DDP makes another with fp32 accumulation
    (pgb, "dist_all_gather_func"),
    (DistributedDataParallel, "finish_grad_sync"),
)


def _put(functions):
    for (owner, name), function in zip(_SPIED, functions, strict=True):
        setattr(owner, name, function)


def record(rank, tiny, config, steps, overflows=None, without=(), gapless=False, unhooked=None, gathers=1):
    """Train ``steps`` iterations with loss; returns one list of bucket records per iteration.

    ``overflows``: iteration to data-parallel rank whose gradients become infinite. ``without``: iterations that have
    no exchange; ``None`` stands for them in the list. ``gapless``: as of the hooks. ``unhooked``: the phase ("grad",
    "param") that goes past the hooks. ``gathers``: how often an overlapped gather is made.
    """
    with installed(config, gapless=gapless) as lossy:
        return _record(rank, lossy, tiny, steps, overflows or {}, without, unhooked, gathers)


def _record(rank, lossy, tiny, steps, overflows, without, unhooked, gathers):
    run = build(tiny)
    if unhooked == "grad":
        pgb.dist_reduce_scatter_func = torch.distributed.reduce_scatter_tensor
    elif unhooked == "param":
        pgb.dist_all_gather_func = torch.distributed.all_gather_into_tensor
    places = _places(lossy, run)
    sent, reduced = {}, {}

    original = pgb.dist_reduce_scatter_func

    def spy(output, input, *args, **kwargs):
        sent[id(input)] = input.float().cpu().numpy().copy()
        return original(output, input, *args, **kwargs)

    pgb.dist_reduce_scatter_func = spy
    finish = DistributedDataParallel.finish_grad_sync

    def finish_grad_sync(self, *args, **kwargs):
        result = finish(self, *args, **kwargs)
        for bucket, place in places:
            own = bucket.grad_data.chunk(len(place["group"]))[place["group"].index(rank)]
            reduced[id(bucket)] = own.float().cpu().numpy().copy()
        return result

    DistributedDataParallel.finish_grad_sync = finish_grad_sync
    iterations = []
    for step in range(steps):
        if step in without:
            lossy.skip_iteration()
            iterations.append(None)
            continue
        before = [(bucket.param_data.float().cpu().numpy().copy(), _main(bucket)) for bucket, _ in places]
        report = run.step(step, overflow_on=overflows.get(step))
        for _ in range(gathers if tiny.overlap_param_gather else 0):
            run.gather()
        iterations.append(
            {
                "report": report,
                "update": lossy.update,
                "buckets": [
                    {
                        **place,
                        "sent": sent[id(bucket.grad_data)],
                        "reduced": reduced[id(bucket)],
                        "before": old,
                        "after": bucket.param_data.float().cpu().numpy().copy(),
                        "mains": (main, _main(bucket)),
                    }
                    for (bucket, place), (old, main) in zip(places, before)
                ],
            }
        )
    return iterations


def _main(bucket):
    """Return the float32 weights of the own shard, where a rule sends more than these in their type; else ``None``."""
    slot = slot_of(bucket.param_data)
    weights = getattr(slot.group.params[slot.bucket], "weights", None)
    return None if weights is None else weights().cpu().numpy().copy()


def _places(lossy, run):
    """Every bucket with what identifies it: stream, number, groups of global ranks."""
    places = []
    for ddp in run.model:
        for group in ddp.bucket_groups + ddp.expert_parallel_bucket_groups:
            for bucket in group.buckets:
                slot = slot_of(bucket.grad_data)
                expert = slot.group.stream.kind == "expert"
                part = group.intra_distributed_optimizer_instance_group
                full = full_group(ddp, expert)
                units = slot.group.wire.cut
                places.append(
                    (
                        bucket,
                        {
                            "stream": slot.group.stream,
                            "number": slot.bucket,
                            "group": dist.get_process_group_ranks(part),
                            "full": dist.get_process_group_ranks(full),
                            "shard": bucket.grad_data.numel() // part.size(),
                            "units": {p: (u[slot.bucket].first, u[slot.bucket].elements) for p, u in units.items()},
                            "totals": {p: units_of(u) for p, u in units.items()},
                        },
                    )
                )
    return places


def _shard(place, phase):
    """Elements of a shard; without those that have no gradient there may be fewer gradients than parameters."""
    return place["param_shard"] if phase == "param" and "param_shard" in place else place["shard"]


def _arrived(config, phase, step, place):
    """bool[N, N, units of the bucket] between the ranks of the collective's group."""
    network = Network(config, phase, len(place["full"]))
    members = [place["full"].index(rank) for rank in place["group"]]
    first, elements = place["units"][phase]
    count = len(pieces(_shard(place, phase), elements))
    exchange = Exchange(phase, place["stream"], step)
    return delivered_among(members, network, exchange, place["totals"][phase])[:, :, first : first + count]


def check(recorded, config, averaged=False, exact=True, rtol=1e-5, atol=1e-6, crossing=None, loses=None):
    """Assert that every reduced shard and every replica is what the reference says. Return numbers of losses.

    ``crossing``: what others get of owners' weights, a function of (bucket, weights before, weights); else these.
    ``mains`` of its bucket: by rank, the float32 weights of the own shard before and after. ``loses``: whether there are
    losses in both phases, or in none.
    """
    reduce, lost = {}, defaultdict(int)
    for step in range(len(recorded[0])):
        if recorded[0][step] is None:
            continue
        # One record per rank and bucket; together they make the exchange of one group.
        exchanges = defaultdict(dict)
        for rank, iterations in enumerate(recorded):
            for place in iterations[step]["buckets"]:
                key = (place["stream"], place["number"], tuple(place["full"]))
                exchanges[key].setdefault(tuple(place["group"]), {})[rank] = place
        report = recorded[0][step]["report"]
        success = report["success"]
        used = report.get("used", success)  # gradients of a micro-batch are used by a later update
        for key, instances in exchanges.items():
            total = 0
            for group, members in instances.items():
                place = members[group[0]]
                size, shard = len(group), place["shard"]
                arrived = _arrived(config, "grad", step, place)
                lost["grad"] += int((~arrived).sum())
                sent = np.array([members[rank]["sent"] for rank in group]).reshape(size, size, shard)
                elements = place["units"]["grad"][1]
                priority, share = config.grad_priority_rule
                share = share if priority == "packet-mean" else 0.0
                reference = ReferenceReduce(config.grad_recovery, size, shard, elements, share)
                rule = reduce.setdefault((key, group), reference)
                expected = rule(sent, arrived, counted=used)
                total = total + expected * np.float32(1 if averaged else size)
                # Parameters: of this instance alone.
                update = recorded[0][step]["update"]
                arrived = _arrived(config, "param", update, place) if success else np.zeros_like(arrived[:, :, :1])
                lost["param"] += int((~arrived).sum()) if success else 0
                shard = _shard(place, "param")
                before = np.array([members[rank]["before"] for rank in group]).reshape(size, size, shard)
                after = np.array([members[rank]["after"] for rank in group]).reshape(size, size, shard)
                owners = after[np.arange(size), np.arange(size)]
                units = pieces(shard, place["units"]["param"][1])
                expected = before
                if success:
                    own = np.arange(size)
                    sent = owners
                    if crossing is not None:
                        mains = [members[rank]["mains"] for rank in group]
                        sent = crossing(place | {"mains": mains}, before[own, own], owners)
                    expected = reference_gather(before, sent, arrived, units)
                    expected[own, own] = owners
                np.testing.assert_array_equal(after, expected)
            if averaged:
                total = total / np.float32(len(instances))
            for group, members in instances.items():
                got = np.array([members[rank]["reduced"] for rank in group])
                if not used:
                    continue
                if exact and len(group) * len(instances) <= 2:
                    np.testing.assert_array_equal(got, total)
                else:
                    np.testing.assert_allclose(got, total, rtol=rtol, atol=atol)
    assert loses is None or bool(lost["grad"]) == bool(lost["param"]) == loses, lost
    return lost


@contextlib.contextmanager
def made(tiny, config, workers=None, **how):
    """A run of this rank or of virtual workers, and what makes it lossy."""
    lossy = VirtualCluster(config, workers, **how) if workers else hooks.install(config, **how)
    yield build(tiny, lossy if workers else None), lossy
    lossy.uninstall()


def plain(rank, tiny, config, steps):
    """Final weights, owners' buffers and losses of a run; ``config`` None leaves Megatron alone."""
    with installed(config):
        run = build(tiny)
        reports = [run.step(step) for step in range(steps)]
        if tiny.overlap_param_gather:
            run.gather()
        return run.weights(), [(r["loss"], float(r["grad_norm"])) for r in reports]
