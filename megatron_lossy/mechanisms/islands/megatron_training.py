"""Islands under ``megatron.training``: each is a job of its own, with a part of the data and folders of its own.

Megatron reads RANK and WORLD_SIZE of the island (:mod:`megatron_lossy.plugin`), and finds the island's process group
made already. So it counts, reduces and saves as if there were no other islands. This module does the rest: the samples,
the folders and the stop signals of each island.

Megatron's loop has no way to a later iteration but to skip those before. It asks at the beginning of each one whether it is one of
``--iterations-to-skip``. Of an island that is a launch of its own the answer is yes as long as the run is ahead of it. Megatron then reads
the samples of the iteration, and computes nothing. The learning rate follows here.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import partial
from typing import Any

import torch

from ...base import device
from ...base.errors import refuse
from ...base.flags import as_text
from ...base.ledger import Patch, Signature
from .elastic import ElasticIslands
from .ranks import RankIslands

_FOLDERS = ("save", "tensorboard_dir", "non_persistent_global_ckpt_dir")
#: Of Megatron's arguments, those that all islands must have alike: of the model, the batch, the optimizer and its schedule.
_ALIKE = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels", "num_experts"),
    *("seq_length", "max_position_embeddings", "position_embedding_type", "rotary_base", "normalization", "swiglu"),
    *("untie_embeddings_and_output_weights", "tokenizer_type", "vocab_size", "make_vocab_size_divisible_by", "bf16", "fp16"),
    *("hidden_dropout", "attention_dropout", "global_batch_size", "rampup_batch_size", "train_iters", "split", "seed"),
    *("optimizer", "lr", "min_lr", "lr_decay_style", "lr_decay_iters", "lr_warmup_iters", "lr_warmup_fraction", "lr_warmup_init"),
    *("weight_decay", "start_weight_decay", "end_weight_decay", "weight_decay_incr_style", "clip_grad"),
    *("adam_beta1", "adam_beta2", "adam_eps", "sgd_momentum"),
)  # fmt: skip


def patches(islands: RankIslands) -> list[Patch]:
    """Return patches of Megatron's training program for islands."""
    samplers = [
        Patch(
            target=f"megatron.{module}.data_samplers:{name}.__init__",
            around=partial(sampler, islands),
            why="a rank takes its samples by its number among the ranks of all islands",
            optional=True,
            takes=Signature(named=("consumed_samples", "data_parallel_rank", "data_parallel_size")),
        )
        for module in ("legacy.data", "training.datasets")  # below 0.16, and later
        for name in ("MegatronPretrainingSampler", "MegatronPretrainingRandomSampler")
    ]
    return [
        *samplers,
        Patch(
            target="megatron.training.training:get_train_valid_test_num_samples",
            around=partial(number_of_samples, islands),
            why="all islands together read as many times the samples of one",
        ),
        Patch(
            target="megatron.training.dist_signal_handler:DistributedSignalHandler.signals_received",
            around=partial(signals_received, islands),
            why="islands that get a signal stop after the same iteration",
            takes=Signature(("self",), others=()),
        ),
    ]


_signature = functools.lru_cache(inspect.signature)


def sampler(islands: RankIslands, original: Callable, *args: Any, **kwargs: Any) -> None:
    """Wrap the constructor of a sampler: this rank takes its samples by its number among the ranks of all islands."""
    world = islands.world
    bound = _signature(original).bind(*args, **kwargs)
    given = bound.arguments
    given["data_parallel_rank"] += world.island * given["data_parallel_size"]
    given["data_parallel_size"] *= world.islands
    given["consumed_samples"] *= world.islands
    original(*bound.args, **bound.kwargs)


def number_of_samples(islands: RankIslands, original: Callable) -> tuple[int | None, ...]:
    """Wrap the count of samples for training, validation and test: return it times the number of islands."""
    return tuple(None if number is None else number * islands.world.islands for number in original())


def signals_received(islands: RankIslands, original: Callable, handler: Any) -> list[bool]:
    """Wrap the question, once in an iteration, which ranks received a signal. Islands agree on the answer."""
    return [bool(islands.agree(int(any(original(handler)))))]


def before_validation(islands: RankIslands, args: Any) -> None:
    """Give Megatron the folders of the island, before it checks its arguments. A second call changes nothing."""
    if getattr(args, "megatron_lossy_island", None) is None:
        args.megatron_lossy_island = island = islands.world.island
        jobs = islands.config.jobs()
        for name in _FOLDERS:
            if folder := getattr(args, name, None):
                setattr(args, name, jobs.folder(folder, island))
        if args.load:
            args.load = jobs.folder_to_load(args.load, island)


