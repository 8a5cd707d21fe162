"""Carriers of exchanges between ranks of one number of all islands, in host memory: over gloo, as datagrams, or over streams.

In both halves of an exchange a unit that does not arrive in time is lost, and reported. Messages have the length of the longest exchange,
of one launch or of so many senders; shorter ones end in zeros.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ...config import LossyConfig
from ...transport.ends import end_for
from ...transport.leaving import Departures, patiently
from .copying import PART
from .flags import SYNC_PHASES
from .form import Codes, form_of
from .world import Meeting


class Carrier(ABC):
    """Carries one exchange after the other between the islands, in host memory."""

    #: Whether it reports losses.
    observes = False

    @abstractmethod
    def scatter(self, pieces: torch.Tensor) -> tuple[torch.Tensor, np.ndarray | None]:
        """Send ``pieces`` [M, n], one to each island. Return the pieces for this island [M, n], and the arrived units.

        The second is bool[M, units or more]; ``None``: all. Items that did not arrive are zero.
        """

    @abstractmethod
    def gather(self, own: torch.Tensor) -> tuple[torch.Tensor, np.ndarray | None]:
        """Return [M, n]: ``own`` [n] of every island, and the units that arrived as in :meth:`scatter`."""

    def close(self) -> None:
        """Close the carrier after the last exchange."""


class Collectives(Carrier):
    """Exchanges over torch among all islands of ``meeting``."""

    def __init__(self, meeting: Meeting) -> None:
        self._meeting = meeting

    def scatter(self, pieces: torch.Tensor) -> tuple[torch.Tensor, None]:
        """See :class:`.Carrier`."""
        return self._meeting.all_to_all(pieces), None

    def gather(self, own: torch.Tensor) -> tuple[torch.Tensor, None]:
        """See :class:`.Carrier`."""
        return self._meeting.all_gather(own), None


#: Messages besides exchanges, and the bytes that one may have.
_ROLES, _SIZES = ("entry", "copy", "whole"), (2**14, PART)


class IslandLink(Carrier):
    """Exchanges of this island with others, one after another. One rank of each island opens it, a collective call.

    ``most``: the most elements of an exchange. ``store``: a new store of these ranks. ``patience``: an island that sends nothing for this
    many seconds counts as gone, and the exchange fails.
    """

    observes = True

    def __init__(
        self,
        config: LossyConfig,
        name: str,
        rank: int,
        size: int,
        store: Any,
        most: int,
        patience: float,
    ) -> None:
        self.name, self.rank = f"islands {name}", rank
        self._size, self._patience = size, patience
        form = form_of(config)
        self._shard = shard = form.items(form.cut(-(-max(most, 1) // size)))
        bucket = (shard * form.dtype.itemsize, form.packet * form.dtype.itemsize)
        buckets = {phase: [bucket] for phase in SYNC_PHASES}
        codes = {phase: str(form.code) for phase in SYNC_PHASES} if isinstance(form, Codes) else {}
        alike = repr((config.sync_subset, list(range(size)), form.code if isinstance(form, Codes) else None))
        end = end_for(config)
        self._channel = end.open(
            self.name, rank, size, store, name, buckets, alike=alike, phases=SYNC_PHASES, codes=codes
        )
        self._begun = 0
        self._hurries = config.udp_deadline_seconds is not None
        self._leaving = Departures(config.udp_memory, patience)
        self._silent: list[int] = []  # places of islands that sent nothing of their latest message

    def scatter(self, pieces: torch.Tensor) -> tuple[torch.Tensor, np.ndarray]:
        """Send ``pieces`` [M, n], one to each island. Return the pieces for this island [M, n], and the arrived units.

        The second is bool[M, units]. Items that did not arrive are zero.
        """
        return self._cross(SYNC_PHASES[0], self._padded(pieces), pieces.shape[1])

    def gather(self, own: torch.Tensor) -> tuple[torch.Tensor, np.ndarray]:
        """Return [M, n]: ``own`` [n] of every island, and bool[M, units]: the units that came."""
        result = self._cross(SYNC_PHASES[1], self._padded(own[None]), len(own))
        self._begun += 1
        return result

    def _padded(self, rows: torch.Tensor) -> torch.Tensor:
        sent = torch.zeros(len(rows), self._shard, dtype=rows.dtype)
        sent[:, : rows.shape[1]] = rows
        return sent

    def _cross(self, phase: str, sent: torch.Tensor, count: int) -> tuple[torch.Tensor, np.ndarray]:
        """Send a row of ``sent`` to each island, or the only row to all of them, and get one of each."""
        received = torch.zeros(self._size, self._shard, dtype=sent.dtype)
        rows = dict(enumerate(sent if len(sent) > 1 else [sent[0]] * self._size))
        received[self.rank] = rows[self.rank]
        transfer = self._channel.post(phase, self._begun, 0, self._pointers(dict(enumerate(received))))
        transfer.keep = received, sent
        self._channel.send(phase, self._begun, 0, self._pointers(rows, self._left_out()))
        self._leaving.add(transfer, sent.numel() * sent.element_size())
        # Others may have waited as long before they send their means.
        arrived = patiently(transfer.wait, self._patience * (1.0 if phase == SYNC_PHASES[0] else 1.5))
        self._silent = np.flatnonzero(~arrived.any(axis=1)).tolist()
        return received[:, :count], arrived

    def _left_out(self) -> list[int]:
        """Make room for a message. Return the islands that get none.

        Data that a stalled island has not taken stays here. If it grows above ``--udp-memory``, silent islands get
        nothing for a while. Without a deadline every rank waits for them anyway.
        """
        while self._leaving.full:
            if self._hurries and self._silent:
                return self._silent
            self._leaving.wait()
        return []

    def _pointers(self, rows: Mapping[int, torch.Tensor], left_out: Collection[int] = ()) -> list[int | None]:
        """Return the address of each place's row; ``None`` for this island, and for those that get none."""
        there = rows.keys() - {self.rank} - set(left_out)
        return [rows[place].data_ptr() if place in there else None for place in range(self._size)]

    def counters(self) -> dict[int, dict[str, int]]:
        """Return counters of every other island."""
        return self._channel.counters()

    def rates(self) -> dict[int, dict[str, float]]:
        """Return rates towards every other island."""
        return self._channel.rates()

    def close(self) -> None:
        self._channel.close()
        self._leaving.forget()


