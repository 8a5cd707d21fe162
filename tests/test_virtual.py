"""The virtual cluster against real gloo ranks, the memory its replicas take, and virtual stages."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lossy.base.exchange import cut
from megatron_lossy.config import LossyConfig
from megatron_lossy.lab.virtual import VirtualCluster
from megatron_lossy.lab.virtual.versions import Versions
from tests.contract import made
from tests.ranks import run_ranks
from tests.tiny_gpt import TinyGPT, build

pytestmark = pytest.mark.shows(
    "two virtual workers are two ranks bit for bit", "virtual stages compute with each worker's own old replica"
)

STEPS = 5
UNITS = {"shard": {}, "bucket": {"loss_unit": "bucket"}, "packet": {"loss_unit": "packet", "packet_bytes": 512}}
RULES = ("renormalize", "renormalize-remote", "previous", "zero")
OVERFLOWS = 2.0**18  # the first two steps
BUCKETS = {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 4000}


def trace(path, size, units):
    random = np.random.default_rng(5)
    arrays = {phase: random.random((STEPS, size, size, units)) > 0.4 for phase in ("grad", "param")}
    np.savez(path, **arrays)
    return str(path)


def cases(folder, size):
    """(name, TinyGPT, LossyConfig): every unit and rule, every channel, every way Megatron reduces gradients."""
    lossy = {"p_grad": 0.4, "p_param": 0.4}
    for unit, flags in UNITS.items():
        for rule in RULES:
            yield f"{unit} {rule}", {"layers": 1, **BUCKETS}, LossyConfig(**lossy, **flags, grad_recovery=rule)
    matrix = folder / "rates.txt"
    np.savetxt(matrix, np.random.default_rng(1).uniform(0, 0.8, (size, size)))
    feedback = lossy | {"grad_recovery": "error-feedback"}
    channels = {
        "bursts": LossyConfig(**lossy, loss_model=("gilbert-elliott:3",)),
        "per link": LossyConfig(loss_model=(f"per-link:{matrix}",)),
        "trace": LossyConfig(loss_model=("trace",), trace=trace(folder / "trace.npz", size, 1)),
        "schedule": LossyConfig(loss_schedule=("0:0,2:0.5",)),
        "together": LossyConfig(**lossy, loss_correlation="source"),
        "nodes": LossyConfig(**lossy, lossy_links="inter-node:1"),
        "self": LossyConfig(**lossy, lossy_self=True, loss_seed=3),
        "no loss": LossyConfig(),
        "gradients only": LossyConfig(p_grad=0.4),
        "parameters only": LossyConfig(p_param=0.4, **UNITS["packet"]),
        "feedback": LossyConfig(**feedback, **UNITS["packet"]),
        "feedback in units of buckets": LossyConfig(**feedback, **UNITS["bucket"], grad_priority="none"),
        "quantile": LossyConfig(**feedback, **UNITS["packet"], grad_priority="element-quantile:0.2"),
        "zeros": LossyConfig(**lossy, **UNITS["packet"], grad_recovery="zero", grad_priority="packet-mean:0.1"),
    }
    for name, config in channels.items():
        yield name, {"layers": 1}, config
    both = LossyConfig(**lossy, **UNITS["packet"])
    for name, model in {
        "accumulation": {"accumulation": 3},
        "bf16": {"dtype": "bf16"},
        "fp16, overflowing at first": {"dtype": "fp16", "initial_loss_scale": OVERFLOWS},
        "bf16 in buckets, accumulation": {"dtype": "bf16", "accumulation": 2, **BUCKETS},
        "average in collective": {"average_in_collective": True},
        "per-token loss": {"per_token_loss": True},
        "untied": {"tied": False},
        "no clipping": {"clip_grad": 0.0},
        "weight decay": {"weight_decay": 0.1},
    }.items():
        yield name, model, both
        if "per_token_loss" not in model:
            yield f"{name}, previous", model, LossyConfig(**lossy, grad_recovery="previous")
        yield (
            f"{name}, feedback",
            model,
            dataclasses.replace(both, grad_recovery="error-feedback", grad_priority="packet-mean"),
        )


def trained(rank, tiny, config, steps=STEPS, workers=None, skipped=()):
    """After each step the loss, the norm, replicas and the owners' weights; of all ``workers``, if they are virtual."""
    history = []
    with made(tiny, config, workers, steps=steps) as (run, lossy):
        for step in range(steps):
            told = run.step(step, overflow_on=0 if step in skipped else None)
            if workers:
                replicas = run.all_replica_buffers()
                with lossy.owner_weights(run.model):
                    owners = run.replica_buffers()
            else:
                if tiny.overlap_param_gather:
                    run.gather()
                replicas, owners = run.replica_buffers(), run.owner_buffers()
            history.append((told["loss"], told["grad_norm"], replicas, owners))
    return history


