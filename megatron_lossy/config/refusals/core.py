"""The refusals of the core: of features of Megatron, of transports, and of numbers of workers; and parts of others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ...base.registry import GRAD_RECOVERIES
from ...channel.corruption.bit_flip import ALLOWED_BITS
from .. import LossyConfig
from ..facts import Facts
from ..refusal import Condition, Section
from ..transport import OBSERVED, UDP_WINDOWS

OFF = "needs Megatron's distributed optimizer, and --use-distributed-optimizer is off"
ONE_EMBEDDING = "give --untie-embeddings-and-output-weights, and no --mtp-num-layers"
_LAYER_WISE = "layer-wise optimizers gather differently; choose adam or sgd"
_ONE_DRAW = "a captured graph repeats one draw for ever"
_LAST_PORT = 65535


def above(number: int | None, limit: int) -> bool:
    """Return whether ``number`` is known and above ``limit``."""
    return number is not None and number > limit


def draws_losses(config: LossyConfig) -> bool:
    """Return whether losses of gradients or parameters are drawn."""
    return not (config.phase("grad").lossless and config.phase("param").lossless)


def switches(text: str, refused: Callable[[LossyConfig], object], whys: Mapping[str, str]) -> Iterator[str | Condition]:
    """Yield the cells of a row for each switch of Megatron in ``whys``; ``text`` names the reason as ``{why}``."""
    for flag, why in whys.items():
        yield f"{flag} | {text.format(why=why)}"
        yield lambda c, f, flag=flag: flag in f.switches and refused(c)  # type: ignore[misc]


def _too_small(config: LossyConfig, facts: Facts) -> Mapping[str, int] | None:
    """Return the bytes of the largest element that crosses, if they are known and no packet holds it."""
    if config.loss_unit != "packet" or config.lossless or facts.gradient_bytes is None or facts.weight_bytes is None:
        return None
    needed = max(facts.gradient_bytes, facts.weight_bytes, config.element_bytes())
    return {"needed": needed} if config.packet_range[0] < needed else None


def _tensor_copies(facts: Facts) -> bool:
    """Return whether tensor-parallel ranks have copies of parameters, without Megatron, which marks them."""
    return bool(facts.data_parallel and above(facts.tensor, 1))


def _observed(config: LossyConfig) -> bool:
    """Return whether a network loses units. The property of that name would pass another file for each refusal."""
    return config.transport in OBSERVED


def _beyond_ports(config: LossyConfig, facts: Facts) -> Mapping[str, Any] | None:
    """Return the last port that ``--udp-port`` may be, if the ranks of a host take more."""
    ranks = facts.ranks_of_host
    if ranks is None or config.udp_port <= (last := _LAST_PORT + 1 - ranks):
        return None
    return {"last": last}


def _less_memory(config: LossyConfig, facts: Facts) -> Mapping[str, int] | None:
    """Return the least ``--udp-memory``, if it is more."""
    # Windows of a packet both ways for each rank of a group.
    least = UDP_WINDOWS * 2 * (facts.largest_group or 0) * config.packet_range[1] if _observed(config) else 0
    return {"least": least} if config.udp_memory < least else None


def _loses_nothing(config: LossyConfig, facts: Facts) -> bool:
    """Return whether losses are asked for although a lone rank exchanges nothing."""
    if facts.largest_group != 1 or config.jobs().several or (config.lossy_self and not config.phase("grad").lossless):
        return False
    return draws_losses(config) or _observed(config)


def _missing_rank(config: LossyConfig, facts: Facts) -> Mapping[str, int] | None:
    """Return the first of ``--grad-error-ranks`` that does not exist."""
    ranks = config.grad_error_ranks or ()
    return next(({"beyond": rank} for rank in ranks if facts.workers is not None and rank >= facts.workers), None)


def _uneven_sites(config: LossyConfig, facts: Facts) -> Mapping[str, int] | None:
    """Return the number of data-parallel ranks, if sites do not divide it."""
    data = (facts.workers or 0) // (facts.context or 1)
    return {"data": data} if config.sites and data % config.sites else None


CORE = Section(
    "core",
    "Megatron and losses",
    f"--optimizer = {{facts.optimizer}} | losses | {_LAYER_WISE}",
    lambda c, f: f.layer_wise and not c.inert,
    f"LayerWiseDistributedOptimizer | losses | {_LAYER_WISE}",
    lambda c, f: f.layer_wise_parameters and not c.inert,
    *switches(
        "losses | cannot go with loss ({why}); turn it off",
        lambda c: not c.inert,
        {
            "--use-megatron-fsdp": "Megatron-FSDP shards by itself",
            "--use-torch-fsdp2": "torch FSDP shards by itself",
            "--optimizer-cuda-graph": _ONE_DRAW,
            "--reuse-grad-buf-for-mxfp8-param-ag": "stale parameters would live in the gradient buffer",
        },
    ),
    f"--cuda-graph-scope full_iteration | losses | {_ONE_DRAW}; turn it off",
    lambda c, f: f.full_iteration_graph and not c.inert,
    "--fp8-param-gather = with parameter loss | lost parameters | "
    "stale bytes would be read at new scales; turn one off",
    lambda c, f: "--fp8-param-gather" in f.switches and not c.untouched("param"),
    "--packet-bytes | the type of gradients, weights or --sync-dtype | "
    "must hold at least one element of {needed} bytes",
    _too_small,
    f"--grad-error | --grad-reduce-in-bf16 | {ALLOWED_BITS.format(last=15)}",
    lambda c, f: f.gradient_bytes == 2 and c.errs and max(c.flips[1] or (0,)) > 15,
    "--non-persistent-ckpt-type = {facts.non_persistent_checkpoints} | --save-replicas | "
    "such checkpoints hold no replicas, and a run that resumes from "
    "one would not continue bit for bit; omit it or --save-replicas",
    lambda c, f: f.non_persistent_checkpoints is not None and not c.inert and c.save_replicas,
    "--grad-recovery | --calculate-per-token-loss | "
    "mixes gradients of several steps, which --calculate-per-token-loss makes sums "
    "over as many tokens as each step has; choose another rule or omit that flag",
    lambda c, f: f.per_token_loss and not c.untouched("grad") and GRAD_RECOVERIES.load(c.grad_recovery).carries_over,
)

PYTORCH = Section(
    "pytorch",
    "Models of FSDP2 and DDP",
    "--eval-weights | FSDP2 and DDP | is of training programs; evaluate within owner_weights(), or outside of it",
    # With --rendezvous owner is the default.
    lambda c, f: f.data_parallel and c.eval_weights in (("both",) if c.rendezvous else ("owner", "both")),
    "--p-param | DistributedDataParallel | "
    "each replica updates all parameters, and sends none; shard the model with fully_shard",
    lambda c, f: f.data_parallel == "DDP" and not c.phase("param").lossless,
    "--transport | DistributedDataParallel | "
    "carries no all-reduce; choose pieces or torch, or shard the model with fully_shard",
    lambda c, f: f.data_parallel == "DDP" and _observed(c),
    "--transport | FSDP2 and tensor parallelism | "
    "loses other units of each copy of a parameter; choose pieces or torch",
    lambda c, f: _observed(c) and _tensor_copies(f),
    "--grad-recovery, --grad-priority | FSDP2 and tensor parallelism | "
    "would choose other units of each copy of a parameter; choose another rule, and --grad-priority none",
    lambda c, f: _tensor_copies(f) and c.chosen() and not c.inert,
)

TRANSPORT = Section(
    "transport",
    "Transports",
    "--loss-unit | --transport udp or stream | must be packet with --transport {config.transport}, which loses packets",
    lambda c, f: _observed(c) and c.loss_unit != "packet",
    "--lossy-self = with --transport {config.transport} | --transport udp or stream | "
    "cannot be: the own shard never crosses the network",
    lambda c, f: _observed(c) and c.lossy_self,
    "--transport | torch before 2.8 | needs torch 2.8 or later under Megatron, this is {facts.torch}",
    # Earlier versions fail if a coalescing context contains no collective of torch.
    lambda c, f: c.transport != "torch" and f.torch and tuple(map(int, f.torch.split(".")[:2])) < (2, 8),
    "--transport | --virtual-workers | needs real ranks: virtual workers exchange in memory; choose pieces",
    lambda c, f: f.virtual and _observed(c),
    "--transport | LossyWorkers | must be torch or pieces: workers of one process exchange in memory",
    lambda c, f: f.in_memory and _observed(c),
    f"--transport | no distributed optimizer | carries no all-reduce; {OFF}",
    lambda c, f: f.distributed_optimizer is False and _observed(c),
    "--udp-port | the ranks of a host | "
    "must be at most {last}: each of the {facts.ranks_of_host} ranks of a node takes the next one",
    _beyond_ports,
    "--udp-memory | the ranks of a group | "
    "must be at least {least}: room for packets to and from each of {facts.largest_group} ranks",
    _less_memory,
)

WORKERS = Section(
    "workers",
    "Ranks and virtual workers",
    "--lossy-links | --virtual-workers, without N | needs inter-node:N with --virtual-workers",
    lambda c, f: f.virtual and c.ranks_of_node == 0,
    "--lossy-links | no more --virtual-workers | "
    "puts all {facts.workers} ranks on one node: no link leaves a node, and nothing can be lost",
    lambda c, f: f.workers is not None and f.virtual and 1 < f.workers <= (c.ranks_of_node or 0),
    "--ddp-param-name-patterns-for-fp32-local-accumulation | --virtual-workers | "
    "virtual workers take gradients from Megatron's buffers; needs real ranks",
    lambda c, f: f.virtual and f.gradients_beside_buffers,
    "--grad-error-ranks = {beyond} | fewer data-parallel ranks | must be below the {facts.workers} data-parallel ranks",
    _missing_rank,
    "data-parallel size = {facts.largest_group} | losses | "
    "one rank exchanges nothing, so that nothing can be lost; start at least two (torchrun "
    "--nproc-per-node 2 …, or --virtual-workers), or set no loss rate and no --transport udp or stream",
    _loses_nothing,
)

SITES = Section(
    "sites",
    "Sites",
    "--lossy-links | --sites | names the links that lose data, as --sites does; omit one",
    lambda c, f: c.sites and c.ranks_of_node is not None,
    "--islands | --sites | averages every few iterations what sites exchange in each; omit one",
    lambda c, f: c.sites and c.averages,
    "--p-act, --p-act-grad, --virtual-boundaries | --sites | "
    "loses messages between stages, which are all inside a site; omit it",
    lambda c, f: c.sites and c.loses_at_boundaries,
    "--async-pipeline | --sites | exchanges micro-batches of several ages; omit one",
    lambda c, f: c.sites and c.async_pipeline,
    f"--sites | no distributed optimizer | is for shards of gradients and parameters; {OFF}",
    lambda c, f: c.sites and f.distributed_optimizer is False,
    "--sites | DistributedDataParallel | is for shards of gradients and parameters; shard the model with fully_shard",
    lambda c, f: c.sites and f.data_parallel == "DDP",
    "--sites | LossyWorkers | needs real ranks or --virtual-workers: here a worker is a site already",
    lambda c, f: c.sites and f.in_memory,
    "--num-distributed-optimizer-instances = {facts.optimizer_instances} | --sites | "
    "must be 1 with --sites, which make the optimizer's shards those of all ranks",
    lambda c, f: c.sites and above(f.optimizer_instances, 1),
    "--pipeline-model-parallel-size = {facts.pipeline} | --sites | "
    "needs --use-tp-pp-dp-mapping with --sites: else the stages are in different sites, and data-parallel ranks in one",
    lambda c, f: c.sites and f.stages_inside is False and above(f.pipeline, 1),
    "--sites | data-parallel ranks that it does not divide | must divide the {data} data-parallel ranks",
    _uneven_sites,
)

#: In the order in which they are checked: a user sees the first that applies.
SECTIONS = (CORE, PYTORCH, TRANSPORT, WORKERS, SITES)
