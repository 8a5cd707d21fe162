"""Rounding as loss: what gradients that cross in codes cost (docs/theory.md). NumPy only.

omega = E |Q(x) - x|^2 / |x|^2 is the relative error of a code Q. Errors of different senders are independent, with mean 0,
and the owner's own gradient is exact. S^2 is the variance between workers, as an estimate from N of them has it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from .ages import rate_array
from .recovery import survivors


def rounding_error(kappa_squared: ArrayLike, bits: int, nearest: bool = False) -> np.ndarray:
    """omega of codes of ``bits`` in blocks whose largest element is kappa times their root mean square.

    A value between two multiples of s, a share f of the way, has the variance s^2 f (1 - f), on average s^2 / 6; to
    nearest s^2 / 12. s is kappa / L of the root mean square, with L = 2^(bits-1) - 1.
    """
    most = 2 ** (bits - 1) - 1
    return np.asarray(kappa_squared, dtype=np.float64) / ((12 if nearest else 6) * most**2)


def as_loss(omega: ArrayLike) -> np.ndarray:
    """The loss rate that costs what a relative error of ``omega`` costs: (p + omega) / (1 - p) of S^2 / N is lost."""
    omega = np.asarray(omega, dtype=np.float64)
    return omega / (1 + omega)


def mean_error(p: ArrayLike, workers: int, omega: ArrayLike, spread: ArrayLike, square: ArrayLike) -> np.ndarray:
    """``renormalize``: E |estimate - mean of all gradients|^2 with losses of rate ``p`` and codes of error ``omega``.

    ``spread``: S^2. ``square``: E |g|^2 of a gradient. K gradients without replacement have the variance
    S^2 (1/K - 1/N); K - 1 of them bear an error of omega |g|^2 each, over K^2.
    """
    chance, count = survivors(rate_array(p), workers)[..., 1:], np.arange(1, workers + 1)
    few = (chance / count).sum(axis=-1) - 1 / workers
    coded = (chance * (count - 1) / count**2).sum(axis=-1)
    return few * np.asarray(spread) + coded * np.asarray(omega) * np.asarray(square)
