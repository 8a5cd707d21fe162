"""The crossing of exchanges: deliveries, transfers, and the public lossy collectives on real gloo ranks."""

import itertools
import socket
import weakref

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_lossy.base.device import current_device
from megatron_lossy.base.errors import UsageError
from megatron_lossy.base.exchange import BucketUnits, Delivery, Exchange, Stream
from megatron_lossy.base.registry import MECHANISMS
from megatron_lossy.base.section import Flags
from megatron_lossy.channel.corruption import make_corruption
from megatron_lossy.channel.corruption.applied import Errors
from megatron_lossy.config import LossyConfig
from megatron_lossy.config.refusal import Section
from megatron_lossy.lab.virtual.in_memory import Memory, WorkerWire
from megatron_lossy.mechanisms.priority.protected import SparingRule
from megatron_lossy.recovery.base import Zero
from megatron_lossy.run.mechanism import Mechanism
from megatron_lossy.transport import (
    BucketSpec,
    LossyGroup,
    Network,
    Transfer,
    cut_buckets,
    lossy_all_gather,
    lossy_reduce_scatter,
)
from megatron_lossy.transport.base import CollectiveWire
from megatron_lossy.transport.network import consecutive_nodes, find_nodes
from tests.ranks import RankFailed, each, run_ranks
from tests.reference import ReferenceReduce, pieces, reference_gather
from tests.rules import delivered, delivered_among, reduce

pytestmark = pytest.mark.shows("lossy collectives of a plain process group, N = 1 to 4")

STEPS = 6
RULES = ["renormalize", "renormalize-remote", "previous", "zero"]
#: --loss-unit, --packet-bytes and the units per shard of 50 and 7 elements
UNITS = {"shard": 1, "bucket": 1, "packet": 48}  # 12 float32 elements: 5 and 1 units


def gradients(step, rank, size, shard):
    return np.random.default_rng([step, rank, shard]).standard_normal(size * shard).astype(np.float32)


def exchange_grads(rank, size, config, shards, asynchronous):
    group = LossyGroup.create(config, [BucketSpec(shard) for shard in shards])
    results = []
    for step in range(STEPS):
        works, outputs = [], []
        for bucket, shard in enumerate(shards):
            grads = torch.from_numpy(gradients(step, rank, size, shard)).to(current_device())
            output = grads[rank * shard : (rank + 1) * shard]  # in place, as Megatron does it
            works.append(lossy_reduce_scatter(group, bucket, output, grads, step, async_op=asynchronous))
            outputs.append(output)
        for work in works:
            if work is not None:
                work.wait()
                work.wait()  # a second wait must change nothing
        results.append([(output / size).cpu().numpy() for output in outputs])
    return results


def elements_of(config, bucket_shard):
    return config.packet_bytes // 4 if config.loss_unit == "packet" else bucket_shard


def deliveries(config, phase, size, shards, step):
    """For each bucket bool[N, N, units], numbered over the buckets as the semantics say."""
    counts = [len(pieces(shard, elements_of(config, shard))) for shard in shards]
    total = 1 if config.loss_unit == "shard" else sum(counts)
    network = Network(config, phase, size)
    arrived = delivered_among(range(size), network, Exchange(phase, Stream(), step), total)
    if config.loss_unit == "shard":
        return [arrived for _ in shards]
    starts = np.cumsum([0, *counts])
    return [arrived[:, :, a:b] for a, b in itertools.pairwise(starts)]


@pytest.mark.on_cuda
@pytest.mark.shows("lossy collectives of a plain process group, N = 1 to 4")
@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_reduce_scatter_against_the_reference(size, unit):
    """Every rule, synchronous and not; N <= 2 to the last bit, else up to the order of summation."""
    shards = [50, 7]
    configs = [
        LossyConfig(
            p_grad=0.45, loss_unit=unit, packet_bytes=max(UNITS[unit], 2), grad_recovery=rule, lossy_self=lossy_self
        )
        for rule in RULES
        for lossy_self in ((False, True) if rule != "renormalize-remote" else (False,))
    ]
    calls = [(size, config, shards, config.lossy_self) for config in configs]
    for config, *real in zip(configs, *run_ranks(each, size, exchange_grads, calls), strict=True):
        assert_reduced(config, real, size, shards, exact=size <= 2)


