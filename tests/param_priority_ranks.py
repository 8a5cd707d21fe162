"""Ranks that gather parameters with priorities over UDP: run by a test in the lab. Without Megatron, so that they start quickly."""

from __future__ import annotations

import json
import os
import sys

import numpy as np
import torch
import torch.distributed as dist

from megatron_lossy.config import LossyConfig
from megatron_lossy.transport import BucketSpec, LossyGroup

SHARDS = (5000, 777)


def gathered(rank, config, steps):
    """What a rank missed of the parameters of others: of those they chose, and of the rest; and its counters.

    What did not arrive has to be what was there before.
    """
    size = dist.get_world_size()
    group = LossyGroup.create(config, [BucketSpec(shard) for shard in SHARDS])
    generator = torch.Generator().manual_seed(rank)
    replicas = [torch.zeros(size * shard) for shard in SHARDS]
    own = [torch.zeros(shard) for shard in SHARDS]
    counts = {"high": 0, "must": 0, "lost": 0, "wrong": 0}
    for step in range(steps):
        for bucket, shard in enumerate(SHARDS):
            own[bucket] += torch.randn(shard, generator=generator)
            before = replicas[bucket].clone()
            group.all_gather(bucket, replicas[bucket], own[bucket], step, lambda: None).wait()
            units = group.wire.cut["param"][bucket]
            arrived = group.delivery("param", step).incoming(units)
            chosen = [torch.empty(units.count, dtype=torch.bool) for _ in range(size)]
            dist.all_gather(chosen, torch.from_numpy(group.params[bucket].priority._chosen))
            every = [torch.empty(shard) for _ in range(size)]
            dist.all_gather(every, own[bucket])
            high = torch.stack(chosen).numpy()
            counts["high"] += int(high.sum())
            counts["must"] += int((high & ~arrived).sum())
            counts["lost"] += int((~arrived).sum())
            mask = np.repeat(arrived, units.elements, axis=1)[:, :shard]
            expected = torch.where(torch.from_numpy(mask).flatten(), torch.cat(every), before)
            counts["wrong"] += int((replicas[bucket] != expected).sum())
    counters = group.wire.counters()[1 - rank]
    group.close()
    return {"rank": rank, **counts, "resent": counters["resent"], "parities": counters["parities"]}


def main():
    """``python -m tests.param_priority_ranks FLAGS-AS-JSON STEPS``, with torch's environment."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    flags, steps = json.loads(sys.argv[1]), int(sys.argv[2])
    print(json.dumps(gathered(int(os.environ["RANK"]), LossyConfig(**flags), steps)), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
