"""``python -m tests.udp_flood RULE SECONDS FOLDER``: ranks of two sites in a lab that send to each other, as much as the rule finds.

The first half of the ranks is one site. ``RANK``, ``WORLD_SIZE``: environment; ``FOLDER``: where they find each other.
"""

import json
import os
import sys
import time

import numpy as np

from megatron_lossy.transport.address import find_address
from megatron_lossy.transport.udp import Engine, Settings
from tests.test_udp_engine import store_in

UNIT, SHARD = 1408, 300 * 1408


def main():
    rule, seconds, folder, cipher = sys.argv[1], float(sys.argv[2]), sys.argv[3], (sys.argv[4:] or ["none"])[0]
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    others = range(size // 2, size) if rank < size // 2 else range(size // 2)
    settings = Settings(interface="lab0", rate_control=rule, cipher=cipher)
    store = store_in(folder)
    with Engine(settings, find_address("lab0", "127.0.0.1"), lambda line: None) as engine:
        channel = engine.open("flood", rank, size, store, "flood", {"grad": [(SHARD, UNIT)], "param": []}, peers=others)
        data = np.zeros(SHARD, np.uint8)
        pieces = np.zeros((size, SHARD), np.uint8)
        end, waiting = time.monotonic() + seconds, []
        for step in range(10**6):
            # All end with the same step, which the first rank names.
            if rank == 0 and time.monotonic() > end:
                store.set("last", str(step + 20).encode())
                end = float("inf")
            if store.check(["last"]) and step >= int(store.get("last")):
                break
            posted = channel.post(
                "grad", step, 0, [pieces[r].ctypes.data if r in others else None for r in range(size)]
            )
            channel.send("grad", step, 0, [data.ctypes.data if r in others else None for r in range(size)])
            waiting.append(posted)
            if len(waiting) > 2:
                waiting.pop(0).wait(60)
        for one in waiting:
            one.wait(60)
        rates = channel.rates()
        print(rank, {peer: round(rates[peer]["rate"]) for peer in others}, flush=True)
        print(json.dumps({"exchanges": step, **engine.counters()}), flush=True)


if __name__ == "__main__":
    main()
