"""The log of the exchanges of one rank of an island that comes and goes by itself: from it a run can be made again (docs/elastic.md).

``_exchanges_N.jsonl`` in the folder of the island, of rank N. Each line is written before what it tells of has any effect elsewhere, so
that it outlives a death. ``t``: iterations of the run. A line has an ``event``, or is of an ``exchange``:

- ``enters`` the run: with the checkpoint of iteration ``at``, under ``flags``, as one of ``ranks``; ``begun``: its start
- ``goes on`` at ``t`` and has made iterations until ``at``; ``gives up`` exchanges under way; ``restarts`` its rounds
- ``copied`` the state of island ``source`` as of ``made``; ``saved``; ``leaves``; all with a digest of the ``weights``
- an exchange ``begins`` among ``senders``, or with nobody (null); ``member``: whether the island uses its mean
- what arrived of the ``pieces``, and of the ``means``: for each sender 1 (all units), 0 (none), or bits in base64
- ``lost``: nothing of it is used
"""

from __future__ import annotations

import base64
import threading
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .epoch_log import EpochLog
from .rounds import Weights

#: The phases of an exchange, in the log.
PIECES, MEANS = "pieces", "means"
_DIGEST_BYTES = 16


def exchanges_file(rank: int) -> str:
    """The name of the log of ``rank``."""
    return f"_exchanges_{rank}.jsonl"


@torch.no_grad()
def digest_of(vectors: Iterable[Weights]) -> str:
    """A digest of main weights."""
    found = blake2b(digest_size=_DIGEST_BYTES)
    for vector in vectors:
        found.update(vector.read(None).cpu().numpy().tobytes())
    return found.hexdigest()


def packed(arrived: np.ndarray) -> list[int | str]:
    """bool[senders, units] in JSON."""
    return [
        int(row[0]) if row.size and (row == row[0]).all() else base64.b64encode(np.packbits(row)).decode()
        for row in arrived
    ]


def unpacked(rows: Sequence[int | str], units: int) -> np.ndarray:
    """bool[senders, units] of :func:`packed`. ``units`` may be more than there are: nothing came of these, if anything did not."""
    found = np.zeros((len(rows), units), dtype=bool)
    for place, row in enumerate(rows):
        if isinstance(row, str):
            bits = np.unpackbits(np.frombuffer(base64.b64decode(row, validate=True), dtype=np.uint8))[:units]
            found[place, : len(bits)] = bits
        else:
            found[place] = bool(row)
    return found


class ExchangeLog:
    """``folder``: of the delivery log of the island."""

    def __init__(self, folder: str | Path, rank: int) -> None:
        #: Iterations of the run, for what happens between iterations.
        self.now = 0
        self.file = EpochLog(str(folder), keeps=True, name=exchanges_file(rank))
        self._changed = threading.Lock()

    def event(self, event: str, vectors: Iterable[Weights] = (), **more: Any) -> None:
        """``event`` happens at iteration :attr:`now` of the run. ``vectors``: the weights, if their digest is kept."""
        vectors = list(vectors)
        self._add(self.now, event=event, **more, **({"weights": digest_of(vectors)} if vectors else {}))

    def begins(self, exchange: int, made: int, shard: int, member: bool, senders: Sequence[int] | None) -> None:
        """``exchange`` of ``shard`` is about to begin, after ``made`` iterations of the run."""
        there = None if senders is None else list(senders)
        self._add(made, exchange=exchange, shard=shard, what="begins", member=member, senders=there)

    def arrived(self, exchange: int, shard: int, what: str, arrived: np.ndarray) -> None:
        """bool[senders, units]: what came of the :data:`PIECES` or :data:`MEANS` of an exchange, and is about to be used."""
        self._add(self.now, exchange=exchange, shard=shard, what=what, arrived=packed(arrived))

    def lost(self, exchange: int, shard: int) -> None:
        """Nothing of ``exchange`` will be used."""
        self._add(self.now, exchange=exchange, shard=shard, what="lost")

    def _add(self, made: int, /, **record: Any) -> None:
        with self._changed:
            self.file.add({"t": made, **record})
