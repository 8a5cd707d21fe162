"""The shipped job script in a real Slurm (``make test-slurm``): preemption, time limit, array, wrong input."""

import time
from pathlib import Path

import pytest

from .slurm_cluster import ROOT, free_ports, missing, slurm_cluster
from .trainer import read_records, recorded_losses

pytestmark = [
    pytest.mark.shows("the job script in a real Slurm: preempted, limited, in an array"),
    pytest.mark.slurm,
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
    pytest.mark.timeout(600),
]

SCRIPT = ROOT / "launch/slurm/run.sbatch"
ONE_NODE = ("--nodes=1", "--ntasks=2")
TWO_NODES = ("--nodes=2", "--ntasks-per-node=1")
ITERATIONS = 500
SAVE_INTERVAL = 50


@pytest.fixture(scope="module")
def cluster():
    with slurm_cluster() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def uninterrupted(cluster, text, tmp_path_factory):
    """The folder of a run that nothing happened to."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    job = cluster.submit(folder, *ONE_NODE, SCRIPT, *flags(text, folder), "--rate=0.1")
    assert cluster.wait_end(job) == "COMPLETED", log(folder, job)
    assert cluster.job(job)["Restarts"] == "0"
    assert log(folder, job).startswith("srun ") and " megatron_lossy.train " in log(folder, job)
    return folder / "runs/p_0.10"


def flags(text: Path, out: Path, iterations: int = ITERATIONS) -> list[str]:
    """Return a tiny model, whose checkpoints continue bit for bit."""
    return [
        f"--config={ROOT}/configs/tiny/llama_1m.yaml", "--program=train", "--device=cpu", f"--out={out}/runs",
        f"--data-path={text}/train", f"--valid-data-path={text}/valid", "--save-replicas", "--max-epochs=1e9",
        "--num-layers=2", "--hidden-size=64", "--ffn-hidden-size=64", "--seq-length=32", "--hidden-dropout=0.1",
        "--micro-batch-size=2", "--global-batch-size=8", "--lr-warmup-iters=2", f"--train-iters={iterations}",
        f"--save-interval={SAVE_INTERVAL}", "--log-interval=1", "--eval-interval=200", "--eval-iters=2",
        f"--master-port={free_ports(1)[0]}",
    ]  # fmt: skip


def log(folder: Path, job: str) -> str:
    """Return the output of the job script, over all restarts."""
    return (folder / f"megatron-lossy-{job}.log").read_text()


def saved(run: Path) -> int:
    """Return the iteration of the run's latest checkpoint."""
    tracker = run / "latest_checkpointed_iteration.txt"
    return int(tracker.read_text()) if tracker.exists() else 0


