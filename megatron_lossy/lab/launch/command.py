"""The exact command of a launcher, and its environment; those of jobs that are launches of their own, which may all run here."""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from ...base.checkpoints import latest_iteration
from ...base.errors import STOPPED, host_port, refuse
from ...mechanisms.islands.membership.store import check_url
from .options import LaunchConfig
from .plan import PROGRAM, Plan

#: Seconds that ranks have to save after SIGTERM.
SHUTDOWN_SECONDS = 300


#: Variables that torchrun reads from the environment.
TORCHRUN_ENVIRONMENT = {
    # Otherwise it ends ranks 30 s after SIGTERM, too early for a large checkpoint.
    "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(SHUTDOWN_SECONDS),
    # Otherwise an agent that is started again waits in vain for the address of rank 0. The surviving agents (torch
    # 2.13, dynamic_rendezvous.py) publish it in their first round only. And scripts that make their process groups
    # without us may find the addresses of ranks that are gone.
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}


def launch_command(plan: Plan, environment: Mapping[str, str]) -> list[str]:
    """Return the command that starts the ranks of ``plan``, in a process whose environment is ``environment``.

    torchrun: run it on every node. srun: inside a job. Raise :class:`UsageError`.
    """
    return _torchrun(plan) if plan.launch.launcher == "torchrun" else _srun(plan, environment)


def check_shape(plan: Plan) -> None:
    """Raise :class:`UsageError` unless the accelerators fill whole nodes."""
    launch = plan.launch
    if launch.nodes > 1 and launch.accelerators % launch.accelerators_per_node:
        why = f"must fill nodes of --accelerators-per-node {launch.accelerators_per_node}"
        raise refuse("--accelerators", launch.accelerators, why)


def ranks_of_node(plan: Plan) -> int:
    """Return ranks on each node."""
    return min(plan.launch.accelerators, plan.launch.accelerators_per_node)


def shell(command: list[str], environment: Mapping[str, str]) -> str:
    """Return command and environment as a shell would take them, a flag per line."""
    words = [f"{name}={shlex.quote(value)}" for name, value in environment.items()]
    lines: list[str] = []
    for word in map(shlex.quote, command):
        if word.startswith("--") or not lines:
            lines.append(word)
        else:
            lines[-1] += f" {word}"
    return " \\\n    ".join([" ".join([*words, lines[0]]), *lines[1:]])


def _torchrun(plan: Plan) -> list[str]:
    launch = plan.launch
    command = [_python(launch), "-m", "megatron_lossy.lab.launch.agent", "--nnodes", str(launch.nodes)]
    command += ["--nproc-per-node", str(ranks_of_node(plan))]
    if launch.nodes == 1 and launch.rdzv_endpoint is None:
        command.append("--standalone")
    elif launch.rdzv_endpoint is None:
        why = f"{launch.nodes} nodes need --rdzv-endpoint HOST:PORT, the same on all"
        raise refuse("--accelerators", launch.accelerators, why)
    else:
        command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", launch.rdzv_endpoint]
        command += ["--rdzv-id", plan.folder.name]
    command += ["--max-restarts", str(launch.max_restarts)]
    # Output goes to a file per rank, and to the terminal as well.
    command += ["--log-dir", str(plan.own_folder / "logs"), "--redirects", "3", "--tee", "3"]
    return [*command, "-m", *plan.module]


def _python(launch: LaunchConfig) -> str:
    return "python" if launch.container_image else sys.executable  # a container has its own


def _srun(plan: Plan, environment: Mapping[str, str]) -> list[str]:
    launch = plan.launch
    job = environment.get("SLURM_JOB_ID")
    name = f"{job}.{environment.get('SLURM_RESTART_COUNT', '0')}" if job else "%j"
    # The batch script runs on the first node, as rank 0 does.
    address = "127.0.0.1" if launch.nodes == 1 else socket.gethostname() if job else "FIRST_NODE"
    # Jobs that share a node must not share a port.
    port = launch.master_port + (int(job) % 10000 if job else 0)
    command = ["srun", "--nodes", str(launch.nodes), "--ntasks", str(launch.accelerators)]
    command += ["--ntasks-per-node", str(ranks_of_node(plan)), "--kill-on-bad-exit=1", "--open-mode=append"]
    if "SLURM_CPUS_PER_TASK" in environment:  # srun does not take it over from the job
        command += ["--cpus-per-task", environment["SLURM_CPUS_PER_TASK"]]
    command += [f"--output={plan.own_folder / 'logs' / name}/rank-%t.log", *container(plan)]
    command += [_python(launch), "-m", "megatron_lossy.lab.launch.rank", "--kind", plan.device.kind]
    command += ["--ranks", str(launch.accelerators), "--master-addr", address, "--master-port", str(port)]
    return [*command, *plan.module]


def container(plan: Plan) -> list[str]:
    """Return the flags of srun that make pyxis start a container. Raise :class:`UsageError` for mounts without one."""
    launch = plan.launch
    flags = [f"--container-image={launch.container_image}"] if launch.container_image else []
    if launch.container_mounts:
        if not launch.container_image:
            raise refuse("--container-mounts", launch.container_mounts, "needs --container-image")
        flags.append(f"--container-mounts={launch.container_mounts}")
    return flags


# --- jobs that are launches of their own (``--rendezvous`` without ``--island``) ---------------------------------------


