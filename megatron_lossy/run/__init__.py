"""One run, real or virtual: its clock, groups, observers, metrics, saved state, and actions after an update.

A real run has one worker in each process, whose exchanges Megatron makes (:mod:`megatron_lossy.hooks`). A virtual run
has all of them in one (:mod:`megatron_lossy.virtual`). Training, logs and checkpoints use both in the same way.
"""

from .base import Run
from .observers import make_observers
from .saved import REPLICAS
from .weights import ModelChunks

__all__ = ["REPLICAS", "ModelChunks", "Run", "make_observers"]
