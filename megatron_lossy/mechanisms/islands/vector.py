"""The weights of an island as one vector, and the elements of it that an exchange carries.

Elements are chosen in blocks of consecutive ones, so that few numbers name them. The choice is a function of seed, stream and round, so
that no index is sent: *AsyncMesh*, section 2.3, after SPARTA, whose public code draws a partition per tensor and broadcasts a mask of
bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

from ...base.errors import refuse
from ...base.exchange import Exchange, Stream
from ...base.fetch import PendingArray
from ...channel.draws import choosing_numbers
from ...config import LossyConfig
from ...hooks.buckets import main_pieces
from ...recovery.rows import to_device
from ...transport.peers import bytes_of

#: The name of step counts, which some optimizers keep in their groups, and others with the moments.
STEP = "step"


class Part(NamedTuple):
    """The chosen elements within a stretch of a vector.

    ``where``: their places among all chosen elements. ``first``: their first place in the stretch. ``rows`` int64[n]:
    the chosen rows of ``width`` elements, counted from ``first``; ``None``: consecutive elements from ``first`` on.
    """

    where: slice
    first: int
    width: int
    rows: torch.Tensor | None

    def read(self, stretch: torch.Tensor, values: torch.Tensor) -> None:
        """Copy the chosen elements of ``stretch`` to their place in ``values`` [k], all chosen elements."""
        out, there = values[self.where], self._of(stretch)
        if self.rows is None:
            out.copy_(there)
        else:  # faster than brackets
            torch.index_select(there, 0, self.rows, out=out.view(len(self.rows), *there.shape[1:]))

    def write(self, stretch: torch.Tensor, values: torch.Tensor) -> None:
        """Copy this part of ``values`` [k] into ``stretch``."""
        new, there = values[self.where].to(stretch.dtype), self._of(stretch)
        if self.rows is None:
            there.copy_(new)
        else:
            there.index_copy_(0, self.rows, new.view(len(self.rows), *there.shape[1:]))

    def _of(self, stretch: torch.Tensor) -> torch.Tensor:
        if self.rows is None:
            return stretch[self.first : self.first + self.where.stop - self.where.start]
        if self.width == 1:  # rows of one element stay as they are, which is faster
            return stretch
        count = (len(stretch) - self.first) // self.width
        return stretch[self.first : self.first + count * self.width].view(count, self.width)


class Places:
    """Elements of a vector of ``size``: ``blocks`` int64[n], rising, of ``width`` elements; the last may be cut."""

    def __init__(self, blocks: np.ndarray, width: int, size: int, device: torch.device) -> None:
        # Blocks are kept twice: here for look-ups, which would wait for the device, and on the device for copies.
        self._blocks, self._rows, self._width, self.size = blocks, to_device(blocks, device), width, size
        self._count = len(blocks) * width
        if len(blocks):
            self._count -= max(0, (int(blocks[-1]) + 1) * width - size)

    def on(self, device: torch.device) -> Places:
        """Return the same elements, of a vector on ``device``."""
        return self if self._rows.device == device else Places(self._blocks, self._width, self.size, device)

    def __len__(self) -> int:
        return self._count

    def read(self, vector: torch.Tensor) -> torch.Tensor:
        """Return a copy [k] of these elements of ``vector`` [size]."""
        values = torch.empty(self._count, dtype=vector.dtype, device=vector.device)
        for part in self._whole:
            part.read(vector, values)
        return values

    def write(self, vector: torch.Tensor, values: torch.Tensor) -> None:
        """Put ``values`` [k] at these elements of ``vector``."""
        for part in self._whole:
            part.write(vector, values)

    @cached_property
    def _whole(self) -> list[Part]:
        return [part for _, part in self.parts([(0, self.size)])]

    def parts(self, stretches: Sequence[tuple[int, int]]) -> Iterator[tuple[int, Part]]:
        """Yield the chosen elements of each of ``stretches``, (first, last + 1), with the number of the stretch."""
        width = self._width
        edges = [(start // width, -(-start // width), stop // width, -(-stop // width)) for start, stop in stretches]
        bounds = np.searchsorted(self._blocks, edges).tolist()
        for number, (start, stop) in enumerate(stretches):
            begin, low, high, _ = edges[number]
            first, second, third, last = bounds[number]
            if low > high:  # within one block
                if first < second:
                    yield number, self._run(first, start - begin * width, stop - start, 0)
                continue
            if first < second:
                yield number, self._run(first, start - begin * width, low * width - start, 0)
            if second < third:
                where = slice(second * width, third * width)
                yield number, Part(where, low * width - start, width, self._rows[second:third] - low)
            if third < last:
                yield number, self._run(third, 0, stop - high * width, high * width - start)

    def _run(self, index: int, offset: int, length: int, first: int) -> Part:
        """Return the part of ``length`` elements of block ``index`` from ``offset`` on, at ``first`` in a stretch."""
        start = index * self._width + offset
        return Part(slice(start, start + length), first, self._width, None)


def read_at(vector: torch.Tensor, places: Places | None) -> torch.Tensor:
    """Return the elements [k] of ``vector`` at ``places``; with ``None`` the vector itself."""
    return vector if places is None else places.read(vector)


def write_at(vector: torch.Tensor, places: Places | None, values: torch.Tensor) -> None:
    """Put ``values`` [k] at ``places`` of ``vector``; ``None``: everywhere."""
    if places is None:
        vector.copy_(values)
    else:
        places.write(vector, values)


class Subset:
    """The elements of each round of one vector of ``size`` elements. Raises :class:`UsageError` if they are too few.

    ``cyclic``: blocks of elements are permuted once and cut into n parts; round r takes part r mod n. ``partition``:
    the same, permuted anew every n rounds. ``bernoulli``: every block with the probability of the fraction.
    """

    def __init__(self, config: LossyConfig, size: int, seed: int, stream: Stream) -> None:
        self._kind, self._fraction, self._parts = config.sync_subset, config.sync_fraction, config.parts
        self._block, self._seed, self.stream = config.sync_block, seed, stream
        self.size = size
        self._blocks = -(-size // config.sync_block)
        if size and self._fraction * size < config.islands:  # a rank may have none
            least = f"must be at least {config.islands / size:.3g}"
            why = f"of {size} elements is less than one for each of {config.islands} islands to average; {least}"
            raise refuse("--sync-fraction", self._fraction, why)
        if size and self._kind != "bernoulli" and self._blocks < self._parts:
            most = (size - 1) // (self._parts - 1)
            why = f"makes {self._blocks} blocks of {size} elements, fewer than {self._parts} parts; must be at most {most}"
            raise refuse("--sync-block", self._block, why)
        self._partition: tuple[int, list[np.ndarray]] | None = None

    def places(self, number: int, device: torch.device) -> Places | None:
        """Return the elements of round ``number`` (from 0), for a vector on ``device``; ``None``: all of them."""
        if self._fraction == 1:
            return None
        return Places(self._chosen(number), self._block, self.size, device)

    @property
    def most(self) -> int:
        """The most elements that a round can have."""
        if self._fraction == 1 or self._kind == "bernoulli":
            return self.size
        return min(self.size, -(-self._blocks // self._parts) * self._block)

    def _chosen(self, number: int) -> np.ndarray:
        """Return int64[n], rising: the blocks of a round."""
        if self._kind == "bernoulli":
            threshold = np.uint64(min(int(self._fraction * 2.0**64), 2**64 - 1))
            return np.flatnonzero(self._numbers(number) < threshold)
        cycle, part = divmod(number, self._parts)
        return self._parts_of(0 if self._kind == "cyclic" else cycle)[part]

    def _parts_of(self, cycle: int) -> list[np.ndarray]:
        """Return the blocks of each part."""
        if self._partition is None or self._partition[0] != cycle:
            order = np.argsort(self._numbers(cycle), kind="stable")
            parts = [np.sort(part) for part in np.array_split(order, self._parts)]
            self._partition = (cycle, parts)
        return self._partition[1]

    def _numbers(self, number: int) -> np.ndarray:
        return choosing_numbers(self._seed, Exchange("sync-reduce", self.stream, number), self._blocks)


@dataclass(frozen=True)
class Segment:
    """``main`` float32[n], elements from ``start`` on, and its ``rounded`` copy in the model; ``None``: that has ``main``."""

    start: int
    main: torch.Tensor
    rounded: torch.Tensor | None

    @property
    def stop(self) -> int:
        """The element after the last one."""
        return self.start + self.main.numel()


class HostCopy:
    """``value`` as it is now, on its way to the host. On CUDA it takes no memory of the device."""

    def __init__(self, value: torch.Tensor) -> None:
        value = value.detach().contiguous()
        self.like = {"dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}
        # Where a copy waits for the queued work, it must not see later work.
        value = value if value.device.type == "cuda" else value.clone()
        self._fetched = PendingArray(bytes_of(value))

    def bytes(self) -> torch.Tensor:
        """Return uint8[n], once it is here."""
        return torch.from_numpy(self._fetched.wait())


def held(value: Any) -> HostCopy | float:
    """Return ``value`` of an optimizer's state, or this rank's shard of it, as it is now."""
    return HostCopy(_own(value)) if isinstance(value, torch.Tensor) else value


def _own(value: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of ``value``, if that is a DTensor, of FSDP2; else ``value``."""
    return value.to_local() if hasattr(value, "to_local") else value


