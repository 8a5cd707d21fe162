"""Memory of islands beside one model in training: computed, not measured.

Notation: M islands, K, f and tau the interval, the fraction and the delay of averaging, c bytes of an element in
computing. All numbers are copies of the weights:

- virtual islands: c M weights beside those in the model, and M - 1 more optimizers;
- averages under way: floor(tau/K) + 1 times f copies in float32 of each island's sent values, and of the mean. There is
  one mean for all islands of a process unless some of it is lost. Their places take 8 bytes each, unless f is 1;
- what codes take from means (``int8``) M copies in float32;
- islands that come and go: M copies of 2 bytes, how often a mean has set each element;
- the moving average of ``ema`` M copies in float32, the outer weights and momentum of DiLoCo 2 M;
- the moves that ``smith`` remembers M copies in float32, and once more as much as was sent, if exchanges overlap.

A rank of an island has one island, and its shard of the optimizer's part of all this.
"""

from __future__ import annotations

from ...config import LossyConfig
from ...lab.launch.memory import STATE, Held, Kept

_FLOAT32, _PLACE, _VISITS = 4, 8, 2


def kept(config: LossyConfig, held: Held) -> list[Kept]:
    """The components that a device keeps beside one model and optimizer, or beside its shard of that."""
    if not config.averages:
        return []
    if not held.virtual_workers:
        return _between(config, held.weights / held.shards, islands=1, saved=config.save_replicas)
    islands = config.islands
    copies = islands * held.weights * held.compute + (islands - 1) * held.optimizer
    return [Kept("islands", copies), *_between(config, held.weights, islands, saved=True)]


def more_saved(config: LossyConfig, weights: int, compute: int, virtual: bool) -> float:
    """Bytes of a checkpoint: the states of the other islands, once more that of the first virtual one, and the mean."""
    more = config.islands - 1 + virtual if config.averages else 0
    return weights * (compute + STATE) * more + (weights * compute if config.save_consensus else 0)


def _between(config: LossyConfig, elements: float, islands: int, saved: bool) -> list[Kept]:
    """The components that ``islands``, those of one process, keep of averages of ``elements`` each."""
    if config.sync_method == "none":
        return []
    sent = config.share * (config.rounds_under_way + 1) * elements
    means = 1 if config.sync_lossless else islands
    under_way = sent * ((islands + means) * _FLOAT32 + (_PLACE if config.sync_fraction < 1 else 0))
    copies = 2 if config.has_outer_optimizer else 0
    if config.sync_method == "parameters" and config.correction == "ema":
        copies = 1
    if config.sync_method == "parameters" and config.correction == "smith" and config.may_overlap:
        copies = 1
        under_way += sent * islands * _FLOAT32
    found = [Kept("averages under way", under_way, saved)]
    if config.island_schedule is not None:
        found.append(Kept("visits of means", islands * elements * _VISITS, saved))
    if config.sync_bits:
        found.append(Kept("rests of rounded means", islands * elements * _FLOAT32, saved))
    if copies:
        name = "correction" if copies == 1 else "outer optimizer"
        found.append(Kept(name, copies * islands * elements * _FLOAT32, saved))
    return found
