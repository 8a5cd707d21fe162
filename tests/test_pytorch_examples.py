"""The programs of ``examples`` train, with loss and over UDP; they are as short as they claim to be."""

import importlib.util
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_lossy.config import LossyConfig
from tests.ranks import run_ranks

pytestmark = pytest.mark.shows("FSDP2: LLaMA of `transformers`, torchtitan's Llama with its own parallelize")

EXAMPLES = Path(__file__).parents[1] / "examples"
PACKAGES = {"fsdp2_transformers": "transformers", "fsdp2_torchtitan": "torchtitan"}
CONFIGS = {
    "loss": LossyConfig(p_grad=0.2, p_param=0.2),
    "packets with a lead": LossyConfig(p_grad=0.1, p_param=0.1, loss_unit="packet", param_send="compensated"),
    "udp": LossyConfig(transport="udp", packet_bytes=8192),
}


def trained(rank, name, steps, config):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    losses, measured = module.train(steps, config)
    return losses, {key: value for key, value in measured.items() if key.startswith("loss rate")}


@pytest.mark.slow
@pytest.mark.parametrize("name", PACKAGES)
def test_it_trains(name):
    pytest.importorskip(PACKAGES[name])
    if name == "fsdp2_torchtitan":
        pytest.importorskip("triton")  # which torchtitan imports, and does not ask for
    steps = {"fsdp2_transformers": 30, "fsdp2_torchtitan": 6}[name]
    expected = run_ranks(trained, 2, name, steps, LossyConfig(), timeout=280)
    for how, config in CONFIGS.items():
        results = run_ranks(trained, 2, name, steps, config, timeout=280)
        for (losses, measured), (lossless, _) in zip(results, expected, strict=True):
            assert losses[0] == pytest.approx(lossless[0], rel=1e-6)
            assert losses[-1] < losses[0]
            assert all(map(math.isfinite, losses))
            assert (measured["loss rate grad"] > 0) == (how != "udp")


@pytest.mark.slow
@pytest.mark.programs
@pytest.mark.shows("the plot of losses at four rates", device=False)
def test_the_cells_plot_losses(tmp_path):
    script = (EXAMPLES / "loss_at_rates.py").read_text()
    short = script.replace("0.4), 100", "0.4), 12")
    assert short != script
    (tmp_path / "cells.py").write_text(short)
    done = subprocess.run(
        [sys.executable, "cells.py"],
        cwd=tmp_path,
        env={**os.environ, "MPLBACKEND": "Agg", "PYTHONPATH": str(EXAMPLES.parent)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "loss_at_rates.png").stat().st_size > 10_000
    assert [line[:4].strip() for line in done.stdout.splitlines()[:4]] == ["0%", "10%", "20%", "40%"]


def test_examples_are_short():
    for name in PACKAGES:
        assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) <= 80
    assert (EXAMPLES / "loss_at_rates.py").read_text().count("# %%") >= 12
