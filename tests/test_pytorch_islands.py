"""FSDP2 whose copies are islands: weights are averaged between groups of ranks, gradients are not."""

import contextlib
import dataclasses

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from megatron_lossy.config import LossyConfig
from megatron_lossy.pytorch import make_lossy
from tests import fsdp
from tests.fsdp import Tiny
from tests.rules import assert_same

pytestmark = [pytest.mark.shows("FSDP2: islands average weights; saved and resumed; over UDP"), pytest.mark.slow]

ISLANDS = LossyConfig(islands=2, sync_method="parameters", sync_fraction=1.0, sync_interval=3, sync_delay=0)


class Island(fsdp.Training):
    """A model that two of four ranks shard; the other two have another copy."""

    def __init__(self, config):
        self.tiny = Tiny()
        mesh = init_device_mesh(self.tiny.where, (2, 2), mesh_dim_names=("replicate", "shard"))
        self.model = fsdp.build(self.tiny, mesh["shard"])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.lossy = None
        if config is not None:
            self.lossy = make_lossy(self.model, self.optimizer, config)


def trained(rank, config, steps):
    run = Island(config)
    losses, history = [], []
    for step in range(steps):
        losses.append(run.step(step))
        history.append(run.weights())
    with run.lossy.consensus_weights():
        run.lossy.settle()
        consensus = run.replicas()
    run.lossy.settle()
    replicas = run.replicas()
    measured = run.lossy.metrics()
    run.lossy.close()
    return losses, history, consensus, replicas, measured


def members(rank):
    run = Island(LOSSY)
    found = [list(group.wire.members) for group in run.lossy.groups]
    run.lossy.close()
    return found


def test_no_two_islands_lose_the_same(pool):
    """Ranks of different islands are different ranks of the full group, by which losses are drawn."""
    assert pool.run(members, 4) == [[[0, 1]], [[0, 1]], [[2, 3]], [[2, 3]]]


@pytest.mark.on_cuda
@pytest.mark.shows("FSDP2: islands have the mean of their weights")
def test_every_interval_all_weights_are_the_mean(pool):
    results = pool.run(trained, 4, ISLANDS, 6)
    alone = pool.run(trained, 4, dataclasses.replace(ISLANDS, sync_method="none", sync_interval=1), 6)
    for name in results[0][1][0]:
        if name.endswith("moment"):
            continue
        first, second = (results[rank][1] for rank in (0, 2))
        assert not np.array_equal(first[1][name], second[1][name])
        np.testing.assert_array_equal(first[2][name], second[2][name])
        mean = (alone[0][1][2][name] + alone[2][1][2][name]) / 2
        np.testing.assert_allclose(first[2][name], mean, rtol=1e-6, atol=1e-8)
    assert results[0][4]["sync bytes"] > 0


def left_by_an_error(rank):
    run = Island(LATE)
    run.step(0)
    run.lossy.settle()
    before = run.replicas()
    with contextlib.suppress(KeyError), run.lossy.consensus_weights():
        raise KeyError
    after = run.replicas()
    run.lossy.close()
    return all(np.array_equal(one, other) for one, other in zip(before, after, strict=True))


def test_an_error_in_an_evaluation_leaves_the_replicas_as_they_were(pool):
    assert pool.run(left_by_an_error, 4) == [True] * 4


def test_the_consensus_is_in_the_model_for_a_while(pool):
    results = pool.run(trained, 4, ISLANDS, 5)
    for buckets in zip(*(one[2] for one in results), strict=True):
        assert all(np.array_equal(buckets[0], one) for one in buckets)
    for bucket, consensus in enumerate(results[0][2]):
        mean = (results[0][3][bucket] + results[2][3][bucket]) / 2
        np.testing.assert_allclose(consensus, mean, rtol=1e-6, atol=1e-8)


LATE = dataclasses.replace(ISLANDS, sync_fraction=0.25, sync_interval=1, sync_delay=2, loss_unit="packet")
LOSSY = dataclasses.replace(LATE, p_grad=0.3, p_param=0.3, p_sync=0.2, packet_bytes=64)


def resumed(rank, config, steps):
    return fsdp.resumed(lambda: Island(config), lambda: Island(config), steps)


CODED = dataclasses.replace(LATE, sync_dtype="int8", wire_block=32, packet_bytes=68, sync_fraction=0.5)
OUTER = dataclasses.replace(CODED, sync_method="diloco", sync_dtype="int4", sync_fraction=0.25)


@pytest.mark.parametrize(
    "config", [LATE, LOSSY, CODED, OUTER], ids=["late", "with losses everywhere", "in 8 bits", "DiLoCo in 4 bits"]
)
def test_a_run_continues_bit_for_bit(config, pool):
    expected = pool.run(trained, 4, config, 8)
    for (weights, losses), (all_losses, history, *_) in zip(pool.run(resumed, 4, config, 4), expected, strict=True):
        assert_same((losses, weights), (all_losses[4:], history[-1]))


def test_over_udp(pool):
    config = dataclasses.replace(LATE, transport="udp", packet_bytes=64)
    results = pool.run(trained, 4, config, 6)
    assert all(np.isfinite(losses).all() for losses, *_ in results)
