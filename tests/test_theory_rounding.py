"""The law of rounding as loss against the real draws, codes and keys."""

import itertools
import math

import numpy as np
import pytest
import torch

from megatron_lossy.base import theory
from megatron_lossy.base.coding.blocks import BlockCode
from megatron_lossy.base.exchange import Exchange, Stream, cut
from megatron_lossy.channel import make_channel
from megatron_lossy.channel.draws import coding_keys
from megatron_lossy.config import LossyConfig

pytestmark = pytest.mark.shows("what rounding costs: closed form, real draws and codes", device=False)

BLOCK, STEPS = 32, 8
#: Units that a test draws, over all links: at 1 % it then loses enough of them.
UNITS = 500_000


def mean_error(workers, p, omega, spread, square):
    """Return the law of docs/theory.md: the error of a mean of survivors with errors ``omega`` of their squares."""
    count = np.arange(1, workers + 1)
    choices = [math.lgamma(workers) - math.lgamma(k) - math.lgamma(workers - k + 1) for k in count]
    chance = np.exp(choices + (count - 1) * math.log1p(-p) + (workers - count) * math.log(max(p, 1e-300)))
    few = (chance / count).sum() - 1 / workers
    return few * spread + (chance * (count - 1) / count**2).sum() * omega * square


def measured(workers, p, code):
    """The mean squared error of an owner's mean of survivors, and its closed form, with omega, S^2 and |g|^2 as they are."""
    channel = make_channel(LossyConfig(p_grad=p), "grad")
    shard = BLOCK * (UNITS // STEPS // (workers - 1))
    [units], _ = cut([shard], [4], "packet", 0, elements=[BLOCK])
    random, everyone, found, expected = np.random.default_rng(1), np.arange(workers), 0.0, 0.0
    for step in range(STEPS):
        # The owner is another one each time: survivors are then drawn from all workers alike.
        exchange, owner = Exchange("grad", Stream(), step), step % workers
        grads = torch.from_numpy(random.standard_normal((workers, shard), dtype=np.float32))
        keys = np.concatenate([coding_keys(1234, exchange, source, [owner]) for source in range(workers)])
        coded = code.round_(grads.clone(), units, torch.from_numpy(keys))
        omega = ((coded - grads) ** 2).sum() / (grads**2).sum()
        coded[owner] = grads[owner]
        arrived = channel.delivered_links(exchange, everyone, np.full(workers, owner), units.count)
        arrived[owner] = True
        weights = torch.from_numpy(arrived / arrived.sum(axis=0)).float()[:, :, None]
        estimate = (coded.view(workers, -1, BLOCK) * weights).sum(0).view(-1)
        found += ((estimate - grads.mean(0)) ** 2).sum().item()
        spread, square = grads.var(0).sum().item(), (grads**2).sum().item() / workers
        expected += mean_error(workers, p, omega.item(), spread, square)
    return found, expected


#: Cases of make check, each value once or twice; the rest when there is time.
FEW = {(2, 0.4, 8), (8, 0.1, 4), (8, 0.01, 8)}


@pytest.mark.parametrize(
    ("workers", "p", "bits"),
    [
        pytest.param(*case, marks=() if case in FEW else pytest.mark.slow)
        for case in itertools.product((2, 8), (0.01, 0.1, 0.4), (8, 4))
    ],
)
def test_the_error_of_the_mean_is_the_law(workers, p, bits):
    found, expected = measured(workers, p, BlockCode(bits, BLOCK))
    assert found == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("nearest", [False, True])
def test_the_error_of_a_code(bits, nearest):
    """From kappa of each block, for values that are uniform within a step."""
    code = BlockCode(bits, 32)
    values = torch.from_numpy(np.random.default_rng(2).uniform(-1, 1, (1, 2**16)).astype(np.float32))
    [units], _ = cut([2**16], [4], "shard", 0)
    keys = None if nearest else torch.tensor([[5, 6]], dtype=torch.int32)
    coded = code.round_(values.clone(), units, keys)
    blocks = values.double().view(-1, 32)
    kappa_squared = blocks.abs().amax(1) ** 2 / (blocks**2).mean(1)
    error = (kappa_squared / ((12 if nearest else 6) * code.most**2)).dot((blocks**2).sum(1))
    omega = ((coded.double() - values) ** 2).sum() / (blocks**2).sum()
    assert omega.item() == pytest.approx(float(error / (blocks**2).sum()), rel=0.05)


def test_many_workers_lose_p_and_omega_alike():
    """For large N the error is (p + omega) / (1 - p) of S^2 / N, and a rate alone that costs as much is omega / (1 + omega)."""
    workers, p, omega = 3000, 0.2, 0.3
    law = mean_error(workers, p, omega, 1.0, 1.0)
    assert law * workers == pytest.approx((p + omega) / (1 - p), rel=0.01)
    rate = float(theory.as_loss(omega))
    alone = mean_error(workers, rate, 0.0, 1.0, 1.0)
    assert alone == pytest.approx(mean_error(workers, 0.0, omega, 1.0, 1.0), rel=0.01)
