"""``--grad-priority``: the network delivers units of large gradients in any case (SMART, section 3.1).

A network can recover the losses of a few datagrams, by parity or by sending them again. It does so for the datagrams
that matter most. The sender chooses these from the values that it sends.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...base.exchange import BucketUnits, Exchange, Lost
from ...base.fetch import PendingArray, at_hand, is_here
from ...recovery.base import SentUnits
from ...recovery.rows import to_device, unit_views

_CACHED_BYTES = 2**18
#: Values that a quantile is taken from.
SAMPLE = 1000
#: Returns numbers in [0, 1) that depend on an exchange, a bucket and a sender alone.
Draw = Callable[[Exchange, int, int], np.ndarray]


@dataclass(frozen=True)
class Protection:
    """The rule that gives units high priority.

    ``kind``: ``packet-mean``, ``element-quantile``, or ``none``; with ``none`` only units with a value that is not
    finite have high priority. ``fraction``: K, in [0, 1], a share of the units that a rank sends of a bucket. ``own``:
    whether a rank's units for itself can be lost too. ``draw``: draws :data:`SAMPLE` numbers for the quantile.
    """

    kind: str = "none"
    fraction: float = 0.0
    own: bool = False
    draw: Draw | None = None


class Priority:
    """Chooses the units of one bucket that its sender wants delivered.

    ``units``: how the bucket is cut. ``rank``: the sender's index among the destinations. On an accelerator the choice is
    made there, and the host learns of it when it asks.
    """

    def __init__(self, protection: Protection, units: BucketUnits, rank: int) -> None:
        self.protection = protection
        self.units = units
        self.rank = rank
        #: bool[N, count], by destination: units that always have high priority, whatever their values; None for none.
        self.always: np.ndarray | None = None
        self._told = SentUnits()
        self._sums = np.zeros((0, units.count))
        self._untold: tuple[Any, Any] | None = (
            None  # importance and choice of the latest exchange, not in its record yet
        )
        self._unsettled: Lost | None = None  # units that the network loses, chosen or not

    @property
    def told(self) -> SentUnits:
        """The record of the latest exchange."""
        if self._untold is not None:
            sizes, high = map(at_hand, self._untold)
            self._untold = None
            crossing = self._crossing(len(sizes))
            self._sums = np.where(np.isfinite(sizes), sizes, 0.0) * lengths(self.units)
            self._told = SentUnits(
                units=int(crossing.sum()) * self.units.count,
                high=int(high.sum()),
                payload=float(self._sums[crossing].sum()),
            )
        return self._told

    def choose(self, buffer: torch.Tensor, exchange: Exchange) -> np.ndarray | PendingArray:
        """Return bool[N, count]: the units of ``buffer`` [N * shard] that have high priority."""
        means = unit_means(buffer, self.units)
        if is_here(means):  # NumPy can choose among them; elsewhere on_device does
            sizes = means.numpy()
            high = self._high(buffer, sizes, self._crossing(len(sizes)), exchange)
            self._untold = sizes, high
            return high
        self._there = self._high_there(buffer, means, exchange)
        high = PendingArray(self._there)
        self._untold = PendingArray(means), high
        return high

    def _crossing(self, size: int) -> np.ndarray:
        crossing = np.ones(size, dtype=bool)
        if not self.protection.own:
            crossing[self.rank] = False
        return crossing

    def spare(self, buffer: torch.Tensor, lost: Lost, exchange: Exchange) -> Lost:
        """Return the units of ``buffer`` [N * shard] that are lost for good, if the network loses ``lost``.

        On an accelerator they are all of ``lost`` but for the spared ones, until :meth:`settle` has them on the host.
        """
        self._high_here, self._unsettled = self.choose(buffer, exchange), lost
        if isinstance(self._high_here, PendingArray):
            return Lost(lost.mask, self._there)
        final = self.settle()
        assert final is not None
        return final

    def settle(self) -> Lost | None:
        """Return the units lost for good, as :meth:`spare` decided, and their record; ``None`` if known already."""
        lost, self._unsettled = self._unsettled, None
        if lost is None:
            return None
        final = lost.mask & ~at_hand(self._high_here)
        self.told.lost = int(lost.mask.sum())
        self.told.recovered = self.told.lost - int(final.sum())
        self.tell(Lost(final))
        return Lost(final)

    def take_told(self) -> SentUnits:
        """Return the record of the latest exchange, once; an empty record if there was none since."""
        told, self._told = self.told, SentUnits()
        return told

    def tell(self, final: Lost) -> None:
        """Record ``final``: the units lost for good among those that :meth:`choose` saw last."""
        self.told.left = int(final.mask.sum())
        self.told.residual = float(self._sums[final.mask].sum())

    def _high(self, buffer: torch.Tensor, sizes: np.ndarray, crossing: np.ndarray, exchange: Exchange) -> np.ndarray:
        # A lost infinity in a residual would be added in each step, and each step would be rejected.
        high = ~np.isfinite(sizes)
        if self.always is not None:
            high |= self.always
        high &= crossing[:, None]
        rows = np.flatnonzero(crossing)
        if not len(rows) or self.protection.kind == "none":
            return high
        if self.protection.kind == "packet-mean":
            high[rows] |= top(sizes[rows], self.protection.fraction)
        else:
            high[rows] |= sizes[rows] >= self._quantile(buffer, rows, exchange)
        return high

    def _quantile(self, buffer: torch.Tensor, rows: np.ndarray, exchange: Exchange) -> float:
        """Return the (1 - K) quantile of |values|, over a sample of the values for the destinations ``rows``."""
        values = buffer[torch.from_numpy(self._sample(buffer, rows, exchange))].abs().float().numpy()
        values = values[np.isfinite(values)]
        return float(np.quantile(values, 1 - self.protection.fraction)) if len(values) else np.inf

    def _sample(self, buffer: torch.Tensor, rows: np.ndarray, exchange: Exchange) -> np.ndarray:
        """Return int64[SAMPLE]: places in ``buffer`` of drawn values for the destinations ``rows``."""
        assert self.protection.draw is not None
        first = self.units.first * (len(buffer) // self.units.shard) + int(rows[0])
        drawn = self.protection.draw(exchange, self.rank, first)
        places = (drawn * (len(rows) * self.units.shard)).astype(np.int64)
        return rows[places // self.units.shard] * self.units.shard + places % self.units.shard

    def _high_there(self, buffer: torch.Tensor, sizes: torch.Tensor, exchange: Exchange) -> torch.Tensor:
        """Return :meth:`_high` on the device of ``sizes`` float32[N, count]."""
        from . import on_device

        crossing = self._crossing(len(sizes))
        rows = np.flatnonzero(crossing)
        keys = on_device.keys(sizes, None if crossing.all() else self.rank)
        high = keys == -1
        if self.always is not None:
            high |= to_device(self.always & crossing[:, None], sizes.device)
        if self.protection.kind == "packet-mean":
            on_device.choose_top_(high, keys, share_of(len(rows) * self.units.count, self.protection.fraction))
        elif self.protection.kind != "none" and len(rows):
            places = to_device(self._sample(buffer, rows, exchange), buffer.device)
            high |= keys >= on_device.quantile(buffer[places].abs().float(), 1 - self.protection.fraction)
        return high


def lengths(units: BucketUnits) -> np.ndarray:
    """Return int64[count]: elements of each unit."""
    return np.concatenate([np.full(numbers.stop - numbers.start, elements) for numbers, elements in units.parts])


def unit_means(buffer: torch.Tensor, units: BucketUnits) -> torch.Tensor:
    """Return float32[N, count]: the mean of |values| of each unit of ``buffer`` [N * shard] (SMART, equation 1).

    Sums are taken in float32. The mean is not finite if a value is not.
    """
    return torch.cat([_sums(view).div_(view.shape[2]) for view, _ in unit_views(buffer, units)], dim=1)


def _sums(view: torch.Tensor) -> torch.Tensor:
    """Return float32[N, units]: sums of |values| of ``view`` [N, units, elements]."""
    # On a device the loop would hold |values| of a whole bucket; on a CPU this norm adds serially, which is slower.
    if view.device.type != "cpu":
        return torch.linalg.vector_norm(view, ord=1, dim=-1, dtype=torch.float32)
    # A piece holds as many units as fit in a core's cache: the values are read once, and nothing is written back.
    _, units, elements = view.shape
    most = max(1, _CACHED_BYTES // (elements * view.element_size()))
    result = view.new_empty(view.shape[:2], dtype=torch.float32)
    for shard, sums in zip(view, result, strict=True):
        for first in range(0, units, most):
            part = shard[first : first + most]
            torch.sum(part.abs(), dim=-1, dtype=torch.float32, out=sums[first : first + most])
    return result


def share_of(count: int, fraction: float) -> int:
    """Return ``fraction`` of ``count``, rounded."""
    return int(fraction * count + 0.5)


def top(sizes: np.ndarray, fraction: float) -> np.ndarray:
    """Return bool, of the shape of ``sizes``: the largest share ``fraction`` of finite ones, first of equal ones."""
    flat = np.where(np.isfinite(sizes), sizes, -1.0).ravel()
    count = share_of(flat.size, fraction)
    chosen = np.zeros(flat.size, dtype=bool)
    if count:
        least = np.partition(flat, flat.size - count)[flat.size - count]
        chosen = flat > least
        chosen[np.flatnonzero(flat == least)[: count - int(chosen.sum())]] = True
    return chosen.reshape(sizes.shape)
