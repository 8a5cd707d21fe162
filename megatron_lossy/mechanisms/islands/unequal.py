"""Islands of unequal numbers of ranks: the first ``--sync-ranks`` of each exchange for all.

The elements of a model in the order of its parameters, without padding, are cut into as many parts, the same on all islands. A rank
that exchanges has the copy of one. It is gathered from the optimizer's shards before an exchange begins or a mean is used, and
scattered to them afterwards. So islands need the same parameters, and not the same shards.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from .vector import STEP, HostCopy, Segment, Vector, held


class Stretch(NamedTuple):
    """Consecutive elements ``inside`` a piece of one rank, and their place in the part of another."""

    piece: int
    inside: slice
    place: slice


class Piece(NamedTuple):
    """The elements of a parameter that the optimizer of this rank updates, from element ``start`` of the model on.

    ``main``: the optimizer's parameter; ``rounded``: its copy in the model, if that is another.
    """

    start: int
    main: torch.Tensor
    rounded: torch.Tensor | None


def parameters_of(optimizer: Any) -> list[torch.Tensor]:
    """Return the parameters of Megatron's ``optimizer`` on all ranks, in an order that no layout of ranks changes."""
    found = []
    for buffer in optimizer.buffers:
        places = {parameter: place[0] for parameter, place in buffer.param_index_map.items()}
        found += sorted(places, key=places.__getitem__)
    return found


def pieces_of(optimizer: Any) -> list[Piece]:
    """Return what Megatron's ``optimizer`` has on this rank, in the order of the model's elements."""
    found, first = [], 0
    for parameter in parameters_of(optimizer):
        if parameter in optimizer.model_param_gbuf_map:
            group, index = optimizer.model_param_group_index_map[parameter]
            main = optimizer.optimizer.param_groups[group]["params"][index]
            ranges, rounded = optimizer._get_model_param_range_map(parameter), None
            if parameter.dtype != torch.float32:
                number, _, of_bucket = optimizer.model_param_gbuf_map[parameter]
                place = ranges["gbuf_world_in_bucket"]
                rounded = optimizer.buffers[number].buckets[of_bucket].param_data[place.start : place.end]
            found.append(Piece(first + ranges["param"].start, main, rounded))
        first += parameter.numel()
    return found


