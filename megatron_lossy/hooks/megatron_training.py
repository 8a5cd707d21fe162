"""The patches of megatron.training: flags, checks, evaluation, checkpoints (docs/semantics.md).

Only a checkout of Megatron-LM has megatron.training; the wheel of megatron-core does not before 0.17.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from ..base.checkpoints import names_checkpoint
from ..base.device.attempt import with_attempt_store
from ..base.errors import usage_errors
from ..base.ledger import Patch, Signature
from ..config import LossyConfig
from ..config.loss_flags import add_loss_flags
from ..delivery_log.writer import claim_delivery_log
from ..run.exporter import exporter_at
from .checks import check_run
from .facts import of_arguments
from .rng import rng_state, set_rng_state
from .runtime import Lossy

_ARGUMENTS = "megatron.training.arguments"
_TRAINING = "megatron.training.training"
_CHECKPOINTING = "megatron.training.checkpointing"
# Arguments that distinguish runs with the same loss flags.
_RUN = ("seed", "num_layers", "hidden_size", "seq_length", "tensor_model_parallel_size", "pipeline_model_parallel_size")
FLAG_GROUP = "loss (megatron-lossy)"


def flag_patches(around: Callable | None = None, why: str = "adds the loss flags to Megatron's own") -> list[Patch]:
    """Add our flags to Megatron's parser, or call ``around`` where it adds its own."""
    takes, around = Signature(("parser",), others=()), around or _add_distributed_args
    return [Patch(target=f"{_ARGUMENTS}:_add_distributed_args", around=around, why=why, takes=takes)]


def patches(lossy: Lossy) -> list[Patch]:
    """Return every patch that a lossy run needs in megatron.training."""
    evaluation = Patch(
        target=f"{_TRAINING}:evaluate",
        around=partial(evaluate, lossy),
        why="evaluates with the weights that --eval-weights asks for",
        takes=Signature(("forward_step_func", "data_iterator", "model")),
    )
    return [
        *(
            Patch(
                target=target,
                around=partial(validate_args, lossy),
                why="refuses settings of the command line or --yaml-cfg that cannot go with loss before any process group exists",
                optional=target != f"{_ARGUMENTS}:validate_args",
                takes=Signature(("args",)),
            )
            for target in (
                f"{_ARGUMENTS}:validate_args",
                "megatron.training.initialize:validate_args",
                "megatron.training.yaml_arguments:validate_yaml",
                "megatron.training.initialize:validate_yaml",
            )
        ),
        *(
            Patch(
                target=f"{module}:save_checkpoint",
                around=partial(save_checkpoint, lossy),
                why="checkpoints hold the owners' weights",
                takes=Signature(("iteration", "model"), named=("non_persistent_ckpt",)),
            )
            for module in (_CHECKPOINTING, _TRAINING)
        ),
        Patch(
            target=f"{_TRAINING}:load_checkpoint",
            around=partial(load_checkpoint, lossy),
            why="draws continue at the loaded iteration",
            takes=Signature(("ddp_model|model", "optimizer")),
        ),
        *([] if lossy.config.eval_weights == "replica" and lossy.jobs == 1 else [evaluation]),
        *lossy.training_patches,
        Patch(
            target="torch.distributed:init_process_group",
            around=init_process_group,
            why="after a restart by torchrun, groups may not find the addresses of ranks that are gone",
        ),
        Patch(
            target=f"{_TRAINING}:training_log",
            around=partial(training_log, lossy),
            why="writes the monitors' values along with Megatron's own",
            takes=Signature(named=("iteration",)),
        ),
        Patch(
            target=f"{_TRAINING}:dummy_train_step",
            around=partial(dummy_train_step, lossy),
            why="iterations without an optimizer step (--iterations-to-skip) count as well",
            optional=True,  # from 0.12 on
        ),
    ]


def _add_distributed_args(original: Callable, parser: Any) -> Any:
    return add_loss_flags(original(parser), FLAG_GROUP)


