"""Values as whole numbers of few bits, in blocks that share a scale (docs/compression.md).

A unit is cut into blocks of B elements; its last may be shorter. With a = max |x| of a block and L = 2^(bits-1) - 1,

    s = a / L in bfloat16, rounded up;    c = floor(x / s + u), or x / s rounded to the nearest;    the value of c is c s.

Rounded to nearest, a scale would clip the largest element. With u uniform on [0, 1), the expectation of c s is x. A block
with a value that is not finite has the scale NaN, and all of it decodes to NaN: a check for overflows must find it.
Since s is rounded up, L s may be above the largest number of the dtype. Such a value decodes to that number: what is finite
stays finite.

The payload of a unit is its scales, bfloat16 in little-endian order, and then its codes: bytes, or for 4 bits nibbles in
two's complement, the even element low; an odd last one is filled up with 0. So every unit decodes by itself.

u has 16 bits of a hash of the element's number and a key. With 24 bits 127 + u could be 128 in float32. The hash is a
counter through two rounds of multiply and shift (the finaliser of MurmurHash3) with both halves of the key in between; its
32 bits serve two elements. On a CPU a C library does the same (:mod:`.compiled`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ..exchange import BucketUnits
from . import SCALE, block_bytes, compiled

#: The least scale above 0: of a normal number, since some devices take smaller ones for 0.
_LEAST = 2.0**-126
#: The bits of a NaN.
_NAN = 0x7FC00000
_COUNT, _FIRST, _SECOND = (number - 2**32 for number in (0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35))
#: Elements that share 32 bits of a hash.
_PAIR = 2


@dataclass(frozen=True)
class BlockCode:
    """Codes of ``bits``, 8 or 4, in blocks of ``block`` elements, an even number."""

    bits: int
    block: int

    def __str__(self) -> str:
        return f"int{self.bits}"

    @property
    def most(self) -> int:
        """L, the largest code."""
        return int(2 ** (self.bits - 1)) - 1

    def elements(self, packet_bytes: int) -> int:
        """Return elements of a packet of at most ``packet_bytes``: whole blocks; 0 if none fits."""
        return self.block * (packet_bytes // block_bytes(self.bits, self.block))

    def size(self, elements: int) -> int:
        """Return bytes of the payload of a unit of so many ``elements``."""
        return SCALE * -(-elements // self.block) + -(-elements * self.bits // 8)

    def payloads(self, units: BucketUnits) -> BucketUnits:
        """Return the cut of a coded bucket, in bytes: of a shard, and of a unit."""
        shard = sum(self.size(elements) * (numbers.stop - numbers.start) for numbers, elements in units.parts)
        return BucketUnits(units.first, units.count, shard, self.size(units.elements))

    def encode(
        self, values: torch.Tensor, units: BucketUnits, keys: torch.Tensor | None = None, first: int = 0
    ) -> torch.Tensor:
        """Return uint8[R, bytes of a shard]: the payloads of the units of ``values`` [R, shard], of any floating dtype.

        ``keys``: int32[R, 2] on the device of ``values``, a key for each row; without keys values are rounded to
        nearest, half to even. ``first``: the number of the shard's first element, an even number.
        """
        payloads = values.new_empty(len(values), self.payloads(units).shard, dtype=torch.uint8)
        if compiled.serves(values):
            compiled.encode(values.float(), payloads, units.elements, self.bits, self.block, keys, first)
            return payloads
        for x, place, payload in self._parts(values, units, payloads):
            scales, codes = self._coded(x, keys, first + place)
            count, blocks = payload.shape[1], -(-x.shape[2] // self.block)
            halves = (scales.view(torch.int32) >> 16).view(len(values), count, blocks)
            payload[:, :, : blocks * SCALE : SCALE] = (halves & 255).to(torch.uint8)
            payload[:, :, 1 : blocks * SCALE : SCALE] = (halves >> 8 & 255).to(torch.uint8)
            flat = codes.to(torch.int8).view(len(values), count, -1)
            payload[:, :, blocks * SCALE :] = self._packed(flat[:, :, : x.shape[2]])
        return payloads

    def decode(self, payloads: torch.Tensor, units: BucketUnits, values: torch.Tensor) -> torch.Tensor:
        """Put the values of ``payloads`` uint8[R, bytes of a shard] into ``values`` [R, shard], and return them.

        Values are those in float32, rounded to another dtype where ``values`` has one.
        """
        if compiled.serves(payloads, values):
            decoded = values if values.dtype == torch.float32 else torch.empty(values.shape)
            compiled.decode(payloads, decoded, units.elements, self.bits, self.block, _largest(values.dtype))
            return values if decoded is values else values.copy_(decoded)
        largest = _largest(values.dtype)
        for x, _, payload in self._parts(values, units, payloads):
            rows, count, elements = x.shape
            blocks = -(-elements // self.block)
            low, high = (payload[:, :, byte : blocks * SCALE : SCALE].to(torch.int32) for byte in range(SCALE))
            scales = (low << 16 | high << 24).view(torch.float32).view(rows, count * blocks, 1)
            codes = self._unpacked(payload[:, :, blocks * SCALE :], elements)
            decoded = (self._in_blocks(codes.float()) * scales).clamp_(-largest, largest)
            x.copy_(decoded.view(rows, count, -1)[:, :, :elements])
        return values

    def round_(
        self, values: torch.Tensor, units: BucketUnits, keys: torch.Tensor | None = None, first: int = 0
    ) -> torch.Tensor:
        """Replace ``values`` [R, shard] by the result of :meth:`encode` and :meth:`decode`, without the bytes."""
        if compiled.serves(values):
            rounded = values.float()  # itself, if it is float32
            compiled.encode(rounded, None, units.elements, self.bits, self.block, keys, first, _largest(values.dtype))
            return values if rounded is values else values.copy_(rounded)
        largest = _largest(values.dtype)
        for x, place, _ in self._parts(values, units, None):
            scales, codes = self._coded(x, keys, first + place)
            rows, count, elements = x.shape
            x.copy_(codes.mul_(scales).clamp_(-largest, largest).view(rows, count, -1)[:, :, :elements])
        return values

    def _parts(
        self, values: torch.Tensor, units: BucketUnits, payloads: torch.Tensor | None
    ) -> Iterator[tuple[torch.Tensor, int, torch.Tensor]]:
        """Yield units of equal length: views [R, count, elements] of ``values``, their places, and their payloads."""
        start = 0
        for numbers, elements in units.parts:
            count, place = numbers.stop - numbers.start, numbers.start * units.elements
            x = _split(values, place, count, elements)
            size = self.size(elements)
            payload = x if payloads is None else _split(payloads, start, count, size)
            yield x, place, payload
            start += count * size

    def _in_blocks(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x`` [R, count, elements] as [R, blocks of all units, B], filled up with zeros."""
        missing = -x.shape[2] % self.block
        return (torch.nn.functional.pad(x, (0, missing)) if missing else x).reshape(len(x), -1, self.block)

    def _coded(self, x: torch.Tensor, keys: torch.Tensor | None, first: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return scales float32[R, blocks, 1] and codes float32[R, blocks, B] of ``x`` [R, count, elements]."""
        blocks = self._in_blocks(x.float())
        largest = blocks.abs().amax(dim=2, keepdim=True)
        bits = (largest / self.most).clamp_min_(_LEAST).view(torch.int32)
        bits = ((bits + 0xFFFF) & -0x10000).masked_fill(largest == 0, 0).masked_fill(~largest.isfinite(), _NAN)
        scales = bits.view(torch.float32)
        codes = blocks / scales
        if keys is None:
            codes.round_().add_(0.0)  # no negative zero, which no code is
        else:
            codes.view(len(x), -1).add_(uniforms(keys, first, codes[0].numel())).floor_()
        return scales, codes.nan_to_num_(0.0)  # of zeros, and of values that are not finite

    def _packed(self, codes: torch.Tensor) -> torch.Tensor:
        """Return uint8[R, count, bytes] of int8 ``codes`` [R, count, elements]."""
        if self.bits == 8:
            return codes.view(torch.uint8)
        if codes.shape[2] % 2:
            codes = torch.nn.functional.pad(codes, (0, 1))
        nibbles = codes.contiguous().view(torch.uint8)
        return (nibbles[:, :, ::2] & 15) | (nibbles[:, :, 1::2] << 4)

    def _unpacked(self, payload: torch.Tensor, elements: int) -> torch.Tensor:
        """Return int8[R, count, ``elements``] of the codes in ``payload`` uint8[R, count, bytes]."""
        if self.bits == 8:
            return payload.view(torch.int8)
        nibbles = torch.stack((payload << 4, payload), dim=3).flatten(2).view(torch.int8)
        return (nibbles >> 4)[:, :, :elements]


def _largest(dtype: torch.dtype) -> float:
    """Return the largest number of ``dtype`` that float32 has too."""
    return min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)


def _split(rows: torch.Tensor, start: int, count: int, length: int) -> torch.Tensor:
    """Return a view [R, count, length] of ``rows`` from ``start`` on."""
    part = rows[:, start : start + count * length]
    return part.as_strided((len(rows), count, length), (part.stride(0), length, 1))


def uniforms(keys: torch.Tensor, first: int, count: int) -> torch.Tensor:
    """Return float32[R, count]: u of the elements from number ``first`` (even) on, for each of ``keys`` int32[R, 2].

    ``count``: an even number. Multiples of 2^-16 in [0, 1).
    """
    start = (first // _PAIR + 2**31) % 2**32 - 2**31  # wraps as the counter does
    pairs = torch.arange(count // _PAIR, dtype=torch.int32, device=keys.device) + start
    hashed = (pairs * _COUNT)[None] ^ keys[:, :1]
    hashed ^= (hashed >> 16) & 0xFFFF
    hashed = (hashed * _FIRST).add_(keys[:, 1:])
    hashed ^= (hashed >> 13) & 0x7FFFF
    hashed *= _SECOND
    hashed ^= (hashed >> 16) & 0xFFFF
    return (hashed.view(torch.int16).to(torch.int32) & 0xFFFF).float().mul_(2.0**-16)
