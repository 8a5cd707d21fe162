"""Evaluating and saving with the owners' weights, and resuming with stale replicas, on real ranks."""

import dataclasses
import re

import numpy as np
import pytest
import torch

from megatron_lossy.base.errors import UsageError
from megatron_lossy.config import LossyConfig
from tests.contract import installed, plain
from tests.ranks import run_ranks
from tests.rules import assert_same
from tests.tiny_gpt import TinyGPT, build

pytestmark = pytest.mark.shows(
    "owners' weights for evaluation and saving", "replicas saved by `--save-replicas` and restored"
)

CONFIG = LossyConfig(p_grad=0.4, p_param=0.4, loss_unit="packet", packet_bytes=1000, save_replicas=True)
OVERLAPS = {"none": TinyGPT(), "both": TinyGPT(overlap_grad_reduce=True, overlap_param_gather=True, bucket_size=3000)}


def inside_and_after(rank, tiny, config):
    """Buffers before, within and after owner_weights; and whether training goes on as if it had not been."""
    with installed(config) as lossy:
        run = build(tiny)
        seen = []
        for step in range(4):
            run.step(step)
            if step in (0, 2):
                if not tiny.overlap_param_gather:
                    before = run.replica_buffers()
                with lossy.owner_weights(run.model):
                    owners, inside = run.owner_buffers(), run.replica_buffers()
                if tiny.overlap_param_gather:
                    before = None  # the gather was still to come
                seen.append((before, owners, inside, run.replica_buffers()))
        if tiny.overlap_param_gather:
            run.gather()
        return seen, run.weights()


def undisturbed(pool, world, tiny, config):
    """Assert that training goes on as without owner_weights; how many values of replicas were no owner's."""
    expected = [final for final, _ in pool.run(plain, world, tiny, config, 4)]
    stale = 0
    for rank, (seen, final) in enumerate(pool.run(inside_and_after, world, tiny, config)):
        for before, owners, inside, after in seen:
            assert_same(inside, owners)
            if before is not None:
                assert_same(before, after)
            stale += sum(np.count_nonzero(after[name] != owners[name]) for name in owners)
        assert_same(final, expected[rank])
    return stale


@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize(
    ("world", "send", "dtype"), [(1, "plain", "fp32"), (3, "plain", "fp32"), (2, "compensated", "bf16")]
)
@pytest.mark.slow
def test_owner_weights_do_not_disturb_training(overlap, world, send, dtype, pool):
    """Also where what arrived is ahead of the owners' weights."""
    tiny, config = dataclasses.replace(OVERLAPS[overlap], dtype=dtype), dataclasses.replace(CONFIG, param_send=send)
    assert bool(undisturbed(pool, world, tiny, config)) == (world > 1)


def save_and_go_on(rank, tiny, config, folder):
    """Four steps; after two of them the replicas are saved and the owners' weights and optimizer noted."""
    with installed(config) as lossy:
        run = build(tiny)
        for step in range(2):
            run.step(step)
        lossy.save_replicas(folder)
        with lossy.owner_weights(run.model):
            weights = run.replica_buffers()
        return weights, _continue(run, lossy)


def _continue(run, lossy):
    """Gradients sent in the third iteration depend on the replicas alone."""
    report = run.step(2)
    return report["loss"], lossy.update


def resume(rank, tiny, config, folder, weights):
    """The third iteration; without a ``folder`` from the owners' weights, with no stale replica."""
    with installed(config) as lossy:
        run = build(tiny)
        for name, buffer in run._buffers() if weights else ():
            buffer.param_data.copy_(torch.from_numpy(weights[rank][name]))
        run.optimizer.reload_model_params()
        lossy.set_iteration(2)
        if folder is not None:
            lossy.load_replicas(folder)
        return _continue(run, lossy)


def refused(rank, *args):
    """Show the reason for :func:`resume`."""
    with pytest.raises(UsageError) as error:
        resume(rank, *args)
    return str(error.value)


