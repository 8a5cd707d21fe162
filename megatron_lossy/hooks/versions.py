"""The Megatrons that the hooks support, and the differences between them. No other module asks for a version.

The hooks are written for megatron-core 0.12 to 0.19, for the development of 0.20, and for the cores of HabanaAI's
branches 1.22 (0.11 with changes of its own), 1.23 and 1.24 (both 0.13). ``docs/verified.md`` lists the tests.

Forks take changes out of order. So these functions look for an attribute of a later version, not for the number of the
version.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from ..base.errors import UsageError, refuse

#: Versions of megatron-core that the hooks are tested with: at least the first, below the second. A newer one is
#: refused even where all signatures match: 0.17 moved a copy of gradients without changing a single signature.
SUPPORTED = ((0, 11), (0, 21))

#: The oldest with the schedules and checkpoints that megatron_lossy.train uses.
OLDEST_FOR_TRAIN = (0, 16)

_CHUNK = "_megatron_lossy_model_chunk"


def check_version(version: str, oldest: tuple[int, int] = SUPPORTED[0]) -> None:
    """Raise :class:`UsageError` if megatron-core ``version`` is not supported or is older than ``oldest``."""
    try:
        parsed = tuple(int(part) for part in version.split(".")[:2])
    except ValueError:
        parsed = ()
    low, high = oldest, SUPPORTED[1]
    if not low <= parsed < high:
        why = f"is not supported; use at least {low[0]}.{low[1]} and below {high[0]}.{high[1]}"
        raise refuse("megatron-core", version, why)


def require_megatron(oldest: tuple[int, int] = SUPPORTED[0]) -> None:
    """Import megatron-core. Raise :class:`UsageError` if it is missing, or as :func:`check_version` does."""
    try:
        import megatron.core
    except ImportError as error:
        raise UsageError(f"megatron-core cannot be imported ({error}); install it: pip install megatron-core") from None
    check_version(megatron.core.__version__, oldest)


def how_to_import(error: ImportError) -> str:
    """Return advice for a user whose megatron.training cannot be imported."""
    if error.name == "pkg_resources":
        return "HabanaAI's Megatron-LM needs pip install 'setuptools<81'"
    return (
        "what Megatron-LM itself imports comes with the extra megatron-lm of this package: "
        "pip install -e '.[megatron-lm]' in its folder"
    )


def dense_buffers(ddp: Any) -> list[Any]:
    """Return the buffers of a model chunk, without those of its experts. HabanaAI's 0.11 has its own name for them."""
    return getattr(ddp, "dense_buffers", None) or ddp.buffers


def main_gradients(bucket: Any) -> list[torch.Tensor]:
    """Return the gradients that the optimizer reads from outside the buffer of ``bucket``.

    Only megatron-core 0.17 and later have them, if asked for.
    """
    return [parameter.main_grad for parameter in getattr(bucket, "params_with_extra_main_grads", ())]


def full_group(ddp: Any, expert: bool) -> torch.distributed.ProcessGroup:
    """Return the group that shards the optimizer, over all of its instances.

    For experts it is the expert-data group, for the rest the data-parallel (times context-parallel) group.
    """
    name = "expt_dp_group" if expert else "dp_cp_group"
    if hasattr(ddp, name):
        return getattr(ddp, name)
    # Before 0.13 DDP keeps no groups.
    from megatron.core import parallel_state

    if expert:
        return parallel_state.get_expert_data_parallel_group()
    return parallel_state.get_data_parallel_group(with_context_parallel=True)


def pipeline_stage(ddp: Any) -> int:
    """Return the pipeline-parallel rank."""
    from megatron.core import parallel_state

    group = getattr(ddp, "pp_group", None) or parallel_state.get_pipeline_model_parallel_group()
    return _rank(group)


def expert_rank(ddp: Any) -> int:
    """Return the expert-parallel rank."""
    from megatron.core import parallel_state

    return _rank(getattr(ddp, "ep_group", None) or parallel_state.get_expert_model_parallel_group())


def tensor_group(expert: bool) -> torch.distributed.ProcessGroup | None:
    """Return the tensor-parallel group of experts or of the other layers; ``None`` without tensor parallelism."""
    from megatron.core import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        return None
    find = getattr(parallel_state, "get_expert_tensor_parallel_group", None) if expert else None
    group = (find or parallel_state.get_tensor_model_parallel_group)()
    return group if group.size() > 1 else None


def number_model_chunk(ddp: torch.nn.Module, position: int) -> None:
    """Note that ``ddp`` is the ``position``-th chunk to be wrapped. Before 0.13 a chunk does not have its number."""
    if not hasattr(innermost(ddp), "vp_stage"):
        from megatron.core import parallel_state

        setattr(ddp, _CHUNK, position % (parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1))


