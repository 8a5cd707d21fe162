"""Where nothing is lost, every test that says "this is what was lost" must fail: its claim, checked on runs without loss.

Either the rates are zero with all hooks in place, or one phase goes past the hooks.
"""

import dataclasses

import numpy as np
import pytest

from megatron_lossy.config import LossyConfig
from tests import contract, test_hooks_owner_weights, test_hooks_whole_step
from tests.ranks import RankFailed, run_ranks
from tests.tiny_gpt import TinyGPT
from tests.trainer import TINY, read_records, train_runs, write_data

pytestmark = pytest.mark.shows("where nothing is lost, every claim of loss fails", device=False)

PACKETS = {"loss_unit": "packet", "packet_bytes": 1000}
LOUD = LossyConfig(loss_schedule=("0:0.4",), **PACKETS)
#: Without loss for now, in that phase; otherwise as LOUD.
QUIET = {
    "grad": LossyConfig(loss_schedule=("0:0,1000:0.4", "0:0.4"), **PACKETS),
    "param": LossyConfig(loss_schedule=("0:0.4", "0:0,1000:0.4"), **PACKETS),
}
NOT_EQUAL = "Arrays are not equal|Not equal to tolerance"


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


@pytest.mark.parametrize("phase", ["grad", "param"])
def test_a_whole_step_against_numpy(phase):
    recorded = np.array(run_ranks(test_hooks_whole_step.real, 2, QUIET[phase])).transpose(1, 0, 2)

    def difference(config):
        stepwise, _ = test_hooks_whole_step.simulate(config, 2, recorded.shape[2], common=recorded)
        return np.abs(stepwise[1:] - recorded[1:]).max()

    assert difference(QUIET[phase]) < 2e-6 < 1e-3 < difference(LOUD)


def test_owners_weights_are_the_replicas():
    config = dataclasses.replace(test_hooks_owner_weights.CONFIG, p_param=0.0)
    tiny = test_hooks_owner_weights.OVERLAPS["none"]
    for seen, _ in run_ranks(test_hooks_owner_weights.inside_and_after, 2, tiny, config):
        for before, owners, inside, after in seen:
            for name, value in owners.items():
                assert all(np.array_equal(value, other[name]) for other in (before, inside, after))


def test_what_the_trainer_records(tmp_path):
    """At rates that are zero for now it trains as without loss, to the last bit, and says so; with loss it does not."""
    run_ranks(write_data, 1, str(tmp_path))
    data = {"data_path": (str(tmp_path / "train"),), "valid_data_path": (str(tmp_path / "valid"),)}
    both = {"eval_weights": "both"}
    losses = {
        "none": {},
        "zero": both | PACKETS | {"loss_schedule": ("0:0,1000:0.4",)},
        "grad": both | PACKETS | {"p_grad": 0.4},
        "param": both | PACKETS | {"p_param": 0.4},
    }
    runs = [(TINY | data | {"metrics_dir": str(tmp_path / name)}, loss) for name, loss in losses.items()]
    (summaries, _), _ = run_ranks(train_runs, 2, *runs)
    valid = {name: summary["valid"] for name, summary in zip(losses, summaries, strict=True)}
    train = {name: read_records(tmp_path / name, "train") for name in losses}
    curves = {name: [record["lm loss"] for record in records] for name, records in train.items()}
    assert curves["zero"] == curves["none"] and curves["grad"] != curves["none"] != curves["param"]
    assert valid["zero"]["owner"] == valid["zero"]["replica"] == valid["none"]["replica"]
    assert valid["grad"]["owner"] == valid["grad"]["replica"] and valid["param"]["owner"] != valid["param"]["replica"]
    for name, lossy in (("zero", ()), ("grad", ("grad",)), ("param", ("param",))):
        for phase in ("grad", "param"):
            rates = [record[f"loss rate {phase}"] for record in train[name]]
            assert all(0.1 < rate < 0.7 for rate in rates) if phase in lossy else not any(rates)


def test_the_doctors_step(monkeypatch):
    from megatron_lossy.doctor import step

    for lost, status in ((0.5, "ok"), (0.0, "problem")):
        monkeypatch.setattr(step, "_train", lambda *_, lost=lost: (5.0, lost))
        assert step.try_step("cpu", None).status == status
