"""The compiled engine: its functions, and what they take."""

from __future__ import annotations

import ctypes
import socket
from functools import cache

from ...base.errors import UsageError
from ...base.native import ENGINE
from ..address import resolve

SECOND = 1_000_000_000
#: The rules of rates, by their number in the engine.
RULES = {"fixed": 0, "dedicated": 1, "shared": 2}
#: Why a rank is gone, by the engine's number: of seconds of the timeout, and of bytes of a datagram.
REASONS = {
    1: "no datagram for {0:g} s, process gone or UDP blocked",
    2: "its host refuses datagrams, process gone",
    3: "it has closed the channel, or does without this one",
    4: "no datagram of {1:,} bytes comes from it any more, and shorter ones do: the MTU of the path has fallen; lower "
    "--packet-bytes",
    5: "nothing came of it for as long as it was waited for",
}


class CSettings(ctypes.Structure):
    """``struct settings`` of ``c/state.h``."""

    _fields_ = [
        ("rate", ctypes.c_double),
        ("reorder", ctypes.c_int64),
        ("peer_timeout", ctypes.c_int64),
        ("eager", ctypes.c_uint64),
        ("memory", ctypes.c_uint64),
        ("packet", ctypes.c_uint32),
        ("cipher", ctypes.c_int),
        ("rule", ctypes.c_int),
        ("flows", ctypes.c_int),
        ("clock", ctypes.c_int64),
    ]


def declare(lib: ctypes.CDLL) -> ctypes.CDLL:
    """Return the engine ``lib`` with the types of its functions."""
    pointer, i, u32, u64, i64 = ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_uint64, ctypes.c_int64
    text = ctypes.c_char_p
    for name, result, *arguments in (
        ("load_cipher", i),
        ("engine_counter_names", text),
        ("member_counter_names", text),
        ("create", pointer, ctypes.POINTER(CSettings), pointer, u32, i, ctypes.POINTER(i64)),
        ("free", None, pointer),
        ("close_sockets", None, pointer),
        ("channel", pointer, pointer, u32, u32, u32, u32, u32, i),
        ("bucket", i, pointer, i, u32, u64, u32, i, i),
        ("promise", None, pointer, u32, u32),
        ("member", i, pointer, u32, pointer, u32, u64, u32, u32, u64, text, text, i64),
        ("open", None, pointer),
        ("probe", None, pointer, i64),
        ("probed", i, pointer, u32),
        ("linger", i, pointer, i64),
        ("close", None, pointer, i64),
        ("copies", i, pointer, i, u32, pointer, u32, pointer),
        ("post", i, pointer, i, u32, u32, pointer, pointer, i64, i64, ctypes.POINTER(pointer)),
        ("send", i, pointer, i, u32, u32, pointer, pointer, u32, u32, ctypes.POINTER(pointer)),
        ("reports", i, pointer, pointer),
        ("wait", i, pointer, i, i64),
        ("took", i64, pointer),
        ("missing", i, pointer),
        ("release", None, pointer),
        ("failed", i, pointer, ctypes.POINTER(i)),
        ("lose", None, pointer, u32, i64),
        ("lost", i, pointer, u32),
        ("member_counters", None, pointer, u32, pointer, pointer),
        ("engine_counters", None, pointer, pointer),
    ):
        function = getattr(lib, f"ml_{name}")
        function.restype, function.argtypes = result, arguments
    return lib


@cache
def load() -> ctypes.CDLL:
    path = ENGINE.path()
    try:
        return declare(ctypes.CDLL(str(path)))
    except OSError as error:
        raise UsageError(f"--transport udp: {path} cannot be loaded ({error}); remove it to build it again") from None


def pack_address(address: str, port: int) -> bytes:
    """Return a ``struct sockaddr`` of this machine."""
    family, found = resolve(address, port)
    packed = bytes(ctypes.c_uint16(family)) + port.to_bytes(2, "big")
    raw = socket.inet_pton(family, found[0].partition("%")[0])
    if family == socket.AF_INET:
        return packed + raw + bytes(8)
    scope = ctypes.c_uint32(found[3])
    return packed + bytes(4) + raw + bytes(scope)
