"""What replicas exchange beside gradients, after an update."""

from .mean import Crossing, InMemory, Mean
from .methods import check_islands, make_rule, notes_on_averaging
from .rounds import Rounds, Weights
from .rule import Rule
from .subset import Subset

__all__ = [
    "Crossing",
    "InMemory",
    "Mean",
    "Rounds",
    "Rule",
    "Subset",
    "Weights",
    "check_islands",
    "make_rule",
    "notes_on_averaging",
]
