"""The frame: a header of 24 bytes, little-endian, whole units of one message, and with a cipher a tag. No input or output."""

from __future__ import annotations

import ctypes
import struct
from typing import NamedTuple

from .cipher import Cipher, NoCipher

DATA, END, OVER, ASK, LIVE, BYE = range(1, 7)
_HEADER = struct.Struct("<BBBxIIIII")
HEADER_BYTES = _HEADER.size


class MalformedFrame(Exception):
    """Bytes that no honest process sends: the connection has to be closed."""


class Header(NamedTuple):
    """``kind``: DATA, END (nothing more of this message comes), OVER (nothing more of it is waited for), ASK (answer), LIVE (the answer), BYE
    (the sender closes the channel).

    ``number`` counts the exchanges of a ``phase`` and ``bucket``. DATA: ``units`` units from ``first`` on, ``size`` bytes.
    """

    kind: int
    code: int = 0
    phase: int = 0
    number: int = 0
    bucket: int = 0
    first: int = 0
    units: int = 0
    size: int = 0


class Writer:
    """Seals frames with payloads of at most ``most`` bytes, one after another, into memory of its own."""

    def __init__(self, cipher: Cipher | NoCipher, most: int) -> None:
        self._cipher = cipher
        self._memory = bytearray(HEADER_BYTES + most + cipher.tag_bytes)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._view = memoryview(self._memory)

    def frame(self, header: Header, source: int = 0) -> memoryview:
        """Return a frame with the ``header.size`` bytes at the address ``source``. The next call takes its memory."""
        _HEADER.pack_into(self._memory, 0, *header)
        self._cipher.seal(self._address, HEADER_BYTES, source, header.size, self._address + HEADER_BYTES)
        return self._view[: HEADER_BYTES + header.size + self._cipher.tag_bytes]


class Reader:
    """Finds the frames in a stream of bytes, with payloads of at most ``most`` bytes."""

    def __init__(self, cipher: Cipher | NoCipher, most: int) -> None:
        self._cipher, self._most = cipher, most
        self._memory = bytearray(2 * (HEADER_BYTES + most + cipher.tag_bytes))
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._view = memoryview(self._memory)
        self._start = self._end = 0

    def room(self) -> memoryview:
        """Return memory for the next bytes; :meth:`came` takes their number. Returned payloads are overwritten."""
        if self._start:
            left = self._end - self._start
            self._view[:left] = self._view[self._start : self._end]
            self._start, self._end = 0, left
        return self._view[self._end :]

    def came(self, size: int) -> None:
        """Note that ``size`` bytes were written into the last :meth:`room`."""
        self._end += size

    @property
    def needed(self) -> int:
        """Bytes that have to come before the next frame is whole, or its header. Call it after :meth:`next` has found none."""
        have = self._end - self._start
        if have < HEADER_BYTES:
            return HEADER_BYTES - have
        return (
            HEADER_BYTES + Header(*_HEADER.unpack_from(self._memory, self._start)).size + self._cipher.tag_bytes - have
        )

    def next(self) -> tuple[Header, memoryview] | None:
        """Return the next frame with its payload; ``None``: it is not complete. Raise :class:`MalformedFrame`."""
        if self._end - self._start < HEADER_BYTES:
            return None
        header = Header(*_HEADER.unpack_from(self._memory, self._start))
        if not DATA <= header.kind <= BYE or header.size > self._most or (header.size and header.kind != DATA):
            raise MalformedFrame(f"{header}")
        begin = self._start + HEADER_BYTES
        end = begin + header.size + self._cipher.tag_bytes
        if end > self._end:
            return None
        if not self._cipher.open(self._address + self._start, HEADER_BYTES, self._address + begin, header.size):
            raise MalformedFrame("a frame that is not authentic")
        self._start = end
        return header, self._view[begin : begin + header.size]
