"""Compares the reduced gradients of all replicas before an update, and makes them equal.

If errors are rare, the majority has the right value, and the run equals the run without the error, bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from ...base.fingerprint import fingerprint, finite
from ...transport.peers import Peers

#: For each local replica and each of its buckets, the tensors that hold its gradient.
Buckets = Sequence[Sequence[Sequence[torch.Tensor]]]


def compare(peers: Peers, buckets: Buckets) -> dict[int, np.ndarray]:
    """Return the fingerprints int64[N] of each bucket whose gradients differ between replicas, by its number."""
    rows = torch.stack([torch.stack([fingerprint(bucket) for bucket in replica]) for replica in buckets])
    columns = enumerate(peers.gather(rows).T)
    return {number: column for number, column in columns if (column != column[0]).any()}


def repair(peers: Peers, buckets: Buckets, differing: Mapping[int, np.ndarray]) -> dict[int, str]:
    """Make the gradients of all replicas equal, in place. Return the action, by the number of the bucket.

    ``differing``: the result of :func:`compare`.

    ``majority``: the lowest replica of the largest class sent its gradient. ``mean``: no class was the largest, and
    each replica has the mean of the finite ones. If none is finite, all have the gradient of replica 0, so that all
    reject the step.
    """
    done = {}
    alone = []
    for bucket, fingerprints in differing.items():
        right = largest_class(fingerprints)
        if right is None:
            alone.append(bucket)
            continue
        for tensors in _parts(buckets, bucket):
            peers.broadcast_(tensors, right).wait()
        done[bucket] = "majority"
    if alone:
        rows = [torch.stack([finite(replica[bucket]) for bucket in alone]) for replica in buckets]
        whole = peers.gather(torch.stack(rows).long()).astype(bool)
        for number, bucket in enumerate(alone):
            for tensors in _parts(buckets, bucket):
                mean_(peers, tensors, whole[:, number])
            done[bucket] = "mean"
    return done


def _parts(buckets: Buckets, bucket: int) -> list[tuple[torch.Tensor, ...]]:
    """Return each tensor of ``bucket``, of all local replicas."""
    return list(zip(*(replica[bucket] for replica in buckets), strict=True))


def mean_(peers: Peers, tensors: Sequence[torch.Tensor], chosen: np.ndarray) -> None:
    """Set ``tensors``, one per local replica, to the mean of the ``chosen`` bool[N] ones; without any, to the first."""
    if not chosen.any():
        peers.broadcast_(tensors, 0).wait()
        return
    for number, tensor in zip(peers.local, tensors, strict=True):
        if not chosen[number]:
            tensor.zero_()  # not multiplied by 0, because 0 x inf is not 0
    peers.sum_(tensors).wait()
    for tensor in tensors:
        tensor.div_(int(chosen.sum()))


# --- classes of replicas with equal fingerprints ---------------------------------------------------------------------


def largest_class(fingerprints: np.ndarray) -> int | None:
    """Return the lowest replica of the largest class of equal ``fingerprints`` [N].

    ``None`` if no two agree, or if another class is as large: then no replica is known to be right.
    """
    _, first, counts = np.unique(fingerprints, return_index=True, return_counts=True)
    largest = counts.max()
    if largest < 2 or (counts == largest).sum() > 1:
        return None
    return int(first[counts.argmax()])


def outside(fingerprints: np.ndarray) -> list[int]:
    """Return the replicas outside the largest class; all, if no class is the largest."""
    right = largest_class(fingerprints)
    if right is None:
        return list(range(len(fingerprints)))
    return np.flatnonzero(fingerprints != fingerprints[right]).tolist()


def majority(fingerprints: np.ndarray, finite: np.ndarray) -> int | None:
    """Return the lowest of more than N/2 replicas that are finite and equal; ``None`` without so many. Both are [N]."""
    kept = np.flatnonzero(finite)
    if not len(kept):
        return None
    _, first, counts = np.unique(fingerprints[kept], return_index=True, return_counts=True)
    return int(kept[first[counts.argmax()]]) if 2 * counts.max() > len(fingerprints) else None