def assert_reduced(config, real, size, shards, exact):
    """The gradients that each rank got are those of the reference, to the last bit if ``exact``."""
    references = [ReferenceReduce(config.grad_recovery, size, shard, elements_of(config, shard)) for shard in shards]
    for step in range(STEPS):
        arrived = deliveries(config, "grad", size, shards, step)
        for bucket, shard in enumerate(shards):
            grads = np.array([gradients(step, rank, size, shard) for rank in range(size)])
            expected = references[bucket](grads.reshape(size, size, shard), arrived[bucket])
            got = np.array([real[rank][step][bucket] for rank in range(size)])
            if exact:
                np.testing.assert_array_equal(got, expected, f"{config}, step {step}")
            else:
                np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def gather_params(rank, size, config, shards, asynchronous):
    group = LossyGroup.create(config, [BucketSpec(shard) for shard in shards])
    replicas = [torch.zeros(size * shard, device=current_device()) for shard in shards]
    results = []
    for step in range(STEPS):
        works = []
        for bucket, shard in enumerate(shards):
            own = replicas[bucket][rank * shard : (rank + 1) * shard]
            own.copy_(torch.from_numpy(gradients(step, rank, 1, shard)))
            works.append(lossy_all_gather(group, bucket, replicas[bucket], own, step, async_op=asynchronous))
        for work in works:
            if work is not None:
                work.wait()
        results.append([replica.cpu().numpy().copy() for replica in replicas])
    return results


@pytest.mark.on_cuda
@pytest.mark.shows("lossy collectives of a plain process group, N = 1 to 4")
@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_all_gather_against_the_reference(size, unit):
    """Bit for bit, synchronous and asynchronous."""
    shards = [50, 7]
    config = LossyConfig(p_param=0.45, loss_unit=unit, packet_bytes=max(UNITS[unit], 2))
    calls = [(size, config, shards, asynchronous) for asynchronous in (False, True)]
    for real in zip(*run_ranks(each, size, gather_params, calls), strict=True):
        for bucket, shard in enumerate(shards):
            replicas = np.zeros((size, size, shard), dtype=np.float32)
            for step in range(STEPS):
                arrived = deliveries(config, "param", size, shards, step)[bucket]
                owners = np.array([gradients(step, rank, 1, shard) for rank in range(size)])
                replicas = reference_gather(replicas, owners, arrived, pieces(shard, elements_of(config, shard)))
                got = np.array([real[rank][step][bucket] for rank in range(size)])
                np.testing.assert_array_equal(got.reshape(size, size, shard), replicas)


def wrong_op(rank):
    group = LossyGroup.create(LossyConfig(p_grad=0.1), [BucketSpec(4)])
    lossy_reduce_scatter(group, 0, torch.empty(4), torch.ones(8), 0, op=dist.ReduceOp.MAX)


def test_other_reductions_are_refused():
    with pytest.raises(RankFailed, match="must be ReduceOp.SUM or ReduceOp.AVG"):
        run_ranks(wrong_op, 2)


def nodes_by_host(rank, host_of_rank):
    socket.gethostname = lambda: host_of_rank[rank]
    return find_nodes(None)


def test_ranks_of_one_host_are_one_node():
    assert run_ranks(nodes_by_host, 3, ["a", "b", "a"]) == [[0, 1, 0]] * 3
    assert run_ranks(nodes_by_host, 1, ["a"]) == [[0]]


def test_a_single_node_loses_nothing_between_nodes():
    with pytest.raises(RankFailed, match="--lossy-links inter-node: all 2 ranks report the host name 'localhost'"):
        run_ranks(nodes_by_host, 2, ["localhost"] * 2)
    with pytest.raises(UsageError, match="--lossy-links inter-node:4: puts all 3 ranks on one node"):
        consecutive_nodes(range(3), 4)


