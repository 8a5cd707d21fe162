"""A lab: network namespaces as machines, joined by emulated links. For Linux, as root, with a C compiler.

    with Lab(Link(delay=0.010, loss=0.01)) as lab:
        server = lab.start(0, ["python", "-m", "http.server"])
        lab.run(1, ["curl", f"http://{lab.address(0)}:8000/"])
        lab.set(Link(delay=0.010, loss=0.1))      # from the next packet on
        print(lab.counters(0, 1).lost)

Nodes are grouped in sites. Nodes of one site reach each other at once; from a site to another there is one link, which
all their nodes share. At the end of the context all processes of the lab are ended, and nothing of it is left.
``python -m benchmarks.lab --help`` does that from a shell.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import mmap
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from megatron_lossy.base.errors import refuse
from megatron_lossy.lab.environment import without_ranks

from .nodes import INTERFACE, Node, end_processes, unshare

__all__ = ["INTERFACE", "Counters", "Lab", "Link", "MissingRequirement", "check_lab", "end_in_order", "wait"]

_MAX_NODES = 64


#: Settings that make a device send packets of the MTU.
_NO_OFFLOAD = dict.fromkeys(
    (
        "tx-tcp-segmentation",
        "tx-tcp-ecn-segmentation",
        "tx-tcp-mangleid-segmentation",
        "tx-tcp6-segmentation",
        "tx-udp-segmentation",
    ),
    False,
) | {"rx-gro": True}


class MissingRequirement(RuntimeError):
    """A program or right that a lab needs is missing; the text is one line."""


@dataclass(frozen=True)
class Link:
    """One direction of a link. A packet that is lost has used the rate, as on a wire.

    ``delay``: seconds. ``loss``: share of packets. ``burst``: packets lost in a row on average, by a chain of two
    states (Gilbert-Elliott); ``None``: losses are independent. ``rate``: bits per second of IP packets; ``None``: no
    limit. ``queue``: bytes that may wait for the link. ``reorder``: share of packets that come ``late`` seconds later
    than the others. ``duplicate``: share of packets that come twice. ``mtu``: bytes; longer packets vanish without a word.
    """

    delay: float = 0.0
    loss: float = 0.0
    burst: float | None = None
    rate: float | None = None
    queue: float = math.inf
    reorder: float = 0.0
    late: float = 0.005
    duplicate: float = 0.0
    mtu: float | None = None

    def __post_init__(self) -> None:
        for name in ("loss", "reorder", "duplicate"):
            if not 0 <= getattr(self, name) < 1:
                raise refuse(name, getattr(self, name), "must be in [0, 1)")
        for name in ("delay", "late", "queue"):
            if not getattr(self, name) >= 0:
                raise refuse(name, getattr(self, name), "must be at least 0")
        if self.rate is not None and not self.rate > 0:
            raise refuse("rate", self.rate, "must be above 0")
        if self.burst is not None and not (self.burst >= 1 and self.loss <= self.burst / (1 + self.burst)):
            raise refuse("burst", self.burst, f"must be at least 1, and at least {self.loss / (1 - self.loss):.3g}")


class Counters(ctypes.Structure):
    """Counters of one direction of a link: packets and bytes that came in, and the fate of the packets."""

    _fields_ = [
        (name, ctypes.c_uint64)
        for name in (
            "packets",
            "bytes",
            "overflowed",
            "lost",
            "reordered",
            "duplicated",
            "delivered",
            "delivered_bytes",
        )
    ]

    def since(self, earlier: Counters) -> Counters:
        """Return the counts since ``earlier``."""
        return Counters(*(getattr(self, name) - getattr(earlier, name) for name, _ in self._fields_))


class _Settings(ctypes.Structure):
    _fields_ = [
        *((field.name, ctypes.c_double) for field in fields(Link)),
        ("seed", ctypes.c_uint64),
        ("generation", ctypes.c_uint64),
    ]


class _Pipe(ctypes.Structure):
    _fields_ = [("settings", _Settings), ("counters", Counters)]


def _layout(sites: int) -> type[ctypes.Structure]:
    """Return ``struct lab`` of emulator.c."""

    class Layout(ctypes.Structure):
        _fields_ = [
            *((name, ctypes.c_uint32) for name in ("nodes", "sites", "mtu", "ready")),
            ("unknown", ctypes.c_uint64),
            ("failed", ctypes.c_uint64),
            ("site", ctypes.c_uint32 * _MAX_NODES),
            ("pipes", _Pipe * sites**2),
        ]

    return Layout


def check_lab() -> None:
    """Raise :class:`MissingRequirement` unless this machine can have a lab."""
    if not sys.platform.startswith("linux"):
        raise MissingRequirement("a lab needs Linux")
    if os.geteuid():
        raise MissingRequirement("a lab needs root, for network namespaces")
    if shutil.which("ip") is None:
        raise MissingRequirement("a lab needs the command ip (Debian: apt install iproute2)")
    if _compiler() is None:
        raise MissingRequirement("a lab needs a C compiler, cc (Debian: apt install gcc libc6-dev)")
    if not os.path.exists("/dev/net/tun"):
        raise MissingRequirement("a lab needs /dev/net/tun (modprobe tun; in a container --device /dev/net/tun)")
    try:
        with ThreadPoolExecutor(1) as thread:
            thread.submit(unshare).result()
    except OSError as error:
        raise MissingRequirement(
            f"a lab needs network namespaces, but: {error.strerror} (in a container --privileged)"
        ) from None


def _compiler() -> str | None:
    return shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")


@functools.cache
def _emulator() -> int:
    """Return the file descriptor of the compiled emulator; its file is gone, so that a kill leaves nothing behind."""
    source = Path(__file__).with_name("emulator.c")
    with tempfile.TemporaryDirectory(prefix="megatron-lossy-lab-") as folder:
        program = f"{folder}/emulator"
        done = subprocess.run([_compiler(), "-O2", "-o", program, source], capture_output=True, text=True)
        if done.returncode:
            raise MissingRequirement(f"{source.name} cannot be compiled: {' '.join(done.stderr.split())[:200]}")
        return os.open(program, os.O_RDONLY | os.O_CLOEXEC)


class Lab:
    """Nodes in ``sites``, whose numbers of nodes are given, with ``link`` from each site to each other.

    ``link`` of ``None`` joins two nodes by a pair of veth devices, without an emulator: as fast as this machine is. These hand
    on 64 KB in one piece, which no cable does; without ``offload`` the sender cuts its data into packets of the
    MTU, and the receiver joins them again where it can.
    Raises :class:`MissingRequirement` on entry where there can be no lab.
    """

    def __init__(
        self,
        link: Link | None,
        sites: Sequence[int] = (1, 1),
        mtu: int = 1500,
        seed: int = 1,
        offload: bool = True,
    ) -> None:
        self._link, self._mtu, self._seed, self._offload = link, mtu, seed, offload
        self._site = [site for site, nodes in enumerate(sites) for _ in range(nodes)]
        self._sites = len(sites)
        if not 1 <= len(self._site) <= _MAX_NODES:
            raise refuse("sites", tuple(sites), f"must have 1 to {_MAX_NODES} nodes")
        if link is None and tuple(sites) != (1, 1):
            raise refuse("sites", tuple(sites), "a lab without an emulated link has two sites of one node")

    def __enter__(self) -> Lab:
        check_lab()
        with contextlib.ExitStack() as stack:
            self.nodes: list[Node] = []
            for number in range(len(self._site)):
                self.nodes.append(Node(number))
                stack.callback(self.nodes[-1].close)
            if self._link is None:
                self.nodes[0].join_by_wire(self.nodes[1])
                if not self._offload:
                    for node in self.nodes:
                        node.set_features(_NO_OFFLOAD)
            else:
                self._emulate(self._link, stack)
            for node in self.nodes:
                node.configure(self._mtu)
            stack.callback(end_processes, self.nodes)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _emulate(self, link: Link, stack: contextlib.ExitStack) -> None:
        program = _emulator()
        layout = _layout(self._sites)
        shared = os.memfd_create("lab")
        stack.callback(os.close, shared)
        os.ftruncate(shared, ctypes.sizeof(layout))
        self._shared = layout.from_buffer(mmap.mmap(shared, ctypes.sizeof(layout)))
        stack.callback(delattr, self, "_shared")  # the mapping goes with its last reference
        self._shared.nodes, self._shared.sites, self._shared.mtu = len(self.nodes), self._sites, self._mtu
        self._shared.site[: len(self._site)] = self._site
        self.set(link)
        tuns = []
        for node in self.nodes:
            tuns.append(node.open_tun())
            stack.callback(os.close, tuns[-1])
        command = [f"/proc/self/fd/{program}", *map(str, (shared, *tuns))]
        # A session of its own: Ctrl-C is for us. Should we be killed, it ends with its input.
        passed = (program, shared, *tuns)
        emulator = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=passed, start_new_session=True)
        self._emulator = emulator
        stack.callback(emulator.wait)
        stack.callback(emulator.kill)
        stack.callback(emulator.stdin.close)
        while not self._shared.ready:
            if emulator.poll() is not None:
                raise RuntimeError(f"the emulator ended with status {emulator.returncode}")
            time.sleep(0.001)

    def set(self, link: Link, source: int | None = None, destination: int | None = None, seed: int = 0) -> None:
        """Make ``link`` what joins the site ``source`` to the site ``destination``; ``None``: every one.

        The draws start anew, another way for another ``seed``. Packets already on their way arrive as before.
        """
        for a in range(self._sites) if source is None else (source,):
            for b in range(self._sites) if destination is None else (destination,):
                index = a * self._sites + b
                settings = self._shared.pipes[index].settings
                for field in fields(Link):
                    setattr(settings, field.name, getattr(link, field.name) or 0.0)
                settings.rate = (link.rate or 0.0) / 8
                settings.seed = (self._seed * 1_000_003 + seed) * _MAX_NODES**2 + index
                settings.generation += 1

    def counters(self, source: int, destination: int) -> Counters:
        """Return the counters so far of the link from the site ``source`` to the site ``destination``."""
        return Counters.from_buffer_copy(self._shared.pipes[source * self._sites + destination].counters)

    def dropped(self) -> int:
        """Return the packets that neither arrived nor were lost by a link, as the machine is too slow: best is 0."""
        failed = 0 if self._link is None else self._shared.failed
        return failed + sum(node.dropped() for node in self.nodes)

    def address(self, node: int, version: int = 4) -> str:
        """Return the IP address of ``node``."""
        return self.nodes[node].address if version == 4 else self.nodes[node].address6

    def environment(self, rank: int, port: int) -> dict[str, str]:
        """Return what a rank of gloo needs, one on each node; its store is at ``port`` of the first."""
        found = {"MASTER_ADDR": self.address(0), "MASTER_PORT": port, "WORLD_SIZE": len(self.nodes), "RANK": rank}
        found |= {"LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "GLOO_SOCKET_IFNAME": INTERFACE, "OMP_NUM_THREADS": 1}
        return without_ranks() | {name: str(value) for name, value in found.items()}

    def sysctl(self, name: str, value: object) -> None:
        """Set a sysctl on every node. Raise :class:`OSError` if the kernel refuses."""
        for node in self.nodes:
            node.sysctl(name, value)

    def start(self, node: int, command: Sequence[str], **options: Any) -> subprocess.Popen:
        """Call ``subprocess.Popen(command, **options)`` on ``node``."""
        return self.nodes[node].start(command, **options)

    def run(self, node: int, command: Sequence[str], timeout: float | None = None) -> subprocess.CompletedProcess:
        """Run ``command`` on ``node`` to its end, and capture what it says."""
        process = self.start(node, command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            said = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            process.communicate()
            raise
        return subprocess.CompletedProcess(command, process.returncode, *said)


def end_in_order() -> None:
    """Let SIGTERM end this program as an exception does, so that its lab is taken down; for a program's beginning."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


def wait(processes: Sequence[subprocess.Popen], grace: float = 5.0) -> int:
    """Wait until all have ended, or one has failed and others have had ``grace`` seconds to say why: then end them.

    Return 0 or the status of the first that failed by itself, as a shell would.
    """
    until = math.inf
    while any(process.poll() is None for process in processes) and time.monotonic() < until:
        if until == math.inf and any(process.returncode for process in processes):
            until = time.monotonic() + grace
        time.sleep(0.02)
    status = next((process.returncode for process in processes if process.returncode), 0)
    for process in processes:
        if process.poll() is None:
            process.terminate()
    for process in processes:
        process.wait()
    return status if status >= 0 else 128 - status
