"""Translates the trainer's flags to Megatron-LM's: the same run for ``pretrain_gpt.py``.

Most flags have the same name. Settings that our trainer always uses (RMSNorm, rotary positions, SwiGLU, no biases, the
distributed optimizer) become flags of Megatron-LM, and so do defaults that differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..config import LossyConfig, given
from ..errors import refuse
from ..train.config import TrainConfig
from .recipe import flag_arguments

_SAME = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "seq_length",
    "rotary_base",
    "norm_epsilon",
    "init_method_std",
    "hidden_dropout",
    "attention_dropout",
    "make_vocab_size_divisible_by",
    "transformer_impl",
    "bf16",
    "micro_batch_size",
    "global_batch_size",
    "train_iters",
    "seed",
    "calculate_per_token_loss",
    "lr",
    "min_lr",
    "lr_decay_style",
    "lr_decay_iters",
    "lr_warmup_iters",
    "weight_decay",
    "optimizer",
    "adam_beta1",
    "adam_beta2",
    "adam_eps",
    "clip_grad",
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "use_distributed_optimizer",
    "overlap_grad_reduce",
    "overlap_param_gather",
    "ddp_bucket_size",
    "ddp_average_in_collective",
    "distributed_timeout_minutes",
    "data_cache_path",
    "eval_interval",
    "eval_iters",
    "save",
    "load",
    "save_interval",
    "exit_interval",
    "log_interval",
    "tensorboard_dir",
    "wandb_project",
)
_ALWAYS = {
    "normalization": "RMSNorm",
    "position-embedding-type": "rope",
    "swiglu": True,
    "disable-bias-linear": True,
    # On SIGTERM the trainer saves and ends.
    "exit-signal-handler": True,
}


def megatron_arguments(
    config: TrainConfig, lossy: LossyConfig, only_megatron: Mapping[str, Any], mock_data: bool = False
) -> list[str]:
    """The command line of ``pretrain_gpt.py`` after the script's name.

    ``only_megatron``: flags by name with dashes, which win. Raises :class:`UsageError` for settings that Megatron-LM
    does not support.
    """
    if config.virtual_workers:
        raise refuse("--virtual-workers", config.virtual_workers, "needs --program train")
    flags: dict[str, Any] = {_dashed(name): getattr(config, name) for name in _SAME}
    flags |= _ALWAYS
    flags["global-batch-size"] = config.global_batch_size // lossy.jobs().number  # Megatron-LM knows of its own job
    flags |= {
        "ffn-hidden-size": config.ffn,
        "max-position-embeddings": config.seq_length,
        "untie-embeddings-and-output-weights": not config.share_embeddings_and_output_weights,
    }
    if config.query_groups != config.num_attention_heads:
        flags |= {"group-query-attention": True, "num-query-groups": config.query_groups}
    if config.num_distributed_optimizer_instances > 1:
        flags["num-distributed-optimizer-instances"] = config.num_distributed_optimizer_instances
    if config.optimizer == "sgd":
        flags["sgd-momentum"] = config.sgd_momentum
    if config.wandb_project:
        flags["wandb-exp-name"] = config.wandb_exp_name or "megatron-lossy"
    flags |= _tokenizer(config.tokenizer)
    if not mock_data:
        flags |= _data(config)
    return flag_arguments(flags | dict(only_megatron), "megatron") + loss_arguments(lossy)


def loss_arguments(lossy: LossyConfig) -> list[str]:
    """The loss flags that differ from their defaults."""
    changed = {_dashed(name): list(v) if isinstance(v, tuple) else v for name, v in given(lossy).items()}
    return flag_arguments(changed, "loss flags")


def _tokenizer(name: str) -> dict[str, Any]:
    """Megatron-LM's tokenizer with the same ids (megatron_lossy/data/tokenizers.py)."""
    if name == "byte":
        return {"tokenizer-type": "NullTokenizer", "vocab-size": 256}
    kind, _, source = name.partition(":")
    types = {"hf": "HuggingFaceTokenizer", "sentencepiece": "GPTSentencePieceTokenizer"}
    if kind not in types or not source:
        raise refuse("--tokenizer", name, "must be byte, hf:NAME_OR_PATH or sentencepiece:MODEL_FILE")
    return {"tokenizer-type": types[kind], "tokenizer-model": source}


def _data(config: TrainConfig) -> dict[str, Any]:
    if config.data is not None:
        raise refuse("--data", config.data, "needs --program train; Megatron-LM takes --data-path")
    flags = {"train-data-path": list(config.data_path)}
    return flags | ({"valid-data-path": list(config.valid_data_path)} if config.valid_data_path else {})


def _dashed(name: str) -> str:
    return name.replace("_", "-")
