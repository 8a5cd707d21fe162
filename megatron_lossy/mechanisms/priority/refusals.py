"""Refusals of priority: packets that are delivered whatever is lost (docs/smart.md)."""

from __future__ import annotations

from ...config import LossyConfig
from ...config.refusal import Section
from ...config.refusals.core import ONE_EMBEDDING, above
from ...config.transport import UDP_REPORT_BYTES

_LATE_REPORT = "gets the report of losses late, when "
_WITH_UDP = "{config.grad_recovery} with --transport udp"


def _over_udp(config: LossyConfig) -> bool:
    """Return whether senders decide what becomes of gradients that a network loses."""
    return config.transport == "udp" and config.at_sender


def _sends_again(config: LossyConfig) -> bool:
    """Return whether senders learn which of their gradients a network lost, and send them again."""
    return config.transport == "udp" and config.grad_recovery == "error-feedback"


PRIORITY = Section(
    "priority",
    "Priority and error feedback",
    "--grad-priority | --loss-unit shard or bucket, --grad-recovery error-feedback | "
    "needs --loss-unit packet, or --grad-priority none",
    lambda c, f: c.grad_priority != "none" and c.loss_unit != "packet" and c.grad_recovery == "error-feedback",
    "--grad-priority | --loss-unit shard or bucket | needs --loss-unit packet",
    lambda c, f: c.grad_priority != "none" and c.loss_unit != "packet",
    "--grad-priority = {config.grad_priority} with --grad-recovery previous | --grad-recovery previous | "
    "cannot be: what a packet is replaced with would depend on what it was; use error-feedback or zero",
    lambda c, f: c.grad_priority != "none" and c.grad_recovery == "previous",
    "--transport = udp with gradients lost by drawing, and --grad-priority or "
    "error-feedback | lost gradients and --grad-priority or error-feedback | "
    "cannot be: losses drawn in addition to the network's are not reported to senders; omit the loss rate",
    lambda c, f: _over_udp(c) and not c.phase("grad").lossless,
    "--transport = stream with --grad-priority or error-feedback | --grad-priority or error-feedback | "
    "cannot be: senders get no report of lost units; choose udp",
    lambda c, f: c.transport == "stream" and c.at_sender,
    "--packet-bytes | --transport udp and --grad-priority or error-feedback | "
    f"must be at least {UDP_REPORT_BYTES} with --grad-priority over UDP",
    lambda c, f: _over_udp(c) and c.packet_range[0] < UDP_REPORT_BYTES,
    "--grad-priority = {config.grad_priority} with --grad-recovery {config.grad_recovery} "
    "| real ranks and --grad-recovery renormalize, renormalize-remote | "
    "needs virtual workers: real owners do not get the choice of each sender; use error-feedback or zero",
    lambda c, f: (
        f.virtual is False and not c.inert and c.grad_priority != "none" and c.grad_recovery.startswith("renormalize")
    ),
    f"--grad-recovery = {_WITH_UDP} | --transport udp and --calculate-per-token-loss | "
    f"{_LATE_REPORT}--calculate-per-token-loss has scaled it; omit that flag",
    lambda c, f: f.per_token_loss and _sends_again(c),
    f"--grad-recovery = {_WITH_UDP} | --transport udp and an embedding on two stages | "
    f"{_LATE_REPORT}two stages have added up the gradients of the embedding; {ONE_EMBEDDING}",
    lambda c, f: f.copies_embedding and _sends_again(c) and above(f.pipeline, 1),
    "--udp-deadline | --grad-recovery error-feedback and tensor parallelism | "
    "would keep other residuals on each tensor-parallel rank, with --grad-recovery error-feedback; must be off",
    lambda c, f: _sends_again(c) and above(f.tensor, 1) and c.udp_deadline_seconds is not None,
)
