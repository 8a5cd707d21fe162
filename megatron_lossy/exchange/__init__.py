"""What is exchanged, how it is cut into units, and what came of it. Pure: NumPy only."""

from .delivery import Delivery
from .exchange import KINDS, Exchange, Stream
from .units import BucketUnits, cut, units_of

__all__ = ["KINDS", "BucketUnits", "Delivery", "Exchange", "Stream", "cut", "units_of"]