class PartVector(Vector):
    """Part number ``rank`` of ``parts`` of the elements of ``optimizer``, a copy; without any on other ranks.

    Making one is a collective call of ``group``, the ranks of the island, and so are all verbs but :meth:`read` and :meth:`write`.
    """

    def __init__(self, optimizer: Any, parts: int, group: Any, device: torch.device) -> None:
        self._group, rank = group, group.rank()
        self._pieces = pieces_of(optimizer)
        whole = sum(parameter.numel() for parameter in parameters_of(optimizer))
        bounds = [number * whole // parts for number in range(parts + 1)]
        bounds += [whole] * (group.size() - parts)  # ranks without a part
        own = [(piece.start, piece.start + piece.main.numel()) for piece in self._pieces]
        everywhere = self._everywhere(own)
        owned = sum(stop - start for theirs in everywhere for start, stop in theirs)
        assert owned == whole, "elements of no rank, or of two"
        # By rank, what of this one's pieces is in its part, and what of its pieces is in this one's.
        sent = [list(_stretches(own, *bounds[other : other + 2])) for other in range(group.size())]
        received = [list(_stretches(theirs, *bounds[rank : rank + 2])) for theirs in everywhere]
        self._given, self._taken = ([sum(_lengths(one)) for one in side] for side in (sent, received))
        self._sent, self._received = (list(itertools.chain(*side)) for side in (sent, received))
        self._copy = torch.zeros(bounds[rank + 1] - bounds[rank], device=device)
        super().__init__([Segment(0, self._copy, None)], len(self._copy), device)
        self.gather_weights()

    @torch.no_grad()
    def gather_weights(self) -> None:
        self._copy.copy_(self._gather([piece.main for piece in self._pieces]))

    @torch.no_grad()
    def scatter_weights(self) -> None:
        for piece, values in zip(self._pieces, self._scatter(self._copy), strict=True):
            piece.main.view(-1).copy_(values)
            if piece.rounded is not None:
                piece.rounded.copy_(values)

    @torch.no_grad()
    def held_state(self, optimizer: Any) -> dict[str, HostCopy | float]:
        """Return the part of the weights, as they were gathered, and of the state of torch's ``optimizer``, by name."""
        found = {"weights": held(self._copy)}
        states = [optimizer.state.get(piece.main, {}) for piece in self._pieces]
        # Of a parameter that the first rank with any has: names, step counts, and tensors of any values.
        small = {key: _small(value) for key, value in next(filter(None, states), {}).items()}
        for key, value in next(filter(None, self._everywhere(small)), {}).items():
            if isinstance(value, torch.Tensor) and value.dim():
                found[f"moments/{key}"] = held(self._gather([state[key] for state in states]))
            elif value is not None:
                found[f"counts/{key}"] = held(value)
        groups = enumerate(optimizer.param_groups)
        return found | {f"groups/{index}": held(group[STEP]) for index, group in groups if STEP in group}

    @torch.no_grad()
    def put_state(self, optimizer: Any, values: Mapping[str, torch.Tensor | float]) -> None:
        """See :meth:`.Vector.put_state`. Ranks without a part give no ``values``."""
        shared = [{key: None if key.startswith(("weights", "moments")) else value for key, value in values.items()}]
        dist.broadcast_object_list(shared, src=dist.get_global_rank(self._group, 0), group=self._group)
        states: list[dict[str, Any]] = [{} for _ in self._pieces]
        for key, value in shared[0].items():
            kind, _, which = key.partition("/")
            part = values.get(key)
            if kind in ("weights", "moments"):
                part = torch.zeros_like(self._copy) if part is None else part
                assert isinstance(part, torch.Tensor)
                if kind == "weights":
                    self._copy.copy_(part)
                    continue
                for piece, state, moments in zip(self._pieces, states, self._scatter(part), strict=True):
                    state[which] = moments.view_as(piece.main)
            elif kind == "counts":
                for state in states:
                    state[which] = value.clone() if isinstance(value, torch.Tensor) else value
            else:
                optimizer.param_groups[int(which)][STEP] = value
        self.scatter_weights()
        for piece, state in zip(self._pieces, states, strict=True):
            if state:
                optimizer.state[piece.main] = state

    def _everywhere(self, own: Any) -> list[Any]:
        """Return ``own`` of every rank."""
        found: list[Any] = [None] * self._group.size()
        dist.all_gather_object(found, own, group=self._group)
        return found

    def _gather(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return this rank's part of the elements that all ranks have in ``tensors``, one for each piece."""
        values = torch.zeros_like(self._copy)
        rows = [tensors[stretch.piece].reshape(-1)[stretch.inside] for stretch in self._sent]
        received = self._cross(rows, self._given, self._taken)
        for stretch, row in zip(self._received, received.split(_lengths(self._received)), strict=True):
            values[stretch.place] = row
        return values

    def _scatter(self, values: torch.Tensor) -> list[torch.Tensor]:
        """Return new elements for each piece of this rank. ``values``: of the part."""
        found = [torch.zeros(piece.main.numel(), device=self._copy.device) for piece in self._pieces]
        values = values.to(self._copy.device)
        received = self._cross([values[stretch.place] for stretch in self._received], self._taken, self._given)
        for stretch, row in zip(self._sent, received.split(_lengths(self._sent)), strict=True):
            found[stretch.piece][stretch.inside] = row
        return found

    def _cross(self, rows: Sequence[torch.Tensor], given: Sequence[int], taken: Sequence[int]) -> torch.Tensor:
        """Send ``rows``, of which each rank gets as many elements as ``given`` has for it, and return those of all ranks."""
        sent = torch.cat([self._copy.new_zeros(0), *rows])
        received = self._copy.new_zeros(sum(taken))
        dist.all_to_all_single(received, sent, list(taken), list(given), group=self._group)
        return received


def _stretches(pieces: Sequence[tuple[int, int]], start: int, stop: int) -> Iterator[Stretch]:
    """Yield the stretches of ``pieces``, (first, last + 1) each, in the part from ``start`` to ``stop``."""
    for number, (first, last) in enumerate(pieces):
        low, high = max(first, start), min(last, stop)
        if low < high:
            yield Stretch(number, slice(low - first, high - first), slice(low - start, high - start))


def _lengths(stretches: Sequence[Stretch]) -> list[int]:
    return [stretch.place.stop - stretch.place.start for stretch in stretches]


def _small(value: Any) -> Any:
    """Return ``value`` of a parameter's state, and of a tensor for each element one element."""
    return value.detach().reshape(-1)[:1].cpu() if isinstance(value, torch.Tensor) and value.dim() else value
