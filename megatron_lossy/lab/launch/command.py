"""The exact command of a launcher, and its environment."""

from __future__ import annotations

import os
import shlex
import socket
import sys
from collections.abc import Mapping

from ...base.errors import UsageError, refuse
from .devices import first_host
from .plan import Plan

_SHUTDOWN_SECONDS = 300


#: Variables that torchrun reads from the environment.
TORCHRUN_ENVIRONMENT = {
    # Otherwise it ends ranks 30 s after SIGTERM, too early for a large checkpoint.
    "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(_SHUTDOWN_SECONDS),
    # Otherwise an agent that is started again waits in vain for the address of rank 0. The surviving agents (torch
    # 2.13, dynamic_rendezvous.py) publish it in their first round only. And scripts that make their process groups
    # without us may find the addresses of ranks that are gone.
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}


def launch_command(plan: Plan, environment: Mapping[str, str]) -> list[str]:
    """The command that starts the ranks of ``plan``, in a process whose environment is ``environment``.

    torchrun: run it on every node. srun: inside a job. mpirun: once. Raises :class:`UsageError`.
    """
    return {"torchrun": _torchrun, "srun": _srun, "mpirun": _mpirun}[plan.launch.launcher](plan, environment)


def check_shape(plan: Plan) -> None:
    """Raise :class:`UsageError` unless the accelerators fill whole nodes."""
    launch = plan.launch
    if launch.nodes > 1 and launch.accelerators % launch.accelerators_per_node:
        raise refuse(
            "--accelerators",
            launch.accelerators,
            f"must fill nodes of --accelerators-per-node {launch.accelerators_per_node}",
        )


def ranks_of_node(plan: Plan) -> int:
    """Ranks on each node."""
    return min(plan.launch.accelerators, plan.launch.accelerators_per_node)


def shell(command: list[str], environment: Mapping[str, str]) -> str:
    """Command and environment as a shell would take them, a flag per line."""
    words = [f"{name}={shlex.quote(value)}" for name, value in environment.items()]
    lines: list[str] = []
    for word in map(shlex.quote, command):
        if word.startswith("--") or not lines:
            lines.append(word)
        else:
            lines[-1] += f" {word}"
    return " \\\n    ".join([" ".join([*words, lines[0]]), *lines[1:]])


def _torchrun(plan: Plan, environment: Mapping[str, str]) -> list[str]:
    launch = plan.launch
    command = [sys.executable, "-m", "megatron_lossy.lab.launch.agent", "--nnodes", str(launch.nodes)]
    command += ["--nproc-per-node", str(ranks_of_node(plan))]
    if launch.nodes == 1 and launch.rdzv_endpoint is None:
        command.append("--standalone")
    elif launch.rdzv_endpoint is None:
        raise refuse(
            "--accelerators",
            launch.accelerators,
            f"{launch.nodes} nodes need --rdzv-endpoint HOST:PORT, the same on all",
        )
    else:
        command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", launch.rdzv_endpoint]
        command += ["--rdzv-id", plan.folder.name]
    command += ["--max-restarts", str(launch.max_restarts)]
    # Output goes to a file per rank, and to the terminal as well.
    command += ["--log-dir", str(plan.own_folder / "logs"), "--redirects", "3", "--tee", "3"]
    return [*command, "-m", *plan.module]


def _rank(plan: Plan, python: str, address: str, port: int) -> list[str]:
    launch = plan.launch
    own = ["--kind", plan.device.kind, "--ranks", str(launch.accelerators)]
    own += ["--master-addr", address, "--master-port", str(port)]
    return [python, "-m", "megatron_lossy.lab.launch.rank", *own, *plan.module]


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
    # A container has a Python of its own.
    return command + _rank(plan, "python" if launch.container_image else sys.executable, address, port)


def container(plan: Plan) -> list[str]:
    """The flags of pyxis for srun."""
    launch = plan.launch
    flags = [f"--container-image={launch.container_image}"] if launch.container_image else []
    if launch.container_mounts:
        if not launch.container_image:
            raise refuse("--container-mounts", launch.container_mounts, "needs --container-image")
        flags.append(f"--container-mounts={launch.container_mounts}")
    return flags


def _mpirun(plan: Plan, environment: Mapping[str, str]) -> list[str]:
    launch = plan.launch
    address = "127.0.0.1"
    command = ["mpirun", "-n", str(launch.accelerators), "--bind-to", "none"]
    if os.geteuid() == 0:  # as in Gaudi's containers
        command.append("--allow-run-as-root")
    if launch.hostfile is not None:
        address = first_host(launch.hostfile)
        command += ["--hostfile", launch.hostfile]
    elif launch.nodes > 1:
        raise UsageError(f"--hostfile: needs a value, for {launch.nodes} nodes")
    for name, value in plan.environment.items():
        command += ["-x", f"{name}={value}"]
    command += ["--output-filename", str(plan.own_folder / "logs")]
    return command + _rank(plan, sys.executable, address, launch.master_port)
