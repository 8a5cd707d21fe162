"""The datagram, as ``transport/udp/c/wire.c`` has it: a header of 28 bytes, little-endian, the payload, and with a cipher a tag of 16."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_lossy.transport.udp.session import CODES, HEADER_BYTES, PHASES

__all__ = ["CODES", "PHASES"]

VERSION = 6
DATA, END, READY, REPORT, ALIVE, PROBE, NACK, ASK = range(1, 9)
#: The most bytes of lists and reports in a datagram, if a unit is not shorter: it passes wherever IP does.
CONTROL_BYTES = 480

HEADER = np.dtype(
    [
        ("kind", "u1"),  # version in the high four bits, type in the low ones
        # Bits 0 to 2: 1 for a unit that is sent several times, 2 if it is sent again. Bits 3 and 4 of DATA: the code of the
        # values (``CODES``). The others are 0.
        ("tag", "u1"),
        ("source", "<u2"),  # rank in the channel
        ("channel", "<u4"),
        ("number", "<u8"),  # counts the datagrams from one process to another; the nonce
        ("step", "<u4"),  # counts the exchanges of a phase and bucket as datagrams, from 0; not the iteration
        ("bucket", "<u2"),
        ("phase", "u1"),
        ("zero", "u1"),
        # DATA: unit. END: units of the message, and part. READY: 0, or 1 and part if the receiver is done. ALIVE: 1 for
        # the last, 2 if the receiver sends nothing. NACK: number of units that it names. ASK: 0.
        ("index", "<u4"),
    ]
)
assert HEADER.itemsize == HEADER_BYTES

#: Payload of a REPORT: datagrams and bytes that came from its addressee; the highest number + 1, the time since it came
#: (µs), and the clock of the reporter (µs) then; DATA that the addressee may have on the way: with ease, and at most; what
#: comes to the reporter, for each process that sends to it (bytes/s), 0 if unknown.
REPORT_PAYLOAD = np.dtype(
    [
        ("datagrams", "<u8"),
        ("bytes", "<u8"),
        ("top", "<u8"),
        ("since", "<u4"),
        ("clock", "<u4"),
        ("window", "<u4"),
        ("limit", "<u4"),
        ("share", "<u8"),
    ]
)


#: In a bucket with reports, an END's payload lists the units that must arrive, u4 each. In front of them stands
#: their count in all parts. If all units must arrive, the count is ``ALL``, and none are listed.
ALL = 2**32 - 1


def end(units: Sequence[int] | None) -> bytes:
    """Return the payload of an END in one part; ``None``: all units must arrive."""
    return np.array([ALL] if units is None else [len(units), *units], "<u4").tobytes()


def encode(kind: int, payload: bytes = b"", *, version: int = VERSION, **fields: int) -> bytes:
    """Return a datagram without tag; omitted fields are 0."""
    header = np.zeros((), HEADER)
    header["kind"] = version << 4 | kind
    for name, value in fields.items():
        header[name] = value
    return header.tobytes() + payload


def decode(datagram: bytes) -> tuple[int, int, dict[str, int], bytes]:
    """Return version, type, all fields, and the bytes behind the header."""
    header = np.frombuffer(datagram, HEADER, 1)[0]
    fields = {name: int(header[name]) for name in HEADER.names[1:]}
    return int(header["kind"]) >> 4, int(header["kind"]) & 15, fields, datagram[HEADER.itemsize :]


def report(datagrams: int, size: int, top: int, **more: int) -> bytes:
    """Return the payload of a REPORT."""
    known = {"since": 0, "clock": 0, "window": 2**32 - 1, "limit": 2**32 - 1, "share": 0} | more
    return np.array((datagrams, size, top, *known.values()), REPORT_PAYLOAD).tobytes()