def enter(islands: RankIslands, args: Any) -> None:
    """Make the island the default world, after all checks. Megatron then finds it made."""
    if torch.distributed.is_initialized():
        return
    islands.world.seed = args.seed
    make = partial(device.init_process_group, args.distributed_backend)
    islands.world.open(make, timedelta(minutes=args.distributed_timeout_minutes))


class TrainingIslands(RankIslands):
    """Islands that may run under ``megatron.training``."""

    def attach(self, run: Any) -> None:
        super().attach(run)
        run.training_patches += patches(self)
        run.events.on(arguments_come=partial(before_validation, self), arguments_checked=partial(enter, self))


def alike(args: Any) -> dict[str, str]:
    """Return the values, by flag, of Megatron's arguments that all islands must share, if this Megatron has them."""
    there = vars(args)
    return {f"--{name.replace('_', '-')}": as_text(there[name]) for name in _ALIKE if name in there}


def train_patch(train: Callable) -> Patch:
    """Return the patch of Megatron's loop, around which ``train`` goes, for islands that are launches of their own."""
    return Patch(
        target="megatron.training.training:train",
        around=train,
        why="the learning rate follows iterations that are skipped since other islands have made them",
        takes=Signature(("forward_step_func", "model", "optimizer", "opt_param_scheduler")),
    )


class SkippedIterations(list):
    """The iterations to skip: those of ``given``, and those that ``ahead()`` says the run has made without this island."""

    def __init__(self, given: Iterable[int], ahead: Callable[[], bool]) -> None:
        super().__init__(given)
        self._ahead = ahead

    def __contains__(self, iteration: object) -> bool:
        # Megatron asks once in an iteration; the other question is a collective call.
        return self._ahead() or super().__contains__(iteration)

    def __reduce__(self) -> tuple[type, tuple[list[int]]]:
        return list, (list(self),)  # in a checkpoint


class TrainingElasticIslands(ElasticIslands, TrainingIslands):
    """:class:`ElasticIslands` that may run under ``megatron.training``."""

    _scheduler: Any = None
    _until = 0  # the iteration to go on with
    _last: int | None = None  # of the run
    _agreed = -1  # the iterations that were over when the ranks agreed on their state

    def attach(self, run: Any) -> None:
        super().attach(run)
        run.training_patches.append(train_patch(self.train))
        run.events.on(arguments_checked=self.after_arguments)

    def after_arguments(self, args: Any) -> None:
        """Raise :class:`UsageError` if the run cannot skip iterations that others have made; else let it."""
        given = getattr(args, "iterations_to_skip", None)
        if given is None:
            raise refuse("--rendezvous", self.config.rendezvous, "needs a Megatron with --iterations-to-skip (0.12)")
        if args.train_iters is None:
            raise refuse("--rendezvous", self.config.rendezvous, "needs --train-iters: islands agree on iterations")
        self.world.compare(alike(args))
        self._last = args.train_iters - 1  # which evaluates, and saves
        args.iterations_to_skip = SkippedIterations(given, self._ahead_of_it)
        self._run.gapless = False

    def train(self, original: Callable, *args: Any, **kwargs: Any) -> Any:
        """Wrap Megatron's loop, and take its scheduler."""
        self._scheduler = kwargs.get("opt_param_scheduler", args[3] if len(args) > 3 else None)
        return original(*args, **kwargs)

    def agree(self, value: int) -> int:
        """See :meth:`RankIslands.agree`. Megatron calls it, if at all, when an iteration is over."""
        self._agreed = self._run.iteration
        return self.begin_agreeing(value, self._run.iteration)()

    def _ahead_of_it(self) -> bool:
        """Return whether the run has made the iteration that is about to begin. A collective call of the island."""
        now = self._run.iteration
        if now >= self._until:
            if self._entered and self._agreed < now:
                self.agree(0)
            assert self._last is not None
            self._until = min(self.catch_up(now), self._last)
            if self._until > now:
                self._run.begin_equal()
                if not self.world.rank:
                    print(
                        f"island {self._slot} goes on at iteration {self._until}: others have made those from {now}",
                        flush=True,
                    )
        if now >= self._until:
            return False
        from megatron.core.num_microbatches_calculator import get_num_microbatches
        from megatron.training import get_args

        args = get_args()
        self._scheduler.step(increment=get_num_microbatches() * args.micro_batch_size * args.data_parallel_size)
        return True
