"""Parameters sent with a lead, on real ranks: what is sent, what owners keep, and that the mean replica is not late."""

import dataclasses

import numpy as np
import pytest
import torch

from megatron_lossy import hooks
from megatron_lossy.base.errors import UsageError
from megatron_lossy.config import LossyConfig
from megatron_lossy.lab import theory
from megatron_lossy.lab.virtual.in_memory import LossyWorkers
from megatron_lossy.mechanisms.lead.lag import ReceiverCounts
from megatron_lossy.transport import BucketSpec, LossyGroup, lossy_all_gather
from tests import contract
from tests.ranks import run_ranks
from tests.test_transport import group_in_memory
from tests.test_virtual import assert_virtual_is_real, trained
from tests.tiny_gpt import DTYPES, TinyGPT, build, missing

pytestmark = pytest.mark.shows(
    "leads sent and weights kept by value, in every setting",
    "two virtual workers with a lead are two ranks, bit for bit",
    "a lead from rates that receivers count",
    "a quadratic that diverges plain converges with a lead",
)

PLAIN = LossyConfig(p_grad=0.2, p_param=0.4, loss_unit="packet", packet_bytes=1000)
COMPENSATED = dataclasses.replace(PLAIN, param_send="compensated")
BURSTS = dataclasses.replace(COMPENSATED, loss_unit="shard", loss_model=("gilbert-elliott:4",))
OVERLAPPED = {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 3000}
SETTINGS = {
    "fp32": (2, TinyGPT(), COMPENSATED),
    "fp32, overlapped": (2, TinyGPT(**OVERLAPPED), COMPENSATED),
    "bf16": (2, TinyGPT(dtype="bf16"), COMPENSATED),
    "bf16, overlapped": (2, TinyGPT(dtype="bf16", **OVERLAPPED), COMPENSATED),
    "bf16, bursts": (3, TinyGPT(dtype="bf16", **OVERLAPPED), BURSTS),
    "fp16 that overflows": (2, TinyGPT(dtype="fp16", initial_loss_scale=2.0**18, **OVERLAPPED), COMPENSATED),
    "two instances": (4, TinyGPT(instances=2, **OVERLAPPED), COMPENSATED),
    "experts": (4, TinyGPT(expert=2, experts=4, **OVERLAPPED), COMPENSATED),
    "tensor parallel": (4, TinyGPT(tensor=2, **OVERLAPPED), COMPENSATED),
    "pipeline, tied": (4, TinyGPT(pipeline=2, tied=True, accumulation=2, **OVERLAPPED), COMPENSATED),
}


class Leads:
    """Values that others get of owners, for ``contract.check``: float32 weights and a lead, rounded once."""

    def __init__(self, config, dtype):
        self.c, self.r = map(np.float32, group_in_memory(config, rank=1).params[0].lag.lead(5))
        self.dtype, self.leads, self.ahead = dtype, {}, 0

    def rounded(self, weights):
        return torch.from_numpy(weights).to(self.dtype).float().numpy()

    def __call__(self, place, before, owners):
        bucket = place["stream"], place["number"], tuple(place["group"])
        old, new = np.array(place["mains"]).swapaxes(0, 1)
        np.testing.assert_array_equal(owners, self.rounded(new))  # an owner's shard is its own, without a lead
        lead = self.c * (new - old) + self.r * self.leads.get(bucket, np.float32(0))
        self.leads[bucket] = lead
        self.ahead += np.count_nonzero(self.rounded(new + lead) != owners)
        return self.rounded(new + lead)


@pytest.mark.on_cuda
@pytest.mark.shows("leads sent and weights kept by value, in every setting")
@pytest.mark.parametrize("name", SETTINGS)
def test_what_is_sent_and_what_owners_keep(name, pool):
    """On every rank to the last bit, also where an update is skipped, and after a second gather."""
    world, tiny, config = SETTINGS[name]
    if missing(tiny):
        pytest.skip(missing(tiny))
    recorded = pool.run(contract.record, world, tiny, config, 6, None, (), False, None, 2)
    leads = Leads(config, DTYPES[tiny.dtype])
    contract.check(recorded, config, crossing=leads, loses=True)
    assert leads.ahead


def without_main_weights(rank):
    lossy = hooks.install(COMPENSATED)
    run = build(TinyGPT(dtype="bf16"))
    for optimizer in getattr(run.optimizer, "chained_optimizers", [run.optimizer]):
        for mains in optimizer.shard_fp32_from_float16_groups:
            mains[:] = [None] * len(mains)  # as --use-precision-aware-optimizer, which needs CUDA, leaves them
    with pytest.raises(
        UsageError, match="--param-send compensated with --use-precision-aware-optimizer: the optimizer"
    ):
        lossy.begin_update()


