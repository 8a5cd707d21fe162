"""Bytes and times of a link between sites. Bytes are without headers and links run at their full rate, so that times are lower bounds.

A link carries as much each way.
"""

from __future__ import annotations

import math

from ...base.theory import bytes_sent


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

    The least delay leaves half of a step for the bytes. An exchange begins in each step, so that its bytes must fit one
    step however large the delay is. With the round trip they must also fit the delay.
    """
    delay = math.ceil(round_trip / step + 0.5 - 1e-9) + later
    time = min(step, delay * step - round_trip)
    return max(1, math.ceil(bytes_sent(1, islands, item_bytes) * parameters / (rate * time) - 1e-9)), delay
