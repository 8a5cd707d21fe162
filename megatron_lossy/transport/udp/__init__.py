"""Exchanges that travel as UDP datagrams: a unit that does not arrive in time is lost, and reported as lost.

The decisions are in ``c/`` (``engine.c`` names the parts), without input or output.
``session`` holds the agreement of ranks; callers use ``engine``.
"""

from ..leaving import PeerLost
from ..settings import Settings
from .channel import Channel, Transfer
from .engine import Engine

__all__ = ["Channel", "Engine", "PeerLost", "Settings", "Transfer"]
