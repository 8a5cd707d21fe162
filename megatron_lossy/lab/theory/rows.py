"""The comparisons of ``scripts/theory.py`` as rows: CSV, Markdown, and the agreement of simulation and formula."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .simulate import Measured

#: The fields that tell the rows of a part apart, with their headings, by the beginning of the part's name.
_KEYS = (
    ("time to", (("p", "p"), ("x", "broadcasts"))),
    ("age", (("p", "p"), ("x", "age"))),
    ("largest age", (("p", "p"), ("x", "links x units"))),
    ("recovery", (("workers", "N"), ("p", "p"))),
    ("", (("p", "p"),)),
)
_SHOWN_WORKERS = (4, 64)
STABILITY = "stability"


@dataclass(frozen=True)
class Row:
    """One comparison. ``x``: the argument of the part: p, N, broadcasts, age or links.

    ``paper``: the paper's formula for it; ``uncorrelated``: the value for uncorrelated increments, in a real run.
    """

    part: str
    quantity: str
    p: float
    workers: int
    x: float
    measured: Measured
    formula: float
    paper: float | None = None
    uncorrelated: float | None = None


def of(rows: Iterable[Row], part: str, quantity: str | None = None, **fields: float) -> list[Row]:
    """The rows of ``part`` (and ``quantity``) whose ``fields`` have these values."""
    return [
        row
        for row in rows
        if row.part == part
        and quantity in (None, row.quantity)
        and all(getattr(row, name) == value for name, value in fields.items())
    ]


def write_csv(rows: Sequence[Row], path: Path) -> None:
    """Write all rows, with every digit."""
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        keys = ["part", "quantity", "p", "workers", "x"]
        writer.writerow([*keys, "measured", "standard_error", "closed_form", "paper", "uncorrelated"])
        for row in rows:
            numbers = (row.measured.mean, row.measured.error, row.formula, row.paper, row.uncorrelated)
            texts = ["" if number is None else repr(float(number)) for number in numbers]
            writer.writerow([row.part, row.quantity, row.p, row.workers, row.x, *texts])


def agreement(rows: Sequence[Row]) -> str:
    """A sentence: the number of simulated values within two standard errors of the closed form."""
    deviations = np.array(
        [
            abs(row.measured.mean - row.formula) / row.measured.error
            for row in rows
            if row.part != "real run"
            and not row.part.startswith(STABILITY)
            and row.measured.error > 1e-6 * max(abs(row.formula), 1.0)
        ]
    )
    return (
        f"Of {len(deviations)} simulated values with an error, {100 * (deviations <= 2).mean():.1f} % are within two "
        f"standard errors of the closed form (a normal law has 95.4 %; values of one run are correlated); the farthest is "
        f"{deviations.max():.1f} away."
    ) + _stability(rows)


def _stability(rows: Sequence[Row]) -> str:
    """A sentence on limits found by bisection with a finite number of receivers, which no standard error describes."""
    ratios = [row.measured.mean / row.formula - 1 for row in rows if row.part.startswith(STABILITY)]
    if not ratios:
        return ""
    return (
        f" Largest stable learning rates are {100 * min(ratios):+.1f} to {100 * max(ratios):+.1f} % beside theirs, found to "
        "0.5 % with the mean of finitely many receivers."
    )


def markdown(rows: Sequence[Row]) -> str:
    """A table per part; for recovery only some N."""
    text = []
    for part in dict.fromkeys(row.part for row in rows):
        chosen = of(rows, part)
        if part.startswith("recovery"):
            chosen = [row for row in chosen if row.workers in _SHOWN_WORKERS]
        text += [f"## {part[0].upper()}{part[1:]}", "", *_table(part, chosen), ""]
    return "\n".join(text)


def _table(part: str, rows: Sequence[Row]) -> list[str]:
    keys = next(keys for start, keys in _KEYS if part.startswith(start))
    quantities = list(dict.fromkeys(row.quantity for row in rows))
    extras = {
        name: {row.quantity for row in rows if getattr(row, name) is not None} for name in ("uncorrelated", "paper")
    }
    measured = "measured" if part == "real run" else "simulated"
    heads = [head for _, head in keys]
    for quantity in quantities:
        heads += [f"{quantity}, {measured}", "closed form"]
        heads += ["uncorrelated"] * (quantity in extras["uncorrelated"]) + ["paper"] * (quantity in extras["paper"])
    lines = ["| " + " | ".join(heads) + " |", "| " + " | ".join(["---"] * len(heads)) + " |"]
    for key in dict.fromkeys(tuple(getattr(row, field) for field, _ in keys) for row in rows):
        fields = {field: value for (field, _), value in zip(keys, key, strict=True)}
        cells = [f"{value:g}" for value in key]
        for quantity in quantities:
            [row] = of(rows, part, quantity, **fields)
            cells += [_with_error(row.measured), f"{row.formula:.4g}"]
            cells += [f"{getattr(row, name):.4g}" for name in extras if quantity in extras[name]]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _with_error(value: Measured) -> str:
    """Mean and error to the first digit of the error, or two if that is a 1."""
    if value.error <= 1e-6 * abs(value.mean):
        return f"{value.mean:.4g}"
    places = int(-np.floor(np.log10(value.error)))
    places += value.error * 10.0**places < 2
    return f"{value.mean:.{max(places, 0)}f} ± {value.error:.{max(places, 0)}f}"
