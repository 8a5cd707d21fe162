"""Replicas that are averaged: by value against NumPy, in one process and over gloo, overlapped, healed, saved."""

import numpy as np
import pytest
import torch

from megatron_lossy.base.exchange import Exchange, Stream
from megatron_lossy.base.fingerprint import fingerprint, finite
from megatron_lossy.channel.corruption import make_corruption
from megatron_lossy.channel.corruption.applied import apply
from megatron_lossy.config import LossyConfig
from megatron_lossy.mechanisms.replicas.average import pieces
from megatron_lossy.mechanisms.replicas.synchroniser import Copies, Replica, Synchroniser
from megatron_lossy.transport.peers import LocalPeers, RankPeers
from tests.full_replicas import SIZES, FullReplicas
from tests.ranks import run_ranks

pytestmark = pytest.mark.shows("averaged replicas by value, in one process and over gloo, healed")

NOISE = dict(grad_error="gaussian:0.5rms")
LR = 0.125

STATES = {"mean": "params", "first": "params:first"}


def reference(replicas, steps, interval, overlap=False, source="mean", skipped=()):
    """Weights [N, d] after each step of SGD, float64, with the noise of the real draws."""
    toy = FullReplicas(LocalPeers(replicas))
    theta = toy.weights().astype(np.float64)
    corruption = make_corruption(LossyConfig(**NOISE))
    since, pending, history = 0, None, []
    for step in range(steps):
        received = []
        toy.iteration = step
        for m in range(replicas):
            gradients = toy.gradients()
            for event in corruption.events(Exchange("grad", Stream(), step), m, SIZES, 32):
                apply(gradients[event.bucket], event)
            received.append(torch.cat(gradients).numpy().astype(np.float64))
        if step not in skipped:
            if pending is not None:
                theta[:], pending = pending, None
            theta -= LR * np.array(received)
            since += 1
            if since == interval:
                since = 0
                pending = theta.mean(axis=0) if source == "mean" else theta[0].copy()
                if not overlap:
                    theta[:], pending = pending, None
        history.append(theta.copy())
    return history


