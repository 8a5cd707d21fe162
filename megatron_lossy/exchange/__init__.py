"""What is exchanged, how it is cut into units, and what came of it. Pure: NumPy only."""

from .delivery import Delivery
from .exchange import KINDS, Exchange, Stream
from .lost import Lost
from .units import BucketUnits, cut, units_of

__all__ = ["KINDS", "BucketUnits", "Delivery", "Exchange", "Lost", "Stream", "cut", "units_of"]
