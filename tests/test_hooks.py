"""The hooks on the real megatron-core over gloo: what is lost is lost, and nothing else changes."""

import dataclasses
import inspect

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron.core.distributed import param_and_grad_buffer as pgb

from megatron_lossy import hooks
from megatron_lossy.base.errors import UsageError
from megatron_lossy.config import LossyConfig
from megatron_lossy.hooks.seam import slot_of
from megatron_lossy.transport import BucketSpec, LossyGroup, check_average, lossy_reduce_scatter, ops
from tests import contract
from tests.ranks import run_ranks
from tests.rules import assert_same
from tests.tiers import few_at_once
from tests.tiny_gpt import TinyGPT, build, missing

pytestmark = pytest.mark.shows(
    "without loss every bit is Megatron's: overlaps, fp32, bf16",
    "every rule and unit by value in every setting of Megatron",
    "`previous` over skipped and all-reduced steps and loss scales",
    "tied embeddings and tensor-parallel peers lose the same",
)

OVERLAPS = {
    "none": {},
    "grads": {"overlap_grad_reduce": True, "bucket_size": 3000},
    "both": {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 3000},
}
BOTH = LossyConfig(p_grad=0.4, p_param=0.4, loss_unit="packet", packet_bytes=1000)
RULES = ["renormalize", "renormalize-remote", "previous", "zero"]
UNITS = ["shard", "bucket", "packet"]
FEEDBACK = dataclasses.replace(BOTH, grad_recovery="error-feedback", grad_priority="packet-mean:0.1", packet_bytes=400)


def contract_holds(tiny, world=4, config=BOTH, steps=4, overflows=None, without=(), gapless=False, pool=None, **how):
    if missing(tiny):
        pytest.skip(missing(tiny))
    run = run_ranks if pool is None else pool.run
    if tiny.average_in_collective and not all(run(averages, 2)):
        pytest.skip(f"torch {torch.__version__} has no average over gloo")
    recorded = run(contract.record, world, tiny, config, steps, overflows, without, gapless)
    return recorded, contract.check(recorded, config, averaged=tiny.average_in_collective, **how)


def averages(rank):
    try:
        check_average("", None)
    except UsageError:
        return False
    return True


# --- no loss -------------------------------------------------------------------------------------------------------


@pytest.mark.on_cuda
@pytest.mark.shows("without loss every bit is Megatron's: overlaps, fp32, bf16")
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("overlap", OVERLAPS)
def test_without_loss_it_is_megatron_bit_for_bit(overlap, dtype, pool, unhooked):
    """With the hooks in place and every rate 0 for now, and with rates of 0, weights and losses are Megatron's."""
    tiny = TinyGPT(dtype=dtype, accumulation=2, **OVERLAPS[overlap])
    expected = unhooked.run(contract.plain, 2, tiny, None, 4)
    later = LossyConfig(loss_schedule=("0:0,1000:0.5",), loss_unit="packet")
    for config in (LossyConfig(), later, dataclasses.replace(later, grad_recovery="error-feedback")):
        assert_same(pool.run(contract.plain, 2, tiny, config, 4), expected)


# --- loss, by value ------------------------------------------------------------------------------------------------


@pytest.mark.on_cuda
@pytest.mark.shows("rules, units, overlaps and bf16 in pairs, by value")
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("unit", UNITS)
def test_every_rule_and_unit(rule, unit, pool):
    """Two ranks: to the last bit. Odd packets leave a short last unit in every shard.

    Each pair of a rule, a unit, an overlap and a type is there.
    """
    number = RULES.index(rule) + UNITS.index(unit)
    tiny = TinyGPT(dtype=("fp32", "bf16")[number % 2], **list(OVERLAPS.values())[number % 3])
    config = dataclasses.replace(BOTH, grad_recovery=rule, loss_unit=unit)
    contract_holds(tiny, world=2, config=config, pool=pool, loses=True)


