"""scripts/lstm_language_model.py: an LSTM that loses gradients through the package's own rules."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from megatron_lossy.base.errors import UsageError
from tests.rules import reduce

pytestmark = pytest.mark.shows("an LSTM that loses gradients; without loss bit for bit")

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scripts" / "lstm_language_model.py"
TINY = ["--epoch-tokens", "2048", "--rates", "0.3", "--seeds", "1", "2"]


@pytest.fixture(scope="module", autouse=True)
def scripts():
    """Its modules import each other as neighbours."""
    sys.path.insert(0, str(SCRIPT.parent))
    yield
    sys.path.remove(str(SCRIPT.parent))


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A file of text that a model can learn."""
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text("".join(f"{k} squared is {k * k}.\n" for k in range(1000)))
    return file


def program(*arguments):
    runpy.run_path(str(SCRIPT))["main"]([*map(str, arguments)])


def test_every_arm_is_trained_once_and_reported(text, tmp_path, capsys):
    out, cells = tmp_path / "out", tmp_path / "cells"
    common = ["--text", text, "--cells", cells, *TINY]
    program(*common, "--out", out)
    printed = capsys.readouterr().out
    kept = {file.name: file.stat().st_mtime_ns for file in cells.iterdir()}
    assert len(kept) == 8
    for arm in ("zero, priority", "error feedback, priority", "error feedback"):
        assert f"\n{arm} " in printed and f"| {arm} |" in (out / "lstm.md").read_text()
    assert "error feedback, priority, paper" in printed
    assert (out / "lstm.png").read_bytes().startswith(b"\x89PNG")
    lines = (out / "lstm.csv").read_text().splitlines()
    assert lines[0].startswith("arm,rate,seed") and len(lines) == 9
    # Again: the same, of the runs that are there; over what is there only if that is said.
    with pytest.raises(UsageError, match=r"--out .*: holds results already; --overwrite replaces them"):
        program(*common, "--out", out)
    program(*common, "--out", tmp_path / "again")
    assert (tmp_path / "again" / "lstm.csv").read_text() == (out / "lstm.csv").read_text()
    assert {file.name: file.stat().st_mtime_ns for file in cells.iterdir()} == kept
    # One that is broken is not taken for a result.
    broken = next(iter(cells.iterdir()))
    broken.write_text("{")
    with pytest.raises(UsageError, match=rf"--cells .*{broken.name}: cannot be read"):
        program(*common, "--out", tmp_path / "broken")


def runs(text, **changes):
    from lstm_language_model import plan, read_arguments
    from lstm_training import read_text

    from megatron_lossy.lab.data import build_tokenizer

    read = read_text([str(text)], None, build_tokenizer("byte"))
    flags = read_arguments(["--out", "x", *TINY])
    return {run.arm: run for run in plan(flags, read.digest)[:4]}, read


def test_without_loss_the_exchange_changes_nothing(text):
    """All arms at a rate at which no packet of so short a run is lost; dropout and order are those of the seed."""
    from dataclasses import replace

    from lstm_training import train

    chosen, read = runs(text)
    results = [train(replace(run, rate=min(run.rate, 1e-9)), read, lambda step, steps: None) for run in chosen.values()]
    assert len(results) == 4 and results[0]["valid"]
    for result in results[1:]:
        assert result["lost"] == 0
        assert result["valid"] == results[0]["valid"] and result["train"] == results[0]["train"]


def test_what_is_lost_is_kept_by_error_feedback_alone(text):
    """Over integers: what was applied, and what is still kept, are all gradients."""
    from lstm_training import group_of_one

    chosen, _ = runs(text)
    for arm, whole in (("zero, priority", False), ("error feedback, priority", True), ("error feedback", True)):
        config = chosen[arm].loss
        group = group_of_one(config, 5000)
        generator = torch.Generator().manual_seed(1)
        given, applied = torch.zeros(5000), torch.zeros(5000)
        for step in range(20):
            gradient = torch.randint(-9, 10, (5000,), generator=generator).float()
            given += gradient
            reduce(group, 0, gradient, gradient, step, lambda: None).wait()
            group.finish_step(step, True)
            applied += gradient
        rule = group.grads[0]
        if whole:
            from tests.rules import gradients

            rule.correct(applied, gradients())
        assert torch.equal(applied, given) == whole, arm


