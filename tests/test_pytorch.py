"""FSDP2 over gloo: without loss every bit is torch's; with loss every value is the reference's."""

import dataclasses

import numpy as np
import pytest

from megatron_lossy.config import LossyConfig
from tests import contract, fsdp
from tests.fsdp import Tiny
from tests.rules import assert_same as same
from tests.tiers import few_at_once

pytestmark = pytest.mark.shows("FSDP2: without loss every bit is torch's", "FSDP2: every rule and unit by value")

BOTH = LossyConfig(p_grad=0.4, p_param=0.4, loss_unit="packet", packet_bytes=64)
RULES = ["renormalize", "renormalize-remote", "previous", "zero"]
SETTINGS = {
    "resharding": Tiny(reshard=True),
    "no resharding": Tiny(reshard=False),
    "bf16": Tiny(dtype="bf16"),
    "all bf16": Tiny(dtype="all bf16"),
    "accumulation": Tiny(accumulation=3),
    "each micro-batch reduced": Tiny(accumulation=2, synchronises=True),
    "prefetching": Tiny(prefetches=True),
    "handles": Tiny(asynchronous=True, prefetches=True),
    "recomputed": Tiny(checkpoints=True),
    "frozen": Tiny(frozen=True),
    "sums": Tiny(sums=True),
    "clipped": Tiny(clips=True),
}


#: Cases of make test; the rest run when there is time.
FEW = ("resharding", "accumulation", "handles")
SOME_SETTINGS = few_at_once(FEW, SETTINGS)


@pytest.mark.on_cuda
@pytest.mark.shows("FSDP2: without loss every bit is torch's")
@pytest.mark.parametrize("setting", SOME_SETTINGS)
def test_without_loss_it_is_fsdp2_bit_for_bit(setting, pool):
    tiny = SETTINGS[setting]
    expected = pool.run(fsdp.plain, 2, tiny, None, 20)
    later = LossyConfig(loss_schedule=("0:0,1000:0.5",), loss_unit="packet")
    for config in (LossyConfig(), later):
        same(pool.run(fsdp.plain, 2, tiny, config, 20), expected)


@pytest.mark.slow
@pytest.mark.parametrize("world", [3, 4])
def test_without_loss_more_ranks_are_fsdp2_bit_for_bit(world, pool):
    tiny = Tiny(accumulation=2, prefetches=True)
    same(pool.run(fsdp.plain, world, tiny, LossyConfig(), 20), pool.run(fsdp.plain, world, tiny, None, 20))


@pytest.mark.on_cuda
@pytest.mark.shows("FSDP2: every rule and unit by value")
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("unit", ["shard", "bucket", "packet"])
def test_every_rule_and_unit_by_value(rule, unit, pool):
    config = dataclasses.replace(BOTH, grad_recovery=rule, loss_unit=unit)
    contract.check(pool.run(fsdp.record, 3, Tiny(), config, 5), config, averaged=True, loses=True)


@pytest.mark.parametrize("setting", SETTINGS)
def test_every_setting_by_value(setting, pool):
    tiny = SETTINGS[setting]
    loose = {"rtol": 2e-2, "atol": 1e-2} if tiny.dtype == "all bf16" else {}
    recorded = pool.run(fsdp.record, 2, tiny, BOTH, 4)
    contract.check(recorded, BOTH, averaged=not tiny.sums, exact=tiny.dtype == "fp32", loses=True, **loose)


def test_another_divisor_than_the_number_of_ranks_by_value(pool):
    recorded = pool.run(fsdp.record, 2, Tiny(divided=4.0), BOTH, 3)
    assert contract.check(recorded, BOTH)["grad"]
    summed = pool.run(fsdp.record, 2, Tiny(sums=True), BOTH, 1)
    for divided, whole in zip(recorded, summed, strict=True):
        for one, other in zip(divided[0]["buckets"], whole[0]["buckets"], strict=True):
            np.testing.assert_array_equal(one["reduced"], other["reduced"] / 4)


HSDP = Tiny(replicas=2)


@pytest.mark.on_cuda
@pytest.mark.shows("HSDP: without loss every bit is torch's")
def test_hsdp_without_loss_is_torchs_bit_for_bit(pool):
    same(pool.run(fsdp.plain, 4, HSDP, LossyConfig(), 10), pool.run(fsdp.plain, 4, HSDP, None, 10))


def test_hsdp_loses_within_the_shards_and_stays_equal_between_replicas(pool):
    recorded = pool.run(fsdp.record, 4, HSDP, BOTH, 4)
    contract.check(recorded[:2], BOTH, averaged=True, loses=True)  # the first replica: ranks 0 and 1
    other = [rank[1]["buckets"][0]["after"] for rank in recorded]
    assert not np.array_equal(other[0], other[2])  # links of the two replicas lose by themselves
    weights = [found for found, _ in pool.run(fsdp.plain, 4, HSDP, BOTH, 6)]
    for name, value in weights[0].items():
        assert all(np.array_equal(value, one[name]) for one in weights)
