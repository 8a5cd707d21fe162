"""Memory of islands and virtual stages beside one model in training: computed, not measured.

Notation: M islands, P stages, N virtual workers, K, f and tau the interval, the fraction and the delay of averaging, c
bytes of an element in computing. All numbers are copies of the weights:

- old weights of stages: stage s, from 0, has P - 1 - s versions, so c (P - 1)/2 for equally long ones; on each island,
  or for each worker if parameters are lost, because then every worker has others;
- islands: c M weights beside those in the model, and M - 1 more optimizers;
- averages under way: floor(tau/K) + 1 times f copies in float32 of each island's sent values, and of the mean. There is
  one mean for all islands of a process unless some of it is lost. Their places take 8 bytes each, unless f is 1;
- the moving average of ``ema`` M copies in float32, the outer weights and momentum of DiLoCo 2 M;
- the moves that ``smith`` remembers M copies in float32, and once more as much as was sent, if exchanges overlap.

A rank of an island has one island, and its shard of the optimizer's part of all this.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...config import LossyConfig

_FLOAT32, _PLACE = 4, 8
#: The components that are saved.
BETWEEN = ("averages under way", "correction", "outer optimizer")


def old_weights(lossy: LossyConfig, stages: Sequence[int], compute: int, workers: int) -> float:
    """Bytes of old weights of all virtual stages. ``stages``: the number of weights of each; ``workers``: N."""
    behind = sum(number * weights for number, weights in enumerate(reversed(stages)))
    histories = lossy.islands if lossy.averages else 1
    if workers > histories and not lossy.phase("param").lossless:
        histories = workers
    return histories * behind * compute


def of_islands(lossy: LossyConfig, weights: int, compute: int, optimizer: float) -> dict[str, float]:
    """Bytes by component. ``optimizer``: bytes of one optimizer."""
    if not lossy.averages:
        return {}
    islands = lossy.islands
    copies = islands * weights * compute + (islands - 1) * optimizer
    return {"islands": copies} | between_islands(lossy, weights, islands)


def between_islands(lossy: LossyConfig, elements: float, islands: int) -> dict[str, float]:
    """Bytes by component that ``islands``, those of one process, keep of averages of ``elements`` each."""
    if lossy.sync_method == "none":
        return {}
    sent = lossy.share * (lossy.rounds_under_way + 1) * elements
    means = 1 if lossy.sync_lossless else islands
    found = {"averages under way": sent * ((islands + means) * _FLOAT32 + (_PLACE if lossy.sync_fraction < 1 else 0))}
    kept = 2 if lossy.has_outer_optimizer else 0
    if lossy.sync_method == "parameters" and lossy.delay_correction == "ema":
        kept = 1
    if lossy.sync_method == "parameters" and lossy.delay_correction == "smith" and lossy.may_overlap:
        kept = 1
        found["averages under way"] += sent * islands * _FLOAT32
    if kept:
        found["correction" if kept == 1 else "outer optimizer"] = kept * islands * elements * _FLOAT32
    return found
