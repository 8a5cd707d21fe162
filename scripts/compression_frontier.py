"""Draw validation loss against bytes of the studies of docs/results/compression.md, for each loss rate.

python -m scripts.compression_frontier
"""

from __future__ import annotations

import csv
import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from megatron_lossy.base.coding.blocks import BlockCode
from megatron_lossy.base.files import replace_file

STUDIES = Path(__file__).parents[1] / "benchmarks" / "results" / "studies"
OUT = STUDIES / "compression" / "frontier.png"
LOSS, BYTES = "val loss (owner)", "wire bytes"
#: Formats of both directions in the run that bytes are relative to.
WHOLE, CODED = "float32", "int8 + int8"
#: Of the studies.
CODE, PACKET_BYTES = BlockCode(8, 128), 1024


def runs_of(name: str) -> list[dict[str, str]]:
    """Return the runs of a study."""
    return list(csv.DictReader(json.loads((STUDIES / name / "study.json").read_text())["runs"]))


def relative_bytes(runs: list[dict[str, str]]) -> dict[str, float]:
    """Return bytes over those of float32, which the metric of codes leaves out, by form of values."""
    elements = CODE.elements(PACKET_BYTES)
    sent = {run["level"]: float(run[BYTES]) for run in runs if run[BYTES]}
    whole = sent[CODED] * 4 * elements / CODE.size(elements)
    return {WHOLE: 1.0} | {form: value / whole for form, value in sent.items()}


def points_of(name: str) -> Mapping[str, list[tuple[str, float, np.ndarray]]]:
    """Return, by loss rate, the forms of values of the study ``name``, their relative bytes and losses by seed."""
    runs = runs_of(name)
    share = relative_bytes(runs)
    losses: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        losses[run["variant"]][run["level"]].append(float(run[LOSS]))
    return {
        variant: sorted(((form, share[form], np.array(found)) for form, found in forms.items()), key=lambda one: one[1])
        for variant, forms in losses.items()
    }


def draw() -> Figure:
    """Draw the figure."""
    figure = Figure(figsize=(9, 5.4), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    points = points_of("compression") | points_of("compression_copies")
    shares = {form: share for forms in points.values() for form, share, _ in forms}
    for number, (rate, forms) in enumerate(points.items()):
        mean = [losses.mean() for _, _, losses in forms]
        error = [losses.std(ddof=1) / len(losses) ** 0.5 for _, _, losses in forms]
        places = [share * 1.015 ** (number - 1.5) for _, share, _ in forms]  # side by side
        axes.errorbar(places, mean, error, marker="o", capsize=3, linestyle="none", label=rate)
    for form, share in shares.items():
        axes.axvline(share, color="grey", linestyle=":", linewidth=1, zorder=0)
        text = form.replace(", ", ",\n")
        axes.annotate(text, (share, 1.01), xycoords=("data", "axes fraction"), ha="center", va="bottom", fontsize=9.5)
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(shares.values()), [f"{share:.2f}" for share in shares.values()])
    axes.minorticks_off()
    axes.set_xlim(0.16, 1.2)
    axes.margins(y=0.12)
    axes.set_xlabel("bytes, over those of float32 + float32 sent once")
    axes.set_ylabel("validation loss after 150 iterations (owners' weights)")
    axes.grid(True, axis="y", alpha=0.35)
    axes.legend(loc="upper center")
    return figure


if __name__ == "__main__":
    replace_file(OUT, lambda aside: draw().savefig(aside, format="png"))
    print(f"wrote {OUT}")
