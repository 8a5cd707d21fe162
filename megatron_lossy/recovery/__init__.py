"""Rules for units that do not arrive. Pure functions on flat buffers; no process group, no megatron."""

from .base import Gradients, GradRecovery, LossScale, Parameters, Rule, Stale
from .rows import IndexedRows, MaskedRows, rows_for, unit_views
