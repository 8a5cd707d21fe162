"""``--metrics-port``: what a run serves to Prometheus, and the dashboard and the rules that ask for it."""

import json
import logging
import os
import re
import shutil
import socket
import subprocess
import time
import urllib.request
from unittest import mock

import pytest
import yaml

from megatron_lossy.base import errors
from megatron_lossy.base.errors import UsageError
from megatron_lossy.config import LossyConfig
from megatron_lossy.config.facts import Facts
from megatron_lossy.hooks.checks import check_run
from megatron_lossy.run.exporter import Exporter, exporter_at, prometheus_name
from scripts.update_docs import METRICS
from tests.ranks import run_ranks
from tests.slurm_cluster import free_ports
from tests.test_plugin_megatron_lm import ENVIRONMENT, LOSS, MODEL, TORCHRUN
from tests.trainer import ROOT, TINY, read_records, train_runs

prometheus_client = pytest.importorskip("prometheus_client")
pytestmark = pytest.mark.shows("metrics for Prometheus; dashboard and alerts name existing ones", device=False)

OPS = ROOT / "configs/ops"
NAMES = {prometheus_name(name) for name in METRICS}


def scraped(port):
    """The values by name and labels, as Prometheus reads them."""
    from prometheus_client.parser import text_string_to_metric_families as families

    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
        text = answer.read().decode()
    return {(s.name, tuple(s.labels.values())): s.value for family in families(text) for s in family.samples}


def test_records_become_gauges():
    port = free_ports(1)[0]
    exporter = Exporter(port)
    try:
        exporter.write({"kind": "run", "seed": 1})
        assert scraped(port) == {}
        exporter.write(
            {"kind": "train", "iteration": 5, "lm loss": 2.5, "loss rate grad": 0.1, "grad norm": float("inf")}
        )
        exporter.write({"kind": "valid", "iteration": 5, "lm loss": 3.5, "lm loss PPL": 33.0, "weights": "owner"})
        exporter.write({"kind": "train", "iteration": 6, "lm loss": 2.25})
        assert scraped(port) == {
            ("megatron_lossy_iteration", ()): 6,
            ("megatron_lossy_lm_loss", ()): 2.25,
            ("megatron_lossy_loss_rate_grad", ()): 0.1,
            ("megatron_lossy_grad_norm", ()): float("inf"),
            ("megatron_lossy_validation_loss", ("owner",)): 3.5,
        }
    finally:
        exporter.close()


def test_a_port_that_is_taken_is_one_line(caplog):
    with socket.create_server(("0.0.0.0", 0)) as other, caplog.at_level(logging.WARNING):
        port = other.getsockname()[1]
        assert exporter_at(port) is None
    assert [record.getMessage() for record in caplog.records] == [
        f"--metrics-port {port}: Address already in use; the run goes on without it"
    ]


def test_names_are_those_that_prometheus_takes_and_each_is_of_one_metric():
    assert all(re.fullmatch(r"[a-z][a-z0-9_]*", name) for name in NAMES)
    assert len(NAMES) == len(METRICS)


def test_the_dashboard_asks_for_metrics_that_exist():
    text = (OPS / "grafana.json").read_text()
    content = json.loads(text)
    assert content["schemaVersion"] >= 39 and content["title"] and content["templating"]["list"]
    ids = [panel["id"] for panel in content["panels"]]
    assert ids and len(set(ids)) == len(ids)
    for panel in content["panels"]:
        assert {"type", "title", "gridPos", "datasource", "fieldConfig"} <= panel.keys() and panel["targets"]
        for target in panel["targets"]:
            [name] = re.findall(r"megatron_lossy_\w+", target["expr"])
            assert name in NAMES
    assert set(re.findall(r"megatron_lossy_\w+", text)) <= NAMES


def test_the_rules_ask_for_metrics_that_exist():
    rules = [rule for group in yaml.safe_load((OPS / "alerts.yml").read_text())["groups"] for rule in group["rules"]]
    asked = {name for rule in rules for name in re.findall(r"megatron_lossy_\w+", rule["expr"])}
    assert asked and asked <= NAMES
    assert all(rule["for"] and rule["annotations"]["summary"] for rule in rules)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool (Debian: apt install prometheus)")
