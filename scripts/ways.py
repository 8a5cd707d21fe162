"""What studies say of the ways of ``python -m megatron_lossy plan``: its costs in validation loss, and a figure of them.

    python -m scripts.ways [FOLDER]

draws the validation loss of each way of a report of configs/studies/ways.yaml against the bytes that it sends for a token, into
its bytes.png. ``make docs`` writes the costs into megatron_lossy/lab/plan/measured.yaml, from the records in :data:`COSTS`.
"""

from __future__ import annotations

import functools
import math
import sys
from pathlib import Path
from typing import Any

import yaml
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from megatron_lossy.base.files import replace_file
from megatron_lossy.config import LossyConfig
from megatron_lossy.lab.launch.memory import parameters
from megatron_lossy.lab.plan.ways import BYTES
from megatron_lossy.lab.studies.commands import recorded
from megatron_lossy.lab.studies.design import Trial
from megatron_lossy.lab.studies.summary import Difference, Results
from megatron_lossy.lab.theory import bytes_sent, gradient_bytes, site_bytes

STUDIES = Path(__file__).parents[1] / "benchmarks" / "results" / "studies"
#: The places of the costs: study, variant, and levels; of a study alone all levels count.
COSTS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("five_percent", "", ("independent",)),
    ("compensation_tuned", "packets of 1 KiB, plain", ("10 %", "20 %")),
    ("compression", "no loss", ("int8 + int8",)),
    ("compression", "1 % lost", ("int8 + int8",)),
    ("compression", "20 % lost", ("int8 + int8",)),
    ("islands_two", "", ("all", "50 %, 1 late, bf16", "25 %, 1 late", "25 %, 3 late", "5 %, 10 late")),
    ("islands_outer", "DiLoCo", ("10", "20")),
    ("islands_methods", "", ("nothing",)),
)
#: Data-parallel ranks of a site, of which flat gradients send as many times the bytes: the plan's default.
RANKS = 8
#: Of the figure: the marker of a share that is lost, and its place among ways of the same bytes, which are side by side.
_LOST = {0.0: ("o", 0), 0.01: ("s", 1), 0.05: ("^", 2)}
_BESIDE = {"sites, int8": -4, "sites, int8 with a lead": 2}
#: The byte tokenizer's, not padded.
_VOCABULARY = 257


@functools.cache
def _results(study: str) -> Results:
    return recorded(STUDIES / study)


def changes(results: Results, variant: str, level: str) -> Difference:
    """The change of the last validation loss, in percent: with the owners' weights, or those that the study evaluated alone."""
    kind = "owner" if "owner" in results.weights else (results.weights or ["replica"])[0]
    return Difference.of(results.changes(variant, level, lambda run: run.valid_loss(kind)))


def size(trial: Trial) -> int:
    """Parameters of the model of ``trial``."""
    return parameters(trial.cell.train, _VOCABULARY)


def what(loss: LossyConfig) -> dict[str, Any]:
    """What a run did of that which distinguishes ways: keys of a row of ``costs``."""
    if not loss.averages:
        return {"method": "codes" if loss.wire_bits else "gradients", "loss": loss.p_grad}
    if loss.sync_method == "parameters":
        share = {"share": loss.sync_fraction, "late": loss.sync_delay, "values": loss.sync_dtype}
        return {"method": "islands", **share}
    return {"method": "diloco", "every": loss.sync_interval} if loss.sync_method == "diloco" else {"method": "nothing"}


def costs() -> str:
    """The rows of ``costs`` of measured.yaml. Raises ``ValueError`` for a place without an interval."""
    rows = []
    for study, variant, levels in COSTS:
        results = _results(study)
        for level in levels or results.study.levels:
            trial, change = results.trials(variant, level)[0], changes(results, variant, level)
            loss, half = trial.cell.loss, change.half_width
            if half is None or math.isnan(change.mean):
                raise ValueError(f"{study}, {variant}, {level}: has no interval")
            if loss.param_send != "plain":
                continue  # the plan has no such way
            reference = results.trials(variant, None)[0].cell.loss
            workers = loss.members(trial.cell.train.virtual_workers)
            where = f"{loss.islands} islands" if loss.averages else f"{workers} workers"
            row = what(loss) | {
                "change": round(change.mean, 2),
                "low": round(change.mean - half, 2),
                "high": round(change.mean + half, 2),
                "parameters": size(trial),
                "where": where + (f", over {results.study.baseline} at that loss" if reference.draws() else ""),
                "record": f"studies/{study}",
            }
            rows.append(f"  - {yaml.safe_dump(row, default_flow_style=True, sort_keys=False, width=1000).strip()}")
    return "\n".join(rows) + "\n# "


