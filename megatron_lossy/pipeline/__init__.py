"""Pipeline stages: losses between them, and the order of their work. Knows neither process groups nor Megatron.

Lossy boundaries (SMART, APNet 2026, sections 2.1, 3.1 and 3.3; docs/boundaries.md): the messages of a pipeline are
activations forward and their gradients backward. Packets that are lost for good become zeros at the receiver.

The asynchronous pipeline (AsyncMesh, section 3; docs/async_pipeline.md): the order of a stage's passes, and the
versions of its weights that are under way.
"""

from .loss import Boundary, BoundaryLoss, Fate
from .messages import Message, Messages, received, sent
from .schedule import Pass, Stage
from .stash import Stash, Version
from .zero_fill import elements_of, lossy, mask_of, zero_fill_, zero_filled

__all__ = [
    "Boundary",
    "BoundaryLoss",
    "Fate",
    "Message",
    "Messages",
    "Pass",
    "Stage",
    "Stash",
    "Version",
    "elements_of",
    "lossy",
    "mask_of",
    "received",
    "sent",
    "zero_fill_",
    "zero_filled",
]
