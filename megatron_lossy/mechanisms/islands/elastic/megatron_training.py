"""Islands that are launches of their own under ``megatron.training``, whose loop has no way to a later iteration but to skip those before.

Megatron asks at the beginning of each iteration whether it is one of ``--iterations-to-skip``. The answer is yes as long as the run
is ahead of this island. Megatron then reads the samples of the iteration, and computes nothing. The learning rate follows here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from ....base.errors import refuse
from ....base.flags import as_text
from ....base.ledger import Patch, Takes
from .part import ElasticIslands

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


def alike(args: Any) -> dict[str, str]:
    """By flag, the values of Megatron's arguments that all islands must share, as far as this Megatron has them."""
    there = vars(args)
    return {f"--{name.replace('_', '-')}": as_text(there[name]) for name in _ALIKE if name in there}


def patches(train: Callable) -> list[Patch]:
    """The patches that other islands under Megatron do not need. ``train``: goes around Megatron's loop."""
    return [
        Patch(
            target="megatron.training.training:train",
            around=train,
            why="the learning rate follows iterations that are skipped since other islands have made them",
            versions="0.12 and later",
            until="Megatron can go on at a later iteration",
            takes=Takes(("forward_step_func", "model", "optimizer", "opt_param_scheduler")),
        )
    ]


class Skipped(list):
    """The iterations to skip: those of ``given``, and those that ``ahead()`` says the run has made without this island."""

    def __init__(self, given: Iterable[int], ahead: Callable[[], bool]) -> None:
        super().__init__(given)
        self._ahead = ahead

    def __contains__(self, iteration: object) -> bool:
        # Megatron asks once in an iteration; the other question is a collective call.
        return self._ahead() or super().__contains__(iteration)

    def __reduce__(self) -> tuple[type, tuple[list[int]]]:
        return list, (list(self),)  # in a checkpoint


class TrainingElasticIslands(ElasticIslands):
    """:class:`ElasticIslands` that may run under ``megatron.training``."""

    _scheduler: Any = None
    _until = 0  # the iteration to go on with
    _last: int | None = None  # of the run
    _agreed = -1  # the iterations that were over when the ranks agreed on what they know

    def training_patches(self) -> list[Patch]:
        return [*super().training_patches(), *patches(self.train)]

    def after_arguments(self, args: Any) -> None:
        super().after_arguments(args)
        given = getattr(args, "iterations_to_skip", None)
        if given is None:
            raise refuse("--rendezvous", self.config.rendezvous, "needs a Megatron with --iterations-to-skip (0.12)")
        if args.train_iters is None:
            raise refuse("--rendezvous", self.config.rendezvous, "needs --train-iters: islands agree on iterations")
        self.world.compare(alike(args))
        self._last = args.train_iters - 1  # which evaluates, and saves
        args.iterations_to_skip = Skipped(given, self._ahead_of_it)
        self._run.gapless = False

    def train(self, original: Callable, *args: Any, **kwargs: Any) -> Any:
        """Wraps Megatron's loop, of which it gets to know the scheduler."""
        self._scheduler = kwargs.get("opt_param_scheduler", args[3] if len(args) > 3 else None)
        return original(*args, **kwargs)

    def agree(self, value: int) -> int:
        """See :meth:`RankIslands.agree`. Megatron calls it, if at all, when an iteration is over."""
        self._agreed = self._run.iteration
        return self.begin_agreeing(value, self._run.iteration)()

    def _ahead_of_it(self) -> bool:
        """Whether the run has made the iteration that is about to begin. A collective call of the ranks of the island."""
        now = self._run.iteration
        if now >= self._until:
            if self._entered and self._agreed < now:
                self.agree(0)
            assert self._last is not None
            self._until = min(self._run.catch_up(now), self._last)
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