def transport_of(network, members, rank, units):
    cut = [BucketUnits(0, units, units, 1)]
    return CollectiveWire({network.phase: network}, Stream(), members, rank, {network.phase: cut})


@pytest.mark.parametrize("units", [1, 13, 150_000])
def test_both_ends_agree(units):
    network = Network(LossyConfig(p_grad=0.3), "grad", 6)
    members = [1, 3, 5]  # an optimizer instance within a full group of six
    ends = [transport_of(network, members, rank, units) for rank in range(3)]
    key = Exchange("grad", Stream(), 4)
    for end in ends:
        end.prepare(key)  # drawn on another thread for many units
    arrived = [end.foresee(key) for end in ends]
    for a, b in itertools.product(range(3), repeat=2):
        assert np.array_equal(arrived[a].sent[b], arrived[b].arrived[0, a])
        assert np.array_equal(arrived[a].sent[b], delivered(network, key, members[a], members[b], units))


def test_one_draw_in_memory_is_what_every_rank_draws():
    networks = {phase: Network(LossyConfig(p_grad=0.4, p_param=0.4), phase, 4) for phase in ("grad", "param")}
    cut = {phase: [BucketUnits(0, 7, 7, 1)] for phase in networks}
    memory = Memory(networks, Stream(), range(4), cut)
    for rank, phase, step in itertools.product(range(4), networks, (0, 1, 0, 5)):
        exchange = Exchange(phase, Stream(), step)
        mine = CollectiveWire(networks, Stream(), range(4), rank, cut).foresee(exchange)
        theirs = WorkerWire(memory, rank).foresee(exchange)
        assert np.array_equal(mine.arrived, theirs.arrived)
        assert np.array_equal(memory.foresee(exchange).arrived[rank], mine.arrived[0])
        if phase == "grad":
            assert np.array_equal(mine.sent, theirs.sent)


def test_a_group_of_one_has_no_loss_but_its_own():
    assert transport_of(Network(LossyConfig(p_grad=0.5), "grad", 1), [0], 0, 9).lossless("grad")
    own = transport_of(Network(LossyConfig(p_grad=0.5, lossy_self=True), "grad", 1), [0], 0, 100_000)
    lost = ~own.foresee(Exchange("grad", Stream(), 0)).sent
    assert abs(lost.mean() - 0.5) <= 6 * np.sqrt(0.25 / lost.size)  # false alarm 2e-9


def group_in_memory(config, rank, size=3, shard=8):
    networks = {phase: Network(config, phase, size) for phase in ("grad", "param")}
    memory = Memory(networks, Stream(), range(size), cut_buckets(config, [BucketSpec(shard)]))
    return LossyGroup(config, WorkerWire(memory, rank))


class Mine(Mechanism):
    """A mechanism of somebody else, which replaces the rules of gradients."""

    name = "mine"
    Flags = Flags

    @classmethod
    def refusals(cls):
        return Section("mine", "Mine")

    @classmethod
    def rules(cls, config, phase, rules, wire):
        assert not wire.observed
        return rules if phase == "param" else [Zero(rule.units, rule.rank) for rule in rules]


def test_a_mechanism_may_replace_the_rules_of_a_group(monkeypatch):
    config = LossyConfig(p_grad=0.5, grad_recovery="zero", grad_priority="packet-mean", loss_unit="packet")
    found = MECHANISMS.all()
    assert type(group_in_memory(config, 0).grads[0]) is SparingRule
    monkeypatch.setattr(MECHANISMS, "all", lambda: [*found, Mine])
    group = group_in_memory(config, 0)
    assert [type(rule) for rule in group.grads] == [Zero] and group.told() == []


