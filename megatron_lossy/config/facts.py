"""Facts of a run that decide whether loss flags go with it. Each source of facts has one function that makes them."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Facts of a run besides its loss flags.

    ``None`` is an unknown fact: Megatron's arguments do not show whether a model is quantized, and a model does not
    have the length of its training. A refusal that needs an unknown fact does not apply.
    """

    # Ranks, workers and length.
    #: Data-parallel ranks of all jobs, or virtual workers.
    workers: int | None = None
    #: Whether one process computes for all workers.
    virtual: bool | None = None
    #: Whether the workers of one process exchange without Megatron (:class:`megatron_lossy.transport.LossyWorkers`).
    in_memory: bool | None = None
    #: Ranks of the largest group that exchanges gradients. Experts may have a larger one than the other layers.
    largest_group: int | None = None
    ranks_of_host: int | None = None
    train_iters: int | None = None
    #: Whether the length of the run is known, in iterations.
    ends: bool | None = None

    #: The kind of device that ranks compute on: "cpu", "cuda" or "hpu".
    device: str | None = None

    # The program.
    #: PyTorch's own data parallelism, "FSDP2" or "DDP", if that is it.
    data_parallel: str | None = None
    #: Whether the training loop empties the pipeline in every iteration.
    flushes: bool | None = None
    #: Whether each of several jobs is a world of processes of its own.
    worlds_apart: bool | None = None
    #: Whether checkpoints are written.
    saves: bool | None = None
    #: Kind of Megatron's checkpoints besides those of ``--save``.
    non_persistent_checkpoints: str | None = None
    dataloader: str | None = None
    torch: str | None = None

    # Model and parallelism.
    tensor: int | None = None
    #: Whether tensor-parallel ranks have copies of a parameter whose gradients Megatron does not add up after the exchange.
    copies_apart: bool | None = None
    pipeline: int | None = None
    #: Context-parallel ranks; each counts among the workers.
    context: int | None = None
    #: Whether the ranks of a pipeline are numbered before those of a data-parallel group.
    stages_inside: bool | None = None
    #: Pipelines that a rank is in. Encoder and decoder may have one each.
    pipelines: int | None = None
    #: Whether one pipeline goes through several modules.
    several_modules: bool | None = None
    layers: int | None = None
    experts: int | None = None
    #: Whether the output layer is the embedding.
    tied: bool | None = None
    predicts_more_tokens: bool | None = None
    virtual_pipeline: int | None = None
    recompute: str | None = None
    layer_graphs: bool | None = None
    full_iteration_graph: bool | None = None

    # Numbers.
    fp16: bool | None = None
    #: The factor of the loss, if it is fixed.
    loss_scale: float | None = None
    gradient_bytes: int | None = None
    weight_bytes: int | None = None
    #: Bytes of an element of the messages between stages.
    message_bytes: int | None = None
    per_token_loss: bool | None = None

    # Optimizer.
    distributed_optimizer: bool | None = None
    optimizer: str | None = None
    #: Whether the optimizer is sharded by layers.
    layer_wise: bool | None = None
    #: Whether the model's parameters are laid out for such an optimizer.
    layer_wise_parameters: bool | None = None
    optimizer_instances: int | None = None
    overlap_param_gather: bool | None = None
    #: Whether gradients are added up outside Megatron's buffers.
    gradients_beside_buffers: bool | None = None
    #: Level of Megatron's timers, some of which begin with a barrier.
    timing_level: int | None = None
    #: Iterations between comparisons of the weights of replicas.
    weight_hash_interval: int | None = None

    #: Other flags of Megatron that are set.
    switches: frozenset[str] = frozenset()

    def __or__(self, more: Facts) -> Facts:
        """Return these facts and those that ``more`` has, which replace them."""
        known = {own.name: value for own in fields(more) if (value := getattr(more, own.name)) is not None}
        return replace(self, **known | {"switches": self.switches | more.switches})

    @property
    def copies_embedding(self) -> bool:
        """Whether the last of several stages copies the embedding: as output layer, or to predict more tokens."""
        return bool(self.tied or self.predicts_more_tokens)
