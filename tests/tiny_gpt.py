"""A GPT of a few thousand parameters under Megatron's own DDP, optimizers and schedules.

Tests build it inside :func:`tests.ranks.run_ranks`: ``run = build(TinyGPT(pipeline=2)); run.step(0)``. All data are a
function of (iteration, data-parallel rank, micro-batch), so that runs which should agree can be compared bit for bit.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import megatron.core
import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe import moe_utils

from megatron_lossy.base import device
from megatron_lossy.hooks.versions import dense_buffers
from megatron_lossy.lab.virtual import VirtualRun

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class TinyGPT:
    """A model to build; the data-parallel size is the rest of the world."""

    tensor: int = 1
    pipeline: int = 1
    sequence_parallel: bool = False
    virtual: int | None = None  # model chunks per pipeline rank; needs layers = pipeline x virtual x n
    context: int = 1  # as ranks with data of their own: attention over several of them needs Transformer Engine
    expert: int = 1
    instances: int = 1  # distributed optimizer instances
    order: str | None = None  # of the parallel groups among the ranks
    experts: int | None = None

    layers: int = 2
    hidden: int = 32
    heads: int = 4
    vocab: int = 64
    sequence: int = 16
    tied: bool = True
    dropout: float = 0.0

    distributed_optimizer: bool = True  # without, every rank has all of the optimizer

    dtype: str = "fp32"
    grads_in_fp32: bool = True
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    bucket_size: int | None = None
    average_in_collective: bool = False
    fp32_accumulation: bool = False  # reduce_scatter_with_fp32_accumulation
    per_token_loss: bool = False
    ddp: dict[str, Any] = field(default_factory=dict)  # further fields of DistributedDataParallelConfig

    optimizer: str = "adam"  # or "sgd", without momentum
    lr: float = 1e-2
    weight_decay: float = 0.0
    clip_grad: float = 1.0
    loss_scale: float | None = None  # constant; without it, fp16 scales dynamically and nothing else scales
    initial_loss_scale: float = 2.0**12

    micro_batch: int = 2
    accumulation: int = 1  # micro-batches per iteration
    lengths: tuple[int, ...] = ()  # sequences of the micro-batches, in turns, if they differ (variable_seq_lengths)
    rampup: tuple[int, ...] = ()  # those of the first iterations
    seed: int = 1

    @property
    def groups(self) -> dict[str, int | None]:
        """Sizes of the parallel groups, as Megatron calls them."""
        return {
            "tensor_model_parallel_size": self.tensor,
            "pipeline_model_parallel_size": self.pipeline,
            "virtual_pipeline_model_parallel_size": self.virtual,
            "context_parallel_size": self.context,
            "expert_model_parallel_size": self.expert,
            "num_distributed_optimizer_instances": self.instances,
            **({} if self.order is None else {"order": self.order}),
        }


class TinyRun:
    """A model under training. ``model`` is the list of this rank's DDP chunks, ``optimizer`` Megatron's."""

    def __init__(self, config: TinyGPT) -> None:
        self.config = config
        self.transformer = _transformer_config(config)
        self.model = _model(config, self.transformer)
        self.optimizer = _optimizer(config, self.model)
        self._train = get_forward_backward_func()
        self._gathers = config.overlap_param_gather
        if self._gathers:  # as Megatron's training loop: nothing to gather before the first step
            for chunk in self.model:
                chunk.disable_forward_pre_hook(param_sync=False)
        self.transformer.grad_scale_func = self.optimizer.scale_loss
        self.transformer.finalize_model_grads_func = finalize_model_grads
        if config.overlap_grad_reduce:
            no_sync = [chunk.no_sync for chunk in self.model]
            self.transformer.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]

    def step(self, iteration: int, overflow_on: int | None = None) -> dict[str, Any]:
        """One iteration: ``loss`` (mean over this rank's own tokens; None before the last stage), ``grad_norm``, ``success``.

        ``overflow_on`` makes the gradients of that data-parallel rank non-finite; the step is skipped if the
        optimizer has a loss scale.
        """
        for chunk in self.model:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        loss = self._forward_backward(iteration, overflow_on, forward_only=False)
        success, grad_norm, _ = self.optimizer.step()
        if self._gathers:
            self._gathers = False
            for chunk in self.model:
                chunk.enable_forward_pre_hook()
        return {"loss": loss, "grad_norm": grad_norm, "success": success}

    def evaluate(self, iteration: int) -> float | None:
        """Return the loss of the batch that :meth:`step` would train on; no gradients."""
        for chunk in self.model:
            chunk.eval()
        loss = self._forward_backward(iteration, None, forward_only=True)
        for chunk in self.model:
            chunk.train()
        return loss

    def gather(self) -> None:
        """Finish an overlapped parameter gather now, as Megatron does before a save."""
        for chunk in self.model:
            chunk.start_param_sync(force_sync=True)

    def weights(self) -> dict[str, np.ndarray]:
        """Return this rank's replica, fp32: every parameter by name, prefixed with its chunk if there are several."""
        result = {}
        for k, chunk in enumerate(self.model):
            prefix = f"{k}." if len(self.model) > 1 else ""
            for name, parameter in chunk.module.named_parameters():
                result[prefix + name.removeprefix("module.")] = _numpy(parameter)
        return result

    def replica_buffers(self) -> dict[str, np.ndarray]:
        """This rank's whole parameter buffers, padding included, fp32, under "chunk/dense/k" and "chunk/expert/k"."""
        return {name: _numpy(buffer.param_data) for name, buffer in self._buffers()}

    def owner_buffers(self) -> dict[str, np.ndarray]:
        """As :meth:`replica_buffers`, each shard as its owner holds it: gathered here, without Megatron's collectives."""
        groups = {
            bucket: group.intra_distributed_optimizer_instance_group
            for chunk in self.model
            for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups
            for bucket in group.buckets
        }
        result = {}
        for name, buffer in self._buffers():
            buckets = []
            for bucket in sorted(buffer.buckets, key=lambda bucket: bucket.offset):
                group = groups[bucket]
                shard = bucket.param_data.view(group.size(), -1)[group.rank()].float()
                shards = [torch.empty_like(shard) for _ in range(group.size())]
                torch.distributed.all_gather(shards, shard, group=group)
                buckets += shards
            result[name] = _numpy(torch.cat(buckets))
        return result

    def rank(self) -> int:
        """Return the data-parallel rank whose data are used. Each context-parallel rank has its own."""
        return parallel_state.get_data_parallel_rank(with_context_parallel=True)

    def _buffers(self) -> Iterator[tuple[str, Any]]:
        for c, chunk in enumerate(self.model):
            for kind, buffers in (("dense", dense_buffers(chunk)), ("expert", chunk.expert_parallel_buffers)):
                for k, buffer in enumerate(buffers):
                    yield f"{c}/{kind}/{k}", buffer

    def _forward_backward(self, iteration: int, overflow_on: int | None, forward_only: bool) -> float | None:
        config = self.config
        rank = self.rank()
        scale = float("inf") if overflow_on == rank else 1.0
        micro_batches = config.rampup[iteration] if iteration < len(config.rampup) else config.accumulation
        batches = [iter([_batch(config, iteration, rank, k) for k in range(micro_batches)]) for _ in self.model]
        reports = self._train(
            forward_step_func=partial(_forward_step, scale=scale),
            data_iterator=batches if len(batches) > 1 else batches[0],
            model=self.model if len(self.model) > 1 else self.model[0],
            num_microbatches=micro_batches,
            seq_length=config.sequence,
            micro_batch_size=config.micro_batch,
            forward_only=forward_only,
        )
        if not reports:
            return None
        total, tokens = torch.stack([report["loss"] for report in reports]).sum(dim=0)
        return (total / tokens).item()


class VirtualTinyRun(TinyRun):
    """The same with the workers of a virtual cluster taking turns."""

    def __init__(self, config: TinyGPT, cluster: VirtualRun) -> None:
        self.cluster = cluster
        self._worker = 0
        with cluster.building():
            super().__init__(replace(config, overlap_param_gather=False))
        cluster.attach(self.model[0])

    def rank(self) -> int:
        return self._worker

    def step(self, iteration: int, overflow_on: int | None = None) -> dict[str, Any]:
        """Make a step as :meth:`TinyRun.step`; ``loss`` is a list of the workers' own."""
        for chunk in self.model:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        losses = []
        for self._worker in range(self.cluster.workers):  # noqa: B020
            with self.cluster.worker(self._worker):
                losses.append(self._forward_backward(iteration, overflow_on, forward_only=False))
        success, grad_norm, _ = self.cluster.step(self.optimizer)
        return {"loss": losses, "grad_norm": grad_norm, "success": success}

    def all_replica_buffers(self) -> list[dict[str, np.ndarray]]:
        """Return :meth:`replica_buffers` of every worker."""
        result = []
        for worker in range(self.cluster.workers):
            with self.cluster.worker(worker, evaluates=True):
                result.append(self.replica_buffers())
        return result


#: Of this process.
_groups: dict[str, int | None] = {}


def build(config: TinyGPT, cluster: VirtualRun | None = None) -> TinyRun:
    """Build on this rank, inside a world already initialised; the first call of a process sets the parallel groups.

    With a virtual ``cluster`` the world has one rank, and the run is a :class:`VirtualTinyRun`.
    """
    device.prepare()
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            **config.groups, **_known(parallel_state.initialize_model_parallel, create_gloo_process_groups=False)
        )
        _groups.update(config.groups)
    assert _groups in ({}, config.groups)
    torch.manual_seed(config.seed)
    model_parallel_cuda_manual_seed(config.seed)
    return TinyRun(config) if cluster is None else VirtualTinyRun(config, cluster)


