"""``plot``: a heat map of losses per link."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from ..base.files import replace_file
from ..config import PHASES
from .reader import DeliveryLogFolder
from .scan import Rates, percent, scan

_TITLES = {"grad": "gradients (reduce-scatter)", "param": "parameters (all-gather)"}


def link_rates(folder: DeliveryLogFolder, stream: str) -> dict[str, Rates]:
    """Units sent and lost on every link of ``stream``, by phase."""
    rates = {phase: Rates(folder.size(stream)) for phase in PHASES}
    for _, rows in scan(folder):
        if rows.stream[0] == stream and rows.phase[0] in rates:
            rates[rows.phase[0]].add(rows)
    return rates


def plot_links(folder: DeliveryLogFolder, stream: str, out: Path) -> None:
    """Write the picture to ``out``, in the format of its suffix."""
    panels = link_rates(folder, stream)
    top = max(float(np.nanmax(rates.rates, initial=0.0)) for rates in panels.values()) or 1.0
    figure = Figure(figsize=(10.4, 5.2), layout="compressed")
    FigureCanvasAgg(figure)
    for axes, phase in zip(figure.subplots(1, 2, sharey=True), PHASES):
        rates = panels[phase]
        axes.set_facecolor("0.88")  # shows where nothing is sent: a worker's own shard
        image = axes.imshow(rates.rates, vmin=0, vmax=top, cmap="viridis", interpolation="nearest")
        lost = f"{percent(rates.mean)} lost" if rates.sent.any() else "nothing lost"
        axes.set_title(f"{_TITLES[phase]}: {lost}", fontsize=11)
        axes.set_xlabel("destination rank")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(9, integer=True))
    figure.axes[0].set_ylabel("source rank")
    shares = PercentFormatter(xmax=1, decimals=0 if top > 0.05 else 1, symbol=" %")
    figure.colorbar(image, ax=figure.axes, label="share of units lost", format=shares, shrink=0.9)
    first, last = folder.covered(next(iter(folder.ranks)))[0]
    figure.suptitle(f"Losses per link, {stream}, iterations {first} to {last}", fontsize=12)
    replace_file(out, lambda aside: figure.savefig(aside, dpi=160, format=out.suffix[1:]))