def test_a_group_keeps_the_last_delivery_and_hands_it_over():
    """Stale units are those of the last exchange, not of a step that is repeated."""
    config = LossyConfig(p_param=0.6, loss_unit="packet", packet_bytes=8)
    networks = {phase: Network(config, phase, 3) for phase in ("grad", "param")}
    cut = cut_buckets(config, [BucketSpec(8)])
    group = LossyGroup(config, CollectiveWire(networks, Stream(), range(3), 1, cut))
    for step in range(5):
        replica = torch.full((24,), -1.0)

        def collective(replica=replica, step=step):
            replica.fill_(step)

        transfer = group.all_gather(0, replica, replica[8:16], step, collective)
        assert (replica == step).all()  # the collective is reliable; nothing is put back before the wait
        delivery = transfer.wait()
        assert isinstance(delivery, Delivery) and group.delivery("param", step) is delivery is transfer.wait()
        lost = np.repeat(delivery.lost_here(group.params[0].units).mask, 2, axis=1).ravel()
        assert np.array_equal((replica == -1).numpy(), lost)
    arrived_of_4 = delivery.arrived[0].sum()
    # A delivery that was observed, and that nobody could draw, is what a reliable gather puts back.
    observed = np.zeros((3, 4), dtype=bool)
    observed[2, 3] = True
    group.restore(4, {0: observed})
    replica = torch.arange(24.0)
    put_back = group.put_stale_aside(0, replica, 4)
    replica.zero_()
    put_back()
    assert replica.nonzero().ravel().tolist() == [22, 23]
    assert not group.delivery("param", 4).arrived[0, 2, 3]
    group.restart()
    assert group.delivery("param", 4).arrived[0].sum() == arrived_of_4  # what is drawn again


def test_errors_of_owners_grow_with_the_loss_scale():
    """The optimizer's gradients, divided by the scale, have the same error in both paths."""
    for p in (0.0, 0.4):
        config = LossyConfig(p_grad=p, lossy_self=p > 0, param_sync_interval=10**6, grad_error="gaussian:0.5")
        seen = []
        for scale in (None, 1.0, 8.0, torch.tensor(1024.0)):
            group = group_in_memory(config, rank=0, size=1)
            group.errors = Errors(make_corruption(config), 0, [np.array([[0, 8]])], 32)
            gradient = torch.arange(8.0) * (1.0 if scale is None else scale)
            reduce(group, 0, gradient, gradient, 3, lambda: None, loss_scale=lambda s=scale: s).wait()
            seen.append(gradient / (1.0 if scale is None else scale))
        assert not torch.equal(seen[0], torch.arange(8.0))
        for other in seen[1:]:
            torch.testing.assert_close(other, seen[0])


class Work:
    def __init__(self):
        self.waited = 0

    def wait(self):
        self.waited += 1

    other = "an attribute of the handle"


def test_a_transfer_is_waited_for_and_completed_once():
    work, acts = Work(), []
    transfer = Transfer(work, lambda: "delivery").then(acts.append).then(lambda _: acts.append("second"))
    assert transfer.other == "an attribute of the handle" and not acts and not work.waited
    assert transfer.wait() == transfer.wait() == "delivery"
    assert acts == ["delivery", "second"] and work.waited == 1
    # Megatron waits for the coalescing context; what carried the exchange must not be waited for again.
    work = Work()
    other = Transfer(work, lambda: "delivery").then(acts.append)
    assert other.complete() == other.wait() == "delivery" and work.waited == 0


def test_a_transfer_that_failed_has_not_arrived():
    class Broken(Work):
        def wait(self):
            super().wait()
            raise RuntimeError("connection reset")

    acts = []
    transfer = Transfer(Broken(), lambda: "delivery").then(acts.append)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="connection reset"):
            transfer.wait()
    assert not acts


def test_a_transfer_lets_go_of_what_it_held():
    kept = torch.ones(3)
    alive = weakref.ref(kept)
    transfer = Transfer(Work(), lambda: "delivery").then(lambda _, kept=kept: kept.zero_())
    del kept
    assert alive() is not None
    transfer.wait()
    assert alive() is None
