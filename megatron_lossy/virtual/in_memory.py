"""The lossy groups of virtual workers, which exchange in memory."""

from __future__ import annotations

from collections.abc import Sequence

from ..config import PHASES, LossyConfig
from ..exchange import Stream
from ..transport import BucketSpec, LossyGroup, Network, cut_buckets
from ..transport.drawn import check_links
from ..transport.memory import Memory
from ..transport.network import consecutive_nodes


def groups_in_memory(
    config: LossyConfig, specs: Sequence[BucketSpec], stream: Stream, members: range, ranks: int, steps: int | None
) -> tuple[Memory, list[LossyGroup]]:
    """What the workers ``members`` of ``ranks`` exchange through, and the group of each of them.

    ``steps``: length of the run, if known. Raises :class:`UsageError` where the loss flags do not fit.
    """
    cut = cut_buckets(config, specs)
    nodes = None
    if config.lossy_links == "inter-node":
        nodes = consecutive_nodes(range(ranks), config.ranks_per_node)
    networks = {phase: Network(config, phase, ranks, nodes) for phase in PHASES}
    check_links(networks, stream, cut, len(members), steps)
    memory = Memory(networks, stream, members, cut)
    return memory, [LossyGroup(config, memory.worker(rank)) for rank in range(len(members))]
