"""Exchanges between islands as datagrams, or over streams. In both halves, a unit that does not arrive in time is lost, and reported.

All messages have the length of the longest exchange; shorter ones end in zeros.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

import numpy as np
import torch

from ...config import LossyConfig
from ...transport.ends import end_for
from ...transport.leaving import Leaving, PeerLost, patiently
from .carrying import Carrier
from .flags import SYNC_PHASES
from .form import SIGNAL, Codes, form_of

#: Seconds between two looks at who is silent.
_LOOKS = 0.25


class IslandLink(Carrier):
    """Exchanges of this island with others, one after another. One rank of each island opens it, a collective call.

    ``rank`` of ``size``: the place of this island among those that open it. ``senders``: the places of those whose weights are averaged;
    default all; the others get means alone. ``called``: by place, the name of an island in messages.

    ``most``: the most elements of an exchange. ``store``: a new store of these ranks. ``patience``: an island that sends nothing for this many
    seconds counts as gone. Then the exchange fails, or, with ``loses``, the others do without that island from then on; it is called, on
    the thread of the exchange, with its place, why, the seconds that it was waited for, and whether it has left by itself. There one that lives, and is only late, is waited
    for half as long again, and twice as long for means.
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
        *,
        senders: Sequence[int] | None = None,
        called: Sequence[int] | None = None,
        engine: Any = None,
        loses: Callable[[int, str, float, bool], None] | None = None,
    ) -> None:
        self.name, self.rank = f"islands {name}", rank
        self._size, self._patience = size, patience
        self._senders = list(range(size) if senders is None else senders)
        form = form_of(config)
        self._shard = shard = form.items(form.cut(-(-most // len(self._senders)))) + SIGNAL
        self._packet = form.packet
        bucket = (shard * form.dtype.itemsize, self._packet * form.dtype.itemsize)
        buckets = {phase: [bucket] for phase in SYNC_PHASES}
        codes = {phase: str(form.code) for phase in SYNC_PHASES} if isinstance(form, Codes) else {}
        alike = repr((config.sync_subset, self._senders, form.code if isinstance(form, Codes) else None))
        engine = engine or end_for(config)
        self._loses, self._without = loses, set[int]()
        self._channel = engine.open(
            self.name,
            rank,
            size,
            store,
            name,
            buckets,
            alike=alike,
            phases=SYNC_PHASES,
            called=called,
            codes=codes,
            bears=loses is not None,
        )
        self._begun = 0
        self._hurries = config.udp_deadline_seconds is not None
        self._leaving = Leaving(config.udp_memory, patience)
        self._silent: list[int] = []  # places of islands that sent nothing of their latest message

    def scatter(self, pieces: torch.Tensor) -> tuple[torch.Tensor, np.ndarray]:
        """Send ``pieces`` [P, n], one to each sender. Returns the pieces for this island [P, n], and the arrived units.

        The second is bool[P, units]. Items that did not arrive are zero. Nothing comes to who does not send.
        """
        if self.rank not in self._senders:
            return torch.zeros_like(pieces), np.zeros((len(pieces), -(-pieces.shape[1] // self._packet)), dtype=bool)
        return self._cross(SYNC_PHASES[0], self._padded(pieces), self._senders, pieces.shape[1])

    def gather(self, own: torch.Tensor) -> tuple[torch.Tensor, np.ndarray]:
        """[P, n]: ``own`` [n] of every sender, and bool[P, units]: the units that came."""
        result = self._cross(SYNC_PHASES[1], self._padded(own[None]), range(self._size), len(own))
        self._begun += 1
        return result

    def _padded(self, rows: torch.Tensor) -> torch.Tensor:
        sent = torch.zeros(len(rows), self._shard, dtype=rows.dtype)
        sent[:, : rows.shape[1]] = rows
        return sent

    def _cross(
        self, phase: str, sent: torch.Tensor, receivers: Sequence[int], count: int
    ) -> tuple[torch.Tensor, np.ndarray]:
        """Send a row of ``sent`` to each of ``receivers``, or the only row to all of them, and get one of each sender."""
        received = torch.zeros(len(self._senders), self._shard, dtype=sent.dtype)
        sends = self.rank in self._senders
        rows = dict(zip(receivers, sent if len(sent) > 1 else [sent[0]] * len(receivers)))
        if sends:
            received[self._senders.index(self.rank)] = rows[self.rank]
        transfer = self._channel.post(phase, self._begun, 0, self._pointers(dict(zip(self._senders, received))))
        transfer.keep = received, sent
        if sends:
            self._channel.send(phase, self._begun, 0, self._pointers(rows, self._left_out()))
            self._leaving.add(transfer, sent.numel() * sent.element_size())
        arrived = self._arrived(transfer, phase)[self._senders]
        silent = np.flatnonzero(~arrived.any(axis=1)).tolist()
        self._silent = [self._senders[place] for place in silent]
        return received[:, :count], arrived

    def _arrived(self, transfer: Any, phase: str) -> np.ndarray:
        """bool[N, units]: the units that arrived. Raises :class:`PeerLost`."""
        # Others may have waited as long before they send their means.
        patience = self._patience * (1.0 if phase == SYNC_PHASES[0] else 1.5)
        began = time.monotonic()
        try:
            if self._loses is None:
                return patiently(transfer.wait, patience)
            # Who lives may wait for one that does not, and as long as this island has.
            arrived = self._while_they_live(transfer, patience + self._patience / 2)
            # A deadline may end each exchange before the patience does. Once is not enough: this process may have stood still.
            for place in self._channel.silent_ranks(self._patience):
                if place in self._silent and not arrived[place].any():
                    self._channel.lose(place)
            return arrived
        except PeerLost:
            if self._loses is None:
                raise
            while (place := transfer.missing()) is not None:
                self._channel.lose(place)
            return transfer.wait(patience)
        finally:
            if self._loses is not None:
                for place, why in self._channel.lost_ranks().items():
                    if place not in self._without:
                        self._without.add(place)
                        self._loses(place, why, time.monotonic() - began, self._channel.has_closed(place))

    def _while_they_live(self, transfer: Any, seconds: float) -> np.ndarray:
        """:meth:`Transfer.wait`, without islands that are silent: of which no datagram comes any more, whatever they wait for.

        Raises :class:`PeerLost` after ``seconds``.
        """
        waited = 0.0
        while waited < seconds:
            began = time.monotonic()
            try:
                return transfer.wait(min(_LOOKS, seconds - waited))
            except (TimeoutError, FutureTimeout):
                took = time.monotonic() - began
            waited += min(took, _LOOKS)
            # This process may have stood still itself: then it hears the others first.
            if waited >= 2 * _LOOKS and took < 2 * _LOOKS:
                for place in self._channel.silent_ranks(self._patience):
                    self._channel.lose(place)
        raise PeerLost(f"{self.name}: nothing for {waited:.0f} s")

    def do_without(self, place: int) -> None:
        """See :class:`.Carrier`."""
        self._without.add(place)
        self._channel.lose(place)

    def _left_out(self) -> list[int]:
        """Make room for a message. Returns the islands that get none.

        Data that a stalled island has not taken stays here. If it grows above ``--udp-memory``, silent islands get
        nothing for a while. Without a deadline everybody waits for them anyway.
        """
        while self._leaving.full:
            if self._hurries and self._silent:
                return self._silent
            self._leaving.wait()
        return []

    def _pointers(self, rows: Mapping[int, torch.Tensor], left_out: Collection[int] = ()) -> list[int | None]:
        """By place, where its row is; ``None`` for this island, and for who gets none."""
        there = rows.keys() - {self.rank} - set(left_out)
        return [rows[place].data_ptr() if place in there else None for place in range(self._size)]

    def counters(self) -> dict[int, dict[str, int]]:
        """Counters of every other island."""
        return self._channel.counters()

    def rates(self) -> dict[int, dict[str, float]]:
        """Rates towards every other island."""
        return self._channel.rates()

    def close(self) -> None:
        self._channel.close()
        self._leaving.forget()
