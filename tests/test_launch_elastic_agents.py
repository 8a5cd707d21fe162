"""Nodes or ranks that are killed, and start again: of ``launch/torchrun.sh``, and of the command in docs/wan.md.

A node is an agent on this machine.
"""

import contextlib
import os
import re
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest

from megatron_lossy.lab.launch.plan import make_plan

from .programs import until
from .ranks import run_ranks
from .slurm_cluster import free_ports
from .trainer import ROOT, read_records, recorded_losses, train_runs, write_data

pytestmark = pytest.mark.shows("killed nodes and ranks start again: torchrun, over UDP, two sites")


@pytest.fixture
def agents(tmp_path):
    """Starts agents with flags, each with a log. All of them, with their workers, end with the test.

    ``launcher``: another command than launch/torchrun.sh.
    """
    started = []

    def start(flags: Sequence[str], launcher: Sequence[object] = (ROOT / "launch/torchrun.sh",)) -> subprocess.Popen:
        environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        with open(tmp_path / f"agent{len(started)}.log", "w") as log:
            agent = subprocess.Popen(
                [*launcher, *flags], env=environment, stdout=log, stderr=subprocess.STDOUT, cwd=tmp_path
            )
        started.append(agent)
        return agent

    yield start
    for agent in started:
        kill(agent)


def kill(agent: subprocess.Popen) -> None:
    """As when the node loses power: the agent and its worker."""
    if agent.poll() is not None:
        return
    for process in (*psutil.Process(agent.pid).children(recursive=True), psutil.Process(agent.pid)):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    agent.wait()


SMALL = [
    "--num-layers=2", "--hidden-size=64", "--ffn-hidden-size=64", "--seq-length=32", "--hidden-dropout=0.1",
    "--micro-batch-size=2", "--global-batch-size=8", "--train-iters=100", "--lr-warmup-iters=2",
    "--eval-interval=50", "--eval-iters=2", "--log-interval=1", "--save-interval=10",
]  # fmt: skip


@pytest.mark.slow
def test_a_killed_agent_that_is_started_again_continues_the_run(agents, tmp_path):
    port = free_ports(1)[0]
    run_ranks(write_data, 1, str(tmp_path))
    flags = [
        f"--config={ROOT}/configs/tiny/llama_1m.yaml", "--program=train", "--device=cpu", "--accelerators=2",
        "--accelerators-per-node=1", "--max-restarts=3", f"--rdzv-endpoint=127.0.0.1:{port}", f"--out={tmp_path}/runs",
        "--max-epochs=1e9", f"--data-path={tmp_path}/train", f"--valid-data-path={tmp_path}/valid", *SMALL,
        "--save-replicas", "--rate=0.1",
    ]  # fmt: skip

    def listening() -> bool:
        with socket.socket() as client:
            return client.connect_ex(("127.0.0.1", port)) == 0

    first = agents(flags)
    until(listening, first, seconds=120)  # whose node is the one that must stay
    second = agents(flags)
    run = tmp_path / "runs/p_0.10"
    until((run / "latest_checkpointed_iteration.txt").exists, first, second, seconds=120)
    kill(second)
    second = agents(flags)

    log = tmp_path / "agent2.log"
    assert second.wait(180) == 0 and first.wait(60) == 0, log.read_text()
    plan = make_plan([*flags, f"--out={tmp_path}/uninterrupted"])
    run_ranks(train_runs, 2, (asdict(plan.train), asdict(plan.lossy)))
    assert recorded_losses(run) == recorded_losses(tmp_path / "uninterrupted/p_0.10")
    again = [path.read_text() for path in run.glob("logs/*/attempt_1/0/stdout.log")]
    assert "loaded checkpoint of iteration" in "".join([log.read_text(), *again])


def command_of_wan() -> str:
    """Start on every host the command of docs/wan.md."""
    text = (ROOT / "docs/wan.md").read_text()
    (command,) = re.findall(r"```sh\n([^`]*torchrun --nnodes 2 [^`]*)```", text)
    assert "`--node-rank 0 --master-addr HOST_A --master-port 29400`" in text.replace("\n", " ")
    return command


ISLANDS = ["--islands=2", "--sync-method=parameters", "--sync-fraction=0.25", "--sync-delay=2"]
DATAGRAMS = "--transport udp --udp-port 41000"
UNIT = ["--loss-unit=packet"]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("rendezvous", "transport", "more"),
    [
        pytest.param("as written", DATAGRAMS, UNIT, marks=pytest.mark.slow, id="gradients over udp"),
        pytest.param("static", "", ISLANDS, marks=pytest.mark.nightly, id="islands over torch, static"),
        pytest.param("static", DATAGRAMS, [*ISLANDS, *UNIT], marks=pytest.mark.nightly, id="islands over udp, static"),
    ],
)
def test_the_command_for_two_sites_survives_a_dead_rank(agents, tmp_path, rendezvous, transport, more):
    """Both sites on this machine, with a rank each, of which the second is killed after the first checkpoint."""
    run_ranks(write_data, 1, str(tmp_path))
    port, sites = free_ports(1)[0], []
    for site in range(2):
        command = command_of_wan()
        if rendezvous == "static":
            found = "--rdzv-backend c10d --rdzv-endpoint HOST_A:29400"
            assert found in command
            command = command.replace(found, f"--node-rank {site} --master-addr HOST_A --master-port 29400")
        model = f"--config {ROOT}/configs/tiny/llama_1m.yaml --data-path train --valid-data-path valid"
        for written, here in (
            (DATAGRAMS, transport),
            ("HOST_A", "127.0.0.1"),
            ("29400", str(port)),
            ("41000", str(free_ports(1)[0])),
            ("--nproc-per-node 8", "--nproc-per-node 1"),
            ("--config …", " ".join([model, *SMALL, *more])),
            ("FOLDER", "run"),
        ):
            assert written in command or (written, transport) == ("41000", "")
            command = command.replace(written, here)
        sites.append(agents([], launcher=["bash", "-c", f"exec env {command}"]))
    jobs = 2 if "--islands=2" in more else 1  # that save for themselves
    written = "run/**/latest_checkpointed_iteration.txt"
    until(lambda: len(list(tmp_path.glob(written))) == jobs, *sites, seconds=120)
    ranks = [child for child in psutil.Process(sites[1].pid).children(recursive=True) if "--save" in child.cmdline()]
    ranks[-1].kill()
    logs = [tmp_path / f"agent{site}.log" for site in range(2)]
    for site, log in zip(sites, logs):
        assert site.wait(240) == 0, log.read_text()
    assert "loaded checkpoint of iteration" in logs[0].read_text() + logs[1].read_text()
    for metrics in tmp_path.glob("run/**/metrics.jsonl"):
        assert [one["iteration"] for one in read_records(metrics.parent, "train")] == list(range(1, 101))
