"""Fingerprints of buffers: 64 bits, at the cost of one pass over the values.

A plain sum of words is not enough: two buffers that have the same bit flipped at different places have equal sums. So
the words form a matrix [R, 4096], and the sums of its rows and columns are mixed with their positions: a word that
moves changes a row or a column.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

#: Words in a row.
COLUMNS = 4096
_CACHED_ROWS = 16
_GOLDEN = 0x9E3779B97F4A7C15
_MIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def fingerprint(buffers: Sequence[torch.Tensor], device: torch.device | None = None) -> torch.Tensor:
    """Return int64, without dimensions, on ``device`` (default: the first buffer's), equal for equal bits.

    Buffers are contiguous, of any dtypes, lengths and devices. Different contents have the same fingerprint with a
    probability of about 2^-64.
    """
    if not buffers:
        return torch.zeros((), dtype=torch.int64, device=device)
    device = device or buffers[0].device
    return _mixed(torch.stack([_of_buffer(buffer).to(device) for buffer in buffers]), 0).sum()


def _of_buffer(buffer: torch.Tensor) -> torch.Tensor:
    words = _words(buffer.detach().view(-1))
    rows = len(words) // COLUMNS
    matrix, rest = words[: rows * COLUMNS].view(rows, COLUMNS), words[rows * COLUMNS :]
    # Rows, columns and single words share one count, so that each is mixed with another number.
    result = _mixed(rest, COLUMNS).sum() + buffer.numel()
    if rows:
        columns, sums = _sums(matrix)
        result = result + _mixed(columns, 0).sum() + _mixed(sums, 2 * COLUMNS).sum()
    return result


def _sums(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sums of columns and of rows."""
    if matrix.device.type != "cpu":
        return matrix.sum(0), matrix.sum(1)
    columns, sums = torch.zeros_like(matrix[0]), []
    for part in matrix.split(_CACHED_ROWS):  # so that each row is read from memory once
        columns += part.sum(0)
        sums.append(part.sum(1))
    return columns, torch.cat(sums)


def _words(flat: torch.Tensor) -> torch.Tensor:
    """Return int64: the bits of ``flat``, with zeros after its end."""
    if flat.dtype == torch.bool or flat.is_complex():
        flat = flat.view(torch.uint8)
    size = flat.element_size()
    whole = flat.numel() * size // 8 * 8
    if flat.storage_offset() * size % 8:  # no view as longer words; seldom, since allocations are aligned
        flat = flat.clone()
    words = flat[: whole // size].view(torch.int64)
    if whole == flat.numel() * size:
        return words
    end = torch.zeros(8, dtype=torch.uint8, device=flat.device)
    rest = flat[whole // size :].view(torch.uint8)
    end[: len(rest)] = rest
    return torch.cat([words, end.view(torch.int64)])


def _mixed(words: torch.Tensor, first: int) -> torch.Tensor:
    """Return splitmix64 of each of ``words`` xor its number from ``first`` on, times the golden ratio, modulo 2^64."""
    numbers = torch.arange(first, first + len(words), dtype=torch.int64, device=words.device)
    x = words ^ (numbers * _signed(_GOLDEN))
    x = x + _signed(_GOLDEN)
    x = (x ^ _shifted(x, 30)) * _signed(_MIX[0])
    x = (x ^ _shifted(x, 27)) * _signed(_MIX[1])
    return x ^ _shifted(x, 31)


def _shifted(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Return ``x`` >> ``bits`` of unsigned words."""
    return (x >> bits) & (2 ** (64 - bits) - 1)


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word


def finite(buffers: Sequence[torch.Tensor], device: torch.device | None = None) -> torch.Tensor:
    """Return bool, without dimensions, on ``device`` as in :func:`fingerprint`: all floating values are finite."""
    # Both are NaN if a value is. A norm, or isfinite() of every value, takes ten times as long on a CPU.
    device = device or (buffers[0].device if buffers else None)
    extremes = [
        extreme.float().to(device)
        for buffer in buffers
        if buffer.is_floating_point() and buffer.numel()
        for extreme in torch.aminmax(buffer.detach())
    ]
    if not extremes:
        return torch.ones((), dtype=torch.bool, device=device)
    return torch.isfinite(torch.stack(extremes)).all()
