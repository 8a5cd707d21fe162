"""Network namespaces without names: each belongs to a thread, and goes with it.

So nothing is left of a lab whose process ends, however it ends, and two labs cannot meet.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

_CLONE_NEWNET = 0x40000000
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_SIOCETHTOOL, _COUNT_STRINGS, _STRINGS, _SET_FEATURES, _FEATURES = 0x8946, 0x37, 0x1B, 0x3B, 4
_STRING_BYTES = 32
_NETWORK = "/proc/thread-self/ns/net"
#: Seconds that processes have to end by themselves, and that a busy machine may take to kill them.
_GRACE, _KILL = 5.0, 10.0

#: The interface that joins a node to the others.
INTERFACE = "lab0"

Result = TypeVar("Result")


class Node:
    """A network namespace, as a machine of its own; :meth:`do` does something in it.

    Processes that are started there stay there, with all that they start.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.address, self.address6 = f"10.77.0.{number + 1}", f"fd77::{number + 1:x}"
        self._thread = ThreadPoolExecutor(1, f"lab-node-{number}")
        self._network = self.do(self._enter)

    def do(self, work: Callable[..., Result], *arguments: Any, **options: Any) -> Result:
        """Return the result of ``work``, called in the thread of this namespace."""
        return self._thread.submit(work, *arguments, **options).result()

    def _enter(self) -> os.stat_result:
        unshare()
        return os.stat(_NETWORK)

    def ip(self, *commands: str) -> None:
        """Give ``commands`` to ``ip`` in this namespace."""
        given = "".join(command + "\n" for command in commands)
        done = self.do(subprocess.run, ["ip", "-batch", "-"], input=given, text=True, capture_output=True)
        if done.returncode:
            raise OSError(f"ip {'; '.join(commands)}: {done.stderr.strip()}")

    def open_tun(self) -> int:
        """Open a new TUN device, :data:`INTERFACE`; return its file descriptor. It goes when that is closed."""

        def open_tun() -> int:
            tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
            fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH22x", INTERFACE.encode(), _IFF_TUN | _IFF_NO_PI))
            return tun

        return self.do(open_tun)

    def join_by_wire(self, other: Node) -> None:
        """Make a pair of veth devices, called :data:`INTERFACE` at both ends."""
        self.ip(f"link add {INTERFACE} type veth peer name {INTERFACE} netns {other.do(threading.get_native_id)}")

    def set_features(self, features: Mapping[str, bool]) -> None:
        """Switch ``features`` of :data:`INTERFACE` on or off, by ethtool's names of them (``ethtool -K``)."""

        def call(any_socket: socket.socket, request: bytes) -> bytes:
            buffer = ctypes.create_string_buffer(request, len(request))
            where = struct.pack("16sQ16x", INTERFACE.encode(), ctypes.addressof(buffer))
            fcntl.ioctl(any_socket, _SIOCETHTOOL, where)
            return buffer.raw

        def set_features() -> None:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
                counted = call(any_socket, struct.pack("IIQI", _COUNT_STRINGS, 0, 1 << _FEATURES, 0))
                [count] = struct.unpack("I", counted[-4:])
                head = struct.pack("III", _STRINGS, _FEATURES, count)
                text = call(any_socket, head + bytes(_STRING_BYTES * count))[len(head) :]
                places = range(0, len(text), _STRING_BYTES)
                names = [text[place : place + _STRING_BYTES].partition(b"\0")[0].decode() for place in places]
                valid = sum(1 << names.index(name) for name in features)
                wanted = sum(1 << names.index(name) for name, on in features.items() if on)
                blocks = -(-count // 32)
                words = [word >> 32 * block & 0xFFFFFFFF for block in range(blocks) for word in (valid, wanted)]
                call(any_socket, struct.pack(f"II{len(words)}I", _SET_FEATURES, blocks, *words))

        self.do(set_features)

    def configure(self, mtu: int) -> None:
        """Give addresses to :data:`INTERFACE`, which is there, and to the loopback."""
        commands = [
            "link set lo up",
            # A short queue would drop bursts before the link that is to be emulated sees them.
            f"link set {INTERFACE} mtu {mtu} txqueuelen 20000 up",
            f"addr add {self.address}/24 dev {INTERFACE}",
        ]
        if Path("/proc/sys/net/ipv6").exists():
            commands.append(f"addr add {self.address6}/64 dev {INTERFACE} nodad")
        self.ip(*commands)

    def sysctl(self, name: str, value: object | None = None) -> str:
        """Set the sysctl ``name`` of this namespace to ``value``, if that is given; return it."""
        path = Path("/proc/sys") / name.replace(".", "/")

        def access() -> str:
            if value is not None:
                path.write_text(str(value))
            return path.read_text().strip()

        return self.do(access)

    def dropped(self) -> int:
        """Return packets that were dropped on their way to the emulator, which could not keep up."""
        return self.counter(11)

    def counter(self, column: int) -> int:
        """Return the kernel's counter ``column`` of :data:`INTERFACE` in ``net/dev``: 9 is packets sent, 11 dropped."""
        lines = self.do(Path("/proc/thread-self/net/dev").read_text).splitlines()
        values = next(line.partition(":")[2].split() for line in lines if line.strip().startswith(f"{INTERFACE}:"))
        return int(values[column])

    def start(self, command: Sequence[str], **options: Any) -> subprocess.Popen:
        """Call ``subprocess.Popen(command, **options)`` in this namespace and in a session of its own."""
        return self.do(subprocess.Popen, command, start_new_session=True, **options)

    def processes(self) -> list[int]:
        """Return the processes that run here."""
        found = []
        for entry in os.scandir("/proc"):
            with contextlib.suppress(OSError, ValueError):
                if os.path.samestat(os.stat(f"{entry.path}/ns/net"), self._network):
                    found.append(int(entry.name))
        return found

    def close(self) -> None:
        """End the thread, and with it the namespace, once :func:`end_processes` has ended all processes."""
        self._thread.shutdown()


def unshare() -> None:
    """Put the calling thread into a new network namespace. Raise :class:`OSError`."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def end_processes(nodes: Sequence[Node]) -> None:
    """Ask all processes of ``nodes`` to end, and kill those that are still there after some seconds."""
    for kind, patience in ((signal.SIGTERM, _GRACE), (signal.SIGKILL, _KILL)):
        asked: set[int] = set()
        until = time.monotonic() + patience
        while left := [pid for node in nodes for pid in node.processes() if not _is_ended(pid)]:
            for pid in set(left) - asked:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, kind)
            asked.update(left)
            if time.monotonic() > until:
                break
            time.sleep(0.02)


def _is_ended(pid: int) -> bool:
    """Return whether the process has ended, and its parent has not collected it yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True
