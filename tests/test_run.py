"""Shared parts of real and virtual runs: actions after an update, observers, saved replicas."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from megatron_lossy.base.errors import UsageError
from megatron_lossy.config import LossyConfig
from megatron_lossy.lab.virtual import VirtualCluster
from megatron_lossy.run.base import make_observers
from megatron_lossy.run.monitor import Observer, load_states, states_of
from megatron_lossy.run.saved import REPLICAS
from tests.contract import made
from tests.ranks import RankFailed, run_ranks
from tests.test_hooks_owner_weights import CONFIG, save_and_go_on
from tests.test_hooks_owner_weights import resume as resume_rank
from tests.tiny_gpt import TinyGPT, build

pytestmark = pytest.mark.shows("what real and virtual runs share: observers, updates, saved replicas")

OVERLAPPED = TinyGPT(overlap_grad_reduce=True, overlap_param_gather=True, bucket_size=3000)
FP16 = TinyGPT(dtype="fp16")


class Witness(Observer):
    """Writes down the calls that it gets."""

    def __init__(self) -> None:
        self.told = []

    def before_update(self, iteration, look):
        self.told.append(("before", iteration, len(look())))

    def observe(self, delivery):
        self.told.append((delivery.exchange.phase, delivery.exchange.step))

    def finish_iteration(self, iteration, successful, look):
        self.told.append(("finished", iteration, successful, len(look())))


def witnessed(rank, tiny, config, workers=None):
    """Four steps, the second of which overflows: return the calls of observers and ``after_update``."""
    witness, updates = Witness(), []
    with made(tiny, config, workers) as (model, lossy):
        lossy.observers.append(witness)
        lossy.after_update.append(lambda run: updates.append((run.iteration, run.update, len(witness.told))))
        for step in range(4):
            model.step(step, overflow_on=0 if step == 1 else None)
    return witness.told, updates


@pytest.mark.parametrize("kind", ["real", "virtual"])
def test_an_update_is_followed_by_what_replicas_do_beside_it(kind):
    """Once per successful update, before the observers; a skipped one is reported as such and followed by nothing."""
    config = LossyConfig(p_grad=0.4, p_param=0.4)
    results = run_ranks(witnessed, 2, FP16, config) if kind == "real" else run_ranks(witnessed, 1, FP16, config, 2)
    expected = []
    for step in range(4):
        if step != 1:
            expected.append(("before", step, 1))
        expected.append(("grad", step))
        if step != 1:
            expected.append(("param", step))
        expected.append(("finished", step, step != 1, 1))
    for told, updates in results:
        if kind == "virtual":  # whose optimizer says only afterwards that it skipped the update
            told.remove(("before", 1, 1))
        assert told == expected
        assert [(iteration, update) for iteration, update, _ in updates] == [(0, 0), (2, 2), (3, 3)]


def test_overlapped_gathers_are_observed_with_their_update():
    told, _ = run_ranks(witnessed, 2, dataclasses.replace(OVERLAPPED, dtype="fp16"), LossyConfig(p_param=0.4))[0]
    assert [what for what in told if what[0] == "param"] == [("param", step) for step in (0, 2, 3)]


def test_replicas_of_another_format_are_refused(tmp_path):
    run_ranks(save_and_go_on, 2, OVERLAPPED, CONFIG, str(tmp_path))
    file = tmp_path / REPLICAS / "rank_00001.pt"
    torch.save(torch.load(file, weights_only=True) | {"format": 99}, file)
    with pytest.raises(RankFailed, match="it has format 99; this version reads 5"):
        run_ranks(resume_rank, 2, OVERLAPPED, CONFIG, str(tmp_path), None)


def test_a_run_without_loss_has_no_observers():
    assert make_observers(SimpleNamespace(config=LossyConfig())) == []
    assert len(make_observers(SimpleNamespace(config=LossyConfig(p_grad=0.1, drift_interval=3)))) == 2


def test_a_trace_that_cannot_be_read_is_named_where_replicas_are_saved(tmp_path):
    config = LossyConfig(loss_model=("trace",), trace=str(tmp_path / "none.npz"), save_replicas=True)
    with pytest.raises(UsageError, match="^--trace .*none.npz: cannot be read: No such file or directory$"):
        VirtualCluster(config, 2)


@pytest.mark.parametrize(
    "flags",
    [
        {"grad_recovery": "error-feedback", "loss_unit": "packet", "packet_bytes": 256},
        {"grad_recovery": "previous"},
        {"param_send": "compensated:0.7,0.5"},
    ],
    ids=lambda flags: flags.get("grad_recovery", "compensated"),
)
def test_a_run_that_loads_a_checkpoint_keeps_nothing_of_what_it_did_before(flags):
    [(first, later, again)] = run_ranks(kept, 1, LossyConfig(p_grad=0.4, p_param=0.4, **flags))
    assert again == first != later


def kept(rank, config):
    """Return the state of the rules of a virtual run: at first, after three steps, and when a checkpoint was loaded."""
    cluster = VirtualCluster(config, 2)
    model = build(OVERLAPPED, cluster)
    told = [repr([group.state_dict() for group in cluster.groups])]
    for step in range(3):
        model.step(step)
    told.append(repr([group.state_dict() for group in cluster.groups]))
    cluster.set_iteration(0)
    return *told, repr([group.state_dict() for group in cluster.groups])


class Counting(Observer):
    """An observer with a state."""

    count = 0

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


def test_a_saved_state_is_found_although_its_class_has_moved():
    counting, other = Counting(), Counting()
    counting.count = 3
    assert states_of([counting]) == {"tests.Counting": {"count": 3}}
    load_states([other], {"tests.Counting": {"count": 4}, "their.Counting": {"count": 5}})
    assert other.count == 4
