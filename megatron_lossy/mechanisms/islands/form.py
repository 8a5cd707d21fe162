"""The form of values that cross between islands (``--sync-dtype``): numbers of a dtype, or codes with their scales; and rests of codes.

A shard of R rows crosses as rows of a message, of items of :attr:`Form.dtype`. Units of loss are runs of whole items, so that every
packet can be read by itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

import torch

from ...base import theory
from ...base.coding.blocks import BlockCode
from ...base.exchange import BucketUnits, cut
from ...config import LossyConfig
from .vector import Places, read_at


class Form(ABC):
    """``dtype``: of the items of a message. ``packet``: items of a packet. ``blank``: in all items, it says that nothing is there."""

    #: Whether values cross as they are.
    exact = False
    dtype: torch.dtype
    packet: int
    blank: float

    def __init__(self, config: LossyConfig) -> None:
        self._unit, self._packet_bytes = config.loss_unit, config.packet_bytes

    def cut(self, shard: int) -> BucketUnits:
        """Return the units of a shard of so many elements."""
        [units], _ = cut([shard], [self.dtype.itemsize], self._unit, self._packet_bytes, [self._elements])
        return units

    @property
    def _elements(self) -> int | None:
        """Elements of a packet; ``None``: as many as items."""
        return None

    @abstractmethod
    def items(self, units: BucketUnits) -> int:
        """Return items of a shard that is cut as ``units``."""

    def bytes_of(self, shard: int) -> int:
        """Return bytes of a shard of so many elements."""
        return self.items(self.cut(shard)) * self.dtype.itemsize

    @abstractmethod
    def encode(self, values: torch.Tensor, units: BucketUnits, rows: torch.Tensor) -> None:
        """Put ``values`` float32[R, shard] into ``rows`` [R, items]."""

    @abstractmethod
    def decode(self, rows: torch.Tensor, units: BucketUnits) -> torch.Tensor:
        """Return float32[R, shard]: the values of ``rows`` [R, items]."""

    @abstractmethod
    def round_(self, values: torch.Tensor, units: BucketUnits) -> torch.Tensor:
        """Replace ``values`` float32[R, shard] by those that arrive, and return them."""


class Plain(Form):
    """Numbers of ``dtype``."""

    blank = float("nan")

    def __init__(self, config: LossyConfig, dtype: torch.dtype) -> None:
        super().__init__(config)
        self.dtype, self.packet = dtype, config.packet_bytes // dtype.itemsize
        self.exact = dtype == torch.float32

    def items(self, units: BucketUnits) -> int:
        return units.shard

    def encode(self, values: torch.Tensor, units: BucketUnits, rows: torch.Tensor) -> None:
        rows.copy_(values)

    def decode(self, rows: torch.Tensor, units: BucketUnits) -> torch.Tensor:
        return rows.float()

    def round_(self, values: torch.Tensor, units: BucketUnits) -> torch.Tensor:
        return values.copy_(values.to(self.dtype))


class Codes(Form):
    """Whole numbers of ``code`` to nearest, in blocks that share a scale."""

    dtype = torch.uint8
    blank = 255  # scales of NaN

    def __init__(self, config: LossyConfig, code: BlockCode) -> None:
        super().__init__(config)
        self.code = code
        self.packet = code.size(code.elements(config.packet_bytes))

    @property
    def _elements(self) -> int:
        return self.code.elements(self._packet_bytes)

    def items(self, units: BucketUnits) -> int:
        return self.code.payloads(units).shard

    def encode(self, values: torch.Tensor, units: BucketUnits, rows: torch.Tensor) -> None:
        rows.copy_(self.code.encode(values, units))

    def decode(self, rows: torch.Tensor, units: BucketUnits) -> torch.Tensor:
        values = torch.empty(len(rows), units.shard, device=rows.device)
        return self.code.decode(rows, units, values)

    def round_(self, values: torch.Tensor, units: BucketUnits) -> torch.Tensor:
        return self.code.round_(values, units)


def form_of(config: LossyConfig) -> Form:
    """Return the form of ``--sync-dtype``."""
    if config.sync_bits:
        return Codes(config, BlockCode(config.sync_bits, config.wire_block))
    return Plain(config, torch.float32 if config.sync_dtype == "fp32" else torch.bfloat16)


def bytes_sent(config: LossyConfig, count: int, among: tuple[int, int] | None = None) -> float:
    """Return the bytes that a sender sends in an exchange of ``count`` elements.

    ``among``: the numbers of senders and receivers; ``None``: all islands are both.
    """
    senders, receivers = among or (config.islands, config.islands)
    shard = -(-count // senders)
    return theory.bytes_sent(count, senders, form_of(config).bytes_of(shard) / shard, receivers)


class Rest:
    """The rests of means of the islands of this process, numbered from 0: float32[size] each, on the device that makes means.

    An owner keeps, for the next mean of the same element, what codes take from one: with the rest r of an element, m = Q(mean + r)
    crosses, and r becomes mean + r - m. So the means of an element that crossed add up to those before rounding, but for one rounding,
    however many they are.
    """

    def __init__(self) -> None:
        self._rows: dict[int, torch.Tensor] = {}

    def crossing(
        self,
        island: int,
        place: int,
        places: Places | None,
        count: int,
        mean: torch.Tensor,
        averaged: torch.Tensor | None,
        crosses: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """Return m [shard] of the ``mean`` [shard] that ``island`` owns, of ``count`` elements at ``places``.

        ``place``: the number of its shard. ``averaged`` bool[shard]: the elements with a sender; ``None``: all; the others are NaN.
        ``crosses``: makes Q(x) [shard] of x.
        """
        size = count if places is None else places.size
        row = self._rows.get(island)
        row = self._rows[island] = torch.zeros(size, device=mean.device) if row is None else row.to(mean.device)
        chosen = read_at(row, places)
        own = chosen[place * len(mean) : (place + 1) * len(mean)]  # the last shard may be shorter
        whole = mean.clone()
        whole[: len(own)] += own
        if averaged is not None:
            whole.masked_fill_(~averaged, torch.nan)
        crossed = crosses(whole)
        left = (whole - crossed)[: len(own)]
        own.copy_(torch.where(left.isfinite(), left, own))
        if places is not None:
            places.write(row, chosen)
        return crossed

    def forget(self, island: int) -> None:
        """Let ``island`` begin again."""
        self._rows.pop(island, None)

    def state_dict(self) -> dict[int, torch.Tensor]:
        """Return the rests, by island."""
        return dict(self._rows)

    def load_state_dict(self, state: Mapping[int, torch.Tensor]) -> None:
        """Restore :meth:`state_dict`."""
        self._rows = {island: row.clone() for island, row in state.items()}
