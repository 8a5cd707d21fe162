"""A LLaMA-style GPTModel (RMSNorm, rotary positions, SwiGLU, grouped-query attention) under Megatron's DDP, and its process groups.

Under torchrun the world comes from its environment; alone, a program is a world of one rank.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import random
from collections.abc import Iterator
from datetime import timedelta

import numpy as np
import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    HAVE_TE,
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module

from ...base import device
from ...base.errors import refuse
from ...base.jobs import World
from ..data import padded_vocab_size
from .config import TrainConfig

# The defaults of megatron-core. Only Megatron-LM's training loop applies them.
_BUCKET_PARAMETERS = 40_000_000
_BUCKET_PARAMETERS_PER_RANK = 1_000_000


def transformer_impl(config: TrainConfig) -> str:
    """Return ``local`` or ``transformer_engine``. Raise :class:`UsageError` if the requested layers cannot run here."""
    possible = HAVE_TE and device.device_type() == "cuda"
    if config.transformer_impl == "transformer_engine" and not possible:
        raise refuse("--transformer-impl", "transformer_engine", "needs transformer-engine and CUDA; use local")
    return config.transformer_impl or ("transformer_engine" if possible else "local")


def transformer_config(config: TrainConfig) -> TransformerConfig:
    """Return megatron-core's model configuration."""
    dtype = torch.bfloat16 if config.bf16 else torch.float32
    # The fused kernels are CUDA's; on another device torch would compile them, or they would be missing.
    fused = device.device_type() == "cuda"
    return TransformerConfig(
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.ffn,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.query_groups,
        normalization="RMSNorm",
        layernorm_epsilon=config.norm_epsilon,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=config.hidden_dropout,
        attention_dropout=config.attention_dropout,
        init_method_std=config.init_method_std,
        bf16=config.bf16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        tensor_model_parallel_size=config.tensor_model_parallel_size,
        pipeline_model_parallel_size=config.pipeline_model_parallel_size,
        calculate_per_token_loss=config.calculate_per_token_loss,
        use_cpu_initialization=device.device_type() == "cpu",
        bias_activation_fusion=fused,
        bias_dropout_fusion=fused,
        cross_entropy_loss_fusion=fused,
    )


def build_model(config: TrainConfig, vocab_size: int) -> list[DistributedDataParallel]:
    """Return this rank's pipeline stage, ready to train, as the list of one model chunk that megatron-core expects.

    ``vocab_size`` is the tokenizer's, before padding. Weights are random, equal on all data-parallel ranks.
    """
    transformer, multiple = transformer_config(config), config.make_vocab_size_divisible_by
    if transformer_impl(config) == "transformer_engine":
        layer = get_gpt_layer_with_transformer_engine_spec()
    else:
        layer = get_gpt_layer_local_spec(normalization="RMSNorm")
    model = GPTModel(
        transformer,
        layer,
        vocab_size=padded_vocab_size(vocab_size, multiple, config.tensor_model_parallel_size),
        max_sequence_length=config.seq_length,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=config.share_embeddings_and_output_weights,
        position_embedding_type="rope",
        rotary_base=config.rotary_base,
    )
    model.model_type = ModelType.encoder_or_decoder
    for parameter in model.parameters():
        tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    model.to(device.current_device())
    if config.bf16:
        model = Float16Module(transformer, model)
    chunk = DistributedDataParallel(transformer, _ddp_config(config), model)
    transformer.finalize_model_grads_func = finalize_model_grads
    if config.overlap_grad_reduce:
        transformer.no_sync_func = chunk.no_sync
    return [chunk]


def _ddp_config(config: TrainConfig) -> DistributedDataParallelConfig:
    data_parallel = config.virtual_workers or parallel_state.get_data_parallel_world_size(with_context_parallel=True)
    bucket_size = None
    if config.overlap_grad_reduce:
        bucket_size = config.ddp_bucket_size or max(_BUCKET_PARAMETERS, _BUCKET_PARAMETERS_PER_RANK * data_parallel)
    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=config.bf16,
        use_distributed_optimizer=config.use_distributed_optimizer,
        overlap_grad_reduce=config.overlap_grad_reduce,
        overlap_param_gather=config.gathers_in_forward,
        bucket_size=bucket_size,
        average_in_collective=config.ddp_average_in_collective,
        num_distributed_optimizer_instances=config.num_distributed_optimizer_instances,
    )


def forward_step(data_iterator, model):
    """Make one micro-batch's forward pass through this stage, in the form that Megatron's schedules expect.

    Return the stage's output and a function of the last stage's output, per-token losses [micro-batch, sequence]. The
    function returns their sum, the number of tokens, and both as a vector to report.
    """
    batch = next(data_iterator)
    output = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return output, functools.partial(sum_of_losses, batch["loss_mask"])


def sum_of_losses(mask: torch.Tensor, output: torch.Tensor):
    """Return the sum of ``output`` (losses per token) where ``mask`` is 1, the number of tokens, and both in a tensor."""
    mask = mask.view(-1).float()
    loss = torch.sum(output.view(-1).float() * mask)
    tokens = mask.sum()
    return loss, tokens.to(torch.int), torch.stack([loss.detach(), tokens])


# --- process groups: the world's, and Megatron's on top of it, for one run at a time --------------------------------------


@contextlib.contextmanager
def world(config: TrainConfig, launched: World | None = None) -> Iterator[None]:
    """Return a context with the default process group, destroyed at the end unless it existed before.

    ``launched``: if given, the group is this rank's job in it.
    """
    if torch.distributed.is_initialized():
        yield
        return
    timeout = timedelta(minutes=config.distributed_timeout_minutes)
    if launched is not None:
        launched.open(device.init_process_group, timeout)
    elif "RANK" in os.environ:
        device.init_process_group(timeout=timeout)
    else:
        device.init_process_group(store=torch.distributed.HashStore(), rank=0, world_size=1, timeout=timeout)
    yield
    # After an exception other ranks may be gone: the end of the process then destroys the group.
    torch.distributed.destroy_process_group()


@contextlib.contextmanager
def model_parallel(config: TrainConfig) -> Iterator[None]:
    """Return a context with Megatron's process groups and random states of one run, which its end destroys."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=config.tensor_model_parallel_size,
        pipeline_model_parallel_size=config.pipeline_model_parallel_size,
        num_distributed_optimizer_instances=config.num_distributed_optimizer_instances,
        order="tp-cp-ep-pp-dp" if config.use_tp_pp_dp_mapping else "tp-cp-ep-dp-pp",
        distributed_timeout_minutes=config.distributed_timeout_minutes,
        create_gloo_process_groups=False,  # they are not used here
    )
    groups = list(parallel_state._global_process_group_list)
    # As Megatron-LM does: pipeline stages differ, data-parallel ranks agree.
    seed = config.seed + 100 * parallel_state.get_pipeline_model_parallel_rank()
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    yield
    # destroy_model_parallel only forgets the groups. Their sockets would add up over the runs of a process.
    parallel_state.destroy_model_parallel()
    gc.collect()
    for group in groups:
        if group is not None and group in torch.distributed.distributed_c10d._world.pg_map:
            torch.distributed.destroy_process_group(group)
