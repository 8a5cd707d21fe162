"""Every flag of the pretraining program, in one frozen dataclass, and the checks of their combinations.

Names and meanings are Megatron-LM's (``megatron/training/arguments.py``) if it has the flag. Loss flags are those of
:class:`megatron_lossy.config.LossyConfig`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from ...base.errors import Collector, UsageError, refuse
from ...base.flags import flag, flag_name, refuse_unused, shown
from ..data import check_blend, is_weight

# The flags that fix the shapes of the saved weights.
SHAPE = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "share_embeddings_and_output_weights",
    "make_vocab_size_divisible_by",
    "tokenizer",
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "bf16",
)


@dataclass(frozen=True)
class TrainConfig:
    """Every flag except the loss flags. Raises :class:`UsageError` for a value that is not allowed."""

    num_layers: int | None = flag(None, "transformer layers", group="model")
    hidden_size: int | None = flag(None, "hidden size")
    ffn_hidden_size: int | None = flag(
        None, "hidden size of the SwiGLU MLP; default 8/3 of the hidden size, in multiples of 64"
    )
    num_attention_heads: int | None = flag(None, "attention heads")
    num_query_groups: int | None = flag(
        None, "key and value heads (grouped-query attention); default one per attention head"
    )
    seq_length: int | None = flag(None, "tokens per sample", metavar="TOKENS")
    rotary_base: int = flag(10000, "base of the rotary position embedding", metavar="BASE")
    norm_epsilon: float = flag(1e-5, "epsilon of RMSNorm", metavar="E")
    init_method_std: float = flag(0.02, "standard deviation of the initial weights", metavar="STD")
    hidden_dropout: float = flag(0.0, "dropout after attention and MLP", metavar="P")
    attention_dropout: float = flag(0.0, "dropout of attention weights", metavar="P")
    share_embeddings_and_output_weights: bool = flag(False, "tie the output layer to the embedding")
    make_vocab_size_divisible_by: int = flag(
        128, "pad the vocabulary to a multiple of this times the tensor-parallel size"
    )
    transformer_impl: str | None = flag(
        None,
        "layers of megatron-core itself (local) or of Transformer Engine; default transformer_engine on CUDA "
        "where it is installed, else local",
        choices=("local", "transformer_engine"),
    )
    bf16: bool = flag(False, "train in bfloat16; gradients and main weights stay in fp32", basic=True)

    micro_batch_size: int | None = flag(
        None, "samples per rank and forward pass", group="batches and length", basic=True
    )
    global_batch_size: int | None = flag(None, "samples per iteration over all ranks", basic=True)
    train_iters: int | None = flag(None, "iterations to train", basic=True)
    seed: int = flag(1234, "seed of weights, data order and dropout", metavar="SEED", basic=True)
    calculate_per_token_loss: bool = flag(False, "divide the loss by all tokens of the global batch")

    lr: float | None = flag(None, "highest learning rate", metavar="LR", group="optimizer", basic=True)
    min_lr: float = flag(0.0, "lowest learning rate after the decay", metavar="LR")
    lr_decay_style: str = flag(
        "cosine",
        "shape of the decay from --lr to --min-lr",
        choices=("constant", "linear", "cosine", "inverse-square-root"),
    )
    lr_decay_iters: int | None = flag(None, "iterations of the decay; default --train-iters")
    lr_warmup_iters: int = flag(0, "iterations of linear warm-up")
    weight_decay: float = flag(0.01, "decoupled weight decay, of matrices only", metavar="WD")
    optimizer: str = flag(
        "adam",
        "rule of the updates: adam, AdamW; nadam, AdamW that looks ahead by a step of its momentum; sgd, descent along the "
        "decaying mean of the gradients",
        choices=("adam", "nadam", "sgd"),
        basic=True,
    )
    nadam_momentum_decay: float | None = flag(
        None,
        "nadam: how fast the momentum rises from half of --adam-beta1 to all of it; default 120 / --train-iters, which "
        "ends where torch's 0.004 is after 30,000 iterations",
        metavar="PSI",
    )
    sgd_momentum: float = flag(0.9, "sgd: decay of the mean of the gradients; 0 follows the last gradient", metavar="B")
    adam_beta1: float = flag(0.9, "decay of Adam's first moment", metavar="B")
    adam_beta2: float = flag(0.999, "decay of Adam's second moment", metavar="B")
    adam_eps: float = flag(1e-8, "Adam's epsilon", metavar="E")
    clip_grad: float = flag(1.0, "clip the gradient to this norm; 0 does not clip", metavar="NORM")

    tensor_model_parallel_size: int = flag(1, "ranks that share each layer", group="parallelism", basic=True)
    pipeline_model_parallel_size: int = flag(1, "stages of layers, each on its own ranks", basic=True)
    use_tp_pp_dp_mapping: bool = flag(
        False, "number the ranks of a pipeline before those of a data-parallel group (docs/sites.md)"
    )
    use_distributed_optimizer: bool = flag(
        True,
        "shard the optimizer over data-parallel ranks; without (--no-use-distributed-optimizer) every rank has all "
        "of it and updates all weights, with all-reduced gradients",
        basic=True,
    )
    overlap_grad_reduce: bool = flag(False, "reduce-scatter gradients during the backward pass")
    overlap_param_gather: bool = flag(False, "all-gather parameters during the next forward pass")
    ddp_bucket_size: int | None = flag(
        None, "parameters per bucket with --overlap-grad-reduce; default megatron-core's"
    )
    ddp_average_in_collective: bool = flag(False, "average in the reduce-scatter instead of scaling before it")
    num_distributed_optimizer_instances: int = flag(1, "copies of the sharded optimizer over the data-parallel ranks")
    virtual_workers: int | None = flag(
        None,
        "data-parallel workers to compute for in one process; one after another, each with its own replica",
        basic=True,
    )
    distributed_timeout_minutes: int = flag(10, "fail a collective after this long", metavar="MINUTES", incidental=True)

    data: str | None = flag(
        None,
        "text that every machine has; stdlib: the source of Python's standard library, prepared on first use under "
        "--data-cache-path, in the place of --data-path and --valid-data-path",
        choices=("stdlib",),
        group="data",
        basic=True,
    )
    data_path: tuple[str, ...] | None = flag(
        None, "training data: prefix of Megatron's .bin and .idx, or weight prefix pairs", metavar="PREFIX", basic=True
    )
    valid_data_path: tuple[str, ...] | None = flag(
        None, "validation data, as --data-path", metavar="PREFIX", basic=True
    )
    tokenizer: str = flag(
        "byte", "tokenizer that made the data; see python -m megatron_lossy.data --help", metavar="NAME", basic=True
    )
    data_cache_path: str | None = flag(
        None,
        "folder for the sample indices; default a folder cache next to the data",
        metavar="FOLDER",
        incidental=True,
    )

    eval_interval: int = flag(1000, "iterations between evaluations", group="evaluation and checkpoints", basic=True)
    eval_iters: int = flag(100, "global batches per evaluation; 0 never evaluates")
    save: str | None = flag(None, "folder to write checkpoints to", metavar="FOLDER", incidental=True, basic=True)
    load: str | None = flag(
        None,
        "folder of the checkpoint to continue from; its learning-rate schedule goes on; that of --save may have none yet",
        metavar="FOLDER",
        incidental=True,
        basic=True,
    )
    save_interval: int | None = flag(
        None, "iterations between checkpoints; default only the last", incidental=True, basic=True
    )
    save_retain: int | None = flag(
        None,
        "checkpoints of this run to keep in --save; older ones are deleted once a newer one is whole; default all",
        incidental=True,
    )
    save_failures: int = flag(
        0,
        "failed saves in a row after which the run goes on, and tries again at the next interval; by default the first ends it",
        incidental=True,
    )
    exit_interval: int | None = flag(None, "save and exit at the first iteration divisible by this", incidental=True)

    log_interval: int = flag(
        10, "iterations between log lines; and metric records", incidental=True, group="logs", basic=True
    )
    sharpness_interval: int = flag(
        0,
        "iterations between measurements of how large the learning rate is for the curvature of the loss, with --virtual-workers "
        "(docs/monitors.md); 0 never measures",
        incidental=True,
    )
    metrics_dir: str | None = flag(None, "folder of metrics.jsonl; default --save", metavar="FOLDER", incidental=True)
    tensorboard_dir: str | None = flag(None, "folder of TensorBoard events", metavar="FOLDER", incidental=True)

    def __post_init__(self) -> None:
        for found in (self.missing(vars(self)), self._wrong_numbers(), self._wrong()):
            problems = Collector()
            with problems.noting():
                for error in found:
                    problems.note(error)
            problems.finish()

    def _wrong_numbers(self) -> Iterator[UsageError]:
        """Yield the errors of numbers that others are divided by."""
        for name in _POSITIVE:
            value = getattr(self, name)
            yield from self._need(name, value is None or value >= 1, "must be at least 1")

    def _wrong(self) -> Iterator[UsageError]:
        """Yield the errors of all else. The last checks raise theirs."""
        yield from self._need("lr", self.lr is not None and 0 < self.lr < math.inf, "must be a positive number")
        yield from self._need("min_lr", 0 <= self.min_lr <= self.lr, f"must be from 0 to --lr {self.lr:g}")
        for name in ("weight_decay", "clip_grad", "init_method_std", "nadam_momentum_decay"):
            value = getattr(self, name)
            yield from self._need(name, value is None or 0 <= value < math.inf, "must be at least 0")
        if self.nadam_momentum_decay is not None and self.optimizer != "nadam":
            yield refuse("--nadam-momentum-decay", self.nadam_momentum_decay, "needs --optimizer nadam")
        for name in ("adam_eps", "norm_epsilon", "rotary_base"):
            yield from self._need(name, 0 < getattr(self, name) < math.inf, "must be above 0")
        for name in ("sgd_momentum", "adam_beta1", "adam_beta2", "hidden_dropout", "attention_dropout"):
            yield from self._need(name, 0 <= getattr(self, name) < 1, "must be in [0, 1)")
        for name in _FROM_ZERO:
            yield from self._need(name, getattr(self, name) >= 0, "must be at least 0")
        yield from self._need("seed", 0 < self.seed < 2**31, "must be in [1, 2^31 - 1]")
        decay = self.lr_decay_iters or self.train_iters
        below = f"must be below the {decay} iterations of the decay"
        yield from self._need("lr_warmup_iters", self.lr_warmup_iters < decay, below)
        heads = self.num_attention_heads
        size, rest = divmod(self.hidden_size, heads)
        yield from self._need("hidden_size", not rest, f"must be divisible by --num-attention-heads {heads}")
        yield from self._need("hidden_size", size % 2 == 0, f"a head of {size} values cannot be rotated: must be even")
        fits = heads % (self.num_query_groups or 1) == 0
        yield from self._need("num_query_groups", fits, f"must divide --num-attention-heads {heads}")
        if self.overlap_param_gather and not self.overlap_grad_reduce:
            yield refuse("--overlap-param-gather", "on", "needs --overlap-grad-reduce")
        if not self.use_distributed_optimizer:
            if self.overlap_param_gather:
                yield refuse("--overlap-param-gather", "on", "nothing is gathered without --use-distributed-optimizer")
            name = "num_distributed_optimizer_instances"
            yield from self._need(name, getattr(self, name) == 1, "must be 1 without --use-distributed-optimizer")
        if self.ddp_average_in_collective and self.calculate_per_token_loss:
            yield refuse("--ddp-average-in-collective", "on", "cannot be combined with --calculate-per-token-loss")
        for name in ("save_retain", "save_failures"):
            yield from self._need(name, not getattr(self, name) or self.save is not None, "needs --save")
        for fine, why in (
            (self.virtual_workers, "needs all workers in one process: --virtual-workers"),
            (not self.bf16, "needs weights in float32, without --bf16"),
            (self.use_distributed_optimizer, "needs one optimizer: --use-distributed-optimizer"),
        ):
            yield from self._need("sharpness_interval", bool(fine or not self.sharpness_interval), why)
        if self.data and (self.data_path or self.valid_data_path):
            yield refuse("--data", self.data, "cannot be combined with --data-path or --valid-data-path")
        if self.optimizer != "sgd":
            refuse_unused(self, "sgd_momentum", f"needs --optimizer sgd, not {self.optimizer}")
        check_blend("--data-path", self.data_path or ())
        check_blend("--valid-data-path", self.valid_data_path or ())

    @classmethod
    def missing(cls, values: Mapping[str, Any]) -> list[UsageError]:
        """Return an error for each flag that needs a value and has none in ``values``."""
        names = [name for name in (*REQUIRED, "lr") if values[name] is None]
        if not values["data"] and not values["data_path"]:
            names.append("data_path")
        found = [UsageError(f"{flag_name(cls, name)}: needs a value, here or in the --config file") for name in names]
        if values["eval_iters"] and not values["data"] and not values["valid_data_path"]:
            found.append(refuse("--eval-iters", values["eval_iters"], "needs --valid-data-path, or --eval-iters 0"))
        return found

    def _need(self, name: str, fine: bool, allowed: str) -> Iterator[UsageError]:
        """Yield the error of the flag ``name`` unless it is ``fine``."""
        if not fine:
            yield refuse(flag_name(TrainConfig, name), shown(getattr(self, name)), allowed)

    def _check(self, name: str, fine: bool, allowed: str) -> None:
        for error in self._need(name, fine, allowed):
            raise error

    def check_world(self, world_size: int) -> None:
        """Raise :class:`UsageError` unless ``world_size`` ranks can run this."""
        tensor, pipeline = self.tensor_model_parallel_size, self.pipeline_model_parallel_size
        model = tensor * pipeline
        if self.virtual_workers:
            for name in _ONE_DEVICE:
                self._check(name, getattr(self, name) == 1, "must be 1 with --virtual-workers")
            if world_size != 1:
                allowed = f"all share one device: needs 1 process, not {world_size}"
                raise refuse("--virtual-workers", self.virtual_workers, allowed)
        if world_size % model:
            widest = "tensor_model_parallel_size" if tensor >= pipeline else "pipeline_model_parallel_size"
            fewer = f"only {world_size} started" if world_size < model else f"not {world_size}"
            self._check(widest, False, f"TP x PP = {tensor} x {pipeline} needs a multiple of {model} ranks, {fewer}")
        data = self.data_parallel_size(world_size)
        why = f"must be divisible by --micro-batch-size {self.micro_batch_size} x {data} data-parallel ranks"
        self._check("global_batch_size", self.global_batch_size % (self.micro_batch_size * data) == 0, why)
        self._check("num_layers", self.num_layers % pipeline == 0, f"must be divisible by {pipeline} pipeline stages")
        divided = {"num_attention_heads": self.num_attention_heads, "num_query_groups": self.query_groups}
        for name, value in (divided | {"ffn_hidden_size": self.ffn}).items():
            if value % tensor:
                why = f"must be divisible by {tensor} tensor-parallel ranks"
                raise refuse(flag_name(TrainConfig, name), value, why)
        fits = data % self.num_distributed_optimizer_instances == 0
        self._check("num_distributed_optimizer_instances", fits, f"must divide the {data} data-parallel ranks")

    def data_parallel_size(self, world_size: int) -> int:
        """Return ranks that share the batch, out of ``world_size``, or virtual workers."""
        if self.virtual_workers:
            return self.virtual_workers
        return world_size // (self.tensor_model_parallel_size * self.pipeline_model_parallel_size)

    @property
    def tokens(self) -> int:
        """Tokens of the whole training."""
        return self.train_iters * self.global_batch_size * self.seq_length

    @property
    def gathers_in_forward(self) -> bool:
        """Whether forward passes gather parameters; virtual workers have nothing to gather."""
        return self.overlap_param_gather and not self.virtual_workers

    @property
    def ffn(self) -> int:
        """Hidden size of the MLP: with SwiGLU 8/3 of the model's, as Megatron-LM rounds it."""
        return self.ffn_hidden_size or int(self.hidden_size * 4 * 2 / 3 / 64) * 64

    @property
    def query_groups(self) -> int:
        """Key and value heads."""
        return self.num_query_groups or self.num_attention_heads

    def data_sets(self) -> list[tuple[str, str]]:
        """Return the data sets in ``--data-path`` and ``--valid-data-path``: flag and prefix, without weights."""
        named = (("--data-path", self.data_path), ("--valid-data-path", self.valid_data_path))
        return [(name, text) for name, texts in named for text in texts or () if not is_weight(text)]

    def shape(self) -> dict[str, Any]:
        """Return the settings that fix the shapes of the saved weights."""
        worked_out = {"ffn_hidden_size": self.ffn, "num_query_groups": self.query_groups}
        return {name: getattr(self, name) for name in SHAPE} | worked_out


#: The flags without a default.
REQUIRED = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "seq_length",
    "micro_batch_size",
    "global_batch_size",
    "train_iters",
)
_ONE_DEVICE = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "num_distributed_optimizer_instances")
_FROM_ZERO = ("eval_iters", "lr_warmup_iters", "sharpness_interval", "save_failures")
_POSITIVE = [
    f.name
    for f in fields(TrainConfig)
    if f.type in ("int", "int | None") and f.name not in (*_FROM_ZERO, "seed", "rotary_base")
]
