"""Benchmarks run, and time what they say. Their numbers are nobody's claim here."""

import csv
import importlib
import os
import re
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest

from benchmarks import beside_tcp, common, fsdp_step, island_step, param_sync, run_wan, step_overhead, udp_exchange
from benchmarks.exchange.contestants import RankTimes
from benchmarks.exchange.results import Cell, Share, markdown, table_of
from benchmarks.exchange.rows import LOSSES, PARTS, QUICK, choose
from benchmarks.lab import Counters
from megatron_lossy.base.errors import UsageError
from tests.programs import ROOT, run_program
from tests.ranks import run_ranks
from tests.test_lab import needs_lab

pytestmark = pytest.mark.shows("benchmarks of steps, parameters and islands run")

TINY = {"layers": 1, "hidden": 16, "vocab": 64, "sequence": 8, "micro_batch": 1, "rounds": 4}


def on_ranks(rank, benchmark, settings, islands=1):
    """Return the findings of ``benchmark``, and their table."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from megatron_lossy.base import device
    from megatron_lossy.mechanisms.islands.world import IslandWorld

    device.prepare()
    if islands > 1:
        IslandWorld(islands).open(device.init_process_group, timedelta(minutes=1))
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    torch.manual_seed(1)
    model_parallel_cuda_manual_seed(1)
    module = importlib.import_module(f"benchmarks.{benchmark}")
    result = module.run(settings)
    return result, module.table(
        common.joined([result, result])
        | {"date": "today", "ranks": 2, "launches": 2, "hardware": "a machine", "versions": {"torch": "2"}}
    )


@pytest.mark.slow
def test_steps_in_turns():
    _, text = run_ranks(on_ranks, 2, "step_overhead", step_overhead.Settings(**TINY))[0]
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")]
    assert [len(row) for row in rows] == [6] * (2 + len(step_overhead.VARIANTS))


def test_fsdp_steps_and_bytes():
    told, text = run_ranks(on_ranks, 2, "fsdp_step", fsdp_step.Settings(**TINY))[0]
    assert f"| {fsdp_step.AGAIN} |" in text
    sent = told["bytes sent per step"]
    plain = sent[fsdp_step.BASELINE]
    assert sent[fsdp_step.AGAIN] == plain
    for name in ("p = 0", "shard", "packet 4 KiB", "packet 4 KiB, compensated"):
        assert sent[name] / plain <= 0.67


@pytest.mark.slow
def test_param_sync():
    told, text = run_ranks(on_ranks, 2, "param_sync", param_sync.ReplicaSettings(**TINY, interval=2))[0]
    # A round to warm up and four, each with one synchronisation; the last of those that overlap is still under way.
    assert told["synchronisations"] == {
        "H = 2, nothing to send": 0,
        "check and repair, nothing to repair": 0,
        "H = 2": 5,
        "H = 2, overlapped": 4,
    }
    steps = step_overhead.ratios(told["times"]["steps"])
    assert list(steps) == list(param_sync.variants(2)) and steps["megatron-core"]["ratio"] == 1
    assert "2 launches of 4 rounds" in text
    # 18.9 % in the paper's words; by its own table it is 12.0 % at 32 workers and 17.9 % at 4.
    assert "| 32 | 23.4 % | 12.0 % | 50.0 % |" in text and "| 4 | 20.9 % | 17.9 % | 50.0 % |" in text


@pytest.mark.slow
def test_island_step():
    settings = island_step.IslandSettings(**TINY, steps=2)
    told, _ = run_ranks(on_ranks, 2, "island_step", settings, 2, grouped=False)[0]
    megabytes = told["megabytes"]
    names = ("5 %, 10 late, mixing", "5 %, 10 late, mixing, bf16", "1 %, 10 late, mixing")
    five, bf16, one = (megabytes[name]["sent"] for name in names)
    assert bf16 == five / 2 and one == pytest.approx(five / 5, rel=0.1)


# --- exchanges over emulated links, and the training over one: rows, numbers, refusals, whole runs -------------------


of_exchanges = pytest.mark.shows("measured exchanges over emulated links: rows, tables, refusals", device=False)
over_a_wide_area = pytest.mark.shows("training over an emulated wide-area link")


@of_exchanges
def test_the_grid_is_whole_and_can_be_chosen_from():
    assert len(PARTS["grid"]) == 6 * 3 * 2
    assert [row.loss for row in choose(["grid"], [20], None, [4], False)] == list(LOSSES)
    assert [(row.rtt, row.loss) for row in choose(["grid"], [35], [0.005], [4], False)] == [(35, 0.005)]
    assert choose(["rate", "queue"], None, None, None, True) == QUICK
    with pytest.raises(UsageError, match="--parts bursts: no row has these"):
        choose(["bursts"], [35], None, None, False)
    with pytest.raises(UsageError, match="loss 2: must be in"):
        choose(["grid"], None, [2], None, False)
    with pytest.raises(UsageError, match="--megabytes 0: must be above 0"):
        choose(["grid"], None, None, [0], False)


def cell(name="tcp bbr", phase="reduce-scatter", row=QUICK[1], times=(0.1, 0.3, 0.2), too_slow=None):
    made = Cell(row, name, phase, too_slow)
    for time in times:
        # The second rank starts last, the first ends last.
        done = [RankTimes(0.0, 0.5 + time, 0.01, 0.0, 0.005), RankTimes(0.5, 0.5, 0.03, 0.02, 0.015)]
        made.add(done, [Counters(packets=100, lost=1), Counters(packets=100, overflowed=4)])
    return made


@of_exchanges
def test_what_is_measured_of_an_exchange():
    measured = cell()
    assert measured.time(50) == pytest.approx(200) and measured.time(0) == pytest.approx(100)
    assert measured.cpu_per_gigabyte == pytest.approx(0.04 / 0.008)
    assert measured.busiest_per_gigabyte == pytest.approx(0.02 / 0.008)
    assert (measured.share(measured.lost), measured.share(measured.overflowed)) == (0.005, 0.02)
    assert np.mean(measured.seen) == pytest.approx(0.01)
    assert cell(too_slow=20.0).time(0) == np.inf


@of_exchanges
def test_tables_of_exchanges():
    limited = PARTS["queue"][0]
    assert limited.link().queue == 250_000
    cells = [cell(), cell(phase="all-gather"), cell("gloo reno", times=(), too_slow=20.0), cell(row=limited)]
    share = Share(["ours", "tcp bbr"], [150.0, 50.0], limited)
    text = markdown(cells, [share], ["something is missing"], ["Date: today"])
    assert "- something is missing\n" in text
    assert "| 4 MB, 20 ms, 1 % |  | 200 (100) | over 20 s |" in text
    assert "| 4 MB, 20 ms, 400 Mbit/s, queue 5 ms, 0 % | 90.0 | 200 (100) |  |" in text
    assert "| ours and tcp bbr | 150 (75%) | 50 (25%) |" in text
    read = list(csv.DictReader(table_of(cells).splitlines()))
    assert [(line["contestant"], line["median ms"], line["exchanges"]) for line in read[:3:2]] == [
        ("tcp bbr", "200.000", "3"),
        ("gloo reno", "", "0"),
    ]


@of_exchanges
def test_results_are_not_written_over(tmp_path):
    (tmp_path / f"udp_exchange_{udp_exchange.today()}.md").touch()
    (tmp_path / "gloo_bbr").mkdir()
    for program in ("benchmarks.udp_exchange", "benchmarks.run_wan"):
        done = run_program(program, "--out", str(tmp_path))
        assert done.returncode == 2 and done.stderr.endswith(" it\n") and done.stderr.count("\n") == 1
        assert "is there already; --replace" in done.stderr


@of_exchanges
@pytest.mark.parametrize("program", ["udp_priority", "udp_soak", "udp_exchange", "run_wan"])
def test_without_root_one_line(program, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert importlib.import_module(f"benchmarks.{program}").main(["--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "skipped: a lab needs root, for network namespaces\n"


@pytest.mark.shows("exchanges over an emulated link are measured", device=False)
@pytest.mark.programs
@needs_lab
def test_a_small_run(tmp_path, capsys, monkeypatch):
    """Two contestants over two links. The sums are right, or a rank would have failed; losses are those of the link."""
    monkeypatch.setattr(udp_exchange, "MOST", 4)
    flags = ["--parts", "grid", "--rtt", "2", "--loss", "0", "0.05", "--megabytes", "0.2", "--seconds", "4"]
    assert udp_exchange.main([*flags, "--contestants", "gloo reno", "tcp bbr", "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert said.count("0.2 MB, 2 ms, 5 % | all-gather | tcp ") == 1
    (stem,) = {path.stem for path in tmp_path.iterdir()}
    assert {path.suffix for path in tmp_path.iterdir()} == {".md", ".csv"}
    table = (tmp_path / f"{stem}.md").read_text().partition("## Limits of one core, in the same run\n")[2].splitlines()
    assert "1,408 bytes" in table[1]
    assert [line.split("|")[1].split()[0] for line in table[5:]] == ["memcpy", "AES-128-GCM,", "UDP,", "UDP,"]
    lines = list(csv.DictReader((tmp_path / f"{stem}.csv").read_text().splitlines()))
    assert len(lines) == 2 * 2 * 2
    for line in lines:
        share = int(line["lost on the link"]) / int(line["packets"])
        assert float(line["minimum ms"]) > 1 and (0.01 < share < 0.12 if line["loss"] == "0.05" else share == 0)


def run_of(name, valid, seconds=0.5, iterations=6):
    numbers = range(1, iterations + 1)
    kinds = {"grad": 0.1, "param": 0.04, "sync": 0.01, "other": 0.02}
    communication = {kind: np.full(iterations, value) for kind, value in kinds.items()}
    losses = {number: 5.0 - 0.1 * number for number in numbers}
    return run_wan.Run(name, iterations, dict.fromkeys(numbers, seconds), losses, valid, communication)


@of_exchanges
def test_time_to_the_same_loss(tmp_path):
    """Between two evaluations along a straight line; gloo over Reno takes as many iterations as over BBR."""
    runs = [
        run_of("gloo bbr", {2: 4.0, 4: 3.0, 6: 2.0}),
        run_of("gloo reno", {}, 8.0),
        run_of("udp", {2: 3.9, 4: 3.0, 6: 2.5}, 0.25),
    ]
    assert runs[0].iterations_to(2.5) == 5 and runs[0].iterations_to(1.0) is None
    rows, text = run_wan.table(runs, 2.5, ["Date: today"])
    assert [row[0] for row in rows[1:]] == ["gloo bbr", "gloo reno", "udp"]
    assert [row[1:4] for row in rows[1:3]] == [["500", "150", "20"], ["8000", "150", "20"]]
    assert [row[5] for row in rows[1:]] == ["2.5 s (5 iterations)", "40.0 s (5 iterations)", "1.5 s (6 iterations)"]
    assert "| udp | 250 | 150 | 20 | 2.500 |" in text
    run_wan.picture(runs, 2.5, tmp_path / "wan.png")
    assert (tmp_path / "wan.png").stat().st_size > 10_000


@over_a_wide_area
@needs_lab
@pytest.mark.programs
@pytest.mark.nightly
def test_a_training_over_a_wide_area_link(tmp_path, capsys):
    flags = ["--rtt", "4", "--loss", "0.001", "--iterations", "6", "--reno-iterations", "4", "--eval-interval", "3"]
    assert run_wan.main([*flags, "--out", str(tmp_path)]) == 0
    assert re.search(r"\| gloo reno \| \d+ \| \d+ \| \d+ \| as with bbr \|", capsys.readouterr().out)
    assert {"wan.md", "wan.png"} <= {path.name for path in tmp_path.iterdir()}


@over_a_wide_area
@needs_lab
@pytest.mark.programs
@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_two_sites_over_a_link_and_the_same_command_repeats_nothing(tmp_path):
    flags = ["--mbit=200", "--rtt=4", "--loss=0.01", "--steps=5", "--rounds=1", f"--out={tmp_path}"]
    for runs in (12, 0):
        command = [sys.executable, "-m", "benchmarks.sites_wan", *flags]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
        assert len(re.findall(r"^round 1, ", done.stdout, re.MULTILINE)) == runs
        assert re.search(r"^\| 200 Mbit/s, 4 ms, 1.0% \|(?: -?\d+ \([\d.]+\) \|){6}$", done.stdout, re.MULTILINE)


@over_a_wide_area
@needs_lab
@pytest.mark.nightly
def test_the_example_of_the_documentation(tmp_path):
    """docs/wan.md: the commands that train in two network namespaces run as written."""
    blocks = re.findall(r"^```sh\n(.*?)^```", (ROOT / "docs/wan.md").read_text(), re.DOTALL | re.MULTILINE)
    [example] = [block for block in blocks if "python -m benchmarks.lab" in block and "--train-iters" in block]
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    for transport in ("torch", "udp"):
        command = example.replace(
            "--train-iters 10", f"--train-iters 3 --data-cache-path {tmp_path} --transport {transport}"
        )
        done = subprocess.run(["bash", "-c", command], cwd=ROOT, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
        assert "validation loss at iteration 3" in done.stdout and "link from site 0 to site 1" in done.stderr


@pytest.mark.slow
@pytest.mark.programs
@needs_lab
def test_tcp_beside_exchanges(tmp_path):
    flags = ["--seconds", "1.5", "--seeds", "2", "--queues", "20", "--rules", "shared", "--out", str(tmp_path)]
    assert beside_tcp.main(flags) == 0
    (text,) = tmp_path.glob("*.md")
    rows = [line.split(" | ") for line in text.read_text().splitlines() if line.startswith(("| Cubic", "| BBR"))]
    assert [row[1] for row in rows[:2]] == [beside_tcp.ANOTHER, "shared"]
    assert all(len(row) == 3 for row in rows)
    assert list(tmp_path.glob("*.png"))
    again = run_program("benchmarks.beside_tcp", *flags)
    assert again.returncode == 2 and "is there already; --replace" in again.stderr
