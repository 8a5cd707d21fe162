"""``--grad-priority``: the network delivers units of large gradients in any case (SMART, section 3.1).

A network can recover the losses of a few datagrams, by parity or by sending them again. It does so for the datagrams
that matter most. The sender chooses these from the values that it sends, on their device and without a wait. Shapes and numbers
depend on the cut of a bucket alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from ...base.exchange import BucketUnits, Exchange, Lost
from ...base.fetch import PendingArray
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

    ``units``: how the bucket is cut. ``rank``: the sender's index among the destinations. The host learns of a choice when
    it asks.
    """

    def __init__(self, protection: Protection, units: BucketUnits, rank: int) -> None:
        self.protection = protection
        self.units = units
        self.rank = rank
        #: bool[N, count], by destination: units that always have high priority, whatever their values; None for none.
        self.always: np.ndarray | None = None
        self._told = SentUnits()
        self._sums = np.zeros((0, units.count))
        #: Importance and choice of the latest exchange, not in its record yet.
        self._untold: tuple[PendingArray, PendingArray] | None = None
        self._unsettled: Lost | None = None  # units that the network loses, chosen or not

    @property
    def told(self) -> SentUnits:
        """The record of the latest exchange."""
        if self._untold is not None:
            sizes, high = (values.wait() for values in self._untold)
            self._untold = None
            crossing = self._crossing(len(sizes))
            self._sums = np.where(np.isfinite(sizes), sizes, 0.0) * lengths(self.units)
            self._told = SentUnits(
                units=int(crossing.sum()) * self.units.count,
                high=int(high.sum()),
                payload=float(self._sums[crossing].sum()),
            )
        return self._told

    def choose(self, buffer: torch.Tensor, exchange: Exchange) -> PendingArray:
        """Return bool[N, count]: the units of ``buffer`` [N * shard] that have high priority."""
        means = unit_means(buffer, self.units)
        self._high = self._chosen(buffer, means, exchange)
        self._untold = PendingArray(means), PendingArray(self._high)
        return self._untold[1]

    def _crossing(self, size: int) -> np.ndarray:
        crossing = np.ones(size, dtype=bool)
        if not self.protection.own:
            crossing[self.rank] = False
        return crossing

    def spare(self, buffer: torch.Tensor, lost: Lost, exchange: Exchange) -> Lost:
        """Return the units of ``buffer`` [N * shard] that are lost for good, if the network loses ``lost``.

        They are all of ``lost`` but for the spared ones, until :meth:`settle` has them on the host.
        """
        self._high_units, self._unsettled = self.choose(buffer, exchange), lost
        return Lost(lost.mask, self._high)

    def settle(self) -> Lost | None:
        """Return the units lost for good, as :meth:`spare` decided, and their record; ``None`` if known already."""
        lost, self._unsettled = self._unsettled, None
        if lost is None:
            return None
        final = lost.mask & ~self._high_units.wait()
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

    def _sample(self, buffer: torch.Tensor, rows: np.ndarray, exchange: Exchange) -> np.ndarray:
        """Return int64[SAMPLE]: places in ``buffer`` of drawn values for the destinations ``rows``."""
        assert self.protection.draw is not None
        first = self.units.first * (len(buffer) // self.units.shard) + int(rows[0])
        drawn = self.protection.draw(exchange, self.rank, first)
        places = (drawn * (len(rows) * self.units.shard)).astype(np.int64)
        return rows[places // self.units.shard] * self.units.shard + places % self.units.shard

    def _chosen(self, buffer: torch.Tensor, sizes: torch.Tensor, exchange: Exchange) -> torch.Tensor:
        """Return bool[N, count], on their device, of the importance ``sizes`` float32[N, count] of units."""
        crossing = self._crossing(len(sizes))
        rows = np.flatnonzero(crossing)
        keys = keys_of(sizes, None if crossing.all() else self.rank)
        # A lost infinity in a residual would be added in each step, and each step would be rejected.
        high = keys == -1
        if self.always is not None:
            high |= to_device(self.always & crossing[:, None], sizes.device)
        if self.protection.kind == "packet-mean":
            units = len(rows) * self.units.count
            choose_top_(high, keys, int(self.protection.fraction * units + 0.5))
        elif self.protection.kind != "none" and len(rows):
            places = to_device(self._sample(buffer, rows, exchange), buffer.device)
            high |= keys >= quantile(buffer[places].abs().float(), 1 - self.protection.fraction)
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


def keys_of(sizes: torch.Tensor, left_out: int | None) -> torch.Tensor:
    """Return ``sizes`` float32[N, count], none below 0; -1 for those that are not finite, -2 in row ``left_out``."""
    result = sizes.nan_to_num(nan=-1.0, posinf=-1.0)
    if left_out is not None:
        result[left_out].fill_(-2.0)
    return result


def choose_top_(chosen: torch.Tensor, keys: torch.Tensor, count: int) -> None:
    """Set the ``count`` largest of ``keys`` in ``chosen`` bool, both of one shape; of equal ones the first."""
    if count:
        chosen.view(-1).index_fill_(0, keys.flatten().argsort(descending=True, stable=True)[:count], True)


def quantile(values: torch.Tensor, share: float) -> torch.Tensor:
    """Return float32, without dimensions: ``np.quantile`` of finite ``values`` float32[k]; infinity without any."""
    finite = values.isfinite()
    ordered = values.masked_fill(~finite, torch.inf).sort().values
    count = finite.sum(dim=0, keepdim=True)
    low, high, weight, above = to_device(_mixes(len(values), share), values.device).index_select(1, count)
    low, high = ordered.index_select(0, low.long()), ordered.index_select(0, high.long())
    step = (high - low) * weight
    return torch.where(count > 0, torch.where(above > 0, high - step, low + step), torch.inf)[0]


@functools.lru_cache(maxsize=8)
def _mixes(most: int, share: float) -> np.ndarray:
    """Return float32[4, most + 1]: how to mix two of 0 to ``most`` ordered values, which depends on their number alone.

    By that number: the places of the two values around the quantile, its distance from one of them in units of theirs,
    and whether from the second. In float64, as NumPy works it out; not every device has float64.
    """
    last = np.maximum(np.arange(most + 1) - 1, 0)
    place = last * share
    low = np.floor(place)
    distance = place - low
    above = distance >= 0.5
    return np.stack([low, np.minimum(low + 1, last), np.where(above, 1 - distance, distance), above]).astype(np.float32)
