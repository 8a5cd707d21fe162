"""Lossy boundaries between pipeline stages (SMART, APNet 2026, sections 2.1, 3.1 and 3.3; docs/boundaries.md).

The messages of a pipeline are activations forward and their gradients backward. What of a message is lost for good
becomes zeros at its receiver. Knows neither process groups nor Megatron.
"""

from .loss import Boundary, BoundaryLoss, Fate
from .messages import Message, Messages, received, sent
from .zero_fill import elements_of, lossy, mask_of, zero_fill_, zero_filled

__all__ = [
    "Boundary",
    "BoundaryLoss",
    "Fate",
    "Message",
    "Messages",
    "elements_of",
    "lossy",
    "mask_of",
    "received",
    "sent",
    "zero_fill_",
    "zero_filled",
]