class Buckets:
    """The messages of two islands that come and go, by their numbers. ``most``: by shard, the most elements of an exchange."""

    def __init__(self, config: LossyConfig, most: Sequence[int]) -> None:
        form = form_of(config)
        self.packet, self._lanes, self._islands = form.packet, config.lanes, config.islands
        cuts = [
            form.cut(-(-max(elements, 1) // senders)) for elements in most for senders in range(1, config.islands + 1)
        ]
        self._items = [form.items(cut) for cut in cuts]
        unit = form.packet * form.dtype.itemsize
        exchanges = [(items * form.dtype.itemsize, unit) for items in self._items for _ in range(self._lanes)]
        parts = [(size, unit) for _ in _ROLES for size in _SIZES]
        self.sizes = dict.fromkeys(SYNC_PHASES, exchanges + parts)
        #: The units that must arrive, bool[2, units], of messages by number: of all but exchanges.
        self.must = {
            len(exchanges) + number: np.ones((2, -(-size // unit)), dtype=bool)
            for number, (size, _) in enumerate(parts)
        }
        code = form.code if isinstance(form, Codes) else None
        #: Arguments of a channel, by name.
        self.named = {
            "alike": repr((config.sync_subset, code)),
            "codes": {} if code is None else dict.fromkeys(SYNC_PHASES, str(code)),
            "reported": [(phase, number) for phase in SYNC_PHASES for number in self.must],
        }

    def exchange(self, shard: int, lane: int, senders: int) -> tuple[int, int]:
        """Return the number of an exchange's message to each of so many ``senders``, and its items."""
        place = shard * self._islands + senders - 1
        return place * self._lanes + lane, self._items[place]

    def part(self, role: str, size: int) -> tuple[int, int]:
        """Return the number of the shortest message of ``role`` with room for ``size`` bytes, and its bytes."""
        which = next(number for number, most in enumerate(_SIZES) if size <= most)
        return len(self._items) * self._lanes + _ROLES.index(role) * len(_SIZES) + which, _SIZES[which]
