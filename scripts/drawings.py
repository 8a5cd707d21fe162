"""Draw docs/idea.png, one shard in one iteration of lossy training, and docs/sites.png, which data crosses between two sites.

python scripts/drawings.py
"""

from __future__ import annotations

from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from megatron_lossy.base.files import replace_file

DOCS = Path(__file__).parent.parent / "docs"

CARD, INK, GREY = "#fbfbf9", "#24292f", "#6a737d"
ARRIVED, LOST, STALE = "#2f6fb0", "#c8452e", "#e3a63b"
ROWS = (2.55, 1.7, 0.85, 0.0)


def box(axes, x: float, y: float, text: str, fill: str, width: float, height: float = 0.56, ink: str = "white"):
    """Draw a rounded box around (x, y)."""
    corner = (x - width / 2, y - height / 2)
    shape = "round,pad=0,rounding_size=0.1"
    axes.add_patch(FancyBboxPatch(corner, width, height, boxstyle=shape, facecolor=fill, edgecolor="none"))
    axes.text(x, y, text, color=ink, ha="center", va="center", fontsize=11.5, linespacing=1.35)


def arrow(axes, start: tuple[float, float], end: tuple[float, float], lost: bool) -> None:
    """Draw a message; one that is lost ends in a cross half-way."""
    if not lost:
        style = {"arrowstyle": "-|>", "mutation_scale": 16, "color": ARRIVED, "linewidth": 2}
        axes.add_patch(FancyArrowPatch(start, end, shrinkA=3, shrinkB=3, **style))
        return
    middle = tuple((a + b) / 2 for a, b in zip(start, end))
    axes.plot(*zip(start, middle), color=LOST, linewidth=2, linestyle=(0, (3, 2)))
    axes.plot(*middle, marker="X", markersize=13, color=LOST, markeredgecolor=CARD, markeredgewidth=1.2)


def canvas(width: float, height: float, floor: float):
    """Return a figure of that size in inches, and its axes from (0, ``floor``) in the same unit, on a card."""
    figure = Figure(figsize=(width, height), dpi=130)
    figure.patch.set_alpha(0)
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(floor, floor + height))
    axes.set_axis_off()
    frame(axes, 0.03, floor + 0.03, width - 0.06, height - 0.06, "#d0d7de")
    return figure, axes


def frame(axes, x: float, y: float, width: float, height: float, edge: str, text: str = "") -> None:
    """Draw a card, with ``text`` under its upper edge."""
    shape = "round,pad=0,rounding_size=0.15"
    axes.add_patch(FancyBboxPatch((x, y), width, height, boxstyle=shape, facecolor=CARD, edgecolor=edge))
    axes.text(x + width / 2, y + height - 0.22, text, color=GREY, ha="center", va="center", fontsize=11)


def idea() -> Figure:
    """Four workers, the owner among them, and the four workers again."""
    figure, axes = canvas(11, 4.3, -0.95)
    left, middle, right, y_owner = 1.3, 5.5, 9.7, 1.275
    for number, y in enumerate(ROWS, 1):
        box(axes, left, y, f"worker {number}: gradient", ARRIVED, width=2.1)
        arrow(axes, (left + 1.05, y), (middle - 1.05, y_owner + (y - y_owner) * 0.28), lost=number == 3)
        stale = number == 2
        text = f"worker {number}: {'old' if stale else 'new'} weights"
        arrow(axes, (middle + 1.05, y_owner + (y - y_owner) * 0.28), (right - 1.05, y), lost=stale)
        box(axes, right, y, text, STALE if stale else ARRIVED, width=2.1, ink=INK if stale else "white")
    owner = "worker 4\nowns this shard:\n\nmean of the 3\nthat arrived, then\noptimizer step"
    box(axes, middle, y_owner, owner, INK, width=2.1, height=2.15)
    for x, title in ((3.4, "gradient reduce-scatter"), (7.6, "parameter all-gather")):
        axes.text(x, 3.05, title, color=INK, ha="center", va="center", fontsize=12.5, fontweight="bold")
    for x, text in (
        (3.4, "a gradient that is lost\nis left out of the mean"),
        (7.6, "a worker that misses the new weights\ngoes on with its old ones"),
    ):
        axes.text(x, -0.6, text, color=GREY, ha="center", va="center", fontsize=11)
    return figure


def sites() -> Figure:
    """Two sites of two ranks, once for gradients and once for parameters: sums inside a site, an exchange between them."""
    figure, axes = canvas(11, 3.9, 0)
    halves = (("gradients", 1, 2, "sum inside a site", 0.25), ("parameters", 2, 1, "all-gather inside a site", 5.75))
    for title, inside, between, words, x in halves:
        axes.text(x + 2.5, 3.6, title, color=INK, ha="center", va="center", fontsize=12.5, fontweight="bold")
        for site, left in enumerate((x, x + 3.4)):
            frame(axes, left, 0.85, 1.6, 2.5, GREY, f"site {site}")
            for rank, y in ((2 * site, 2.6), (2 * site + 1, 1.3)):
                box(axes, left + 0.8, y, f"rank {rank}", INK, width=1.2, height=0.5)
            for start, end, shift in ((2.35, 1.55, -0.12), (1.55, 2.35, 0.12)):
                arrow(axes, (left + 0.8 + shift, start), (left + 0.8 + shift, end), lost=False)
            axes.text(left + 1.25, 1.95, str(inside), color=ARRIVED, ha="center", va="center", fontsize=13)
        for y, lost in ((2.6, False), (1.3, True)):
            arrow(axes, (x + 1.4, y + 0.1), (x + 3.6, y + 0.1), lost=lost)
            arrow(axes, (x + 3.6, y - 0.1), (x + 1.4, y - 0.1), lost=False)
        axes.text(x + 2.5, 1.95, f"{between}\nlossy", color=LOST, ha="center", va="center", fontsize=13)
        first, second = sorted(((inside, f"{words}, reliable"), (between, "ranks of one place exchange their shards")))
        axes.text(
            x + 2.5,
            0.45,
            f"{first[0]}  {first[1]}\n{second[0]}  {second[1]}",
            color=GREY,
            ha="center",
            va="center",
            fontsize=11,
        )
    return figure


if __name__ == "__main__":
    for drawn in (idea, sites):
        place = DOCS / f"{drawn.__name__}.png"
        replace_file(
            place, lambda aside, drawn=drawn: drawn().savefig(aside, format="png", pil_kwargs={"optimize": True})
        )
