"""What the receiver does about what is missing. Pure functions on flat buffers; no process group, no megatron."""

from .base import GradRecovery, Outcome
from .previous import Previous
from .renormalize import Renormalize
from .renormalize_remote import RenormalizeRemote
from .rows import IndexedRows, MaskedRows, rows_for, unit_views
from .zero import Zero

GRAD_RECOVERIES: dict[str, type[GradRecovery]] = {
    "renormalize": Renormalize,
    "renormalize-remote": RenormalizeRemote,
    "previous": Previous,
    "zero": Zero,
}

__all__ = [
    "GRAD_RECOVERIES",
    "GradRecovery",
    "IndexedRows",
    "MaskedRows",
    "Outcome",
    "rows_for",
    "unit_views",
]
