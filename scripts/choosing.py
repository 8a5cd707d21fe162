"""The table of docs/choosing.md: links, what they have time for, and what that costs.

What to set is computed by ``python -m megatron_lossy.lab link``; costs are read from the results of studies.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megatron_lossy.lab.studies.commands import recorded
from megatron_lossy.lab.studies.folder import tables
from megatron_lossy.lab.studies.link import Site, of_steps, seconds

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"
HEADINGS = ("link", "model", "step", "gradients add", "method", "share", "delay", "what it costs in validation loss")


@dataclass(frozen=True)
class Measured:
    """A change of validation loss in the results of a study, and where docs/results/islands.md explains it."""

    study: str
    level: str
    against: str
    heading: str
    row: str = "val loss"
    what: str = ""

    def text(self) -> str:
        """The change in words, with its link."""
        table = tables(recorded(RESULTS / "studies" / self.study))["val_loss"]
        found = dict(table.rows)[self.row][table.headings.index(self.level)]
        size = f"{found.change:+.2f} ± {found.change_error:.2f} %"
        return f"[{size}](results/islands.md#{self.heading}) for {self.what or self.level}, against {self.against}"


@dataclass(frozen=True)
class Row:
    """A link and a model, in words and in numbers."""

    site: Site
    link: str
    model: str
    costs: tuple[Measured | str, ...]
    measured: bool = False
    """Whether at this size; otherwise costs are those of the tiny model."""

    def cells(self) -> list[str]:
        """One line of the table."""
        site = self.site
        n, delay = site.parts
        if site.takes_gradients:
            method, share, late = "gradients", "all", "0"
        else:
            method, share, late = "islands", "all" if n == 1 else f"1/{n}", str(delay)
        carried = next(flag.split()[1] for flag in site.flags if flag.startswith("--transport"))
        cost = "; ".join(one if isinstance(one, str) else one.text() for one in self.costs)
        if not self.measured:
            cost = f"nobody has measured it with {self.model}; 1 M: {cost}"
        adds = f"{seconds(site.gradients)}, {of_steps(site.gradients / site.step)}"
        return [self.link, self.model, seconds(site.step), adds, f"{method}, `{carried}`", share, late, cost]


SEVEN, MIDDLE, TINY = 6.738e9, 162.2e6, 0.984e6
_GRADIENTS, _AT_ONCE = "averaged gradients", "all parameters at once"
_GRID = {
    "study": "islands_grid",
    "row": "2 islands",
    "against": _AT_ONCE,
    "heading": "how-much-how-late-how-often-how-many",
}
_TWO = {"study": "islands_two", "against": _GRADIENTS, "heading": "two-islands"}
_SMITH = Measured(
    "islands_smith",
    "100 %, 1 late",
    _AT_ONCE,
    "means-that-know-of-each-other",
    "smith",
    "all of them, 1 late (4 islands)",
)
_QUARTER = Measured(level="25 %, 1 late", what="a quarter, 1 late", **_TWO)
_HALF = Measured(level="50 %, 1 late, bf16", what="half, 1 late, in bf16", **_TWO)
_FEW = Measured(level="delay 1", what="5 %, 1 late", **_GRID)
_LATE = Measured(level="1 %", what="1 %, 10 late", **_GRID)
_FIVE = "[5 % of packets cannot be told from none](wan.md#how-much-loss-is-too-much)"

ROWS = (
    Row(
        Site(100_000, 0.1, 0.0, SEVEN, 13),
        "inside a site: 100 Gbit/s, 0.1 ms, no loss",
        "7 B",
        ("nothing, nothing is lost",),
        True,
    ),
    Row(Site(100_000, 30, 0.0001, SEVEN, 13), "100 Gbit/s, 30 ms, 0.01 %", "7 B", (_FIVE,)),
    Row(Site(10_000, 30, 0.001, SEVEN, 13), "10 Gbit/s, 30 ms, 0.1 %", "7 B", (_SMITH,)),
    Row(Site(1_000, 30, 0.005, SEVEN, 13), "1 Gbit/s, 30 ms, 0.5 %", "7 B", (_FEW, _QUARTER)),
    Row(Site(100, 100, 0.01, SEVEN, 13), "100 Mbit/s, 100 ms, 1 %", "7 B", (_LATE,)),
    Row(Site(1_000, 30, 0.005, MIDDLE, 1), "1 Gbit/s, 30 ms, 0.5 %", "162 M", (_QUARTER, _HALF)),
    Row(
        Site(100, 50, 0.01, TINY, 0.181, weights="fp32"),
        "100 Mbit/s, 50 ms, 1 %",
        "1 M, fp32",
        (_HALF, "with a quarter in fp32 [187 ms an iteration](islands.md#real-islands), 181 with nothing exchanged"),
        True,
    ),
    Row(
        Site(10_000, 20, 0.01, TINY, 0.16, weights="fp32"),
        "10 Gbit/s, 20 ms, 1 %",
        "1 M, fp32",
        (
            "[2.151 instead of 2.139](wan.md#how-much-loss-is-too-much), one run each; without a limit of rate 197 ms an iteration",
        ),
        True,
    ),
)


def table() -> str:
    """The Markdown table."""
    lines = ["| " + " | ".join(HEADINGS) + " |", "| --- " * len(HEADINGS) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(row.cells()) + " |" for row in ROWS)]) + "\n"


if __name__ == "__main__":
    print(table(), end="")