def missing(config: TinyGPT) -> str | None:
    """Return the features of ``config`` that the installed Megatron lacks, in words; ``None`` if it has all."""
    version = megatron.core.__version__
    if config.fp32_accumulation and not _known(DistributedDataParallelConfig, reduce_scatter_with_fp32_accumulation=1):
        return f"megatron-core {version} has no reduce-scatter with fp32 accumulation"
    if len(_known(DistributedDataParallelConfig, **config.ddp)) < len(config.ddp):
        return f"megatron-core {version} has no gradients in float32 for buckets in bfloat16"
    if tuple(map(int, version.split(".")[:2])) < (0, 13):  # an assertion fails, with or without us
        if config.tied and config.pipeline > 1 and config.bucket_size:
            return f"megatron-core {version} has no bucket of its own for this shared embedding"
        if config.experts and config.instances > 1:
            return f"megatron-core {version} has no optimizer instances with experts"
    if config.experts and device.device_type() == "cuda" and not hasattr(moe_utils, "te_general_gemm"):
        return f"megatron-core {version} has no experts on CUDA without a Transformer Engine"
    if config.experts:
        try:
            get_gpt_layer_local_spec(num_experts=config.experts)
        except NameError:  # HabanaAI's 0.13
            return f"megatron-core {version} has no experts without a Transformer Engine"
    return None


