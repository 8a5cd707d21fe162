"""Rules for units that do not arrive. Pure functions on flat buffers; no process group, no megatron."""

from .base import Gradients, GradRecovery, LossScale, Parameters, Rule
from .rows import IndexedRows, MaskedRows, rows_for, unit_views
from .stale import Stale
