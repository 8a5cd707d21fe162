"""Flags of the asynchronous pipeline: what they are together, and what is refused."""

import pytest

from megatron_lossy import hooks, plugin
from megatron_lossy.config import LossyConfig, given
from megatron_lossy.config.refusal import check_refusals
from megatron_lossy.errors import UsageError
from megatron_lossy.train.config import TrainConfig
from megatron_lossy.train.facts import of_trainer
from tests.trainer import TINY

pytestmark = pytest.mark.shows("flags and models that an asynchronous pipeline refuses", device=False)

STAGES = {"async_pipeline": True, "virtual_stages": 2}


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ({"virtual_stages": 2}, "--virtual-stages 2: needs --async-pipeline"),
        ({"weight_stashing": "off"}, "--weight-stashing off: needs --async-pipeline"),
        ({**STAGES, "virtual_stages": 0}, "--virtual-stages 0: must be at least 1"),
        ({**STAGES, "weight_stashing": "half"}, "--weight-stashing half: must be one of on, off"),
        ({**STAGES, "weight_stashing": "off"}, "--weight-stashing off: needs real stages"),
    ],
)
def test_flags_that_are_refused(flags, line):
    with pytest.raises(UsageError) as error:
        LossyConfig(**flags)
    assert str(error.value).startswith(line)


@pytest.mark.parametrize(
    ("settings", "flags", "line"),
    [
        ({"virtual_workers": None}, STAGES, "--virtual-stages 2: needs --virtual-workers"),
        ({}, {"async_pipeline": True}, "--async-pipeline on: needs --virtual-stages with --virtual-workers"),
        ({"use_distributed_optimizer": False}, STAGES, "--virtual-stages 2: needs --use-distributed-optimizer"),
        ({}, {**STAGES, "virtual_stages": 3}, "--virtual-stages 3: must divide the 4 layers"),
        ({}, {**STAGES, "virtual_stages": 8}, "--virtual-stages 8: must divide the 4 layers"),
        (
            {"share_embeddings_and_output_weights": True},
            STAGES,
            "--share-embeddings-and-output-weights on: cannot be with --async-pipeline",
        ),
        (
            {"overlap_grad_reduce": True, "overlap_param_gather": True},
            STAGES,
            "--overlap-param-gather on: cannot be with --async-pipeline",
        ),
    ],
)
def test_models_that_are_refused(settings, flags, line):
    config = TrainConfig(**TINY | {"num_layers": 4, "virtual_workers": 2, "data": "stdlib"} | settings)
    with pytest.raises(UsageError) as error:
        check_refusals(LossyConfig(**flags), of_trainer(config, 1))
    assert str(error.value).startswith(line)


def test_without_the_flag_nothing_changes():
    off = LossyConfig()
    assert off.lossless and off.inert and not given(off)
    staged = LossyConfig(**STAGES)
    assert not staged.lossless and given(staged) == STAGES
    assert staged.describe() == "asynchronous pipeline of 2 virtual stages"
    assert "asynchronous pipeline" in LossyConfig(**STAGES, p_grad=0.1).describe()


def test_megatrons_own_loop_is_refused():
    with pytest.raises(UsageError, match=r"--async-pipeline on: needs python -m megatron_lossy\.train"):
        plugin.install(LossyConfig(**STAGES), None)
    with pytest.raises(UsageError, match=r"--async-pipeline on: needs python -m megatron_lossy\.train"):
        hooks.install(LossyConfig(async_pipeline=True))
