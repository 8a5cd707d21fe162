"""Tables and figures from the metrics of runs: ``python -m megatron_lossy.report --help``."""

from .read import read_runs
from .runs import Run
from .table import LossTable, loss_table, write_report

__all__ = ["LossTable", "Run", "loss_table", "read_runs", "write_report"]
