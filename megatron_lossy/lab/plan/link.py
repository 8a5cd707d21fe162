"""A link between two sites, as ``doctor --link`` measures it or a command line describes it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ...base.errors import cannot, refuse

LOSS = {"": 1.0, "%": 0.01}
SECONDS = {"": 1.0, "ms": 1e-3, "s": 1.0, "min": 60.0}
COUNT = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}


@dataclass(frozen=True)
class Link:
    """The worse of the two directions of a link.

    ``mbit``: rate, Mbit/s. ``rtt`` and ``spread``: the median round trip and how far most are apart, seconds. ``loss``: share
    of packets. ``burst``: packets lost in a row, on average. ``mtu``:
    bytes, if they were measured. Raises :class:`UsageError` for a value out of range.
    """

    mbit: float
    rtt: float
    loss: float = 0.0
    spread: float = 0.0
    burst: float = 1.0
    mtu: float | None = None

    def __post_init__(self) -> None:
        for name, value, least in (("--mbit", self.mbit, 1e-3), ("--rtt", self.rtt, 0), ("spread", self.spread, 0)):
            if not least <= value < math.inf:
                raise refuse(name, value, f"must be at least {least:g}")
        if not 0 <= self.loss < 1:
            raise refuse("--loss", self.loss, "must be in [0, 1)")

    @property
    def rate(self) -> float:
        """Bytes per second."""
        return self.mbit * 1e6 / 8


def quantity(flag: str, text: str, units: Mapping[str, float], least: float = 0.0) -> float:
    """Return the number in ``text`` times its unit, one of ``units``. Raise :class:`UsageError` below ``least``."""
    found = re.fullmatch(r"\s*((?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*([A-Za-z%]*)\s*", text)
    value = float(found[1]) * units.get(found[2], math.nan) if found else math.nan
    if not least <= value < math.inf:
        named = ", ".join(filter(None, units))
        raise refuse(flag, text, f"must be a number of at least {least:g}, with a unit of {named}, or none")
    return value


def read_link(file: str) -> Link:
    """Return the link in a file of ``doctor --link``. Raise :class:`UsageError`."""
    try:
        content = json.loads(Path(file).read_text(encoding="utf-8"))
        ways = [content["there"], content["back"]]
        numbers = {
            "mbit": min(way["mbit"] for way in ways),
            "rtt": content["rtt_ms"] / 1e3,
            "loss": max(way["loss"] for way in ways),
            "spread": content["rtt_spread_ms"] / 1e3,
            "burst": max(way["burst"] for way in ways),
            "mtu": min(way["mtu"] for way in ways),
        }
        return Link(**{name: float(value) for name, value in numbers.items()})
    except OSError as error:
        raise cannot("--link", file, "read", error) from None
    except (ValueError, KeyError, TypeError):
        raise refuse("--link", file, "must be a file of python -m megatron_lossy doctor --link") from None