@pytest.mark.on_cuda
@pytest.mark.shows("priority and error feedback by value")
@pytest.mark.parametrize(
    ("rule", "overlap"), [("error-feedback", "none"), ("error-feedback", "both"), ("zero", "grads")]
)
def test_priority_and_error_feedback(rule, overlap, pool):
    """Two ranks to the last bit, and three; whatever the order in which buckets are exchanged."""
    config = dataclasses.replace(FEEDBACK, grad_recovery=rule)
    for world in (2, 3):
        contract_holds(TinyGPT(**OVERLAPS[overlap]), world=world, config=config, steps=6, pool=pool, loses=True)


@pytest.mark.parametrize("rule", ["error-feedback", "zero"])
def test_with_every_packet_of_high_priority_it_is_megatron(rule, pool, unhooked):
    tiny = TinyGPT(dtype="bf16", accumulation=2, **OVERLAPS["both"])
    config = dataclasses.replace(FEEDBACK, p_param=0.0, grad_recovery=rule, grad_priority="packet-mean:1.0")
    mine, theirs = pool.run(contract.plain, 2, tiny, config, 4), unhooked.run(contract.plain, 2, tiny, None, 4)
    assert_same(mine, theirs)


SETTINGS = {
    "no overlap, one bucket": (3, TinyGPT()),
    "overlapped gradients": (3, TinyGPT(**OVERLAPS["grads"])),
    "overlapped both": (3, TinyGPT(**OVERLAPS["both"])),
    "one rank": (1, TinyGPT(**OVERLAPS["both"])),
    "bf16, fp32 gradients": (2, TinyGPT(dtype="bf16", **OVERLAPS["both"])),
    "accumulation": (2, TinyGPT(accumulation=3, **OVERLAPS["both"])),
    "average in collective": (4, TinyGPT(average_in_collective=True, **OVERLAPS["both"])),
    "per-token loss": (2, TinyGPT(per_token_loss=True, **OVERLAPS["both"])),
    "fp32 accumulation": (3, TinyGPT(fp32_accumulation=True, **OVERLAPS["both"])),
    "fp32 accumulation, no overlap": (3, TinyGPT(fp32_accumulation=True)),
    "tensor parallel": (4, TinyGPT(tensor=2, **OVERLAPS["both"])),
    "pipeline, untied": (4, TinyGPT(pipeline=2, tied=False, accumulation=2, **OVERLAPS["both"])),
    "pipeline, tied": (4, TinyGPT(pipeline=2, tied=True, accumulation=2, **OVERLAPS["both"])),
    "pipeline, tied, one bucket": (4, TinyGPT(pipeline=2, tied=True, accumulation=2)),
    "virtual pipeline": (4, TinyGPT(pipeline=2, virtual=2, layers=4, accumulation=2, **OVERLAPS["both"])),
    "virtual pipeline, untied": (
        4,
        TinyGPT(pipeline=2, virtual=2, layers=4, tied=False, accumulation=2, **OVERLAPS["both"]),
    ),
    "batch ramp-up": (3, TinyGPT(rampup=(1, 1, 2), accumulation=3, **OVERLAPS["both"])),
    "experts": (4, TinyGPT(expert=2, experts=4, **OVERLAPS["both"])),
    "two instances": (4, TinyGPT(instances=2, bucket_size=3000)),
    "two instances, overlapped": (4, TinyGPT(instances=2, **OVERLAPS["both"])),
}


#: Cases of make test for the other transports; the rest run when there is time.
FEW = ("overlapped both", "bf16, fp32 gradients", "fp32 accumulation", "tensor parallel", "two instances, overlapped")
OFTEN = ("one rank", "accumulation", "average in collective", "per-token loss", "pipeline, tied")
OFTEN_SETTINGS = few_at_once((*FEW, *OFTEN, "virtual pipeline", "experts"), SETTINGS)
FEW_SETTINGS = few_at_once(FEW, SETTINGS)


