"""Virtual stages: the turn of each worker computes with its own weights of before, stage by stage."""

from __future__ import annotations

import re

import numpy as np
import pytest

from megatron_lossy.config import LossyConfig
from megatron_lossy.lab.virtual import VirtualCluster
from tests.ranks import run_ranks
from tests.tiny_gpt import TinyGPT, build

pytestmark = pytest.mark.shows("virtual stages compute with each worker's own old replica")

STEPS, LAYERS = 7, 4
STAGED = {"async_pipeline": True, "virtual_stages": 4}
LOSS = {"p_param": 0.4, "p_grad": 0.2, "loss_unit": "packet", "packet_bytes": 256}


def stage_by_name(name: str, stages: int) -> int:
    if "embedding" in name:
        return 0
    found = re.search(r"layers\.(\d+)", name)
    return int(found[1]) // (LAYERS // stages) if found else stages - 1


def observe(rank: int, workers: int, flags: dict) -> tuple:
    """Return replicas by name before each iteration, and what the turns of workers computed with."""
    tiny = TinyGPT(layers=LAYERS, tied=False, optimizer="sgd", lr=0.5, clip_grad=0.4, accumulation=2)
    run = build(tiny, VirtualCluster(LossyConfig(**STAGED, **flags), workers, gapless=True))
    before, during = [], []
    forward_backward = run._forward_backward

    def look(*args, **kwargs):
        during[-1].append(run.weights())
        return forward_backward(*args, **kwargs)

    run._forward_backward = look
    for step in range(STEPS):
        replicas = []
        for worker in range(workers):
            with run.cluster.worker(worker, evaluates=True):
                replicas.append(run.weights())
        before.append(replicas)
        during.append([])
        run.step(step)
    return before, during


@pytest.mark.parametrize("flags", [{}, LOSS], ids=["no loss", "lost parameters"])
def test_every_worker_computes_with_its_own_old_replica(flags):
    """Bit for bit, stale units included; evaluation has the newest."""
    stages, workers = STAGED["virtual_stages"], 3
    [(before, during)] = run_ranks(observe, 1, workers, flags)
    for step in range(STEPS):
        for worker in range(workers):
            for name, weight in during[step][worker].items():
                version = max(step - (stages - 1 - stage_by_name(name, stages)), 0)
                assert np.array_equal(weight, before[version][worker][name]), (step, worker, name)
    name = "decoder.final_layernorm.weight"
    assert not np.array_equal(before[-1][0][name], before[0][0][name])
    apart = [np.array_equal(*(before[-1][worker][name] for worker in (0, 1))) for name in before[0][0]]
    assert not all(apart) if flags else all(apart)
