"""The buckets of one phase in codes: what a wire sends for their values, and the values that arrive."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ..base.coding.blocks import BlockCode
from ..base.exchange import BucketUnits, Exchange
from ..channel.draws import coding_keys
from ..config import LossyConfig
from ..recovery.rows import to_device, used_here

#: The first elements of buckets are numbered in multiples of this, which is a multiple of all blocks.
_ALIGNMENT = 256
#: Elements of a unit run whose rounding is measured.
_SAMPLE = 2**15


def codes_of(config: LossyConfig) -> dict[str, BlockCode]:
    """Return the code of each phase that crosses in codes."""
    return {phase: BlockCode(bits, config.wire_block) for phase, bits in config.wire_bits.items()}


class CodedBuckets:
    """The codes of one phase of a wire. Gradients are rounded at random, parameters to nearest.

    ``cut``: of each bucket, in elements. ``payloads``: the same cut in bytes of codes. ``members``: the ranks of the
    group in the full group; ``rank``: this rank's place among them. The rank's own piece is never coded.
    """

    def __init__(
        self, code: BlockCode, seed: int, cut: Sequence[BucketUnits], members: Sequence[int], rank: int
    ) -> None:
        self.code, self.cut = code, cut
        self.payloads = [code.payloads(units) for units in cut]
        self._seed, self._members, self._rank = seed, members, rank
        self._others = [part for part in (slice(0, rank), slice(rank + 1, len(members))) if part.stop > part.start]
        self._firsts = [0]
        for units in cut:
            self._firsts.append(self._firsts[-1] + -(-units.shard // _ALIGNMENT) * _ALIGNMENT)
        self._sums: torch.Tensor | None = None  # once something was rounded

    def gradients(self, exchange: Exchange, bucket: int, buffer: torch.Tensor) -> torch.Tensor:
        """Return uint8[N * bytes of a shard]: the codes of ``buffer`` [N * shard], a part for each rank."""
        rows, keys = buffer.view(len(self._members), -1), self._keys(exchange, buffer.device)
        self._measure(bucket, rows, keys)
        return self.code.encode(rows, self.cut[bucket], keys, self._firsts[bucket]).view(-1)

    def parameters(self, bucket: int, sent: torch.Tensor) -> torch.Tensor:
        """Return uint8[bytes of a shard]: what is sent of the own shard ``sent`` [shard]."""
        return self.code.encode(sent[None], self.cut[bucket])[0]

    def values(self, bucket: int, payloads: torch.Tensor, into: torch.Tensor) -> None:
        """Put the values of ``payloads`` uint8[N * bytes], one part of each rank, into ``into`` [N * shard].

        This rank's own part of ``into`` stays as it is.
        """
        rows, parts = into.view(len(self._members), -1), payloads.view(len(self._members), -1)
        for others in self._others:
            self.code.decode(parts[others], self.cut[bucket], rows[others])

    def round_gradients(self, exchange: Exchange, bucket: int, buffer: torch.Tensor) -> None:
        """Give ``buffer`` [N * shard] the values that others get, in place."""
        rows, keys = buffer.view(len(self._members), -1), self._keys(exchange, buffer.device)
        self._measure(bucket, rows, keys)
        for others in self._others:
            self.code.round_(rows[others], self.cut[bucket], keys[others], self._firsts[bucket])

    def round_parameters(self, bucket: int, buffer: torch.Tensor) -> None:
        """Give all shards of ``buffer`` [N * shard] the values that others get, in place."""
        self.code.round_(buffer.view(len(self._members), -1), self.cut[bucket])

    def rounded(self) -> tuple[float, float]:
        """Return sums of squares over samples of what this rank sent of the first bucket: of errors, and of values."""
        if self._sums is None:
            return 0.0, 0.0
        error, square = self._sums.tolist()
        return error, square

    def _keys(self, exchange: Exchange, device: torch.device) -> torch.Tensor:
        keys = coding_keys(self._seed, exchange, self._members[self._rank], self._members)
        return to_device(keys, device)

    def _measure(self, bucket: int, rows: torch.Tensor, keys: torch.Tensor) -> None:
        """Take in the rounding of the first units that the next rank gets."""
        units = self.cut[bucket]
        if bucket or len(rows) < 2 or not units.shard:
            return
        count = min(max(1, _SAMPLE // units.elements), units.whole)
        sample = BucketUnits(0, count, count * units.elements, units.elements)
        other = (self._rank + 1) % len(rows)
        values = rows[other : other + 1, : sample.shard].float()
        rounded = self.code.round_(values.clone(), sample, keys[other : other + 1], self._firsts[bucket])
        # Values that are not finite are no measure of rounding.
        error = (rounded - values).square().where(rounded.isfinite(), 0.0).sum()
        square = values.square().where(rounded.isfinite(), 0.0).sum()
        if self._sums is None:
            # Of which sums are equal in any order.
            exact = torch.float32 if rows.device.type == "hpu" else torch.float64
            self._sums = torch.zeros(2, dtype=exact, device=rows.device)
        used_here((self._sums,))
        self._sums += torch.stack((error, square))


def coded_of(
    config: LossyConfig, cut: Mapping[str, Sequence[BucketUnits]], members: Sequence[int], rank: int
) -> dict[str, CodedBuckets]:
    """Return the codes of each phase that ``config`` wants coded, for the rank ``rank`` of ``members``."""
    codes, seed = codes_of(config), config.loss_seed
    return {phase: CodedBuckets(code, seed, cut[phase], members, rank) for phase, code in codes.items()}
