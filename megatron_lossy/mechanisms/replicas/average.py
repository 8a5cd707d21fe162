"""Sets the parameters of replicas to their mean, or to those of one of them.

PAFT, equation 7 and Algorithm 2, line 7, with two differences. Replicas that are not finite are left out by selection,
not by multiplication, because 0 x inf is not 0. Nothing is averaged in less than the tensors' own precision.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ...base.fetch import PendingArray
from ...run.monitor.drift import SAMPLE
from ...transport import Transfer
from ...transport.peers import Peers

#: Elements that are exchanged at once. This bounds the memory for a copy.
PIECE = 2**22
#: A tensor of at least this many elements is exchanged by itself, in place if possible. Smaller ones are copied.
ALONE = 2**18


@dataclass(frozen=True)
class Target:
    """The new value of the replicas ``written`` bool[N]: the mean over ``chosen`` bool[N], or replica ``source``.

    ``kind``: "mean"; with a source, "majority" if most replicas are equal to it, else "first".
    """

    kind: str
    chosen: np.ndarray
    written: np.ndarray
    source: int | None = None


#: Returns sums of squares over the parameters of this process, once they are here: of |mean - replica|, and of the mean replica.
#: Both are shares of a mean over replicas: added up over all processes of a stream they give that mean.
Divergence = Callable[[], tuple[float, float]]


def no_divergence() -> tuple[float, float]:
    """Return that of no replicas."""
    return 0.0, 0.0


class Piece:
    """Consecutive elements of the tensors of each local replica, on the way.

    ``runs``: for each local replica flat views of one dtype on one device, alike. ``in_place``: exchange the only run
    itself, which must not be read before the end. Divergence is then estimated from every ``stride``-th coordinate,
    scaled up.
    """

    def __init__(self, runs: Sequence[Sequence[torch.Tensor]], in_place: bool = False, stride: int = 1) -> None:
        self._runs = runs
        self.in_place = in_place and len(runs[0]) == 1
        self._stride = stride if self.in_place else 1
        self._before = [sample(replica[0], self._stride).clone() for replica in runs] if self.in_place else []
        self.result: list[torch.Tensor] = []
        self._handle = Transfer(None)
        self._divisor = 1

    def launch(self, peers: Peers, target: Target) -> None:
        """Begin the exchange."""
        self.result = [replica[0] if self.in_place else torch.cat(list(replica)) for replica in self._runs]
        if target.source is not None:
            self._handle = peers.broadcast_(self.result, target.source)
            return
        for number, tensor in zip(peers.local, self.result, strict=True):
            if not target.chosen[number]:
                tensor.zero_()
        self._handle = peers.sum_(self.result)
        self._divisor = int(target.chosen.sum())

    def wait(self) -> None:
        """End the exchange: ``result`` holds the new value for each local replica."""
        self._handle.wait()
        for tensor in self.result if self._divisor > 1 else ():
            tensor.div_(self._divisor)
        self._divisor = 1

    def differences(self, peers: Peers, target: Target) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return norms [local] of result - replica and of the result, for chosen replicas.

        Call it after :meth:`wait` and before :meth:`write`.
        """
        apart, mean = [], []
        for k, number in enumerate(peers.local):
            if not target.chosen[number]:
                continue
            result = sample(self.result[k], self._stride)
            before = self._before[k] if self.in_place else torch.cat(list(self._runs[k]))
            scale = len(self.result[k]) / max(1, len(result))
            apart.append(_norm(result - before) * scale**0.5)
            mean.append(_norm(result) * scale**0.5)
        return (torch.stack(apart), torch.stack(mean)) if apart else None

    def write(self, peers: Peers, target: Target) -> None:
        """Set the replicas to the result."""
        for k, number in enumerate(peers.local):
            if self.in_place or not target.written[number]:
                continue
            sizes = [len(run) for run in self._runs[k]]
            for run, part in zip(self._runs[k], self.result[k].split(sizes), strict=True):
                run.copy_(part)

    def state_dict(self) -> dict[str, list[torch.Tensor]]:
        """Wait for the piece under way, and return its state to save, besides the tensors themselves."""
        self.wait()
        return {"result": [] if self.in_place else self.result, "before": self._before}

    def load_state_dict(self, state: dict[str, list[torch.Tensor]]) -> None:
        """Restore :meth:`state_dict`, after the tensors have been restored."""
        self.result = [replica[0] for replica in self._runs] if self.in_place else state["result"]
        self._before = state["before"]


def stride_of(population: int) -> int:
    """Return the distance between about :data:`SAMPLE` coordinates of ``population`` that estimate the divergence."""
    return max(1, population // SAMPLE) | 1  # odd, so that it does not follow the columns of a matrix


def sample(flat: torch.Tensor, stride: int) -> torch.Tensor:
    """Return every ``stride``-th element of ``flat``, from half a stride on."""
    return flat[stride // 2 :: stride]


def pieces(replicas: Sequence[Sequence[torch.Tensor]], in_place: bool = False) -> Iterator[Piece]:
    """Yield the tensors of each local replica, which must be contiguous, in pieces of at most :data:`PIECE`."""
    flats = [[tensor.detach().view(-1) for tensor in replica] for replica in replicas]
    stride = stride_of(sum(map(len, flats[0])))
    size = ALONE if in_place else PIECE
    runs: list[list[torch.Tensor]] = [[] for _ in flats]
    held = 0
    for k, first in enumerate(flats[0]):
        alone = in_place and len(first) >= size
        if runs[0] and (alone or held + len(first) > size or _kind(runs[0][0]) != _kind(first)):
            yield Piece(runs, in_place, stride)
            runs, held = [[] for _ in flats], 0
        for start in range(0, len(first), PIECE):
            part = slice(start, start + PIECE)
            for replica, flat in zip(runs, flats, strict=True):
                replica.append(flat[k][part])
            held += len(first[part])
            if alone or held >= size:
                yield Piece(runs, in_place, stride)
                runs, held = [[] for _ in flats], 0
    if runs[0]:
        yield Piece(runs, in_place, stride)


def divergence_of(target: Target, norms: Sequence[tuple[torch.Tensor, torch.Tensor] | None]) -> Divergence:
    """Return the divergence of pieces, from their :meth:`Piece.differences`.

    The mean is at hand only if replicas were averaged. If one was copied, the distances d of the n replicas from it
    give the same information. From a replica that is equal to most, the divergence is (1/n - 1/n^2) sum d^2: exact for
    one outlier, and for several if they are orthogonal, as independent errors are. From one of n replicas that all
    differ, sum d^2 / n is 2/n times the sum of all deviations, twice as much.
    """
    kept = [pair for pair in norms if pair is not None]
    if not kept:
        return no_divergence
    n = int(target.chosen.sum())
    factor = {"mean": 1.0, "majority": 1 - 1 / n, "first": 0.5}[target.kind]
    columns = PendingArray(torch.stack([torch.stack(list(column)) for column in zip(*kept, strict=True)]))

    def known() -> tuple[float, float]:
        apart, mean = (float((column.astype(np.float64) ** 2).sum()) for column in columns.wait())
        return factor * apart / n, mean / n

    return known


def _kind(flat: torch.Tensor) -> tuple[torch.dtype, torch.device]:
    return flat.dtype, flat.device  # some optimizers have their step on the CPU, wherever their moments are


def _norm(flat: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(flat, dtype=torch.float32)
