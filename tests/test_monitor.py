"""Monitors against plain NumPy: losses recomputed from the channel, drift from replicas gathered in full."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lossy.base.exchange import Exchange, Stream
from megatron_lossy.config import LossyConfig
from megatron_lossy.run.monitor import drift
from megatron_lossy.transport import Network
from tests.contract import made
from tests.ranks import run_ranks
from tests.rules import delivered
from tests.tiny_gpt import TinyGPT

pytestmark = pytest.mark.shows(
    "losses, ages, drift of the monitors against plain NumPy", "ranks and virtual workers count alike"
)

STEPS, WINDOW = 6, 3
#: At most 2048 parameters, so that the sample is all of them.
SMALL = TinyGPT(layers=1, hidden=8, heads=2, vocab=17, sequence=8, optimizer="sgd", lr=0.1)
OVERLAPPED = {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 300}
BURSTS = {"loss_model": ("gilbert-elliott",), "loss_correlation": "source"}

CASES = {  # name: (TinyGPT, LossyConfig, iterations that are skipped)
    "shard": ({}, LossyConfig(p_grad=0.3, p_param=0.5), ()),
    "own shard too": ({}, LossyConfig(p_grad=0.8, lossy_self=True), ()),
    "packets, overlapped": (OVERLAPPED, LossyConfig(p_grad=0.3, p_param=0.5, loss_unit="packet", packet_bytes=60), ()),
    "bursts, together": (OVERLAPPED, LossyConfig(p_grad=0.3, p_param=0.5, loss_unit="bucket", **BURSTS), ()),
    "skipped updates": ({"dtype": "fp16"}, LossyConfig(p_grad=0.3, p_param=0.5), (0, 3)),
}


def run_all(rank, chosen, workers=None):
    """Metrics of every window, and elements of the shards of every bucket by stream."""
    results = {}
    for name, (model, config, skipped) in chosen.items():
        with made(dataclasses.replace(SMALL, **model), config, workers) as (run, lossy):
            groups = [] if workers else lossy.groups
            shards = {group.stream: [units.shard for units in group.wire.cut["grad"]] for group in groups}
            results[name] = _observe(run, lossy, skipped), shards
    return results


def _observe(run, lossy, skipped):
    seen = []
    for step in range(STEPS):
        done = run.step(step, overflow_on=1 if step in skipped else None)
        assert done["success"] == (step not in skipped)
        if (step + 1) % WINDOW == 0:
            seen.append(lossy.metrics())
    return seen


def expected(config, streams, itemsize, skipped):
    """The metrics of every window from the channel's outcomes. ``streams``: (stream, workers, shards)."""
    ages, result = {}, []
    for first in range(0, STEPS, WINDOW):
        losses, survivors, stale, oldest = {"grad": [], "param": []}, [], [], 0
        for step, (stream, workers, shards) in itertools.product(range(first, first + WINDOW), streams):
            for phase in ("grad", "param"):
                if config.phase(phase).lossless or (phase == "param" and step in skipped):
                    continue
                size = 4 if phase == "grad" else itemsize
                units = {
                    "shard": 1,
                    "bucket": len(shards),
                    "packet": sum(-(-shard // (config.packet_bytes // size)) for shard in shards),
                }[config.loss_unit]
                network = Network(config, phase, workers)
                for j in range(workers):
                    arrived = 0
                    for i in range(workers):
                        there = delivered(network, Exchange(phase, stream, step), i, j, units)
                        arrived = arrived + there.astype(int)
                        if i != j:
                            losses[phase].extend(~there)
                        if phase == "param":
                            age = ages[stream, i, j] = np.where(there, 0, ages.get((stream, i, j), 0) + 1)
                            stale.extend(age[age > 0])
                            oldest = max(oldest, age.max())
                    if phase == "grad":
                        survivors.extend(arrived)
        metrics = {f"loss rate {phase}": np.mean(lost) for phase, lost in losses.items() if lost}
        metrics |= {f"loss rate {phase}": 0.0 for phase in losses if not config.loses(phase)}
        if survivors:
            metrics["survivors mean"] = np.mean(survivors)
            metrics["survivors min"] = min(survivors)
            metrics["share without survivor"] = np.mean(np.array(survivors) == 0)
        if losses["param"]:
            metrics |= {"stale age mean": np.mean(stale), "stale age max": oldest}
        result.append(metrics)
    return result


def same(windows, reference):
    assert len(windows) == len(reference) == STEPS // WINDOW
    for metrics, wanted in zip(windows, reference, strict=True):
        assert metrics == pytest.approx(wanted, rel=1e-12)


def test_what_exchanges_lost():
    """Three ranks, and three virtual workers: every metric of every window, the same on all ranks."""
    real = run_ranks(run_all, 3, CASES)
    [virtual] = run_ranks(run_all, 1, CASES, 3)
    for name, (model, config, skipped) in CASES.items():
        windows, shards = real[0][name]
        itemsize = 2 if model.get("dtype") == "fp16" else 4
        reference = expected(config, [(stream, 3, parts) for stream, parts in shards.items()], itemsize, skipped)
        assert 0.1 < reference[0]["loss rate grad"] < 0.95
        if name == "own shard too":
            assert reference[0]["share without survivor"] > 0
        same(windows, reference)
        same(virtual[name][0], reference)
        assert all(ranks[name] == real[0][name] for ranks in real)


def test_experts_and_dense_parameters_count_together():
    """Four ranks share the dense parameters, two of them each half of the experts."""
    chosen = {"experts": ({"expert": 2, "experts": 4}, LossyConfig(p_grad=0.3, p_param=0.5), ())}
    real = run_ranks(run_all, 4, chosen)
    windows, _ = real[0]["experts"]
    streams = [(Stream("dense"), 4, [1]), (Stream("expert", 0), 2, [1]), (Stream("expert", 1), 2, [1])]
    same(windows, expected(chosen["experts"][1], streams, 4, ()))
    assert all(ranks["experts"][0] == windows for ranks in real)


DRIFTS = {
    "shard": ({}, LossyConfig(p_param=0.5)),
    "packets, overlapped": (OVERLAPPED, LossyConfig(p_grad=0.3, p_param=0.3, loss_unit="packet", packet_bytes=60)),
    "bf16": ({"dtype": "bf16"}, LossyConfig(p_param=0.5, loss_unit="packet", packet_bytes=50)),
    "gradients only": ({}, LossyConfig(p_grad=0.5)),
}


def drift_real(rank, chosen):
    """After every step metrics (drift where it was due), this rank's parameters, the owners'; and without drift."""
    return {name: [_measure(*case, interval) for interval in (2, 0)] for name, case in chosen.items()}


def _measure(model, config, interval):
    history = []
    drifting = dataclasses.replace(config, drift_interval=interval)
    with made(dataclasses.replace(SMALL, **model), drifting) as (run, lossy):
        for step in range(STEPS):
            run.step(step)
            metrics = lossy.metrics()
            if model.get("overlap_param_gather"):
                run.gather()
            replica = run.weights()
            with lossy.owner_weights(run.model):
                history.append((metrics, replica, run.weights()))
    return history


def metrics_of(run, lossy, steps):
    found = []
    for step in range(steps):
        run.step(step)
        found.append(lossy.metrics())
    return found


def drift_virtual(rank, chosen, workers):
    results = {}
    for name, (model, config) in chosen.items():
        drifting = dataclasses.replace(config, drift_interval=2)
        with made(dataclasses.replace(SMALL, **model), drifting, workers) as (run, cluster):
            results[name] = metrics_of(run, cluster, STEPS)
    return results


def flat(weights):
    return np.concatenate([weights[name].ravel() for name in sorted(weights)]).astype(np.float64)


def only_drift(metrics):
    return {name: value for name, value in metrics.items() if "drift" in name or "increment" in name}


@pytest.mark.parametrize(("workers", "names"), [(2, list(DRIFTS)), (3, ["packets, overlapped"]), (4, ["shard"])])
@pytest.mark.slow
def test_drift_is_that_of_whole_replicas(workers, names):
    """Every second step, with the prediction; measuring changes no weight; virtual workers find the same."""
    chosen = {name: DRIFTS[name] for name in names}
    real = run_ranks(drift_real, workers, chosen)
    [virtual] = run_ranks(drift_virtual, 1, chosen, workers)
    for name, (_, config) in chosen.items():
        before, found = None, 0.0
        for step in range(STEPS):
            metrics, _, owner = real[0][name][0][step]
            replicas, owner = [flat(ranks[name][0][step][1]) for ranks in real], flat(owner)
            assert owner.size <= drift.SAMPLE
            for rank, (measured, plain) in enumerate(ranks[name] for ranks in real):
                np.testing.assert_array_equal(replicas[rank], flat(plain[step][1]))
                assert measured[step][0] == metrics and not only_drift(plain[step][0])
            if step % 2 == 0:
                assert not only_drift(metrics)
            else:
                p, increment = config.p_param, np.mean((owner - before) ** 2)
                to_owner, between = p / (1 - p), 2 * p / (1 - p**2)
                pairs = [np.mean((a - b) ** 2) for a, b in itertools.combinations(replicas, 2)]
                apart = np.mean([(a - owner) ** 2 for a in replicas]) * workers / (workers - 1)
                wanted = {
                    "drift pairs": np.mean(pairs),
                    "drift owner": apart,
                    "drift over weight": np.sqrt(apart / np.mean(owner**2)),
                    "squared increment": increment,
                    "drift pairs predicted": increment * (2 / workers * to_owner + (1 - 2 / workers) * between),
                    "drift owner predicted": increment * to_owner,
                }
                assert increment > 0
                assert only_drift(metrics) == pytest.approx(wanted, rel=1e-9)
                found += metrics["drift owner"]
                tolerance = 1e-12 if workers == 2 else 1e-3  # more ranks add up gradients in another order
                assert only_drift(virtual[name][step]) == pytest.approx(only_drift(metrics), rel=tolerance)
            before = owner
        assert (found > 0) == (config.p_param > 0)


def drift_of_sample(rank, config):
    """A model larger than the sample: metrics, and the mean over all parameters."""
    with made(TinyGPT(**OVERLAPPED | {"bucket_size": 5000}), config) as (run, lossy):
        for step in range(8):
            run.step(step)
        metrics, replica = lossy.metrics(), flat(run.weights())
        with lossy.owner_weights(run.model):
            return metrics, replica, flat(run.weights())


def test_a_sample_stands_for_all_parameters():
    config = LossyConfig(p_param=0.4, loss_unit="packet", packet_bytes=256, drift_interval=8)
    results = run_ranks(drift_of_sample, 3, config)
    metrics, _, owner = results[0]
    assert owner.size > 5 * drift.SAMPLE
    whole = np.mean([(replica - owner) ** 2 for _, replica, _ in results]) * 3 / 2
    assert metrics["drift owner"] == pytest.approx(whole, rel=0.2)
    assert metrics["drift owner"] != pytest.approx(whole, rel=1e-6)


class FakeStream:
    """Replicas as far as :class:`Sample` needs them."""

    def __init__(self, shards, used):
        self.shards = shards
        self.used = lambda: [np.array(runs, dtype=np.int64).reshape(-1, 2) for runs in used]


@settings(max_examples=80, deadline=None)
@given(st.data(), st.integers(1, 7), st.integers(1, 60))
def test_samples_are_parameters_spread_evenly(data, workers, count):
    """For any buckets, padding and number of ranks."""
    shards, used, all_places = [], [], []
    for bucket in range(data.draw(st.integers(1, 3))):
        edges = sorted(data.draw(st.lists(st.integers(0, 200), min_size=2, max_size=6, unique=True)))
        runs = list(zip(edges[::2], edges[1::2]))
        shards.append(-(-edges[-1] // workers))
        used.append(runs)
        all_places += [(bucket, at) for first, last in runs for at in range(first, last)]
    sample = drift.Sample(FakeStream(shards, used), count)
    assert sample.population == len(all_places)
    chosen = [(bucket, at) for bucket, places in enumerate(sample.places) for at in places.tolist()]
    numbers = [all_places.index(place) for place in chosen]
    size = min(count, len(all_places))
    assert len(set(numbers)) == len(numbers) == size
    for k, number in enumerate(numbers):  # one in each stratum
        assert math.floor(k * len(all_places) / size) <= number < (k + 1) * len(all_places) / size
    owners = [at // shards[bucket] for bucket, at in chosen]
    assert sample.owners.tolist() == owners and max(owners) < workers


def test_discrepancies_do_not_drown_in_the_weights():
    random = np.random.default_rng(0)
    values = random.normal(size=(5, 40)) * 1e-6
    owners = random.integers(5, size=40)
    pairs = np.mean([(a - b) ** 2 for a, b in itertools.combinations(values, 2)])
    owner = np.mean([(values[i] - values[owners, range(40)]) ** 2 for i in range(5)]) * 5 / 4
    assert drift.discrepancies(values, owners) == pytest.approx((pairs, owner), rel=1e-12)
    assert drift.discrepancies(values + 100.0, owners) == pytest.approx((pairs, owner), rel=1e-6)


def test_predictions_of_other_losses():
    bursts = LossyConfig(p_param=0.2, loss_model=("gilbert-elliott:4",))
    owner, pairs = 0.2 * 4, 0.2 * 4 / 4 + 0.75 * 0.4 * (1 - 0.2 / 1.75) * 4
    assert drift.predicted(bursts, 0, 8, 1) == pytest.approx((pairs, owner), rel=1e-6)
    many = drift.predicted(bursts, 0, 8, 1000)  # units enough to forget the last step
    assert many == pytest.approx((0.25 / 4 + 0.75 * 0.4 / 0.96, 0.25), rel=1e-3)
    together = dataclasses.replace(bursts, loss_correlation="source")
    assert drift.predicted(together, 0, 8, 1) == pytest.approx((owner / 4, owner), rel=1e-6)
    stuck = LossyConfig(loss_model=("gilbert-elliott:1e-6,1e-6,0.0,1.0",))
    assert drift.predicted(stuck, 0, 8, 1) is None
    nodes = LossyConfig(p_param=0.2, lossy_links="inter-node:2")
    assert drift.predicted(nodes, 0, 8, 1) is None
    schedule = LossyConfig(loss_schedule=("0:0,10:0.5",))
    assert drift.predicted(LossyConfig(p_param=0.4, param_send="compensated"), 0, 8, 1) is None
    assert drift.predicted(schedule, 9, 2, 1) == (0, 0) and drift.predicted(schedule, 10, 2, 1) == (1, 1)


def told_of_priorities(rank, config, workers=None):
    with made(TinyGPT(), config, workers) as (run, lossy):
        return metrics_of(run, lossy, 4)


def test_priorities_and_residuals_are_counted_as_real_and_virtual_runs_count_them():
    config = LossyConfig(
        p_grad=0.4,
        loss_unit="packet",
        packet_bytes=256,
        grad_recovery="error-feedback",
        grad_priority="packet-mean:0.2",
    )
    names = ("priority share", "recovered share", "residual share", "residual ratio", "oldest residual")
    real = run_ranks(told_of_priorities, 2, config)
    assert real[0] == real[1]
    for step, told in enumerate(real[0]):
        assert set(names) <= told.keys()
        assert told["priority share"] == pytest.approx(0.2, abs=0.01)
        assert told["loss rate grad"] * (1 - told["recovered share"]) == pytest.approx(told["residual share"])
        assert 0 < told["residual ratio"] < told["residual share"]  # what is lost for good is small
        assert 1 <= told["oldest residual"] <= step + 1
    [virtual] = run_ranks(told_of_priorities, 1, config, 2)
    assert [{name: told[name] for name in names} for told in virtual] == [
        {name: pytest.approx(told[name]) for name in names} for told in real[0]
    ]
