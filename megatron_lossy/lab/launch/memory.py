"""Memory of a device in training, by component, with loss on: computed, not measured.

Notation: s tokens of a sequence, b samples of a micro-batch, h hidden size, k = h (query groups) / (heads), f hidden
size of the MLP, a heads, V padded vocabulary, t tensor-parallel size, N ranks that shard the optimizer, c bytes of an
element in computing (2 in bf16, 4 in fp32). A layer has h(2h + 2k) + 3hf parameters in its matrices, split over t, and
2h in its norms.

Per parameter there are c of weight and 4 of gradient (Megatron accumulates in fp32), and the sharded optimizer: Adam's
two moments, and in bf16 a copy of the weight, in fp32: 12/N in bf16, 8/N in fp32.

A layer keeps activations for its backward pass. The numbers follow Korthikanti et al. 2022 (Reducing Activation
Recomputation in Large Transformer Models, section 4), for a LLaMA without dropout. In units of s b c they are: input
and output of both norms, 4h (split over t with sequence parallelism only); queries, keys, values h + 2k and the output
of attention h; the two halves of SwiGLU's input 2f and its output f; all of those /t. A fused (flash) attention adds 4
bytes per head and token. Another one keeps probabilities, a s^2 b c / t, unless recomputed selectively. Full
recomputation keeps a layer's input, h, and needs one layer's activations meanwhile. With P pipeline stages, stage i
holds min(P - i, micro-batches) micro-batches at once (1F1B). The last stage holds logits, their copy in fp32, and their
gradient: (4 + 2c) s b V / t.

Loss adds the values that are put aside. Stale units: a gather keeps the values that its losses would overwrite, p c per
parameter on average. Saving or evaluating with the owners' weights keeps all of them at once. If whole shards are lost
their number varies, and four standard deviations are added. ``--grad-recovery previous`` keeps the substitutes of this
step and of the next: 2 x 4 p per parameter. On HPU shapes must not depend on the draw. So it keeps everything instead
of a share p, and makes one full-size selection at a time: of gradients, or of weights.

``--transport pieces`` keeps the pieces of all sources, as much as the gradients. Over ``udp`` they take the place of
the gradients, which were copied to the host; but where senders choose, or on a CPU, these stay in addition. Pieces of
ranks of the same node land in memory of their own. ``previous`` cannot foresee what a network loses, and keeps
everything twice.

If ranks are divided among jobs, N is that of a job. Mechanisms keep more, in copies of the weights:

- averages between islands under way: floor(tau/K) + 1 times f copies in float32 of the sent values, and of the mean, where K, f
  and tau are the interval, the fraction and the delay. Their places take 8 bytes each, unless f is 1;
- rests of codes of means (``int8``), the moving average of ``ema``, and the moves that ``smith`` remembers a copy in float32, the
  outer weights and momentum of DiLoCo two; ``smith`` once more as much as was sent, if exchanges overlap. All of it is of a rank's
  shard;
- an asynchronous pipeline is P - 1 - i whole batches ahead on stage i of P, from 0: it keeps their activations, and besides the
  weights of the forward pass those of each such batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ...base.registry import GRAD_RECOVERIES
from ...config import PHASES, LossyConfig
from ...config.transport import OBSERVED
from ..data import padded_vocab_size
from ..train.config import TrainConfig
from .options import GIB, Device

#: Bytes for the driver's context, communication buffers, workspaces, and fragmentation: an assumption.
RESERVED = 6 * GIB
_GRADIENT = 4
#: Bytes of a parameter in a checkpoint besides the weight itself: its copy in fp32 and two moments.
_STATE = 12.0
_FLOAT32, _PLACE = 4, 8
# Components that --save-replicas stores.
_SAVED = ("stale units", "last gradients")


@dataclass(frozen=True)
class Layout:
    """The values outside :class:`TrainConfig` that decide the memory."""

    world_size: int
    vocab_size: int = 32000
    sequence_parallel: bool = False
    flash_attention: bool = True
    recompute: str | None = None
    """``selective``, ``full`` or None."""
    ranks_of_node: int = 1


@dataclass(frozen=True)
class StageMemory:
    """Bytes on each device of one pipeline stage, by component. ``saved``: bytes that a checkpoint has of them.

    ``far``: the share of the ranks that shard the optimizer which datagrams reach, if there are any.
    """

    stage: int
    components: Mapping[str, float]
    saved: float
    far: float = 0.0

    @property
    def total(self) -> float:
        """Bytes of all components."""
        return sum(self.components.values())


def parameters(config: TrainConfig, vocab_size: int) -> int:
    """Return weights of the whole model, with the vocabulary as it is padded."""
    tables = (1 if config.share_embeddings_and_output_weights else 2) * _padded(config, vocab_size)
    return config.num_layers * (_matrices(config) + 2 * config.hidden_size) + (tables + 1) * config.hidden_size


def checkpoint_bytes(config: TrainConfig, lossy: LossyConfig, layout: Layout, device: Device) -> float:
    """Return size of a checkpoint: per parameter weight, copy in fp32 and two moments.

    With --save-replicas every rank adds the values that it has put aside. Mechanisms add states of their own.
    """
    compute, islands = 2 if config.bf16 else 4, lossy.islands if lossy.averages else 1
    weights = parameters(config, layout.vocab_size)
    total = weights * ((compute + _STATE) * islands + (compute if lossy.save_consensus else 0))
    return total + layout.world_size * estimate(config, lossy, layout, device).saved


def estimate(config: TrainConfig, lossy: LossyConfig, layout: Layout, device: Device) -> StageMemory:
    """Return the pipeline stage that needs most memory. ``config`` must fit ``layout.world_size``: ``check_world``."""
    stages = range(config.pipeline_model_parallel_size)
    return max((_stage(config, lossy, layout, device, stage) for stage in stages), key=lambda found: found.total)


def _stage(config: TrainConfig, lossy: LossyConfig, layout: Layout, device: Device, stage: int) -> StageMemory:
    compute = 2 if config.bf16 else 4
    pipeline, tensor = config.pipeline_model_parallel_size, config.tensor_model_parallel_size
    first, last = stage == 0, stage == pipeline - 1
    weights = _weights(config, layout.vocab_size, first, last, pipeline)
    data = config.data_parallel_size(layout.world_size)
    shards = max(1, data // config.num_distributed_optimizer_instances // lossy.jobs().number)  # a job shards all of it
    batches = config.global_batch_size // config.micro_batch_size // data
    at_once = (pipeline - 1 - stage) * batches + 1 if lossy.async_pipeline else min(pipeline - stage, batches)
    optimizer = weights * (12 if config.bf16 else 8) / (shards if config.use_distributed_optimizer else 1)
    components = {
        "weights": weights * compute,
        "gradients": weights * _GRADIENT,
        "optimizer shard" if config.use_distributed_optimizer else "optimizer": optimizer,
        "activations": at_once * _activations(config, layout, compute),
    }
    if last:
        logits = config.seq_length * config.micro_batch_size * _padded(config, layout.vocab_size) / tensor
        components["logits"] = logits * (4 + 2 * compute)
    members = lossy.members(shards) if shards > 1 else 1
    inside = shards // members  # ranks of a site, each with a part of all shards
    lost = {phase: 0.0 if shards == 1 else _share(lossy, phase, members) / inside for phase in PHASES}
    if inside > 1:
        components["parts of a site"] = weights * (_GRADIENT + compute) / inside
    near, node = 1, lossy.ranks_of_node  # ranks of a group that a rank reaches without datagrams, itself included
    if node is not None:
        near = min(shards, max(1, (node or layout.ranks_of_node) // tensor))
    components |= _loss(lossy, weights, compute, shards, lost, device)
    components |= _pieces(lossy, weights // inside, shards, near, device)
    saved = sum(components.get(name, 0.0) for name in _SAVED) if lossy.save_replicas else 0.0
    between = _between(lossy, weights / shards)
    # Copies for later backward passes, the newest included.
    old = (pipeline - stage) * weights * compute if lossy.async_pipeline and not last else 0
    if lossy.save_replicas:
        saved += sum(between.values()) + old
    components |= between | ({"old weights": old} if old else {})
    if lost["param"] and not lossy.sends_weights():
        own = compute if compute < _FLOAT32 else 0  # a copy of the own shard in fewer bytes
        components["lead"] = weights / shards * (2 * _FLOAT32 + own)
    if shards > 1 and lossy.wire_bits:
        components["codes, sent and arrived"] = 2 * weights / inside * sum(lossy.wire_bits.values()) / 8
    components["reserved"] = RESERVED
    return StageMemory(stage, components, saved, (shards - near) / shards)


def _weights(config: TrainConfig, vocab_size: int, first: bool, last: bool, stages: int) -> int:
    """Return parameters on one device of one of ``stages`` stages."""
    tensor = config.tensor_model_parallel_size
    layers = config.num_layers // stages
    embedding = _padded(config, vocab_size) // tensor * config.hidden_size
    tables = int(first) + int(last and not (first and config.share_embeddings_and_output_weights))
    norms = 2 * layers * config.hidden_size + (config.hidden_size if last else 0)
    return layers * _matrices(config) // tensor + tables * embedding + norms


def _matrices(config: TrainConfig) -> int:
    hidden, keys = config.hidden_size, _keys(config)
    return 2 * hidden * (hidden + keys) + 3 * hidden * config.ffn


def _keys(config: TrainConfig) -> int:
    return config.hidden_size * config.query_groups // config.num_attention_heads


def _padded(config: TrainConfig, vocab_size: int) -> int:
    return padded_vocab_size(vocab_size, config.make_vocab_size_divisible_by, config.tensor_model_parallel_size)


def _activations(config: TrainConfig, layout: Layout, compute: int) -> float:
    """Return bytes that the layers of a stage keep for one micro-batch."""
    tensor, hidden = config.tensor_model_parallel_size, config.hidden_size
    layers = config.num_layers // config.pipeline_model_parallel_size
    tokens = config.seq_length * config.micro_batch_size
    split = tensor if layout.sequence_parallel else 1
    kept = 4 * hidden / split + (2 * hidden + 2 * _keys(config) + 3 * config.ffn) / tensor
    layer = tokens * compute * kept
    if layout.flash_attention:
        layer += tokens * 4 * config.num_attention_heads / tensor
    elif layout.recompute is None:
        layer += tokens * compute * config.num_attention_heads * config.seq_length / tensor
    return layers * tokens * compute * hidden / split + layer if layout.recompute == "full" else layers * layer


def _loss(
    lossy: LossyConfig, weights: int, compute: int, shards: int, lost: Mapping[str, float], device: Device
) -> dict[str, float]:
    """Return bytes that a rank keeps because of losses, by component. ``lost``: shares of a buffer lost, by phase."""
    components: dict[str, float] = {}
    grad, param = (lost[phase] for phase in PHASES)
    masked = device.kind == "hpu"
    if param:
        components["stale units"] = weights * compute * (1 if masked else param)
    rule = GRAD_RECOVERIES.load(lossy.grad_recovery)
    if lossy.within in OBSERVED and rule.foresight and shards > 1:
        grad = 1.0  # only drawn losses can be foreseen
    if grad and (rule.carries_over or rule.feeds_back):  # what this step loses, and the next
        components["last gradients"] = 2 * (1 if masked else grad) * weights * _GRADIENT
    if masked and (grad or param):  # the selection covers one shard at a time
        components["selection"] = weights / shards * (_GRADIENT if grad else compute)
    return components


def _pieces(lossy: LossyConfig, weights: int, shards: int, near: int, device: Device) -> dict[str, float]:
    """Return bytes of the pieces of all sources, where they do not take the place of the gradients."""
    if lossy.within == "torch" or shards == 1 or shards == near:
        return {}
    apart = lossy.within == "pieces" or device.kind == "cpu" or "grad" in lossy.chosen()
    share = 1.0 if apart else (near - 1) / shards
    return {"pieces": share * weights * _GRADIENT} if share else {}


def _share(lossy: LossyConfig, phase: str, shards: int) -> float:
    """Return the share of a buffer that one step may lose: the mean, and four standard deviations for whole shards."""
    if (loss := lossy.phase(phase)).lossless:
        return 0.0
    if loss.sets_rate:
        return 1.0
    rate, others = max(loss.schedule.rates), shards - 1
    spread = 0.0 if lossy.loss_unit == "packet" else 4 * math.sqrt(rate * (1 - rate) / others)
    return min(1.0, rate + spread) * others / shards


def _between(lossy: LossyConfig, elements: float) -> dict[str, float]:
    """Return bytes that a rank of an island keeps of averages of ``elements``, by component."""
    if not lossy.averages or lossy.sync_method == "none":
        return {}
    sent = lossy.share * (lossy.rounds_under_way + 1) * elements
    under_way = sent * (2 * _FLOAT32 + (_PLACE if lossy.sync_fraction < 1 else 0))
    corrects = lossy.correction if lossy.sync_method == "parameters" else None
    predicts = corrects == "smith" and lossy.may_overlap
    found = {"averages under way": under_way + (sent * _FLOAT32 if predicts else 0)}
    if lossy.sync_dtype != "fp32":
        found["rests of rounded means"] = elements * _FLOAT32
    if corrects == "ema" or predicts:
        found["correction"] = elements * _FLOAT32
    if lossy.has_outer_optimizer:
        found["outer optimizer"] = 2 * elements * _FLOAT32
    return found
