"""What replicas exchange beside gradients: fingerprints, repairs, averages of parameters. No megatron.

Everything works over :class:`Peers`, and so alike for one replica in each process and for all of them in one.
"""

from .peers import Handle, LocalPeers, Peers, RankPeers
from .repair import Compared, compare, repair
from .replicas import FullReplicas, Gradients, Mismatch
from .synchroniser import Copies, Replica, Synced, Synchroniser

__all__ = [
    "Compared",
    "Copies",
    "FullReplicas",
    "Gradients",
    "Handle",
    "LocalPeers",
    "Mismatch",
    "Peers",
    "RankPeers",
    "Replica",
    "Synced",
    "Synchroniser",
    "compare",
    "repair",
]
