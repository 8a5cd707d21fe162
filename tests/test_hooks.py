"""The hooks on the real megatron-core over gloo: what is lost is lost, and nothing else changes."""

import dataclasses

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_lossy.config import LossyConfig
from megatron_lossy.errors import UsageError
from megatron_lossy.transport import BucketSpec, LossyGroup, check_average, lossy_reduce_scatter
from tests import contract
from tests.ranks import run_ranks
from tests.tiny_gpt import TinyGPT, missing

OVERLAPS = {
    "none": {},
    "grads": {"overlap_grad_reduce": True, "bucket_size": 3000},
    "both": {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 3000},
}
BOTH = LossyConfig(p_grad=0.4, p_param=0.4, loss_unit="packet", packet_bytes=1000)
RULES = ["renormalize", "renormalize-remote", "previous", "zero"]


def contract_holds(tiny, world=4, config=BOTH, steps=4, overflows=None, **how):
    if missing(tiny):
        pytest.skip(missing(tiny))
    if tiny.average_in_collective and not all(run_ranks(averages, 2)):
        pytest.skip(f"torch {torch.__version__} has no average over gloo")
    recorded = run_ranks(contract.record, world, tiny, config, steps, overflows)
    return recorded, contract.check(recorded, config, averaged=tiny.average_in_collective, **how)


def averages(rank):
    try:
        check_average("", None)
    except UsageError:
        return False
    return True


# --- no loss -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("overlap", OVERLAPS)
def test_without_loss_it_is_megatron_bit_for_bit(overlap, dtype):
    """With the hooks in place and every rate 0 for now, and with rates of 0, weights and losses are Megatron's."""
    tiny = TinyGPT(dtype=dtype, accumulation=2, **OVERLAPS[overlap])
    expected = run_ranks(contract.plain, 2, tiny, None, 4)
    for config in (LossyConfig(), LossyConfig(loss_schedule=("0:0,1000:0.5",), loss_unit="packet")):
        for (weights, reports), (real_weights, real_reports) in zip(
            run_ranks(contract.plain, 2, tiny, config, 4), expected
        ):
            assert reports == real_reports
            for name, value in real_weights.items():
                np.testing.assert_array_equal(weights[name], value, err_msg=name)


def test_the_same_seed_gives_the_same_run_and_another_does_not():
    tiny = TinyGPT(**OVERLAPS["both"])
    runs = [run_ranks(contract.plain, 3, tiny, dataclasses.replace(BOTH, loss_seed=seed), 4) for seed in (1, 1, 2)]
    for (a, _), (b, _) in zip(runs[0], runs[1]):
        assert all(np.array_equal(a[name], b[name]) for name in a)
    assert any(not np.array_equal(runs[0][0][0][name], runs[2][0][0][name]) for name in runs[0][0][0])


# --- loss, by value ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("unit", ["shard", "bucket", "packet"])
def test_every_rule_and_unit(rule, unit):
    """Two ranks: to the last bit. Odd packets leave a short last unit in every shard."""
    config = dataclasses.replace(BOTH, grad_recovery=rule, loss_unit=unit)
    _, lost = contract_holds(TinyGPT(**OVERLAPS["both"]), world=2, config=config, steps=6)
    assert lost["grad"] and lost["param"]


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_with_several_survivors(rule):
    contract_holds(TinyGPT(**OVERLAPS["grads"]), world=4, config=dataclasses.replace(BOTH, grad_recovery=rule))


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
    "experts": (4, TinyGPT(expert=2, experts=4, **OVERLAPS["both"])),
    "two instances": (4, TinyGPT(instances=2, bucket_size=3000)),
    "two instances, overlapped": (4, TinyGPT(instances=2, **OVERLAPS["both"])),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_every_setting(name):
    world, tiny = SETTINGS[name]
    _, lost = contract_holds(tiny, world=world)
    assert bool(lost["grad"]) == bool(lost["param"]) == (world > 1)


@pytest.mark.parametrize("rule", ["renormalize", "previous", "zero"])
def test_the_own_shard_can_be_lost(rule):
    config = dataclasses.replace(BOTH, lossy_self=True, grad_recovery=rule)
    _, lost = contract_holds(TinyGPT(**OVERLAPS["both"]), world=1, config=config)
    assert lost["grad"] and not lost["param"]
    contract_holds(TinyGPT(**OVERLAPS["both"]), world=2, config=config)


def test_tied_embeddings_stay_equal_across_stages():
    """The first and the last stage hold copies of one weight; loss must hit both alike, under every unit."""
    tiny = TinyGPT(pipeline=2, tied=True, accumulation=2, **OVERLAPS["both"])
    for unit in ("shard", "bucket", "packet"):
        recorded, _ = contract_holds(tiny, config=dataclasses.replace(BOTH, loss_unit=unit))
        copies = {}
        for rank, iterations in enumerate(recorded):
            for place in iterations[-1]["buckets"]:
                if place["stream"].kind == "embedding":
                    copies[rank] = place["after"]
        assert len(copies) == 4
        np.testing.assert_array_equal(copies[0], copies[2])
        np.testing.assert_array_equal(copies[1], copies[3])
        assert not np.array_equal(copies[0], copies[1])  # replicas differ


def test_tensor_parallel_peers_lose_the_same():
    recorded, _ = contract_holds(TinyGPT(tensor=2, **OVERLAPS["both"]))
    streams = [[place["stream"] for place in recorded[rank][0]["buckets"]] for rank in range(4)]
    assert streams[0] == streams[1] == streams[2]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("overlap", ["none", "both"])
def test_a_skipped_step(rule, overlap):
    """An overflow skips the update: no gather is drawn anew, and ``previous`` keeps nothing of that step."""
    config = dataclasses.replace(BOTH, grad_recovery=rule)
    tiny = TinyGPT(loss_scale=8.0, **OVERLAPS[overlap])
    recorded, _ = contract_holds(tiny, world=2, config=config, steps=6, overflows={2: 0, 3: 1})
    assert [step["report"]["success"] for step in recorded[0]] == [True, True, False, False, True, True]
    assert [step["update"] for step in recorded[0]] == [0, 1, 1, 1, 4, 5]
    for step in recorded[0]:
        assert all(np.isfinite(place["after"]).all() for place in step["buckets"])


def test_changing_loss_scale_with_previous():
    """fp16's dynamic scale: kept gradients are unscaled when kept and scaled when used."""
    config = LossyConfig(p_grad=0.5, grad_recovery="previous", loss_unit="packet", packet_bytes=1000)
    tiny = TinyGPT(dtype="fp16", initial_loss_scale=2.0**16)
    recorded = run_ranks(contract.plain, 2, tiny, config, 6)
    for weights, _reports in recorded:
        assert all(np.isfinite(value).all() for value in weights.values())


# --- a torch that cannot average -----------------------------------------------------------------------------------


def average_that_sums(rank):
    """Gloo sums where it should average, as that of torch 2.5 to 2.8 does: in an own loop, and under Megatron."""
    original = dist.reduce_scatter_tensor
    dist.reduce_scatter_tensor = lambda *args, **kwargs: original(*args, **kwargs | {"op": dist.ReduceOp.SUM})
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
