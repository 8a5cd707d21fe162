"""Full replicas while a synchronisation is under way, in one process and in Megatron on ranks."""

import numpy as np
import pytest
import torch

from megatron_lossy.base.exchange import Stream
from megatron_lossy.channel.corruption import Event
from megatron_lossy.channel.corruption.applied import Hit, Reduction
from megatron_lossy.config import LossyConfig
from megatron_lossy.mechanisms.replicas import average
from megatron_lossy.mechanisms.replicas.full_replicas import FullReplicas
from megatron_lossy.mechanisms.replicas.monitor import ReplicaMonitor
from megatron_lossy.mechanisms.replicas.synchroniser import Copies, Replica
from megatron_lossy.run.monitor.drift import SAMPLE
from megatron_lossy.transport.peers import LocalPeers

pytestmark = pytest.mark.shows("evaluation and checkpoints while a synchronisation is under way")

OVERLAP = {"param_sync_interval": 1, "param_sync_overlap": True}


class Replicas:
    """Main parameters of N replicas in some streams, one tensor in each, and what the model has of them in bfloat16."""

    def __init__(self, mains, moments=None, **flags):
        self.mains = mains
        self.model = {name: [main.bfloat16() for main in own] for name, own in mains.items()}
        self.count = len(next(iter(mains.values())))
        copies = []
        for name, own in mains.items():
            replicas = [
                Replica(lambda main=main: [main], lambda k=k: [moments[k]] if moments else [], aside=True)
                for k, main in enumerate(own)
            ]
            copies.append(Copies(name, LocalPeers(self.count), replicas))
        models = [lambda k=k: [own[k] for own in self.model.values()] for k in range(self.count)]
        self.together = FullReplicas(LossyConfig(**flags), copies, lambda sums: sums, self.renew, models)

    def renew(self, names):
        for name in names:
            for main, copy in zip(self.mains[name], self.model[name], strict=True):
                copy.copy_(main)


def weights(shifts):
    """A replica for each of ``shifts``, as long as what is averaged in place."""
    start = torch.randn(2 * average.ALONE, generator=torch.Generator().manual_seed(1))
    return [start + shift for shift in shifts]


def test_a_majority_in_a_stream_leaves_the_model_of_another_alone():
    outvoted = weights([0, 0, 0])
    outvoted[0][5] += 1
    toy = Replicas({"dense": outvoted, "expert": weights([0, 0.25, 0.5])}, **OVERLAP)
    before = [copy.clone() for copy in toy.model["expert"]]
    toy.together.finished(None)
    assert all(map(torch.equal, toy.model["expert"], before))
    assert torch.equal(toy.model["dense"][0], toy.model["dense"][1])


@pytest.mark.parametrize("source", ["mean", "first"])
@pytest.mark.parametrize("state", ["params", "all"])
def test_a_replica_that_is_not_finite_is_healed_before_it_computes(source, state):
    mains, moments = weights([0, 0.25]), weights([0, 0])
    mains[1][0] = torch.nan
    toy = Replicas({"dense": mains}, moments, param_sync_state=state + ":first" * (source == "first"), **OVERLAP)
    toy.together.finished(None)
    assert torch.equal(toy.model["dense"][1], toy.model["dense"][0])
    assert torch.equal(toy.model["dense"][1], weights([0])[0].bfloat16())
    toy.together.synchroniser.arrive(None)
    [happened] = toy.together.take()
    assert happened.kinds == {"dense": source} and happened.not_finite == 1 and happened.divergence == 0


def test_evaluation_and_checkpoints_have_the_weights_that_are_under_way():
    """All of which are averaged in place, so that only the copies differ."""
    toy = Replicas({"dense": weights([0, 0.25, 0.5])}, weights([0, 0, 0]), param_sync_state="all", **OVERLAP)
    toy.together.finished(None)
    before = [copy.clone() for copy in toy.model["dense"]]
    with toy.together.averaged():
        for main, copy in zip(toy.mains["dense"], toy.model["dense"], strict=True):
            assert torch.allclose(main, weights([0.25])[0], atol=1e-5) and torch.equal(copy, main.bfloat16())
    assert all(map(torch.equal, toy.model["dense"], before))
    toy.together.synchroniser.arrive(None)
    assert toy.together.take()[0].divergence > 0


def test_evaluation_and_checkpoints_have_the_mean_also_of_a_majority():
    """A change of the stream that differs; equal replicas are left alone to the last bit."""
    outvoted, equal = weights([0, 0, 0]), weights([0, 0, 0])
    outvoted[2] += 3
    toy = Replicas({"dense": outvoted, "expert": equal})
    with toy.together.averaged():
        assert torch.allclose(outvoted[0], weights([1])[0], atol=1e-5)
        assert all(torch.equal(one, weights([0])[0]) for one in equal)
    assert torch.equal(outvoted[0], weights([0])[0])


def test_the_drift_is_not_looked_at_while_parameters_are_sums():
    mains = weights([0, 0.25, 0.5])
    toy = Replicas({"dense": mains}, drift_interval=1, **OVERLAP)
    monitor = ReplicaMonitor(lambda: toy.together, 1)

    def look():
        monitor.finish_iteration(0, True, list)
        return monitor.metrics()["replica divergence"]

    apart = look()
    assert apart == pytest.approx(np.sqrt(0.125 / 3 / (1 + 0.25**2)), rel=0.1)
    toy.together.finished(None)
    assert look() == apart
    toy.together.synchroniser.arrive(None)
    monitor.happened(0, toy.together.take())
    assert monitor.metrics()["replica divergence"] == pytest.approx(apart, rel=1e-6)  # of the same sample
    assert look() == 0


def test_the_size_of_errors_is_a_root_mean_square_over_noise():
    monitor, stream = ReplicaMonitor(lambda: None, 0), Stream()
    noise = [Event(0, stream, 0, 0, "gaussian", std=std) for std in (3.0, 4.0)]
    flip = Event(0, stream, 0, 0, "bit-flip", elements=(1, 2, 3), bits=(30, 1, 9))
    hits = tuple(Hit(event, b"") for event in (*noise, flip))
    monitor.happened(0, [Reduction(stream, 0, (8,), 32, hits)])
    found = monitor.metrics()
    assert found == {"gradient errors": 3, "error rms": pytest.approx(12.5**0.5), "flipped bits": 3}
    assert monitor.metrics() == {"gradient errors": 0}


def test_a_sample_does_not_follow_the_columns_of_a_matrix():
    numbers = torch.arange(32768 * 1024, dtype=torch.int32)
    places = average.sample(numbers, average.stride_of(len(numbers)))
    assert len(places) == pytest.approx(SAMPLE, rel=0.01)
    assert len(set((places % 1024).tolist())) == 1024
    one = torch.zeros(32768, 1024)
    one[:, 1::2] = 1
    pair = [[one.view(-1)], [torch.zeros(32768 * 1024)]]
    copies = [Copies("dense", LocalPeers(2), [Replica(lambda own=own: own) for own in pair])]
    together = FullReplicas(LossyConfig(), copies, lambda sums: sums, lambda names: None, [])
    assert together.divergence() == pytest.approx(1, rel=0.01)
