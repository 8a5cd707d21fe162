"""The links between all ranks, tried with datagrams or streams: which ranks reach each other, the loss, and advice.

    torchrun … -m megatron_lossy doctor --transport udp

Run it on every host, started like the training. Without a launcher only this host is examined: its port, key file, and congestion control.
"""

from __future__ import annotations

import datetime
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ...base import device
from ...base.errors import UsageError
from ...base.exchange import Stream
from ...config import LossyConfig
from ...transport import BucketSpec, LossyGroup, settled
from ...transport.ends import end_for
from .found import Finding

if TYPE_CHECKING:
    from ...transport.udp.engine import Engine

_SHARD = 2**18  # float32 values: 1 MiB to each rank
_EXCHANGES = 10
_MUCH = 0.05


def examine_network(config: LossyConfig) -> list[Finding]:
    """Return findings of rank 0, or of this host alone; empty on other ranks. A collective call under a launcher."""
    try:
        config = settled(config)
        here = _streams(config) if config.transport == "stream" else _datagrams(config)
    except UsageError as error:
        return [Finding("network", "engine", "problem", str(error))]
    if "RANK" not in os.environ:
        why = "start it with torchrun on every host, as the training will be, to try them"
        return [*here, Finding("network", "links", "absent", why)]
    device.init_process_group(timeout=datetime.timedelta(minutes=2))
    try:
        return _links(config, here)
    except UsageError as error:
        return [*here, Finding("network", "links", "problem", str(error))]
    finally:
        dist.destroy_process_group()


def _datagrams(config: LossyConfig) -> list[Finding]:
    """Return findings about datagrams of this host."""
    from ...transport.udp.engine import LITTLE_BUFFER, MORE_BUFFER

    engine = end_for(config)
    address, buffer = f"{engine.address}:{engine.port}, {config.udp_cipher}", f"{engine.granted / 2**20:.1f} MiB"
    found = [Finding("network", "engine", "ok", address), Finding("network", "receive buffer", "ok", buffer)]
    if engine.granted < LITTLE_BUFFER:
        found[1] = replace(found[1], status="warning", text=f"{buffer}: {MORE_BUFFER}")
    return [*found, *_packets(engine)]


def _streams(config: LossyConfig) -> list[Finding]:
    """Return the same about streams. Raise :class:`UsageError` for a taken port, a key file or congestion control."""
    host = end_for(config)
    address = f"{host.address}:{host.port}, {config.udp_cipher}"
    control = config.stream_congestion or Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
    return [Finding("network", "streams", "ok", address), Finding("network", "congestion control", "ok", control)]


def _packets(engine: Engine) -> list[Finding]:
    """Say which packets the interface takes; what the way to others takes is tried with those of --packet-bytes."""
    from ...transport.address import mtu_of

    mtu, packet = mtu_of(engine.address), engine.settings.packet_bytes
    if mtu is None:
        return []
    most = min(mtu, 65_535) - (engine.datagram - packet) - (48 if ":" in engine.address else 28)
    text = f"MTU {mtu:,}: --packet-bytes {packet} of at most {most // 64 * 64} in steps of 64"
    if packet > most:
        text = f"MTU {mtu:,}: --packet-bytes {packet} must be at most {most}"
        return [Finding("network", "packets", "problem", text)]
    if most >= 4 * packet:
        text += ", if all hops to all hosts have such an MTU: fewer packets take less CPU"
    return [Finding("network", "packets", "ok", text)]


def _links(config: LossyConfig, here: list[Finding]) -> list[Finding]:
    rank, size = dist.get_rank(), dist.get_world_size()
    group = LossyGroup.create(config, [BucketSpec(_SHARD)], stream=Stream())
    replica, took = torch.zeros(size * _SHARD), []
    own = replica[rank * _SHARD : (rank + 1) * _SHARD]
    lost = torch.zeros(size)
    for step in range(_EXCHANGES):
        dist.barrier()
        started = time.monotonic()
        delivery = group.all_gather(0, replica, own, step, lambda: None).wait()
        took.append(time.monotonic() - started)
        lost += torch.from_numpy((~delivery.arrived[0]).mean(axis=1)).float() / _EXCHANGES
    rates = group.wire.rates()
    if strangers := end_for(config).counters().get("strangers"):
        text = f"{strangers} connections of others, or with another key, were refused"
        here.append(Finding("network", "strangers", "warning", text))
    receptions = []
    for peer, found in rates.items():
        gone, trip, rate = float(lost[peer]), 1e3 * found["rtt_min"], found["rate"] / 1e6
        text = f"{100 * gone:.2f} % lost, round trip {trip:.1f} ms, {rate:.0f} MB/s at most the other way"
        receptions.append(Finding("network", f"rank {peer} to {rank}", "warning" if gone > _MUCH else "ok", text))
    here = [replace(found, name=f"rank {rank}, {found.name}") for found in here]
    everyone: list = [None] * size
    dist.all_gather_object(everyone, (here, receptions, sorted(took)[len(took) // 2]))
    group.close()
    slowest = 1e3 * max(seconds for *_, seconds in everyone)
    text = f"{_SHARD * 4 / 2**20:.0f} MiB from each rank to all: {slowest:.0f} ms (median of {_EXCHANGES})"
    exchange = Finding("network", "exchange", "ok", text)
    found = [one for own in (0, 1) for report in everyone for one in report[own]]
    return [*_rule(config), *found, exchange] if rank == 0 else []


def _rule(config: LossyConfig) -> list[Finding]:
    """Say what the rule of rates needs of the network and of the hosts."""
    if config.transport == "stream":
        return []
    needs = {
        "shared": "needs clocks of all hosts that agree to 50 ms (NTP)",
        "dedicated": "for a link of this training's own: others on it would get little, shared leaves them their part",
        "fixed": "for a network that carries nothing else",
    }
    rule = config.udp_rate_rule[0]
    return [Finding("network", "rates", "ok", f"--udp-rate {rule}: {needs[rule]}")]
