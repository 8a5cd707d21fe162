"""What a link between sites has time for in a training step: gradients, or a share of the parameters of islands.

Bytes without headers at the full rate of the link, so that times are lower bounds. A link carries as much each way.
"""

from __future__ import annotations

import math

from .averaging import bytes_sent


def gradient_bytes(parameters: float, ranks_per_site: int = 1, weight_bytes: int = 2, grad_bytes: int = 4) -> float:
    """What crosses each way, in an iteration of data parallelism over two sites of ``ranks_per_site`` data-parallel ranks each.

    Each of D ranks sends one piece in 2D of its gradients to each of D owners of the other site, and of its weights likewise:
    D * D / (2D) times gradients and weights.
    """
    return ranks_per_site / 2 * (grad_bytes + weight_bytes) * parameters


def gradient_seconds(crossing: float, rate: float, round_trip: float) -> float:
    """What gradients add to an iteration: two exchanges, of ``crossing`` bytes in all, at ``rate`` bytes per second.

    A round trip comes to that for the two of them, and one for the norm of the gradients.
    """
    return crossing / rate + 2 * round_trip


def least_delay(round_trip: float, step: float) -> int:
    """Iterations until the mean of an exchange can be there, with at least half of a step left for its bytes."""
    return math.ceil(round_trip / step + 0.5 - 1e-9)


def parts(
    parameters: float, rate: float, round_trip: float, step: float, islands: int = 2, item_bytes: int = 2
) -> tuple[int, int]:
    """(n, delay) of islands that exchange one parameter in n in each iteration: the least delay, then the largest share.

    An exchange begins in each step, so that its bytes must fit one step however large the delay; and with the round trip they
    must fit the delay.
    """
    delay = least_delay(round_trip, step)
    time = min(step, delay * step - round_trip)
    return max(1, math.ceil(bytes_sent(1, islands, item_bytes) * parameters / (rate * time) - 1e-9)), delay
