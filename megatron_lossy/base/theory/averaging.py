"""Sparse, late averaging of M islands (*AsyncMesh*, sections 2.3 and 3): closed forms. NumPy only.

An element is exchanged once in n rounds of K iterations (``cyclic``, ``partition``), or with probability f in each
(``bernoulli``), and the mean is used tau iterations later. q = floor(tau / (n K)) later exchanges of the element are
then under way. The correction of the delay is a feedback of gain g (alpha of ``mixing``, lambda of ``ema``). Per visit
the deviation of an island from the mean follows x(k+1) = x(k) - g x(k-q), if an element's gaps are equal.
"""

from __future__ import annotations

import math

import numpy as np


def stability_bound(overlap: int) -> float:
    """The gain below which deviations die out: 2 sin(pi / (2 (2q + 1))), with ``overlap`` q: 2, 1, 0.618, 0.445, ...

    x(k+1) = x(k) - g x(k-q) leaves the unit circle at z = exp(i a) with z^q (z - 1) = -g: |z - 1| = 2 sin(a/2) = g and
    q a + (pi + a)/2 = pi, so a = pi / (2q + 1) (Levin and May, 1976). The proof of the paper's theorem 4 takes the
    noise since the exchange began as independent of the deviation at that time, and so finds every gain below 2 stable.
    """
    if overlap < 0:
        raise ValueError(f"overlap = {overlap}: must be at least 0")
    return 2 * math.sin(math.pi / (2 * (2 * overlap + 1)))


def critical_gain(overlap: int) -> float:
    """The largest gain without oscillation, q^q / (q + 1)^(q + 1): 1, 1/4, 4/27, ...; near it deviations die out
    fastest.

    z^(q+1) - z^q + g = 0 has its double real root at z = q / (q + 1), and this is g at that root.
    """
    if overlap < 0:
        raise ValueError(f"overlap = {overlap}: must be at least 0")
    return overlap**overlap / (overlap + 1) ** (overlap + 1)


def stability_bound_drawn(fraction: float, delay: int) -> float:
    """The same bound for ``bernoulli``, for the mean square of deviations.

    ``delay``: floor(tau/K), exchanges of any elements. x(t+1) = x(t) - g b x(t-tau) per exchange, with b = 1 with
    probability f. b is independent of x(t-tau), so that this is the mean's recursion x(t+1) = x(t) - g f x(t-tau) with
    noise of variance g^2 f (1-f) E x(t-tau)^2. The squared impulse response of that recursion adds up to (1 + sin c)/(2
    sin a cos c) with 2 sin(a/2) = g f and c = a (tau + 1/2): autocovariances follow r(k) = r(k-1) - g f r(tau+1-k),
    which cos(ak) and sin(ak) solve. Noise dies out if it begets less than itself: tan(a/2) tan(pi/4 + c/2) < f/(1-f).
    With f = 1 this is the bound of fixed gaps; without delay it is 2.
    """
    _check_drawn(fraction, delay)
    low, high = 0.0, math.pi / (2 * delay + 1)  # c is pi/2 at ``high``; beyond it the mean diverges
    for _ in range(60):
        a = (low + high) / 2
        begets = (1 - fraction) * math.tan(a / 2) * math.tan(math.pi / 4 + a * (delay + 0.5) / 2)
        low, high = (a, high) if begets < fraction else (low, a)
    return 2 * math.sin(low / 2) / fraction


def critical_gain_drawn(fraction: float, delay: int) -> float:
    """:func:`critical_gain` for the mean with ``bernoulli``, at most 1. ``delay``: as for its stability bound."""
    _check_drawn(fraction, delay)
    return min(1.0, critical_gain(delay) / fraction)


def _check_drawn(fraction: float, delay: int) -> None:
    if not 0 < fraction <= 1 or delay < 0:
        raise ValueError(f"fraction = {fraction}, delay = {delay}: must be in (0, 1], and at least 0")


def growth(gain: float, overlap: int) -> float:
    """The long-run factor on a deviation per visit: the largest root of z^(q+1) - z^q + g."""
    polynomial = np.zeros(overlap + 2)
    polynomial[0] = 1.0
    polynomial[1] -= 1.0
    polynomial[-1] += gain
    return float(np.abs(np.roots(polynomial)).max())


def contraction(gain: float) -> float:
    """The factor on a deviation per n rounds with q = 0 and no noise: 1 - g; 0 with gain 1."""
    return 1 - gain


def contraction_drawn(fraction: float) -> float:
    """The factor on the expected squared deviation per round, ``bernoulli``, tau = 0 (lemma 1): 1 - f."""
    return 1 - fraction


