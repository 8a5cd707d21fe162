"""A run inside a Slurm job, from wherever its last checkpoint is to its end, over as many jobs as that takes.

``--signal=TERM@300`` of the job script makes Slurm send SIGTERM to the ranks before the time limit; they save and
end in order. So do they when a job is preempted with a grace time. Then the job is put back in the queue, and
continues from the checkpoint. A job that made no progress is not: it would come back for ever.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence

from ..train.saved import latest_iteration
from .plan import Plan

PROGRAM = "megatron_lossy.launch"


def run_in_job(plan: Plan, command: Sequence[str], environment: dict[str, str]) -> int:
    """Start ``command`` (srun), wait, and requeue the job unless the run is complete; returns the exit status."""
    job = environment["SLURM_JOB_ID"]
    before = done_iterations(plan)
    if before >= plan.train.train_iters:
        print(f"{PROGRAM}: {plan.folder} is complete, {before} iterations", flush=True)
        return 0
    log = next(item for item in command if item.startswith("--output=")).partition("=")[2]
    os.makedirs(os.path.dirname(log), exist_ok=True)
    # The ranks get their own; this process must outlive them to decide what is next.
    previous = signal.signal(signal.SIGTERM, lambda *_: None)
    print(f"{PROGRAM}: job {job} continues {plan.folder} after iteration {before}; logs: {log}", flush=True)
    try:
        # A group of its own: a signal to the batch script's group must not make srun kill ranks that are saving.
        status = subprocess.Popen(command, env=environment, start_new_session=True).wait()
    finally:
        signal.signal(signal.SIGTERM, previous)
    after = done_iterations(plan)
    print(
        f"{PROGRAM}: srun ended with status {status}, at iteration {after} of {plan.train.train_iters}", flush=True
    )
    if status or after >= plan.train.train_iters:
        return status
    if after <= before:
        print(f"{PROGRAM}: no checkpoint was added; not requeued", flush=True)
        return 1
    requeued = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True)
    # Slurm refuses where it requeues the job itself, after preemption.
    print(f"{PROGRAM}: requeue: {requeued.stderr.strip() or 'done'}", flush=True)
    return 0


def done_iterations(plan: Plan) -> int:
    """Iterations that the run's latest checkpoint holds."""
    return latest_iteration(plan.folder) or 0
