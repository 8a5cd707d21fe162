"""``--grad-priority``: the network delivers units of large gradients in any case (SMART, section 3.1).

``--param-priority`` does so for the units of parameters that have changed most.

A network can recover the losses of a few datagrams, by parity or by sending them again. It does so for the datagrams
that matter most. The sender chooses these from the values that it sends.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ...exchange import BucketUnits, Exchange, Lost
from ...recovery.base import Told
from ...recovery.rows import unit_views

if TYPE_CHECKING:
    import torch

_CACHED_BYTES = 2**18
#: Values that a quantile is taken from.
SAMPLE = 1000
#: Returns numbers in [0, 1) that depend on an exchange, a bucket and a sender alone.
Draw = Callable[[Exchange, int, int], np.ndarray]


@dataclass(frozen=True)
class Protection:
    """The rule that gives units high priority.

    ``kind``: ``packet-mean``, ``element-quantile``, or ``none``; with ``none`` only units with a value that is not
    finite have high priority. ``fraction``: K, in [0, 1], a share of what a rank sends of a bucket. ``own``: whether a
    rank's units for itself can be lost too. ``draw``: draws :data:`SAMPLE` numbers for the quantile.
    """

    kind: str = "none"
    fraction: float = 0.0
    own: bool = False
    draw: Draw | None = None


class Priority:
    """Chooses the units of one bucket that its sender wants delivered.

    ``units``: how the bucket is cut. ``rank``: the sender's index among the destinations.
    """

    def __init__(self, protection: Protection, units: BucketUnits, rank: int) -> None:
        self.protection = protection
        self.units = units
        self.rank = rank
        #: bool[N, count], by destination: units that always have high priority, whatever their values; None for none.
        self.always: np.ndarray | None = None
        #: Of the latest exchange.
        self.told = Told()
        self._sums = np.zeros((0, units.count))

    def choose(self, buffer: torch.Tensor, exchange: Exchange) -> np.ndarray:
        """bool[N, count]: the units of ``buffer`` [N * shard] that have high priority."""
        sizes = importance(buffer, self.units)
        crossing = self._crossing(len(sizes))
        high = self._high(buffer, sizes, crossing, exchange)
        self._sums = np.where(np.isfinite(sizes), sizes, 0.0) * lengths(self.units)
        self.told = Told(
            units=int(crossing.sum()) * self.units.count,
            high=int(high.sum()),
            payload=float(self._sums[crossing].sum()),
        )
        return high

    def _crossing(self, size: int) -> np.ndarray:
        crossing = np.ones(size, dtype=bool)
        if not self.protection.own:
            crossing[self.rank] = False
        return crossing

    def spare(self, buffer: torch.Tensor, lost: Lost, exchange: Exchange) -> Lost:
        """The units of ``buffer`` [N * shard] that are lost for good, if the network loses ``lost``."""
        high = self.choose(buffer, exchange)
        final = lost.mask & ~high
        self.told.lost = int(lost.mask.sum())
        self.told.recovered = self.told.lost - int(final.sum())
        self.tell(Lost(final))
        return Lost(final)

    def take_told(self) -> Told:
        """The record of the latest exchange, once; an empty record if there was none since."""
        told, self.told = self.told, Told()
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
        """The (1 - K) quantile of |values|, over a sample of the values for the destinations ``rows``."""
        import torch

        assert self.protection.draw is not None
        first = self.units.first * (len(buffer) // self.units.shard) + int(rows[0])
        drawn = self.protection.draw(exchange, self.rank, first)
        places = (drawn * (len(rows) * self.units.shard)).astype(np.int64)
        places = rows[places // self.units.shard] * self.units.shard + places % self.units.shard
        values = buffer[torch.from_numpy(places).to(buffer.device)].abs().float().cpu().numpy()
        values = values[np.isfinite(values)]
        return float(np.quantile(values, 1 - self.protection.fraction)) if len(values) else np.inf


class ParamPriority:
    """Chooses the units of one bucket that an owner wants delivered to all ranks.

    A replica lacks at most the change of a unit since the unit was last delivered for certain, whatever was lost
    meanwhile. The mean of the absolute values of this change is the unit's importance, so that no unit waits for ever.
    The mean of the absolute values of the unit itself would choose the same units in every step. ``units``: how the
    bucket is cut. ``fraction``: K, in [0, 1]. The object keeps a copy of the owner's shard.
    """

    def __init__(self, fraction: float, units: BucketUnits) -> None:
        self.fraction = fraction
        self.units = units
        self.restart()

    def restart(self) -> None:
        """Begin again with replicas that are all equal."""
        self._certain: torch.Tensor | None = None  # the values of each unit when it last arrived for certain
        self._step: int | None = None
        self._chosen = np.zeros(self.units.count, dtype=bool)

    def choose(self, sent: torch.Tensor, step: int) -> np.ndarray:
        """bool[count]: the units of ``sent`` [shard], parameters of ``step``, that must arrive; the same for each call.

        In the first step after replicas were equal no unit must arrive: no change is known yet.
        """
        import torch

        if step == self._step:
            return self._chosen
        self._step = step
        if self._certain is None:
            self._certain = sent.detach().clone()
            self._chosen = np.zeros(self.units.count, dtype=bool)
            return self._chosen
        with torch.no_grad():
            sizes = importance(sent.float() - self._certain.float(), self.units)[0]
            self._chosen = ~np.isfinite(sizes) | top(sizes, self.fraction)
            parts = zip(unit_views(sent, self.units), unit_views(self._certain, self.units), strict=True)
            for (now, numbers), (certain, _) in parts:
                mask = torch.from_numpy(self._chosen[None, numbers, None]).to(sent.device)
                certain.copy_(now.where(mask, certain))
        return self._chosen

    def state_dict(self) -> dict[str, Any]:
        """The state that must be saved for a run to continue bit for bit."""
        import torch

        certain = None if self._certain is None else self._certain.clone()
        return {"certain": certain, "step": self._step, "chosen": torch.from_numpy(self._chosen.copy())}

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """Restore :meth:`state_dict`."""
        certain = state["certain"]
        self._certain = None if certain is None else certain.to(device, copy=True)
        self._step, self._chosen = state["step"], state["chosen"].cpu().numpy()


def lengths(units: BucketUnits) -> np.ndarray:
    """int64[count]: elements of each unit."""
    return np.concatenate([np.full(numbers.stop - numbers.start, elements) for numbers, elements in units.parts])


def importance(buffer: torch.Tensor, units: BucketUnits) -> np.ndarray:
    """float32[N, count]: the mean of |values| of each unit of ``buffer`` [N * shard] (SMART, equation 1).

    Sums are taken in float32. The mean is not finite if a value is not.
    """
    import torch

    sums = [_sums(view).div_(view.shape[2]) for view, _ in unit_views(buffer, units)]
    return torch.cat(sums, dim=1).cpu().numpy()


def _sums(view: torch.Tensor) -> torch.Tensor:
    """float32[N, units]: sums of |values| of ``view`` [N, units, elements]."""
    import torch

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


def top(sizes: np.ndarray, fraction: float) -> np.ndarray:
    """bool, of the shape of ``sizes``: the largest share ``fraction`` of finite ones; of equal ones the first."""
    flat = np.where(np.isfinite(sizes), sizes, -1.0).ravel()
    count = int(fraction * flat.size + 0.5)
    chosen = np.zeros(flat.size, dtype=bool)
    if count:
        least = np.partition(flat, flat.size - count)[flat.size - count]
        chosen = flat > least
        chosen[np.flatnonzero(flat == least)[: count - int(chosen.sum())]] = True
    return chosen.reshape(sizes.shape)
