"""A run inside a Slurm job, from its last checkpoint to its end, over as many jobs as it needs.

``--signal=TERM@300`` of the job script makes Slurm send SIGTERM to the ranks before the time limit; they save and end
in order. They do the same when a job is preempted with a grace time. Then the job is put back in the queue, and
continues from the checkpoint. A job that made no progress is not put back: it would never end.
``tests/test_launch_slurm.py`` runs this in a real Slurm.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence

from ...base.checkpoints import latest_iteration
from ...base.errors import refuse
from .plan import PROGRAM, Plan


def check_job(plan: Plan, environment: Mapping[str, str]) -> None:
    """Raise :class:`UsageError` unless the present job has the nodes of ``plan``."""
    launch = plan.launch
    has = int(environment.get("SLURM_JOB_NUM_NODES", launch.nodes))
    if has != launch.nodes:
        share, rest = divmod(launch.accelerators, has)
        must = "" if rest else f"must be {share}: "
        raise refuse(
            "--accelerators-per-node",
            launch.accelerators_per_node,
            f"{must}the Slurm job has {has} nodes for {launch.accelerators} ranks",
        )


def run_in_job(plan: Plan, command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Start ``command`` (srun), wait, and requeue the job unless the run is complete; returns the exit status."""
    job = job_name(environment)
    before = done_iterations(plan)
    if before >= plan.train.train_iters:
        _say(f"{plan.folder} is complete, {before} iterations")
        return 0
    log = next(item for item in command if item.startswith("--output=")).partition("=")[2]
    os.makedirs(os.path.dirname(log), exist_ok=True)
    # The ranks get their own signal; this process must outlive them to decide about a requeue.
    previous = signal.signal(signal.SIGTERM, lambda *_: None)
    _say(f"job {job} continues {plan.folder} after iteration {before}; logs: {log}")
    try:
        # A group of its own: a signal to the batch script's group must not make srun kill ranks that are saving.
        status = subprocess.Popen(command, env=environment, start_new_session=True).wait()
        after = done_iterations(plan)
        _say(f"srun ended with status {status}, at iteration {after} of {plan.train.train_iters}")
        if after >= plan.train.train_iters:
            return status
        return _requeue(job, status, after > before)
    finally:
        signal.signal(signal.SIGTERM, previous)


def job_name(environment: Mapping[str, str]) -> str:
    """The job's name for ``scontrol``. A job of an array has the number of the whole array and its own index."""
    if "SLURM_ARRAY_TASK_ID" in environment:
        return f"{environment['SLURM_ARRAY_JOB_ID']}_{environment['SLURM_ARRAY_TASK_ID']}"
    return environment["SLURM_JOB_ID"]


def done_iterations(plan: Plan) -> int:
    """Iterations that the run's latest checkpoint holds."""
    folders = [plan.own_folder] if plan.jobs.apart else plan.job_folders
    return min(latest_iteration(folder) or 0 for folder in folders)


def _requeue(job: str, status: int, progress: bool) -> int:
    """Put a job whose run is incomplete back in the queue, if that is right; returns its exit status."""
    shown = _scontrol("--oneliner", "show", "job", job)
    state = dict(re.findall(r"(\S+?)=(\S*)", shown.stdout))
    if shown.returncode or "JobState" not in state:
        _say(f"not requeued: {shown.stderr.strip() or f'scontrol does not know job {job}'}")
        return status or 1
    if state["JobState"] != "RUNNING":
        # Slurm is ending the job: it requeues a preempted one itself, and scontrol would revive a cancelled one.
        _say(f"job {job} is {state['JobState']}: what is next is Slurm's decision")
        return status
    # Preempted with a grace time: it may have come before the ranks could take a signal, let alone save.
    if state.get("PreemptTime", "None") == "None":
        if status:
            return status
        if not progress:
            _say("no checkpoint was added; not requeued")
            return 1
    _say("requeue")
    done = _scontrol("requeue", job)
    if done.returncode:
        _say(f"requeue failed: {done.stderr.strip()}")
    return done.returncode


def _scontrol(*arguments: str) -> subprocess.CompletedProcess[str]:
    """``scontrol``, repeated for a minute: on large clusters Slurm is often too busy to answer in time."""
    for seconds in (10, 20, 30, 0):
        done = subprocess.run(["scontrol", *arguments], capture_output=True, text=True)
        if done.returncode == 0 or "timed out" not in done.stderr:
            break
        time.sleep(seconds)
    return done


def _say(text: str) -> None:
    print(f"{PROGRAM}: {text}", flush=True)
