"""``python -m megatron_lossy.train``, whose tensor-parallel ranks compare their copies of parameters at the end."""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_lossy.lab.train.__main__ import main
from megatron_lossy.mechanisms.islands.elastic import ElasticIslands
from tests.quick_islands import hurry


def compare(islands: ElasticIslands) -> None:
    """Say how many parameters have copies that are equal. Raise :class:`RuntimeError` if some are not."""
    group, compared = parallel_state.get_tensor_model_parallel_group(), 0
    for chunk in islands._run.chunks:
        for name, parameter in chunk.named_parameters():
            if getattr(parameter, "tensor_model_parallel", False):
                continue
            copies = [torch.empty_like(parameter) for _ in range(group.size())]
            dist.all_gather(copies, parameter.detach(), group=group)
            if any(not torch.equal(copies[0], one) for one in copies):
                raise RuntimeError(f"copies of {name} are apart")
            compared += 1
    print(f"copies of {compared} parameters are equal", flush=True)


def comparing() -> None:
    """Let every island compare before it leaves."""
    leave = ElasticIslands.leave

    def compared(self: ElasticIslands) -> None:
        compare(self)
        leave(self)

    ElasticIslands.leave = compared  # type: ignore[method-assign]


if __name__ == "__main__":
    comparing()
    hurry()
    main()
