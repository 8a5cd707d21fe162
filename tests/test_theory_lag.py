"""The lag of replicas, its inverse and the learning rates it leaves stable: against enumeration, roots and draws; delayed descent."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lossy.base.exchange import Exchange, Stream
from megatron_lossy.base.theory import HIGHEST_R
from megatron_lossy.config import LossyConfig
from megatron_lossy.lab import theory
from megatron_lossy.lab.theory import Lag, Lead, lead, mean_lag, stability_limit
from megatron_lossy.transport import Network

pytestmark = pytest.mark.shows(
    "the lag, its inverse, and stable learning rates",
    "the bound of delayed descent against torch's optimizers",
    device=False,
)


@st.composite
def lags(draw):
    """Independent losses, bursts, and a part of the receivers with reliable links."""
    p = draw(st.floats(0.01, 0.6))
    burst = draw(st.none() | st.floats(max(1.0, p / (1 - p)) + 1 / (1 - p), 12.0))
    return Lag.of(p, burst, draw(st.sampled_from([0.3, 1.0])))


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
    assert Lag.of(0.4, None, 0.5).mean == pytest.approx(0.5 * 0.4 / 0.6)
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


@pytest.mark.parametrize("bad", [{"p": 1.0}, {"p": 0.4, "burst": 0.5}, {"p": 0.4, "lossy": 1.5}])
def test_what_is_no_loss_is_refused(bad):
    with pytest.raises(ValueError, match="must be"):
        Lag.of(**bad)
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


# --- the bound of delayed descent against torch's own optimizers on a quadratic, and against what is known -----------


DELAYS, STEPS = (0, 1, 3, 7), 1500


def amplitudes(curvatures: list[float], delays: list[int], momentum: float, nesterov: bool) -> torch.Tensor:
    """Return [2, n]: how far from the minimum of h x^2/2 torch.optim.SGD is in the middle and at the end of a run."""
    weight = torch.ones(len(delays), dtype=torch.float64, requires_grad=True)
    curvature = torch.tensor(curvatures, dtype=torch.float64)
    optimizer = torch.optim.SGD([weight], lr=1.0, momentum=momentum, nesterov=nesterov)
    path = torch.ones(max(delays) + STEPS + 1, len(delays), dtype=torch.float64)
    elements = torch.arange(len(delays))
    for step in range(max(delays), max(delays) + STEPS):
        weight.grad = curvature * path[step - torch.tensor(delays), elements]
        optimizer.step()
        path[step + 1] = weight.detach()
    window = STEPS // 10
    return torch.stack([path[STEPS // 2 :][:window].abs().amax(0), path[-window:].abs().amax(0)])


@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.5, False), (0.9, False), (0.5, True), (0.9, True)])
def test_the_bound_is_where_sgd_begins_to_diverge(momentum, nesterov):
    bounds = [theory.delayed_step_bound(delay, momentum, nesterov) for delay in DELAYS]
    for share in (0.97, 1.03):
        middle, end = amplitudes([share * bound for bound in bounds], list(DELAYS), momentum, nesterov)
        # Below the bound it dies out, down to nothing at all; above it grows, up to what is no number.
        dies, grows = end <= 0.8 * middle, ~(end <= 1.25 * middle)
        assert (grows if share > 1 else dies).all(), (share, middle, end)


def test_what_is_known():
    for delay in range(8):
        assert theory.delayed_step_bound(delay) == pytest.approx(theory.stability_bound(delay), rel=1e-9)
    for momentum in (0.3, 0.9):
        assert theory.delayed_step_bound(0, momentum) == pytest.approx(2 * (1 + momentum))
        known = 2 * (1 + momentum) / (1 + 2 * momentum)
        assert theory.delayed_step_bound(0, momentum, nesterov=True) == pytest.approx(known)
    with pytest.raises(ValueError, match="delay = -1"):
        theory.delayed_step_bound(-1)
    with pytest.raises(ValueError, match=r"momentum = 1\.0"):
        theory.delayed_step_bound(1, 1.0)
