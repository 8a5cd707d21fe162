"""Memory of old weights in training, on one device: computed, not measured.

An asynchronous pipeline is P - 1 - i whole batches ahead on stage i of P, from 0. It keeps their activations. Beside
the weights of the forward pass it keeps those of each such batch. Virtual stages share a device: stage i has P - 1 - i
versions, so (P - 1)/2 copies of the model if stages are equally long; in each job, or for each worker if parameters are
lost, because then every worker has others.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...config import LossyConfig
from ...lab.launch.memory import Held, Kept


def kept(config: LossyConfig, held: Held) -> list[Kept]:
    """The weights that a device keeps for backward passes to come."""
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
    """Bytes of old weights of all virtual stages. ``stages``: the number of weights of each; ``workers``: N."""
    behind = sum(number * weights for number, weights in enumerate(reversed(stages)))
    histories = config.jobs().number
    if workers > histories and not config.phase("param").lossless:
        histories = workers
    return histories * behind * compute
