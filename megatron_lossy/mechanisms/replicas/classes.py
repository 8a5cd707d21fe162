"""Classes of replicas with equal fingerprints. NumPy only."""

from __future__ import annotations

import numpy as np


def all_equal(fingerprints: np.ndarray) -> bool:
    """Whether the ``fingerprints`` [N] are equal."""
    return bool((fingerprints == fingerprints[0]).all())


def largest_class(fingerprints: np.ndarray) -> int | None:
    """The lowest replica of the largest class of equal ``fingerprints`` [N].

    ``None`` if no two agree, or if another class is as large: then no replica is known to be right.
    """
    _, first, counts = np.unique(fingerprints, return_index=True, return_counts=True)
    largest = counts.max()
    if largest < 2 or (counts == largest).sum() > 1:
        return None
    return int(first[counts.argmax()])


def majority(fingerprints: np.ndarray, finite: np.ndarray) -> int | None:
    """The lowest of more than N/2 replicas that are finite and equal; ``None`` without so many. Both are [N]."""
    kept = np.flatnonzero(finite)
    if not len(kept):
        return None
    _, first, counts = np.unique(fingerprints[kept], return_index=True, return_counts=True)
    return int(kept[first[counts.argmax()]]) if 2 * counts.max() > len(fingerprints) else None
