"""Exchanges that travel as UDP datagrams: what does not arrive in time is lost, and said to be.

What decides is in ``_engine.c``, without input or output; the tests drive models in Python with the same events.
``session`` says what ranks must agree on, ``engine`` is what others call.
"""

from .engine import Channel, Engine, PeerLost, Transfer
from .settings import UdpSettings

__all__ = ["Channel", "Engine", "PeerLost", "Transfer", "UdpSettings"]
