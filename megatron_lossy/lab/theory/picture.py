"""The picture of ``scripts/theory.py``: simulation as points, closed forms as lines, the paper's formula dashed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from ...base import theory
from .rows import STABILITY, Row, of

_BLUE, _ORANGE, _GREEN, _RED, _GREY = "#2b6cb0", "#dd7711", "#2f855a", "#c53030", "#666666"
_RULES = {
    "renormalize": _BLUE,
    "renormalize, lossy-self": "#63b3ed",
    "renormalize-remote": _ORANGE,
    "previous": _GREEN,
    "zero": _RED,
}
_RATE = 0.4  # the rate in the panels on recovery
_LAGS = 20  # lags in real runs
_WINDOW, _WINDOW_LAGS = 20, 12  # for the prediction that follows a run
_PAPER = {"color": _RED, "linestyle": "--", "label": "paper"}


def draw(rows: Sequence[Row], runs: Sequence[Any], path: Path) -> None:
    """Write the PNG ``path``, 1800 x 2200 pixels; the last row of panels only with ``runs`` of :mod:`.real_run`."""
    height = 4 if runs else 3
    figure = Figure(figsize=(18, 5.5 * height), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(height, 3).ravel()
    for panel, fill in zip(panels, _PANELS, strict=False):
        fill(panel, rows)
    if runs:
        _correlation(panels[9], runs)
        _real(panels[10], rows, runs[-1])
        _follow(panels[11], runs[-1])
    for panel in panels:
        panel.grid(alpha=0.3)
        panel.legend(fontsize=10)
        panel.title.set_fontsize(13)
    figure.savefig(path, format="png")


def _points(panel, rows: Sequence[Row], color: str, label: str | None, marker: str = "o") -> None:
    panel.errorbar(
        [row.x for row in rows],
        [row.measured.mean for row in rows],
        yerr=[2 * row.measured.error for row in rows],
        fmt=marker,
        color=color,
        markersize=5,
        capsize=3,
        label=label,
    )


def _label(panel, title: str, x: str, y: str) -> None:
    panel.set_title(title)
    panel.set_xlabel(x)
    panel.set_ylabel(y)


def _drift(panel, rows: Sequence[Row]) -> None:
    between = of(rows, "drift", "between receivers")
    p = np.linspace(0, max(row.p for row in between), 200)
    panel.plot(p, theory.drift_between(p), color=_BLUE, label="between receivers: $2p/(1-p^2)$")
    panel.plot(p, theory.drift_to_owner(p), color=_GREEN, label="to the owner: $p/(1-p)$")
    panel.plot(p, theory.drift_paper(p), **_PAPER | {"label": "paper: $2p/(1+p)$"})
    _points(panel, between, _BLUE, f"simulated, N = {between[0].workers}")
    _points(panel, of(rows, "drift", "to the owner"), _GREEN, None)
    _label(panel, "Drift, uncorrelated increments", "loss rate p", r"drift / $\sigma^2$")


def _settling(panel, rows: Sequence[Row]) -> None:
    part = "time to steady state"
    for p, color in zip(dict.fromkeys(row.p for row in of(rows, part)), (_BLUE, _ORANGE), strict=False):
        chosen = of(rows, part, p=p)
        steps = [row.x for row in chosen]
        _points(panel, chosen, color, f"p = {p}: simulated")
        panel.plot(steps, [row.formula for row in chosen], color=color, label=f"p = {p}: closed form")
        panel.plot(steps, [row.paper for row in chosen], color=color, linestyle="--", label=f"p = {p}: paper")
    panel.set_ylim(0, 1.6)
    _label(panel, "Drift between receivers, from equal replicas", "broadcasts", r"drift / $\sigma^2$")


def _ages(panel, rows: Sequence[Row]) -> None:
    parts = [part for part in dict.fromkeys(row.part for row in rows) if part.startswith("age")]
    series = [(part, p) for part in parts for p in dict.fromkeys(row.p for row in of(rows, part))]
    for (part, p), color in zip(series, (_BLUE, _ORANGE, _GREEN, _RED), strict=False):
        chosen = of(rows, part, p=p)
        panel.plot([row.x for row in chosen], [row.formula for row in chosen], color=color)
        _points(panel, chosen, color, f"p = {p}{part.removeprefix('age')}")
    panel.set_yscale("log")
    _label(panel, "Age of a replica's shard", "age, broadcasts", "share of links")


def _largest(panel, rows: Sequence[Row]) -> None:
    parts = [part for part in dict.fromkeys(row.part for row in rows) if part.startswith("largest age")]
    series = [(part, p) for part in parts for p in dict.fromkeys(row.p for row in of(rows, part))]
    for (part, p), color in zip(series, (_BLUE, _ORANGE, _GREEN, _RED), strict=False):
        chosen = of(rows, part, p=p)
        burst = 4.0 if "bursts" in part else None
        links = np.unique(np.geomspace(10, max(row.x for row in of(rows, parts[0])), 60).astype(int))
        panel.plot(links, [theory.age_max(p, int(count), burst) for count in links], color=color)
        _points(panel, chosen, color, f"p = {p}{part.removeprefix('largest age')}")
    panel.set_xscale("log")
    panel.set_ylim(bottom=0)
    _label(panel, "Largest age among many", "links x units", "expected largest age, broadcasts")


def _lags(panel, rows: Sequence[Row]) -> None:
    _plain_and_compensated(panel, rows, "updates", "Mean lag of replicas", "updates behind the owner")


def _spread(panel, rows: Sequence[Row]) -> None:
    title = "Their distance to an owner that moves steadily"
    _plain_and_compensated(panel, rows, "mean square", title, "mean square / squared increment")


def _plain_and_compensated(panel, rows: Sequence[Row], quantity: str, title: str, y: str) -> None:
    for name, color in (("plain", _RED), ("compensated", _BLUE)):
        for burst, marker, line in (("", "o", "-"), (", bursts of 4", "s", ":")):
            chosen = of(rows, f"lag, {name}{burst}", quantity)
            panel.plot([row.x for row in chosen], [row.formula for row in chosen], line, color=color)
            _points(panel, chosen, color, name + burst, marker)
    _label(panel, title, "loss rate p", y)


def _stability(panel, rows: Sequence[Row]) -> None:
    p = np.linspace(0.01, 0.45, 100)
    for beta1, light in ((0.9, 1.0), (0.5, 0.5)):
        for name, color, lead in (("plain", _RED, False), ("compensated", _BLUE, True)):
            lags = [theory.Lag.of(rate) for rate in p]
            limits = [theory.stability_limit(beta1, lag, lag.lead if lead else theory.Lead()) for lag in lags]
            panel.plot(p, limits, color=color, alpha=light)
            chosen = of(rows, f"{STABILITY}, beta1 {beta1:g}, {name}")
            _points(panel, chosen, color, rf"$\beta_1$ = {beta1:g}, {name}", "o" if beta1 == 0.9 else "s")
    panel.set_yscale("log")
    panel.set_yticks([1, 2, 5, 10, 20, 40], ["1", "2", "5", "10", "20", "40"])
    panel.minorticks_off()
    _label(panel, "Largest stable learning rate of a quadratic", "loss rate p", "learning rate x curvature")


def _weights(panel, rows: Sequence[Row]) -> None:
    for name in ("renormalize", "renormalize, lossy-self", "renormalize-remote"):
        chosen, color = of(rows, f"recovery: {name}", "own weight x N", p=_RATE), _RULES[name]
        panel.plot([row.x for row in chosen], [row.formula for row in chosen], color=color)
        _points(panel, chosen, color, f"{name}: own weight x N")
    chosen = of(rows, "recovery: zero", "expectation", p=_RATE)
    panel.plot([row.x for row in chosen], [row.formula for row in chosen], color=_RULES["zero"])
    _points(panel, chosen, _RULES["zero"], "zero: sum of all weights")
    panel.axhline(1, color=_GREY, linewidth=0.8)
    panel.set_ylim(0.5, 2.2)
    _counts(panel)
    _label(panel, f"Expected weights, p = {_RATE} (plain mean: 1)", "workers N", "weight")


def _variance(panel, rows: Sequence[Row]) -> None:
    for name, color in _RULES.items():
        chosen = of(rows, f"recovery: {name}", "variance x N", p=_RATE)
        panel.plot([row.x for row in chosen], [row.formula for row in chosen], color=color)
        _points(panel, chosen, color, name + (", which shrinks the gradient" if name == "zero" else ""))
    for row in of(rows, "sums over steps: previous", p=_RATE):
        measured, formula = row.measured, row.formula
        panel.plot(row.workers, formula, "_", color=_GREEN, markersize=18)
        panel.errorbar(
            row.workers, measured.mean, 2 * measured.error, fmt="D", color=_GREEN, capsize=3,
            label="previous, summed over many steps",
        )  # fmt: skip
    panel.set_ylim(0.7, 3.1)
    _counts(panel)
    _label(panel, f"Variance of the estimate, p = {_RATE} (without loss: 1)", "workers N", "variance x N")


def _counts(panel) -> None:
    panel.set_xscale("log", base=2)
    panel.set_xticks([2, 4, 8, 16, 64], ["2", "4", "8", "16", "64"])


def _correlation(panel, runs: Sequence[Any]) -> None:
    for run, color in zip(runs, (_BLUE, _ORANGE, _GREEN), strict=False):
        gamma = theory.second_moments(run.increments[len(run.increments) // 2 :], _LAGS)
        panel.plot(gamma / gamma[0], "o-", color=color, label=f"real run, p = {run.p}")
    panel.plot(theory.ar1(0.9, _LAGS), ":", color=_GREY, label="$0.9^k$: momentum on white gradients")
    panel.axhline(0, color=_GREY, linewidth=0.8)
    _label(panel, "Correlation of a weight's increments", "lag k, iterations", r"$\gamma_k / \gamma_0$")


def _real(panel, rows: Sequence[Row], run: Any) -> None:
    p = np.linspace(0, 0.45, 200)
    measured = theory.second_moments(run.increments[len(run.increments) // 2 :], _LAGS)
    for part, name, gamma, color, marker, width in (
        ("drift, momentum 0.9", "$0.9^k$", theory.ar1(0.9, 200), _GREY, "s", 5),  # visible beside the curve over it
        ("real run", "real run", measured / measured[0], _BLUE, "o", 1.5),
    ):
        label = f"{name}: from the correlation"
        panel.plot(p, theory.drift_between(p, gamma), color=color, linewidth=width, label=label)
        _points(panel, of(rows, part, "between receivers"), color, f"{name}: measured", marker)
    panel.plot(p, theory.drift_between(p), color=_GREEN, label="uncorrelated: $2p/(1-p^2)$")
    panel.plot(p, theory.drift_paper(p), **_PAPER)
    panel.set_xlim(0, 0.45)
    panel.set_ylim(0, 3)
    _label(panel, "Drift between receivers, correlated increments", "loss rate p", "drift / mean squared increment")


def _follow(panel, run: Any) -> None:
    from .real_run import trailing

    drift = run.between.mean(axis=1)
    panel.plot(np.arange(1, len(drift) + 1), drift, color=_BLUE, linewidth=1, label="measured")
    ends, predicted = trailing(run, _WINDOW, _WINDOW_LAGS)
    panel.plot(ends - _WINDOW / 2, predicted, color="black", label=f"predicted, {_WINDOW} iterations around")
    square = np.convolve((run.increments**2).mean(axis=1), np.ones(_WINDOW) / _WINDOW, "valid")
    centres = np.arange(len(square)) + _WINDOW / 2
    panel.plot(centres, square * theory.drift_between(run.p), color=_GREEN, label="as if uncorrelated")
    panel.plot(centres, square * theory.drift_paper(run.p), **_PAPER)
    panel.set_ylim(bottom=0)
    _label(panel, f"Real run, p = {run.p}: drift between receivers", "iteration", "squared weight")


_PANELS = (_drift, _settling, _ages, _largest, _weights, _variance, _lags, _spread, _stability)
