"""Loss that never happens is refused or said, on real ranks; and claims of loss fail where nothing is lost."""

import dataclasses
import types

import numpy as np
import pytest

from megatron_lossy import hooks
from megatron_lossy.base.errors import UsageError
from megatron_lossy.config import LossyConfig
from megatron_lossy.config.facts import Facts
from megatron_lossy.config.refusal import check_refusals
from megatron_lossy.hooks import seam
from megatron_lossy.hooks.exchanges import check_exchanged, check_registered, warn_of_lossless
from megatron_lossy.transport import BucketSpec, LossyGroup
from tests import contract, test_hooks_owner_weights, test_hooks_whole_step
from tests.ranks import RankFailed, logged, run_ranks
from tests.rules import assert_same
from tests.test_transport import group_in_memory
from tests.tiny_gpt import TinyGPT, build

pytestmark = pytest.mark.shows("loss that cannot happen is refused or said")

BOTH = LossyConfig(p_grad=0.4, p_param=0.4)
OVERLAPPED = TinyGPT(overlap_grad_reduce=True, overlap_param_gather=True, bucket_size=3000)


def steps(rank, how, tiny, config, world=None):
    """Two steps of a model to which ``how`` happened; returns what was logged."""
    told = logged("megatron_lossy")
    late = how == "hooked late"
    run = build(tiny) if late else None
    lossy = hooks.install(config)
    run = run or build(tiny)
    if how == "forgotten bucket":
        delattr(run.model[0].bucket_groups[0].buckets[0].grad_data, seam._ATTRIBUTE)
    for step in range(2):
        if step == 1 and how == "no gradients":
            run.transformer.finalize_model_grads_func = lambda *_, **__: None
        if step == 1 and how == "no gather":
            lossy.update = 17
        run.step(step)
    return told


@pytest.mark.parametrize(
    ("how", "error"),
    [
        ("hooked late", "UsageError: no model was wrapped .* call hooks.install.. before the model is wrapped"),
        ("forgotten bucket", r"UsageError: bucket \d+ .\d+ elements. of the optimizer is not known to the hooks"),
        ("no gradients", "RuntimeError: the gradients of bucket 0 of dense-e0-s0-c0 were not exchanged in iteration 2"),
        ("no gather", "RuntimeError: the parameters of bucket 0 of dense-e0-s0-c0 were not exchanged in iteration 18"),
    ],
)
def test_what_would_lose_nothing_is_refused_at_a_step(how, error):
    with pytest.raises(RankFailed, match=error):
        run_ranks(steps, 2, how, TinyGPT(), BOTH)


def nothing_of(stream, reason="its group has one rank", phases=("grad", "param")):
    return [f"nothing of {stream} is lost in phase {phase}: {reason}" for phase in phases]


ONE_NODE = "all ranks of its group are on one node (--lossy-links inter-node)"
FULL = TinyGPT(distributed_optimizer=False)
ONE_REPLICA = "does nothing: there is one data-parallel rank"
#: By name: the model, the flags, and what each rank says.
SAID = {
    "all is exchanged": (TinyGPT(), BOTH, [[], []]),
    "all is exchanged, overlapped": (OVERLAPPED, BOTH, [[], []]),
    "one rank": (TinyGPT(), BOTH, [nothing_of("dense-e0-s0-c0")]),
    "experts of one rank": (TinyGPT(expert=2, experts=4), BOTH, [nothing_of(f"expert-e{n}-s0-c0") for n in range(2)]),
    "groups inside nodes": (
        TinyGPT(pipeline=2, tied=False, accumulation=2),
        LossyConfig(p_grad=0.4, lossy_links="inter-node:2"),
        [nothing_of("dense-e0-s0-c0", ONE_NODE, ["grad"]), [], nothing_of("dense-e0-s1-c0", ONE_NODE, ["grad"]), []],
    ),
    "one replica, averaged": (FULL, LossyConfig(param_sync_interval=1), [[f"--param-sync-interval {ONE_REPLICA}"]]),
    "two replicas, averaged": (FULL, LossyConfig(param_sync_interval=1), [[], []]),
    "one replica, checked": (FULL, LossyConfig(replica_check="log"), [[f"--replica-check {ONE_REPLICA}"]]),
    "two replicas, checked": (FULL, LossyConfig(replica_check="log"), [[], []]),
}


@pytest.mark.parametrize(("tiny", "config", "said"), SAID.values(), ids=SAID)
def test_where_nothing_can_be_lost_the_first_rank_of_a_group_says_so(tiny, config, said):
    assert run_ranks(steps, len(said), "as always", tiny, config) == said


def test_links_between_nodes_of_one_node_are_refused():
    config = LossyConfig(p_grad=0.4, lossy_links="inter-node")
    with pytest.raises(RankFailed, match="UsageError: --lossy-links inter-node: all 2 ranks report the host name"):
        run_ranks(steps, 2, "as always", TinyGPT(), config)


