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
