"""What is exchanged, how it is cut into units, and what came of it. Pure: NumPy only."""

from .delivery import Observation
from .exchange import KINDS, Exchange, Stream
from .units import BucketUnits, cut

__all__ = ["KINDS", "BucketUnits", "Exchange", "Observation", "Stream", "cut"]
