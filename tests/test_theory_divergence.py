"""Divergence of replicas: closed forms against simulation with the real errors, optimizers and synchroniser.

Statistical tests use fixed seeds and five standard errors: of E|mean - theta_m|^2 over d coordinates of N replicas, the
relative one is sqrt(2 / ((N-1) d)).
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron_lossy.base.exchange import Stream
from megatron_lossy.config import LossyConfig
from megatron_lossy.lab.virtual.replicas import LossyReduction
from megatron_lossy.mechanisms.replicas.streams import ReplicaStream
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


def distance_after_all_reduce(replicas, p):
    """E|theta_m - theta_n|^2 after a step of SGD, in units of s^2 eta^2; both halves of its all-reduce lose ``p``.

    Local gradients are independent, with variance s^2. The owner of an element has the mean of the K gradients that
    arrived, its own included: e = E 1/K. Another rank has the expected weight (1 - e)/(N - 1) in it, so that the squared
    distance of its gradient to the mean is ``away``. If neither replica owns the element, one keeps its own gradient with
    probability 2p(1-p); both do with p^2, and then their squared distance is 2. Of 2/N of the elements one is the owner.
    """
    e = (1 - p**replicas) / (replicas * (1 - p))
    away = 1 + e - 2 * (1 - e) / (replicas - 1)
    owners = 2 / replicas
    return (1 - owners) * (2 * p * (1 - p) * away + 2 * p**2) + owners * p * away


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


@pytest.mark.parametrize(("size", "p"), [(2, 0.3), (3, 0.1), (4, 0.4), (8, 0.2)])
def test_a_lossy_all_reduce_drives_replicas_apart(size, p):
    """Simulated with the real draws and rules, within 5 standard errors over the elements."""
    elements = 24_000
    config = LossyConfig(p_grad=p, loss_unit="packet", packet_bytes=4, param_sync_interval=10**6)
    bucket = SimpleNamespace(grad_data=torch.zeros(elements))
    reduction = LossyReduction(config, ReplicaStream(Stream(), None, [(None, bucket)], []), size, None)
    gradients = torch.from_numpy(np.random.default_rng(1).standard_normal((size, elements)).astype(np.float32))
    run = SimpleNamespace(loss_scale=lambda: None, gapless=False)
    for worker in range(size):
        reduction.collect(worker, [gradients[worker] / size], 0, run)
    reduction.reduce()
    got = np.stack([reduction.gather(worker, 0)[0][:elements].numpy() for worker in range(size)])
    pairs = [(got[m] - got[n]) ** 2 for m in range(size) for n in range(m)]
    squares = np.mean(pairs, axis=0)
    error = squares.std() / elements**0.5
    assert abs(squares.mean() - distance_after_all_reduce(size, p)) < 5 * error
