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

        Return [N, L] float32: what each owner's optimizer gets. ``counted``: the step did not overflow.
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


# --- codes in blocks -------------------------------------------------------------------------------------------------


def hashed_uniforms(key, first, count):
    """float64[count]: u of ``count`` elements from number ``first`` on, of the key of two 32-bit words."""
    result, word = [], 2**32 - 1
    for element in range(first, first + count):
        h = ((element // 2) * 0x9E3779B1 & word) ^ key[0]
        h ^= h >> 16
        h = (h * 0x85EBCA6B + key[1]) & word
        h ^= h >> 13
        h = h * 0xC2B2AE35 & word
        h ^= h >> 16
        result.append((h >> 16 if element % 2 else h & 0xFFFF) / 65536)
    return np.array(result)


def block_scale(block, most):
    """float32: max |x| / ``most`` as bfloat16, rounded up; 0 for zeros, NaN where a value is not finite."""
    if not np.isfinite(block).all():
        return np.float32(np.nan)
    largest = np.abs(block).max()
    if not largest:
        return np.float32(0)
    scale = max(np.float32(largest) / np.float32(most), np.float32(2.0**-126))
    mantissa, exponent = math.frexp(float(scale))  # bfloat16 has 8 bits of mantissa
    return np.float32(math.ldexp(math.ceil(mantissa * 256), exponent - 8))


def block_payload(unit, bits, block, u=None):
    """The bytes of one ``unit`` float32[n]: scales, then codes. ``u``: of its elements; ``None``: to nearest."""
    most = 2 ** (bits - 1) - 1
    scales, codes = [], []
    for first in range(0, len(unit), block):
        values = unit[first : first + block]
        scale = block_scale(values, most)
        scales.append(scale)
        for place, value in enumerate(values, first):
            if not scale > 0:
                codes.append(0)
                continue
            quotient = np.float32(value) / scale
            codes.append(
                round(float(quotient)) if u is None else math.floor(np.float32(quotient + np.float32(u[place])))
            )
    head = b"".join((int(scale.view(np.uint32)) >> 16).to_bytes(2, "little") for scale in map(np.float32, scales))
    if bits == 8:
        return head + bytes(code & 255 for code in codes)
    codes += [0] * (len(codes) % 2)
    return head + bytes(codes[k] & 15 | (codes[k + 1] & 15) << 4 for k in range(0, len(codes), 2))


def block_values(payload, elements, bits, block):
    """float32[elements] of the bytes of one unit. Values above the largest float32 become that."""
    count = -(-elements // block)
    scales = np.frombuffer(payload[: 2 * count], "<u2").astype(np.uint32) << 16
    rest, codes = payload[2 * count :], []
    for k in range(elements):
        code = rest[k] if bits == 8 else rest[k // 2] >> 4 * (k % 2) & 15
        codes.append(code - 2**bits if code >= 2 ** (bits - 1) else code)
    values = [np.float32(code) * scales.view(np.float32)[k // block] for k, code in enumerate(codes)]
    return np.clip(np.array(values, np.float32), *np.array([-1, 1], np.float32) * np.finfo(np.float32).max)
