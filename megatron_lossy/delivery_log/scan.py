"""All records of a delivery log in order, each once."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .reader import DeliveryLogFolder, LogFile, LogRows


def scan(folder: DeliveryLogFolder) -> Iterator[tuple[LogFile, LogRows]]:
    """The rows of every exchange with the file they are in, rank by rank, in the order of iterations.

    Records of several ranks (peers of tensor parallelism, a tied embedding) come once, from the first of these ranks.
    Raises :class:`~megatron_lossy.delivery_log.reader.BadLog`.
    """
    for rank, files in folder.ranks.items():
        done = -1
        for file in files:
            for group in range(len(file.groups)):
                rows = file.read(group)
                for (iteration, _, stream), part in rows.exchanges.items():
                    if iteration > done and folder.writers[stream, int(rows.destination[part.start])][0] == rank:
                        yield file, rows[part]
            done = max(done, file.last)


def percent(share: float) -> str:
    """``share`` for people."""
    return f"{100 * share:.2f} %"


class Rates:
    """Units sent and lost on every link of one phase of one stream: integers [N, N], source by destination."""

    def __init__(self, size: int) -> None:
        self.sent = np.zeros((size, size), dtype=np.int64)
        self.lost = np.zeros((size, size), dtype=np.int64)

    def add(self, rows: LogRows) -> None:
        """Take in the rows of one exchange."""
        np.add.at(self.sent, (rows.source, rows.destination), rows.units)
        np.add.at(self.lost, (rows.source, rows.destination), rows.lost)

    @property
    def rates(self) -> np.ndarray:
        """float64[N, N]: the share of units lost; no number where nothing was sent."""
        return np.divide(self.lost, self.sent, out=np.full(self.sent.shape, np.nan), where=self.sent > 0)

    @property
    def mean(self) -> float:
        """The share of units lost over all links."""
        return float(self.lost.sum() / max(1, self.sent.sum()))
