"""The errors of one rank, applied to its gradients bucket by bucket, in any order."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from ...base.exchange import Exchange, Stream
from ...base.fetch import PendingArray
from .base import LARGEST, Corruption, Event
from .bit_flip import check_bits

#: Kinds of events in the log besides those of errors: a gradient that an error left unchanged, and a reduction.
SPARED, REDUCED = "spared", "reduced"
AddUp = Callable[[np.ndarray], np.ndarray]
#: Elements whose noise is drawn at once. This bounds the memory for noise.
PIECE = 2**22


def apply(
    buffer: torch.Tensor,
    event: Event,
    unit: float | torch.Tensor = 1.0,
    ranges: Sequence[tuple[int, int]] | None = None,
    add_up: AddUp | None = None,
) -> Event | None:
    """Apply ``event`` to ``buffer`` [n] in place. Return the event as it happened, or ``None`` if nothing happened.

    ``unit``: the factor between the gradients in the buffer and those that the optimizer sees (loss scale, number of
    tokens, …), a number or a scalar tensor on the device of the buffer. ``ranges``: first and last + 1 of each run of elements without padding; default all. ``add_up``: adds up
    float64[2] over the ranks that hold parts of one gradient. Some ranks may hold copies, and these must stay copies.

    Noise is drawn on the buffer's device, in float32, and added before one rounding to the buffer's dtype. The returned
    event, applied again, adds the same noise to any gradient. Relative noise needs a finite gradient that is not zero:
    any other gradient stays unchanged.
    """
    runs = [buffer[first:last] for first, last in (ranges if ranges is not None else [(0, len(buffer))])]
    if event.kind == "bit-flip":
        _flip(buffer, event, [len(run) for run in runs], [first for first, _ in ranges or [(0, 0)]])
        return event
    assert event.kind == "gaussian"
    if event.relative:
        rms, unit = _root_mean_square(runs, unit, add_up)
        if not 0 < rms < math.inf:
            return None
        event = dataclasses.replace(event, std=event.std * rms / unit, relative=False)
    if not runs:
        return None
    if not isinstance(unit, (float, int)):
        unit = float(PendingArray(unit).wait())
    _add_noise(runs, event.seed, min(event.std * unit, LARGEST))  # a large unit makes it larger than torch takes
    return event


def digest(buffer: torch.Tensor) -> bytes:
    """Return a digest of ``buffer`` (BLAKE2b, 8 bytes)."""
    data = PendingArray(buffer.detach().contiguous().view(torch.uint8)).wait()
    return hashlib.blake2b(data.tobytes(), digest_size=8).digest()


def scaled_unit(unit: float, scale: float | torch.Tensor) -> float | torch.Tensor:
    """Return ``unit`` times ``scale``, in float64, on the device of ``scale`` without a wait if that is CUDA."""
    return scale.double() * unit if not isinstance(scale, float) and scale.is_cuda else unit * float(scale)


def _root_mean_square(
    runs: Sequence[torch.Tensor], unit: float | torch.Tensor, add_up: AddUp | None
) -> tuple[float, float]:
    """Return the root mean square of ``runs``, and ``unit``: both of one copy to the host."""
    numbers = [torch.linalg.vector_norm(run, dtype=torch.float32) for run in runs if len(run)]
    if isinstance(unit, torch.Tensor):
        numbers = [*(norm.double() for norm in numbers), unit]
    values = PendingArray(torch.stack(numbers)).wait().astype(np.float64) if numbers else np.zeros(0)
    if isinstance(unit, torch.Tensor):
        values, unit = values[:-1], float(values[-1])
    sums = np.array([(values**2).sum(), sum(map(len, runs))], dtype=np.float64)
    squares, count = sums if add_up is None else add_up(sums)
    return (float(np.sqrt(squares / count)) if count else 0.0), unit


def _add_noise(runs: Sequence[torch.Tensor], seed: int, std: float) -> None:
    generator = torch.Generator(runs[0].device)
    generator.manual_seed(seed - 2**64 if seed >= 2**63 else seed)
    for run in runs:
        for start in range(0, len(run), PIECE):
            piece = run[start : start + PIECE]
            noise = torch.randn(len(piece), generator=generator, device=run.device, dtype=torch.float32)
            piece.add_(noise, alpha=std)


def _flip(buffer: torch.Tensor, event: Event, lengths: Sequence[int], firsts: Sequence[int]) -> None:
    ends = np.cumsum(lengths)
    elements = np.array(event.elements, dtype=np.int64)
    run = np.searchsorted(ends, elements, side="right")
    places = elements - (ends[run] - np.array(lengths)[run]) + np.array(firsts)[run]
    width = 8 * buffer.element_size()
    # The words are signed: the highest bit alone is the least number.
    masks = [(1 << bit) - (1 << width if bit == width - 1 else 0) for bit in event.bits]
    whole = buffer.view({16: torch.int16, 32: torch.int32, 64: torch.int64}[width])
    where, flipped = torch.from_numpy(places), torch.tensor(masks, dtype=whole.dtype)
    if buffer.device.type == "cuda":  # which copies page-locked memory without a wait
        where, flipped = (tensor.pin_memory().to(buffer.device, non_blocking=True) for tensor in (where, flipped))
    where, flipped = where.to(buffer.device), flipped.to(buffer.device)
    whole[where] = whole[where] ^ flipped


class Hit(NamedTuple):
    """An error as it happened, and the digest of the bucket, or of the owner's shard of it, afterwards."""

    event: Event
    digest: bytes


