"""Refusals of priority: packets that are delivered whatever is lost (docs/smart.md)."""

from __future__ import annotations

from ...config import LossyConfig
from ...config.refusal import Section
from ...config.refusals.row import NO_PARAMETERS, ONE_EMBEDDING, Row, above
from ...config.transport import UDP_REPORT_BYTES

_TOLD_LATE = "is told late what was lost, when "
_WITH_UDP = "{config.grad_recovery} with --transport udp"


def _over_udp(config: LossyConfig) -> bool:
    """Whether senders decide what becomes of gradients that a network loses."""
    return config.transport == "udp" and config.at_sender


def _changed_over_udp(config: LossyConfig) -> bool:
    return config.transport == "udp" and config.param_priority != "none"


def _is_told(config: LossyConfig) -> bool:
    """Whether senders learn which of their gradients a network lost, and send them again."""
    return config.transport == "udp" and config.grad_recovery == "error-feedback"


PRIORITY = Section(
    "priority",
    "Priority and error feedback",
    (
        Row(
            flag="--grad-priority",
            beside="--loss-unit shard or bucket, --grad-recovery error-feedback",
            why="needs --loss-unit packet, or --grad-priority none",
            when=lambda config, facts: (
                config.grad_priority != "none"
                and config.loss_unit != "packet"
                and config.grad_recovery == "error-feedback"
            ),
        ),
        Row(
            flag="--grad-priority",
            beside="--loss-unit shard or bucket",
            why="needs --loss-unit packet",
            when=lambda config, facts: config.grad_priority != "none" and config.loss_unit != "packet",
        ),
        Row(
            flag="--grad-priority",
            beside="--grad-recovery previous",
            value="{config.grad_priority} with --grad-recovery previous",
            why="cannot be: what a packet is replaced with would depend on what it was; use error-feedback or zero",
            when=lambda config, facts: config.grad_priority != "none" and config.grad_recovery == "previous",
        ),
        Row(
            flag="--param-priority",
            beside="--loss-unit shard or bucket",
            why="needs --loss-unit packet",
            when=lambda config, facts: config.param_priority != "none" and config.loss_unit != "packet",
        ),
        Row(
            flag="--param-priority",
            beside="--param-send compensated",
            value="{config.param_priority} with --param-send {config.param_send}",
            why="cannot be: a packet that always arrives is not late, and a lead would put it ahead",
            when=lambda config, facts: config.param_priority != "none" and not config.sends_weights(),
        ),
        Row(
            flag="--transport",
            beside="lost gradients and --grad-priority or error-feedback",
            value="udp with gradients lost by drawing, and --grad-priority or error-feedback",
            why="cannot be: what a channel draws beside the network nobody reports to its sender; omit the loss rate",
            when=lambda config, facts: _over_udp(config) and not config.phase("grad").lossless,
        ),
        Row(
            flag="--packet-bytes",
            beside="--transport udp and --grad-priority or error-feedback",
            why=f"must be at least {UDP_REPORT_BYTES} with --grad-priority over UDP",
            when=lambda config, facts: _over_udp(config) and config.packet_range[0] < UDP_REPORT_BYTES,
        ),
        Row(
            flag="--param-priority",
            beside="--transport udp and lost parameters",
            value="{config.param_priority} over UDP with parameters lost by drawing",
            why="cannot be: what a channel draws beside the network nobody sends again; omit the loss rate",
            when=lambda config, facts: _changed_over_udp(config) and not config.phase("param").lossless,
        ),
        Row(
            flag="--packet-bytes",
            beside="--transport udp and --param-priority",
            why=f"must be at least {UDP_REPORT_BYTES} with --param-priority over UDP",
            when=lambda config, facts: _changed_over_udp(config) and config.packet_range[0] < UDP_REPORT_BYTES,
        ),
        Row(
            flag="--param-priority",
            beside="real ranks without --transport udp",
            value="{config.param_priority} with --transport {config.transport}",
            why="needs virtual workers or --transport udp: receivers would have to be told what each owner chose",
            when=lambda config, facts: (
                facts.virtual is False
                and not config.inert
                and config.param_priority != "none"
                and config.transport != "udp"
            ),
        ),
        Row(
            flag="--param-priority",
            beside="LossyWorkers",
            why="must be none: workers of one process exchange in memory",
            when=lambda config, facts: config.param_priority != "none" and facts.in_memory,
        ),
        Row(
            flag="--grad-priority",
            beside="real ranks and --grad-recovery renormalize, renormalize-remote",
            value="{config.grad_priority} with --grad-recovery {config.grad_recovery}",
            why="needs virtual workers: an owner would have to be told what each sender chose; use error-feedback or zero",
            when=lambda config, facts: (
                facts.virtual is False
                and not config.inert
                and config.grad_priority != "none"
                and config.grad_recovery.startswith("renormalize")
            ),
        ),
        Row(
            flag=("--param-priority",),
            beside="lost gradients and no distributed optimizer",
            why=NO_PARAMETERS,
            when=lambda config, facts: facts.distributed_optimizer is False and not config.untouched("grad"),
        ),
        Row(
            flag="--grad-recovery",
            beside="--transport udp and --calculate-per-token-loss",
            value=_WITH_UDP,
            why=f"{_TOLD_LATE}--calculate-per-token-loss has scaled it; omit that flag",
            when=lambda config, facts: _is_told(config) and facts.per_token_loss,
        ),
        Row(
            flag="--grad-recovery",
            beside="--transport udp and an embedding on two stages",
            value=_WITH_UDP,
            why=f"{_TOLD_LATE}two stages have added up the gradients of the embedding; {ONE_EMBEDDING}",
            when=lambda config, facts: _is_told(config) and above(facts.pipeline, 1) and facts.copies_embedding,
        ),
        Row(
            flag="--udp-deadline",
            beside="--grad-recovery error-feedback and tensor parallelism",
            why="would keep other residuals on each tensor-parallel rank, with --grad-recovery error-feedback; must be off",
            when=lambda config, facts: (
                _is_told(config) and above(facts.tensor, 1) and config.udp_deadline_seconds is not None
            ),
        ),
    ),
)
