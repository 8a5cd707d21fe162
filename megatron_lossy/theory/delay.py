"""Gradient descent with gradients of old weights: the largest stable learning rate. The standard library only.

In an asynchronous pipeline of P stages, stage s follows gradients that are d = P - 1 - s updates old. Along a direction
of curvature h the weights of a stage then follow, with momentum mu (torch.optim.SGD's, which adds gradients up),

    b(k) = mu b(k-1) + h x(k-d),    x(k+1) = x(k) - lr b(k),                  heavy ball
                                    x(k+1) = x(k) - lr (h x(k-d) + mu b(k)),  Nesterov

with a = lr h as the only number beside mu and d. A mode leaves the unit circle at a z = exp(iw) for which

    a = -z^d (z - 1) (z - mu) / N(z),    N = z for heavy ball,    N = (1 + mu) z - mu for Nesterov,

is real and positive; the smallest such a is the bound. For heavy ball the condition reads tan(d w) = (1 - mu)/(1 + mu)
cot(w/2), and a = 2 sin(w/2) sqrt((1 + mu)^2 sin(w/2)^2 + (1 - mu)^2 cos(w/2)^2). Without momentum w = pi/(2d + 1) and a
= 2 sin(w/2), the bound of :func:`.averaging.stability_bound`.
"""

from __future__ import annotations

import cmath
import itertools
import math
from collections.abc import Callable

_GRID = 4096


def delayed_step_bound(delay: int, momentum: float = 0.0, nesterov: bool = False) -> float:
    """The least product of learning rate and curvature that diverges with gradients ``delay`` updates old.

    Raises ``ValueError`` for a negative delay or a momentum outside [0, 1).
    """
    if delay < 0:
        raise ValueError(f"delay = {delay}: must be at least 0")
    if not 0 <= momentum < 1:
        raise ValueError(f"momentum = {momentum}: must be in [0, 1)")

    def value(angle: float) -> complex:
        z = cmath.exp(1j * angle)
        numerator = (1 + momentum) * z - momentum if nesterov else z
        return -(z**delay) * (z - 1) * (z - momentum) / numerator

    found = [value(math.pi).real]
    angles = [math.pi * k / (_GRID * (delay + 1)) for k in range(1, _GRID * (delay + 1))]
    for low, high in itertools.pairwise(angles):
        if value(low).imag < 0 <= value(high).imag or value(high).imag < 0 <= value(low).imag:
            found.append(value(_root(value, low, high)).real)
    return min(bound for bound in found if bound > 0)


def _root(value: Callable[[float], complex], low: float, high: float) -> float:
    """The place between ``low`` and ``high`` at which the imaginary part changes its sign."""
    below = value(low).imag < 0
    for _ in range(60):
        middle = (low + high) / 2
        if (value(middle).imag < 0) == below:
            low = middle
        else:
            high = middle
    return (low + high) / 2
