"""The traffic that a link between sites can carry in a training step: gradients, or a share of islands' parameters.

Bytes are without headers and links run at their full rate, so that times are lower bounds. A link carries as much each
way.
"""

from __future__ import annotations

import math

from .averaging import bytes_sent


def gradient_bytes(parameters: float, ranks_per_site: int = 1, weight_bytes: int = 2, grad_bytes: int = 4) -> float:
    """Bytes each way per iteration of data parallelism over two sites of ``ranks_per_site`` data-parallel ranks each.

    Each of D ranks sends one piece in 2D of its gradients to each of D owners at the other site, and of its weights
    likewise: D * D / (2D) times gradients and weights.
    """
    return ranks_per_site / 2 * (grad_bytes + weight_bytes) * parameters


def gradient_seconds(crossing: float, rate: float, round_trip: float) -> float:
    """Seconds that gradients add to an iteration: ``crossing`` bytes, in two exchanges, at ``rate`` bytes per second.

    Two round trips come to that: one for the two exchanges, and one for the norm of the gradients.
    """
    return crossing / rate + 2 * round_trip


def least_delay(round_trip: float, step: float) -> int:
    """Iterations until the mean of an exchange can be there, with at least half of a step left for its bytes."""
    return math.ceil(round_trip / step + 0.5 - 1e-9)


def parts(
    parameters: float, rate: float, round_trip: float, step: float, islands: int = 2, item_bytes: int = 2
) -> tuple[int, int]:
    """(n, delay) of islands that exchange one parameter in n in each iteration: the least delay, then the largest
    share.

    An exchange begins in each step, so that its bytes must fit one step however large the delay is. With the round trip
    they must also fit the delay.
    """
    delay = least_delay(round_trip, step)
    time = min(step, delay * step - round_trip)
    return max(1, math.ceil(bytes_sent(1, islands, item_bytes) * parameters / (rate * time) - 1e-9)), delay