@pytest.mark.parametrize("unit", ["shard", "packet"])
@pytest.mark.parametrize("rule", ["renormalize", "previous"])
@pytest.mark.parametrize("overlap", OVERLAPS)
def test_replicas_are_saved_and_restored(overlap, rule, unit, tmp_path, pool):
    config = dataclasses.replace(CONFIG, grad_recovery=rule, loss_unit=unit)
    saved = pool.run(save_and_go_on, 2, OVERLAPS[overlap], config, str(tmp_path))
    again = pool.run(resume, 2, OVERLAPS[overlap], config, str(tmp_path), [weights for weights, _ in saved])
    assert again == [report for _, report in saved]


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_what_a_network_lost_is_lost_when_its_replicas_are_restored(overlap, tmp_path):
    """Over UDP nobody can draw it again, and what is gathered first must not cross once more."""
    config = LossyConfig(transport="udp", packet_bytes=256, udp_deadline="0.3", save_replicas=True)
    saved = run_ranks(save_and_go_on, 2, OVERLAPS[overlap], config, str(tmp_path))
    again = run_ranks(resume, 2, OVERLAPS[overlap], config, str(tmp_path), [weights for weights, _ in saved])
    assert again == [report for _, report in saved]
    owners = run_ranks(resume, 2, OVERLAPS[overlap], LossyConfig(), None, [weights for weights, _ in saved])
    assert all(mine != theirs for mine, theirs in zip(again, owners, strict=True)), "nothing was stale"


@pytest.fixture(scope="module")
def replicas(tmp_path_factory, pool):
    """Replicas saved by two ranks after two iterations, and their weights."""
    folder = str(tmp_path_factory.mktemp("replicas"))
    config = dataclasses.replace(CONFIG, grad_recovery="previous")
    saved = pool.run(save_and_go_on, 2, OVERLAPS["both"], config, folder)
    return config, folder, [weights for weights, _ in saved], [report for _, report in saved]


@pytest.mark.parametrize(
    ("flags", "model", "difference"),
    [
        ({"p_grad": 0.3}, {}, "--p-grad was 0.4 there and is 0.3 here"),
        ({"loss_seed": 7}, {}, "--loss-seed was 1234 there and is 7 here"),
        ({"loss_model": ("gilbert-elliott",)}, {}, "--loss-model was bernoulli there and is gilbert-elliott here"),
        ({"packet_bytes": 500}, {}, "--packet-bytes was 1000 there and is 500 here"),
        ({"loss_unit": "bucket"}, {}, "--loss-unit was packet there and is bucket here"),
        ({}, {"tensor": 2}, "--tensor-model-parallel-size was 1 there and is 2 here"),
        ({}, {"instances": 2}, "optimizer instances of dense-e0-s0-c0 was 1 there and is 2 here"),
        ({}, {"bucket_size": 9000}, r"bucket 0 of dense-e0-s0-c0 was \d+ elements .* there and is \d+ element.* here"),
        ({}, {"dtype": "bf16"}, r"bucket 0 .* elements \(torch.float32, torch.float32\) there .*torch.bfloat16\) here"),
    ],
)
def test_replicas_of_another_run_are_refused(replicas, flags, model, difference, pool):
    """One line with what differs and both values, before anything is restored."""
    config, folder, _, _ = replicas
    tiny, other = dataclasses.replace(OVERLAPS["both"], **model), dataclasses.replace(config, **flags)
    for message in pool.run(refused, 2, tiny, other, folder, None):
        assert re.match(f"--save-replicas with {folder}: {difference}; without", message)


def test_replicas_of_other_ranks_and_none_are_refused(replicas, tmp_path, pool):
    config, folder, weights, _ = replicas
    for message in pool.run(refused, 3, OVERLAPS["both"], config, folder, None):
        assert "world size was 2 there and is 3 here" in message or "is missing" in message
    for message in pool.run(refused, 2, OVERLAPS["both"], config, str(tmp_path), weights):
        assert "saved without replicas" in message


def test_what_does_not_change_a_run_may_differ(replicas, pool):
    config, folder, weights, reports = replicas
    other = dataclasses.replace(config, eval_weights="both", drift_interval=5)
    assert pool.run(resume, 2, OVERLAPS["both"], other, folder, weights) == reports