def validate_args(lossy: Lossy, original: Callable, args: Any, *rest: Any, **kwargs: Any) -> Any:
    """Wrap Megatron's checks of its arguments: make our checks, and set the length of the run."""
    lossy.events.arguments_come(args)
    result = original(args, *rest, **kwargs)
    facts = of_arguments(args, lossy.jobs)
    ranks = facts.workers
    with usage_errors():
        check_run(lossy.config, facts)
        _claim_delivery_log(args, lossy.config, ranks)
    lossy.gapless = not getattr(args, "iterations_to_skip", None)
    lossy.steps = lossy.steps or args.train_iters
    if args.rank == 0 and lossy.speaks:
        print(f"loss: {lossy.config.describe()} | data-parallel ranks {ranks}", flush=True)
        for line in lossy.config.jobs().advice(lossy.steps):
            print(f"note: {line}", flush=True)
    lossy.events.arguments_checked(args)
    return result


def init_process_group(original: Callable, backend: str | None = None, *args: Any, **options: Any) -> None:
    """Wrap the making of the default group: use a store of this attempt alone."""
    original(backend, *args, **(options if args else with_attempt_store(options)))


def dummy_train_step(lossy: Lossy, original: Callable, *args: Any, **kwargs: Any) -> Any:
    """Wrap an iteration that trains nothing, and count it."""
    result = original(*args, **kwargs)
    lossy.skip_iteration()
    return result


def _claim_delivery_log(args: Any, config: LossyConfig, ranks: int) -> None:
    load, save = getattr(args, "load", None), getattr(args, "save", None)
    same = load and save and os.path.realpath(load) == os.path.realpath(save)
    resumes = bool(load) and (same or names_checkpoint(load)) and not getattr(args, "finetune", False)
    claim_delivery_log(config, ranks, resumes, {name: getattr(args, name, None) for name in _RUN})


def _checkpoint_folder(save_or_load: str, iteration: int) -> str:
    from megatron.training.checkpointing import get_checkpoint_name

    return get_checkpoint_name(save_or_load, iteration, return_base_dir=True)


