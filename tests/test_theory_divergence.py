"""Divergence of replicas: closed forms against simulation with the real errors, optimizers and synchroniser.

Statistical tests use fixed seeds and five standard errors: of E|mean - theta_m|^2 over d coordinates of N replicas, the
relative one is sqrt(2 / ((N-1) d)).
"""

import numpy as np
import pytest

from megatron_lossy.lab.theory import divergence as theory
from megatron_lossy.transport.peers import LocalPeers
from tests.full_replicas import FullReplicas

pytestmark = pytest.mark.shows("divergence of full replicas: closed forms against simulation", device=False)

N, D, SIGMA, ETA = 4, 20_000, 0.01, 0.1


def divergence_of_pairs(replicas, sigma, rates, dimension=1, momentum=0.0):
    """E|theta_m - theta_n|^2 of two replicas: 2 d sigma^2 sum R^2, whatever N is, as of any two independent errors."""
    return 2 * theory.divergence(replicas, sigma, rates, dimension, momentum) / theory.share(replicas)


def toy(replicas=N, **options):
    return FullReplicas(
        LocalPeers(replicas), sizes=(D,), lr=ETA, scale=0.0, **(dict(grad_error=f"gaussian:{SIGMA}") | options)
    )


@pytest.mark.parametrize("replicas", [2, 4, 8])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_lemma_3_1(replicas, momentum):
    run = toy(replicas, momentum=momentum)
    for _ in range(30):
        run.step()
    rates = np.full(30, ETA)
    ours = theory.divergence(replicas, SIGMA, rates, D, momentum)
    error = 5 * np.sqrt(2 / ((replicas - 1) * D))
    assert run.apart() == pytest.approx(ours, rel=error)
    weights = run.weights().astype(np.float64)
    pair = divergence_of_pairs(replicas, SIGMA, rates, D, momentum)
    assert ((weights[0] - weights[1]) ** 2).sum() == pytest.approx(pair, rel=5 * np.sqrt(2 / D))


def test_traffic():
    assert theory.overhead(20, 4, 4) == 0.05 and theory.overhead(10, 4, 2, moments=2) == pytest.approx(0.6)


def test_what_is_no_argument():
    for call in (
        lambda: theory.share(0),
        lambda: theory.divergence(N, 1.0, [1.0], momentum=1.0),
    ):
        with pytest.raises(ValueError, match="must be"):
            call()
