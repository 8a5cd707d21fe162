"""The rows of the matrix: by name, how many ranks, settings of the trainer, and what is lossy."""

from __future__ import annotations

OVER = dict(overlap_grad_reduce=True, overlap_param_gather=True, ddp_bucket_size=5000)
LOST = dict(p_grad=0.3, p_param=0.3, loss_unit="packet", packet_bytes=256)
RULES = ("renormalize", "renormalize-remote", "previous", "zero", "error-feedback")

ROWS: dict[str, tuple[int, dict, dict]] = {"base": (2, {}, {}), "base-overlap": (2, OVER, {})}
for rule in RULES:
    for unit in ("shard", "packet", "bucket") if rule != "error-feedback" else ("packet",):
        for overlap in (False, True):
            lossy = {**LOST, "grad_recovery": rule, "loss_unit": unit}
            ROWS[f"{rule}-{unit}{'-overlap' * overlap}"] = (2, OVER if overlap else {}, lossy)
    ROWS[f"{rule}-pieces-overlap"] = (2, OVER, {**LOST, "grad_recovery": rule, "transport": "pieces"})
    ROWS[f"{rule}-bf16-overlap"] = (2, {**OVER, "bf16": True}, {**LOST, "grad_recovery": rule})
    drawn = {} if rule == "error-feedback" else dict(p_grad=0.3, p_param=0.3)
    udp = dict(transport="udp", loss_unit="packet", packet_bytes=256, udp_interface="lo", grad_recovery=rule)
    ROWS[f"{rule}-udp-overlap"] = (2, OVER, {**drawn, **udp})
ROWS["udp"] = (2, {}, {**udp, "grad_recovery": "renormalize"})
ROWS["lead-overlap"] = (2, OVER, {**LOST, "param_send": "compensated"})
ROWS["lead-bf16-overlap"] = (2, {**OVER, "bf16": True}, {**LOST, "param_send": "compensated"})
ROWS["lead-udp-overlap"] = (2, OVER, {**udp, "grad_recovery": "renormalize", "param_send": "compensated"})
for kind in ("element-quantile", "packet-mean"):
    lossy = dict(grad_recovery="zero", grad_priority=f"{kind}:0.3")
    ROWS[f"{kind}-overlap"] = (2, OVER, {**LOST, **lossy})
ROWS["param-priority-udp-overlap"] = (
    2,
    OVER,
    {**udp, "grad_recovery": "renormalize", "param_priority": "change:0.2"},
)
ROWS["instances-overlap"] = (
    4,
    {**OVER, "num_distributed_optimizer_instances": 2},
    {**LOST, "grad_recovery": "previous"},
)
REPLICAS = dict(use_distributed_optimizer=False, overlap_grad_reduce=True, ddp_bucket_size=5000)
ROWS["replicas-errors"] = (
    2,
    REPLICAS,
    dict(grad_error="bit-flip", grad_error_rate=1.0, replica_check="repair", param_sync_interval=2),
)
ROWS["replicas-gaussian"] = (
    2,
    REPLICAS,
    dict(
        grad_error="gaussian",
        grad_error_relative=0.1,
        param_sync_interval=2,
        param_sync_overlap=True,
        param_sync_rule="snr",
    ),
)
ROWS["replicas-lossy"] = (2, REPLICAS, {**LOST, "p_param": 0.0, "param_sync_interval": 2})
STAGES = dict(pipeline_model_parallel_size=2)
ROWS["base-stages"] = (2, STAGES, {})
ROWS["stages"] = (2, STAGES, dict(p_act=0.3, act_retransmit="off", p_act_grad=0.3, act_packet_bytes=256))
ROWS["stages-masked-bf16"] = (
    2,
    {**STAGES, "bf16": True},
    dict(p_act=0.3, act_retransmit="off", p_act_grad=0.3, act_packet_bytes=256, act_zero_fill_gradient="masked"),
)
ROWS["stages-udp"] = (
    2,
    STAGES,
    dict(
        p_act=0.3, act_packet_bytes=256, act_transport="udp", act_retransmit="off", transport="udp", udp_interface="lo"
    ),
)
TWO = {"islands": 2, "sync_method": "parameters"}
LATE = {**TWO, "sync_fraction": 0.25, "sync_delay": 3}
P_SYNC = {"p_sync": 0.3, "loss_unit": "packet", "packet_bytes": 256}
ROWS["islands"] = (2, {}, TWO)
ROWS["islands-smith"] = (2, {}, {**LATE, **P_SYNC, "sync_fraction": 0.5, "delay_correction": "smith"})
ROWS["islands-bf16"] = (2, {"bf16": True}, {**LATE, **P_SYNC, "sync_dtype": "bf16"})
ROWS["islands-diloco"] = (2, {}, {"islands": 2, "sync_interval": 2, "sync_method": "diloco", "p_sync": 0.3})
ROWS["islands-ema"] = (2, {"bf16": True}, {**LATE, "delay_correction": "ema"})
ROWS["islands-inside"] = (4, {}, {**LATE, **P_SYNC, "p_grad": 0.3, "p_param": 0.3})
ROWS["islands-udp"] = (2, {}, {**LATE, **P_SYNC, "p_sync": 0.2, "transport": "udp", "udp_interface": "lo"})
LITTLE = {"udp_memory": 2**16, "udp_eager_bytes": 2**12}
for name in ("renormalize-udp-overlap", "error-feedback-udp-overlap", "lead-udp-overlap", "udp"):
    ranks, trainer, lossy = ROWS[name]
    ROWS[f"{name}-windows"] = (ranks, trainer, {**lossy, **LITTLE})
