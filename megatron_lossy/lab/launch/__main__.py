"""``python -m megatron_lossy.launch --config FILE.yaml --program SCRIPT --out FOLDER``: see docs/cluster.md."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence

from ...base.errors import Collector, Problems, UsageError, usage_errors, with_origin
from ..theory import site_bytes
from .checks import check, check_memory, describe_network, epochs_of
from .command import (
    TORCHRUN_ENVIRONMENT,
    check_job,
    container,
    done_iterations,
    launch_command,
    run_in_job,
    several,
    shell,
)
from .memory import checkpoint_bytes, parameters
from .options import GIB
from .plan import PROGRAM, Plan, make_plan
from .render import render


def main(arguments: Sequence[str] | None = None) -> None:
    """Check the run, then start it, or print it."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    with usage_errors(PROGRAM), _all_problems():
        in_job = "SLURM_JOB_ID" in os.environ and "SLURM_NTASKS" in os.environ
        plan = make_plan(arguments, int(os.environ["SLURM_NTASKS"]) if in_job else None)
        if plan.launch.render is not None:
            check(plan, starting=False)
            print(render(plan, arguments), end="")
            return
        if plan.jobs.apart and plan.island is None:
            check(plan, starting=plan.launch.run and not plan.launch.dry_run)
            sys.exit(several(plan, arguments, describe(plan)))
        start, srun = not plan.launch.dry_run, plan.launch.launcher == "srun"
        if start and srun and not in_job:
            raise UsageError("--launcher srun: needs a Slurm job with tasks; submit launch/slurm/run.sbatch")
        if start and srun:
            check_job(plan, os.environ)
        if plan.launch.container_image and start:
            _check_in_container(plan, arguments)
        else:
            check(plan, starting=start)
        command = launch_command(plan, os.environ)
        own = plan.environment | (TORCHRUN_ENVIRONMENT if plan.launch.launcher == "torchrun" else {})
        if not start:
            print("\n".join(describe(plan)))
            print(shell(command, own))
            return
        environment = os.environ | own
        os.makedirs(plan.folder, exist_ok=True)
        print(shell(command, own), flush=True)
        if srun:
            sys.exit(run_in_job(plan, command, environment))
        os.execvpe(command[0], command, environment)


@contextlib.contextmanager
def _all_problems() -> Iterator[None]:
    """Print all but the last of several errors, and raise the last."""
    try:
        yield
    except Problems as several:
        for error in several.found[:-1]:
            print(f"{PROGRAM}: error: {with_origin(error)}", file=sys.stderr)
        raise several.found[-1] from None


def _check_in_container(plan: Plan, arguments: list[str]) -> None:
    """Check data, tokenizer and Megatron in the container, where the ranks will see them."""
    inside = ["srun", "--nodes", "1", "--ntasks", "1", *container(plan)]
    inside += ["python", "-m", PROGRAM, *arguments, "--accelerators", str(plan.launch.accelerators), "--dry-run"]
    if (done := subprocess.run(inside, capture_output=True, text=True)).returncode:
        lines = done.stderr.strip().splitlines() or ["no output"]
        errors = [line.partition("error: ")[2] for line in lines if f"{PROGRAM}: error: " in line]
        problems = Collector()
        for error in errors or [f"--container-image {plan.launch.container_image}: {lines[-1]}"]:
            problems.note(UsageError(error))
        problems.finish()


def describe(plan: Plan) -> list[str]:
    """Return the lines of a dry run about the run."""
    train = plan.train
    tensor, pipeline = train.tensor_model_parallel_size, train.pipeline_model_parallel_size
    data, nodes = train.data_parallel_size(plan.ranks), plan.launch.nodes
    each = f" for each {plan.jobs.name}" if plan.jobs.apart else ""
    place = f"{plan.ranks} on {nodes} node{'s' if nodes > 1 else ''}{each}"
    lines = [
        f"run      {plan.folder}, from iteration {done_iterations(plan)} to {plan.train.train_iters}",
        f"ranks    {place}: data {data} x tensor {tensor} x pipeline {pipeline}",
        *_jobs(plan),
        f"loss     {plan.lossy.describe()}",
        *estimates(plan),
        all_checkpoints(plan),
    ]
    if (seen := epochs_of(plan)) is not None:
        lines.append(f"data     {seen:.3g} epochs of {' '.join(plan.train.data_path)}")
    return lines


