"""Closed forms against enumeration of all masks in plain NumPy, and against the real channels and recovery rules.

Enumerations are exact. Simulations have fixed seeds and a standard error; comparisons allow five of them.
"""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lossy.config import LossyConfig
from megatron_lossy.lab import theory
from tests import theory_simulated as simulate

pytestmark = pytest.mark.shows("drift, ages and weights: enumeration, channels, rules", device=False)

RULES = [
    ("renormalize", False),
    ("renormalize", True),
    ("renormalize-remote", False),
    ("zero", False),
    ("zero", True),
    ("previous", False),
    ("previous", True),
]
RATES = st.floats(0.001, 0.95)


def close(measured, expected):
    assert abs(measured.mean - expected) <= 5 * measured.error + 1e-6, (measured, float(expected))


# --- Ages and drift by enumeration -----------------------------------------------------------------------------------


def bernoulli(lost, p):
    return np.prod(np.where(lost, p, 1 - p))


def chain(lost, transitions):
    """Probability of a history of losses under Gilbert-Elliott, by summing over all histories of states."""
    to_bad, to_good, *losses = transitions
    bad = to_bad / (to_bad + to_good)
    move = {(0, 0): 1 - to_bad, (0, 1): to_bad, (1, 0): to_good, (1, 1): 1 - to_good}
    total = 0.0
    for states in itertools.product((0, 1), repeat=len(lost)):
        value = (1 - bad, bad)[states[0]]
        for pair in itertools.pairwise(states):
            value *= move[pair]
        for state, gone in zip(states, lost):
            value *= losses[state] if gone else 1 - losses[state]
        total += value
    return total


def age_of(lost):
    """Updates missed by a replica that was equal before the first of these broadcasts."""
    return next((k for k, gone in enumerate(reversed(lost)) if not gone), len(lost))


def drift_by_hand(steps, chance, gamma):
    """Drift to the owner and between two receivers: all histories of losses, all pairs of missed increments."""
    ages = np.zeros(steps + 1)
    for lost in itertools.product((False, True), repeat=steps):
        ages[age_of(lost)] += chance(np.array(lost))
    assert np.isclose(ages.sum(), 1)
    gamma = np.pad(np.asarray(gamma, dtype=float), (0, steps))
    square = np.zeros(steps + 1)
    for missed in range(steps + 1):
        square[missed] = sum(gamma[abs(i - k)] for i in range(missed) for k in range(missed))
    gaps = np.abs(np.subtract.outer(range(steps + 1), range(steps + 1)))
    return ages @ square, ages @ square[gaps] @ ages


@pytest.mark.parametrize("gamma", [(1.0,), (2.0, 0.9, -0.3, 0.2), theory.ar1(0.9, 50)])
@pytest.mark.parametrize(("p", "burst"), [(0.1, None), (0.4, None), (0.2, 4.0), (0.4, 1.0), (0.0, None)])
def test_drift_after_some_steps(gamma, p, burst):
    """Uncorrelated, given and momentum-like increments; independent losses and bursts."""
    transitions = None if burst is None else (p / (1 - p) / burst, 1 / burst, 0.0, 1.0)

    def chance(lost):
        return bernoulli(lost, p) if transitions is None else chain(lost, transitions)

    for steps in (1, 2, 7):
        owner, between = drift_by_hand(steps, chance, gamma)
        np.testing.assert_allclose(theory.drift_to_owner(p, gamma, steps, burst), owner, rtol=1e-12)
        np.testing.assert_allclose(theory.drift_between(p, gamma, steps, burst), between, rtol=1e-12)
        if transitions is not None:
            by_tail = theory.drift_of_ages(theory.burst_tail(transitions, steps), gamma)
            np.testing.assert_allclose(by_tail, (owner, between), rtol=1e-12)


def test_drift_with_four_parameters():
    """Losses in both states of the chain."""
    transitions = (0.1, 0.3, 0.05, 0.7)
    owner, between = drift_by_hand(8, lambda lost: chain(lost, transitions), (1.0, 0.5))
    np.testing.assert_allclose(theory.drift_of_ages(theory.burst_tail(transitions, 8), (1.0, 0.5)), (owner, between))


