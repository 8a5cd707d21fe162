"""The form of what crosses between islands (``--sync-dtype``): numbers of a dtype, or codes with their scales beside them.

A shard of R rows crosses as rows of a message, of items of :attr:`Form.dtype`. Units of loss are runs of whole items, so that every
packet can be read by itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch

from ...base.coding.blocks import BlockCode
from ...base.exchange import BucketUnits, cut
from ...config import LossyConfig


class Form(ABC):
    """``dtype``: of the items of a message. ``packet``: items of a packet. ``blank``: in all items, it says that nothing is there."""

    #: Whether values cross as they are.
    exact: ClassVar[bool] = False
    dtype: torch.dtype
    packet: int
    blank: float

    def __init__(self, config: LossyConfig) -> None:
        self._unit, self._packet_bytes = config.loss_unit, config.packet_bytes

    def cut(self, shard: int) -> BucketUnits:
        """The units of a shard of so many elements."""
        [units], _ = cut([shard], [self.dtype.itemsize], self._unit, self._packet_bytes, [self._elements])
        return units

    @property
    def _elements(self) -> int | None:
        """Elements of a packet; ``None``: as many as items."""
        return None

    @abstractmethod
    def items(self, units: BucketUnits) -> int:
        """Items of a shard that is cut as ``units``."""

    def bytes_of(self, shard: int) -> int:
        """Bytes of a shard of so many elements."""
        return self.items(self.cut(shard)) * self.dtype.itemsize

    @abstractmethod
    def encode(self, values: torch.Tensor, units: BucketUnits, rows: torch.Tensor) -> None:
        """Put ``values`` float32[R, shard] into ``rows`` [R, items]."""

    @abstractmethod
    def decode(self, rows: torch.Tensor, units: BucketUnits) -> torch.Tensor:
        """float32[R, shard]: the values of ``rows`` [R, items]."""

    @abstractmethod
    def round_(self, values: torch.Tensor, units: BucketUnits) -> torch.Tensor:
        """Replace ``values`` float32[R, shard] by those that arrive, and return them."""


class Plain(Form):
    """Numbers of ``dtype``."""

    blank = float("nan")

    def __init__(self, config: LossyConfig, dtype: torch.dtype) -> None:
        super().__init__(config)
        self.dtype, self.packet = dtype, config.packet_bytes // dtype.itemsize

    def items(self, units: BucketUnits) -> int:
        return units.shard

    def encode(self, values: torch.Tensor, units: BucketUnits, rows: torch.Tensor) -> None:
        rows.copy_(values)

    def decode(self, rows: torch.Tensor, units: BucketUnits) -> torch.Tensor:
        return rows.float()

    def round_(self, values: torch.Tensor, units: BucketUnits) -> torch.Tensor:
        return values.copy_(values.to(self.dtype))


class AsItIs(Plain):
    """float32."""

    exact = True

    def round_(self, values: torch.Tensor, units: BucketUnits) -> torch.Tensor:
        return values


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
    """The form of ``--sync-dtype``."""
    if config.sync_bits:
        return Codes(config, BlockCode(config.sync_bits, config.wire_block))
    return AsItIs(config, torch.float32) if config.sync_dtype == "fp32" else Plain(config, torch.bfloat16)
