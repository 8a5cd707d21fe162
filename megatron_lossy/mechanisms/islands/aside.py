"""The way of vectors between a device and the carriers, which are in host memory, beside the stream that computes.

On CUDA both ways go through page-locked memory, on a stream of their own. The threads of the carriers wait for it;
training does not. On a CPU there is no way to go.
"""

from __future__ import annotations

import torch

from ...base.fetch import Fetched, aside, is_here, stream_aside
from ...base.fingerprint import finite
from ...recovery import copies
from .form import Form

#: Elements behind each piece and each mean. They say whether to stop.
ASIDE = 1
#: Integers as long as elements.
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


class Pieces:
    """``own`` float32[k] in ``islands`` pieces of ``form``, with room for :data:`ASIDE` more items behind each.

    ``own`` becomes what is sent: as it arrives. If some values are not finite, all pieces are blank: this tells the others that nothing
    comes from here. ``shard``, ``units``: the elements of a piece. ``here``: whether they were in host memory from the beginning.
    """

    def __init__(self, own: torch.Tensor, islands: int, form: Form) -> None:
        self.shard = -(-len(own) // islands)
        self.units = form.cut(self.shard)
        self._dtype = form.dtype
        self.here = is_here(own)
        missing = islands * self.shard - len(own)
        whole = torch.nn.functional.pad(own, (0, missing)) if missing else own
        items = form.items(self.units)
        rows = own.new_zeros(islands, items + ASIDE, dtype=form.dtype)
        form.encode(whole.view(islands, self.shard), self.units, rows[:, :items])
        if not form.exact:
            own.copy_(form.decode(rows[:, :items], self.units).view(-1)[: len(own)])
        present = finite([own])
        self._present: bool | Fetched = bool(present) if self.here else Fetched(present)  # before the long copy
        self._rows: torch.Tensor | Fetched = rows
        if not self.here:
            self._leave(rows.masked_fill_(~present, form.blank))
        elif not self._present:
            rows.fill_(form.blank)

    @property
    def present(self) -> bool:
        """Whether all values are finite."""
        if isinstance(self._present, Fetched):
            self._present = bool(self._present.wait())
        return self._present

    @property
    def rows(self) -> torch.Tensor:
        """[M, items + ASIDE], in host memory."""
        if isinstance(self._rows, Fetched):
            self._rows = torch.from_numpy(self._rows.wait()).view(self._dtype)
        return self._rows

    def _leave(self, rows: torch.Tensor) -> None:
        """Begin to copy ``rows`` to the host. Nothing depends on the values."""
        if rows.device.type == "cuda":
            stream_aside(rows.device).wait_stream(torch.cuda.current_stream(rows.device))
        with aside(rows.device):
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
