"""Codes in blocks by a C library, for tensors of a CPU: what torch does in ten times the time and more, to the same bits (``c/blocks.c``)."""

from __future__ import annotations

import ctypes
import functools
import logging
from typing import Any

import torch

from ..errors import UsageError
from ..native import BLOCKS

logger = logging.getLogger(__name__)


@functools.cache
def library() -> Any:
    """Return the library; ``None`` (and log a line) if it is missing and cannot be compiled: torch does the same."""
    try:
        found = ctypes.CDLL(str(BLOCKS.path()))
    except (UsageError, OSError) as error:
        logger.warning("%s; torch makes codes, more slowly", error)
        return None
    pointer, whole, number, real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
    found.mb_encode.argtypes = [pointer, pointer, *[whole] * 4, number, whole, pointer, ctypes.c_uint64, real]
    found.mb_decode.argtypes = [pointer, pointer, *[whole] * 5, number, whole, real]
    found.mb_encode.restype = found.mb_decode.restype = None
    return found


def serves(*tensors: torch.Tensor) -> bool:
    """Return whether the library can work on ``tensors`` [R, n]: of a CPU, their rows without gaps."""
    fits = all(rows.device.type == "cpu" and (rows.stride(1) == 1 or rows.shape[1] == 1) for rows in tensors)
    return fits and library() is not None


def encode(
    values: torch.Tensor,
    payloads: torch.Tensor | None,
    unit: int,
    bits: int,
    block: int,
    keys: torch.Tensor | None,
    first: int,
    largest: float = 0.0,
) -> None:
    """Put the payloads of ``values`` float32[R, shard], units of ``unit`` elements, into contiguous ``payloads`` uint8[R, n].

    ``None``: put the values of the payloads, of at most ``largest``, in the place of ``values``.
    """
    keys = None if keys is None else keys.contiguous()
    library().mb_encode(
        values.data_ptr(), None if payloads is None else payloads.data_ptr(), len(values), values.stride(0),
        values.shape[1], unit, bits, block, None if keys is None else keys.data_ptr(), first, largest,
    )  # fmt: skip


def decode(payloads: torch.Tensor, values: torch.Tensor, unit: int, bits: int, block: int, largest: float) -> None:
    """Put the values of ``payloads`` uint8[R, n], of at most ``largest``, into ``values`` float32[R, shard]."""
    library().mb_decode(
        payloads.data_ptr(), values.data_ptr(), len(values), payloads.stride(0), values.stride(0), values.shape[1],
        unit, bits, block, largest,
    )  # fmt: skip
