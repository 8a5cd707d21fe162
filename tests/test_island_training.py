"""Islands under ``megatron.training``, where no Megatron-LM is needed to see it: samples and the mean's checkpoint."""

from types import SimpleNamespace

import pytest

from megatron_lossy.mechanisms.islands import megatron_training as island_training

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
    with pytest.raises(KeyError), island_training.consensus_saved(island(number), args) as writes:
        assert writes is (number == 0)
        assert vars(args) == {
            "save": "/run/consensus", "no_save_optim": True, "no_save_rng": True, "async_save": False,
        }  # fmt: skip
        raise KeyError("a save that fails")
    assert vars(args) == before