def several(plan: Plan, arguments: Sequence[str], about: Sequence[str]) -> int:
    """Print the command of the coordinator and of each job of ``plan``, or start all here with ``--run``; returns the exit status.

    ``arguments``: the command line. ``about``: lines about the run. Raise :class:`UsageError`.
    """
    own = [word for word in arguments if word not in ("--run", "--dry-run")]
    jobs = [[sys.executable, "-m", PROGRAM, *own, "--island", str(job)] for job in range(plan.jobs.number)]
    [(host, port), *_], _, _, ours = check_url(plan.lossy.rendezvous or "")
    coordinator = [sys.executable, "-m", "megatron_lossy", "coordinator", "--bind", host_port(host, port)]
    services = [[*coordinator, "--key-file", plan.lossy.udp_key_file or ""]] if ours else []
    if not plan.launch.run or plan.launch.dry_run:
        print("\n".join(about))
        for command in services:
            print(f"# on the host of that address\n{shell(command, {})}")
        for job, command in enumerate(jobs):
            print(f"# {plan.jobs.name} {job}, where it is\n{shell(command, {})}")
        return 0
    if plan.launch.launcher == "srun":
        raise refuse("--run", "on", "starts all on this host; submit each with --island")
    plan.folder.mkdir(parents=True, exist_ok=True)
    for command in services:
        command += ["--journal", str(plan.folder / "coordinator.journal")]
    return _run(services, jobs, plan.folder / "coordinator.log")


def _run(services: Sequence[Sequence[str]], jobs: Sequence[Sequence[str]], log: Path) -> int:
    """Run ``jobs`` to their ends, and ``services`` until then, which write into ``log``. A signal goes to all jobs.

    Return the status of the first of these that failed, as a shell has it.
    """
    came: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: came.append(number))
    with open(log, "a") as file:
        serving = [subprocess.Popen(service, stdout=file, stderr=file, start_new_session=True) for service in services]
    # A session each, so that a signal of the terminal comes once, from here.
    working = [subprocess.Popen(job, start_new_session=True) for job in jobs]
    try:
        while any(process.poll() is None for process in working):
            while came:
                number = came.pop(0)
                for process in working:
                    process.send_signal(number)
            time.sleep(0.1)
    finally:
        for service in serving:
            service.terminate()
            service.wait()
    status = next((process.returncode for process in working if process.returncode), 0)
    return status if status >= 0 else 128 - status


# --- a run inside a Slurm job, from its last checkpoint to its end, over as many jobs as it needs ------------------------
# ``--signal=TERM@300`` of the job script makes Slurm send SIGTERM to the ranks before the time limit; they save and end in
# order. They do the same when a job is preempted with a grace time. Then the job is put back in the queue, and continues from
# the checkpoint. A job that made no progress is not put back: it would never end.


def check_job(plan: Plan, environment: Mapping[str, str]) -> None:
    """Raise :class:`UsageError` unless the present job has the nodes of ``plan``."""
    launch = plan.launch
    if (has := int(environment.get("SLURM_JOB_NUM_NODES", launch.nodes))) != launch.nodes:
        share, rest = divmod(launch.accelerators, has)
        must = "" if rest else f"must be {share}: "
        why = f"{must}the Slurm job has {has} nodes for {launch.accelerators} ranks"
        raise refuse("--accelerators-per-node", launch.accelerators_per_node, why)


def run_in_job(plan: Plan, command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Start ``command`` (srun), wait, and requeue the job unless the run is complete; returns the exit status."""
    job = job_name(environment)
    if (before := done_iterations(plan)) >= plan.train.train_iters:
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
        return _requeue(job, 0 if status == STOPPED else status, after > before)
    finally:
        signal.signal(signal.SIGTERM, previous)


def job_name(environment: Mapping[str, str]) -> str:
    """Return the job's name for ``scontrol``. A job of an array has the number of the whole array and its own index."""
    if "SLURM_ARRAY_TASK_ID" in environment:
        return f"{environment['SLURM_ARRAY_JOB_ID']}_{environment['SLURM_ARRAY_TASK_ID']}"
    return environment["SLURM_JOB_ID"]


def done_iterations(plan: Plan) -> int:
    """Return iterations that the run's latest checkpoint holds."""
    return min(latest_iteration(one) or 0 for one in ([plan.own_folder] if plan.jobs.apart else plan.job_folders))


def _requeue(job: str, status: int, progress: bool) -> int:
    """Put a job whose run is incomplete back in the queue, if that is right; returns its exit status."""
    shown = _scontrol("--oneliner", "show", "job", job)
    state = dict(re.findall(r"(\S+?)=(\S*)", shown.stdout))
    if shown.returncode or "JobState" not in state:
        _say(f"not requeued: {shown.stderr.strip() or f'scontrol has no job {job}'}")
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
    if (done := _scontrol("requeue", job)).returncode:
        _say(f"requeue failed: {done.stderr.strip()}")
    return done.returncode


def _scontrol(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run ``scontrol``, again for a minute if it fails: on large clusters Slurm is often too busy to answer in time."""
    for seconds in (10, 20, 30, 0):
        done = subprocess.run(["scontrol", *arguments], capture_output=True, text=True)
        if done.returncode == 0 or "timed out" not in done.stderr:
            break
        time.sleep(seconds)
    return done


def _say(text: str) -> None:
    print(f"{PROGRAM}: {text}", flush=True)
