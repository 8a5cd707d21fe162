"""Sums and largest values since the last record, the same on all ranks after one small collective call."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist

from ...base import device
from ...base.device import all_gather_single
from ...base.fetch import PendingArray
from ...recovery.rows import to_device


class Window:
    """Named columns: ``sums`` are added up over iterations and ranks; ``largest`` keep the largest value."""

    def __init__(self, sums: Sequence[str], largest: Sequence[str] = ()) -> None:
        self._names = [*sums, *largest]
        self._sums = len(sums)
        self._values = np.empty(len(self._names))
        self.clear()

    def add(self, **values: float) -> None:
        """Take in values of columns by name."""
        for name, value in values.items():
            column = self._names.index(name)
            if column < self._sums:
                self._values[column] += value
            else:
                self._values[column] = max(self._values[column], value)

    def close(self) -> dict[str, float]:
        """Return the columns over all ranks, -inf for a largest one without values. Begin anew. A collective call."""
        rows = of_all_ranks(self._values)
        values = np.concatenate([rows[:, : self._sums].sum(axis=0), rows[:, self._sums :].max(axis=0)])
        self.clear()
        return dict(zip(self._names, values.tolist(), strict=True))

    def clear(self) -> None:
        """Forget everything."""
        self._values[: self._sums] = 0.0
        self._values[self._sums :] = -np.inf

    def state_dict(self) -> torch.Tensor:
        """Return the values that this rank has taken in."""
        return torch.from_numpy(self._values.copy())

    def load_state_dict(self, state: torch.Tensor) -> None:
        """Restore :meth:`state_dict`."""
        self._values = state.cpu().numpy().copy()


def of_all_ranks(values: np.ndarray) -> np.ndarray:
    """Return float64[world size, columns] of float64[columns]. Values travel as bytes: not every device has float64."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    if world == 1:
        return values[None].copy()
    mine = to_device(values.view(np.uint8), device.current_device())
    rows = torch.empty(world * mine.numel(), dtype=torch.uint8, device=mine.device)
    all_gather_single(rows, mine)
    return PendingArray(rows).wait().view(np.float64).reshape(world, -1)