def save_checkpoint(lossy: Lossy, original: Callable, iteration: int, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap a save: the checkpoint holds the owners' weights."""
    from megatron.training import get_args

    if not kwargs.get("non_persistent_ckpt"):
        # Before the checkpoint: its last act is to become the latest one.
        lossy.save_replicas(_checkpoint_folder(get_args().save, iteration))
    with lossy.owner_weights(model):
        # An asynchronous save may let another process copy the weights, which no stream orders. It has its copy when it
        # returns, as training then changes them.
        torch.cuda.synchronize()
        result = original(iteration, model, *args, **kwargs)
    beside = None if kwargs.get("non_persistent_ckpt") else lossy.job_group.saved_beside(get_args().save)
    if beside is not None:
        folder, writes = beside
        with lossy.consensus_weights(model) as there, _weights_alone(get_args(), folder):
            if writes and there is not False:
                original(iteration, model, *args, **kwargs)
    return result


@contextlib.contextmanager
def _weights_alone(args: Any, folder: str) -> Iterator[None]:
    """Return a context in which Megatron saves weights alone, in ``folder``, at once."""
    only_weights = {"save": folder, "no_save_optim": True, "no_save_rng": True, "async_save": False}
    before = {name: getattr(args, name, None) for name in only_weights}
    vars(args).update(only_weights)
    try:
        yield
    finally:
        vars(args).update(before)


def load_checkpoint(lossy: Lossy, original: Callable, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap a load: continue the run at the checkpoint's iteration, with its replicas if they were saved."""
    result = original(model, optimizer, *args, **kwargs)
    if optimizer is not None:  # not a reference model
        from megatron.training import get_args

        iteration = result[0]
        lossy.set_iteration(iteration)
        if iteration:
            lossy.load_replicas(_checkpoint_folder(get_args().load, iteration))
    return result


_signature = functools.lru_cache(inspect.signature)
_exporter = functools.cache(exporter_at)  # one for the whole run


def training_log(lossy: Lossy, original: Callable, *args: Any, **kwargs: Any) -> Any:
    """Wrap Megatron's log line, and write the monitors' values after it."""
    from megatron.training import get_args

    result = original(*args, **kwargs)
    given = _signature(original).bind(*args, **kwargs).arguments
    iteration = given["iteration"]
    if iteration % get_args().log_interval == 0:
        metrics = lossy.metrics()
        _write(metrics, iteration)
        loss = (given.get("loss_dict") or {}).get("lm loss")
        if loss is not None and lossy.events.logged:
            lossy.events.logged(float(loss))
        last = torch.distributed.get_rank() == torch.distributed.get_world_size() - 1  # it writes to TensorBoard, too
        if lossy.config.metrics_port is not None and last:
            values = {"lm loss": loss, "grad norm": given.get("grad_norm")}
            known = {name: float(value) for name, value in values.items() if value is not None}
            exported = _exporter(lossy.config.metrics_port + lossy.job)
            if exported is not None:
                exported.write({"iteration": iteration, **metrics, **known})
    return result


def _write(metrics: dict[str, float], iteration: int) -> None:
    """Write ``metrics`` to the log, TensorBoard and Weights & Biases of the rank that has them."""
    from megatron.training import get_tensorboard_writer, get_wandb_writer, print_rank_last

    tensorboard, wandb = get_tensorboard_writer(), get_wandb_writer()
    for name, value in metrics.items() if tensorboard else ():
        tensorboard.add_scalar(name, value, iteration)
    if wandb:
        wandb.log(metrics, iteration)
    values = " | ".join(f"{name}: {value:.4g}" for name, value in metrics.items())
    print_rank_last(f" exchanges up to iteration {iteration:8d} | {values} |")


def _twice(data_iterator: Any) -> tuple[Any, Any]:
    """Return two data iterators, or lists of them, or ``None``, with the same batches. Only the first draws them."""
    if data_iterator is None:
        return None, None
    if isinstance(data_iterator, list):
        pairs = [_twice(item) for item in data_iterator]
        return [first for first, _ in pairs], [second for _, second in pairs]
    return itertools.tee(map(next, itertools.repeat(data_iterator)))  # Megatron's have `__next__` and no `__iter__`


def evaluate(
    lossy: Lossy, original: Callable, forward_step_func: Any, data_iterator: Any, model: Any, *args: Any, **kwargs: Any
) -> Any:
    """Wrap ``evaluate(forward_step_func, data_iterator, model, …)``: evaluate with the weights of ``--eval-weights``.

    With several jobs their mean weights replace the owners', and each loss is the mean over jobs.
    """
    weights, average = lossy.config.eval_weights, partial(_of_all_jobs, lossy)
    one = lossy.jobs == 1 or weights == "owner"
    whose, held = ("owner", lossy.owner_weights) if one else ("consensus", lossy.consensus_weights)
    if weights != "both":  # owner and consensus are one with one job
        with contextlib.nullcontext() if weights == "replica" else held(model):
            losses, *rest = original(forward_step_func, data_iterator, model, *args, **kwargs)
        return average(losses), *rest
    from megatron.training import get_args

    first, second = _twice(data_iterator)
    state = rng_state()
    losses, extra, time_limit = original(forward_step_func, first, model, *args, **kwargs)
    if time_limit:
        return losses, extra, time_limit
    consumed = get_args().consumed_valid_samples
    set_rng_state(state)
    with held(model):
        other, _, time_limit = original(forward_step_func, second, model, *args, **kwargs)
    get_args().consumed_valid_samples = consumed
    losses = average(losses) | {f"{key} ({whose} weights)": value for key, value in average(other or {}).items()}
    return losses, extra, time_limit


def _of_all_jobs(lossy: Lossy, losses: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the mean over jobs of ``losses``, which ranks of the last pipeline stage have."""
    total = lossy.job_group.total
    if total is None or not losses:
        return losses
    return {name: total(torch.as_tensor(value)) / lossy.jobs for name, value in losses.items()}
