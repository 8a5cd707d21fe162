"""The lag of replicas, its inverse and the learning rates it leaves stable: against enumeration, roots and draws."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lossy.base.exchange import Exchange, Stream
from megatron_lossy.base.theory import HIGHEST_R
from megatron_lossy.config import LossyConfig
from megatron_lossy.lab.theory import Lag, Lead, lead, mean_lag, stability_limit
from megatron_lossy.transport import Network

pytestmark = pytest.mark.shows("the lag, its inverse, and stable learning rates", device=False)


@st.composite
def lags(draw):
    """Independent losses, bursts, and a part of the receivers with reliable links."""
    p = draw(st.floats(0.01, 0.6))
    burst = draw(st.none() | st.floats(max(1.0, p / (1 - p)) + 1 / (1 - p), 12.0))
    lag = Lag.of(p, burst)
    return Lag(draw(st.sampled_from([0.3, 1.0])) * lag.share, lag.again)


def ages(lag, most):
    """P(A = a) for a < ``most``; the rest at the end."""
    exceeds = lag.share * lag.again ** np.arange(most)
    return np.append(1.0, exceeds[:-1]) - exceeds


def sent(weights, how):
    """V of the owner's ``weights`` [steps], which were constant before."""
    extra, result = 0.0, []
    for before, now in zip(np.append(weights[0], weights), weights, strict=False):
        extra = how.c * (now - before) + how.r * extra
        result.append(now + extra)
    return np.array(result)


@settings(deadline=None)
@given(lags(), st.integers(0, 10))
def test_the_mean_receiver_has_the_owners_weights_for_any_trajectory(lag, seed):
    how, steps = lag.lead, 400
    assert 0 <= how.r < HIGHEST_R and mean_lag(lag, how) == pytest.approx(0, abs=1e-12)
    weights = np.random.default_rng(seed).normal(size=steps).cumsum()
    replica = np.convolve(sent(weights, how), ages(lag, steps))[:steps]
    np.testing.assert_allclose(replica[300:], weights[300:], atol=1e-6)
    plain = np.convolve(weights, ages(lag, steps))[:steps]
    assert np.abs(plain - weights)[300:].max() > 1e-3  # or the comparison is empty


def test_the_mean_lag_is_the_mean_age():
    for p, burst in ((0.1, None), (0.4, None), (0.4, 4.0)):
        lag = Lag.of(p, burst)
        assert lag.mean == pytest.approx(p * burst if burst else p / (1 - p))
        assert mean_lag(lag) == lag.mean and lead(lag.share, lag.mean) == pytest.approx(lag.lead)
    assert lead(0.0, 0.0) == Lead() and Lag().lead == Lead()


def test_r_is_cut_off():
    assert Lag.of(0.4, 100.0).lead == Lead(pytest.approx(2 / 3), HIGHEST_R)
    assert Lag.of(0.4, 1.0).lead == Lead(pytest.approx(2 / 3), 0.0)  # never two losses in a row


@settings(deadline=None)
@given(lags(), st.floats(0, 0.95), st.booleans(), st.booleans())
def test_the_limit_is_where_a_root_leaves_the_unit_circle(lag, beta1, compensated, nesterov):
    how = lag.lead if compensated else Lead()
    limit = stability_limit(beta1, lag, how, nesterov)

    def radius(gain):
        moment = np.array([1.0]) if not nesterov else np.array([1 + beta1, -beta1])
        forward = np.polymul(moment * (1 - beta1), [1 - lag.share, -(lag.again - lag.share)])
        forward = np.polymul(forward, [1 + how.c, -(how.r + how.c)])
        around = np.polymul(np.polymul([1, -1], [1, -beta1]), np.polymul([1, -lag.again], [1, -how.r]))
        # In powers of x = 1/z both have the constant term first; the update is a step late.
        late = np.append(0, gain * forward)
        size = max(len(late), len(around))
        both = np.pad(late, (0, size - len(late))) + np.pad(around, (0, size - len(around)))
        return np.abs(np.roots(both)).max()

    assert radius(0.99 * limit) <= 1 + 1e-9 < radius(1.01 * limit)


def replicas(config, weights, how, receivers):
    """[steps, receivers]: what receivers hold of the owner's ``weights``, by the package's own draws."""
    network = Network(config, "param", receivers + 1)
    held, history = np.full(receivers, weights[0]), []
    for step, value in enumerate(sent(weights, how)):
        links = np.zeros(receivers, dtype=int), np.arange(1, receivers + 1)
        arrived = network.delivered_links(Exchange("param", Stream(), step), *links, 1)[:, 0]
        held = np.where(arrived, value, held)
        history.append(held)
    return np.array(history)


@pytest.mark.parametrize("flags", [{}, {"loss_model": ("gilbert-elliott:4",)}])
def test_drawn_losses_have_this_lag_and_lead(flags):
    """4,000 receivers; each mean lies within five standard errors of the owner (60 comparisons: false alarm 4e-5)."""
    lag = Lag.of(0.4, 4.0 if flags else None)
    weights = np.cumsum(np.sin(np.arange(120) / 5) + 0.3)
    config = LossyConfig(p_param=0.4, **flags)
    for how in (Lead(), lag.lead):
        held = replicas(config, weights, how, 4000)[60:]
        error = held.std(axis=1) / np.sqrt(4000)
        expected = np.convolve(sent(weights, how), ages(lag, 120))[60:120]
        assert (np.abs(held.mean(axis=1) - expected) <= 5 * error).all()
        if how.c:
            assert (np.abs(held.mean(axis=1) - weights[60:]) <= 5 * error).all()
    assert np.abs(expected - weights[60:]).max() < 1e-3


def test_what_is_no_loss_is_refused():
    with pytest.raises(ValueError, match="beta1 = 1"):
        stability_limit(1.0)


def run(*arguments):
    from megatron_lossy.lab.studies import lag

    lag.main(arguments)


def test_the_command_says_the_limits_and_what_to_set(capsys):
    run("--p", "0.4")
    told = capsys.readouterr().out
    assert "40 % of parameters lost, independently: replicas are 0.667 updates late on average." in told
    assert "  0.9      38.00       1.78        38.00   <- yours" in told
    assert "--param-send compensated   a lead of 0.667" in told and "--adam-beta1" in told
    run("--p", "0.4", "--mean-burst", "4")
    assert "in bursts of 4 updates: replicas are 1.6 updates late" in capsys.readouterr().out
    run("--p", "0.2", "--beta1", "0")
    assert "this loss makes nothing less stable" in capsys.readouterr().out
