"""Sparse, late averaging of M islands (*AsyncMesh*), and what a link between sites has time for: closed forms. NumPy only.

See :mod:`megatron_lossy.base.theory` for f, n, K, tau, q and g.
"""

from __future__ import annotations

import math

import numpy as np

from ...base.theory import bytes_sent


def growth(gain: float, overlap: int) -> float:
    """Return the long-run factor on a deviation per visit: the largest root of z^(q+1) - z^q + g."""
    polynomial = np.zeros(overlap + 2)
    polynomial[0] = 1.0
    polynomial[1] -= 1.0
    polynomial[-1] += gain
    return float(np.abs(np.roots(polynomial)).max())


def speed_uncorrected(fraction: float, interval: int, delay: int, drawn: bool) -> float:
    """Return the share of a constant drift that remains without correction, ``--delay-correction none``.

    A visit throws away the last tau steps. With fixed gaps of n K iterations the share is 1 - tau / (n K), for q = 0.
    With geometric gaps (``drawn``) visits may overlap, and the share is 1 / (1 + f tau / K): the steps within tau after
    the first of two visits are lost. ``ema`` and ``mixing`` keep all of the drift.
    """
    if drawn:
        return 1 / (1 + fraction * delay / interval)
    cycle = math.ceil(1 / fraction - 1e-9) * interval
    if delay >= cycle:
        raise ValueError(f"delay = {delay}: must be below the {cycle} iterations between two exchanges of an element")
    return 1 - delay / cycle


def deviation_predicted(fraction: float, interval: int, delay: int, drawn: bool) -> float:
    """Return the remaining squared distance of an island to the mean, after each iteration, with ``smith`` and no loss.

    The unit is the squared deviation that white local steps make in one iteration. A mean removes all of the deviation
    at the time when it was sent, and leaves the rest: tau iterations, and those since the exchange began that was used
    last. The second part is (n K - 1)/2 on average with fixed gaps, and (1/f - 1) K + (K - 1)/2 if elements are drawn.
    No rule has the last tau.
    """
    if drawn:
        return delay + (1 / fraction - 1) * interval + (interval - 1) / 2
    return delay + (math.ceil(1 / fraction - 1e-9) * interval - 1) / 2


def removed(loss: float, islands: int) -> float:
    """Return the share of the squared deviation that one exchange with ``loss`` removes; 1 - loss for large M.

    For M deviations with variance 1, an owner averages s (its own always there) and g islands get the mean, s - 1 and g
    - 1 binomial(M - 1, 1 - loss). Squares then add up to g/s + M - g, and the square of the sum is g^2/s + M - g + 2 g
    (s - 1)/s (M - g)/(M - 1), since an average island outside of g is in s with (s - 1)/(M - 1).
    """
    others = islands - 1
    counts = np.arange(others + 1)
    chance = (
        np.array([math.comb(others, k) for k in counts], dtype=float) * (1 - loss) ** counts * loss ** (others - counts)
    )
    s, g = np.meshgrid(counts + 1.0, counts + 1.0, indexing="ij")
    outside = islands - g
    squares = g / s + outside
    of_sum = g**2 / s + outside + 2 * g * (s - 1) / s * outside / others
    left = float((np.outer(chance, chance) * (squares - of_sum / islands)).sum())
    return 1 - left / others


# --- what a link between sites has time for --------------------------------------------------------------------------
# Bytes are without headers and links run at their full rate, so that times are lower bounds. A link carries as much each way.


def gradient_bytes(
    parameters: float, ranks_per_site: int = 1, weight_bytes: float = 2, grad_bytes: float = 4, sites: int = 2
) -> float:
    """Return the bytes out of a site per iteration of data parallelism over ``sites`` of ``ranks_per_site`` ranks.

    Each of D ranks sends one piece in M D of its gradients to each of (M - 1) D owners at other sites, and of its weights
    likewise: D (M - 1) / M times gradients and weights. As much comes in.
    """
    return ranks_per_site * (sites - 1) / sites * (grad_bytes + weight_bytes) * parameters


def site_bytes(elements: float, sites: int, item_bytes: float = 4, copies: int = 1) -> float:
    """Return the bytes each way per iteration and site of ``elements`` of gradients, or of weights, with ``--sites``.

    The shards of other sites go out, as sums of a site, and its own come in, whatever the ranks of a site. ``item_bytes``:
    of an element as it crosses.
    """
    return (sites - 1) / sites * elements * item_bytes * copies


def gradient_seconds(crossing: float, rate: float, round_trip: float) -> float:
    """Return the seconds that gradients add to an iteration: ``crossing`` bytes, in two exchanges, at ``rate`` bytes/s.

    Two round trips come to that: one for the two exchanges, and one for the norm of the gradients.
    """
    return crossing / rate + 2 * round_trip


def least_delay(round_trip: float, step: float) -> int:
    """Return iterations until the mean of an exchange can be there, with at least half of a step left for its bytes."""
    return math.ceil(round_trip / step + 0.5 - 1e-9)


def parts(
    parameters: float,
    rate: float,
    round_trip: float,
    step: float,
    islands: int = 2,
    item_bytes: float = 2,
    later: int = 0,
) -> tuple[int, int]:
    """Return (n, delay) of islands that exchange one parameter in n in each iteration: the least delay, and ``later``
    iterations more, then the largest share.

    An exchange begins in each step, so that its bytes must fit one step however large the delay is. With the round trip
    they must also fit the delay.
    """
    delay = least_delay(round_trip, step) + later
    time = min(step, delay * step - round_trip)
    return max(1, math.ceil(bytes_sent(1, islands, item_bytes) * parameters / (rate * time) - 1e-9)), delay
