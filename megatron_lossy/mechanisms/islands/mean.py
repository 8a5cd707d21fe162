"""The lossy mean over islands: a reduce-scatter to owners and an all-gather of their means; and the form of values that cross.

An exchange of k elements is cut into one shard per island. The owner of a shard averages the copies that arrive (its
own always does), and sends the mean back. An island that does not get it goes on without. Nothing is sent again.

Values cross as numbers of a dtype, or as codes with their scales (``--sync-dtype``). A shard of R rows crosses as rows of a message, of
items of :attr:`Form.dtype`. Units of loss are runs of whole items, so that every packet can be read by itself. DiLoCo's outer weights
cross besides its codes where these may be lost: after each block of B codes are B / 32 numbers in float32. *Flat* elements are both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from ...base import theory
from ...base.coding.blocks import BlockCode
from ...base.exchange import BucketUnits, Stream, cut
from ...base.fingerprint import finite
from ...config import LossyConfig
from ...recovery.rows import to_device
from ...transport import Network
from .flags import SYNC_PHASES
from .vector import Places, read_at


class Form:
    """The form of ``--sync-dtype``: numbers of a dtype, or whole numbers of ``code`` to nearest, in blocks that share a scale.

    ``dtype``: of the items of a message. ``packet``: items of a packet. ``blank``: in all items, it says that nothing is there. ``exact``:
    whether values cross as they are. ``plain``: the numbers after each block of codes.
    """

    plain = 0

    def __init__(self, config: LossyConfig) -> None:
        self._unit, self._packet_bytes = config.loss_unit, config.packet_bytes
        self.dtype = torch.float32 if config.sync_dtype == "fp32" else torch.bfloat16
        self.exact, self.blank = self.dtype == torch.float32, math.nan
        self.packet = config.packet_bytes // self.dtype.itemsize
        self.code, self._elements = None, None
        if config.sync_bits:
            self.code = BlockCode(config.sync_bits, config.wire_block)
            self.dtype, self.blank = torch.uint8, 255  # scales of NaN
            self._block, self.plain = config.wire_block, config.refreshes
            # Bytes of a block, and of the numbers after it.
            self._coded, self._numbers = self.code.size(self._block), self.plain * torch.float32.itemsize
            blocks = config.packet_bytes // (self._coded + self._numbers)
            self._elements, self.packet = blocks * (self._block + self.plain), blocks * (self._coded + self._numbers)
        #: By phase, the name of the code.
        self.codes = {} if self.code is None else dict.fromkeys(SYNC_PHASES, str(self.code))

    def flat(self, count: int) -> int:
        """Return the flat elements of ``count`` elements."""
        return -(-count // self._block) * (self._block + self.plain) if self.plain else count

    def share(self, count: int, owners: int) -> int:
        """Return the elements of each owner's shard of ``count`` flat ones: whole blocks, if numbers come after them."""
        whole = self._block + self.plain if self.plain else 1
        return -(-count // (owners * whole)) * whole

    def joined(self, values: torch.Tensor, plain: torch.Tensor | None = None) -> torch.Tensor:
        """Return the flat elements [R, n] of ``values`` [R, k] and the numbers ``plain`` [R, m] after their blocks; ``None``: zeros."""
        values = self.blocks(values)
        if plain is None:
            plain = values.new_zeros(len(values), values.shape[1] // self._block * self.plain)
        return _join(values, self._block, plain, self.plain)

    def blocks(self, values: torch.Tensor) -> torch.Tensor:
        """Return ``values`` [R, k] filled up with zeros to whole blocks."""
        return torch.nn.functional.pad(values, (0, -values.shape[1] % self._block))

    def apart(self, flat: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the ``count`` values [R, k] and the numbers [R, m] of ``flat`` [R, n]."""
        values, plain = _part(flat, self._block, self.plain)
        return values[:, :count], plain

    def cut(self, shard: int) -> BucketUnits:
        """Return the units of a shard of so many flat elements."""
        [units], _ = cut([shard], [self.dtype.itemsize], self._unit, self._packet_bytes, [self._elements])
        return units

    def items(self, units: BucketUnits) -> int:
        """Return items of a shard that is cut as ``units``."""
        if self.plain:
            return units.shard // (self._block + self.plain) * (self._coded + self._numbers)
        return units.shard if self.code is None else self.code.payloads(units).shard

    def encode(self, values: torch.Tensor, units: BucketUnits, rows: torch.Tensor) -> None:
        """Put ``values`` float32[R, shard] into ``rows`` [R, items]."""
        if self.code is None:
            rows.copy_(values)
        elif self.plain:
            values, plain = self.apart(values, units.shard)
            codes = self.code.encode(values, self._cut_codes(values.shape[1]))
            rows.copy_(_join(codes, self._coded, plain.view(torch.uint8), self._numbers))
        else:
            rows.copy_(self.code.encode(values, units))

    def decode(self, rows: torch.Tensor, units: BucketUnits) -> torch.Tensor:
        """Return float32[R, shard]: the values of ``rows`` [R, items]."""
        if self.code is None:
            return rows.float()
        if self.plain:
            codes, plain = _part(rows, self._coded, self._numbers)
            blocks = self._cut_codes(plain.shape[1] // self._numbers * self._block)
            values = self.code.decode(codes, blocks, torch.empty(len(rows), blocks.shard, device=rows.device))
            return self.joined(values, plain.view(torch.float32))
        return self.code.decode(rows, units, torch.empty(len(rows), units.shard, device=rows.device))

    def _cut_codes(self, count: int) -> BucketUnits:
        """Return the cut of ``count`` codes into blocks."""
        return BucketUnits(0, count // self._block, count, self._block)


def _join(one: torch.Tensor, width: int, other: torch.Tensor, more: int) -> torch.Tensor:
    """Return [R, n * (width + more)] of ``one`` [R, n * width] and ``other`` [R, n * more], by turns."""
    shape = len(one), one.shape[1] // width
    return torch.cat((one.view(*shape, width), other.view(*shape, more)), dim=2).flatten(1)


def _part(rows: torch.Tensor, width: int, more: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the two tensors that :func:`_join` made ``rows`` of, as copies."""
    both = rows.view(len(rows), rows.shape[1] // (width + more), width + more)
    one, other = (part.clone(memory_format=torch.contiguous_format) for part in both.split([width, more], dim=2))
    return one.flatten(1), other.flatten(1)


def bytes_sent(config: LossyConfig, count: int, among: tuple[int, int] | None = None) -> float:
    """Return the bytes that a sender sends of ``count`` flat elements. ``among``: senders and receivers; ``None``: all islands."""
    form, (senders, receivers) = Form(config), among or (config.islands, config.islands)
    shard = form.share(count, senders)
    return theory.bytes_sent(count, senders, form.items(form.cut(shard)) * form.dtype.itemsize / shard, receivers)


class Rest:
    """The rests of means of the islands of this process, numbered from 0: float32[size] each, on the device that makes means.

    An owner keeps, for the next mean of the same element, what rounding takes from one: with the rest r of an element, m = Q(mean + r)
    crosses, and r becomes mean + r - m. So the means of an element that crossed add up to those before rounding, but for one rounding,
    however many they are.
    """

    def __init__(self, form: Form) -> None:
        self._form = form
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
        """Return m [shard] of the ``mean`` [shard] that ``island`` owns, of ``count`` flat elements at ``places``.

        ``place``: the number of its shard. ``averaged`` bool[shard]: the elements with a sender; ``None``: all; the others are NaN.
        ``crosses``: makes Q(x) [shard] of x.
        """
        size = count if places is None else places.size
        row = self._rows.get(island)
        known = row is not None and len(row) == size  # a checkpoint may be of exchanges that lost nothing
        row = self._rows[island] = row.to(mean.device) if known else torch.zeros(size, device=mean.device)
        chosen = read_at(row, places)
        if self._form.plain and places is not None:
            chosen = self._form.joined(chosen[None])[0]
        own = chosen[place * len(mean) : (place + 1) * len(mean)]  # the last shard may be shorter
        whole = mean.clone()
        whole[: len(own)] += own
        if averaged is not None:
            whole.masked_fill_(~averaged, torch.nan)
        crossed = crosses(whole)
        left = (whole - crossed)[: len(own)]
        own.copy_(torch.where(left.isfinite(), left, own))
        if places is not None:
            kept = self._form.apart(chosen[None], len(places))[0][0] if self._form.plain else chosen
            places.write(row, kept)
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


class Mean(NamedTuple):
    """The owners' means ``values`` [k], and where they ``arrived``, bool[islands of this process, k]; ``None``: everywhere."""

    values: torch.Tensor
    arrived: torch.Tensor | None

    def wait(self) -> Mean:
        """Return this mean: its exchange has ended."""
        return self


def networks_between(config: LossyConfig, stream: Stream, steps: int | None) -> dict[str, Network]:
    """Return the networks between islands, by phase. Raise :class:`UsageError` for a channel that cannot serve them."""
    networks = {phase: Network(config, phase, config.islands) for phase in SYNC_PHASES}
    for phase, network in networks.items():
        if not network.lossless:
            network.channel.check(phase, stream, config.islands, None, steps)
    return networks


def mean_of(sent: Any, arrived: torch.Tensor | None) -> torch.Tensor:
    """Return the mean [owners, shard] of the elements of ``sent`` float32[sources, owners, shard] that arrived.

    Elements without a delivery are zero; these zeros are no means. ``arrived`` bool[owners, sources, shard]; ``None``: all, and
    ``sent`` may then be a list of the sources' tensors, of one shape. Sums are taken in the order of the islands.
    """
    if arrived is not None:
        sent = torch.where(arrived.transpose(0, 1), sent, torch.zeros((), device=sent.device))
    total = sent[0].clone()
    for values in sent[1:]:
        total += values
    count = len(sent) if arrived is None else arrived.sum(dim=1).clamp_(min=1)
    return total / count


def finite_rows(rows: torch.Tensor) -> np.ndarray:
    """Return bool[M]: for each of ``rows`` [M, n] whether all of it is finite."""
    return torch.stack([finite([row]) for row in rows]).cpu().numpy()


def elements_of(arrived: np.ndarray, units: BucketUnits, device: torch.device) -> torch.Tensor:
    """Return bool[receivers, sources, shard] of bool[receivers, sources, units]."""
    by_unit = torch.from_numpy(arrived) if device.type == "cpu" else to_device(arrived, device)
    return by_unit.repeat_interleave(units.elements, dim=2)[:, :, : units.shard]
