"""N replicas of a few tensors with optimizers of torch, their errors, and what keeps them together: the real classes."""

from __future__ import annotations

import numpy as np
import torch

from megatron_lossy.base.exchange import Exchange, Stream
from megatron_lossy.channel.corruption import make_corruption
from megatron_lossy.channel.corruption.applied import apply
from megatron_lossy.config import LossyConfig
from megatron_lossy.mechanisms.replicas.repair import compare, repair
from megatron_lossy.mechanisms.replicas.synchroniser import Copies, Replica, Synchroniser
from megatron_lossy.transport.peers import LocalPeers

SIZES = (5, 4097, 3, 700)  # odd, and so that pieces have several


class FullReplicas:
    """The replicas of ``peers`` that are here. Tensors are their own buckets; all gradients come from a seed.

    ``aside``: what forward and backward would read are copies, as of bfloat16 training.
    """

    def __init__(self, peers, sizes=SIZES, optimizer="sgd", lr=0.125, momentum=0.0, aside=False, scale=1.0, **flags):
        self.config = LossyConfig(**flags)
        self.peers, self.sizes, self.scale = peers, sizes, scale
        start = torch.Generator().manual_seed(1)
        values = [torch.randn(size, generator=start) for size in sizes]
        self.parameters = [[value.clone() for value in values] for _ in peers.local]
        self.optimizers = [
            torch.optim.SGD(own, lr=lr, momentum=momentum)
            if optimizer == "sgd"
            else torch.optim.AdamW(own, lr=lr, betas=(0.9, 0.999), weight_decay=0.0, eps=1e-12)
            for own in self.parameters
        ]
        self.corruption = make_corruption(self.config)
        replicas = [
            Replica(lambda k=k: self.parameters[k], lambda k=k: self.moments(k), aside=aside)
            for k in range(len(peers.local))
        ]
        self.synchroniser = Synchroniser(self.config, [Copies("dense", peers, replicas)], self.total)
        self.repaired = []
        self.iteration = 0

    def total(self, values):
        """Only replicas: no pipeline, no tensor parallelism."""
        rows = np.zeros((len(self.peers.local), len(values)))
        rows[0] = values
        return self.peers.gather(rows).sum(axis=0)

    def moments(self, k):
        names = ("momentum_buffer", "exp_avg", "exp_avg_sq")
        states = [self.optimizers[k].state[one] for one in self.parameters[k] if one in self.optimizers[k].state]
        return [state[name] for state in states for name in names if state.get(name) is not None]

    def gradients(self):
        """The reduced gradients of this iteration, the same for all."""
        drawn = torch.Generator().manual_seed(1000 + self.iteration)
        return [self.scale * torch.randn(size, generator=drawn) for size in self.sizes]

    def step(self, skip=False, hit=None):
        """One iteration; ``skip``: its update is skipped. ``hit(m, gradients)`` changes what replica m received."""
        exchange = Exchange("grad", Stream(), self.iteration)
        received = []
        for number in self.peers.local:
            gradients = self.gradients()
            for event in self.corruption.events(exchange, number, self.sizes, 32):
                apply(gradients[event.bucket], event)
            if hit is not None:
                hit(number, gradients)
            received.append(gradients)
        if self.config.replica_check == "repair":
            buckets = [[[one] for one in own] for own in received]
            self.repaired.append(repair(self.peers, buckets, compare(self.peers, buckets)))
        if not skip:
            squares = [[sum(float(g.double().square().sum()) for g in own) for own in received]]
            self.synchroniser.arrive(squares)
            for own, gradients, optimizer in zip(self.parameters, received, self.optimizers, strict=True):
                for parameter, gradient in zip(own, gradients, strict=True):
                    parameter.grad = gradient
                optimizer.step()
            self.synchroniser.finished(squares)
        self.iteration += 1

    def weights(self):
        """float32[local, d]."""
        return np.stack([torch.cat(own).numpy() for own in self.parameters]).copy()

    def apart(self):
        """The mean over replicas of |mean - replica|^2; all replicas must be here."""
        assert isinstance(self.peers, LocalPeers)
        weights = self.weights().astype(np.float64)
        return float(((weights - weights.mean(axis=0)) ** 2).sum() / len(weights))
