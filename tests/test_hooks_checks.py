"""What the hooks refuse before they change anything: versions of Megatron, and settings that cannot be right."""

import pytest

from megatron_lossy.config import LossyConfig
from megatron_lossy.errors import UsageError
from megatron_lossy.hooks import check_version
from megatron_lossy.hooks.checks import check_arguments


@pytest.mark.parametrize("version", ["0.10.0", "0.21.0", "1.0", "unknown"])
def test_unsupported_versions_are_named(version):
    with pytest.raises(UsageError, match=version):
        check_version(version)
    check_version("0.16.1")


def test_previous_adds_no_sums_over_different_numbers_of_tokens():
    arguments = Arguments()
    arguments.calculate_per_token_loss = True
    check_arguments(arguments, LossyConfig(p_grad=0.1))
    check_arguments(arguments, LossyConfig(p_param=0.1, grad_recovery="previous"))
    with pytest.raises(UsageError, match="--grad-recovery previous: mixes gradients .* --calculate-per-token-loss"):
        check_arguments(arguments, LossyConfig(p_grad=0.1, grad_recovery="previous"))


class Arguments:
    use_distributed_optimizer = True
    optimizer = "adam"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("use_distributed_optimizer", False),
        ("use_megatron_fsdp", True),
        ("optimizer", "dist_muon"),
        ("optimizer_cuda_graph", True),
        ("reuse_grad_buf_for_mxfp8_param_ag", True),
        ("cuda_graph_scope", ["full_iteration"]),
        ("fp8_param_gather", True),
        ("check_weight_hash_across_dp_replicas_interval", 10),
    ],
)
def test_settings_that_cannot_be_right_are_refused(name, value):
    arguments = Arguments()
    check_arguments(arguments, LossyConfig(p_param=0.1))
    setattr(arguments, name, value)
    check_arguments(arguments, LossyConfig())  # without loss nobody minds
    with pytest.raises(UsageError, match="--" + name.replace("_", "-")):
        check_arguments(arguments, LossyConfig(p_param=0.1))