def test_gradients_lie_in_one_buffer(text):
    from lstm_training import LanguageModel, flat_gradients

    model = LanguageModel(7, 4)
    parameters = list(model.parameters())
    buffer = flat_gradients(parameters)
    model(torch.zeros(2, 3, dtype=torch.long), torch.ones(2, 3, dtype=torch.long)).backward()
    expected = torch.cat([one.grad.flatten() for one in parameters])
    assert torch.equal(buffer, expected) and buffer.abs().sum() > 0


def test_blocks_and_order():
    from lstm_training import SCALES, Blocks, batches

    blocks = Blocks(np.arange(11, dtype=np.int32), 5, torch.device("cpu"))
    tokens, targets = blocks[np.array([1, 0])]
    assert blocks.count == 2
    assert tokens.tolist() == [[5, 6, 7, 8, 9], [0, 1, 2, 3, 4]] and torch.equal(targets, tokens + 1)
    assert Blocks(np.arange(10, dtype=np.int32), 5, torch.device("cpu")).count == 1  # the last one has no successor
    paper = SCALES["paper"]
    order = list(batches(paper, 70, 3))
    assert len(order) == paper.epochs * 2
    for epoch in range(paper.epochs):
        assert len(set(np.concatenate(order[2 * epoch : 2 * epoch + 2]))) == 64
    assert not np.array_equal(order[0], order[2]) and np.array_equal(order[0], next(batches(paper, 70, 3)))


def test_validation_text_is_not_trained_on(tmp_path):
    from lstm_training import read_text

    from megatron_lossy.lab.data import build_tokenizer

    for k in range(4):
        (tmp_path / f"{k}.txt").write_bytes(bytes([65 + k]) * 100)
    files, byte = [str(tmp_path / f"{k}.txt") for k in range(4)], build_tokenizer("byte")
    one = read_text(files, None, byte)
    assert len(one.valid) == 101 and not set(one.valid[:-1]) & set(one.train) - {256}
    single = read_text(files[:1], None, byte)
    assert (len(single.train), len(single.valid)) == (96, 5)
    given = read_text(files[:1], files[1:2], byte)
    assert set(given.valid) == {66, 256} and set(given.train) == {65, 256}
    assert len({one.digest, single.digest, given.digest}) == 3


def test_a_run_that_diverged_is_said_to(text, tmp_path, monkeypatch):
    import lstm_training
    from lstm_report import changes, tables

    chosen, read = runs(text)
    lossy = chosen["zero, priority"]
    monkeypatch.setattr(lstm_training, "LEARNING_RATE", float("inf"))
    found = json.loads(json.dumps(lstm_training.train(lossy, read, lambda step, steps: None)))
    assert found["diverged"] == 1
    fine = {"diverged": None, "valid": [[4, 1.0]], "lost": 0.1, "missing": 0.1}
    results = {("no loss", 0.0, 1, 0): fine, ("zero, priority", 0.3, 1, 1): found}
    assert np.isnan(changes(results, "zero, priority", 0.3)[1])
    results |= {(arm, 0.3, 1, 1): fine for arm in ("error feedback, priority", "error feedback")}
    assert "diverged" in tables(results, [0.3], "")["perplexity"].text()


def test_the_command_says_what_is_wrong_in_one_line(tmp_path):
    (tmp_path / "short.txt").write_text("short")
    command = [sys.executable, str(SCRIPT), "--text", "short.txt", "--out", "out"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == "scripts/lstm_language_model.py: error: --text with 6 tokens: needs 1,025 tokens at least\n"


def test_the_configuration_of_the_paper_is_read():
    from lstm_language_model import plan, read_arguments

    file = ROOT / "configs" / "lstm" / "wikitext2.yaml"
    flags = read_arguments(["--config", str(file), "--out", "x", "--device", "cpu"])
    planned = plan(flags, "")
    scale = planned[0].scale
    assert (scale.hidden, scale.batch, scale.block, scale.epochs) == (512, 32, 256, 20)
    assert len(planned) == 3 * (1 + 4 * 3) and len({run.name for run in planned}) == len(planned)
    assert set(yaml.safe_load(file.read_text())) <= {name.replace("_", "-") for name in vars(flags)}
