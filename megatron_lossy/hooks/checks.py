"""Which settings of Megatron the hooks are right for; everything else is refused with a reason."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..channel.corruption import check_bits
from ..config import LossyConfig
from ..errors import UsageError, refuse
from ..exchange import cut
from ..flags import as_text, refuse_unused
from ..pipeline import elements_of
from ..registry import GRAD_RECOVERIES
from ..sync.mean import DTYPES
from ..transport import check_owners
from .versions import dense_buffers, main_gradients, pipeline_groups

_TIED = "the first and the last stage would add up a gradient, and wait for each other"
_ONE_EMBEDDING = "give --untie-embeddings-and-output-weights, and no --mtp-num-layers"
_LAYER_WISE = "layer-wise optimizers gather differently; choose adam or sgd"


def _layer_wise(args: Any) -> bool:
    """Whether Megatron shards the optimizer of ``args`` by layers, for which it turns its distributed optimizer off."""
    name = str(getattr(args, "optimizer", ""))
    every_other = hasattr(args, "use_layer_wise_distributed_optimizer")  # from 0.18 on
    return "muon" in name or name.startswith("dist_") or (every_other and name not in ("adam", "sgd"))


def _full_iteration_graph(config: Any) -> bool:
    scope = getattr(config, "cuda_graph_scope", None) or ()
    scopes = [scope] if isinstance(scope, str) else scope
    return any("full_iteration" in str(getattr(item, "name", item)) for item in scopes)


def _half(settings: Any) -> bool:
    """Whether weights have 16 bits."""
    return bool(getattr(settings, "bf16", False) or getattr(settings, "fp16", False))


def _half_gradients(settings: Any) -> bool:
    """Whether gradients are reduced with 16 bits, as ``--grad-reduce-in-bf16`` asks for."""
    return _half(settings) and getattr(settings, "accumulate_allreduce_grads_in_fp32", None) is False


def check_units(settings: Any, config: LossyConfig) -> None:
    """Raise :class:`UsageError` where a packet could not hold one element. ``settings``: of Megatron or ours."""
    itemsizes = [2 if _half_gradients(settings) else 4, 2 if _half(settings) else 4]
    if config.averages:
        itemsizes.append(DTYPES[config.sync_dtype].itemsize)
    cut([1] * len(itemsizes), itemsizes, config.loss_unit, config.packet_bytes)


def _layer_graphs(settings: Any) -> bool:
    graphs = (getattr(settings, name, False) for name in ("enable_cuda_graph", "external_cuda_graph"))
    return any(graphs) or (getattr(settings, "cuda_graph_impl", None) or "none") != "none"


def check_loss_per_token(settings: Any, config: LossyConfig) -> None:
    """Raise :class:`UsageError` for a rule that adds sums over different numbers of tokens. ``settings``: of Megatron."""
    adds = not config.untouched("grad") and GRAD_RECOVERIES.load(config.grad_recovery).carries_over
    if adds and getattr(settings, "calculate_per_token_loss", False):
        raise refuse(
            "--grad-recovery",
            config.grad_recovery,
            "mixes gradients of several steps, which --calculate-per-token-loss makes sums over as many tokens as "
            "each step has; choose another rule or omit that flag",
        )


_FULL = (
    "needs replicas that each have all of the optimizer (in the trainer --no-use-distributed-optimizer); with the distributed "
    "optimizer "
)


def check_optimizer(settings: Any, config: LossyConfig, distributed: bool) -> None:
    """Raise :class:`UsageError` for what needs full replicas, or cannot go with them. ``settings``: of Megatron or ours.

    ``distributed``: whether the optimizer is sharded.
    """
    if getattr(settings, "calculate_per_token_loss", False):
        _refuse_with_sums(config)
    if distributed:
        _refuse_with_shards(config)
        return
    if config.averages:
        raise refuse("--islands", config.islands, "each shards its optimizer; needs --use-distributed-optimizer")
    off = "needs Megatron's distributed optimizer, and --use-distributed-optimizer is off"
    if not config.phase("param").lossless:
        raise refuse("--p-param", as_text(config.p_param), off)
    if config.transport == "udp":
        raise refuse("--transport", "udp", "carries no all-reduce; " + off + "; choose pieces or torch")
    last = getattr(settings, "train_iters", None)
    if last is not None and config.param_sync_interval > last and not config.allow_divergence:
        why = f"is above --train-iters {last}: replicas would drift apart to the end; or give --allow-divergence"
        raise refuse("--param-sync-interval", config.param_sync_interval, why)
    if not config.untouched("grad"):
        if not (config.synchronises or config.allow_divergence):
            why = "drives replicas apart without the distributed optimizer; needs --param-sync-interval or --allow-divergence"
            raise refuse("--p-grad", as_text(config.p_grad), why)
        for name in ("param_send", "param_lag", "param_priority", "param_priority_fraction"):
            why = "no parameters are sent, and the second half of an all-reduce is no place for it; " + off
            refuse_unused(config, name, why)
    if config.loses_at_boundaries:
        raise refuse(*_boundary_loss(config), off)
    scale = getattr(settings, "loss_scale", None)
    if getattr(settings, "fp16", False):
        check_loss_scale(config, "--fp16", "on" if scale is None else f"with --loss-scale {scale:g}")
    elif getattr(settings, "bf16", False) and scale:
        check_loss_scale(config, "--loss-scale", f"{scale:g}")
    if getattr(settings, "optimizer_cpu_offload", False):
        raise UsageError("--optimizer-cpu-offload: replicas are averaged where they are; turn it off")
    hashes = getattr(settings, "check_weight_hash_across_dp_replicas_interval", None)
    if hashes and config.drives_apart and config.replica_check != "repair":
        raise refuse(
            "--check-weight-hash-across-dp-replicas-interval", hashes, "ends runs whose replicas differ; turn it off"
        )


def _refuse_with_sums(config: LossyConfig) -> None:
    why = "gradients are sums over tokens where errors hit them, with --calculate-per-token-loss; "
    if config.grad_error == "gaussian" and config.grad_error_relative is None:
        std, burst = config.grad_error_std, config.grad_error_burst_std
        flag, value = ("--grad-error-std", std) if std else ("--grad-error-burst-std", burst)
        raise refuse(flag, value, why + "choose --grad-error-relative")
    if config.param_sync_rule == "snr":
        raise refuse("--param-sync-rule", "snr", why + "choose divergence")


def _copies_embedding(settings: Any, ddp: Any = None) -> bool:
    """Whether the last of several stages has a copy of the embedding: as its output layer, or to predict more tokens.

    ``settings``: of Megatron-LM or ours; or of the model chunk ``ddp``, which alone know not whether it is tied.
    """
    untied = getattr(settings, "untie_embeddings_and_output_weights", False)
    tied = getattr(settings, "share_embeddings_and_output_weights", not untied)
    shares = tied if ddp is None else _shares_embedding(ddp)
    return bool(shares or getattr(settings, "mtp_num_layers", None))


def check_tied_replicas(settings: Any, config: LossyConfig, replicas: int, ddp: Any = None) -> None:
    """Raise :class:`UsageError` where stages would make different weights of the copies of a tied embedding.

    Each adds up its own, among other parameters: sums of more than two replicas round otherwise there. ``settings``: of
    Megatron or ours. ``ddp``: a model chunk with settings that do not know whether it is tied.
    """
    stages = getattr(settings, "pipeline_model_parallel_size", None) or 1
    if stages == 1 or replicas < 3 or not (config.synchronises or config.replica_check == "repair"):
        return
    if _copies_embedding(settings, ddp):
        what = "--param-sync-interval" if config.synchronises else "--replica-check repair"
        why = f"two stages have a copy of the embedding, which {what} would round apart with {replicas} replicas; "
        raise refuse("--pipeline-model-parallel-size", stages, why + _ONE_EMBEDDING)


def _shares_embedding(ddp: Any) -> bool:
    return any(getattr(module, "share_embeddings_and_output_weights", False) for module in ddp.module.modules())


def check_loss_scale(config: LossyConfig, flag: str, value: str) -> None:
    """Raise :class:`UsageError` if replicas could disagree on what overflows. ``flag``, ``value``: what scales the loss."""
    if (config.drives_apart or config.synchronises) and config.replica_check != "repair":
        why = "without the distributed optimizer, replicas that differ would skip different updates; choose --bf16 alone, "
        raise refuse(flag, value, why + "or --replica-check repair")


def _refuse_with_shards(config: LossyConfig) -> None:
    gathers = _FULL + "the all-gather already synchronises parameters"
    if config.synchronises:
        raise refuse("--param-sync-interval", config.param_sync_interval, gathers)
    if config.replica_check != "none":
        raise refuse("--replica-check", config.replica_check, _FULL + "each gradient is at one rank")
    if config.allow_divergence:
        raise refuse("--allow-divergence", "on", gathers)
    if config.replicates:
        raise refuse("--grad-error-at", config.grad_error_at, _FULL + "choose reduce: an error of an owner's shard")


def check_reports(settings: Any, config: LossyConfig, ddp: Any = None) -> None:
    """Raise :class:`UsageError` where Megatron changes gradients that may have to be sent again.

    ``settings``: of Megatron. ``ddp``: a model chunk, whose settings do not know whether the embedding is tied.
    """
    if config.grad_recovery != "error-feedback" or config.transport != "udp":
        return
    what = f"{config.grad_recovery} with --transport udp"
    if getattr(settings, "calculate_per_token_loss", False):
        why = "is told late what was lost, when --calculate-per-token-loss has scaled it; omit that flag"
        raise refuse("--grad-recovery", what, why)
    if (getattr(settings, "pipeline_model_parallel_size", None) or 1) > 1 and _copies_embedding(settings, ddp):
        why = "is told late what was lost, when two stages have added up the gradients of the embedding; "
        raise refuse("--grad-recovery", what, why + _ONE_EMBEDDING)
    if (getattr(settings, "tensor_model_parallel_size", None) or 1) > 1 and config.udp_deadline_seconds is not None:
        why = (
            "would keep other residuals on each tensor-parallel rank, with --grad-recovery error-feedback; must be off"
        )
        raise refuse("--udp-deadline", config.udp_deadline, why)


def check_torch(config: LossyConfig) -> None:
    """Raise :class:`UsageError` if this torch fails in a coalescing context without a collective of its own."""
    oldest = (2, 8)
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if config.transport != "torch" and version < oldest:
        raise refuse(
            "--transport", config.transport, f"needs torch 2.8 or later under Megatron, this is {torch.__version__}"
        )


def _boundary_loss(config: LossyConfig) -> tuple[str, Any]:
    """A flag that loses something between stages, and its value."""
    if config.act_transport == "udp":
        return "--act-transport", "udp"
    return ("--p-act", config.p_act) if config.p_act else ("--p-act-grad", config.p_act_grad)


def check_boundaries(settings: Any, config: LossyConfig) -> None:
    """Raise :class:`UsageError` where stage boundaries cannot lose what ``config`` says. ``settings``: of Megatron or ours."""
    if not config.loses_at_boundaries:
        return
    stages, layers = (getattr(settings, name, None) for name in ("pipeline_model_parallel_size", "num_layers"))
    virtual = config.virtual_boundaries
    if virtual is None:
        if stages == 1:
            why = "nothing is sent with one pipeline stage; needs more of them"
            either = "" if config.act_transport == "udp" else ", or --virtual-boundaries"
            raise refuse(*_boundary_loss(config), why + either)
    else:
        text = as_text(virtual)
        if stages is not None and stages > 1:
            raise refuse("--virtual-boundaries", text, f"needs one pipeline stage, not {stages}")
        if layers == 1:
            raise refuse("--virtual-boundaries", text, "a model of 1 layer has no boundary between layers")
        if layers is not None and max(virtual) >= layers:
            raise refuse("--virtual-boundaries", text, f"must be layers from 1 to {layers - 1} of the {layers}")
        if getattr(settings, "recompute_granularity", None) == "full":
            raise refuse(
                "--recompute-granularity", "full", "--virtual-boundaries would lose other packets in the recomputation"
            )
        if _layer_graphs(settings):
            raise UsageError(
                "CUDA graphs of layers: would lose the same or nothing, with --virtual-boundaries; turn them off"
            )
        if getattr(settings, "overlap_moe_expert_parallel_comm", False):
            why = "runs layers in parts, between which --virtual-boundaries lose nothing; turn it off"
            raise refuse("--overlap-moe-expert-parallel-comm", "on", why)
    if getattr(settings, "use_ring_exchange_p2p", False):
        raise refuse("--use-ring-exchange-p2p", "on", "nothing can be lost at stage boundaries with it; turn it off")
    if getattr(settings, "mtp_standalone", False):
        raise UsageError("multi-token prediction on a stage of its own: cannot go with --p-act and --p-act-grad")


def check_pipeline(settings: Any, config: LossyConfig) -> None:
    """Raise :class:`UsageError` where stages cannot be asynchronous. ``settings``: of the trainer."""
    if not config.async_pipeline:
        return
    stages = config.virtual_stages
    if not settings.virtual_workers:
        if stages is not None:
            raise refuse("--virtual-stages", stages, "needs --virtual-workers")
        stages = settings.pipeline_model_parallel_size
        _check_real_stages(settings, config)
    elif stages is None:
        raise refuse("--async-pipeline", "on", "needs --virtual-stages with --virtual-workers")
    elif not settings.use_distributed_optimizer:
        raise refuse("--virtual-stages", stages, "needs --use-distributed-optimizer")
    if stages == 1:
        return
    if settings.num_layers % stages:
        flag = "--virtual-stages" if config.virtual_stages else "--pipeline-model-parallel-size"
        raise refuse(flag, stages, f"must divide the {settings.num_layers} layers")
    if settings.share_embeddings_and_output_weights:
        raise refuse("--share-embeddings-and-output-weights", "on", f"cannot be with --async-pipeline: {_TIED}")
    if settings.overlap_param_gather:
        why = "forward passes use weights that were gathered long before"
        raise refuse("--overlap-param-gather", "on", f"cannot be with --async-pipeline: {why}")


def _check_real_stages(settings: Any, config: LossyConfig) -> None:
    if config.loses_at_boundaries and config.virtual_boundaries is None:
        why = "cannot be with --async-pipeline, whose messages between stages are its own"
        raise refuse(*_boundary_loss(config), why)
    instances = settings.num_distributed_optimizer_instances
    if instances > 1:
        why = "must be 1 with --async-pipeline, whose gradient norms are over the ranks of a stage"
        raise refuse("--num-distributed-optimizer-instances", instances, why)
    if config.save_replicas and config.weight_stashing == "off" and settings.pipeline_model_parallel_size > 1:
        why = "cannot compute again what is under way without the weights it began with; needs --weight-stashing on"
        raise refuse("--save-replicas", "on", why)


def check_asynchronous(ddp: Any) -> None:
    """Raise :class:`UsageError` for a model chunk that cannot be in an asynchronous pipeline."""
    settings = ddp.config
    for wrong, what, why in (
        (_shares_embedding(ddp), "--share-embeddings-and-output-weights", _TIED),
        (settings.fp16, "--fp16", "an overflow in one stage would have to stop all others; choose --bf16"),
        (getattr(settings, "num_moe_experts", None), "--num-experts", "its balance of load is counted over all stages"),
        (
            getattr(settings, "virtual_pipeline_model_parallel_size", None),
            "--num-layers-per-virtual-pipeline-stage",
            "a stage would have weights of several ages",
        ),
        (
            _layer_graphs(settings),
            "CUDA graphs",
            "a captured graph has one version of the weights; turn them off",
        ),
        (getattr(settings, "mtp_num_layers", None), "--mtp-num-layers", "its layers are shared by stages"),
    ):
        if wrong:
            raise UsageError(f"{what}: cannot be with --async-pipeline: {why}")


def check_communicator(communicator: Any) -> None:
    """Raise :class:`UsageError` for messages between the stages of several modules. ``communicator``: ``None`` for the usual."""
    if communicator is not None and type(communicator).__name__.startswith("MultiModule"):
        raise UsageError(
            f"{type(communicator).__name__}: cannot go with --p-act and --p-act-grad, which know one pipeline"
        )


def check_main_gradients(ddp: Any) -> None:
    """Raise :class:`UsageError` if gradients of this model chunk are not added up where virtual workers take them."""
    buffers = dense_buffers(ddp) + ddp.expert_parallel_buffers
    if any(main_gradients(bucket) for buffer in buffers for bucket in buffer.buckets):
        raise UsageError(
            "--ddp-param-name-patterns-for-fp32-local-accumulation: virtual workers take gradients from Megatron's "
            "buffers; needs real ranks"
        )


def check_ddp(ddp: Any, config: LossyConfig) -> None:
    """Raise :class:`UsageError` if loss in the exchanges of this model chunk cannot be right."""
    check_torch(config)
    check_boundaries(ddp.config, config)
    if config.loses_at_boundaries:
        elements_of(config.act_packet_bytes, ddp.config.pipeline_dtype or ddp.config.params_dtype)
        if pipeline_groups() > 1:
            raise UsageError(
                "pipelines of encoder and decoder with their own sizes: cannot go with --p-act and --p-act-grad"
            )
    settings = ddp.ddp_config
    check_optimizer(ddp.config, config, settings.use_distributed_optimizer)
    # Megatron marks the parameters before DDP lays them out, from 0.18 on.
    if any(getattr(parameter, "is_managed_by_layer_wise_optimizer", False) for parameter in ddp.module.parameters()):
        raise UsageError(f"LayerWiseDistributedOptimizer: {_LAYER_WISE}")
    if getattr(settings, "use_megatron_fsdp", False):
        raise UsageError("--use-megatron-fsdp: Megatron-FSDP shards by itself; loss needs the distributed optimizer")
    if getattr(settings, "reuse_grad_buf_for_mxfp8_param_ag", False):
        raise UsageError(
            "--reuse-grad-buf-for-mxfp8-param-ag: stale parameters would live in the gradient buffer; turn it off"
        )
    check_loss_per_token(ddp.config, config)
    check_reports(ddp.config, config, ddp)
    if _full_iteration_graph(ddp.config):
        raise UsageError("--cuda-graph-scope full_iteration: a captured graph repeats one draw for ever; turn it off")
    quantized = any(buffer.param_dtype == torch.uint8 for buffer in dense_buffers(ddp) + ddp.expert_parallel_buffers)
    if quantized and not config.untouched("param"):
        raise UsageError(
            "--fp8-param-gather with parameter loss: stale bytes would be read at new scales; turn one off"
        )
    if quantized and config.averages:
        raise UsageError(
            f"--fp8-param-gather: cannot go with --islands ({_NOT_WITH_ISLANDS['fp8_param_gather']}); turn it off"
        )


def check_real_islands(settings: Any, config: LossyConfig) -> None:
    """Raise :class:`UsageError` for what cannot be on islands of real ranks. ``settings``: of Megatron or ours."""
    if not config.averages:
        return
    if config.has_outer_optimizer and settings.save and not config.save_replicas:
        why = (
            "keeps its outer weights in a checkpoint with --save-replicas only; give it too, or leave it and --save out"
        )
        raise refuse("--sync-method", config.sync_method, why)
    instances = getattr(settings, "num_distributed_optimizer_instances", 1)
    if instances > 1:
        why = "several ranks of an island would send the same; must be 1 with --islands"
        raise refuse("--num-distributed-optimizer-instances", instances, why)
    stages = getattr(settings, "pipeline_model_parallel_size", None) or 1
    if stages > 1 and _copies_embedding(settings):
        why = "two stages have a copy of the embedding, which --islands would average apart; " + _ONE_EMBEDDING
        raise refuse("--pipeline-model-parallel-size", stages, why)
    tensor = getattr(settings, "tensor_model_parallel_size", None) or 1
    if config.transport == "udp" and tensor > 1:
        why = f"tensor-parallel ranks would lose other averages of what all {tensor} have a copy of; choose torch"
        raise refuse("--transport", "udp", why)


#: Arguments of Megatron-LM that cannot go with loss, and with islands.
_NOT_WITH_LOSS = {
    "use_megatron_fsdp": "Megatron-FSDP shards by itself",
    "use_torch_fsdp2": "torch FSDP shards by itself",
    "optimizer_cuda_graph": "a captured graph repeats one draw for ever",
    "reuse_grad_buf_for_mxfp8_param_ag": "stale parameters would live in the gradient buffer",
}
_NOT_WITH_ISLANDS = {
    "use_checkpoint_args": "each island has a folder of its own; give the arguments again",
    "use_mp_args_from_checkpoint_args": "each island has a folder of its own; give the arguments again",
    "fp8_param_gather": "weights of 8 bits cannot be averaged",
    "exit_duration_in_mins": "islands would stop after different iterations; choose --exit-interval",
    "use_precision_aware_optimizer": "its weights in float32 are its own",
    "optimizer_cpu_offload": "its weights are elsewhere",
    "overlap_param_gather_with_optimizer_step": "weights are gathered before they are averaged",
    "hybrid_context_parallel": "its samples cannot be divided among islands",
    "moe_router_enable_expert_bias": "islands would balance their experts apart",
    "phase_transition_iterations": "samples of a phase cannot be divided among islands",
}


def _refuse_arguments(args: Any, refused: Mapping[str, str], what: str) -> None:
    for name, why in refused.items():
        if getattr(args, name, None):
            raise UsageError(f"--{name.replace('_', '-')}: cannot go with {what} ({why}); turn it off")


def _check_island_arguments(args: Any, config: LossyConfig) -> None:
    _refuse_arguments(args, _NOT_WITH_ISLANDS, "--islands")
    config.check_save(args.save)
    if getattr(args, "dataloader_type", None) == "external":
        raise refuse("--dataloader-type", "external", "its samples cannot be divided among islands")


def check_arguments(args: Any, config: LossyConfig) -> None:
    """Raise :class:`UsageError` for Megatron-LM arguments that cannot go with loss, before anything starts."""
    distributed = getattr(args, "use_distributed_optimizer", False)
    if config.inert:
        if distributed:
            _refuse_with_shards(config)
        return
    check_owners(config)
    if config.averages:
        _check_island_arguments(args, config)
        check_real_islands(args, config)
    check_boundaries(args, config)
    if _layer_wise(args):
        raise refuse("--optimizer", args.optimizer, _LAYER_WISE)
    check_optimizer(args, config, distributed)
    check_units(args, config)
    if _half_gradients(args):
        check_bits(config, 16)
    if config.save_replicas and getattr(args, "non_persistent_ckpt_type", None):
        raise refuse(
            "--non-persistent-ckpt-type",
            args.non_persistent_ckpt_type,
            "such checkpoints hold no replicas, and a run that resumes from one would not continue bit for bit; "
            "omit it or --save-replicas",
        )
    _refuse_arguments(args, _NOT_WITH_LOSS, "loss")
    check_loss_per_token(args, config)
    check_reports(args, config)
    if _full_iteration_graph(args):
        raise UsageError("--cuda-graph-scope full_iteration: a captured graph repeats one draw for ever; turn it off")
    if config.untouched("param"):
        return
    if getattr(args, "fp8_param_gather", False):
        raise UsageError(
            "--fp8-param-gather with parameter loss: stale bytes would be read at new scales; turn one off"
        )
    if getattr(args, "check_weight_hash_across_dp_replicas_interval", None):
        raise UsageError(
            "--check-weight-hash-across-dp-replicas-interval with parameter loss: replicas differ on purpose; turn one off"
        )