@given(p=RATES, burst=st.none() | st.floats(1, 50), lags=st.integers(1, 30))
@settings(max_examples=60, deadline=None)
def test_drift_settles(p, burst, lags):
    """The steady state is the limit of many steps, and is reached when settling_steps says so."""
    if burst is not None and p / (1 - p) > burst:
        return
    gamma = 0.8 ** np.arange(lags)
    for formula in (theory.drift_to_owner, theory.drift_between):
        np.testing.assert_allclose(formula(p, gamma, 3000, burst), formula(p, gamma, burst=burst), rtol=1e-9)
    for formula, steps in zip((theory.drift_to_owner, theory.drift_between), theory.settling_steps(p, 0.01, burst)):
        limit = formula(p, burst=burst)
        assert formula(p, step=steps, burst=burst) >= limit * (0.99 - 1e-9)
        assert steps <= 1 or formula(p, step=steps - 1, burst=burst) < limit * (0.99 + 1e-9)


@given(p=RATES, q=RATES)
@settings(deadline=None)
def test_drift_in_closed_form(p, q):
    """The formulas of the documentation; monotone; the paper's is the (1-p)-th part, and right for small p."""
    between, owner = theory.drift_between(p), theory.drift_to_owner(p)
    np.testing.assert_allclose(between, 2 * p / (1 - p**2))
    np.testing.assert_allclose(owner, p / (1 - p))
    np.testing.assert_allclose(theory.drift_paper(p), (1 - p) * between)
    np.testing.assert_allclose(theory.drift_between(1e-9) / theory.drift_paper(1e-9), 1, rtol=1e-8)
    np.testing.assert_allclose(theory.drift_to_owner(p, theory.ar1(0.9, 2000)), owner * (1 + 0.9 * p) / (1 - 0.9 * p))
    for t in (1, 2, 5):
        np.testing.assert_allclose(theory.drift_between(p, step=t), between * (1 - p**t) * (1 - p ** (t + 1)))
    np.testing.assert_allclose(theory.drift_paper(p, step=1), theory.drift_between(p, step=1))
    assert owner <= between <= 2 * owner
    if p < q:
        assert between <= theory.drift_between(q) and owner <= theory.drift_to_owner(q)


def test_drift_over_pairs_is_that_of_all_pairs():
    """Four workers, one of them the owner: three of six pairs have it."""
    expected = (3 * theory.drift_to_owner(0.3) + 3 * theory.drift_between(0.3)) / 6
    np.testing.assert_allclose(theory.drift_over_pairs(0.3, 4), expected)
    np.testing.assert_allclose(theory.drift_over_pairs(0.3, 4, together=True), theory.drift_to_owner(0.3) / 2)


@pytest.mark.parametrize(("p", "burst"), [(0.1, None), (0.5, None), (0.2, 3.0)])
def test_ages(p, burst):
    """Moments, and the largest of three, from the probabilities of each age."""
    ages = np.arange(200)
    exactly = -np.diff(theory.age_exceeds(p, ages, burst), prepend=1.0)
    mean = ages @ exactly
    np.testing.assert_allclose(theory.age_mean(p, burst), mean)
    np.testing.assert_allclose(theory.age_variance(p, burst), ages**2 @ exactly - mean**2)
    few = exactly[:60]
    joint = few[:, None, None] * few[:, None] * few
    largest = np.maximum.outer(np.maximum.outer(ages[:60], ages[:60]), ages[:60])
    np.testing.assert_allclose(theory.age_max(p, 3, burst), (joint * largest).sum(), rtol=1e-6)
    np.testing.assert_allclose(theory.age_max(np.array([p, p]), 1, burst), mean)


@pytest.mark.parametrize("p", [-0.1, 1.0, float("nan")])
def test_rates_outside_are_refused(p):
    with pytest.raises(ValueError, match=r"must be in \[0, 1\)"):
        theory.drift_between(p)
    with pytest.raises(ValueError, match="burst"):
        theory.drift_between(0.9, burst=2.0)
    with pytest.raises(ValueError, match="no such recovery rule"):
        theory.weights("renormalize-remote", 0.1, 4, lossy_self=True)


