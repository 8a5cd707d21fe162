"""An independent reference of a lossy data-parallel step, in plain NumPy and loops.

It shares no code with the package: it is given the deliveries, and computes what the semantics (docs/semantics.md)
say every worker must hold. Shapes: N workers; a bucket has N shards of L elements; ``pieces`` cuts a shard into units.
"""

import math
from fractions import Fraction

import numpy as np


def pieces(shard, elements):
    """Slices of a shard of ``shard`` elements in units of ``elements``; the last may be shorter."""
    return [slice(a, min(a + elements, shard)) for a in range(0, shard, elements)]


class ReferenceReduce:
    """One bucket's gradient exchange for all workers, with the memory that ``previous`` and ``error-feedback`` need.

    ``priority``: the share of a sender's packets that are delivered anyway, those of the largest mean of |values|.
    """

    def __init__(self, rule, size, shard, elements, priority=0.0):
        self.rule, self.size, self.shard, self.priority = rule, size, shard, priority
        self.units = pieces(shard, elements)
        self.last = np.zeros((size, size, shard), dtype=np.float64)  # [source, owner, L] last received
        self.residual = np.zeros((size, size, shard), dtype=np.float32)  # [source, owner, L] lost and not yet sent

    def _high(self, grads):
        """bool[N, N, units] (source, owner, unit): the largest share of what each source sends to others."""
        high = np.zeros((self.size, self.size, len(self.units)), dtype=bool)
        for source in range(self.size):
            ranked = sorted(
                (-float(np.abs(grads[source, owner, piece].astype(np.float64)).mean()), owner, u)
                for owner in range(self.size) if owner != source
                for u, piece in enumerate(self.units)
            )  # fmt: skip
            for _, owner, u in ranked[: int(self.priority * len(ranked) + 0.5)]:
                high[source, owner, u] = True
        return high

    def __call__(self, grads, arrived, counted=True):
        """``grads`` [N, N, L] float32 (worker, shard); ``arrived`` bool [N, N, units] (source, owner, unit).

        Returns [N, L] float32: what each owner's optimizer gets. ``counted``: the step did not overflow.
        """
        n = self.size
        if self.rule == "error-feedback":
            grads = grads + self.residual
        if self.priority:
            arrived = arrived | self._high(grads)
        kept = np.zeros_like(self.residual)
        result = np.zeros((n, self.shard), dtype=np.float32)
        received = self.last.copy()
        for owner in range(n):
            for u, piece in enumerate(self.units):
                here = [i for i in range(n) if arrived[i, owner, u]]
                got = {i: grads[i, owner, piece] for i in here}
                for i in here:
                    received[i, owner, piece] = got[i]
                for i in set(range(n)) - set(here):
                    kept[i, owner, piece] = grads[i, owner, piece]
                zero = np.zeros(piece.stop - piece.start, dtype=np.float32)
                if self.rule == "renormalize":
                    total = sum(got.values(), zero)
                    value = total * np.float32(n / len(here)) / np.float32(n) if here else zero
                elif self.rule in ("zero", "error-feedback"):
                    value = sum(got.values(), zero) / np.float32(n)
                elif self.rule == "previous":
                    value = sum((received[i, owner, piece].astype(np.float32) for i in range(n)), zero) / np.float32(n)
                elif self.rule == "renormalize-remote":
                    remote = sum((got[i] for i in here if i != owner), zero)
                    others = len(here) - 1
                    own = got[owner]
                    if n == 1 or others == 0:
                        value = own
                    else:
                        value = (own + remote * np.float32((n - 1) / others)) / np.float32(n)
                result[owner, piece] = value
        if counted:
            self.last, self.residual = received, kept
        return result


def reference_gather(replicas, owners, arrived, units):
    """New replicas [N, N, L] from the old ones, the owners' shards [N, L], ``arrived`` [source, destination, unit]."""
    new = replicas.copy()
    for i in range(len(owners)):
        for j in range(len(owners)):
            for u, piece in enumerate(units):
                if i == j or arrived[j, i, u]:
                    new[i, j, piece] = owners[j, piece]
    return new


def mean_among(vectors, reduced, gathered, elements):
    """The mean among those present, element by element: by receiver its values, NaN where it gets none.

    ``vectors``: {slot: [k]} of the senders, who own the means in order of slots. ``reduced``, ``gathered``: functions of
    (receiver, source, unit) that say what arrives. ``elements``: of a unit. ``gathered.receivers``: who gets means.
    """
    senders = sorted(vectors)
    count = len(vectors[senders[0]])
    shard = -(-count // len(senders))
    values = {slot: np.full(count, np.nan) for slot in gathered.receivers}
    for place in range(count):
        owner, unit = senders[place // shard], place % shard // elements
        came = [float(vectors[slot][place]) for slot in senders if reduced(owner, slot, unit)]
        for slot in gathered.receivers:
            if came and gathered(slot, owner, unit):
                values[slot][place] = sum(came) / len(came)
    return values


class ReferenceAdamW:
    """AdamW (Loshchilov and Hutter, 2019, algorithm 2) on one shard, in float32."""

    def __init__(self, weights, lr, betas, eps, decay):
        self.weights = weights.astype(np.float32).copy()
        self.m = np.zeros_like(self.weights)
        self.v = np.zeros_like(self.weights)
        self.lr, self.betas, self.eps, self.decay, self.t = lr, betas, eps, decay, 0

    def step(self, grad):
        """Apply one update."""
        b1, b2 = self.betas
        self.t += 1
        self.weights *= np.float32(1 - self.lr * self.decay)
        self.m += np.float32(1 - b1) * (grad - self.m)
        self.v = np.float32(b2) * self.v + np.float32(1 - b2) * grad * grad
        denominator = np.sqrt(self.v) / np.float32(np.sqrt(1 - b2**self.t)) + np.float32(self.eps)
        self.weights -= np.float32(self.lr / (1 - b1**self.t)) * self.m / denominator


# --- stage boundaries ------------------------------------------------------------------------------------------------


def _parities(packets, block, parity):
    """The parities of each block of a message."""
    result = []
    for first in range(0, packets, block):
        length = min(block, packets - first)
        result.append(parity if length == block else max(1, math.ceil(Fraction(parity * length, block))))
    return result


def boundary_units(packets, block, parity):
    """Packets of data and of parity of a message."""
    return packets + sum(_parities(packets, block, parity))


def boundary_residual(packets, block, parity, lost):
    """bool[packets]: what stays lost. ``lost`` bool[units]: of data, then of parity."""
    residual = lost[:packets].copy()
    number = packets
    for index, count in enumerate(_parities(packets, block, parity)):
        places = range(index * block, min((index + 1) * block, packets))
        for group in range(count):
            members = list(places)[group::count]
            if lost[members].sum() + lost[number] <= 1:
                residual[members] = False
            number += 1
    return residual


def residual_rate(p, size):
    """Share of data packets that stay lost of independent losses with rate ``p``, in groups of ``size`` and a parity.

    A lost packet stays so unless all the ``size`` others are there: p (1 - (1-p)^size).
    """
    return -np.asarray(p, np.float64) * np.expm1(size * np.log1p(-np.asarray(p, np.float64)))
