"""Changes a buffer as an error says. Functions import torch themselves, so that flags can be checked without it."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from .base import LARGEST, Event

if TYPE_CHECKING:
    import torch

AddUp = Callable[[np.ndarray], np.ndarray]
#: Elements whose noise is drawn at once. This bounds the memory for noise.
PIECE = 2**22


def apply(
    buffer: torch.Tensor,
    event: Event,
    unit: float = 1.0,
    ranges: Sequence[tuple[int, int]] | None = None,
    add_up: AddUp | None = None,
) -> Event | None:
    """Apply ``event`` to ``buffer`` [n] in place. Returns the event as it happened, or ``None`` if nothing happened.

    ``unit``: the factor between the gradients in the buffer and those that the optimizer sees (loss scale, number of
    tokens, …). ``ranges``: first and last + 1 of each run of elements without padding; default all. ``add_up``: adds up
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
        rms = _root_mean_square(runs, add_up)
        if not 0 < rms < math.inf:
            return None
        event = dataclasses.replace(event, std=event.std * rms / unit, relative=False)
    if not runs:
        return None
    _add_noise(runs, event.seed, min(event.std * unit, LARGEST))  # a large unit makes it larger than torch takes
    return event


def digest(buffer: torch.Tensor) -> bytes:
    """8 bytes that tell ``buffer`` from another (BLAKE2b)."""
    import torch

    data = buffer.detach().contiguous().view(torch.uint8).cpu().numpy()
    return hashlib.blake2b(data.tobytes(), digest_size=8).digest()


def _root_mean_square(runs: Sequence[torch.Tensor], add_up: AddUp | None) -> float:
    import torch

    norms = [torch.linalg.vector_norm(run, dtype=torch.float32) for run in runs if len(run)]
    squares = (torch.stack(norms).cpu().double().numpy() ** 2).sum() if norms else 0.0
    sums = np.array([squares, sum(map(len, runs))], dtype=np.float64)
    squares, count = sums if add_up is None else add_up(sums)
    return float(np.sqrt(squares / count)) if count else 0.0


def _add_noise(runs: Sequence[torch.Tensor], seed: int, std: float) -> None:
    import torch

    generator = torch.Generator(runs[0].device)
    generator.manual_seed(seed - 2**64 if seed >= 2**63 else seed)
    for run in runs:
        for start in range(0, len(run), PIECE):
            piece = run[start : start + PIECE]
            noise = torch.randn(len(piece), generator=generator, device=run.device, dtype=torch.float32)
            piece.add_(noise, alpha=std)


def _flip(buffer: torch.Tensor, event: Event, lengths: Sequence[int], firsts: Sequence[int]) -> None:
    import torch

    ends = np.cumsum(lengths)
    elements = np.array(event.elements, dtype=np.int64)
    run = np.searchsorted(ends, elements, side="right")
    places = elements - (ends[run] - np.array(lengths)[run]) + np.array(firsts)[run]
    width = 8 * buffer.element_size()
    # The words are signed: the highest bit alone is the least number.
    masks = [(1 << bit) - (1 << width if bit == width - 1 else 0) for bit in event.bits]
    whole = buffer.view({16: torch.int16, 32: torch.int32, 64: torch.int64}[width])
    where = torch.from_numpy(places).to(buffer.device)
    whole[where] = whole[where] ^ torch.tensor(masks, dtype=whole.dtype, device=buffer.device)
