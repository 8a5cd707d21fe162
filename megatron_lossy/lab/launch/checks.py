"""Checks of everything that can be wrong before a single rank is started."""

from __future__ import annotations

import importlib.util
import os
import runpy
import subprocess
import sys
from pathlib import Path

import psutil

from ...base.checkpoints import latest_iteration
from ...base.errors import Collector, UsageError, refuse
from ...base.files import check_folder
from ...config.facts import Facts
from ...config.refusal import check_refusals
from ..data import check_files, epochs
from ..train.saved import check_folders, in_folders_of_job
from .command import check_shape, ranks_of_node
from .memory import StageMemory, estimate
from .options import GIB, Device, check_devices, check_tokenizer
from .plan import Plan


def check(plan: Plan, starting: bool) -> None:
    """Raise :class:`UsageError` for anything wrong with ``plan``.

    ``starting``: this node will train, so that it must have the accelerators.
    """
    problems = Collector()
    with problems.noting():
        if plan.launch.run and (plan.launch.render or plan.island is not None or not plan.jobs.apart):
            raise refuse("--run", "on", "needs --rendezvous, and no --island or --render")
        check_shape(plan)
        plan.train.check_world(plan.ranks)
        check_training(plan)
        memory = check_memory(plan)
        if starting:
            check_host_memory(plan, memory)
    if starting:
        with problems.noting():
            check_devices(plan.device.kind, ranks_of_node(plan))
    if plan.launch.render is not None:  # files are those of the containers
        problems.finish()
        return
    with problems.noting():
        check_folder("--out", plan.folder)
        if plan.launch.trainer:
            for job in range(plan.jobs.number):
                check_folders(in_folders_of_job(plan.train, plan.jobs, job), plan.lossy)
        for folder in plan.job_folders:
            latest_iteration(folder)
    with problems.noting():
        plan.launch.check_program()
        if plan.launch.trainer:
            check_trainer(plan.device)
    with problems.noting():
        check_tokenizer(plan.train.tokenizer)
    with problems.noting():
        check_data(plan)
    problems.finish()
    if not plan.launch.trainer:
        check_megatron(plan)
    if starting:
        from ...hooks.dataset_helper import build_helper  # it imports torch

        build_helper(None if plan.launch.trainer else Path(plan.launch.program).parent)


def check_training(plan: Plan) -> None:
    """Raise :class:`UsageError` for flags of the training that cannot run on the ranks of ``plan``."""
    train, lossy = plan.train, plan.lossy
    if plan.launch.trainer:
        from ..train.facts import check_flags  # it imports torch

        check_flags(train, lossy, plan.ranks)
        return
    from ...hooks.checks import warn_of_instances

    warn_of_instances(lossy, train.num_distributed_optimizer_instances)
    facts = Facts(flushes=True)
    if plan.jobs.several:  # Megatron-LM, which checks the rest, sees one job
        from ..train.facts import of_trainer

        facts = of_trainer(train, plan.ranks) | facts
    check_refusals(lossy, facts)
    lossy.jobs().check(train.train_iters)


def check_trainer(device: Device) -> None:
    """Raise :class:`UsageError` unless ``megatron_lossy.train`` can train with the Megatron of this machine.

    It does not import Megatron. Without a Megatron, as on a login node, it checks nothing.
    """
    from ...hooks.versions import OLDEST_FOR_TRAIN, check_version  # it imports torch

    if device.kind == "hpu":
        oldest = ".".join(map(str, OLDEST_FOR_TRAIN))
        why = f"needs megatron-core {oldest}; HabanaAI's forks for Gaudi are older: give pretrain_gpt.py of such a fork"
        raise refuse("--program", "train", why)
    try:
        found = importlib.util.find_spec("megatron.core")
    except ModuleNotFoundError:
        return
    if found and found.origin and (info := Path(found.origin).with_name("package_info.py")).is_file():
        check_version(runpy.run_path(str(info))["__version__"], OLDEST_FOR_TRAIN)


def check_memory(plan: Plan) -> StageMemory:
    """Return the pipeline stage that needs most memory. Raise :class:`UsageError` if the device has less."""
    found = estimate(plan.train, plan.lossy, plan.layout, plan.device)
    if (memory := plan.device.memory) is not None and found.total > memory:
        needs = f"pipeline stage {found.stage} needs {found.total / GIB:.1f} GiB"
        mend = "raise --tensor-model-parallel-size or --pipeline-model-parallel-size, or lower --micro-batch-size"
        raise refuse("--device", plan.launch.device, f"has {memory / GIB:.1f} GiB, {needs}; {mend}")
    return found