def test_promtool_accepts_the_rules():
    done = subprocess.run(["promtool", "check", "rules", OPS / "alerts.yml"], capture_output=True, text=True)
    assert done.returncode == 0 and "SUCCESS" in done.stdout, done.stdout + done.stderr


def watched(rank, config, loss):
    """Train, and scrape before the run ends."""
    seen, close = {}, Exporter.close

    def scrape_and_close(self):
        seen.update(scraped(loss["metrics_port"]))
        close(self)

    with mock.patch.object(Exporter, "close", scrape_and_close):
        return train_runs(rank, (config, loss))[0][0], seen


def test_a_run_serves_what_its_last_records_say(data, tmp_path):
    config = TINY | data | {"metrics_dir": str(tmp_path / "run")}
    loss = {"p_grad": 0.5, "p_param": 0.5, "metrics_port": free_ports(1)[0], "eval_weights": "both"}
    (_, seen), (_, nothing) = run_ranks(watched, 2, config, loss)
    last = read_records(tmp_path / "run", "train")[-1]
    assert nothing == {} and seen[("megatron_lossy_iteration", ())] == last["iteration"] == 8
    assert {name for name, _ in seen} <= NAMES
    for name in ("lm loss", "loss rate grad", "stale age mean", "seconds"):
        assert seen[(prometheus_name(name), ())] == pytest.approx(last[name], rel=1e-12)
    for record in read_records(tmp_path / "run", "valid")[-2:]:
        assert seen[("megatron_lossy_validation_loss", (record["weights"],))] == pytest.approx(
            record["lm loss"], rel=1e-12
        )
    with socket.create_server(("0.0.0.0", 0)) as other:  # taken: the run goes on
        taken = loss | {"metrics_port": other.getsockname()[1]}
        (summary, seen), _ = run_ranks(watched, 2, config | {"metrics_dir": None}, taken)
    assert seen == {} and summary["lm loss"] == last["lm loss"]


@pytest.mark.slow
@pytest.mark.megatron_lm
@pytest.mark.shows("the unmodified `pretrain_gpt.py` serves what its log says to Prometheus", device=False)
def test_megatron_lm_serves_what_its_log_says(megatron_lm, tmp_path):
    """Scraped after its last iteration: its program ends when it may."""
    port, script, over = free_ports(1)[0], tmp_path / "script.py", tmp_path / "over"
    script.write_text(
        "import os, sys, time\n"
        f"sys.argv[0] = {os.path.join(megatron_lm, 'pretrain_gpt.py')!r}\n"
        "from megatron_lossy.__main__ import main\n"
        "main(sys.argv)\n"
        "print('trained', flush=True)\n"
        f"while not os.path.exists({str(over)!r}): time.sleep(0.01)\n"
    )
    ranks = ["--standalone", "--nproc-per-node", 2, script, *MODEL, *LOSS, "--metrics-port", port]
    with open(tmp_path / "log", "w") as log:
        done = subprocess.Popen(list(map(str, [*TORCHRUN, *ranks])), stdout=log, stderr=log, env=ENVIRONMENT)
    try:
        while (said := (tmp_path / "log").read_text()).count("trained\n") < 2:
            assert done.poll() is None, said[-3000:]
            time.sleep(0.1)
        seen = scraped(port)
        over.touch()
        assert done.wait(120) == 0
    finally:
        done.kill()
    assert {name for name, _ in seen} <= NAMES and seen[("megatron_lossy_iteration", ())] == 20
    assert not any("valid" in name for name, _ in seen)
    for name in ("lm loss", "grad norm", "loss rate grad", "loss rate param"):
        printed = float(re.findall(rf"\b{name}: ([\d.E+-]+)", said)[-1])
        assert seen[(prometheus_name(name), ())] == pytest.approx(printed, abs=2e-3), name


def test_a_missing_package_is_one_line_before_the_run(monkeypatch):
    monkeypatch.setattr(errors.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="--metrics-port 9464: needs the package prometheus_client: pip install"):
        check_run(LossyConfig(metrics_port=9464), Facts(workers=2))
