"""Replicas of all workers as versions of shards.

A replica differs from the owners' weights only in units whose broadcast was missed. There it holds the owner's value at
an earlier update. So the parameter buffers hold the fresh weights. For each earlier version only the units that some
replica still has are kept, once. An array says which version of each unit each worker has. Memory grows with the oldest
version in use, not with the number of workers.

A real rank needs none of this: its parameter buffers are its replica (:mod:`megatron_lossy.run.replicas` saves it).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ...base.exchange import BucketUnits
from ...recovery import unit_views
from ...recovery.rows import to_device

#: The version of weights that were never lost: the initial ones, or those of a checkpoint.
FIRST = -1

Places = tuple[np.ndarray, np.ndarray]


class Block:
    """Units of one version of one view of a bucket: ``rows`` [k, elements], and an index of the row of each unit."""

    def __init__(self, view: torch.Tensor, kept: np.ndarray) -> None:
        places = np.nonzero(kept)
        self.rows = _gather(view, places)
        self.index = np.full(kept.shape, -1, dtype=np.int32)
        self.index[places] = np.arange(len(places[0]))

    def drop_all_but(self, needed: np.ndarray) -> None:
        """Forget units that are not ``needed`` when they are at least half of all."""
        needed = needed & (self.index >= 0)
        count = int(np.count_nonzero(needed))
        if count > len(self.rows) // 2 and count:
            return
        places = np.nonzero(needed)
        self.rows = self.rows[to_device(self.index[places], self.rows.device)]
        self.index = np.full(needed.shape, -1, dtype=np.int32)
        self.index[places] = np.arange(count)


def _gather(view: torch.Tensor, places: Places, rows: torch.Tensor | None = None) -> torch.Tensor:
    """Return the units of ``view`` [N, units, elements] at ``places``, as [k, elements]; in ``rows`` if long enough."""
    if view.shape[1] == 1:
        count = len(places[0])
        rows = rows[:count] if rows is not None and len(rows) >= count else view.new_empty(count, view.shape[2])
        for row, shard in enumerate(places[0]):
            rows[row].copy_(view[shard, 0])
        return rows
    return view[_tensors(places, view.device)]


def _scatter(view: torch.Tensor, places: Places, rows: torch.Tensor, chosen: np.ndarray | None = None) -> None:
    """Write ``rows``, or the ``chosen`` ones, to ``places`` of ``view``."""
    if view.shape[1] == 1:
        for shard, row in zip(places[0], range(len(rows)) if chosen is None else chosen, strict=True):
            view[shard, 0].copy_(rows[row])
        return
    if chosen is not None:
        rows = rows[to_device(chosen, rows.device)]
    view.index_put_(_tensors(places, view.device), rows)


def _tensors(places: Places, device: torch.device) -> tuple[torch.Tensor, ...]:
    return tuple(to_device(place, device) for place in places)


class Versions:
    """The replicas of ``workers`` workers of the buckets of one stream.

    Args:
        buffers: each bucket's fresh parameters, [N * shard], or [N, shard] that are apart.
        units: how each is cut.
        total: units of the stream.
        workers: N.
    """

    def __init__(self, buffers: Sequence[torch.Tensor], units: Sequence[BucketUnits], total: int, workers: int) -> None:
        self._buckets = list(zip(buffers, units, strict=True))
        # Per bucket: views [N, units, elements] with the numbers of their units in the stream.
        self._views = [
            (view, slice(cut.first + inner.start, cut.first + inner.stop))
            for buffer, cut in zip(buffers, units, strict=True)
            for view, inner in unit_views(buffer, cut)
        ]
        #: int32[N receivers, N sources, units]: the update whose value each replica holds.
        self.held = np.full((workers, workers, total), FIRST, dtype=np.int32)
        self.current = FIRST
        self._blocks: dict[int, list[Block]] = {}  # by version: a block per view
        self._pending: tuple[int, np.ndarray, list[Block] | None] | None = None
        self._fresh: list[tuple[Places, torch.Tensor]] | None = None
        # Rows of earlier turns, by view: on a CPU touching new memory costs far more than copying into it.
        self._spare: dict[int, torch.Tensor] = {}

    def before_update(self, step: int, lost: np.ndarray) -> None:
        """Keep the units that the update of ``step`` overwrites and some worker misses: ``lost`` bool[N, N, units]."""
        assert self._fresh is None, "a replica is swapped in"
        kept = (lost & (self.held == self.current)).any(axis=0)
        blocks = [Block(view, kept[:, numbers]) for view, numbers in self._views] if kept.any() else None
        self._pending = (step, lost, blocks)

    def after_update(self, successful: bool) -> None:
        """End the update, made or skipped."""
        (step, lost, blocks), self._pending = self._pending, None
        if not successful:
            return
        if blocks is not None:
            self._blocks[self.current] = blocks
        self.held[~lost] = step
        self.current = step
        for version in list(self._blocks):
            needed = (self.held == version).any(axis=0)
            if not needed.any():
                del self._blocks[version]
                continue
            for block, (_, numbers) in zip(self._blocks[version], self._views, strict=True):
                block.drop_all_but(needed[:, numbers])

    def swap_in(self, worker: int) -> None:
        """Put the replica of ``worker`` into the parameter buffers."""
        assert self._fresh is None, "another replica is swapped in"
        held = self.held[worker]
        stale = held != self.current
        self._fresh = []
        for number, (view, numbers) in enumerate(self._views):
            places = np.nonzero(stale[:, numbers])
            rows = _gather(view, places, self._spare.get(number))
            if view.shape[1] == 1 and (number not in self._spare or len(rows) > len(self._spare[number])):
                self._spare[number] = rows
            self._fresh.append((places, rows))
        for version, blocks in self._blocks.items():
            mine = held == version
            if not mine.any():
                continue
            for block, (view, numbers) in zip(blocks, self._views, strict=True):
                places = np.nonzero(mine[:, numbers])
                _scatter(view, places, block.rows, block.index[places])

    def swap_out(self) -> None:
        """Put the fresh weights back into the parameter buffers."""
        fresh, self._fresh = self._fresh, None
        for (places, rows), (view, _) in zip(fresh, self._views, strict=True):
            _scatter(view, places, rows)

    def everyone(self, bucket: int, places: np.ndarray) -> torch.Tensor:
        """Return [N, S]: the value of each replica at ``places``, offsets int64[S] into ``bucket``."""
        assert self._fresh is None, "a replica is swapped in"
        buffer, cut = self._buckets[bucket]
        result = buffer.reshape(-1)[torch.from_numpy(places).to(buffer.device)].repeat(len(self.held), 1)
        shards, offsets = np.divmod(places, cut.shard)
        units, elements = np.divmod(offsets, cut.elements)
        held = self.held[:, shards, cut.first + units]
        earlier = sum(len(unit_views(*other)) for other in self._buckets[:bucket])
        for number, (_, inner) in enumerate(unit_views(buffer, cut), start=earlier):
            inside = (units >= inner.start) & (units < inner.stop)
            for version, blocks in self._blocks.items():
                workers, chosen = np.nonzero((held == version) & inside)
                rows = blocks[number].index[shards[chosen], units[chosen] - inner.start].astype(np.int64)
                values = blocks[number].rows[_tensors((rows, elements[chosen]), buffer.device)]
                result.index_put_(_tensors((workers, chosen), buffer.device), values)
        return result

    def restart(self) -> None:
        """Begin again with replicas that equal the parameter buffers."""
        self.held.fill(FIRST)
        self.current = FIRST
        self._blocks.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return the differences of the replicas."""
        blocks = {
            version: [(block.rows, torch.from_numpy(block.index)) for block in blocks]
            for version, blocks in self._blocks.items()
        }
        return {"held": torch.from_numpy(self.held), "current": self.current, "blocks": blocks}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`."""
        self.held = state["held"].cpu().numpy()
        self.current = state["current"]
        self._blocks = {}
        for version, blocks in state["blocks"].items():
            self._blocks[version] = []
            for (rows, index), (view, _) in zip(blocks, self._views, strict=True):
                block = Block.__new__(Block)
                block.rows, block.index = rows.to(view.device), index.cpu().numpy()
                self._blocks[version].append(block)
