"""Rounding as loss: what gradients that cross in codes cost (docs/theory.md). NumPy only.

omega = E |Q(x) - x|^2 / |x|^2 is the relative error of a code Q.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike


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
