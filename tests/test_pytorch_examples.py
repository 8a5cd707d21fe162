"""The programs of ``examples`` train, with loss and over UDP; they are as short as they claim to be."""

import importlib.util
import math
from pathlib import Path

import pytest

from megatron_lossy.config import LossyConfig
from tests.ranks import run_ranks

pytestmark = pytest.mark.shows("FSDP2: LLaMA of `transformers`, torchtitan's Llama with its own parallelize")

EXAMPLES = Path(__file__).parents[1] / "examples"
NOTEBOOK = EXAMPLES / "loss_at_rates.ipynb"
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
@pytest.mark.shows("the notebook of losses at four rates", device=False)
def test_the_notebook_plots_losses():
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    notebook = nbformat.read(NOTEBOOK, 4)
    [cell] = [cell for cell in notebook.cells if "0.4), 100" in cell.source]
    cell.source = cell.source.replace("0.4), 100", "0.4), 12")
    nbclient.NotebookClient(notebook, timeout=280, kernel_name="python3").execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    lines = "".join(output.text for output in outputs if output.output_type == "stream").splitlines()
    assert [line[:4].strip() for line in lines[:4]] == ["0%", "10%", "20%", "40%"]
    assert any("image/png" in output.get("data", ()) for output in outputs)


def test_examples_are_short():
    for name in PACKAGES:
        assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) <= 80
    assert NOTEBOOK.stat().st_size < 100_000