def test_a_command_line_for_one_rank_is_refused():
    with pytest.raises(UsageError, match="data-parallel size 1: .*torchrun --nproc-per-node 2"):
        check_refusals(BOTH, Facts(largest_group=1))
    for config, size in ((LossyConfig(), 1), (LossyConfig(p_grad=0.4, lossy_self=True), 1), (BOTH, 2)):
        check_refusals(config, Facts(largest_group=size))


def test_a_group_knows_which_buckets_were_exchanged():
    group = group_in_memory(BOTH, rank=0)
    with pytest.raises(RuntimeError, match="gradients of bucket 0 .* in iteration 4, .* and 0 more"):
        check_exchanged([group], "grad", 3)
    assert group_in_memory(LossyConfig(p_grad=0.1), rank=0).not_made("param", 0) == []


def test_optimizers_without_buffers_are_left_alone():
    chained = types.SimpleNamespace(chained_optimizers=[types.SimpleNamespace(), types.SimpleNamespace(buffers=[])])
    check_registered(chained, ["a chunk"])


class Stub:
    """Megatron's optimizer of a stage without trainable parameters, of which DDP makes no bucket."""

    param_groups = ()


def test_a_stage_without_trainable_parameters_is_left_alone():
    check_registered(Stub(), [])
    warn_of_lossless(BOTH, [])
    with pytest.raises(UsageError, match="no model was wrapped"):
        check_registered(types.SimpleNamespace(param_groups=[{"params": [1]}]), [])


def alone(rank):
    told = logged("megatron_lossy")
    LossyGroup.create(BOTH, [BucketSpec(4)])
    return told


def test_a_plain_process_group_of_one_is_told_too():
    [[told]] = run_ranks(alone, 1)
    assert "data-parallel size 1" in told and run_ranks(alone, 2) == [[], []]


# --- where nothing is lost, every test that says "this is what was lost" must fail -----------------------------------
# Its claim, checked on runs without loss: either the rates are zero with all hooks in place, or one phase goes past the hooks.


controls = pytest.mark.shows("where nothing is lost, every claim of loss fails", device=False)

PACKETS = {"loss_unit": "packet", "packet_bytes": 1000}
LOUD = LossyConfig(loss_schedule=("0:0.4",), **PACKETS)
#: Without loss for now, in that phase; otherwise as LOUD.
QUIET = {
    "grad": LossyConfig(loss_schedule=("0:0,1000:0.4", "0:0.4"), **PACKETS),
    "param": LossyConfig(loss_schedule=("0:0.4", "0:0,1000:0.4"), **PACKETS),
}
NOT_EQUAL = "Arrays are not equal|Not equal to tolerance"


@controls
@pytest.mark.parametrize("phase", ["grad", "param"])
def test_the_contract_of_the_hooks(phase):
    """All of test_hooks.py rests on this comparison."""
    recorded = run_ranks(contract.record, 2, TinyGPT(), QUIET[phase], 3)
    lost = contract.check(recorded, QUIET[phase])
    assert not lost.pop(phase) and all(lost.values())
    with pytest.raises(AssertionError, match=NOT_EQUAL):
        contract.check(recorded, LOUD)
    with pytest.raises(RankFailed, match="were not exchanged in iteration"):  # what goes past the hooks is found out
        run_ranks(contract.record, 2, TinyGPT(), LOUD, 3, None, (), False, phase)


@controls
@pytest.mark.parametrize("phase", ["grad", "param"])
def test_a_whole_step_against_numpy(phase):
    recorded = np.array(run_ranks(test_hooks_whole_step.real, 2, QUIET[phase])).transpose(1, 0, 2)

    def difference(config):
        stepwise, _ = test_hooks_whole_step.simulate(config, 2, recorded.shape[2], common=recorded)
        return np.abs(stepwise[1:] - recorded[1:]).max()

    assert difference(QUIET[phase]) < 2e-6 < 1e-3 < difference(LOUD)


@controls
def test_owners_weights_are_the_replicas():
    config = dataclasses.replace(test_hooks_owner_weights.CONFIG, p_param=0.0)
    tiny = test_hooks_owner_weights.OVERLAPS["none"]
    for seen, _ in run_ranks(test_hooks_owner_weights.inside_and_after, 2, tiny, config):
        for before, owners, inside, after in seen:
            for other in (before, inside, after):
                assert_same(other, owners)


@controls
def test_the_doctors_step(monkeypatch):
    from megatron_lossy.lab.doctor import step

    for lost, status in ((0.5, "ok"), (0.0, "problem")):
        monkeypatch.setattr(step, "_train", lambda *_, lost=lost: (5.0, lost))
        assert step.try_step("cpu", None).status == status