@pytest.mark.parametrize("aside", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("source", ["mean", "first"])
def test_equations_by_value(overlap, source, aside):
    """Three replicas, H = 3, the update after a synchronisation skipped. In place if main parameters are ``aside``."""
    flags = NOISE | dict(param_sync_interval=3, param_sync_overlap=overlap, param_sync_state=STATES[source])
    toy = FullReplicas(LocalPeers(3), aside=aside, **flags)
    expected = reference(3, 11, 3, overlap, source, skipped=(3,))
    for step, weights in enumerate(expected):
        toy.step(skip=step == 3)
        toy_now = toy.weights()
        if not (overlap and aside and toy.synchroniser._flight):  # then they are already the mean
            assert np.allclose(toy_now, weights, atol=1e-5), step
        if not overlap and step in (2, 6, 9):
            assert (toy_now == toy_now[0]).all()
    happened = toy.synchroniser.take()
    assert [one.kinds for one in happened] == [{"dense": source}] * 3 and not toy.synchroniser.take()
    assert all(one.updates == one.interval == 3 and one.not_finite == 0 for one in happened)
    if overlap:  # theta = mean + own update: replicas differ by exactly their last errors
        assert not (toy_now == toy_now[0]).all()


@pytest.mark.parametrize("overlap", [False, True])
def test_divergence_is_that_before(overlap):
    """Exact where a copy is averaged, within a tenth from a sample, and half of a broadcast's distance."""
    toys = {}
    for aside, source in ((False, "mean"), (True, "mean"), (False, "first")):
        toy = FullReplicas(
            LocalPeers(4), sizes=(300_001, 50), aside=aside, param_sync_interval=2, param_sync_overlap=overlap,
            param_sync_state=STATES[source], **NOISE,
        )  # fmt: skip
        for _ in range(3):
            toy.step()
        toys[aside, source] = toy.synchroniser.take()[0].divergence
    without = FullReplicas(LocalPeers(4), sizes=(300_001, 50), **NOISE)
    for _ in range(2):
        without.step()
    mean = without.weights().astype(np.float64).mean(axis=0)
    exact = np.sqrt(without.apart() / (mean**2).sum())
    assert toys[False, "mean"] == pytest.approx(exact, rel=1e-5)
    assert toys[True, "mean"] == pytest.approx(exact, rel=0.1 if overlap else 1e-5)
    assert toys[False, "first"] == pytest.approx(exact, rel=0.3)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("overlap", [False, True])
def test_equal_replicas_are_left_alone(size, overlap):
    """Bit for bit as without synchronisation; with always the mean of three is not that of one."""
    plain, gated, always = (
        FullReplicas(LocalPeers(size), momentum=0.9, **flags)
        for flags in (
            {},
            dict(param_sync_interval=2, param_sync_state="all", param_sync_overlap=overlap),
            dict(param_sync_interval=2, param_sync_state="all:always", param_sync_overlap=overlap),
        )
    )
    for _ in range(6):
        for toy in (plain, gated, always):
            toy.step()
    assert np.array_equal(plain.weights(), gated.weights())
    assert np.array_equal(plain.weights(), always.weights()) == (size != 3)
    assert {kind for one in gated.synchroniser.take() for kind in one.kinds.values()} == {"equal"}
    assert {kind for one in always.synchroniser.take() for kind in one.kinds.values()} == {"mean"}


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("value", [1e3, float("nan")])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_majority_heals_exactly(optimizer, value, overlap):
    """One replica of three is hit once: after the synchronisation the run is the clean one, moments too."""
    options = dict(optimizer=optimizer, momentum=0.9)
    clean = FullReplicas(LocalPeers(3), **options)
    toy = FullReplicas(LocalPeers(3), param_sync_interval=4, param_sync_overlap=overlap, **options)

    def hit(number, gradients):
        if toy.iteration == 1 and number == 0:
            gradients[2][1] = value

    for step in range(6):
        toy.step(hit=hit)
        clean.step()
        assert np.array_equal(toy.weights(), clean.weights()) == (step in (0, 3, 4, 5))
    for k in range(3):
        assert all(torch.equal(a, b) for a, b in zip(toy.moments(k), clean.moments(0)))
    [healed] = toy.synchroniser.take()
    assert healed.kinds == {"dense": "majority"} and healed.not_finite == (value != value)
    assert (healed.divergence > 0) == (value == value)


@pytest.mark.parametrize("state", ["params", "all"])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("aside", [False, True])
def test_one_replica_that_is_not_finite_is_left_out(state, overlap, aside):
    """The mean of the others, and everything finite from then on: its moments are replaced too."""
    toy = FullReplicas(
        LocalPeers(3), optimizer="adam", aside=aside, param_sync_interval=2, param_sync_state=state,
        param_sync_overlap=overlap, **NOISE,
    )  # fmt: skip
    others = FullReplicas(LocalPeers(3), optimizer="adam", **NOISE)

    def hit(number, gradients):
        if toy.iteration == 1 and number == 1:
            gradients[0][2] = torch.inf
            gradients[1][5] = torch.nan

    for _ in range(2):
        toy.step(hit=hit)
        others.step()
    mean = others.weights()[[0, 2]].astype(np.float64).mean(axis=0)
    assert np.allclose(toy.weights(), mean, atol=1e-5)  # at once, with overlap too
    for _ in range(4):
        toy.step(hit=hit)
        if not (overlap and toy.synchroniser._flight):
            assert np.isfinite(toy.weights()).all()
    assert all(torch.isfinite(one).all() for k in range(3) for one in toy.moments(k))
    assert [one.not_finite for one in toy.synchroniser.take()][:2] == [1, 0]


@pytest.mark.parametrize("state", ["params", "all"])
def test_a_replica_whose_moments_alone_are_not_finite_is_left_out(state):
    """Its next update would spoil its parameters; until then they are finite."""
    toy, others = (
        FullReplicas(LocalPeers(3), optimizer="adam", param_sync_interval=2, param_sync_state=state, **NOISE)
        for _ in range(2)
    )
    for _ in range(2):
        if toy.iteration == 1:
            wrong = toy.optimizers[1].state[toy.parameters[1][3]]["exp_avg_sq"]
            wrong[7] = torch.inf  # the update divides by it, and what comes out is finite
        toy.step()
        others.step()
    assert np.isfinite(toy.weights()).all()
    [told] = toy.synchroniser.take()
    assert told.not_finite == 1 and others.synchroniser.take()[0].not_finite == 0
    assert all(torch.isfinite(one).all() for k in range(3) for one in toy.moments(k))


def test_without_a_finite_replica_nothing_is_averaged(caplog):
    toy = FullReplicas(LocalPeers(2), param_sync_interval=1, **NOISE)
    for own in toy.parameters:
        own[0][0] = torch.nan
    for _ in range(3):
        toy.step()
    assert len({row.tobytes() for row in toy.weights()}) == 2
    assert [one.kinds["dense"] for one in toy.synchroniser.take()] == ["nothing"] * 3
    assert caplog.text.count("no replica of dense is finite: none is averaged (said once)") == 1


def test_moments_are_averaged_on_request_only():
    for state in ("params", "all"):
        toy = FullReplicas(LocalPeers(3), optimizer="adam", param_sync_interval=3, param_sync_state=state, **NOISE)
        alone = FullReplicas(LocalPeers(3), optimizer="adam", **NOISE)
        for _ in range(3):
            toy.step()
            alone.step()
        for place in range(len(toy.moments(0))):
            own = [alone.moments(k)[place].double() for k in range(3)]
            for k in range(3):
                expected = own[k] if state == "params" else sum(own) / 3
                assert torch.allclose(toy.moments(k)[place].double(), expected, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("rule", ["snr", "divergence"])
@pytest.mark.parametrize("overlap", [False, True])
def test_rules_see_what_they_should(rule, overlap):
    """The intervals follow from divergence and gradient of the exact run. ``wants_gradient`` says when."""
    toy = FullReplicas(
        LocalPeers(4), scale=1.0, param_sync_interval=3, param_sync_rule=rule, param_sync_overlap=overlap, **NOISE
    )
    wanted, happened = [], []
    for _ in range(40):
        wanted.append(toy.synchroniser.wants_gradient)
        toy.step()
        happened += toy.synchroniser.take()
    intervals = [one.interval for one in happened]
    assert [one.updates for one in happened] == [3, *intervals[:-1]]
    if rule == "divergence":
        expected = [min(max(round(one.updates * 0.1 / one.divergence), 1), 4 * one.updates) for one in happened]
        assert not any(wanted) and intervals == expected and len(set(intervals)) > 1
        return
    # E = d 3/4 (0.5)^2 eta^2 k at |g|^2 = d (1 + 0.5^2): H = sqrt(5 / (3/4 eta^2 k)).
    expected = round(np.sqrt(1.25 / (0.75 * 0.25 * LR**2 * 3)))
    assert abs(intervals[0] - expected) <= 1
    assert np.flatnonzero(wanted)[0] == (3 if overlap else 2)


def _run(rank, size, steps, options):
    """Weights after every step, and what happened."""
    toy = FullReplicas(LocalPeers(size) if rank is None else RankPeers(None), **options)
    history = []
    for _ in range(steps):
        toy.step()
        history.append(toy.weights())
    return history, toy.synchroniser.take(), toy.repaired


OPTIONS = [
    NOISE | dict(param_sync_interval=3),
    NOISE | dict(param_sync_interval=2, param_sync_overlap=True, param_sync_state="all", optimizer="adam"),
    NOISE | dict(param_sync_interval=2, param_sync_overlap=True, aside=True, param_sync_rule="divergence"),
    NOISE | dict(param_sync_interval=2, param_sync_rule="snr", param_sync_state="params:first", momentum=0.9),
    dict(grad_error="bit-flip:1,20,26", grad_error_rate=0.4, replica_check="repair"),
    dict(grad_error="bit-flip:1,20,26", grad_error_rate=0.4, param_sync_interval=2),
    NOISE | dict(param_sync_interval=3, param_sync_state="params:always", grad_error="gaussian:0.5rms,3,9.0"),
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: " ".join(map(str, options.values())))
@pytest.mark.parametrize("size", [2, 3])
def test_one_process_is_as_many(size, options):
    history, happened, repaired = _run(None, size, 7, options)
    for number, (theirs, synced, mended) in enumerate(run_ranks(_run, size, size, 7, options)):
        for step in range(7):
            if size == 2:
                assert np.array_equal(theirs[step][0], history[step][number])
            else:
                assert np.allclose(theirs[step][0], history[step][number], atol=1e-5)
        assert [one.kinds for one in synced] == [one.kinds for one in happened] and mended == repaired
        assert [one.interval for one in synced] == [one.interval for one in happened]
        assert [one.divergence for one in synced] == pytest.approx([one.divergence for one in happened], rel=1e-4)


def test_streams_decide_together_and_those_of_one_replica_do_nothing():
    """A second stream that never drifts makes r smaller; one of a single replica is no stream."""
    config = LossyConfig(param_sync_interval=1)
    parts = {}
    for name, size in (("dense", 2), ("expert", 2), ("alone", 1)):
        values = [torch.full((8,), 3.0) for _ in range(size)]
        parts[name] = Copies(name, LocalPeers(size), [Replica(lambda value=value: [value]) for value in values])
    parts["dense"].parameters()[1][0][0] += 2
    synchroniser = Synchroniser(config, list(parts.values()), lambda values: values)
    assert synchroniser.finished() and not synchroniser.arrive()
    [happened] = synchroniser.take()
    assert happened.kinds == {"dense": "mean", "expert": "equal"}
    dense = np.array([4.0] + [3.0] * 7)
    assert happened.divergence == pytest.approx(np.sqrt(1.0 / ((dense**2).sum() + 72)))
    assert not synchroniser.finished()  # all are equal


def test_an_interval_that_has_passed_when_it_becomes_shorter_ends_at_once():
    """With overlap a synchronisation says so updates later, when more have been made than the new interval has."""
    config = LossyConfig(param_sync_interval=10, param_sync_rule="divergence", param_sync_overlap=True)
    values = [torch.zeros(8), torch.ones(8)]
    streams = [Copies("dense", LocalPeers(2), [Replica(lambda value=value: [value]) for value in values])]
    synchroniser = Synchroniser(config, streams, lambda values: values)
    launched = []
    for update in range(1, 20):
        if update == 14:  # three updates after the first launch; replicas are far apart
            synchroniser.arrive()
            assert synchroniser.interval.current < 4
        synchroniser.finished()
        if synchroniser.under_way and (not launched or update > 13):
            launched.append(update)
            if update > 13:
                break
    assert launched == [10, 14]


def test_tensors_on_several_devices():
    """As of torch's AdamW on an accelerator, whose step is on the CPU. The device "meta" has shapes and no values."""
    moments = [torch.zeros(5000, device="meta"), torch.zeros(3, device="meta")]
    replica = [*moments, torch.tensor(1.0), torch.tensor(2.0)]
    assert fingerprint(replica).device.type == finite(replica).device.type == "meta"
    made = [[view for run in piece._runs for view in run] for piece in pieces([replica])]
    assert [[view.device.type for view in views] for views in made] == [["meta", "meta"], ["cpu", "cpu"]]


def _staged(rank):
    """Collectives get CPU tensors on the device that they need, and copy results back."""
    given = []

    class Work:
        def wait(self):
            there.fill_(7)

    def begin(tensor, **_):
        given.append(str(tensor.device))
        return Work()

    peers = RankPeers(None, "meta")
    tensor, there = torch.tensor([1.0]), torch.zeros(1)
    torch.Tensor.to, to = lambda self, device: there if self is tensor else to(self, device), torch.Tensor.to
    torch.distributed.all_reduce = torch.distributed.broadcast = begin
    results = []
    for handle in (lambda: peers.sum_([tensor]), lambda: peers.broadcast_([tensor], 0)):
        tensor.fill_(1)
        handle = handle()
        results.append(tensor.item())
        handle.wait()
        results.append(tensor.item())
    peers.sum_([torch.zeros(1, device="meta")])
    return results, given


def test_what_is_elsewhere_is_exchanged_where_the_group_needs_it():
    [(results, given)] = run_ranks(_staged, 1)
    assert results == [1, 7, 1, 7] and given == ["cpu", "cpu", "meta"]


def test_what_is_done_is_said():
    config = LossyConfig(
        param_sync_interval=9, param_sync_rule="snr", param_sync_overlap=True, replica_check="log", **NOISE
    )
    assert not config.inert and config.lossless and LossyConfig().inert
    assert config.describe() == (
        "none, the exchanges are Megatron's own; errors of each rank: gaussian, standard deviation 0.5 of the gradient's root "
        "mean square; parameters averaged every 9 updates at first, then by snr, overlapped; gradients of replicas compared: log"
    )
