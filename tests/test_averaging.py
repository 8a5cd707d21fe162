"""Averaging between islands: subsets, corrections and exchanges, against their closed forms and a plain reference."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lossy.base import theory
from megatron_lossy.base.errors import UsageError
from megatron_lossy.base.exchange import Stream
from megatron_lossy.config import LossyConfig
from megatron_lossy.config.facts import Facts
from megatron_lossy.config.refusal import check_refusals
from megatron_lossy.lab.virtual.islands import _squares as squares_of
from megatron_lossy.mechanisms.islands.rules import Mixing, SmithPredictor, make_rule, predictor_gain, stability_bound
from megatron_lossy.mechanisms.islands.vector import Subset
from tests.vectors import STREAM, deviation, rounds_of, simulate, spread

pytestmark = pytest.mark.shows("subsets, corrections, outer optimizers: definitions and closed forms")


def flags(**settings):
    return LossyConfig(**{"islands": 4, "sync_method": "parameters", **settings})


def start(islands=4, size=60, seed=0):
    return torch.randn(islands, size, generator=torch.Generator().manual_seed(seed))


def noise(seed, scale=1.0):
    random = torch.Generator().manual_seed(seed)
    return lambda step, weights: weights.add_(torch.randn(weights.shape, generator=random), alpha=scale)


def drift(speed=1.0):
    return lambda step, weights: weights.add_(speed)


def chosen(subset, number):
    places = subset.places(number, torch.device("cpu"))
    return None if places is None else places.read(torch.arange(subset.size)).numpy()


@settings(deadline=None)
@given(
    st.sampled_from(["cyclic", "partition"]), st.floats(0.02, 1.0), st.integers(1, 7), st.integers(60, 300), st.data()
)
def test_every_element_has_its_turn_once_in_n_rounds(kind, fraction, block, size, data):
    config = flags(islands=2, sync_subset=kind, sync_fraction=fraction, sync_block=block)
    if -(-size // block) < config.parts or fraction * size < 2:
        with pytest.raises(UsageError):
            Subset(config, size, 1, STREAM)
        return
    subset = Subset(config, size, 1, STREAM)
    cycle = data.draw(st.integers(0, 5))
    parts = [chosen(subset, cycle * config.parts + part) for part in range(config.parts)]
    if fraction == 1:
        assert parts == [None]
        return
    assert sorted(itertools.chain(*(part.tolist() for part in parts))) == list(range(size))
    assert max(map(len, parts)) <= subset.most <= size
    assert all((np.diff(part) > 0).all() for part in parts)
    fixed = [chosen(subset, part).tolist() for part in range(config.parts)]
    if kind == "cyclic":
        assert fixed == [part.tolist() for part in parts]
    elif cycle and config.parts > 1 and size // block > 20:
        assert fixed != [part.tolist() for part in parts]


def test_a_round_of_nearly_all_elements_has_no_more_than_there_are():
    config = flags(islands=2, sync_fraction=1 - 1e-10, sync_block=4)
    assert config.parts == 1 and Subset(config, 10, 1, STREAM).most == 10


def test_a_subset_depends_on_seed_stream_and_round_alone():
    for kind in ("cyclic", "partition", "bernoulli"):
        config = flags(sync_subset=kind, sync_fraction=0.1)
        first, again = (Subset(config, 500, 7, STREAM) for _ in range(2))
        order = [3, 0, 12, 3]  # whatever was asked before
        found = [chosen(first, number).tolist() for number in order]
        assert [chosen(again, number).tolist() for number in sorted(order)] == [found[1], found[0], found[3], found[2]]
        assert chosen(Subset(config, 500, 8, STREAM), 3).tolist() != found[0]
        other = Subset(config, 500, 7, Stream("islands", expert_rank=1))
        assert chosen(other, 3).tolist() != found[0]


def test_drawn_blocks_have_the_share_of_the_flag():
    config = flags(sync_subset="bernoulli", sync_fraction=0.05, sync_block=4)
    subset = Subset(config, 40_003, 1, STREAM)
    counts = []
    for number in range(40):
        elements = chosen(subset, number)
        assert elements.max() < 40_003
        whole = elements[elements < 40_000].reshape(-1, 4)
        assert (whole % 4 == np.arange(4)).all()
        counts.append(len(elements))
    error = np.sqrt(40 * 10_001 * 0.05 * 0.95) * 4
    assert abs(sum(counts) - 40 * 40_003 * 0.05) < 4 * error  # four standard deviations


@pytest.mark.parametrize("gain", ["1", "0.5", "0.2"])
def test_deviations_contract_by_the_gain_once_in_n_rounds(gain):
    config = flags(sync_fraction=0.25, sync_interval=2, sync_delay=5, delay_correction=f"mixing:{gain}")
    weights = start()
    before = spread(weights).clone()
    for cycles in (1, 3):
        after = spread(simulate(config, weights.clone(), 8 * cycles + 5))
        torch.testing.assert_close(after, before * (1 - float(gain)) ** cycles, atol=3e-6, rtol=0)


def growth_of(gain, overlap):
    """Return the long-run factor on a deviation per visit: the largest root of z^(q+1) - z^q + g."""
    polynomial = np.zeros(overlap + 2)
    polynomial[0] = 1
    polynomial[1] -= 1
    polynomial[-1] += gain
    return np.abs(np.roots(polynomial)).max()


def decay(config, steps=400):
    """Return the iterations in which deviations fall to 1e-4, at most ``steps``, and their factor per visit."""
    weights, norms = start(config.islands), []
    rounds = rounds_of(config, weights)
    if config.correction == "ema":  # else the first exchange would remove what is no progress
        rounds.rule.progress.copy_(spread(weights))
    for step in range(steps + config.sync_delay):
        rounds.after_iteration(step)
        norms.append(spread(weights).norm().item())
    last = next((k for k, norm in enumerate(norms) if norm < 1e-4), len(norms))
    period = 4 * (2 * config.overlap + 1)  # of the roots on the unit circle, in iterations
    first = last // 2
    window = [max(norms[max(0, end - period) : end]) for end in (first, last)]
    return last, (window[1] / window[0]) ** (2 / (last - first))


@pytest.mark.parametrize("overlap", range(6))
@pytest.mark.parametrize("correction", ["ema", "mixing"])
@pytest.mark.slow
def test_the_stability_bound_and_the_rate_of_growth(correction, overlap):
    bound, known = theory.stability_bound(overlap), {}
    for gain in (0.9 * bound, 1.05 * bound, theory.critical_gain(overlap)):
        how = f"mixing:{gain!r}" if correction == "mixing" else f"ema:{gain!r},{gain!r},1000"
        if (gain > 1 and correction == "ema") or gain >= 2 or gain == 1:
            continue
        config = flags(islands=3, sync_fraction=0.5, sync_delay=2 * overlap, delay_correction=how)
        assert config.overlap == overlap
        known[gain], growth = decay(config)
        if gain != theory.critical_gain(overlap):
            assert (growth > 1) == (gain > bound)
            assert growth == pytest.approx(growth_of(gain, overlap), abs=0.01)
    assert known or (correction, overlap) == ("ema", 0)
    if overlap:
        assert known[theory.critical_gain(overlap)] == min(known.values()) < 0.5 * max(known.values())


def growth_of_covariances(gain, fraction, delay, steps=1500):
    """By how much E x^2 of x(t+1) = x(t) - gain b x(t-delay) changes in a step, b = 1 with probability ``fraction``."""
    stays = np.eye(delay + 1, k=-1)
    stays[0, 0] = 1
    visited = stays.copy()
    visited[0, delay] -= gain
    covariance, logs = np.eye(delay + 1), []
    for _ in range(steps):
        covariance = (1 - fraction) * stays @ covariance @ stays.T + fraction * visited @ covariance @ visited.T
        logs.append(np.log(np.trace(covariance)))
        covariance /= np.trace(covariance)
    return np.exp(np.mean(logs[steps // 2 :]))


@pytest.mark.parametrize("delay", [0, 1, 3, 9, 19])
@pytest.mark.parametrize("fraction", [0.02, 0.05, 0.3, 0.9])
def test_the_bound_of_drawn_subsets_is_where_mean_squares_stop_shrinking(fraction, delay):
    bound, critical = theory.stability_bound_drawn(fraction, delay), theory.critical_gain_drawn(fraction, delay)
    assert (
        growth_of_covariances(0.97 * bound, fraction, delay) < 1 < growth_of_covariances(1.03 * bound, fraction, delay)
    )
    best = min(growth_of_covariances(gain * bound, fraction, delay, 400) for gain in np.linspace(0.1, 0.9, 9))
    assert critical < bound
    assert np.log(growth_of_covariances(critical, fraction, delay)) < 0.55 * np.log(best)  # both are below 0


def test_the_bound_of_drawn_subsets_at_its_ends():
    for delay in range(6):
        assert theory.stability_bound_drawn(1, delay) == pytest.approx(theory.stability_bound(delay))
    for fraction in (0.01, 0.5, 1):
        assert theory.stability_bound_drawn(fraction, 0) == pytest.approx(2)
        assert theory.critical_gain_drawn(fraction, 0) == 1


@pytest.mark.parametrize("subset", ["cyclic", "partition", "bernoulli"])
@pytest.mark.parametrize(("fraction", "delay"), [(0.05, 19), (0.25, 3), (0.3, 3), (0.9, 1)])
@pytest.mark.slow
def test_no_gain_that_is_chosen_or_allowed_diverges(subset, fraction, delay):
    config = flags(sync_fraction=fraction, sync_delay=delay, sync_subset=subset)
    steps = round(50 / fraction)  # each element is visited 50 times
    allowed = dataclasses.replace(config, delay_correction=f"mixing:{0.9 * stability_bound(config)!r}")
    for flagged in (config, allowed):
        check_refusals(flagged, Facts(workers=8))
        left = spread(simulate(flagged, start(size=400), steps)).square().mean()
        assert left < 0.05 * spread(start(size=400)).square().mean()


def test_the_bound_is_where_the_largest_root_leaves_the_unit_circle():
    published = [2, 1, 0.618, 0.445, 0.347, 0.285]
    for overlap, expected in enumerate(published):
        bound = theory.stability_bound(overlap)
        assert bound == pytest.approx(expected, abs=5e-4)
        assert growth_of(bound, overlap) == pytest.approx(1, abs=1e-9)
        assert growth_of(0.99 * bound, overlap) < 1 < growth_of(1.01 * bound, overlap)
    assert theory.stability_bound(100) == pytest.approx(np.pi / 201, rel=1e-3)
    for overlap in range(5):  # no gain is faster than the critical one
        best = growth_of(theory.critical_gain(overlap), overlap)
        assert best == pytest.approx(overlap / (overlap + 1), abs=1e-4 if overlap else 1e-9)
        assert all(growth_of(gain, overlap) >= best - 1e-4 for gain in np.linspace(0.01, 1.9, 60))


@pytest.mark.parametrize(
    ("how", "fraction", "subset"),
    [("mixing", 0.25, "cyclic"), ("mixing:0.3", 0.25, "cyclic")]
    + [("smith", 0.5, subset) for subset in ("cyclic", "partition", "bernoulli")],
)
@pytest.mark.parametrize("delay", [0, 3, 9])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_correction_leaves_the_mean_alone(how, fraction, subset, delay, dtype):
    config = flags(sync_fraction=fraction, sync_delay=delay, delay_correction=how, sync_subset=subset, sync_dtype=dtype)
    weights, alone, local, other = start(), start(), noise(3), noise(3)
    simulate(config, weights, 50, local)
    for step in range(50):
        other(step, alone)
    kept = 2 * alone.abs().max() / 2**8 if dtype == "bf16" else 0  # by owners, of the latest means
    assert (weights.mean(dim=0) - alone.mean(dim=0)).abs().max() < kept + (1e-4 if how == "smith" else 1e-5)
    assert spread(weights).norm() < 0.7 * spread(alone).norm()


PREDICTED = [
    ("cyclic", 1.0, 1, 1), ("cyclic", 1.0, 1, 10), ("cyclic", 0.25, 1, 10), ("cyclic", 0.25, 3, 31), ("cyclic", 0.05, 1, 100),
    ("bernoulli", 0.25, 1, 10), ("bernoulli", 0.25, 2, 10),
]  # fmt: skip


@pytest.mark.parametrize(("subset", "fraction", "interval", "delay"), PREDICTED)
@pytest.mark.slow
def test_a_predictor_leaves_what_nobody_could_know(subset, fraction, interval, delay):
    """Within 4 % of the closed form (4,000 elements of four islands, the mean over 300 iterations)."""
    config = flags(
        sync_subset=subset, sync_fraction=fraction, sync_interval=interval, sync_delay=delay, delay_correction="smith"
    )
    assert config.may_overlap
    since = (1 / fraction - 1) * interval + (interval - 1) / 2  # iterations since the exchange that was used last
    known = delay + (since if subset == "bernoulli" else (interval / fraction - 1) / 2)
    found = deviation(config, 600, 4000)
    assert found == pytest.approx(known, rel=0.04)
    assert deviation(dataclasses.replace(config, delay_correction="mixing"), 600) > 1.3 * found


def steps_of_the_mean(config, steps=400):
    """The mean square of what the mean over islands moves in an iteration, of which the noise of 4 islands makes 1/4."""
    weights, local, means = torch.zeros(4, 400), noise(3), []
    simulate(config, weights, steps, local, lambda _, now: means.append(now.mean(dim=0)))
    return torch.stack(means).diff(dim=0)[steps // 4 :].square().mean().item()


@pytest.mark.parametrize(("fraction", "delay"), [(1.0, 10), (0.25, 10), (0.5, 1)])
@pytest.mark.parametrize("loss", [0.1, 0.4])
@pytest.mark.slow
def test_a_predictor_bears_loss(loss, fraction, delay):
    """The mean moves by less than twice the noise of the steps, and islands stay nearer to it than with mixing."""
    config = flags(sync_fraction=fraction, sync_delay=delay, delay_correction="smith", p_sync=loss)
    assert config.overlap == delay * fraction // 1
    assert predictor_gain(config) == 1 / (1 + loss * config.overlap)
    assert steps_of_the_mean(config) < 0.5
    mixing = dataclasses.replace(config, delay_correction="mixing")
    assert deviation(config, 320) < (0.9 if config.overlap else 1.01) * deviation(mixing, 320)


def test_a_predictor_that_goes_all_the_way_with_loss_shakes_the_mean():
    config = flags(sync_delay=10, delay_correction="smith:1", p_sync=0.4)
    assert steps_of_the_mean(config) > 2


def test_the_gain_of_a_predictor_that_does_not_know_what_is_lost():
    late = {"sync_fraction": 0.25, "sync_delay": 10, "delay_correction": "smith"}
    assert predictor_gain(flags(**late)) == 1
    assert predictor_gain(flags(**late, transport="udp")) == 1 / 3
    assert predictor_gain(flags(**late, sync_subset="bernoulli", p_sync=0.2)) == pytest.approx(1 / 1.5)
    assert make_rule(flags(**late | {"delay_correction": "smith:0.7"}), start(), None).gain == 0.7


def test_a_predictor_with_nothing_under_way_is_mixing_with_gain_one():
    """To the bit, whether it is made as such, which takes no memory, or remembers what never matters."""
    for base in (
        {"sync_fraction": 0.3, "sync_delay": 2},
        {"sync_fraction": 0.3},
        {"sync_fraction": 0.1, "sync_delay": 9},
    ):
        smith, mixing = flags(**base, delay_correction="smith"), flags(**base, delay_correction="mixing:1")
        assert not smith.may_overlap and type(make_rule(smith, start(), None)) is Mixing
        assert torch.equal(simulate(smith, start(), 30, noise(8)), simulate(mixing, start(), 30, noise(8)))
        rounds = rounds_of(smith, kept := start())
        rounds.rule, local = SmithPredictor(1.0, *kept.shape, kept.device), noise(8)
        for step in range(30):
            local(step, kept)
            rounds.after_iteration(step)
        assert torch.equal(kept, simulate(mixing, start(), 30, noise(8)))


@pytest.mark.parametrize("kind", ["cyclic", "partition", "bernoulli"])
@pytest.mark.parametrize("delay", [1, 5, 20])
def test_a_predictor_is_its_definition(kind, delay):
    """In float64, from the history of what each mean did to each element of each island."""
    config = flags(sync_fraction=0.5, sync_delay=delay, delay_correction="smith", sync_subset=kind)
    subset, size = Subset(config, 60, 1, STREAM), 60
    weights, local = start().double().numpy(), noise(8)
    moves = []  # (iteration, islands x elements)
    sent = {}
    found = simulate(config, start(), 40, noise(8))
    for step in range(40):
        weights = weights + local(step, torch.zeros(4, size)).double().numpy()
        elements = chosen(subset, step)
        sent[step] = elements, weights[:, elements].copy()
        if step - delay in sent:
            elements, then = sent[step - delay]
            since = sum((move[:, elements] for when, move in moves if step - delay <= when < step), 0 * then)
            move = np.zeros_like(weights)
            move[:, elements] = then.mean(axis=0) - then - since
            weights = weights + move
            moves.append((step, move))
    np.testing.assert_allclose(found.numpy(), weights, atol=2e-5)


def test_a_moving_average_shifts_the_mean_by_what_it_did_not_follow():
    c = 0.25
    config = flags(delay_correction=f"ema:{c},{c},1000", sync_delay=3)
    rounds = rounds_of(config, weights := start().double().float())
    local, history = noise(4), []
    for step in range(12):
        local(step, weights)
        now, d = weights.clone(), rounds.rule.progress.clone()
        history.append(now)
        rounds.after_iteration(step)
        if step >= 3:
            moved = (now - history[step - 3]).mean(dim=0)
            shift = (1 - c) * (d.mean(dim=0) - moved)
            torch.testing.assert_close(weights.mean(dim=0) - now.mean(dim=0), shift, atol=2e-6, rtol=0)
            history[step] = now
    assert rounds.rule.progress.abs().max() > 0.1


@pytest.mark.parametrize(
    ("kind", "fraction", "delay"),
    [("cyclic", 0.05, 10), ("cyclic", 0.2, 3), ("cyclic", 0.05, 19), ("bernoulli", 0.05, 10), ("bernoulli", 0.2, 9)],
)
@pytest.mark.slow
def test_without_correction_a_drift_is_slowed(kind, fraction, delay):
    def speed(**how):
        config, means = flags(sync_fraction=fraction, sync_delay=delay, sync_subset=kind, **how), []
        size = 1000 if kind == "bernoulli" else 100
        simulate(config, torch.zeros(4, size), 500, drift(), lambda step, w: means.append(w.mean().item()))
        return (means[499] - means[199]) / 300

    expected = 1 / (1 + fraction * delay) if kind == "bernoulli" else 1 - fraction * delay
    assert speed(delay_correction="none") == pytest.approx(expected, rel=0.04)
    assert speed() == pytest.approx(1, abs=1e-5)
    assert speed(delay_correction="ema") == pytest.approx(1, abs=0.01)


def test_the_deviation_under_local_noise():
    config = flags(sync_subset="bernoulli", sync_fraction=0.2)
    before, after = [], []
    local = noise(5, 0.5)

    def make(step, weights):
        local(step, weights)
        before.append(spread(weights).square().mean().item())

    simulate(config, torch.zeros(4, 3000), 160, make, lambda _, w: after.append(spread(w).square().mean().item()))
    settled = slice(60, None)
    assert np.mean(after[settled]) == pytest.approx(0.8 / 0.2 * 0.25 * 3 / 4, rel=0.03)
    assert np.mean(before[settled]) == pytest.approx(1 / 0.2 * 0.25 * 3 / 4, rel=0.03)


@pytest.mark.parametrize(
    ("when", "alike"),
    [
        ({"sync_interval": 2}, ["mixing:1", "mixing", "ema", "smith", "none"]),
        ({"sync_delay": 2}, ["mixing:1", "ema:1.0,1.0,1000"]),
    ],
)
def test_corrections_that_are_the_same(when, alike):
    """Without delay all are the mean; with it, a coefficient of one is mixing with a gain of one."""
    first, *runs, different = (
        simulate(flags(sync_fraction=0.3, delay_correction=how, **when), start(), 30, noise(8))
        for how in (*alike, "mixing:0.9")
    )
    assert all(torch.equal(run, first) for run in runs)
    assert not torch.equal(different, first)


def test_identical_islands_are_one():
    def same(step, weights):
        weights += torch.randn(weights.shape[1], generator=torch.Generator().manual_seed(step))

    smith = {"sync_delay": 7, "delay_correction": "smith"}
    for how in ({}, {"sync_delay": 7}, smith, {"sync_delay": 2, "delay_correction": "ema"}):
        config = flags(sync_fraction=0.25, **how)
        weights = start(islands=1).repeat(4, 1)
        simulate(config, weights, 40, same)
        assert all(torch.equal(row, weights[0]) for row in weights)


def test_diloco_is_nesterov_sgd_of_torch():
    config = flags(sync_method="diloco", sync_interval=3)
    weights, local = torch.zeros(4, 20), noise(10)
    outer = torch.nn.Parameter(torch.zeros(20))
    optimizer = torch.optim.SGD(
        [outer], lr=config.outer_optimizer[0], momentum=config.outer_optimizer[1], nesterov=True
    )
    rounds = rounds_of(config, weights)
    for step in range(30):
        local(step, weights)
        if step % 3 == 2:
            outer.grad = outer.detach() - weights.mean(dim=0)
            optimizer.step()
        rounds.after_iteration(step)
        if step % 3 == 2:
            torch.testing.assert_close(weights, outer.detach().expand(4, -1), atol=1e-5, rtol=1e-5)


def eager(deltas, lr, momentum):
    """Outer weights [rounds, islands] of eager DiLoCo, of one element that moves by ``-deltas`` [rounds, islands]."""
    rounds, islands = deltas.shape
    outer, buffer, result = np.zeros(islands), np.zeros(islands), []
    for r in range(rounds):
        mixed = deltas[r] / islands if r == 0 else deltas[r - 1].mean() + (deltas[r] - deltas[r - 1]) / islands
        buffer = momentum * buffer + mixed
        outer = outer - lr * (mixed + momentum * buffer)
        result.append(outer)
    return np.array(result)


@pytest.mark.parametrize(("lr", "momentum"), [(1.0, 0.0), (0.7, 0.9)])
def test_eager_diloco_mixes_its_own_progress_with_the_late_mean(lr, momentum):
    config = flags(sync_method="eager-diloco", sync_interval=4, sync_delay=4, outer_optimizer=(lr, momentum))
    deltas = np.random.default_rng(1).normal(size=(6, 4)).astype(np.float32)
    expected = eager(deltas, lr, momentum)
    weights, seen = torch.zeros(4, 8), []

    def local(step, weights):
        weights -= torch.from_numpy(deltas[step // 4] / 4)[:, None]

    simulate(config, weights, 24, local, lambda step, w: seen.append(w[:, 3].clone()))
    np.testing.assert_allclose(torch.stack(seen[3::4]).numpy(), expected, atol=2e-5)


@pytest.mark.parametrize("islands", [2, 4, 8])
def test_eager_diloco_keeps_the_speed_that_its_special_case_in_the_paper_loses(islands):
    """Section 3.2 of AsyncMesh: full averaging, delay K, d = (w(t) - w(t - K)) / M on the mean of the weights at t - K."""
    config = flags(
        islands=islands, sync_method="eager-diloco", sync_interval=5, sync_delay=5, outer_optimizer=(1.0, 0.0)
    )
    ours = simulate(config, torch.zeros(islands, 8), 400, drift())
    late = 5 * (1 - 1 / islands)  # of the last round only the own part has been used
    assert ours.mean().item() == pytest.approx(400 - late, abs=1e-3)
    now, sent = 0.0, 0.0  # equal islands: the mean is each one's own
    for _ in range(400):
        now += 5.0
        now, sent = sent + (now - sent) / islands, now
    assert now / 2000 == pytest.approx(1 / (2 - 1 / islands), rel=0.01)


def test_a_lost_mean_leaves_weights_and_memory_alone():
    config = flags(delay_correction="ema:0.5,0.5,1000", p_sync=0.5, loss_unit="packet", packet_bytes=8)
    rounds = rounds_of(config, weights := start(size=400))
    rounds.rule.progress.normal_()
    before, memory = weights.clone(), rounds.rule.progress.clone()
    rounds.after_iteration(0)
    mean = rounds.crossing.begin(0, before).wait()
    lost = ~mean.arrived
    assert 0.3 < lost.float().mean() < 0.5  # of three quarters
    assert torch.equal(weights[lost], before[lost]) and torch.equal(rounds.rule.progress[lost], memory[lost])
    assert (weights != before)[mean.arrived].float().mean() > 0.99


@pytest.mark.parametrize("islands", [4, 8, 64])
def test_loss_thins_an_exchange_and_does_nothing_else(islands):
    removed = {4: 0.699, 8: 0.654, 64: 0.607}[islands]  # in closed form
    config = flags(islands=islands, p_sync=0.4, loss_unit="packet", packet_bytes=4)
    weights = start(islands, 160_000 // islands)
    before = spread(weights).square().sum()
    left = spread(simulate(config, weights, 1)).square().sum() / before
    assert 1 - left.item() == pytest.approx(removed, abs=0.02)


def test_an_island_with_a_weight_that_is_no_number_sends_nothing():
    for how in ({}, {"p_sync": 0.2}):
        config = flags(**how)
        weights = start()
        weights[2, 7] = float("nan")
        before = weights.clone()
        rounds = rounds_of(config, weights)
        rounds.after_iteration(0)
        others = [0, 1, 3]
        assert torch.isfinite(weights[others]).all()
        assert torch.equal(weights[2].nan_to_num(), before[2].nan_to_num())  # nor does it get anything
        for delivery in rounds.crossing.deliveries:
            assert not delivery.arrived[:, 2].any()
        if not how:  # what it owns nobody averages
            assert torch.equal(weights[others][:, 30:45], before[others][:, 30:45])
            mean = before[others][:, :30].mean(dim=0)
            torch.testing.assert_close(weights[0][:30], mean)


def test_messages_in_16_bits_are_rounded_and_weights_are_not():
    config = flags(sync_dtype="bf16", delay_correction="none")
    weights = start()
    rounded = weights.bfloat16().float().mean(dim=0).bfloat16().float()
    simulate(config, weights, 1)
    torch.testing.assert_close(weights, rounded.expand(4, -1), atol=0.01, rtol=0)
    assert torch.equal(weights, weights.bfloat16().float())
    mixed = flags(sync_dtype="bf16", sync_delay=3, sync_fraction=0.25)
    weights = simulate(mixed, start(), 20, noise(1))
    assert not torch.equal(weights, weights.bfloat16().float())


@pytest.mark.parametrize("dtype", ["bf16", "int8"])
@pytest.mark.parametrize("fraction", [1, 0.1])
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"delay_correction": "ema"},
        {"sync_delay": 1, "delay_correction": "mixing:0.5"},
        {"sync_delay": 25, "delay_correction": "smith"},
    ],
    ids=str,
)
def test_steps_smaller_than_the_rounding_of_messages_are_made(how, fraction, dtype):
    """Weights of 1, whose neighbours are 1/128 apart in bf16, and 1/127 in 8 bits, by 1/1000 in an iteration."""
    config = flags(sync_dtype=dtype, wire_block=32 if dtype == "int8" else 128, sync_fraction=fraction, **how)
    before = torch.ones(4, 200) + 0.01 * start(1, 200)
    after = simulate(config, before.clone(), 300, drift(1e-3))
    made = (after - before).mean().item() / 0.3
    assert made == pytest.approx(1, abs=0.03)
    assert spread(after).abs().max() < 4 / 128
    if dtype == "int8":
        return
    replaced = simulate(flags(sync_dtype="bf16", delay_correction="none"), before.clone(), 300, drift(1e-3))
    assert (replaced - before).mean().item() < 0.03  # all of it is rounded away in each iteration


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"sync_delay": 50, "delay_correction": "ema"}, "ema: diverges: must be below 0.454 with 2.5 later"),
        ({"sync_delay": 19, "delay_correction": "mixing:1"}, "mixing:1: diverges: must be below 0.836 with 0.95 later"),
        (
            {"sync_delay": 10, "delay_correction": "mixing:1.2", "sync_subset": "partition"},
            "mixing:1.2: diverges: must be below 1.2 with 0 later",
        ),
    ],
)
def test_a_gain_that_diverges_with_drawn_subsets_is_refused(settings, line):
    with pytest.raises(UsageError, match=f"^--delay-correction {line} exchanges of an element"):
        check_refusals(flags(**{"sync_fraction": 0.05, "sync_subset": "bernoulli", **settings}), Facts(workers=8))


def test_overlap_and_averages_that_cannot_settle_are_noted():
    [note] = flags(sync_fraction=0.05, sync_delay=50, delay_correction="ema").jobs().advice(300)
    assert note.startswith("2 later exchanges of an element under way") and "at most 0.0196" in note
    assert flags(sync_fraction=1 / 51, sync_delay=50).overlap == 0 < flags(sync_fraction=1 / 50, sync_delay=50).overlap
    [note] = flags(sync_fraction=0.05, sync_delay=10, delay_correction="ema").jobs().advice(180)
    assert "exchanged 9 times in this run" in note
    assert flags(sync_fraction=0.05, sync_delay=10).jobs().advice(180) == []


def test_the_coefficient_falls_by_half_a_cosine():
    config = flags(delay_correction="ema:0.5,0.01,100")
    rule = make_rule(config, torch.zeros(4, 8), 300)
    assert [rule.coefficient(step) for step in (0, 99, 100)] == [0.5] * 3
    assert rule.coefficient(200) == pytest.approx(0.255)
    assert rule.coefficient(300) == pytest.approx(0.01)


def test_speeds_share_out_the_iterations():
    config = flags(island_speeds=(10.0, 8.0, 1.0, 2.0))
    iterations = config.iterations(1050)
    assert iterations == 200
    assert sum(config.local_iterations(island, iterations) for island in range(4)) == 4 * 1050
    assert [config.local_iterations(island, 3) for island in range(4)] == [30, 24, 3, 6]
    assert flags().iterations(1050) == 1050


@pytest.mark.parametrize("islands", [2, 3, 8])
def test_how_far_islands_are_apart(islands):
    """Not at all where they are equal, although the mean of eight equal numbers may be rounded."""
    vectors = torch.randn(islands, 1000, generator=torch.Generator().manual_seed(5))
    assert squares_of([vectors[0]] * islands) == 0
    wide = vectors.double().numpy()
    assert squares_of(list(vectors)) == pytest.approx(((wide - wide.mean(axis=0)) ** 2).sum(), rel=1e-6)
