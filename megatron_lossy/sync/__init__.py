"""What replicas exchange beside gradients, after an update."""

from .mean import Crossing, InMemory, Mean
from .methods import make_rule
from .rounds import Rounds, Weights
from .rule import Rule
from .subset import Subset

__all__ = ["Crossing", "InMemory", "Mean", "Rounds", "Rule", "Subset", "Weights", "make_rule"]