# --- Recovery by enumeration -----------------------------------------------------------------------------------------


def weights_by_hand(rule, arrived):
    """Weights of N gradients, the owner's first; ``arrived`` bool[N]."""
    count = len(arrived)
    if rule == "zero":
        return arrived / count
    if rule == "renormalize":
        return arrived / max(arrived.sum(), 1)
    result, remote = np.zeros(count), arrived[1:].sum()
    result[0] = 1 / count if remote else 1
    result[1:] = arrived[1:] * (count - 1) / count / max(remote, 1)
    return result


def masks(rule, p, workers, lossy_self, steps=1):
    """(probability, weights) of everything that can happen; for previous in the last of so many steps."""
    for flat in itertools.product((False, True), repeat=steps * workers):
        arrived = np.array(flat).reshape(steps, workers)
        if not lossy_self and not arrived[:, 0].all():
            continue
        chance = np.prod(np.where(arrived if lossy_self else arrived[:, 1:], 1 - p, p))
        if rule == "previous":
            yield chance, arrived.any(axis=0) / workers
        else:
            yield chance, weights_by_hand(rule, arrived[0])


@pytest.mark.parametrize(("rule", "lossy_self"), RULES)
@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("p", [0.0, 0.1, 0.4])
def test_weights(rule, lossy_self, workers, p):
    """Every moment, by summing over all masks."""
    steps = 3 if rule == "previous" else 1
    cases = list(masks(rule, p, workers, lossy_self, steps))
    chance = np.array([chance for chance, _ in cases])
    drawn = np.array([weights for _, weights in cases])
    assert np.isclose(chance.sum(), 1)
    result = theory.weights(rule, p, workers, lossy_self, step=3 if rule == "previous" else None)
    second = np.einsum("m,mi,mk->ik", chance, drawn, drawn)
    np.testing.assert_allclose(result.own, chance @ drawn[:, 0], atol=1e-15)
    np.testing.assert_allclose(result.own_own, second[0, 0])
    for other in range(1, workers):
        np.testing.assert_allclose(result.other, chance @ drawn[:, other])
        np.testing.assert_allclose(result.own_other, second[0, other])
        np.testing.assert_allclose(result.same_other, second[other, other])
    if workers > 2:
        np.testing.assert_allclose(result.other_other, second[1, 2])
    total = drawn.sum(axis=1)
    np.testing.assert_allclose(result.total, chance @ total)
    np.testing.assert_allclose(result.noise, chance @ (drawn**2).sum(axis=1))
    np.testing.assert_allclose(result.total_variance, chance @ total**2 - (chance @ total) ** 2, atol=1e-14)


@pytest.mark.parametrize("lossy_self", [False, True])
def test_survivors(lossy_self):
    counts = np.zeros(5)
    for flat in itertools.product((False, True), repeat=4):
        if lossy_self or flat[0]:
            counts[sum(flat)] += bernoulli(~np.array(flat[0 if lossy_self else 1 :]), 0.3)
    np.testing.assert_allclose(theory.survivors(0.3, 4, lossy_self), counts, atol=1e-15)


@given(p=RATES, workers=st.integers(1, 300), rule=st.sampled_from(RULES))
@settings(deadline=None)
def test_weights_in_general(p, workers, rule):
    """Unbiased rules sum to 1 (or 1 - p^N); no rule beats the plain mean at its own expectation; p = 0 is exact."""
    name, lossy_self = rule
    result = theory.weights(name, p, workers, lossy_self)
    if name in ("renormalize", "renormalize-remote"):
        np.testing.assert_allclose(result.total, 1 - (p**workers if lossy_self else 0))
    assert result.noise >= result.total**2 / workers * (1 - 1e-9)
    assert result.total_variance >= -1e-9
    without = theory.weights(name, 0.0, workers, lossy_self)
    np.testing.assert_allclose([without.own, without.total, without.noise], [1 / workers, 1, 1 / workers])


