"""``python -m megatron_lossy.lab trace FILE.csv --out FILE.npz``: a measurement as a circular trace for ``--loss-model trace``.

The file has a heading. A column ``arrived`` (0 or 1) has a row for each packet, in the order in which they were sent. Or a column
``sequence`` has the numbers of those that arrived, as in a capture: a number between the first and the last that is not there was
lost. Numbers of 16 bits may begin again. Columns ``source`` and ``destination``, ranks from 0 on, name the link; without them all
links have the same losses, each from another place on.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ..base.errors import ArgumentParser, cannot, refuse
from ..base.files import replace_file, writing
from ..channel.trace import SEQUENCE


def main(arguments: Sequence[str]) -> None:
    """Run the command line. Raises :class:`UsageError`."""
    parser = ArgumentParser(
        "megatron_lossy.lab trace",
        description=__doc__.partition("\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", metavar="FILE.csv", help="the measurement")
    parser.add_argument("--out", required=True, metavar="FILE.npz", help="for --loss-model trace --trace FILE.npz")
    given = parser.parse_args(arguments)
    found = sequence(given.file)

    def write(path: Path) -> None:
        with open(path, "wb") as file:
            np.savez_compressed(file, **{SEQUENCE: found})

    with writing("--out", given.out):
        replace_file(given.out, write)
    links = found if len(found) == 1 else found[~np.eye(len(found), dtype=bool)]
    print(f"{given.out}: a link has {found.shape[2]:,} packets, {100 * (1 - links.mean()):.3g} % are lost")


def sequence(path: str) -> np.ndarray:
    """Return the circular trace in the CSV ``path``, bool[N, N, packets]. Raises :class:`UsageError`.

    Links of fewer packets than others begin again within it. A link without any loses nothing.
    """
    try:
        with open(path, newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        column = "arrived" if rows and "arrived" in rows[0] else SEQUENCE
        apart = bool(rows) and "source" in rows[0]
        links: dict[tuple[int, int], list[int]] = {}
        for row in rows:
            link = (int(row["source"]), int(row["destination"])) if apart else (0, 0)
            links.setdefault(link, []).append(int(row[column]))
        if not links or min(map(min, links)) < 0 or min(map(min, links.values())) < 0:
            raise ValueError("no packets")
    except OSError as error:
        raise cannot("FILE.csv", path, "read", error) from None
    except (KeyError, TypeError, ValueError, csv.Error):
        columns = "arrived (0 or 1) or sequence, or also source and destination"
        raise refuse("FILE.csv", path, f"must have a heading with {columns}, and whole numbers") from None
    fates = {link: _fates(np.array(values), column) for link, values in links.items()}
    size, length = 1 + max(map(max, fates)), max(map(len, fates.values()))
    found = np.ones((size, size, length), dtype=bool)
    for link, fate in fates.items():
        found[link] = np.resize(fate, length)
    return found


def _fates(values: np.ndarray, column: str) -> np.ndarray:
    """Return whether each packet arrived, in order."""
    if column == "arrived":
        return values != 0
    if values.max() < 1 << 16 and (np.diff(values) < -(1 << 15)).any():
        values = np.unwrap(values, period=1 << 16)
    fate = np.zeros(values.max() - values.min() + 1, dtype=bool)
    fate[values - values.min()] = True
    return fate
