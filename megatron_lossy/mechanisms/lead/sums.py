"""The counts of the receivers of a stream, added up: those of real ranks, or of all virtual workers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...transport.peers import Handle, Peers
from .lag import Counted


class Sums:
    """``counted``: of the replicas of this process, one for each of ``peers.local``.

    Counts are whole numbers, so that their sums have the same bits in any order.
    """

    def __init__(self, peers: Peers, counted: Sequence[Counted]) -> None:
        self._peers, self._counted = peers, counted
        self._handle = Handle()
        self._adding: list[torch.Tensor] = []

    def begin_update(self) -> None:
        """Use the sums of the update before, and begin to add up again. A collective call.

        That may take until the next update, so that nobody waits.
        """
        self.finish()
        for one in self._counted:
            one.begin_update()
        self._adding = [torch.from_numpy(one.sums.copy()) for one in self._counted]
        self._handle = self._peers.sum_(self._adding)

    def finish(self) -> None:
        """Wait for the sums that are under way, for the next update."""
        self._handle.wait()
        for one, sums in zip(self._counted, self._adding):
            one.coming = sums.numpy()
        self._adding = []
