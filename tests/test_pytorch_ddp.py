"""DDP over gloo: without loss every bit is torch's; with loss every value is the reference's; replicas are kept together."""

import dataclasses
import functools

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from megatron_lossy.base.device import current_device
from megatron_lossy.base.exchange import Exchange, Stream, units_of
from megatron_lossy.config import LossyConfig
from megatron_lossy.pytorch import make_lossy
from megatron_lossy.transport import Network
from tests import fsdp
from tests.reference import ReferenceReduce, pieces
from tests.rules import delivered_among
from tests.test_pytorch import same

pytestmark = [
    pytest.mark.shows(
        "DDP: without loss every bit is torch's", "DDP: every rule and unit by value; averages, check, repair"
    ),
    pytest.mark.slow,
]

LOSSY = LossyConfig(p_grad=0.4, loss_unit="packet", packet_bytes=64, param_sync_interval=10**6)
RULES = ["renormalize", "renormalize-remote", "previous", "zero"]


class Training:
    """A network in DDP with small buckets; ``config`` None leaves DDP alone."""

    def __init__(self, config, dtype=torch.float32, accumulation=1, how=None, optimizer=torch.optim.AdamW, **ddp):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(7, 11), *(fsdp.Block(11, 5 + 2 * k, False) for k in range(3)), nn.Linear(11, 3))
        self.dtype, self.accumulation = dtype, accumulation
        self.model = DistributedDataParallel(model.to(current_device(), dtype), bucket_cap_mb=0.0005, **ddp)
        self.optimizer = optimizer(self.model.parameters(), lr=0.01)
        self.lossy = None if config is None else make_lossy(self.model, self.optimizer, config, **(how or {}))

    def step(self, step):
        for part in range(self.accumulation):
            self.model.require_backward_grad_sync = part == self.accumulation - 1
            loss = self.loss(step * self.accumulation + part)
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def loss(self, number):
        chance = torch.Generator().manual_seed(1000 * number + dist.get_rank())
        x = torch.randn(6, 7, generator=chance).to(current_device())
        return (self.model(x.to(self.dtype)) - x[:, :3].sin()).float().square().mean()

    def weights(self):
        return {name: one.detach().float().cpu().numpy().copy() for name, one in self.model.named_parameters()}


def plain(rank, config, steps, how):
    run = Training(config, **how)
    with fsdp.trained(run, range(steps)) as losses:
        return run.weights(), losses, {} if run.lossy is None else run.lossy.metrics()


def trained(found):
    """Weights and losses of all ranks, without metrics."""
    return [run[:2] for run in found]


@pytest.mark.on_cuda
@pytest.mark.shows("DDP: without loss every bit is torch's")
@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"dtype": torch.bfloat16},
        {"accumulation": 3},
        {"gradient_as_bucket_view": True},
        {"static_graph": True},
        {"find_unused_parameters": True},
    ],
    ids=lambda how: next(iter(how), "plain"),
)
def test_without_loss_it_is_ddp_bit_for_bit(world, how, pool):
    if world > 2 and how and "dtype" not in how:
        pytest.skip("two ranks show it")
    expected = trained(pool.run(plain, world, None, 20, how))
    later = dataclasses.replace(LOSSY, p_grad=0.0, loss_schedule=("0:0,1000:0.5", "0:0"))
    same(trained(pool.run(plain, world, LossyConfig(), 20, how)), expected)
    if world == 2:
        same(trained(pool.run(plain, world, later, 20, how)), expected)


def record(rank, config, steps):
    """For each lossy round and bucket: gradient before and after, and how the bucket is cut."""
    run = Training(config)
    rounds = []
    for step in range(steps):
        seen = {}
        if step == 3:
            _spy(run.lossy, rounds)
        if step >= 3:
            rounds.append(seen)
        run.step(step)
    cut = run.lossy._lossy[0].wire.cut
    sizes = [(one.shard, one.elements, one.first, units_of(cut["grad"])) for one in cut["grad"]]
    run.lossy.close()
    return rounds, sizes


def _spy(lossy, rounds):
    original = lossy._begin

    def begin(number, gradient):
        before = gradient.float().cpu().numpy().copy()
        end = original(number, gradient)

        def ended():
            end()
            rounds[-1][number] = before, gradient.float().cpu().numpy().copy()

        return ended

    lossy._begin = begin


def check(recorded, config):
    """Every bucket of every rank against the reference. Return the number of units that were lost in each half."""
    world, lost = len(recorded), [0, 0]
    both = config.drawn_with("param")
    networks = {phase: Network(both, phase, world) for phase in ("grad", "param")}
    rules = {}
    for step in range(len(recorded[0][0])):
        for number, (shard, elements, first, total) in enumerate(recorded[0][1]):
            count = len(pieces(shard, elements))

            def arrived(phase, step=step, total=total, units=slice(first, first + count)):
                exchange = Exchange(phase, Stream(), step + 3)
                return delivered_among(range(world), networks[phase], exchange, total)[:, :, units]

            sent = [padded(rounds[step][number][0], world * shard) for rounds, _ in recorded]
            sent = np.array(sent).reshape(world, world, shard)
            rule = rules.setdefault(number, ReferenceReduce(config.grad_recovery, world, shard, elements))
            reduced = rule(sent, arrived("grad")) * np.float32(world)
            here = arrived("param")
            for rank, (rounds, _) in enumerate(recorded):
                expected = sent[rank] * np.float32(world)
                for owner in range(world):
                    for unit, piece in enumerate(pieces(shard, elements)):
                        if here[owner, rank, unit]:
                            expected[owner, piece] = reduced[owner, piece]
                got = rounds[step][number][1]
                np.testing.assert_allclose(got, expected.reshape(-1)[: len(got)], rtol=1e-5, atol=1e-6)
            lost[0] += int((~arrived("grad")).sum())
            lost[1] += int((~here).sum())
    return lost


