"""The report of a folder of runs as files: table in Markdown and CSV, curves of losses and scalars in PNG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..files import write_text, writing
from .runs import Run
from .scalars import file_name, with_predictions
from .table import LossTable

TABLE_MARKDOWN, TABLE_CSV, CURVES = "loss_table.md", "loss_table.csv", "training_curves.png"


def report_files(scalars: Sequence[str] = ()) -> list[str]:
    """The names of a report's files, with a figure for each group of ``scalars``."""
    figures = [f"{file_name(group[0])}.png" for group in with_predictions(scalars)]
    return [TABLE_MARKDOWN, TABLE_CSV, CURVES, *figures]


def write_report(runs: Sequence[Run], table: LossTable, folder: str | Path, scalars: Sequence[str] = ()) -> list[Path]:
    """Write table and curves of ``runs`` to ``folder``, replacing an older report. Returns the files.

    ``scalars``: recorded scalars to draw too. A prediction is in the figure of its scalar if both are named.
    """
    from .curves import plot_curves, plot_scalars

    files = report_files(scalars)
    folder = Path(folder)
    with writing("--out", folder):
        folder.mkdir(parents=True, exist_ok=True)
        # Large files go first: if they do not fit, the older report is still complete.
        plot_curves(runs, folder / CURVES)
        for group, figure in zip(with_predictions(scalars), files[3:], strict=True):
            plot_scalars(runs, group, folder / figure)
        write_text(folder / TABLE_MARKDOWN, table.markdown())
        write_text(folder / TABLE_CSV, table.csv())
    return [folder / name for name in files]
