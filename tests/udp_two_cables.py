"""One rank of two hosts that two cables join: it exchanges for a while, and prints JSON of what became of it."""

from __future__ import annotations

import json
import os
import sys
import time

import psutil
import torch
import torch.distributed as dist

from megatron_lossy import device
from megatron_lossy.config import LossyConfig
from megatron_lossy.transport import BucketSpec, LossyGroup
from megatron_lossy.transport.udp.process import engine_counters

SHARD = 200_000
CABLES = ("lab0", "lab1")
#: Seconds: in the first of them cables are pulled, and then the first address is asked for at most so long.
TROUBLE, AFTER = 9.0, 13.0


def sent(cable: str) -> int:
    return psutil.net_io_counters(pernic=True)[cable].bytes_sent


def main() -> None:
    config = LossyConfig(transport="udp", udp_interface=",".join(CABLES), udp_cipher=sys.argv[1], udp_rate="300mbit")
    device.init_process_group()
    group = LossyGroup.create(config, [BucketSpec(SHARD)])
    rank, size = dist.get_rank(), dist.get_world_size()
    replica = torch.zeros(size * SHARD)
    counts = {"exchanges": 0, "incomplete": 0, "last": 0, "slowest": 0.0}
    begun, settled, end = time.monotonic(), None, 0
    while not end or counts["exchanges"] < end:
        if counts["exchanges"] == 5 and rank == 0:
            print("begun", flush=True)
        # The first rank sends, for a while, which exchange is the last one; torch's connections have only one cable.
        if not end and rank == 0 and time.monotonic() - begun > TROUBLE + AFTER:
            end = counts["exchanges"] + 20
        own = torch.full((SHARD,), float(end))
        at = time.monotonic()
        delivery = group.all_gather(0, replica, own, counts["exchanges"], lambda: None).wait()
        counts["slowest"] = max(counts["slowest"], time.monotonic() - at)
        counts["exchanges"] += 1
        counts["last"] = int(not delivery.arrived.all())
        counts["incomplete"] += counts["last"]
        if settled is None and time.monotonic() - begun > TROUBLE + AFTER - 2:
            settled = [sent(cable) for cable in CABLES]
        end = int(replica[:SHARD].max())
    shares = [sent(cable) - before for cable, before in zip(CABLES, settled, strict=True)]
    counts["shares"] = [share / sum(shares) for share in shares]
    print(json.dumps(counts | {"switched": engine_counters()["switched"]}), flush=True)
    dist.barrier()
    group.close()
    dist.destroy_process_group()
    os._exit(0)


if __name__ == "__main__":
    main()
