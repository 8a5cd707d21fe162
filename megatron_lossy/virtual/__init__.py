"""N data-parallel workers on one device, in one process, losing and recovering as N real ranks would.

Worker i computes its micro-batches with its own, possibly stale, replica; its gradient shards are lost on their way
to their owners by the same channels, and recovered by the same rules, as over a network. There is one model, one
optimizer and one set of fresh weights; what a replica has stale is kept as old versions of shards, not as copies of
the model.
"""

from .base import VirtualRun
from .cluster import VirtualCluster
from .islands import VirtualIslands
from .replicas import VirtualReplicas

__all__ = ["VirtualCluster", "VirtualIslands", "VirtualReplicas", "VirtualRun"]
