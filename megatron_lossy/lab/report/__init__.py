"""Tables and figures from the metrics of runs: ``python -m megatron_lossy.report --help``."""

from .read import read_runs
from .runs import Run
from .table import LossTable, loss_table, write_report

__all__ = ["LossTable", "Run", "loss_table", "plot_curves", "plot_scalars", "read_runs", "write_report"]


def __getattr__(name: str):
    # matplotlib takes a second to import, and a table needs none.
    if name in ("plot_curves", "plot_scalars"):
        from . import curves

        return getattr(curves, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
