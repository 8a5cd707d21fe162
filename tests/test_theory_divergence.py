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
from megatron_lossy.lab.theory import divergence as theory
from megatron_lossy.lab.virtual.replicas import LossyReduction
from megatron_lossy.mechanisms.replicas.streams import ReplicaStream
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
    assert abs(squares.mean() - theory.lost_all_reduce(size, p)) < 5 * error
    assert theory.lost_all_reduce(size, 0.0) == 0
