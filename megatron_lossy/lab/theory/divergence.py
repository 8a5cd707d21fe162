"""Divergence of full replicas with errors in their reduced gradients, and the cost of averaging them. NumPy only.

After *Identifying and Mitigating Errors in Gradient Aggregation of Distributed Data Parallel Training* (PAFT). Each of
N replicas gets g + e_m; errors are independent over replicas, steps and the d elements, with variance sigma^2.
Divergence is E|mean - theta_m|^2, in squared units of the weights. Rates eta are the learning rates of the steps, one
after another.

All linear rules share a factor: with x_m independent and of variance v, Var(mean x - x_m) = v (1 - 1/N), since x_m is
itself in the mean, with 1/N of its weight.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike


def share(replicas: int) -> float:
    """Return 1 - 1/N, the common factor of this module. Raise ``ValueError`` below one replica."""
    if replicas < 1:
        raise ValueError(f"replicas = {replicas}: must be at least 1")
    return 1 - 1 / replicas


def divergence(replicas: int, sigma: float, rates: ArrayLike, dimension: int = 1, momentum: float = 0.0) -> float:
    """Return the divergence after steps with ``rates``: d (1 - 1/N) sigma^2 sum eta^2 for SGD.

    With heavy-ball momentum b, v <- b v + g, theta <- theta - eta v: the error of step s has been added to the weight
    with R = sum over t >= s of eta(t) b^(t-s). Errors are independent, so that sum R^2 takes the place of sum eta^2.
    With a constant rate R = eta (1 - b^(j+1))/(1 - b), j steps later: in the long run 1/(1-b)^2 times SGD. A decaying
    mean of gradients, v <- b v + (1-b) g, is the same with eta (1-b): in the long run it equals SGD. Lemma 3.1 of the paper has
    (N+1)/N in the place of 1 - 1/N, and no d: it adds variances of terms that are correlated.
    """
    return dimension * share(replicas) * sigma**2 * float((_responses(rates, momentum) ** 2).sum())


def lost_all_reduce(replicas: int, p: float) -> float:
    """Return E|theta_m - theta_n|^2 of two replicas after a step of SGD, in units of s^2 eta^2.

    Both halves of its all-reduce lose the share ``p``. Local gradients are independent, with variance s^2. The owner of
    an element has the mean of the K gradients that arrived, its own included: e = E 1/K = (1 - p^N) / (N (1-p)).
    Another rank m has the expected weight E 1[m in K] / K = (1 - e)/(N - 1) in it, since all others are alike. So the
    squared distance of its gradient to the mean is a = 1 + e - 2 (1 - e)/(N - 1). If neither replica owns the element,
    one of them keeps its own gradient with probability 2p(1-p); both do with p^2, and then their squared distance is 2.
    For the share 2/N of the elements one of the two is the owner, which has the mean. Without loss in the first half,
    and for many replicas, the result is 2p(1-p) + 2p^2.
    """
    if replicas < 2 or not 0 <= p < 1:
        raise ValueError(f"replicas = {replicas}, p = {p}: must be at least 2, and in [0, 1)")
    e = (1 - p**replicas) / (replicas * (1 - p))
    away = 1 + e - 2 * (1 - e) / (replicas - 1)
    owners = 2 / replicas
    return (1 - owners) * (2 * p * (1 - p) * away + 2 * p**2) + owners * p * away


def _responses(rates: ArrayLike, momentum: float) -> np.ndarray:
    """Return float64[steps]: the change of the last weight per unit of each step's gradient, without its sign."""
    eta = np.asarray(rates, dtype=np.float64)
    if not 0 <= momentum < 1:
        raise ValueError(f"momentum = {momentum}: must be in [0, 1)")
    result = np.zeros(len(eta))
    later = 0.0
    for step in reversed(range(len(eta))):
        later = eta[step] + momentum * later
        result[step] = later
    return result


def overhead(interval: float, parameter_bytes: float, gradient_bytes: float, moments: int = 0) -> float:
    """Return the traffic of synchronisation over that of gradients, per element: (1 + moments) main/grad bytes / H."""
    return (1 + moments) * parameter_bytes / gradient_bytes / interval