def speed_uncorrected(fraction: float, interval: int, delay: int, drawn: bool) -> float:
    """The share of a constant drift that remains without correction, ``--delay-correction none``.

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


def deviation(fraction: float, variance: float, islands: int, before: bool = False) -> float:
    """E of the squared distance of an island to the mean, per element: ``bernoulli``, K = 1, tau = 0, white local
    steps.

    Every step adds ``variance`` (1 - 1/M), and every round keeps 1 - f of all. The result is (1 - f)/f of a step's
    addition after a round, and 1/f ``before`` it.
    """
    return (1.0 if before else 1 - fraction) / fraction * variance * (1 - 1 / islands)


def deviation_predicted(fraction: float, interval: int, delay: int, drawn: bool) -> float:
    """The remaining squared distance of an island to the mean, after each iteration, with ``smith`` and no loss.

    The unit is the squared deviation that white local steps make in one iteration. A mean removes all of the deviation
    at the time when it was sent, and leaves the rest: tau iterations, and those since the exchange began that was used
    last. The second part is (n K - 1)/2 on average with fixed gaps, and (1/f - 1) K + (K - 1)/2 if elements are drawn.
    No rule can know the last tau.
    """
    if drawn:
        return delay + (1 / fraction - 1) * interval + (interval - 1) / 2
    return delay + (math.ceil(1 / fraction - 1e-9) * interval - 1) / 2


def removed(loss: float, islands: int) -> float:
    """The share of the squared deviation that one exchange with ``loss`` in both halves removes; 1 - loss for large M.

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


def speed_held_back(away: float) -> float:
    """The share of a constant drift that the mean keeps if islands that stopped send at once when they return: 1 - a.

    ``away``, a: the share of island-iterations that are not made. Means move weight from island to island and lose
    none, so that the mean over islands, those away included, moves by the local steps alone, of which a are not made.
    An island that is away takes its weights out of the mean and brings them back: spells of any length cost the same.
    If islands that return begin with weights of the others the share is 1.
    """
    if not 0 <= away < 1:
        raise ValueError(f"away = {away}: must be in [0, 1)")
    return 1 - away


def bytes_sent(elements: int, islands: int, itemsize: float = 4, receivers: int | None = None) -> float:
    """The bytes that an island sends in one exchange of ``elements``, to owners and back, without its own part.

    ``receivers``: of means, if some of these send nothing; default ``islands``.
    """
    others = (islands - 1) + ((receivers or islands) - 1)
    return others / islands * elements * itemsize


# --- what a link between sites has time for --------------------------------------------------------------------------
# Bytes are without headers and links run at their full rate, so that times are lower bounds. A link carries as much each way.


def gradient_bytes(parameters: float, ranks_per_site: int = 1, weight_bytes: int = 2, grad_bytes: int = 4) -> float:
    """Bytes each way per iteration of data parallelism over two sites of ``ranks_per_site`` data-parallel ranks each.

    Each of D ranks sends one piece in 2D of its gradients to each of D owners at the other site, and of its weights
    likewise: D * D / (2D) times gradients and weights.
    """
    return ranks_per_site / 2 * (grad_bytes + weight_bytes) * parameters


def site_bytes(elements: float, sites: int, item_bytes: float = 4, copies: int = 1) -> float:
    """Bytes each way per iteration and site that ``elements`` of gradients, or of weights, take with ``--sites``.

    The shards of other sites go out, as sums of a site, and its own come in, whatever the ranks of a site. ``item_bytes``:
    of an element as it crosses.
    """
    return (sites - 1) / sites * elements * item_bytes * copies


def gradient_seconds(crossing: float, rate: float, round_trip: float) -> float:
    """Seconds that gradients add to an iteration: ``crossing`` bytes, in two exchanges, at ``rate`` bytes per second.

    Two round trips come to that: one for the two exchanges, and one for the norm of the gradients.
    """
    return crossing / rate + 2 * round_trip


def least_delay(round_trip: float, step: float) -> int:
    """Iterations until the mean of an exchange can be there, with at least half of a step left for its bytes."""
    return math.ceil(round_trip / step + 0.5 - 1e-9)


def parts(
    parameters: float, rate: float, round_trip: float, step: float, islands: int = 2, item_bytes: float = 2
) -> tuple[int, int]:
    """(n, delay) of islands that exchange one parameter in n in each iteration: the least delay, then the largest
    share.

    An exchange begins in each step, so that its bytes must fit one step however large the delay is. With the round trip
    they must also fit the delay.
    """
    delay = least_delay(round_trip, step)
    time = min(step, delay * step - round_trip)
    return max(1, math.ceil(bytes_sent(1, islands, item_bytes) * parameters / (rate * time) - 1e-9)), delay
