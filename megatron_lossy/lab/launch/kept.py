"""Memory that mechanisms keep on a device besides one model in training: computed, not measured.

Notation: M islands, K, f and tau the interval, the fraction and the delay of averaging, c bytes of an element in
computing. All numbers are copies of the weights:

- virtual islands: c M weights besides those in the model, and M - 1 more optimizers;
- averages under way: floor(tau/K) + 1 times f copies in float32 of each island's sent values, and of the mean. There is
  one mean for all islands of a process unless some of it is lost. Their places take 8 bytes each, unless f is 1;
- rests of codes of means (``int8``) M copies in float32;
- islands that come and go: M copies of 2 bytes, which count how often a mean has set each element;
- the moving average of ``ema`` M copies in float32, the outer weights and momentum of DiLoCo 2 M;
- the moves that ``smith`` remembers M copies in float32, and once more as much as was sent, if exchanges overlap.

A rank of an island has one island, and its shard of the optimizer's part of all this.

An asynchronous pipeline is P - 1 - i whole batches ahead on stage i of P, from 0. It keeps their activations. Besides
the weights of the forward pass it keeps those of each such batch. Virtual stages share a device: stage i has P - 1 - i
versions, so (P - 1)/2 copies of the model if stages are equally long; in each job, or for each worker if parameters are
lost, because then every worker has others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ...config import LossyConfig

#: Bytes of a parameter in a checkpoint besides the weight itself: its copy in fp32 and two moments.
STATE = 12.0
_FLOAT32, _PLACE, _VISITS = 4, 8, 2


@dataclass(frozen=True)
class Held:
    """The memory of a device of a pipeline stage without mechanisms."""

    stage: int
    #: Weights on the device, bytes of one in computing, and bytes of one optimizer.
    weights: int
    compute: int
    optimizer: float
    #: Ranks that shard the optimizer.
    shards: int
    #: Shares of a buffer that one exchange may lose, by phase.
    lost: Mapping[str, float]
    virtual_workers: int | None
    #: Weights of each stage, if there are that many; and the number of real ones.
    cut: Callable[[int], list[int]]
    stages: int


@dataclass(frozen=True)
class Kept:
    """A component of the memory of a device. ``saved``: a checkpoint has it, too."""

    name: str
    bytes: float
    saved: bool = False


def kept_by(config: LossyConfig, held: Held) -> list[Kept]:
    """Return the components that mechanisms keep on a device which has ``held``."""
    found = [*_of_islands(config, held), *_of_stages(config, held)]
    shard = held.weights / held.shards
    if held.lost["param"] and not config.sends_weights():
        own = held.compute if held.compute < _FLOAT32 else 0  # a copy of the own shard in fewer bytes
        found.append(Kept("lead", shard * (2 * _FLOAT32 + own)))
    if held.shards > 1 and config.wire_bits:
        seen = held.weights * config.members(held.shards) / held.shards  # by a rank of a site
        found.append(Kept("codes, sent and arrived", 2 * seen * sum(config.wire_bits.values()) / 8))
    return found


def saved_of_islands(config: LossyConfig, weights: int, compute: int, virtual: bool) -> float:
    """Return the bytes of a checkpoint besides the model and optimizer of ``weights``.

    They are the states of the other islands, once more that of the first virtual one, and the mean. ``compute``: bytes
    of a weight in the model. ``virtual``: all workers are in one process.
    """
    more = config.islands - 1 + virtual if config.averages else 0
    return weights * (compute + STATE) * more + (weights * compute if config.save_consensus else 0)


def _of_islands(config: LossyConfig, held: Held) -> list[Kept]:
    if not config.averages:
        return []
    if not held.virtual_workers:
        return _between(config, held.weights / held.shards, islands=1, saved=config.save_replicas)
    islands = config.islands
    copies = islands * held.weights * held.compute + (islands - 1) * held.optimizer
    return [Kept("islands", copies), *_between(config, held.weights, islands, saved=True)]


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


def _of_stages(config: LossyConfig, held: Held) -> list[Kept]:
    """Return the weights that a device keeps for backward passes to come."""
    if not config.async_pipeline:
        return []
    stages = config.virtual_stages or held.stages
    sizes = held.cut(stages)
    if held.virtual_workers:
        old = old_weights(config, sizes, held.compute, held.virtual_workers)
    else:
        versions = (
            stages - held.stage if held.stage < stages - 1 else 0
        )  # with the newest: backward passes see an older one
        old = float(versions * sizes[held.stage] * held.compute)
    return [Kept("old weights", old, config.save_replicas)] if old else []


def old_weights(config: LossyConfig, stages: Sequence[int], compute: int, workers: int) -> float:
    """Return the bytes of old weights of all virtual stages. ``stages``: the number of weights of each; ``workers``: N."""
    behind = sum(number * weights for number, weights in enumerate(reversed(stages)))
    histories = config.jobs().number
    if workers > histories and not config.phase("param").lossless:
        histories = workers
    return histories * behind * compute