def assert_virtual_is_real(virtual, ranks, owned=True):
    """Losses, norms, replicas and owners' weights of every step, bit for bit. Return whether a replica was not its owners'."""
    differed = False
    for step, (losses, norm, replicas, owners) in enumerate(virtual):
        for rank, history in enumerate(ranks):
            loss, real_norm, replica, real_owners = history[step]
            assert losses[rank] == loss and norm == real_norm, (step, rank)
            for key in replica:
                np.testing.assert_array_equal(replicas[rank][key], replica[key], f"step {step}")
                if owned:
                    np.testing.assert_array_equal(owners[key], real_owners[key], f"step {step}")
                differed |= not np.array_equal(replica[key], owners[key])
    return differed


def real_runs(rank, chosen):
    return virtual_runs(rank, chosen, None)


def virtual_runs(rank, chosen, workers):
    return {name: trained(rank, TinyGPT(**model), config, workers=workers) for name, model, config in chosen}


#: Of models: what one rule does, others do as well.
OTHER_RULES = (", previous", ", feedback")


@pytest.mark.slow
@pytest.mark.parametrize("others", [False, True], ids=["", "other rules"])
def test_two_workers_are_two_ranks_bit_for_bit(tmp_path, others):
    """Losses, gradient norms, both replicas and the owners' weights after every step, in every case."""
    # Quick, of other rules: those that keep what they kept where a step is skipped, or where a bucket is not the only one.
    quick = ("overflowing at first", "accumulation, ")
    chosen = [
        case
        for case in cases(tmp_path, 2)
        if (case[0].endswith(OTHER_RULES) and not any(name in case[0] for name in quick)) == others
    ]
    ranks = run_ranks(real_runs, 2, chosen)
    [virtual] = run_ranks(virtual_runs, 1, chosen, 2)
    for name, _, config in chosen:
        differed = assert_virtual_is_real(virtual[name], [one[name] for one in ranks])
        assert differed != config.phase("param").lossless, name  # or the comparison is empty


@settings(max_examples=60, deadline=None)
@given(
    workers=st.integers(1, 5),
    shards=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    unit=st.sampled_from(["shard", "bucket", "packet"]),
    rate=st.floats(0, 1),
    steps=st.integers(1, 8),
    seed=st.integers(0, 2**32),
    data=st.data(),
)
def test_versions_are_plain_copies(workers, shards, unit, rate, steps, seed, data):
    """Replicas put together from versions are those of workers that each keep a whole copy, at any loss; values read too."""
    random = np.random.default_rng(seed)
    units, total = cut(shards, [4] * len(shards), unit, 12)
    buffers = [torch.zeros(workers * shard) for shard in shards]
    versions = Versions(buffers, units, total, workers)
    copies = [[buffer.clone() for buffer in buffers] for _ in range(workers)]
    for step in range(steps):
        lost = random.random((workers, workers, total)) < rate
        lost[range(workers), range(workers)] = False
        versions.before_update(step, lost)
        successful = data.draw(st.booleans())
        if successful:
            for buffer in buffers:
                buffer.copy_(torch.from_numpy(random.standard_normal(buffer.numel()).astype(np.float32)))
        versions.after_update(successful)
        fresh = [buffer.clone() for buffer in buffers]
        places = [random.integers(buffer.numel(), size=random.integers(12)) for buffer in buffers]
        values = [versions.everyone(bucket, chosen) for bucket, chosen in enumerate(places)]
        for worker in range(workers):
            if successful:
                for number, (cut_, buffer) in enumerate(zip(units, buffers, strict=True)):
                    arrived = np.repeat(~lost[worker][:, cut_.numbers], cut_.elements, axis=1)
                    arrived = torch.from_numpy(np.ascontiguousarray(arrived[:, : cut_.shard]).reshape(-1))
                    copies[worker][number] = torch.where(arrived, buffer, copies[worker][number])
            versions.swap_in(worker)
            for buffer, copy, chosen, value in zip(buffers, copies[worker], places, values, strict=True):
                assert torch.equal(buffer, copy) and torch.equal(value[worker], copy[torch.from_numpy(chosen)])
            versions.swap_out()
            assert all(torch.equal(a, b) for a, b in zip(buffers, fresh, strict=True))
        saved = versions.state_dict()
        versions = Versions(buffers, units, total, workers)
        versions.load_state_dict(saved)


@pytest.mark.parametrize("unit", ["shard", "packet"])
def test_memory_follows_the_oldest_age_not_the_workers(unit):
    """64 workers, p = 0.1, 200 steps: at most 8 copies of the weights at any time, with shards about four."""
    workers, shard = 64, 64
    units, total = cut([shard], [4], unit, 16)
    buffer = torch.zeros(workers * shard)
    versions = Versions([buffer], units, total, workers)
    random = np.random.default_rng(0)
    most = 0
    for step in range(200):
        lost = random.random((workers, workers, total)) < 0.1
        lost[range(workers), range(workers)] = False
        versions.before_update(step, lost)
        blocks = [*versions._blocks.values(), versions._pending[2] or []]
        most = max(most, sum(block.rows.numel() for version in blocks for block in version))
        versions.after_update(True)
    copies = 1 + most / buffer.numel()
    assert 2 < copies < (5 if unit == "shard" else 8)


# --- virtual stages ---------------------------------------------------------------------------------------------------


LAYERS = 4
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
