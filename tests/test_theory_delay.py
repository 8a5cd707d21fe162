"""The bound of delayed descent against torch's own optimizers on a quadratic, and against what is known."""

import pytest
import torch

from megatron_lossy import theory

pytestmark = pytest.mark.shows("the bound of delayed descent against torch's optimizers", device=False)

DELAYS, STEPS = (0, 1, 3, 7), 1500


def amplitudes(curvatures: list[float], delays: list[int], momentum: float, nesterov: bool) -> torch.Tensor:
    """[2, n]: how far from the minimum of h x^2/2 torch.optim.SGD is in the middle and at the end of a run."""
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


@pytest.mark.parametrize("delay", [1, 3, 7])
def test_looking_ahead_helps_where_gradients_are_late(delay):
    """Not without delay: there it lowers the bound."""
    heavy, ahead = (theory.delayed_step_bound(delay, 0.9, nesterov) for nesterov in (False, True))
    assert ahead > 1.05 * heavy
    assert theory.delayed_step_bound(0, 0.9, True) < theory.delayed_step_bound(0, 0.9)