def _sharded(value: Any, like: torch.Tensor) -> Any:
    """Return the DTensor of which ``value`` is the shard, if the parameter ``like`` is one. Raise :class:`UsageError` for another shape."""
    if not hasattr(like, "to_local") or not getattr(value, "shape", None):
        return value
    if value.shape != like.to_local().shape:
        why = "keeps state of other shapes than a parameter's, which no island can copy"
        raise refuse(
            "optimizer", f"with a tensor {list(value.shape)} of a parameter {list(like.to_local().shape)}", why
        )
    how = {"run_check": False, "shape": like.shape, "stride": like.stride()}
    return type(like.data).from_local(value.to(like.device), like.device_mesh, like.placements, **how)


class Vector:
    """``size`` elements in segments; between these is padding, which reads as zeros and cannot be written."""

    def __init__(self, segments: Sequence[Segment], size: int, device: torch.device) -> None:
        self._segments, self.size, self._device = segments, size, device
        self._known: tuple[Places | None, list[tuple[Segment, Part]]] = (None, [])

    def gather_weights(self) -> None:
        """Make the segments those of the weights, if they are copies: an exchange begins, or a mean is about to be used."""

    def scatter_weights(self) -> None:
        """Make the weights those of the segments, if these are copies."""

    def read(self, places: Places | None) -> torch.Tensor:
        """Return a copy [k] of the elements at ``places``; ``None``: all."""
        result = torch.zeros(self.size if places is None else len(places), device=self._device)
        for segment, part in self._parts(places):
            part.read(segment.main, result)
        return result

    def write(self, places: Places | None, values: torch.Tensor) -> None:
        """Write ``values`` [k] to the elements at ``places``; ``None``: all."""
        for segment, part in self._parts(places):
            part.write(segment.main, values)
            if segment.rounded is not None:
                part.write(segment.rounded, values)

    def held_state(self, optimizer: Any) -> dict[str, HostCopy | float]:
        """Return the weights, and what torch's ``optimizer`` keeps of them, by name, as they are now."""
        found, state = {"weights": held(self.read(None))}, optimizer.state_dict()
        for index, kept in state["state"].items():
            found |= {f"state/{index}/{name}": held(value) for name, value in kept.items() if value is not None}
        groups = enumerate(state["param_groups"])
        return found | {f"groups/{index}/{STEP}": held(group[STEP]) for index, group in groups if STEP in group}

    def put_state(self, optimizer: Any, values: Mapping[str, torch.Tensor | float]) -> None:
        """Put ``values``, a :meth:`held_state`, in the place of weights and state."""
        weights, own = values["weights"], optimizer.state_dict()
        assert isinstance(weights, torch.Tensor)
        with torch.no_grad():
            self.write(None, weights)
        state: dict[int, dict[str, Any]] = {}
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for name, value in values.items():
            kind, *path = name.split("/")
            if kind == "state":
                number, key = int(path[0]), path[1]
                state.setdefault(number, {})[key] = value if key == STEP else _sharded(value, parameters[number])
            elif kind == "groups":
                own["param_groups"][int(path[0])][path[1]] = value
        # The loaded tensors are kept: they must not be those of others.
        optimizer.load_state_dict({**own, "state": state})

    def _parts(self, places: Places | None) -> list[tuple[Segment, Part]]:
        if places is None:
            return [(segment, Part(slice(segment.start, segment.stop), 0, 1, None)) for segment in self._segments]
        if places is not self._known[0]:  # the same are read, changed and written
            stretches = [(segment.start, segment.stop) for segment in self._segments]
            self._known = (places, [(self._segments[number], part) for number, part in places.parts(stretches)])
        return self._known[1]


def shard_vector(
    optimizers: Sequence[Any], buckets: Sequence[Any], weights: Sequence[torch.Tensor], shard: int, shards: int
) -> Vector:
    """Return shard number ``shard`` of ``shards`` of every bucket, one after another, as ``optimizers`` have it.

    ``weights``: the buckets' parameters as they are kept, [shards * elements] each.
    """
    segments: list[Segment] = []
    base = 0
    for bucket, kept in zip(buckets, weights, strict=True):
        elements = kept.numel() // shards
        first = shard * elements
        if kept.dtype == torch.float32:
            segments.append(Segment(base, kept[first : first + elements], None))
        else:
            pieces = main_pieces(optimizers, bucket, bucket.param_data, "--islands")
            for start, main in sorted(pieces, key=lambda piece: piece[0]):
                low, high = max(start, first), min(start + main.numel(), first + elements)
                if low < high:
                    own = main.view(-1)[low - start : high - start]
                    segments.append(Segment(base + low - first, own, kept[low:high]))
        base += elements
    return Vector(segments, base, weights[0].device)