@pytest.mark.parametrize("name", OFTEN_SETTINGS)
def test_every_setting(name, pool):
    world, tiny = SETTINGS[name]
    contract_holds(tiny, world=world, pool=pool, loses=world > 1)


@pytest.mark.parametrize(
    ("world", "tiny", "expected"),
    [
        (4, TinyGPT(context=2, **OVERLAPS["both"]), {"dense": ([0, 1, 2, 3], [0, 1, 2, 3])}),
        (4, TinyGPT(context=2, tensor=2, **OVERLAPS["both"]), {"dense": ([0, 2], [0, 2])}),
        (
            8,
            TinyGPT(layers=1, instances=2, expert=2, experts=2, **OVERLAPS["both"]),
            {"dense": ([0, 1, 2, 3], [0, 1, 2, 3, 4, 5, 6, 7]), "expert": ([0, 2], [0, 2, 4, 6])},
        ),
    ],
    ids=["context parallel", "context and tensor parallel", "experts, two instances"],
)
def test_among_whom_data_are_lost(world, tiny, expected, pool):
    """Return the ranks that share rank 0's optimizer, context-parallel ones too, and those of all instances."""
    recorded, _ = contract_holds(tiny, world=world, pool=pool, loses=True)
    places = recorded[0][0]["buckets"]
    assert {place["stream"].kind: (place["group"], place["full"]) for place in places} == expected


@pytest.mark.parametrize("rule", ["renormalize", "previous", "zero"])
def test_the_own_shard_can_be_lost(rule, pool):
    config = dataclasses.replace(BOTH, lossy_self=True, grad_recovery=rule)
    _, lost = contract_holds(TinyGPT(**OVERLAPS["both"]), world=1, config=config, pool=pool)
    assert lost["grad"] and not lost["param"]
    contract_holds(TinyGPT(**OVERLAPS["both"]), world=2, config=config, pool=pool)


@pytest.mark.parametrize("virtual", [None, 2])
@pytest.mark.slow
def test_tied_embeddings_stay_equal_across_stages(virtual, pool):
    """The first and the last stage hold copies of one weight; loss must hit both alike, under every unit."""
    tiny = TinyGPT(pipeline=2, virtual=virtual, layers=2 * (virtual or 1), accumulation=2, **OVERLAPS["both"])
    for unit in ("shard", "bucket", "packet"):
        recorded, _ = contract_holds(tiny, config=dataclasses.replace(BOTH, loss_unit=unit), pool=pool)
        copies = {}
        for rank, iterations in enumerate(recorded):
            for place in iterations[-1]["buckets"]:
                if place["stream"].kind == "embedding":
                    copies[rank] = place["after"]
        assert len(copies) == 4
        np.testing.assert_array_equal(copies[0], copies[2])
        np.testing.assert_array_equal(copies[1], copies[3])
        assert not np.array_equal(copies[0], copies[1])  # replicas differ


def test_tensor_parallel_peers_lose_the_same(pool):
    recorded, _ = contract_holds(TinyGPT(tensor=2, **OVERLAPS["both"]), pool=pool)
    streams = [[place["stream"] for place in recorded[rank][0]["buckets"]] for rank in range(4)]
    assert streams[0] == streams[1] == streams[2]


@pytest.mark.parametrize("rule", [*RULES, "error-feedback"])
@pytest.mark.parametrize("overlap", ["none", "both"])
def test_a_skipped_step(rule, overlap, pool):
    """An overflow skips the update: no gather is drawn anew, and no rule keeps anything of that step."""
    config = dataclasses.replace(BOTH, grad_recovery=rule)
    tiny = TinyGPT(loss_scale=8.0, **OVERLAPS[overlap])
    recorded, _ = contract_holds(tiny, world=2, config=config, steps=6, overflows={2: 0, 3: 1}, pool=pool)
    assert [step["report"]["success"] for step in recorded[0]] == [True, True, False, False, True, True]
    assert [step["update"] for step in recorded[0]] == [0, 1, 1, 1, 4, 5]
    for step in recorded[0]:
        assert all(np.isfinite(place["after"]).all() for place in step["buckets"])