def _jobs(plan: Plan) -> list[str]:
    if not (jobs := plan.jobs).several:
        return []
    ranks, first = plan.ranks // jobs.number, plan.job_folders[0].name
    data = plan.train.data_parallel_size(plan.ranks) // jobs.number
    what = f"launch of its own, of {ranks}" if jobs.apart else f"job of {ranks} consecutive"
    each = f"each a {what} rank{'s'[: ranks != 1]}, data {data}, in {first} and so on"
    return [f"{jobs.name + 's':8} {jobs.number}, {each}"]


def _sites(plan: Plan) -> list[str]:
    """Return the bytes that cross a site's border in an iteration, and their time at the rate of the link, if known."""
    train, lossy = plan.train, plan.lossy
    if lossy.sites is None:
        return []
    elements, plain = parameters(train, plan.layout.vocab_size), {"grad": 32, "param": 16 if train.bf16 else 32}
    grad, param = (
        site_bytes(elements, lossy.sites, lossy.wire_bits.get(phase, bits) / 8, lossy.copies(phase)) / 1e9
        for phase, bits in plain.items()
    )
    ranks = plan.ranks // lossy.sites
    sent = f"{grad:.3g} GB of gradients and {param:.3g} GB of parameters"
    of = f"{lossy.sites} of {ranks} rank{'s'[: ranks != 1]}"
    lines = [f"sites    {of}; out of each {sent} an iteration, and as much into it"]
    if (rate := lossy.udp_bytes_per_second) is not None:
        seconds = 1e9 * (grad + param) / rate
        lines.append(f"         at --udp-rate {' '.join(lossy.udp_rate)} in {seconds:.3g} s at least")
    return lines


def estimates(plan: Plan) -> list[str]:
    """Return size, tokens, memory, disk and time of a run, in lines."""
    launch, train = plan.launch, plan.train
    total = train.tokens
    memory = check_memory(plan)
    has = f" of {plan.device.memory / GIB:.1f}" if plan.device.memory else ""
    parts = ", ".join(f"{name} {size / GIB:.1f}" for name, size in memory.components.items())
    return [
        f"model    {parameters(train, plan.layout.vocab_size) / 1e9:.3f} B parameters",
        f"tokens   {total / train.train_iters / 1e6:.3f} M an iteration, {total / 1e9:.2f} G in all",
        f"memory   {memory.total / GIB:.1f}{has} GiB on {launch.device}, stage {memory.stage}: {parts} (assumed)",
        *_sites(plan),
        *describe_network(plan, memory),
        f"disk     {checkpoint_bytes(train, plan.lossy, plan.layout, plan.device) / GIB:,.1f} GiB a checkpoint",
        f"time     {total / plan.ranks / 3600:,.0f} h / R, where R is the measured tokens per second and accelerator",
    ]


def all_checkpoints(plan: Plan) -> str:
    """Return the size of all checkpoints that are there at once, and whether the disk has it, in a line."""
    size = plan.checkpoints * checkpoint_bytes(plan.train, plan.lossy, plan.layout, plan.device)
    there = next(path for path in [plan.folder.absolute(), *plan.folder.absolute().parents] if path.exists())
    free = shutil.disk_usage(there).free
    short = "" if size <= free else f": more than the {free / GIB:,.1f} GiB that are free at {there}; see --save-retain"
    number = f"{plan.checkpoints} checkpoint{'s'[: plan.checkpoints != 1]}"
    return f"kept     {size / GIB:,.1f} GiB in at most {number}{short}"


if __name__ == "__main__":
    main()
