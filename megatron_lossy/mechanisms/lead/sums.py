"""The counts of the receivers of a stream, added up: those of real ranks, or of all virtual workers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...fetch import Fetched, aside
from ...peers import Handle, Peers
from ...recovery import copies
from .lag import Counted


class Sums:
    """``counted``: of the replicas of this process, one for each of ``peers.local``. ``device``: adds them up.

    Counts are whole numbers, so that their sums have the same bits in any order.
    """

    def __init__(self, peers: Peers, counted: Sequence[Counted], device: torch.device | str = "cpu") -> None:
        self._peers, self._counted, self._device = peers, counted, torch.device(device)
        self._handle = Handle()
        self._coming: list[Fetched] = []

    def begin_update(self) -> None:
        """Use the sums of the update before, and begin to add up again. A collective call.

        That may take until the next update, so that nobody waits.
        """
        self.finish()
        for one in self._counted:
            one.begin_update()
        adding = [copies.to_device(one.sums.copy(), self._device) for one in self._counted]
        self._handle = self._peers.sum_(adding)
        with aside(self._device):
            if self._device.type == "cuda":  # there only a stream waits for the sum
                self._handle.wait()
                copies.used_here(adding)
            self._coming = [Fetched(sums) for sums in adding]

    def finish(self) -> None:
        """Wait for the sums that are under way, for the next update."""
        self._handle.wait()
        for one, sums in zip(self._counted, self._coming):
            one.coming = sums.wait()
        self._coming = []
