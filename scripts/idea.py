"""Draw docs/idea.png: one shard in one iteration of lossy training, for docs/semantics.md.

python scripts/idea.py
"""

from __future__ import annotations

from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from megatron_lossy.base.files import replace_file

OUT = Path(__file__).parent.parent / "docs" / "idea.png"

CARD, INK, GREY = "#fbfbf9", "#24292f", "#6a737d"
ARRIVED, LOST, STALE = "#2f6fb0", "#c8452e", "#e3a63b"
ROWS = (2.55, 1.7, 0.85, 0.0)


def box(axes, x: float, y: float, text: str, fill: str, width: float, height: float = 0.56, ink: str = "white"):
    """A rounded box around (x, y)."""
    corner = (x - width / 2, y - height / 2)
    shape = "round,pad=0,rounding_size=0.1"
    axes.add_patch(FancyBboxPatch(corner, width, height, boxstyle=shape, facecolor=fill, edgecolor="none"))
    axes.text(x, y, text, color=ink, ha="center", va="center", fontsize=11.5, linespacing=1.35)


def arrow(axes, start: tuple[float, float], end: tuple[float, float], lost: bool) -> None:
    """A message; one that is lost ends in a cross half-way."""
    if not lost:
        style = {"arrowstyle": "-|>", "mutation_scale": 16, "color": ARRIVED, "linewidth": 2}
        axes.add_patch(FancyArrowPatch(start, end, shrinkA=3, shrinkB=3, **style))
        return
    middle = tuple((a + b) / 2 for a, b in zip(start, end))
    axes.plot(*zip(start, middle), color=LOST, linewidth=2, linestyle=(0, (3, 2)))
    axes.plot(*middle, marker="X", markersize=13, color=LOST, markeredgecolor=CARD, markeredgewidth=1.2)


def draw() -> Figure:
    """Draw four workers, the owner among them, and the four workers again."""
    figure = Figure(figsize=(11, 4.3), dpi=130)
    figure.patch.set_alpha(0)
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, 11), ylim=(-0.95, 3.35))
    axes.set_axis_off()
    card = "round,pad=0,rounding_size=0.15"
    axes.add_patch(FancyBboxPatch((0.03, -0.92), 10.94, 4.24, boxstyle=card, facecolor=CARD, edgecolor="#d0d7de"))
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


if __name__ == "__main__":
    replace_file(OUT, lambda aside: draw().savefig(aside, format="png", pil_kwargs={"optimize": True}))