def sent(trial: Trial) -> float:
    """Bytes out of a site for a token of the whole batch, without headers, of two or more sites."""
    train, loss, elements = trial.cell.train, trial.cell.loss, size(trial)
    tokens = train.tokens / train.train_iters
    if loss.averages:
        share = {"parameters": loss.sync_fraction, "none": 0.0}.get(loss.sync_method, 1.0)
        return bytes_sent(1, loss.islands, BYTES[loss.sync_dtype]) * elements * share / loss.sync_interval / tokens
    if loss.sites is None:
        return gradient_bytes(elements, RANKS, weight_bytes=4) / tokens
    values = ("int8" if phase in loss.wire_bits else "fp32" for phase in ("grad", "param"))
    return sum(site_bytes(elements, loss.sites, BYTES[one]) for one in values) / tokens


def draw(results: Results) -> Figure:
    """The figure: ways in colours, and markers by the share that is lost. Flat gradients are what changes refer to."""
    figure = Figure(figsize=(10, 6), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    [variant], shown = results.study.variants, {}
    for level in results.study.levels:
        trials, change = results.trials(variant, level), changes(results, variant, level)
        if not trials or math.isnan(change.mean):
            continue
        family, rest = _family(level, trials[0].cell.loss)
        place = sent(trials[0])
        if not place:
            axes.axhline(change.mean, color="grey", linestyle="--", linewidth=1)
            axes.annotate(level, (0.99, change.mean), xycoords=("axes fraction", "data"), ha="right", va="bottom")
            continue
        style = shown.setdefault(family, {"color": f"C{len(shown)}", "label": family})
        marker, step = _LOST[trials[0].cell.loss.p_grad]
        beside = place * 1.1 ** (_BESIDE.get(family, 0) + step)
        axes.errorbar(beside, change.mean, change.half_width or 0, marker=marker, capsize=3, linestyle="none", **style)
        style["label"] = None
        axes.annotate(rest, (beside, change.mean), (6, 4), textcoords="offset points")
    [flat] = {sent(trial) for trial in results.trials(variant, None)}
    axes.plot(flat, 0, "*", color="black", markersize=11, label=f"{results.study.baseline}, {RANKS} ranks a site")
    for lost, (marker, _) in _LOST.items():
        axes.plot([], [], marker, color="grey", label=f"{100 * lost:g} % lost" if lost else "nothing lost")
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_yscale("symlog", linthresh=2)
    ticks = [-2, -1, 0, 1, 2, 5, 10, 20, 50]
    axes.set_yticks(ticks, [f"{tick:+d} %" if tick else "0" for tick in ticks])
    axes.set_xlabel("bytes out of a site for a token, without headers")
    axes.set_ylabel("change of the validation loss, 95 % interval over seeds")
    axes.set_title(results.study.title)
    axes.grid(True, alpha=0.3)
    axes.legend(loc="lower left")
    return figure


def _family(level: str, loss: LossyConfig) -> tuple[str, str]:
    """The series of a way in the figure, and the name of its point there, if it needs one."""
    if loss.averages:
        family = {"diloco": "DiLoCo, float32"}.get(loss.sync_method, "islands, int8")
        return family, level.partition(", ")[2].removesuffix(", int8")
    values, lead = "int8" if loss.wire_bits else "float32", loss.param_send != "plain"
    return f"sites, {values}" + " with a lead" * lead, ""


def main() -> None:
    """Draw the figure of a report."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else STUDIES / "ways_1m"
    file = folder / "bytes.png"
    replace_file(file, lambda aside: draw(recorded(folder)).savefig(aside, format="png"))
    print(f"wrote {file}")


if __name__ == "__main__":
    main()