def _known(function: Callable, **arguments: Any) -> dict[str, Any]:
    """Return those of ``arguments`` that ``function`` takes in the Megatron that is here."""
    return {name: value for name, value in arguments.items() if name in inspect.signature(function).parameters}


def _transformer_config(config: TinyGPT) -> TransformerConfig:
    dtype = DTYPES[config.dtype]
    return TransformerConfig(
        num_layers=config.layers,
        hidden_size=config.hidden,
        num_attention_heads=config.heads,
        tensor_model_parallel_size=config.tensor,
        pipeline_model_parallel_size=config.pipeline,
        virtual_pipeline_model_parallel_size=config.virtual,
        sequence_parallel=config.sequence_parallel,
        expert_model_parallel_size=config.expert,
        num_moe_experts=config.experts,
        add_bias_linear=config.experts is None,  # in place, on a view that autograd protects, with biases
        moe_token_dispatcher_type="alltoall" if config.lengths else "allgather",
        overlap_p2p_comm=config.virtual is not None,  # of two stages, Megatron needs it to interleave chunks
        batch_p2p_comm=config.virtual is None,
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=config.dtype == "bf16",
        fp16=config.dtype == "fp16",
        hidden_dropout=config.dropout,
        attention_dropout=config.dropout,
        variable_seq_lengths=bool(config.lengths),
        calculate_per_token_loss=config.per_token_loss,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
    )


