"""A run of FSDP2: the same bits as by hand, transports, log and replay, state, owners' weights, bytes."""

import dataclasses
import math

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_lossy.base.errors import UsageError
from megatron_lossy.config import LossyConfig
from megatron_lossy.delivery_log.reader import DeliveryLogFolder
from megatron_lossy.lab.delivery_log.verify import verify
from megatron_lossy.transport import BucketSpec, LossyGroup, lossy_all_gather, lossy_reduce_scatter
from tests import contract, fsdp
from tests.fsdp import Tiny, Training
from tests.test_pytorch import BOTH, RULES, same
from tests.test_udp import over_networks

pytestmark = [
    pytest.mark.shows(
        "FSDP2: the same bits as a loop over `LossyGroup` by hand",
        "FSDP2: pieces, UDP, log and replay, saved state, owners' weights",
    ),
    pytest.mark.slow,
]


CODED = dataclasses.replace(
    BOTH, loss_unit="packet", packet_bytes=40, wire_block=32, grad_wire="int8", param_wire="int8", transport="pieces"
)


class ByHand:
    """The training of :class:`tests.fsdp.Training` without FSDP2: flat replicas and ``LossyGroup``, by hand."""

    def __init__(self, config):
        self.size, self.rank = dist.get_world_size(), dist.get_rank()
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Linear(7, 11), *(fsdp.Block(11, 5 + 2 * k, False) for k in range(3)), nn.Linear(11, 3)
        )
        root = [*self.model[0].parameters(), *self.model[4].parameters()]
        self.buckets = [root, *(list(block.parameters()) for block in self.model[1:4])]
        self.replicas = [self.flat([one.detach() for one in bucket]) for bucket in self.buckets]
        shards = [replica.numel() // self.size for replica in self.replicas]
        self.own = [nn.Parameter(replica.view(self.size, -1)[self.rank].clone()) for replica in self.replicas]
        self.optimizer = torch.optim.AdamW(self.own, lr=0.01)
        self.group = LossyGroup.create(config, [BucketSpec(shard) for shard in shards])

    def flat(self, tensors):
        """[N * shard]: each tensor is cut by rows into N parts, padded at the end; a shard has one part of each."""
        parts = []
        for one in tensors:
            rows = math.ceil(one.shape[0] / self.size)
            padded = one.new_zeros(rows * self.size, *one.shape[1:])
            padded[: one.shape[0]] = one
            parts.append(padded.view(self.size, -1))
        return torch.cat(parts, dim=1).flatten()

    def unflatten(self, replica, bucket):
        rows = replica.view(self.size, -1)
        for one in bucket:
            width = math.ceil(one.shape[0] / self.size) * (one.numel() // one.shape[0])
            part, rows = rows[:, :width], rows[:, width:]
            one.data.copy_(part.reshape(-1)[: one.numel()].view_as(one))

    def step(self, step):
        for replica, bucket in zip(self.replicas, self.buckets):
            self.unflatten(replica, bucket)
        self.model.zero_grad()
        chance = torch.Generator().manual_seed(1000 * step + self.rank)
        x = torch.randn(6, 7, generator=chance)
        loss = (self.model(x) - x[:, :3].sin()).square().mean()
        loss.backward()
        for number, (bucket, own) in enumerate(zip(self.buckets, self.own)):
            own.grad = torch.empty_like(own)
            sent = self.flat([one.grad for one in bucket])
            lossy_reduce_scatter(self.group, number, own.grad, sent, step, op=dist.ReduceOp.AVG)
        self.optimizer.step()
        for number, (replica, own) in enumerate(zip(self.replicas, self.own)):
            lossy_all_gather(self.group, number, replica, own.detach(), step)
        return loss.item()


def by_hand(rank, config, steps):
    run = ByHand(config)
    losses = [run.step(step) for step in range(steps)]
    run.group.close()
    return losses, [replica.numpy() for replica in run.replicas]


def by_fsdp(rank, config, steps):
    run = Training(Tiny(), config)
    with fsdp.trained(run, range(steps)) as losses:
        run.lossy.settle()
        return losses, run.replicas()


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("rule", [*RULES, "codes"])
def test_a_loop_by_hand_gives_the_same_bits(world, rule, pool):
    config = CODED if rule == "codes" else dataclasses.replace(BOTH, grad_recovery=rule)
    same(pool.run(by_hand, world, config, 8), pool.run(by_fsdp, world, config, 8))


@over_networks
@pytest.mark.parametrize("config", [BOTH, CODED], ids=["raw", "codes"])
def test_networks_give_what_pieces_give(network, config, pool):
    mine = dataclasses.replace(config, **network)
    pieces = dataclasses.replace(config, transport="pieces")
    same(pool.run(fsdp.plain, 2, Tiny(), mine, 6), pool.run(fsdp.plain, 2, Tiny(), pieces, 6))


@pytest.mark.parametrize("setting", [{}, {"grad_recovery": "error-feedback", "grad_priority": "packet-mean:0.1"}])
def test_udp_without_loss_trains_as_fsdp2(setting, pool):
    config = LossyConfig(transport="udp", packet_bytes=64, **setting)
    same(pool.run(fsdp.plain, 2, Tiny(), config, 6), pool.run(fsdp.plain, 2, Tiny(), None, 6))


def test_pieces_by_value(pool):
    config = dataclasses.replace(BOTH, transport="pieces")
    contract.check(pool.run(fsdp.record, 2, Tiny(), config, 4), config, averaged=True, loses=True)


def test_error_feedback_with_priorities_by_value(pool):
    config = dataclasses.replace(BOTH, grad_recovery="error-feedback", grad_priority="packet-mean:0.2")
    lost = contract.check(pool.run(fsdp.record, 3, Tiny(), config, 5), config, averaged=True)
    assert lost["grad"]


@pytest.mark.parametrize("unit", ["shard", "packet"])
def test_the_log_replays_bit_for_bit(unit, pool, tmp_path):
    config = dataclasses.replace(BOTH, loss_unit=unit, delivery_log=str(tmp_path / "log"))
    tiny = Tiny(accumulation=2, synchronises=True)
    expected = pool.run(fsdp.plain, 2, tiny, config, 5)
    verdict = verify(DeliveryLogFolder(tmp_path / "log"))
    assert verdict.rows
    assert not verdict.problems
    again = dataclasses.replace(
        config, p_grad=0.0, p_param=0.0, delivery_log=None, loss_model=("trace",), trace=str(tmp_path / "log")
    )
    same(pool.run(fsdp.plain, 2, tiny, again, 5), expected)
    other = dataclasses.replace(config, delivery_log=None, loss_seed=7)
    assert pool.run(fsdp.plain, 2, tiny, other, 5)[0][1] != expected[0][1]


def measured(rank, config, steps):
    run = Training(Tiny(), config)
    with fsdp.trained(run, range(steps)):
        return run.lossy.metrics()


def test_monitors_measure(pool):
    config = dataclasses.replace(BOTH, drift_interval=5)
    first, second = pool.run(measured, 2, config, 20)
    assert first == second
    assert first["loss rate grad"] == pytest.approx(0.4, abs=0.05)
    assert first["loss rate param"] == pytest.approx(0.4, abs=0.05)
    # The prediction is for increments that have nothing to do with each other; momentum makes them alike.
    assert 1 < first["drift owner"] / first["drift owner predicted"] < 5


def interrupted(rank, config, steps):
    def astray():
        run = Training(Tiny(seed=1), config)
        for step in range(2):
            run.step(50 + step)
        return run

    return fsdp.resumed(lambda: Training(Tiny(), config), astray, steps)


@pytest.mark.parametrize("setting", [*RULES, "error-feedback", "compensated", "udp", "codes"])
def test_a_run_continues_bit_for_bit(setting, pool):
    flag = {"compensated": "param_send", "udp": "transport"}.get(setting, "grad_recovery")
    config = CODED if setting == "codes" else dataclasses.replace(BOTH, **{flag: setting})
    expected = pool.run(fsdp.plain, 2, Tiny(), config, 8)
    resumed = pool.run(interrupted, 2, config, 4)
    same(resumed, [(weights, losses[4:]) for weights, losses in expected])


def owned(rank, config, steps):
    run = Training(Tiny(), config)
    for step in range(steps):
        run.step(step)
    batch = torch.ones(2, 7)
    run.lossy.settle()
    before = run.replicas()
    with torch.no_grad():
        replica = run.model(batch).numpy()
        with run.lossy.owner_weights():
            owner = run.model(batch).numpy()
        again = run.model(batch).numpy()
    assert all(np.array_equal(one, other) for one, other in zip(before, run.replicas(), strict=True))
    np.testing.assert_array_equal(replica, again)
    whole = nn.Sequential(nn.Linear(7, 11), *(fsdp.Block(11, 5 + 2 * k, False) for k in range(3)), nn.Linear(11, 3))
    whole.load_state_dict({name: one.full_tensor() for name, one in run.model.state_dict().items()})
    with torch.no_grad():
        np.testing.assert_allclose(owner, whole(batch).numpy(), rtol=1e-6)
    run.step(steps)
    weights = run.weights()
    run.lossy.close()
    return replica, owner, weights


@pytest.mark.parametrize("send", ["plain", "compensated", "codes"])
def test_owners_weights_are_in_the_model_for_a_while(send, pool):
    config = CODED if send == "codes" else dataclasses.replace(BOTH, param_send=send)
    results = pool.run(owned, 2, config, 4)
    assert np.array_equal(results[0][1], results[1][1])
    assert not np.array_equal(results[0][0], results[1][0])
    undisturbed = pool.run(fsdp.plain, 2, Tiny(), config, 5)
    same([one[2] for one in results], [one[0] for one in undisturbed])


def traffic(rank, tiny, config, steps):
    run = Training(tiny, config)
    run.step(0)
    first = dict(run.lossy.sent_bytes)
    for step in range(1, steps + 1):
        run.step(step)
    sent = {phase: (count - first[phase]) / steps for phase, count in run.lossy.sent_bytes.items()}
    shards = sum(one.group.spec.shard_of("param") * 4 for one in run.lossy._gathers)
    run.lossy.close()
    return sent, (dist.get_world_size() - 1) * shards


@pytest.mark.parametrize("config", [LossyConfig(), BOTH], ids=["lossless", "lossy"])
def test_an_update_is_gathered_once(config, pool):
    """With resharding FSDP2 gathers twice: two thirds of its bytes are left."""
    for sent, once in pool.run(traffic, 2, Tiny(reshard=True), config, 3):
        assert sent == {"param": once, "grad": once}


def test_bytes_in_codes_are_fewer(pool):
    """34 of 128 in a block of 32 elements, a little more in short ones."""
    for sent, once in pool.run(traffic, 2, Tiny(), CODED, 3):
        assert sent["param"] == sent["grad"] and 34 / 128 <= sent["grad"] / once < 0.32


def used(rank):
    """Return, for each parameter group, the elements in use, in all parameters, and in all shards."""
    run = Training(Tiny(), BOTH)
    run.step(0)
    found = []
    for one in run.lossy._gathers:
        ranges = one.group.used()
        assert (ranges[1:, 0] >= ranges[:-1, 1]).all() and ranges.min() >= 0
        found.append((int(np.diff(ranges).sum()), sum(p.numel() for p in one.group.parameters), len(one.replica)))
    run.lossy.close()
    return found


def test_padding_is_no_part_of_what_is_used(pool):
    """Rows that three ranks cannot share out evenly are filled up."""
    found = pool.run(used, 3)[0]
    assert all(elements == parameters for elements, parameters, _ in found)
    assert any(elements < whole for elements, _, whole in found)


def scaled(rank, config, steps, overflows, tiny):
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1000)
    run = Training(tiny, config, scaler=scaler)
    updates = run.scaled_steps(scaler, steps, overflows)
    weights = run.weights()
    run.lossy.close()
    return weights, updates


@pytest.mark.parametrize("rule", ["renormalize", "previous", "error-feedback"])
def test_a_loss_scale_changes_nothing_but_the_steps_it_rejects(rule, pool):
    config = dataclasses.replace(BOTH, grad_recovery=rule)
    plain = pool.run(fsdp.plain, 2, Tiny(), config, 6)
    same([one[0] for one in pool.run(scaled, 2, config, 6, (), Tiny())], [one[0] for one in plain])
    for weights, updates in pool.run(scaled, 2, config, 6, (2, 3), Tiny()):
        assert updates == [0, 1, 1, 1, 4, 5]
        assert all(np.isfinite(value).all() for value in weights.values())


@pytest.mark.parametrize("rule", ["previous", "error-feedback"])
def test_a_loss_scale_changes_nothing_of_micro_batches_that_are_reduced_one_by_one(rule, pool):
    """Each is a round of its own. Its gradients are used if the scale has not shrunk since."""
    config, tiny = dataclasses.replace(BOTH, grad_recovery=rule), Tiny(accumulation=2, synchronises=True)
    plain = pool.run(fsdp.plain, 2, tiny, config, 5)
    same([one[0] for one in pool.run(scaled, 2, config, 5, (), tiny)], [one[0] for one in plain])


def two_models(rank, folder):
    """Two equal models in one process; then the second one again, by itself."""
    configs = [dataclasses.replace(BOTH, delivery_log=f"{folder}/log{k}") for k in range(3)]
    with pytest.raises(UsageError, match="has the log of another model; give each its own folder"):
        first = Training(Tiny(), configs[0])
        Training(Tiny(), configs[0])
    second = Training(Tiny(), configs[1])
    for step in range(4):
        first.step(step)
        second.step(step)
    saved = second.lossy.state_dict()
    first.lossy.close()
    alone = Training(Tiny(), configs[2])
    with pytest.raises(UsageError, match="number of the model was 1 there and is not there here"):
        alone.lossy.load_state_dict(saved)
    for step in range(4):
        alone.step(step)
    weights = first.weights(), second.weights(), alone.weights()
    second.lossy.close()
    alone.lossy.close()
    return weights


def test_two_models_of_a_process_lose_different_units(pool, tmp_path):
    expected = pool.run(fsdp.plain, 2, Tiny(), BOTH, 4)
    for (first, second, alone), (weights, _) in zip(pool.run(two_models, 2, str(tmp_path)), expected, strict=True):
        assert any(not np.array_equal(first[name], second[name]) for name in weights)
        same([first, alone], [weights, weights])  # one model has the draws that it always had


def test_metrics_have_no_rate_where_nothing_happened(pool):
    first, second, lossless = pool.run(rates, 2)[0]
    assert {"loss rate grad", "loss rate param"} <= first.keys()
    assert not {"loss rate grad", "loss rate param"} & second.keys()
    assert lossless["loss rate param"] == 0


def rates(rank):
    run = Training(Tiny(), BOTH)
    run.step(0)
    measured = [run.lossy.metrics(), run.lossy.metrics()]
    run.lossy.close()
    run = Training(Tiny(), dataclasses.replace(BOTH, p_param=0.0))
    run.step(0)
    measured.append(run.lossy.metrics())
    run.lossy.close()
    return measured
