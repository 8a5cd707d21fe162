"""What is done about units that do not arrive. Pure functions on flat buffers; no process group, no megatron."""

from .base import GradRecovery, Reduction, Rule
from .compensated import Compensated
from .priority import ParamPriority, Priority, Protection
from .rows import IndexedRows, MaskedRows, rows_for, unit_views
from .stale import Stale

__all__ = [
    "Compensated",
    "GradRecovery",
    "IndexedRows",
    "MaskedRows",
    "ParamPriority",
    "Priority",
    "Protection",
    "Reduction",
    "Rule",
    "Stale",
    "rows_for",
    "unit_views",
]
