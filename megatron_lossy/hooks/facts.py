"""Facts for the table of refusals, of Megatron's arguments and of a model chunk. One line for each fact.

Versions of Megatron differ in their attributes. An absent one has its default here, and nowhere else.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from ..base.device import device_type
from ..config.facts import Facts
from .versions import dense_buffers, main_gradients, pipeline_groups

#: Attributes of Megatron's arguments that are switches of :class:`Facts`.
_SWITCHES = (
    "fp8_param_gather",
    "use_megatron_fsdp",
    "use_torch_fsdp2",
    "optimizer_cuda_graph",
    "optimizer_cpu_offload",
    "reuse_grad_buf_for_mxfp8_param_ag",
    "overlap_moe_expert_parallel_comm",
    "use_ring_exchange_p2p",
    "mtp_standalone",
    "use_checkpoint_args",
    "use_mp_args_from_checkpoint_args",
    "exit_duration_in_mins",
    "use_precision_aware_optimizer",
    "overlap_param_gather_with_optimizer_step",
    "hybrid_context_parallel",
    "moe_router_enable_expert_bias",
    "phase_transition_iterations",
)
#: The switches in the configurations of a model chunk: its own, and that of DDP.
_OF_TRANSFORMER = (
    "optimizer_cpu_offload",
    "overlap_moe_expert_parallel_comm",
    "use_ring_exchange_p2p",
    "mtp_standalone",
)
_OF_DDP = ("use_megatron_fsdp", "reuse_grad_buf_for_mxfp8_param_ag")


def of_arguments(args: Any, jobs: int = 1) -> Facts:
    """Return facts of Megatron-LM's arguments. ``jobs``: number of worlds of ranks with these arguments."""
    half = bool(getattr(args, "bf16", False) or getattr(args, "fp16", False))  # whether weights have 16 bits
    in_fp32 = getattr(args, "accumulate_allreduce_grads_in_fp32", None)
    length = getattr(args, "train_iters", None)
    size = getattr(args, "data_parallel_size", None)  # unknown before Megatron has found it
    ranks = None if size is None else size * _size(args, "context_parallel_size")
    return Facts(
        workers=None if ranks is None else ranks * jobs,
        virtual=False,
        largest_group=None if ranks is None else max(ranks, _expert_data_parallel_ranks(args)),
        ranks_of_host=ranks_of_host(),
        device=device_type(),
        train_iters=length,
        ends=length is not None,
        flushes=True,
        saves=bool(getattr(args, "save", None)),
        non_persistent_checkpoints=getattr(args, "non_persistent_ckpt_type", None),
        dataloader=getattr(args, "dataloader_type", None),
        tensor=getattr(args, "tensor_model_parallel_size", None),
        copies_apart=_size(args, "tensor_model_parallel_size") > 1 and not getattr(args, "sequence_parallel", False),
        pipeline=getattr(args, "pipeline_model_parallel_size", None),
        context=_size(args, "context_parallel_size"),
        stages_inside=bool(getattr(args, "use_tp_pp_dp_mapping", False)),
        layers=getattr(args, "num_layers", None),
        tied=getattr(
            args, "share_embeddings_and_output_weights", not getattr(args, "untie_embeddings_and_output_weights", False)
        ),
        predicts_more_tokens=bool(getattr(args, "mtp_num_layers", None)),
        recompute=getattr(args, "recompute_granularity", None),
        layer_graphs=_layer_graphs(args),
        full_iteration_graph=_full_iteration_graph(args),
        fp16=bool(getattr(args, "fp16", False)),
        loss_scale=getattr(args, "loss_scale", None) if half else None,  # Megatron scales no loss in float32
        gradient_bytes=2 if half and in_fp32 is False else 4,
        weight_bytes=2 if half else 4,
        per_token_loss=bool(getattr(args, "calculate_per_token_loss", False)),
        distributed_optimizer=bool(getattr(args, "use_distributed_optimizer", False)),
        optimizer=str(getattr(args, "optimizer", "")),
        layer_wise=_layer_wise(args),
        optimizer_instances=getattr(args, "num_distributed_optimizer_instances", 1),
        timing_level=getattr(args, "timing_log_level", None),
        weight_hash_interval=getattr(args, "check_weight_hash_across_dp_replicas_interval", None),
        switches=_switches(args, _SWITCHES),
    )


