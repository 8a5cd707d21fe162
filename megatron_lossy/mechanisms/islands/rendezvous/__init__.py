"""Launches that come and go find each other at an existing service, torchft's lighthouse (docs/elastic.md).

All that ask hear the same: what each that is alive says of itself. What to make of it is up to those who ask.
"""

from .base import Data, Rendezvous, Unreachable
from .watch import Watch

__all__ = ["Data", "Rendezvous", "Unreachable", "Watch"]