def test_an_optimizer_that_keeps_its_weights_to_itself_is_refused():
    run_ranks(without_main_weights, 2)


def test_the_lead_follows_the_loss_model(tmp_path):
    """From the flags, at the rate of the step, over the receivers of an owner."""

    def lead(step=5, rank=1, **flags):
        return group_in_memory(LossyConfig(**{"param_send": "compensated"} | flags), rank=rank).params[0].lag.lead(step)

    assert lead(p_param=0.4) == pytest.approx((2 / 3, 0))
    assert lead(3, loss_schedule=("0:0,3:0.2",)) == pytest.approx((0.25, 0))
    assert lead(2, loss_schedule=("0:0,3:0.2",)) == (0, 0)
    bursts = {"p_param": 0.4, "loss_model": ("gilbert-elliott:4",)}
    assert lead(**bursts) == pytest.approx(tuple(theory.Lag.of(0.4, 4.0).lead))
    np.savetxt(tmp_path / "rates", [[0, 0.1, 0.1], [0.2, 0, 0.6], [0.1, 0.1, 0]])
    mixed = theory.lead(0.4, (0.25 + 1.5) / 2)
    assert lead(loss_model=(f"per-link:{tmp_path / 'rates'}",)) == pytest.approx(tuple(mixed))
    assert lead(p_param=0.4, param_send="compensated:1.0,0.25") == (1.0, 0.25)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("config", [COMPENSATED, BURSTS], ids=["packets", "bursts"])
@pytest.mark.slow
def test_two_virtual_workers_are_two_ranks_bit_for_bit(dtype, config, pool):
    tiny = TinyGPT(dtype=dtype, initial_loss_scale=2.0**18, **OVERLAPPED)
    ranks = pool.run(trained, 2, tiny, config, 6)
    [both] = pool.run(trained, 1, tiny, config, 6, 2)
    assert_virtual_is_real(both, ranks)


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    """Independent losses, which only a count reveals."""
    path = tmp_path_factory.mktemp("trace") / "trace.npz"
    random = np.random.default_rng(3)
    np.savez(path, **{phase: random.random((8, 2, 2, 60)) > 0.4 for phase in ("grad", "param")})
    packets = {"loss_unit": "packet", "packet_bytes": 1000}
    return LossyConfig(loss_model=("trace",), trace=str(path), param_send="compensated", **packets)


@pytest.mark.parametrize("skipped", [(), (3, 4)])
def test_where_nobody_knows_the_rate_receivers_count(skipped, trace, pool):
    """Real ranks and virtual workers alike; the sums of all ranks arrive an update later, and a skipped update counts nothing."""
    tiny = TinyGPT(loss_scale=8.0 if skipped else None, **OVERLAPPED)
    ranks = pool.run(trained, 2, tiny, trace, 8, None, skipped)
    [both] = pool.run(trained, 1, tiny, trace, 8, 2, skipped)
    assert_virtual_is_real(both, ranks)
    plain = pool.run(trained, 2, tiny, dataclasses.replace(trace, param_send="plain"), 8, None, skipped)
    assert any(not np.array_equal(plain[0][-1][2][key], value) for key, value in ranks[0][-1][2].items())


def test_receivers_count_from_the_start_where_a_later_rate_tells_nothing():
    """Bursts so long that ages of thousands of steps matter, after steps without loss."""
    for burst, counts in ((20.0, False), (500.0, True)):
        config = LossyConfig(
            loss_model=(f"gilbert-elliott:{burst}",), loss_schedule=("0:0,10:0.3",),
            param_send="compensated",
        )  # fmt: skip
        group = group_in_memory(config, rank=1, shard=50)
        lag = group.params[0].lag
        assert (lag.counted is not None) == counts
        assert lag.lead(0) == (0, 0) and (lag.lead(10) == (0, 0)) == counts


def test_counted_lag_is_that_of_the_losses():
    """600 steps of 50 packets from two senders: five standard errors (false alarm 6e-7)."""
    p = 0.4
    group = group_in_memory(LossyConfig(p_param=p, loss_unit="packet", packet_bytes=4), rank=1, shard=50)
    counted, units = ReceiverCounts(), group.params[0].units
    for step in range(600):
        delivery = group.delivery("param", step)
        counted.count(0, units, delivery)
        counted.count(0, units, delivery)  # a repeated gather
    assert counted.lag() == (0, 0)
    counted.coming = counted.sums.copy()
    counted.begin_update()
    share, age = counted.lag()
    assert counted.sums[2] == 600 * 50 * 2
    assert abs(share - p) < 5 * np.sqrt(p * (1 - p) / 60_000)
    assert age == pytest.approx(p / (1 - p), rel=0.05)