@pytest.mark.parametrize("p", [0.0, 0.1, 0.3])
def test_previous_over_time(p):
    """Covariances of a substituted gradient with itself, later, by enumeration of the losses."""
    rho = np.array([1.0, 0.6, 0.1, -0.2])
    history, lags = 9, 6  # a sender lost 9 times in a row counts as heard before that: p^10 is 6e-6

    def correlation(lag):
        return rho[abs(lag)] if abs(lag) < len(rho) else 0.0

    sums, stale = 1.0, 0.0
    for lost in itertools.product((False, True), repeat=history + lags):
        chance = bernoulli(np.array(lost), p)
        now = history - 1 - age_of(lost[:history])  # when the gradient in use was computed
        stale += chance * 2 * (1 - correlation(age_of(lost[:history])))
        for lag in range(1, lags + 1):
            later = history - 1 + lag - age_of(lost[: history + lag])
            sums += chance * 2 * correlation(later - now)
    rest = np.arange(lags + 1, 60)  # beyond the reach of rho only the same gradient, used again, counts ...
    sums += 2 * (p**rest).sum()
    # ... and one that is newer than it, at most 3 steps apart.
    for lag in rest:
        for old in range(20):
            for new in range(lag):
                sums += 2 * (1 - p) ** 2 * p ** (old + new) * correlation(lag - new + old)
    np.testing.assert_allclose(theory.previous_staleness(p, rho), stale, atol=1e-4)
    np.testing.assert_allclose(theory.previous_long_run(p, rho), sums, rtol=1e-3)
    np.testing.assert_allclose(theory.previous_long_run(p), (1 + p) / (1 - p))


# --- The real channels and rules -------------------------------------------------------------------------------------


@pytest.mark.parametrize("burst", [None, 4.0])
def test_simulated_drift(burst):
    """Real channels on random walks: uncorrelated and with momentum, in the steady state and on the way to it."""
    bursts = {} if burst is None else {"loss_model": (f"gilbert-elliott:{burst}",)}
    steps, workers, p = 900, 24, 0.3
    walks = [simulate.random_walk(steps, (workers, 4), phi, 1) for phi in (0, 0.9)]
    series = simulate.drift(LossyConfig(p_param=p, **bursts), workers, np.concatenate(walks, axis=2))
    for formula, values in zip((theory.drift_between, theory.drift_to_owner), series):
        for gamma, chosen in (((1.0,), slice(0, 4)), (theory.ar1(0.9, 500), slice(4, 8))):
            measured = simulate.Measured.over(values[100:, chosen].mean(axis=1), 16)
            assert measured.error < 0.05 * measured.mean
            close(measured, formula(p, gamma, burst=burst))
    if burst is None:
        assert abs(series[0][100:, :4].mean() - theory.drift_paper(p)) > 0.15


@pytest.mark.parametrize(("burst", "units"), [(None, 1), (None, 5), (3.0, 1), (3.0, 2)])
def test_ages_of_the_channels(burst, units):
    """Shares of each age over links, and the largest age; with bursts and several units a step too."""
    p, workers = 0.3, 16
    bursts = {} if burst is None else {"loss_model": (f"gilbert-elliott:{burst}",)}
    counts, of_worker, of_all = simulate.ages(LossyConfig(p_param=p, **bursts), workers, 800, units, burn_in=60)
    assert (counts.sum(axis=1) == workers * (workers - 1) * units).all()
    tail = theory.age_exceeds(p, np.arange(30), burst)
    if burst is not None and units > 1:
        tail = theory.burst_tail((p / (1 - p) / burst, 1 / burst, 0.0, 1.0), 30, units)
    exactly = -np.diff(tail, prepend=1.0)
    for age in range(4):
        close(simulate.Measured.over(counts[:, age] / counts[0].sum(), 16), exactly[age])
    if burst is None:  # units of a link are then independent
        close(simulate.Measured.over(of_worker, 16), theory.age_max(p, (workers - 1) * units))
        close(simulate.Measured.over(of_all.astype(float), 16), theory.age_max(p, workers * (workers - 1) * units))