@pytest.mark.parametrize("loss_scale", [None, 8.0])
def test_previous_outlives_an_iteration_without_exchange(loss_scale, pool):
    """With a loss scale and without one: what is lost next is what arrived before the gap."""
    config = dataclasses.replace(BOTH, grad_recovery="previous")
    tiny = TinyGPT(loss_scale=loss_scale, **OVERLAPS["both"])
    _, lost = contract_holds(tiny, world=2, config=config, steps=6, without=(2, 3), pool=pool)
    assert lost["grad"]


def all_reduced(rank, config, gapless):
    """Three exchanges of given gradients, the second all-reduced: own shards, and what arrived here in the third."""
    lossy = hooks.install(config, gapless=gapless)
    [group] = build(TinyGPT()).model[0].bucket_groups
    [bucket] = group.buckets
    for step in range(3):
        bucket.grad_data.normal_(generator=torch.Generator().manual_seed(10 * rank + step))
        mine = bucket.grad_data.clone()
        if step == 2:
            slot = slot_of(bucket.grad_data)
            arrived = slot.group.delivery("grad", 2).incoming(slot.group.grads[slot.bucket].units)
        if step == 1:
            group.finish_grad_sync(force_all_reduce=True)
            kept = mine
        else:
            group.finish_grad_sync()
        lossy.finish_iteration(True, all_reduced=step == 1)
    return bucket.grad_data.chunk(2)[rank].numpy(), mine.numpy(), kept.numpy(), arrived


@pytest.mark.skipif(
    "force_all_reduce" not in inspect.signature(pgb._ParamAndGradBucketGroup.start_grad_sync).parameters,
    reason="this Megatron never all-reduces under the distributed optimizer",
)
@pytest.mark.parametrize("gapless", [True, False])
def test_what_was_all_reduced_was_received(gapless):
    config = LossyConfig(p_grad=0.5, grad_recovery="previous", loss_unit="packet", packet_bytes=1000)
    results = run_ranks(all_reduced, 2, config, gapless)
    for owner, (own, _, _, arrived) in enumerate(results):
        assert not arrived[1 - owner].all()
        expected = 0
        for source, (_, mine, kept, _) in enumerate(results):
            there = np.repeat(arrived[source], 250)[: own.size]
            expected = expected + np.where(there, mine.reshape(2, -1)[owner], kept.reshape(2, -1)[owner])
        np.testing.assert_array_equal(own, expected / np.float32(2))


# --- a torch that cannot average -----------------------------------------------------------------------------------


def average_that_sums(rank):
    """Gloo sums where it should average, as that of torch 2.5 to 2.8 does: in an own loop, and under Megatron."""
    original = ops.reduce_scatter_single
    ops.reduce_scatter_single = lambda *args, **kwargs: original(*args, **kwargs | {"op": dist.ReduceOp.SUM})
    config = LossyConfig(p_grad=0.1)
    with pytest.raises(UsageError) as of_loop:
        group = LossyGroup.create(config, [BucketSpec(4)])
        lossy_reduce_scatter(group, 0, torch.empty(4), torch.ones(8), 0, op=dist.ReduceOp.AVG)
    with pytest.raises(UsageError) as of_megatron:
        contract.record(rank, TinyGPT(average_in_collective=True), config, steps=1)
    return str(of_loop.value), str(of_megatron.value)


def test_an_average_that_is_a_sum_is_refused():
    of_loop, of_megatron = run_ranks(average_that_sums, 2)[0]
    expected = f"over gloo: torch {torch.__version__} sums instead of averaging"
    assert of_loop.startswith(f"op=ReduceOp.AVG {expected}")
    assert of_megatron.startswith(f"--ddp-average-in-collective {expected}")