@dataclass(frozen=True)
class Reduction:
    """The errors in the gradients of ``rank`` in one reduction of ``stream``.

    ``sizes``: for each bucket the number of elements that an error could hit, each of ``width`` bits. ``hits``: in
    canonical order. ``spared``: buckets that a relative error left unchanged, because their gradient is zero or not
    finite.
    """

    stream: Stream
    rank: int
    sizes: tuple[int, ...]
    width: int
    hits: tuple[Hit, ...] = ()
    spared: tuple[int, ...] = ()

    def rows(self) -> list[dict[str, Any]]:
        """Return rows for the log of events: one for the reduction, one for each error and each spared bucket."""
        where = {"stream": self.stream.name, "rank": self.rank}
        rows = [{**where, "kind": REDUCED, "sizes": list(self.sizes), "width": self.width}]
        for event, digest in self.hits:
            own = {name: getattr(event, name) for name in ("bucket", "kind", "std", "seed")}
            rows.append({**where, **own, "elements": [*event.elements], "bits": [*event.bits], "digest": digest})
        return rows + [{**where, "kind": SPARED, "bucket": bucket} for bucket in self.spared]


class Errors:
    """Applies errors to the gradients of ``rank`` in one stream.

    ``ranges``: for each bucket int64[k, 2], the first and last + 1 of each run of elements without padding. ``width``:
    bits of an element; of several dtypes, of the shortest. ``add_up``: see :func:`apply`. Raise :class:`UsageError` for
    bits that gradients do not have.
    """

    def __init__(
        self,
        corruption: Corruption,
        rank: int,
        ranges: Sequence[np.ndarray],
        width: int,
        add_up: AddUp | None = None,
    ) -> None:
        check_bits(corruption.config, width)
        self._corruption = corruption
        self._rank = rank
        self._ranges = [[(int(first), int(last)) for first, last in runs] for runs in ranges]
        self._sizes = [sum(last - first for first, last in runs) for runs in self._ranges]
        self._width = width
        self._records = corruption.config.delivery_log is not None
        self._add_up = add_up
        self._reduced: Exchange | None = None
        self._told = False
        self._events: dict[int, Event] = {}
        self._hits: dict[int, Hit] = {}
        self._spared: set[int] = set()

    def hit(
        self,
        exchange: Exchange,
        bucket: int,
        buffer: torch.Tensor,
        unit: Callable[[], float | torch.Tensor] = lambda: 1.0,
    ) -> None:
        """Apply the errors of ``exchange`` to ``buffer``, the reduced gradient of ``bucket``.

        ``unit()``: see :func:`apply`. It is called only if an error happens, because a loss scale is on the device.
        """
        if exchange != self._reduced:
            self._reduced, self._told = exchange, False
            drawn = self._corruption.events(exchange, self._rank, self._sizes, self._width)
            self._events = {event.bucket: event for event in drawn}
            self._hits, self._spared = {}, set()
        event = self._events.get(bucket)
        if event is None:
            return
        happened = apply(buffer, event, unit(), self._ranges[bucket], self._add_up)
        if happened is None:
            self._spared.add(bucket)
            return
        self._hits[bucket] = Hit(happened, digest(buffer) if self._records else b"")

    def take(self, step: int) -> list[Reduction]:
        """Return the errors of ``step``, once; nothing if gradients were not reduced."""
        if self._reduced is None or self._reduced.step != step or self._told:
            return []
        self._told = True
        hits = tuple(self._hits[bucket] for bucket in sorted(self._hits))
        stream, sizes = self._reduced.stream, tuple(self._sizes)
        return [Reduction(stream, self._rank, sizes, self._width, hits, tuple(sorted(self._spared)))]
