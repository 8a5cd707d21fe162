"""Table 1 of *Distributed Training under Packet Loss* (Weintraub, Banner, Orda, 2025), for comparison.

LLaMA-2 7B, 64 accelerators, 5,000 iterations, gradients and parameters lost at equal rates.
"""

from __future__ import annotations

from ..report.table import Entry

RATES = (0.0, 0.1, 0.2, 0.3, 0.4)
SOURCE = "paper: Weintraub, Banner, Orda (2025), Table 1: LLaMA-2 7B, 64 workers, 5,000 iterations"
TABLE_1 = {
    "train loss": (1.645, 1.653, 1.672, 1.684, 1.710),
    "train PPL": (5.183, 5.223, 5.325, 5.388, 5.531),
    "val loss": (2.366, 2.378, 2.392, 2.403, 2.430),
    "val PPL": (10.653, 10.778, 10.934, 11.055, 11.362),
}
# Changes are as printed; they were computed from more digits than the table shows.
CHANGES = {
    "train loss": (0.47, 1.63, 2.36, 3.95),
    "train PPL": (0.77, 2.72, 3.95, 6.71),
    "val loss": (0.49, 1.10, 1.56, 2.72),
    "val PPL": (1.17, 2.63, 3.77, 6.65),
}


def paper_entry(metric: str, rate: float) -> Entry:
    """The paper's value in a row of Table 1; an entry without runs if the paper has none."""
    if metric not in TABLE_1 or rate not in RATES:
        return Entry(float("nan"), None, None, 0)
    column = RATES.index(rate)
    change = CHANGES[metric][column - 1] if column else None
    return Entry(TABLE_1[metric][column], None, change, 1)
