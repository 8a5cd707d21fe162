"""Networks between the machines of islands and that of the coordinator: a lab, or this machine's loopback."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from benchmarks.common import free_port
from benchmarks.lab import INTERFACE, Lab, Link

_CUT = Link(mtu=1)
_PORT = 29510


class Network(Protocol):
    """Machines, numbered from 0; that of the coordinator is the last. ``can_cut``: whether one can be cut off from all others."""

    can_cut: bool
    coordinator: str

    def start(self, machine: int, command: Sequence[str], env: dict[str, str], **options: Any) -> subprocess.Popen:
        """Call ``subprocess.Popen`` on ``machine``, or on the last, -1."""

    def set(self, machine: int, there: bool) -> None:
        """Cut ``machine`` off, or join it again."""


class LabNetwork:
    """Namespaces of the kernel, with a ``link`` from each to each other."""

    can_cut = True

    def __init__(self, lab: Lab, link: Link) -> None:
        self._lab, self._link = lab, link
        self.coordinator = f"{lab.address(len(lab.nodes) - 1)}:{_PORT}"

    def start(self, machine: int, command: Sequence[str], env: dict[str, str], **options: Any) -> subprocess.Popen:
        node = machine % len(self._lab.nodes)
        return self._lab.start(node, command, env=env | {"GLOO_SOCKET_IFNAME": INTERFACE}, **options)

    def set(self, machine: int, there: bool) -> None:
        for other in set(range(len(self._lab.nodes))) - {machine}:
            for ends in ((machine, other), (other, machine)):
                self._lab.set(self._link if there else _CUT, *ends)


class Loopback:
    """This machine alone."""

    can_cut = False

    def __init__(self) -> None:
        self.coordinator = f"127.0.0.1:{free_port()}"

    def start(self, machine: int, command: Sequence[str], env: dict[str, str], **options: Any) -> subprocess.Popen:
        return subprocess.Popen(command, env=env, start_new_session=True, **options)

    def set(self, machine: int, there: bool) -> None:
        raise NotImplementedError("nothing can be cut off on the loopback")


@contextlib.contextmanager
def lab_of(machines: int, link: Link) -> Iterator[LabNetwork]:
    """Yield a lab of so many machines. Raise :class:`.lab.MissingRequirement`."""
    with Lab(link, [1] * machines) as lab:
        yield LabNetwork(lab, link)
