"""Exchanges of replicas beside gradients: fingerprints, repairs, averages; and averages of islands. No megatron.

Replicas of one training job are kept equal over :class:`Peers`, with one replica in each process or all in one process.
Islands, training jobs of their own, average some of their parameters by a :class:`Rule` in :class:`Rounds`.
"""

from .mean import Crossing, InMemory, Mean
from .methods import check_between, make_rule, notes_on_averaging
from .peers import Handle, LocalPeers, Peers, RankPeers
from .places import Part, Places
from .ranks import BetweenRanks, Reliable
from .repair import Compared, compare, repair
from .replicas import FullReplicas, Gradients, Mismatch
from .rounds import Rounds, Weights
from .rule import Rule
from .stopping import Stopping
from .subset import Subset
from .synchroniser import Copies, Replica, Synced, Synchroniser
from .world import IslandWorld

__all__ = [
    "BetweenRanks",
    "Compared",
    "Copies",
    "Crossing",
    "FullReplicas",
    "Gradients",
    "Handle",
    "InMemory",
    "IslandWorld",
    "LocalPeers",
    "Mean",
    "Mismatch",
    "Part",
    "Peers",
    "Places",
    "RankPeers",
    "Reliable",
    "Replica",
    "Rounds",
    "Rule",
    "Stopping",
    "Subset",
    "Synced",
    "Synchroniser",
    "Weights",
    "check_between",
    "compare",
    "make_rule",
    "notes_on_averaging",
    "repair",
]