def model_chunk(ddp: torch.nn.Module) -> int:
    """Return the number of the model chunk on its rank. It is 0 without a virtual pipeline."""
    return getattr(innermost(ddp), "vp_stage", None) or getattr(ddp, _CHUNK, 0)


def optimizers(optimizer: Any) -> list[Any]:
    """Return the optimizers that ``optimizer`` chains; itself if it is no chain."""
    chained = getattr(optimizer, "chained_optimizers", None)
    return [optimizer] if chained is None else [inner for part in chained for inner in optimizers(part)]


def innermost(module: torch.nn.Module) -> torch.nn.Module:
    """Return the model inside its wrappers, DDP and the conversion of precision."""
    while isinstance(getattr(module, "module", None), torch.nn.Module):
        module = module.module
    return module


def data_parallel_rank(module: Any) -> int:
    """Return the data-parallel (times context-parallel) rank of a model chunk."""
    return full_group(module, expert=False).rank()


def data_parallel_place() -> tuple[int, int]:
    """Return this rank's data-parallel rank, and the data-parallel size, without context parallelism."""
    from megatron.core import parallel_state

    return parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()


def sequence_parallel_rank(module: Any) -> int | None:
    """Return the tensor-parallel rank if ranks have parts of the sequence of their own, else ``None``."""
    group = tensor_group(expert=False) if module.config.sequence_parallel else None
    return None if group is None else group.rank()


def decoder_layers(module: torch.nn.Module) -> Any:
    """Return the transformer layers of a model chunk, in order; their ``layer_number`` counts from 1 in the model.

    Raise :class:`UsageError` for a model that keeps them elsewhere.
    """
    inner = innermost(module)
    for name in ("decoder", "encoder"):
        layers = getattr(getattr(inner, name, None), "layers", None)
        if layers is not None:
            return layers
    raise refuse("--p-act", type(inner).__name__, "has no decoder with layers, whose number the losses depend on")


def pipeline_groups() -> int:
    """Return number of pipelines that this rank is in.

    Before 0.13 there are several if encoder and decoder have their own parallelism.
    """
    from megatron.core import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        return 1
    groups = parallel_state.get_pipeline_model_parallel_group()
    return len(groups) if isinstance(groups, list) else 1


def pipeline_ranks() -> list[int]:
    """Return the global ranks of this rank's pipeline; empty if Megatron's global state has no parallelism."""
    from megatron.core import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        return []
    return torch.distributed.get_process_group_ranks(parallel_state.get_pipeline_model_parallel_group())


def schedule_table(chunks: Any, micro_batches: int, stages: int) -> list[tuple[int, int]]:
    """Return (micro-batch, model chunk) of each forward pass of a rank of the interleaved schedule, in order."""
    from megatron.core.pipeline_parallel import schedules

    group = chunks[0].config.microbatch_group_size_per_vp_stage or stages
    table = getattr(schedules, "get_schedule_table", _schedule_table)
    return table(micro_batches, len(chunks), group)


def _schedule_table(micro_batches: int, chunks: int, group: int) -> list[tuple[int, int]]:
    """Return the schedule of HabanaAI's 0.11: ``group`` micro-batches go through all chunks, then the next."""
    return [
        (number, chunk)
        for first in range(0, micro_batches, group)
        for chunk in range(chunks)
        for number in range(first, min(first + group, micro_batches))
    ]


def backward_step(received: Any, output: Any, gradient: Any, config: Any) -> Any:
    """Call Megatron's backward pass through a stage; returns the gradient of ``received``.

    Before 0.17 it takes a model type.
    """
    from megatron.core.enums import ModelType
    from megatron.core.pipeline_parallel import schedules

    takes = inspect.signature(schedules.backward_step).parameters
    model_type = (ModelType.encoder_or_decoder,) if "model_type" in takes else ()
    return schedules.backward_step(received, output, gradient, *model_type, config)


def parallel_sizes() -> dict[str, int]:
    """Return the size of every kind of model parallelism, by its flag; empty without Megatron's parallel state."""
    from megatron.core import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        return {}
    names = {
        "--tensor-model-parallel-size": "get_tensor_model_parallel_world_size",
        "--pipeline-model-parallel-size": "get_pipeline_model_parallel_world_size",
        "--context-parallel-size": "get_context_parallel_world_size",
        "--expert-model-parallel-size": "get_expert_model_parallel_world_size",
        "--expert-tensor-parallel-size": "get_expert_tensor_parallel_world_size",
    }
    return {flag: int(getattr(parallel_state, name)()) for flag, name in names.items() if hasattr(parallel_state, name)}


def _rank(group: Any) -> int:
    return (group[0] if isinstance(group, list) else group).rank()