def preempt(cluster, folder: Path, job: str) -> None:
    """Want all nodes, in the partition that goes first, for a moment."""
    other = cluster.submit(folder, "--partition=high", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=true")
    cluster.wait(f"requeueing of job {job}", lambda: cluster.job(job)["Restarts"] == "1")
    assert cluster.wait_end(other) == "COMPLETED"


def test_a_preempted_run_ends_as_if_nothing_had_happened(cluster, text, uninterrupted, tmp_path):
    """On two nodes, without a grace time: SIGTERM, and SIGKILL after Slurm's KillWait."""
    arguments = [*flags(text, tmp_path), "--rate=0.1", "--accelerators-per-node=1"]
    job = cluster.submit(tmp_path, *TWO_NODES, SCRIPT, *arguments)
    run = tmp_path / "runs/p_0.10"
    cluster.wait("a checkpoint", lambda: saved(run) >= SAVE_INTERVAL)
    preempt(cluster, tmp_path, job)
    assert cluster.wait_end(job) == "COMPLETED", log(tmp_path, job)
    assert recorded_losses(run) == recorded_losses(uninterrupted)
    assert log(tmp_path, job).count("what is next is Slurm's decision") == 1
    restarted = (run / f"logs/{job}.1/rank-0.log").read_text()
    assert "loaded checkpoint of iteration" in restarted


def test_preemption_with_a_grace_time_while_a_run_is_starting(cluster, text, uninterrupted, tmp_path):
    """The ranks cannot take SIGTERM yet, and die of it. That is no reason to leave the queue."""
    job = cluster.submit(tmp_path, "--partition=grace", *ONE_NODE, SCRIPT, *flags(text, tmp_path), "--rate=0.1")
    run = tmp_path / "runs/p_0.10"
    cluster.wait("ranks", (run / f"logs/{job}.0/rank-0.log").exists)
    preempt(cluster, tmp_path, job)
    assert cluster.wait_end(job) == "COMPLETED", log(tmp_path, job)
    assert recorded_losses(run) == recorded_losses(uninterrupted)


def test_time_limit_and_cancelling_in_an_array(cluster, text, tmp_path):
    """Slurm's SIGTERM, five minutes early, concerns one job of the array; scancel then ends both for good."""
    iterations = 20000
    array = cluster.submit(
        tmp_path, *ONE_NODE, "--array=0-1", SCRIPT, *flags(text, tmp_path, iterations), "--rates", "0", "0.1"
    )
    first, last = f"{array}_0", f"{array}_1"
    runs = {first: tmp_path / "runs/p_0.00", last: tmp_path / "runs/p_0.10"}
    for job, run in runs.items():
        cluster.wait(f"a checkpoint of {job}", lambda run=run: saved(run) >= SAVE_INTERVAL)
    # Slurm gives the last job of an array the array's own number: to requeue that would be to requeue all.
    assert cluster.job(last)["JobId"] == array
    cluster.update(last, "TimeLimit=5")
    cluster.wait("requeueing before the time limit", lambda: cluster.job(last)["Restarts"] == "1")
    cluster.update(last, "TimeLimit=60")
    stopped = saved(runs[last])
    assert f"exiting on SIGTERM at iteration {stopped}" in (runs[last] / f"logs/{array}.0/rank-0.log").read_text()
    cluster.wait("progress", lambda: saved(runs[last]) > stopped)
    restarted = (runs[last] / f"logs/{array}.1/rank-0.log").read_text()
    assert f"loaded checkpoint of iteration {stopped:7d}" in restarted
    assert cluster.job(first)["Restarts"] == "0"
    before = {job: saved(run) for job, run in runs.items()}

    cluster.run("scancel", array)
    for job, run in runs.items():
        assert cluster.wait_end(job) == "CANCELLED"
        assert saved(run) > before[job] and saved(run) < iterations
        iterations_recorded = [record["iteration"] for record in read_records(run, "train")]
        assert iterations_recorded == list(range(1, saved(run) + 1))
    time.sleep(8)  # a requeued job would be waiting, or running by now
    assert cluster.run("squeue", "--noheader") == ""


@pytest.mark.parametrize(
    ("sizes", "more", "message"),
    [
        (ONE_NODE, ["--config=absent.yaml"], "--config absent.yaml: cannot be read"),
        (ONE_NODE, ["--data-path=absent"], "--data-path absent: there is no absent.bin"),
        (["--nodes=1", "--ntasks=3"], [], "--global-batch-size 8: must be divisible by"),
        (TWO_NODES, [], "--accelerators-per-node 8 (default): must be 1: the Slurm job has 2 nodes for 2 ranks"),
    ],
    ids=["configuration", "data", "ranks", "nodes"],
)
def test_a_wrong_job_ends_at_once_with_one_line(sizes, more, message, cluster, text, tmp_path):
    job = cluster.submit(tmp_path, *sizes, SCRIPT, *flags(text, tmp_path), "--rate=0.1", *more)
    assert cluster.wait_end(job) == "FAILED"
    assert cluster.job(job)["ExitCode"] == "2:0" and cluster.job(job)["Restarts"] == "0"
    [line] = log(tmp_path, job).splitlines()
    assert line.startswith(f"megatron_lossy.launch: error: {message}")
    assert not (tmp_path / "runs").exists()
