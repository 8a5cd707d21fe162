"""Count what crosses between two sites. As a program: run an unmodified script with the hooks, and print the counts.

python -m tests.between_sites SCRIPT arguments…
"""

import atexit
import collections
import contextlib
import os
import sys

import torch.distributed as dist

#: Methods of a process group, of all versions of torch.
_NAMES = [
    *("allreduce", "allreduce_coalesced", "alltoall", "alltoall_base", "all_to_all_single", "barrier", "broadcast"),
    *("allgather", "allgather_coalesced", "allgather_into_tensor_coalesced", "_allgather_base", "all_gather_single"),
    *("all_gather_single_coalesced", "reduce", "reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single"),
    *("reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced", "gather", "scatter"),
]


@contextlib.contextmanager
def crossings():
    """Within the context each collective is counted whose ranks are in both halves of the world: by (name, ranks, elements).

    Elements are those of the first tensor. Collectives of C++ alone, as functional ones are, pass uncounted.
    """
    found, originals = collections.Counter(), {}

    def counted(name, original):
        def call(self, *args, **kwargs):
            ranks = dist.get_process_group_ranks(self)
            if len({rank // (dist.get_world_size() // 2) for rank in ranks}) > 1:
                first = args[0] if args else None
                while isinstance(first, list):
                    first = first[0]
                found[name, len(ranks), first.numel() if hasattr(first, "numel") else 0] += 1
            return original(self, *args, **kwargs)

        return call

    for name in _NAMES:
        if name in vars(dist.ProcessGroup):
            originals[name] = vars(dist.ProcessGroup)[name]  # which getattr would unwrap
            setattr(dist.ProcessGroup, name, counted(name, getattr(dist.ProcessGroup, name)))
    try:
        yield found
    finally:
        for name, original in originals.items():
            setattr(dist.ProcessGroup, name, original)


def main():
    """Count from the start to the end of a run of the plugin."""
    from megatron_lossy.__main__ import main as run

    with crossings() as found:
        if os.environ["RANK"] == "0":
            atexit.register(lambda: [print("crossed", *key, count, flush=True) for key, count in found.items()])
        sys.argv = sys.argv[1:]
        run(sys.argv)


if __name__ == "__main__":
    main()
