"""``benchmarks.study_sizes``: costs against the size of models, from reports of studies, against plain NumPy."""

from __future__ import annotations

import json
import math
import sys

import numpy as np
import pytest

from benchmarks import study_sizes as size
from megatron_lossy.lab.report import Run
from megatron_lossy.lab.studies.design import read_design
from megatron_lossy.lab.studies.folder import write_record
from megatron_lossy.lab.studies.summary import Results
from megatron_lossy.lab.theory import Lag, stability_limit
from tests.test_study import TINY

pytestmark = pytest.mark.shows("costs against the size of models, from reports, against plain NumPy", device=False)

WIDTHS = {"narrow": 32, "wide": 64, "wider": 128}
LEVELS = {"20 %": {"p": 0.2}, "40 %": {"p": 0.4}, "then 40 %": {"loss-schedule": "0:0,4:0.4"}}
METRICS = [size.STEP, size.LIMIT, size.LATE, size.DRIFT]
SEEDS = [1, 2, 3]


def parameters(width: int) -> int:
    """Return the size of a model of one layer with all heads and norms, and two embeddings of 384 rows."""
    ffn = int(width * 8 / 3 / 64) * 64
    return 4 * width**2 + 3 * width * ffn + 2 * width + width + 2 * 384 * width


def cost(variant: str, level: str, width: int, seed: int) -> float:
    """Return the planted change in percent."""
    rate = float(level.split()[-2])
    shape = rate / 10 * (1 if variant == "plain" else -0.5)
    return shape * math.log10(parameters(width) / 1e4) + 0.1 * seed * (1 if width == 32 else 0.5)


def write(folder, monkeypatch, missing=(), unmeasured=()):
    """A report for each width, its losses with planted costs; without curvature and drift for those ``unmeasured``."""
    settings = TINY | {"drift-interval": 1, "sharpness-interval": 4}
    studies = {
        name: {"title": name, "question": "?", "settings": settings | {"hidden-size": width}}
        for name, width in WIDTHS.items()
    }
    content = {"config": None, "loss-seeds": [1], "seeds": SEEDS, "levels": LEVELS, "metrics": METRICS}
    content |= {"studies": studies, "variants": {"plain": {}, "lead": {"param-send": "compensated"}}}
    file = folder / "study.yaml"
    file.write_text(json.dumps(content))
    folders = []
    for name, width in WIDTHS.items():
        study = read_design(file, name).study()
        runs = {}
        for trial in study.trials:
            change = 0.0 if trial.level is None else cost(trial.variant, trial.level, width, trial.seed)
            lossless = 2.0 + trial.seed / 10
            scalars = {"lr x sharpness": {8: 3.0 * trial.seed * (1 if trial.level is None else 0.5)}}
            if trial.level is not None:
                limit = stability_limit(0.9, Lag.of(0.2 if trial.level == "20 %" else 0.4))
                scalars |= {"largest lr x sharpness": {8: limit}, "drift over weight": {8: 0.01 * width}}
            scalars = {} if name in unmeasured else scalars
            loss = lossless * (1 + change / 100)
            valid = {"replica": {8: 9.0}, "owner": {8: loss}}
            runs[trial.cell.name] = Run("r", 0, 0, 1, 1, {}, {8: 2.0}, valid, 8, {}, scalars)
        for trial in study.trials:
            if (name, trial.variant, trial.level, trial.seed) in missing:
                runs.pop(trial.cell.name, None)
        out = folder / name
        monkeypatch.setattr(sys, "argv", ["lab", str(file), name, "--out", str(out)])
        write_record(Results(study, runs), out)
        folders.append(out)
    return folders


def test_costs_slopes_and_crossings(tmp_path, monkeypatch):
    folders = write(tmp_path, monkeypatch, missing={("wide", "lead", "40 %", 3)})
    sizes = size.read(folders[::-1])
    assert [one.parameters for one in sizes] == [parameters(width) for width in WIDTHS.values()]
    assert {one.tokens for one in sizes} == {8 * 2 * 16} and {one.metric for one in sizes} == {"val loss (owner)"}
    found = size.tables(sizes)
    table = found["cost"]
    sizes_told = [f"{parameters(width) / 1e6:.2g} M" for width in WIDTHS.values()]
    assert table.headings == (*sizes_told, "per 10 times", "7 B (paper)")
    rows = dict(table.rows)
    assert list(rows) == [f"{level}, {variant}" for level in LEVELS for variant in ("plain", "lead")]
    places = [math.log10(parameters(width)) for width in WIDTHS.values()]
    for level in LEVELS:
        for variant in ("plain", "lead"):
            seeds = [1, 2] if (variant, level) == ("lead", "40 %") else SEEDS
            *costs, slope, paper = rows[f"{level}, {variant}"]
            for entry, (name, width) in zip(costs, WIDTHS.items()):
                own = seeds if name == "wide" else SEEDS
                values = [cost(variant, level, width, seed) for seed in own]
                assert entry.mean == pytest.approx(np.mean(values), abs=1e-9)
                assert entry.error == pytest.approx(np.std(values, ddof=1) / math.sqrt(len(own)), abs=1e-9)
            slopes = [
                np.polyfit(places, [cost(variant, level, w, seed) for w in WIDTHS.values()], 1)[0] for seed in seeds
            ]
            assert (slope.mean, slope.runs) == (pytest.approx(np.mean(slopes), abs=1e-9), len(seeds))
            assert (paper.mean if paper.runs else None) == {"20 %": 1.10, "40 %": 2.72}.get(
                level if variant == "plain" else ""
            )
    assert any(note.startswith("unfinished: 1 cells of") for note in table.notes)

    measured = dict(found["measured"].rows)
    assert measured["tokens per parameter"][1].mean == pytest.approx(8 * 2 * 16 / parameters(64))
    assert [entry.mean for entry in measured["lr x sharpness, no loss"]] == pytest.approx([6, 6, 6])
    assert [entry.mean for entry in measured["lr x sharpness, 40 %, lead"]] == pytest.approx([3, 2.25, 3])
    assert [entry.mean for entry in measured["drift over weight, 20 %, plain"]] == pytest.approx([0.32, 0.64, 1.28])
    crossing = [6 / stability_limit(0.9, Lag.of(0.4))] * 3
    assert [entry.mean for entry in measured["without loss over the largest, 40 %, plain"]] == pytest.approx(crossing)
    assert not any("lag x lr" in name for name in measured), "which nobody recorded"


@pytest.mark.parametrize(
    ("number", "name"), [(316_896, "0.32 M"), (9_900_000, "9.9 M"), (162_504_000, "160 M"), (6_738_000_000, "6.7 B")]
)
def test_names_of_sizes(number, name):
    assert size.Size(None, number, 1).name == name


def test_the_command_writes_tables_and_figures(tmp_path, monkeypatch, capsys):
    folders = write(tmp_path, monkeypatch, unmeasured={"wide"})
    out = tmp_path / "out"
    size.main([*map(str, folders), "--out", str(out)])
    assert "40 %, lead" in capsys.readouterr().out
    names = {f"{name}.{kind}" for name in ("cost", "measured") for kind in ("md", "csv")}
    names |= {f"{name}.{kind}" for name in ("cost", "crossing") for kind in ("png", "pdf")}
    assert {path.name for path in out.iterdir()} == names
    assert all(path.stat().st_size > 5000 for path in out.glob("*.p*"))
    assert "| 20 %, plain |" in (out / "cost.md").read_text()
    size.main([str(folders[0]), "--out", str(out)])  # one size has no slope
    assert "| 20 %, plain |" in (out / "cost.md").read_text()