def _model(config: TinyGPT, transformer: TransformerConfig) -> list[DistributedDataParallel]:
    ddp_config = DistributedDataParallelConfig(
        **{
            "use_distributed_optimizer": config.distributed_optimizer,
            "grad_reduce_in_fp32": config.grads_in_fp32,
            "overlap_grad_reduce": config.overlap_grad_reduce,
            "overlap_param_gather": config.overlap_param_gather,
            "bucket_size": config.bucket_size,
            "average_in_collective": config.average_in_collective,
            "num_distributed_optimizer_instances": config.instances,
            **({"reduce_scatter_with_fp32_accumulation": True} if config.fp32_accumulation else {}),
            **config.ddp,
        }
    )
    chunks = []
    for stage in range(config.virtual or 1):
        vp_stage = stage if config.virtual else None
        numbered = _known(GPTModel, vp_stage=vp_stage)
        if config.virtual and not numbered:  # before 0.13 the number of a chunk is global while it is built
            parallel_state.set_virtual_pipeline_model_parallel_rank(stage)
        where = {"ignore_virtual": config.virtual is None, **numbered}
        module = GPTModel(
            config=transformer,
            transformer_layer_spec=get_gpt_layer_local_spec(num_experts=config.experts),
            vocab_size=config.vocab,
            max_sequence_length=config.sequence,
            pre_process=parallel_state.is_pipeline_first_stage(**where),
            post_process=parallel_state.is_pipeline_last_stage(**where),
            share_embeddings_and_output_weights=config.tied,
            **numbered,
        ).to(device.current_device())
        if config.dtype != "fp32":
            module = Float16Module(transformer, module)
        chunks.append(
            DistributedDataParallel(
                config=transformer, ddp_config=ddp_config, module=module, disable_bucketing=stage > 0
            )
        )
    return chunks


def _optimizer(config: TinyGPT, model: list[DistributedDataParallel]) -> Any:
    # Megatron's distributed optimizer takes nothing but Adam, which is SGD where epsilon outweighs the second moment.
    epsilon = {"adam": 1e-8, "sgd": 2.0**40}[config.optimizer]
    scale = {"adam": 1.0, "sgd": epsilon}[config.optimizer]
    return get_megatron_optimizer(
        OptimizerConfig(
            lr=config.lr * scale,
            weight_decay=config.weight_decay / scale,
            adam_beta1={"adam": 0.9, "sgd": 0.0}[config.optimizer],
            adam_eps=epsilon,
            clip_grad=config.clip_grad,
            params_dtype=DTYPES[config.dtype],
            bf16=config.dtype == "bf16",
            fp16=config.dtype == "fp16",
            loss_scale=config.loss_scale,
            initial_loss_scale=config.initial_loss_scale,
            use_distributed_optimizer=config.distributed_optimizer,
            **_known(OptimizerConfig, overlap_param_gather=config.overlap_param_gather),
        ),
        model,
        **_known(get_megatron_optimizer, use_gloo_process_groups=False),
    )


def _batch(config: TinyGPT, iteration: int, rank: int, micro_batch: int) -> dict[str, torch.Tensor]:
    """Counting modulo the vocabulary from random starts by random strides; a random tail of each row is masked."""
    random = np.random.default_rng([config.seed, iteration, rank, micro_batch])
    sequence = config.lengths[micro_batch % len(config.lengths)] if config.lengths else config.sequence
    start = random.integers(config.vocab, size=(config.micro_batch, 1))
    stride = random.integers(1, 4, size=(config.micro_batch, 1))
    text = torch.from_numpy((start + stride * np.arange(sequence + 1)) % config.vocab)
    length = random.integers(sequence // 2, sequence + 1, size=(config.micro_batch, 1))
    position = torch.arange(sequence)
    return {
        "input_ids": text[:, :-1].contiguous(),
        "labels": text[:, 1:].contiguous(),
        "position_ids": position.expand(config.micro_batch, -1).contiguous(),
        "loss_mask": (position < torch.from_numpy(length)).float(),
    }


def _forward_step(data: Iterator[dict[str, torch.Tensor]], model: Any, scale: float) -> tuple[Any, Any]:
    batch = {name: value.to(device.current_device()) for name, value in next(data).items()}
    causal = torch.ones(1, 1, *[batch["input_ids"].shape[1]] * 2, dtype=torch.bool).triu(1).to(device.current_device())
    losses = model(batch["input_ids"], batch["position_ids"], causal, labels=batch["labels"])
    return losses, partial(_loss, batch["loss_mask"], scale)


def _loss(mask: torch.Tensor, scale: float, losses: torch.Tensor) -> tuple[Any, ...]:
    total = (losses.float() * mask).sum()
    tokens = mask.sum().int()
    return total * scale, tokens, {"loss": torch.stack([total.detach(), tokens.float()])}


def _numpy(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().float().cpu().numpy().copy()
