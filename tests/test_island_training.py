"""Islands under ``megatron.training``, where no Megatron-LM is needed to see it: samples and the mean's checkpoint."""

from types import SimpleNamespace

import pytest

from megatron_lossy.config import LossyConfig
from megatron_lossy.hooks.megatron_training import _weights_alone
from megatron_lossy.mechanisms.islands import megatron_training as island_training
from megatron_lossy.mechanisms.islands.ranks import RankIslands

pytestmark = pytest.mark.shows("samples and the mean's checkpoint under `megatron.training`")


def island(number, islands=3):
    return SimpleNamespace(world=SimpleNamespace(island=number, islands=islands))


def test_all_islands_together_read_as_many_times_the_samples_of_one():
    """``None`` is of a split that is not read."""
    assert island_training.number_of_samples(island(1), lambda: (100, None, 7)) == (300, None, 21)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_the_first_island_writes_the_mean_and_no_optimizer(number):
    args = SimpleNamespace(save="/run/island_1", no_save_optim=None, no_save_rng=False, async_save=True)
    before = dict(vars(args))
    flags = LossyConfig(islands=3, sync_method="parameters", save_consensus=True)
    folder, writes = RankIslands(flags, SimpleNamespace(job=(number, 3), island=number, launched_rank=0)).saved_beside(
        args.save
    )
    assert writes is (number == 0)
    with pytest.raises(KeyError), _weights_alone(args, folder):
        assert vars(args) == {
            "save": "/run/consensus", "no_save_optim": True, "no_save_rng": True, "async_save": False,
        }  # fmt: skip
        raise KeyError("a save that fails")
    assert vars(args) == before
