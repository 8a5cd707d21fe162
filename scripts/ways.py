"""The ways of ``python -m megatron_lossy plan`` in studies: their costs in validation loss, and a figure.

    python -m scripts.ways [FOLDER]

draws the validation loss of each way of a report of configs/studies/ways.yaml against the bytes that it sends for a token, into
its bytes.png. ``make docs`` writes the costs into megatron_lossy/lab/plan/measured.yaml, from the records in :data:`COSTS`.
"""

from __future__ import annotations

import functools
import math
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import yaml
from matplotlib.figure import Figure

from benchmarks.churn.results import markdown
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
    ("ways_1m", "", ("sites, 1 %", "sites, 5 %", "sites, int8", "sites, int8, 1 %", "sites, int8, 5 %")),
    ("ways_1m", "", ("islands, all, 1 late, int8", "islands, 25 %, 1 late, int8", "islands, 5 %, 10 late, int8")),
    ("ways_1m", "", ("diloco, every 100", "diloco, every 500")),
)
#: Of the byte tokenizer, not padded.
VOCABULARY = 257
#: Data-parallel ranks of a site, of which flat gradients send as many times the bytes: the plan's default.
RANKS = 8
_MARKERS = {0.0: "o", 0.01: "s", 0.05: "^"}


_recorded = functools.cache(recorded)


def changes(results: Results, variant: str, level: str) -> Difference:
    """Return the change of the last validation loss, in percent, with the owners' weights if the study has several."""
    kind = "owner" if "owner" in results.weights else (results.weights or ["replica"])[0]
    return Difference.of(results.changes(variant, level, lambda run: run.valid_loss(kind)))


def settings_of(loss: LossyConfig) -> dict[str, Any]:
    """Return the settings that distinguish ways: the first keys of a row of ``costs``."""
    if not loss.averages:
        sites = {} if loss.sites is None else {"sites": loss.sites}
        return {"method": "codes" if loss.wire_bits else "gradients", "loss": loss.p_grad, **sites}
    if loss.sync_method == "parameters":
        share = {"share": loss.sync_fraction, "late": loss.sync_delay, "values": loss.sync_dtype}
        return {"method": "islands", **share}
    return {"method": "diloco", "every": loss.sync_interval} if loss.sync_method == "diloco" else {"method": "nothing"}


def costs() -> str:
    """Return the rows of ``costs`` of measured.yaml. Raises ``ValueError`` for a place without an interval."""
    rows = []
    for study, variant, levels in COSTS:
        results = _recorded(STUDIES / study)
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
            where = where if loss.sites is None else f"{loss.sites} sites"
            row = settings_of(loss) | {
                "change": round(change.mean, 2),
                "low": round(change.mean - half, 2),
                "high": round(change.mean + half, 2),
                "parameters": parameters(trial.cell.train, VOCABULARY),
                "where": where + (f", over {results.study.baseline} at that loss" if reference.draws() else ""),
                "record": f"studies/{study}",
            }
            rows.append(f"  - {yaml.safe_dump(row, default_flow_style=True, sort_keys=False, width=1000).strip()}")
    return "\n".join(rows) + "\n# "


def sent(trial: Trial) -> float:
    """Return the bytes out of a site for a token of the whole batch, without headers; nothing is lost in these."""
    train, loss = trial.cell.train, trial.cell.loss
    elements = parameters(train, VOCABULARY)
    tokens = train.tokens / train.train_iters
    if loss.averages:
        share = {"parameters": loss.sync_fraction, "none": 0.0}.get(loss.sync_method, 1.0)
        return bytes_sent(1, loss.islands, BYTES[loss.sync_dtype]) * elements * share / loss.sync_interval / tokens
    if loss.sites is None:
        return gradient_bytes(elements, RANKS, weight_bytes=4) / tokens
    values = ("int8" if phase in loss.wire_bits else "fp32" for phase in ("grad", "param"))
    return sum(site_bytes(elements, loss.sites, BYTES[form]) for form in values) / tokens


def table() -> str:
    """Return the ways of ways_1m as a table of Markdown, by falling bytes."""
    results = _recorded(STUDIES / "ways_1m")
    [variant], rows = results.study.variants, []
    for level in results.study.levels:
        change, place = changes(results, variant, level), sent(results.trials(variant, level)[0])
        low, high = change.mean - (change.half_width or 0.0), change.mean + (change.half_width or 0.0)
        rows.append((place, [level, f"{place:,.0f}", f"{change.mean:+.1f} %", f"{low:+.1f} to {high:+.1f} %"]))
    body = [row for _, row in sorted(rows, key=lambda row: -row[0])]
    return "\n".join(markdown([["way", "bytes a token", "validation loss", "95 % interval"], *body])) + "\n"


def draw(results: Results) -> Figure:
    """Return the figure: ways in colours, and markers by the share that is lost; those of the same bytes are side by side."""
    figure = Figure(figsize=(10, 6), dpi=100, layout="constrained")
    axes = figure.subplots()
    [variant], there, shown = results.study.variants, Counter[float](), {}
    for level in results.study.levels:
        change, [trial, *_] = changes(results, variant, level), results.trials(variant, level)
        family, place, marker = re.sub(r", \d+ %$", "", level), sent(trial), _MARKERS[trial.cell.loss.p_grad]
        if not place:
            axes.axhline(change.mean, color="grey", linestyle="--", linewidth=1)
            axes.annotate(level, (0.99, change.mean), xycoords=("axes fraction", "data"), ha="right", va="top")
            continue
        about = round(math.log10(place), 1)
        if trial.cell.loss.averages:
            family, _, name = level.partition(", ")
            above = (6, -12) if there[about] else (6, 4)
            axes.annotate(name, (place * 1.1 ** there[about], change.mean), above, textcoords="offset points")
        label = family if family not in shown else None
        style = {
            "color": shown.setdefault(family, f"C{len(shown)}"),
            "marker": marker,
            "capsize": 3,
            "linestyle": "none",
        }
        axes.errorbar(place * 1.1 ** there[about], change.mean, change.half_width, label=label, **style)
        there[about] += 1
    [flat] = {sent(trial) for trial in results.trials(variant, None)}
    axes.plot(flat, 0, "*k", markersize=11, label=f"{results.study.baseline}, {RANKS} ranks a site")
    for lost, marker in _MARKERS.items():
        axes.plot([], [], marker, color="grey", label=f"{100 * lost:g} % lost")
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


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else STUDIES / "ways_1m"
    replace_file(folder / "bytes.png", lambda aside: draw(recorded(folder)).savefig(aside, format="png"))
    print(f"wrote {folder / 'bytes.png'}")
