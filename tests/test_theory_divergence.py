"""Divergence of replicas: closed forms against simulation with the real errors, optimizers and synchroniser.

Statistical tests use fixed seeds and five standard errors: of E|mean - theta_m|^2 over d coordinates of N replicas, the
relative one is sqrt(2 / ((N-1) d)).
"""

import numpy as np
import pytest

from megatron_lossy.transport.peers import LocalPeers
from tests.full_replicas import FullReplicas

pytestmark = pytest.mark.shows("divergence of full replicas: closed forms against simulation", device=False)

N, D, SIGMA, ETA = 4, 20_000, 0.01, 0.1


def divergence_of_pairs(steps, momentum):
    """E|theta_m - theta_n|^2 of two replicas: 2 d sigma^2 sum R^2, whatever N is, as of any two independent errors.

    R = eta (1 + b + ... + b^j), j steps later, is the change of the last weight by the gradient of a step.
    """
    responses = ETA * np.cumsum(momentum ** np.arange(steps))
    return 2 * D * SIGMA**2 * (responses**2).sum()


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
    pair = divergence_of_pairs(30, momentum)
    error = 5 * np.sqrt(2 / ((replicas - 1) * D))
    assert run.apart() == pytest.approx(pair / 2 * (1 - 1 / replicas), rel=error)  # a replica is itself in the mean
    weights = run.weights().astype(np.float64)
    assert ((weights[0] - weights[1]) ** 2).sum() == pytest.approx(pair, rel=5 * np.sqrt(2 / D))
