"""Rules for units that do not arrive. Pure functions on flat buffers; no process group, no megatron."""

from .base import Gradients, GradRecovery, Parameters, Rule
from .compensated import Compensated
from .priority import ParamPriority, Priority, Protection
from .protected import Protected, Required, Spared
from .rows import IndexedRows, MaskedRows, rows_for, unit_views
from .stale import Prioritised, Stale

__all__ = [
    "Compensated",
    "GradRecovery",
    "Gradients",
    "IndexedRows",
    "MaskedRows",
    "ParamPriority",
    "Parameters",
    "Prioritised",
    "Priority",
    "Protected",
    "Protection",
    "Required",
    "Rule",
    "Spared",
    "Stale",
    "rows_for",
    "unit_views",
]