def sent_from_elsewhere(rank, config, steps):
    """Return this rank's own shard in its replica; it is sent from another tensor."""
    group = LossyGroup.create(config, [BucketSpec(500)])
    replica, mine, found = torch.zeros(1000), torch.zeros(500), []
    for step in range(steps):
        mine += 1
        lossy_all_gather(group, 0, replica, mine, step)
        found.append((replica[rank * 500 : (rank + 1) * 500].unique().tolist(), mine.unique().tolist()))
    return found


def test_the_own_shard_has_no_lead_wherever_it_was_sent_from(pool):
    config = LossyConfig(p_param=0.4, loss_unit="packet", packet_bytes=4, param_send="compensated:1.0")
    for found in pool.run(sent_from_elsewhere, 2, config, 4):
        assert found == [([step + 1.0], [step + 1.0]) for step in range(4)]


def test_a_lead_follows_a_schedule():
    """In steps without loss nothing is ahead, and the lead begins anew; against the recursion."""
    config = LossyConfig(
        loss_model=("gilbert-elliott:4",), loss_schedule=("0:0.4,4:0,7:0.2",), param_send="compensated"
    )
    workers, shard, random = 3, 8, np.random.default_rng(5)
    lossy = LossyWorkers(config, [BucketSpec(shard)], workers)
    replicas = [torch.zeros(workers * shard) for _ in range(workers)]
    owned = [replica.chunk(workers)[rank] for rank, replica in enumerate(replicas)]
    weights, lead = np.zeros((workers, shard), np.float32), np.zeros((workers, shard), np.float32)
    expected, ahead = np.zeros((workers, workers, shard), np.float32), []
    for step in range(11):
        before, weights = weights, weights + random.standard_normal(weights.shape).astype(np.float32)
        for mine, value in zip(owned, weights, strict=True):
            mine.copy_(torch.from_numpy(value))
        lossy.all_gather(0, replicas, owned, step)
        rate = 0.4 if step < 4 else 0.0 if step < 7 else 0.2
        c, r = theory.Lag.of(rate, 4.0).lead if rate else (0.0, 0.0)
        assert lossy.groups[0].params[0].lag.lead(step) == pytest.approx((c, r), rel=1e-6)
        lead = (c * (weights - before) + r * lead) * (step > 0)
        ahead.append(np.abs(lead).max())
        for rank, group in enumerate(lossy.groups):
            delivery = group.delivery("param", step)
            there = np.ones((workers, shard), dtype=bool) if delivery is None else delivery.arrived[0]
            expected[rank] = np.where(there, weights + lead, expected[rank])
            expected[rank, rank] = weights[rank]
            np.testing.assert_allclose(replicas[rank].numpy().reshape(workers, shard), expected[rank], atol=1e-5)
    assert [value > 0 for value in ahead] == [step not in (0, 4, 5, 6) for step in range(11)]


def descend(config, gain, beta1, workers, steps):
    """Adam's momentum on quadratics, one per weight, with gradients at the replicas: the mean square of the weights."""
    lossy = LossyWorkers(config, [BucketSpec(10)], workers)
    replicas = [torch.ones(workers * 10) for _ in range(workers)]
    own = [replica.chunk(workers)[rank] for rank, replica in enumerate(replicas)]
    moment = torch.zeros(workers * 10)
    for step in range(steps):
        moment = beta1 * moment + (1 - beta1) * torch.stack(replicas).mean(dim=0)
        for mine, part in zip(own, moment.chunk(workers), strict=True):
            mine -= gain * part
        lossy.all_gather(0, replicas, own, step)
        if not torch.isfinite(torch.cat(own)).all():
            break
    return torch.cat(own).square().mean().item()


@pytest.mark.slow
def test_a_quadratic_that_diverges_plain_converges_compensated():
    """At a gain between both limits; and below the lower one both converge."""
    p, beta1, workers = 0.4, 0.9, 16
    config = LossyConfig(p_param=p, loss_unit="packet", packet_bytes=4)
    mean = theory.Lag(p * (workers - 1) / workers, p)  # over all workers, the owner among them
    limit = theory.stability_limit(beta1, mean)
    sends = dataclasses.replace(config, param_send="compensated")
    assert limit < 2 and theory.stability_limit(beta1) == pytest.approx(38)
    assert descend(config, 6.0, beta1, workers, 100) > 1e4
    assert descend(sends, 6.0, beta1, workers, 100) < 1e-2
    assert descend(config, 0.6 * limit, beta1, workers, 150) < 1e-2
    assert descend(config, 1.5 * limit, beta1, workers, 150) > 10
