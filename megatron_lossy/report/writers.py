"""The report of a folder of runs as files: table in Markdown and CSV, curves in PNG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..errors import refuse
from ..files import write_text
from .runs import Run
from .table import LossTable

TABLE_MARKDOWN, TABLE_CSV, CURVES = "loss_table.md", "loss_table.csv", "training_curves.png"


def write_report(runs: Sequence[Run], table: LossTable, folder: str | Path) -> list[Path]:
    """Write table and curves of ``runs`` to ``folder``, replacing an older report. Returns the files."""
    from .curves import plot_curves

    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / TABLE_MARKDOWN, table.markdown())
        write_text(folder / TABLE_CSV, table.csv())
        plot_curves(runs, folder / CURVES)
    except OSError as error:
        raise refuse("--out", folder, f"cannot be written: {error.strerror}") from None
    return [folder / name for name in (TABLE_MARKDOWN, TABLE_CSV, CURVES)]
