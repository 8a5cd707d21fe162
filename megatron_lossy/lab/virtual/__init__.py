"""N data-parallel workers on one device, in one process, which lose and recover as N real ranks would.

Worker i computes its micro-batches with its own, possibly stale, replica. On the way to their owners its gradient
shards are lost by the same channels, and recovered by the same rules, as over a network. There is one model, one
optimizer and one set of fresh weights. The stale parts of replicas are kept as old versions of shards, not as copies of
the model.
"""

from .base import VirtualRun
from .cluster import VirtualCluster

__all__ = ["VirtualCluster", "VirtualRun"]