def of_model(ddp: Any) -> Facts:
    """Return facts of a model chunk in Megatron's DDP."""
    config, settings = ddp.config, ddp.ddp_config
    message = getattr(config, "pipeline_dtype", None) or getattr(config, "params_dtype", None)
    buffers = dense_buffers(ddp) + ddp.expert_parallel_buffers
    quantized = any(buffer.param_dtype == torch.uint8 for buffer in buffers)
    switches = _switches(config, _OF_TRANSFORMER) | _switches(settings, _OF_DDP)
    return Facts(
        torch=torch.__version__,
        tensor=getattr(config, "tensor_model_parallel_size", None),
        copies_apart=(getattr(config, "tensor_model_parallel_size", None) or 1) > 1
        and any(_is_replicated(parameter) for parameter in ddp.module.parameters()),
        pipeline=getattr(config, "pipeline_model_parallel_size", None),
        pipelines=pipeline_groups(),
        layers=getattr(config, "num_layers", None),
        experts=getattr(config, "num_moe_experts", None),
        tied=any(getattr(module, "share_embeddings_and_output_weights", False) for module in ddp.module.modules()),
        predicts_more_tokens=bool(getattr(config, "mtp_num_layers", None)),
        virtual_pipeline=getattr(config, "virtual_pipeline_model_parallel_size", None),
        recompute=getattr(config, "recompute_granularity", None),
        layer_graphs=_layer_graphs(config),
        full_iteration_graph=_full_iteration_graph(config),
        fp16=bool(getattr(config, "fp16", False)),
        message_bytes=None if message is None else message.itemsize,
        per_token_loss=bool(getattr(config, "calculate_per_token_loss", False)),
        distributed_optimizer=settings.use_distributed_optimizer,
        # Megatron marks the parameters before DDP lays them out, from 0.18 on.
        layer_wise_parameters=any(
            getattr(parameter, "is_managed_by_layer_wise_optimizer", False) for parameter in ddp.module.parameters()
        ),
        gradients_beside_buffers=any(main_gradients(bucket) for buffer in buffers for bucket in buffer.buckets),
        switches=switches | ({"--fp8-param-gather"} if quantized else set()),
    )


def _is_replicated(parameter: Any) -> bool:
    """Return whether all tensor-parallel ranks have ``parameter``, and Megatron never adds up its gradients."""
    added = ("tensor_model_parallel", "sequence_parallel", "average_gradients_across_tp_domain")
    return not any(getattr(parameter, name, False) for name in added)


def of_communicator(communicator: Any) -> Facts:
    """Return facts of the communicator of messages between stages."""
    return Facts(several_modules=type(communicator).__name__.startswith("MultiModule"))


def ranks_of_host() -> int:
    """Return ranks that torchrun started on this host."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _switches(settings: Any, names: tuple[str, ...]) -> frozenset[str]:
    return frozenset(f"--{name.replace('_', '-')}" for name in names if getattr(settings, name, None))


def _size(args: Any, name: str) -> int:
    """Return the size ``name`` of a kind of parallelism; --yaml-cfg has them in a section of their own."""
    return getattr(args, name, None) or getattr(getattr(args, "model_parallel", None), name, None) or 1


def _expert_data_parallel_ranks(args: Any) -> int:
    """Return ranks that share a gradient of experts; 1 without any."""
    if not getattr(args, "num_experts", None):
        return 1
    tensor = getattr(args, "expert_tensor_parallel_size", None) or _size(args, "tensor_model_parallel_size")
    apart = tensor * _size(args, "expert_model_parallel_size") * _size(args, "pipeline_model_parallel_size")
    return max(1, args.world_size // apart)


def _layer_wise(args: Any) -> bool:
    """Return whether Megatron shards the optimizer of ``args`` by layers, without its distributed optimizer."""
    name = str(getattr(args, "optimizer", ""))
    every_other = hasattr(args, "use_layer_wise_distributed_optimizer")  # from 0.18 on
    return "muon" in name or name.startswith("dist_") or (every_other and name not in ("adam", "sgd"))


def _layer_graphs(settings: Any) -> bool:
    graphs = (getattr(settings, name, False) for name in ("enable_cuda_graph", "external_cuda_graph"))
    return any(graphs) or (getattr(settings, "cuda_graph_impl", None) or "none") != "none"


def _full_iteration_graph(settings: Any) -> bool:
    scope = getattr(settings, "cuda_graph_scope", None) or ()
    scopes = [scope] if isinstance(scope, str) else scope
    return any("full_iteration" in str(getattr(item, "name", item)) for item in scopes)
