"""The parameter groups of ``fully_shard``, as the buckets of streams. All that is private in FSDP2 is read here alone.

One call of ``fully_shard`` makes one group. Its gather has N shards, and so has its reduce-scatter; a shard holds the
parts of all parameters one after another, each padded to the size of the first rank's part.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ..base.errors import refuse
from ..transport import BucketSpec


class ParameterGroup:
    """One parameter group. ``name``: of its module. ``modules``: those that share it, each an ``FSDPModule``."""

    def __init__(self, name: str, modules: list[Any], group: Any) -> None:
        self.name = name
        self.modules = modules
        self._group = group

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """The sharded parameters, as an optimizer has them."""
        return [parameter.sharded_param for parameter in self._group.fsdp_params]

    @property
    def trained(self) -> bool:
        """Whether any parameter has a gradient."""
        return any(parameter.requires_grad for parameter in self.parameters)

    @property
    def ranks(self) -> dist.ProcessGroup:
        """The N ranks that share the parameters out among them."""
        return self._group.mesh_info.shard_process_group

    @property
    def all_ranks(self) -> list[int]:
        """The ranks of all replicas, in the order of the mesh; without replicas those of :attr:`ranks`."""
        info = self._group.mesh_info
        if info.replicate_mesh_dim is None:
            return dist.get_process_group_ranks(self.ranks)
        return info.mesh.mesh.flatten().tolist()

    @property
    def replicated(self) -> bool:
        """Whether several groups of ranks hold the same parameters (HSDP)."""
        return self._group.mesh_info.replicate_mesh_dim is not None

    @property
    def sharded(self) -> bool:
        """Whether ranks share the parameters out among them; ``replicate()`` gives all of them to each."""
        return self._group.mesh_info.shard_mesh_dim is not None

    @property
    def tensor_parallel(self) -> bool:
        """Whether a parameter is also sharded, or copied, over other ranks than :attr:`all_ranks`."""
        data = self._group.mesh_info.mesh.ndim
        meshes = (getattr(parameter, "device_mesh", None) for parameter in self.parameters)
        return any(mesh is not None and mesh.ndim > data for mesh in meshes)

    @property
    def device(self) -> torch.device:
        """The device of the gathered parameters."""
        return self._group.device

    @cached_property
    def spec(self) -> BucketSpec:
        """The bucket. Parameters without a gradient are gathered, and not reduced."""
        wanted = self._group.mp_policy.param_dtype
        dtypes = {wanted if wanted and own.is_floating_point() else own.dtype for own in self.parameters}
        if len(dtypes) > 1:
            several = ", ".join(sorted(map(str, dtypes)))
            why = f"gathers parameters of several types ({several}) together; shard them apart"
            raise refuse("model", self.name, why)
        [dtype] = dtypes
        sizes = [
            (math.prod(parameter.padded_sharded_param_size), parameter.sharded_param.requires_grad)
            for parameter in self._group.fsdp_params
        ]
        reduced = sum(size for size, trained in sizes if trained)
        return BucketSpec(reduced, self._group.mp_policy.reduce_dtype or dtype, dtype, sum(size for size, _ in sizes))

    def used(self, gradients: bool = False) -> np.ndarray:
        """Return int64[k, 2]: the ranges in N shards that hold parameters, or gradients; the rest is padding."""
        ranges, size = [], self.ranks.size()
        parameters = self._group.fsdp_params
        if gradients:
            parameters = [parameter for parameter in parameters if parameter.sharded_param.requires_grad]
        shard = sum(math.prod(parameter.padded_sharded_param_size) for parameter in parameters)
        for rank in range(size):
            offset = rank * shard
            for parameter in parameters:
                padded, dim = parameter.padded_sharded_param_size, parameter.fsdp_placement.dim
                rows = min(max(parameter._orig_size[dim] - rank * padded[dim], 0), padded[dim]) if padded else 1
                held = math.prod(padded) // padded[dim] * rows if padded and padded[dim] else 0
                ranges.append((offset, offset + held))
                offset += math.prod(padded)
        return np.array([pair for pair in sorted(ranges) if pair[0] < pair[1]], dtype=np.int64).reshape(-1, 2)

    def weights(self) -> torch.Tensor:
        """Return float32 [shard]: this rank's shard as the optimizer has it, with padding."""
        return torch.cat([piece.float().to(self.device) for piece in self.pieces()])

    def pieces(self) -> list[torch.Tensor]:
        """Return this rank's shard of each parameter, flat and with padding, as the optimizer has it; not copies."""
        return [parameter._sharded_param_data.detach() for parameter in self._group.fsdp_params]

    @property
    def version(self) -> int:
        """A number that grows with each change of this rank's shard in place, other than through ``.data``."""
        # An operation counts where it was called: on the parameter, or on its local part.
        tensors = ((own.sharded_param, own._sharded_local_tensor) for own in self._group.fsdp_params)
        return sum(tensor._version for pair in tensors for tensor in pair)

    @property
    def exchanges(self) -> tuple[Any, Any]:
        """The objects that gather, and that reduce and scatter."""
        return self._group._all_gather_comm, self._group._reduce_scatter_comm

    @property
    def divide_factor(self) -> float:
        """The number that gradients are divided by, if it is not the number of ranks (``set_gradient_divide_factor``)."""
        return self._group.gradient_divide_factor

    def exchange_by(self, gather: Any, reduce: Any) -> None:
        """Let ``gather`` and ``reduce`` make the exchanges."""
        self.modules[0].set_custom_all_gather(gather)
        self.modules[0].set_custom_reduce_scatter(reduce)

    @property
    def gathers_elsewhere(self) -> int | None:
        """Ranks of the smaller group that gathers in the backward pass (``reshard_after_forward=N``), if there is one."""
        info = self._group.post_forward_mesh_info
        if info is None or info.shard_mesh_size == self.ranks.size():
            return None
        return info.shard_mesh_size

    @property
    def quantizes(self) -> bool:
        """Whether parameters are gathered in a form of their own, such as float8 with scales."""
        local = (parameter._sharded_local_tensor for parameter in self._group.fsdp_params)
        return any(hasattr(tensor, "fsdp_pre_all_gather") for tensor in local)


def parameter_groups(model: torch.nn.Module) -> list[ParameterGroup]:
    """Return all groups, in the order of ``model.modules()``. Raise :class:`UsageError` for two of one module."""
    from torch.distributed.fsdp import FSDPModule

    found: dict[int, ParameterGroup] = {}
    for name, module in model.named_modules():
        groups = _groups_of(module._get_fsdp_state()) if isinstance(module, FSDPModule) else []
        if len(groups) > 1:
            why = f"has {len(groups)} parameter groups (shard_placement_fn with several meshes), and torch has one place for "
            allowed = f"{why}their exchanges; call fully_shard on submodules instead"
            raise refuse("model", name or "root module", allowed)
        for group in groups:
            if id(group) in found:
                found[id(group)].modules.append(module)
            else:
                found[id(group)] = ParameterGroup(name or "root module", [module], group)
    return list(found.values())


def _groups_of(state: Any) -> list[Any]:
    several = getattr(state, "_fsdp_param_groups", None)  # torch before 2.12 has at most one
    if several is not None:
        return list(several)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def streams_of(groups: list[ParameterGroup]) -> list[list[ParameterGroup]]:
    """Return the ``groups`` of each stream: those that the same ranks exchange, in the order in which they come first."""
    by_ranks: dict[tuple[int, ...], list[ParameterGroup]] = {}
    for group in groups:
        by_ranks.setdefault(tuple(dist.get_process_group_ranks(group.ranks)), []).append(group)
    return list(by_ranks.values())
