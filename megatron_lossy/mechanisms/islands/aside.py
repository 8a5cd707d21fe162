"""The way of vectors between a device and the carriers, which are in host memory, beside the stream that computes.

On CUDA both ways go through page-locked memory, on a stream of their own. The threads of the carriers wait for it;
training does not. On a CPU there is no way to go.
"""

from __future__ import annotations

from itertools import zip_longest

import torch

from ...fetch import Fetched, aside, is_here, stream_aside
from ...fingerprint import finite
from ...recovery import copies

#: Elements behind each piece and each mean. They say whether to stop.
ASIDE = 1
#: Integers as long as elements.
BITS = {2: torch.int16, 4: torch.int32}


class Pieces:
    """``own`` float32[k] in ``islands`` pieces of ``dtype``, with room for :data:`ASIDE` more elements in each.

    If some values are not finite, all pieces are NaN: this tells the others that nothing comes from here. ``here``:
    whether they were in host memory from the beginning.
    """

    def __init__(self, own: torch.Tensor, islands: int, dtype: torch.dtype) -> None:
        self.shard = -(-len(own) // islands)
        self._dtype = dtype
        self.here = is_here(own)
        if self.here:
            self._present: bool | Fetched = bool(finite([own]))
            self._rows: torch.Tensor | Fetched = self._cut(own, islands)
        else:
            self._leave(own, islands)

    @property
    def present(self) -> bool:
        """Whether all values are finite."""
        if isinstance(self._present, Fetched):
            self._present = bool(self._present.wait())
        return self._present

    @property
    def rows(self) -> torch.Tensor:
        """[M, shard + ASIDE], in host memory."""
        if isinstance(self._rows, Fetched):
            self._rows = torch.from_numpy(self._rows.wait()).view(self._dtype)
        return self._rows

    def _cut(self, own: torch.Tensor, islands: int) -> torch.Tensor:
        rows = torch.empty(islands, self.shard + ASIDE, dtype=self._dtype)
        if not self._present:
            return rows.fill_(torch.nan)
        for piece, part in zip_longest(rows, own.split(self.shard), fillvalue=own[:0]):
            piece[: len(part)].copy_(part)
            piece[len(part) :].zero_()
        return rows

    def _leave(self, own: torch.Tensor, islands: int) -> None:
        """Begin to copy to the host. Nothing depends on the values."""
        present = finite([own])
        whole = own.new_zeros(islands * self.shard, dtype=self._dtype)
        whole[: len(own)].copy_(own)
        rows = own.new_zeros(islands, self.shard + ASIDE, dtype=self._dtype)
        rows[:, : self.shard] = whole.view(islands, self.shard).masked_fill_(~present, torch.nan)
        self._present = Fetched(present)  # before the long copy, for those who ask for it alone
        if own.device.type == "cuda":
            stream_aside(own.device).wait_stream(torch.cuda.current_stream(own.device))
        with aside(own.device):
            copies.used_here((rows,))
            self._rows = Fetched(rows.view(BITS[rows.element_size()]))  # NumPy knows no bfloat16


class Brought:
    """Marks the end of the work that :func:`aside` has so far. Made on a thread, used on the one that computes."""

    def __init__(self, device: torch.device) -> None:
        self._event = None
        if device.type == "cuda":
            self._event = torch.cuda.Event()
            self._event.record(stream_aside(device))

    def use(self, *tensors: torch.Tensor | None) -> None:
        """Let what is computed from now on use ``tensors``, which were brought before."""
        if self._event is not None:
            self._event.wait()
            copies.used_here(tensor for tensor in tensors if tensor is not None)
