"""The rows of the matrix: training runs of a few thousand weights, one for each way in which a step can lose something.

A row is a run of our trainer, so that it can be made wherever that trains: on a real device by ``doctor --calibrate``, on a
pretended one by ``tests/impostor``.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import combinations, product
from typing import Any

from ...base.errors import UsageError
from ...config import LossyConfig

#: Iterations of a row, and those whose work is counted: the first ones allocate, compile and fill what later ones use.
ITERATIONS, FIRST, LAST = 7, 3, 6
STEPS = LAST - FIRST + 1

#: Settings of the trainer, but the data. Buckets are small, so that there are several.
_TINY = dict(
    num_layers=2,
    hidden_size=64,
    ffn_hidden_size=64,
    num_attention_heads=4,
    num_query_groups=2,
    seq_length=32,
    micro_batch_size=1,
    global_batch_size=8,
    train_iters=ITERATIONS,
    lr=1e-2,
    lr_warmup_iters=2,
    hidden_dropout=0.0,
    eval_iters=0,
    log_interval=ITERATIONS,
    distributed_timeout_minutes=2,
)
_OVERLAP = dict(overlap_grad_reduce=True, overlap_param_gather=True, ddp_bucket_size=5000)
_REPLICAS = dict(use_distributed_optimizer=False, overlap_grad_reduce=True, ddp_bucket_size=5000)
_STAGES = dict(pipeline_model_parallel_size=2)

RULES = ("renormalize", "renormalize-remote", "previous", "zero", "error-feedback")
UNITS = ("shard", "packet", "bucket")
WIRES = ("torch", "pieces", "udp")
_PACKETS = dict(loss_unit="packet", packet_bytes=256)
_LOST = dict(p_grad=0.3, p_param=0.3, **_PACKETS)
_UDP = dict(transport="udp", udp_interface="lo", **_PACKETS)
_ACT = dict(p_act=0.3, p_act_grad=0.3, act_fec=("off",), packet_bytes=256)
_AT_ONCE = dict(islands=2, sync_method="parameters")
_LATE = dict(_AT_ONCE, sync_fraction=0.25, sync_delay=3)
_LATE_LOST = dict(_LATE, p_sync=0.3, **_PACKETS)


@dataclass(frozen=True)
class Row:
    """A run. ``trainer``: settings besides those of all rows; ``lossy``: what is lost, nothing in the unhooked step."""

    name: str
    trainer: dict[str, Any] = field(default_factory=dict)
    lossy: dict[str, Any] = field(default_factory=dict)
    ranks: int = 2

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of :class:`~megatron_lossy.lab.train.config.TrainConfig`, but the data."""
        return {**_TINY, **self.trainer}

    @property
    def unhooked(self) -> Row:
        """The same run without loss, in which nothing of Megatron is hooked. Of islands on ranks: one of them alone."""
        islands = min(self.lossy.get("islands", 1), self.ranks)
        trainer = {**self.trainer, **({"global_batch_size": 8 // islands} if islands > 1 else {})}
        names = [f"{name}={value}" for name, value in sorted(trainer.items())]
        ranks = self.ranks // islands
        return Row(" ".join(["unhooked", *names, f"ranks={ranks}"]), trainer, {}, ranks)


def _cases() -> Iterator[tuple[str, str, str, str]]:
    """Yield each rule, unit, wire and way to send parameters that go together."""
    for rule, unit, wire, send in product(RULES, UNITS, WIRES, ("plain", "compensated")):
        if send == "compensated" and rule not in ("renormalize", "error-feedback"):
            continue  # gradients and parameters have nothing to do with each other but in error feedback
        try:
            LossyConfig(**_lossy(rule, unit, wire, send))
        except UsageError:
            continue
        yield rule, unit, wire, send


def _lossy(rule: str, unit: str, wire: str, send: str) -> dict[str, Any]:
    lossy: dict[str, Any] = dict(grad_recovery=rule, loss_unit=unit, transport=wire, param_send=send)
    if unit == "packet":
        lossy["packet_bytes"] = 256
    if wire == "udp":
        lossy["udp_interface"] = "lo"
    if wire != "udp" or rule != "error-feedback":  # over UDP its senders learn of real losses alone
        lossy |= {"p_grad": 0.3, "p_param": 0.3}
    return lossy


def _exchanges() -> Iterator[Row]:
    """Yield a row for each case, with or without overlap, in fp32 or bf16.

    It is the one with most pairs of settings that no row before has; of several the one of which there are fewest so far.
    """
    known: set[tuple[Any, Any]] = set()
    times: Counter[tuple[bool, bool]] = Counter()
    for case in _cases():
        pairs = {
            (overlap, bf16): set(combinations((*case, f"overlap {overlap}", f"bf16 {bf16}"), 2))
            for overlap, bf16 in ((True, False), (False, True), (True, True), (False, False))
        }
        overlap, bf16 = max(pairs, key=lambda one: (len(pairs[one] - known), -times[one]))
        times[overlap, bf16] += 1
        known |= pairs[overlap, bf16]
        rule, unit, wire, send = case
        parts = [rule, unit, *[wire] * (wire != "torch"), *["lead"] * (send != "plain")]
        parts += ["overlap"] * overlap + ["bf16"] * bf16
        yield Row("-".join(parts), {**(_OVERLAP if overlap else {}), **({"bf16": True} if bf16 else {})}, _lossy(*case))


def _priority() -> Iterator[Row]:
    for kind in ("element-quantile", "packet-mean"):
        lossy = {**_LOST, "grad_recovery": "zero", "grad_priority": f"{kind}:0.3"}
        yield Row(f"{kind}-overlap", _OVERLAP, lossy)
        yield Row(f"{kind}-udp-overlap", _OVERLAP, {**lossy, **_UDP, "p_grad": 0.0, "p_param": 0.0})


def _replicas() -> Iterator[Row]:
    flips = dict(grad_error="bit-flip", grad_error_rate=1.0, replica_check="repair", param_sync_interval=2)
    yield Row("replicas-flips", _REPLICAS, flips)
    noise = dict(grad_error="gaussian:0.1rms", param_sync_interval=2)
    yield Row("replicas-noise", _REPLICAS, noise)
    yield Row("replicas-noise-under-way", _REPLICAS, {**noise, "param_sync_overlap": True, "param_sync_rule": "snr"})
    yield Row("errors-in-the-reduce", _OVERLAP, {**_LOST, "grad_error": "gaussian:0.01", "grad_error_at": "reduce"})


def _stages() -> Iterator[Row]:
    for bf16 in (False, True):
        yield Row("stages" + "-bf16" * bf16, {**_STAGES, **({"bf16": True} if bf16 else {})}, _ACT)
    yield Row("stages-and-exchanges", _STAGES, {**_ACT, **_LOST}, ranks=4)
    yield Row("stages-asynchronous", _STAGES, {"async_pipeline": True})
    yield Row("stages-asynchronous-lossy", _STAGES, {"async_pipeline": True, **_LOST}, ranks=4)


def _islands() -> Iterator[Row]:
    yield Row("islands", {}, _AT_ONCE)
    yield Row("islands-late", {}, _LATE_LOST)
    yield Row("islands-late-bf16", {"bf16": True}, {**_LATE_LOST, "sync_dtype": "bf16"})
    yield Row("islands-smith", {}, {**_LATE_LOST, "sync_fraction": 0.5, "delay_correction": "smith"})
    yield Row("islands-ema", {"bf16": True}, {**_LATE, "delay_correction": "ema"})
    yield Row("islands-diloco", {}, {"islands": 2, "sync_interval": 2, "sync_method": "diloco", "p_sync": 0.3})
    yield Row("islands-inside", {}, {**_LATE_LOST, "p_grad": 0.3, "p_param": 0.3}, ranks=4)
    yield Row("islands-udp", {}, {**_LATE_LOST, "p_sync": 0.2, "transport": "udp", "udp_interface": "lo"})


def _virtual() -> Iterator[Row]:
    """Yield workers of a model that take turns in one process."""

    def row(name: str, lossy: dict[str, Any], **trainer: Any) -> Row:
        return Row(f"virtual-{name}", {"virtual_workers": 4, **trainer}, lossy, ranks=1)

    for rule in RULES:
        yield row(rule, {**_LOST, "grad_recovery": rule})
    yield row("lead-bf16", {**_LOST, "param_send": "compensated"}, bf16=True)
    codes = dict(grad_wire="int8", param_wire="int8", transport="pieces", param_send="compensated")
    yield row("codes", {**_LOST, **codes})
    yield row("priority", {**_LOST, "grad_recovery": "zero", "grad_priority": "element-quantile:0.3"})
    yield row("boundaries", {**_ACT, "virtual_boundaries": (1,)})
    yield row("asynchronous", {**_LOST, "async_pipeline": True, "virtual_stages": 2})
    yield row("islands", _LATE_LOST)


def _instances() -> Iterator[Row]:
    for wire in ("torch", "pieces"):
        trainer = {**_OVERLAP, "num_distributed_optimizer_instances": 2}
        lossy = {**_LOST, "grad_recovery": "previous", "transport": wire}
        yield Row(f"instances-{wire}-overlap", trainer, lossy, ranks=4)


def _sites() -> Iterator[Row]:
    lossy = {**_LOST, "sites": 2}
    yield Row("sites", {}, {**lossy, "grad_recovery": "previous"}, ranks=4)
    yield Row("sites-overlap", _OVERLAP, lossy, ranks=4)
    codes = dict(grad_wire="int8", param_wire="int8", transport="pieces")
    yield Row("sites-codes-overlap-bf16", {**_OVERLAP, "bf16": True}, {**lossy, **codes}, ranks=4)
    yield Row("sites-udp-overlap", _OVERLAP, {**_UDP, "sites": 2}, ranks=4)


@functools.cache
def rows() -> dict[str, Row]:
    """Return all rows by name."""
    kinds = (_exchanges, _priority, _replicas, _stages, _islands, _virtual, _instances, _sites)
    return {row.name: row for kind in kinds for row in kind()}


#: Rows of one rank, for which one device is enough.
VIRTUAL = tuple(row.name for row in _virtual())

#: Rows that between them pass most lines that touch the device: those of ``make test-all`` and of ``doctor --calibrate``.
FEW = (
    "renormalize-shard-overlap",
    "renormalize-packet-bf16",
    "renormalize-packet-lead-overlap",
    "renormalize-remote-packet-pieces-bf16",
    "previous-packet-overlap-bf16",
    "zero-bucket-bf16",
    "error-feedback-packet",
    "zero-packet-udp-overlap",
    "element-quantile-overlap",
    "replicas-flips",
    "stages",
    "islands-late",
)