def padded(values, size):
    return np.concatenate([values, np.zeros(size - len(values), dtype=values.dtype)])


@pytest.mark.on_cuda
@pytest.mark.shows("DDP: every rule and unit by value")
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("unit", ["shard", "bucket", "packet"])
def test_every_rule_and_unit_by_value(rule, unit, pool):
    config = dataclasses.replace(LOSSY, grad_recovery=rule, loss_unit=unit)
    recorded = pool.run(record, 3, config, 7)
    assert len(recorded[0][1]) > 2
    assert all(check(recorded, config))


def test_pieces_by_value(pool):
    config = dataclasses.replace(LOSSY, transport="pieces")
    assert all(check(pool.run(record, 2, config, 6), config))


def apart(results):
    return max(np.abs(one - results[0][0][name]).max() for weights, *_ in results for name, one in weights.items())


def test_lost_gradients_drive_replicas_apart_and_averages_keep_them_together(pool):
    free = pool.run(plain, 3, LOSSY, 12, {})
    averaged = dataclasses.replace(LOSSY, param_sync_interval=4)
    kept = pool.run(plain, 3, averaged, 12, {})
    assert apart(free) > 0
    assert apart(kept) == 0
    assert apart(pool.run(plain, 3, averaged, 11, {})) > 0
    assert kept[0][2]["loss rate grad"] == pytest.approx(0.4, abs=0.1)


def test_gradients_that_differ_are_repaired(pool):
    config = LossyConfig(grad_error="gaussian:1rms", grad_error_ranks=(1,), replica_check="repair")
    repaired = pool.run(plain, 3, config, 10, {})
    assert apart(repaired) == 0
    broken = dataclasses.replace(config, replica_check="none", param_sync_interval=10**6)
    assert apart(pool.run(plain, 3, broken, 10, {})) > 0


def averaged_weights(rank, config, steps):
    run = Training(config)
    with fsdp.trained(run, range(steps)):
        before = run.weights()
        with run.lossy.owner_weights():
            mean = run.weights()
        return before, mean, run.weights()


def test_owners_weights_are_the_mean(pool):
    results = pool.run(averaged_weights, 3, LOSSY, 8)
    for name in results[0][0]:
        mean = np.mean([before[name] for before, _, _ in results], axis=0)
        for before, middle, after in results:
            np.testing.assert_allclose(middle[name], mean, rtol=1e-5, atol=1e-7)
            np.testing.assert_array_equal(before[name], after[name])


def past_the_exchanges(rank):
    run, before, after = Training(LOSSY), [], []
    for step in range(4):
        run.step(step)
    with pytest.raises(
        RuntimeError, match=r"DDP's bucket \d+ has 3 elements, and had None when the buckets were final"
    ):
        run.lossy._begin(len(run.lossy.buckets), torch.ones(3))
    next(run.model.parameters()).grad = torch.zeros_like(next(run.model.parameters()))  # one of many
    with pytest.raises(RuntimeError, match="the optimizer has gradients, but none was exchanged since its last step"):
        run.optimizer.step()
    run.optimizer.zero_grad()
    run.lossy.reduction_begins.append(lambda number, gradient: before.append(number))
    run.lossy.reduction_ends.append(lambda number, gradient: after.append(number))
    run.step(4)
    seen = len(before), len(after)
    run.lossy.close()
    run.step(5)
    return len(run.lossy.buckets), seen, (len(before), len(after))


def test_what_goes_past_the_exchanges_is_an_error_and_a_closed_run_sees_nothing(pool):
    for buckets, seen, later in pool.run(past_the_exchanges, 2):
        assert seen == later == (buckets, buckets)


def resumed_elsewhere(rank, config, steps, how):
    """As a program saves: weights and optimizer of the first rank, and the state of each."""
    make = functools.partial(Training, config, **how)
    return *fsdp.resumed(make, make, steps, of_first=True), {}


@pytest.mark.parametrize("rule", RULES)
def test_a_run_whose_buckets_stay_continues_bit_for_bit(rule, pool):
    how = {"find_unused_parameters": True}
    config = dataclasses.replace(LOSSY, param_sync_interval=3, grad_recovery=rule)
    expected = pool.run(plain, 2, config, 10, how)
    resumed = pool.run(resumed_elsewhere, 2, config, 5, how)
    same(resumed, [(weights, losses[5:], {}) for weights, losses, _ in expected])


def first_lossy(rank, how):
    run = Training(LOSSY, **how)
    for step in range(6):
        run.step(step)
        if run.lossy.metrics().get("loss rate grad"):
            break
    run.lossy.close()
    return step


def test_losses_begin_earlier_where_buckets_stay(pool):
    assert pool.run(first_lossy, 2, {}) == [3, 3]
    assert pool.run(first_lossy, 2, {"find_unused_parameters": True}) == [1, 1]
    assert min(pool.run(first_lossy, 2, {"find_unused_parameters": True, "static_graph": True})) >= 3
