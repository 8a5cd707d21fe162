"""The address of this host that datagrams are sent from, and the speed of its interface."""

from __future__ import annotations

import socket

import psutil

from ..base.errors import UsageError, refuse

_FAMILIES = (socket.AF_INET, socket.AF_INET6)
#: Bytes per second of an interface that does not report its speed, and of the loopback, which has no limit.
UNKNOWN_SPEED = 125e6
LOOPBACK_SPEED = 12.5e9


def find_address(interface: str | None, master: str) -> str:
    """Return the first address of ``interface``, IPv4 before IPv6; without one the address that reaches ``master``."""
    if interface is None:
        return _source_towards(master)
    interfaces = psutil.net_if_addrs()
    if interface not in interfaces:
        raise refuse("--udp-interface", interface, f"this host has {', '.join(sorted(interfaces))}")
    for family in _FAMILIES:
        for address in interfaces[interface]:
            if address.family == family:
                return address.address
    raise refuse("--udp-interface", interface, "needs an IPv4 or IPv6 address")


def _source_towards(master: str) -> str:
    try:
        found = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)
    except OSError as error:
        raise UsageError(f"MASTER_ADDR {master}: {error.strerror}; --udp-interface says what to send from") from None
    for family, kind, protocol, _, address in found:
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.connect(address)
            except OSError:
                continue
            return probe.getsockname()[0]
    raise UsageError(f"MASTER_ADDR {master}: no route to it; --udp-interface says what to send from")


def interface_of(address: str) -> str | None:
    """Return the interface that has ``address``."""
    bare = address.partition("%")[0]
    for name, addresses in psutil.net_if_addrs().items():
        if any(found.address.partition("%")[0] == bare for found in addresses if found.family in _FAMILIES):
            return name
    return None


def speed_of(address: str) -> float:
    """Return the speed that the interface of ``address`` reports, in bytes per second."""
    name = interface_of(address)
    if address.startswith("127.") or address == "::1" or name == "lo":
        return LOOPBACK_SPEED
    stats = psutil.net_if_stats().get(name) if name else None
    return stats.speed * 125e3 if stats and stats.speed else UNKNOWN_SPEED


def mtu_of(address: str) -> int | None:
    """Return the MTU of the interface that has ``address``, in bytes; ``None`` if it is not known."""
    stats = psutil.net_if_stats().get(interface_of(address) or "")
    return stats.mtu if stats and stats.mtu else None


def resolve(address: str, port: int) -> tuple[int, tuple]:
    """Return family and socket address of a numeric ``address``."""
    family, _, _, _, found = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM, flags=socket.AI_NUMERICHOST)[0]
    return family, found