def network_memory(plan: Plan, memory: StageMemory) -> tuple[int, int, int] | None:
    """Return what ``--transport udp`` or ``stream`` takes of a node for each rank; None if no gradients cross so.

    Bytes for copies between device and network (page-locked for CUDA), bytes at most of the host in all, and threads. A
    process has one thread for its socket (of all streams), and on an accelerator two more for copies. As much as ``--udp-memory`` says is
    there for copies, and as much again for packets that arrive before they are asked for.
    """
    lossy = plan.lossy
    if not lossy.observed or memory.far == 0:
        return None
    return (0, lossy.udp_memory, 1) if plan.device.kind == "cpu" else (lossy.udp_memory, 2 * lossy.udp_memory, 3)


def describe_network(plan: Plan, memory: StageMemory) -> list[str]:
    """Return the lines of a dry run about datagrams or streams."""
    share, ranks = network_memory(plan, memory), ranks_of_node(plan)
    if share is None:
        return []
    staging, host, threads = share
    of_rank = f"{host / GIB:.2f} GiB of the host and {threads} thread{'s'[: threads != 1]} a rank"
    of_node = f"{ranks * host / GIB:.1f} GiB and {ranks * threads} threads a node of {ranks}"
    lines = [f"{plan.lossy.transport:8} {of_rank}; {of_node}"]
    if staging:
        pinned = " page-locked" if plan.device.kind == "cuda" else " for copies"
        lines.append(f"         of these {staging / GIB:.2f} GiB{pinned} (--udp-memory)")
    return lines


def check_host_memory(plan: Plan, memory: StageMemory) -> None:
    """Raise :class:`UsageError` if the ranks of this node may take more memory for messages than it has."""
    share, ranks, has = network_memory(plan, memory), ranks_of_node(plan), psutil.virtual_memory().total
    if share is not None and ranks * share[1] > has:
        most = f"{share[1] / GIB:.1f} GiB of each of {ranks} ranks of a node"
        raise refuse("--udp-memory", plan.lossy.udp_memory, f"takes up to {most}, and this one has {has / GIB:.1f} GiB")


def check_data(plan: Plan) -> None:
    """Raise :class:`UsageError` unless the data are there, and agree with the tokenizer."""
    if plan.train.data is not None or plan.mock_data:
        return
    tokenizer, problems = plan.train.tokenizer, Collector()
    for flag, prefix in plan.train.data_sets():
        with problems.noting():
            made = check_files(prefix, flag)
            # Only byte is distinct: other vocabularies can have several names (a file, a model of the Hub).
            if made is not None and (made.tokenizer == "byte") != (tokenizer == "byte"):
                raise refuse("--tokenizer", tokenizer, f"{prefix} was made with --tokenizer {made.tokenizer}")
    problems.finish()
    if (seen := epochs_of(plan)) > plan.launch.max_epochs:
        need, have = plan.train.tokens / 1e9, plan.train.tokens / seen / 1e9
        why = f"has {have:.3g} G tokens for a run of {need:.3g} G, {seen:.3g} epochs; give more text, or --max-epochs"
        raise refuse("--data-path", " ".join(plan.train.data_path), why)


def epochs_of(plan: Plan) -> float | None:
    """Return the number of times that the run reads its training data; ``None`` if they are generated."""
    return None if plan.train.data is not None or plan.mock_data else epochs(plan.train.data_path, plan.train.tokens)


def check_megatron(plan: Plan) -> None:
    """Raise :class:`UsageError` unless the Megatron next to the script is supported and takes all flags.

    Megatron's own parser and validation decide, in a process of their own.
    """
    command = [sys.executable, "-m", "megatron_lossy.lab.launch.megatron_flags", *plan.module[1:]]
    environment = os.environ | plan.environment
    for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID", "SLURM_LOCALID"):
        environment.pop(name, None)
    environment["WORLD_SIZE"] = str(plan.ranks // plan.jobs.number)  # each is a program of its own
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    lines = (done.stderr + done.stdout).strip().splitlines() or ["no output"]
    if done.returncode == 2:
        reason = ([line for line in lines if "error: " in line] or lines)[-1].partition("error: ")[2] or lines[-1]
        if plan.device.kind == "hpu":
            reason += "; Gaudi needs HabanaAI's fork: git clone -b 1.24.0 https://github.com/HabanaAI/Megatron-LM"
        raise UsageError(reason)
    if done.returncode:
        raise refuse("--program", plan.launch.program, f"its Megatron cannot be loaded here: {lines[-1]}")
