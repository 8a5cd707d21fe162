"""The pretraining program: on real gloo ranks, and from its command line."""

from __future__ import annotations

import dataclasses
import importlib.machinery
import json
import math
import os
import re
import signal

import pytest

from megatron_lossy.base.checkpoints import latest_iteration
from megatron_lossy.base.errors import UsageError
from megatron_lossy.config import LossyConfig
from megatron_lossy.lab.train.arguments import configurations, make_parser, read_arguments
from megatron_lossy.lab.train.config import TrainConfig
from megatron_lossy.lab.train.data import same_everywhere
from megatron_lossy.lab.train.saved import check_folders
from tests import trainer
from tests.programs import ROOT, Program, until
from tests.ranks import RankFailed, logged, run_ranks
from tests.trainer import TINY, as_flags, checkpoint_bytes, in_iteration, read_records, recorded_losses, train_runs

pytestmark = pytest.mark.shows("the trainer: resumed, overlaps, TP 2, PP 2, SIGTERM, Ctrl-C")


VIRTUAL = {"virtual_workers": 4}
LOSS = dict(p_grad=0.3, p_param=0.3, loss_unit="packet", packet_bytes=64, eval_weights="both", save_replicas=True)
LOSS |= dict(drift_interval=2)


@pytest.mark.on_cuda
@pytest.mark.shows("a resumed run, bit for bit")
@pytest.mark.parametrize(
    ("settings", "loss"),
    [({}, {}), ({"overlap_grad_reduce": True, "overlap_param_gather": True, "ddp_bucket_size": 20000}, LOSS)],
    ids=["lossless", "loss-overlapped"],
)
def test_resumed_run_equals_uninterrupted_one(data, tmp_path, settings, loss):
    base = TINY | data | settings
    once, twice = tmp_path / "once", tmp_path / "twice"
    again = base | {"save": str(twice), "load": str(twice)}
    # 3 is neither a multiple of the log nor of the evaluation interval, nor the end of an epoch.
    runs = (base | {"save": str(once)}, again | {"exit_interval": 3}, again, again)
    results = run_ranks(train_runs, 2, *((run, loss) for run in runs))
    (whole, stopped, resumed, nothing), output = results[0]
    assert whole["finished"] and resumed["finished"] and not stopped["finished"]
    assert stopped["iteration"] == 3 and f"no checkpoint in {twice}" in output
    # The second --exit-interval-free run goes to the end; the third finds nothing to do.
    assert nothing["iteration"] == resumed["iteration"] == 8
    assert recorded_losses(once) == recorded_losses(twice)
    assert checkpoint_bytes(once, 8) == checkpoint_bytes(twice, 8)
    assert len(read_records(twice, "run")) == 1
    assert not loss or whole["valid"]["replica"] != whole["valid"]["owner"]  # something is lost
    assert whole["valid"] == resumed["valid"] and set(whole["valid"]) == ({"replica", "owner"} if loss else {"replica"})


@pytest.mark.slow
def test_overlap_evaluation_and_saving_change_nothing(data, tmp_path):
    base = TINY | data | {"log_interval": 1, "ddp_bucket_size": 20000, "overlap_grad_reduce": True}
    overlap = {"overlap_param_gather": True}
    busy = {"eval_interval": 3, "save_interval": 2}
    for name, loss in (("lossless", {}), ("lossy", {"p_grad": 0.3, "p_param": 0.3, "eval_weights": "both"})):
        folders = [tmp_path / f"{name} {number}" for number in range(3)]
        busy["save"] = str(tmp_path / f"{name} checkpoints")
        runs = [base | more | {"metrics_dir": str(f)} for f, more in zip(folders, ({}, overlap, overlap | busy))]
        run_ranks(train_runs, 2, *((run, loss) for run in runs))
        plain, overlapped, disturbed = ([r["lm loss"] for r in read_records(f, "train")] for f in folders)
        assert plain == overlapped == disturbed


def test_metrics_and_lines(data, tmp_path):
    base = TINY | data | {"train_iters": 30, "eval_interval": 20, "log_interval": 10, "save": str(tmp_path / "run")}
    base["tensorboard_dir"] = str(tmp_path / "tensorboard")
    loss = {"p_grad": 0.2, "loss_unit": "packet", "packet_bytes": 64, "eval_weights": "owner"}
    (summaries, output), (_, silence) = run_ranks(train_runs, 2, (base, loss))
    assert silence == ""
    flags = (
        "gradients 20 %, parameters 0 %; bernoulli, seed 1234; unit packet of 64 bytes; recovery renormalize; simulated"
    )
    assert f"loss: {flags} | data-parallel ranks 2, over gloo, on cpu | " in output
    run, *_ = records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert run["kind"] == "run" and run["name"] == "run" and run["world_size"] == 2
    assert (run["p_grad"], run["p_param"], run["config"]["num_layers"]) == (0.2, 0.0, 2)
    assert [r["kind"] for r in records[1:]] == ["train", "train", "valid", "train", "valid"]
    train = read_records(tmp_path / "run", "train")
    assert train[0]["lm loss"] > train[-1]["lm loss"] + 1 and train[0]["lm loss"] < math.log(257)
    assert train[-1]["consumed samples"] == 240 and train[-1]["loss rate param"] == 0
    assert all(0.1 < record["loss rate grad"] < 0.3 for record in train)
    line = (
        r"^ \[[-0-9 :.]{26}\] iteration       10/      30 \| consumed samples:           80 \|"
        r" elapsed time per iteration \(ms\): \d+\.\d \| learning rate: \d\.\d{6}E-\d\d \|"
        r" global batch size:     8 \|"
        r" lm loss: (\d\.\d{6}E\+00) \| loss scale: 1\.0 \| grad norm: \d+\.\d{3} \|"
        r" number of skipped iterations:   0 \| number of nan iterations:   0 \|$"
    )
    assert float(re.search(line, output, re.MULTILINE)[1]) == pytest.approx(train[0]["lm loss"], rel=1e-6)
    line = (
        r"^(-+)\n validation loss at iteration 30 with the owners' weights"
        r" \| lm loss value: (\S+) \| lm loss PPL: (\S+) \| \n\1$"
    )
    _, loss, ppl = re.search(line, output, re.MULTILINE).groups()
    valid = read_records(tmp_path / "run", "valid")[-1]
    assert valid["weights"] == "owner" and float(loss) == pytest.approx(valid["lm loss"], rel=1e-6)
    assert float(ppl) == pytest.approx(math.exp(valid["lm loss"]), rel=1e-5)
    assert summaries[0]["valid"]["owner"] == valid["lm loss"]
    events = trainer.tensorboard(tmp_path / "tensorboard")
    for name in ("lm loss", "loss rate grad", "survivors mean"):
        assert [event.value for event in events.Scalars(name)] == pytest.approx([record[name] for record in train])


@pytest.mark.slow
def test_model_parallel_sizes_agree(data, tmp_path):
    base = TINY | data | {"hidden_dropout": 0.0, "log_interval": 1, "train_iters": 6}

    def losses(world_size, **settings):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        run_ranks(train_runs, world_size, (base | settings | {"metrics_dir": str(folder)}, {}))
        return [record["lm loss"] for record in read_records(folder, "train") + read_records(folder, "valid")]

    one = losses(1)
    # The same weights, batches and arithmetic, but for the order of sums.
    assert losses(2) == pytest.approx(one, rel=1e-4)
    halves = {"tensor_model_parallel_size": 2, "make_vocab_size_divisible_by": 64}  # the vocabulary padded alike
    assert losses(2, **halves) == pytest.approx(one, rel=1e-4)
    assert losses(2, micro_batch_size=4, calculate_per_token_loss=True) == pytest.approx(one, rel=1e-4)
    # Stages draw their initial weights from seeds of their own.
    staged = losses(4, pipeline_model_parallel_size=2, share_embeddings_and_output_weights=True, bf16=True)
    assert staged == pytest.approx(one, rel=0.1) and staged != pytest.approx(one, rel=1e-3)


def _interrupt(rank: int, config: dict, number: int) -> tuple:
    """Run; rank 1 alone gets signal ``number`` in an iteration. Return the log of megatron-core."""
    told = logged("megatron")
    in_iteration(5, lambda made: os.kill(os.getpid(), number) if rank == 1 and made == 5 else None)
    return *train_runs(rank, (config, {})), told


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_on_all_ranks(data, tmp_path, number):
    # In the middle of a log interval, whose time is another on every rank.
    config = TINY | data | {"save": str(tmp_path / "run"), "train_iters": 50, "log_interval": 10}
    results = run_ranks(_interrupt, 2, config, number)
    for (summary,), _, told in results:
        assert summary["iteration"] == 5 and not summary["finished"]
        assert not [line for line in told if "common state dict" in line]
    assert f"exiting on {number.name} at iteration 5" in results[0][1]
    assert latest_iteration(tmp_path / "run") == 5


def _interrupt_twice(rank: int, config: dict) -> None:
    """A run that gets Ctrl-C twice in one iteration."""
    in_iteration(1, lambda made: [os.kill(os.getpid(), signal.SIGINT) for _ in range(2)])
    train_runs(rank, (config, {}))


def test_ctrl_c_saves_and_once_more_ends_at_once(data, tmp_path):
    config = TINY | data | {"save": str(tmp_path / "once"), "train_iters": 10**5, "eval_iters": 0}
    program = Program("megatron_lossy.train", *as_flags(config))
    until(lambda: "iteration        2/" in program.printed(), program)
    program.send_signal(signal.SIGINT)
    stdout, stderr = program.communicate()
    assert (program.returncode, stderr) == (0, "")
    assert "stopping after this iteration, with a checkpoint; Ctrl-C again ends at once\n" in stdout
    assert latest_iteration(tmp_path / "once") >= 2
    with pytest.raises(RankFailed, match="the process died"):
        run_ranks(_interrupt_twice, 1, config | {"save": str(tmp_path / "twice")})
    assert latest_iteration(tmp_path / "twice") is None


@pytest.mark.programs
def test_what_a_fresh_checkout_lacks_is_built(tmp_path):
    from megatron_lossy.hooks.dataset_helper import build_helper

    folder = tmp_path / "megatron/core/datasets"
    folder.mkdir(parents=True)
    with pytest.raises(UsageError, match=f"{folder} has no dataset helper, and it cannot be built .*pybind11"):
        build_helper(tmp_path)
    (folder / "Makefile").write_text("LIBEXT = wrong\nhelpers_cpp$(LIBEXT):\n\ttouch $@\n")
    build_helper(tmp_path)
    [built] = folder.glob("helpers_cpp*")
    assert built.name.removeprefix("helpers_cpp") in importlib.machinery.EXTENSION_SUFFIXES


def _disk_full_at(rank: int, iterations: tuple[int, ...], *runs: tuple[dict, dict]):
    """:func:`train_runs`, in which no file may become longer than 60,000 bytes while ``iterations`` are saved."""
    import resource

    from megatron_lossy.lab.train.checkpoint import Checkpoints

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # so that the write fails, and not the process
    save, before = Checkpoints.save, resource.getrlimit(resource.RLIMIT_FSIZE)

    def crippled(self, folder, now, common):
        resource.setrlimit(resource.RLIMIT_FSIZE, (60000 if now in iterations else before[0], before[1]))
        try:
            return save(self, folder, now, common)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    Checkpoints.save = crippled
    try:
        return train_runs(rank, *runs)
    except OSError as error:
        return str(error)


@pytest.mark.parametrize("ranks", [1, 2])
def test_failed_saves_that_a_run_may_have_do_not_end_it(data, tmp_path, ranks):
    config = TINY | data | {"save_interval": 2, "eval_iters": 0, "log_interval": 1}
    loss = {"p_grad": 0.3, "p_param": 0.3} if ranks == 2 else {}
    failing, whole = ({"save": str(tmp_path / name), "save_retain": 2} for name in ("failing", "whole"))
    both = (config | failing | {"save_failures": 1}, loss), (config | whole | {"save_interval": 8}, loss)
    summaries, output = run_ranks(_disk_full_at, ranks, (4,), *both)[0]
    assert [summary["iteration"] for summary in summaries] == [8, 8]
    why = "File too large: the checkpoint of iteration 4 was not saved; that of iteration 2 is whole"
    assert output.count("was not saved") == 1 and f"  {tmp_path / 'failing'}: {why}; the run goes on" in output
    there = {name: sorted(path.name for path in (tmp_path / name).glob("iter_*")) for name in ("failing", "whole")}
    assert there == {"failing": ["iter_0000006", "iter_0000008"], "whole": ["iter_0000008"]}
    assert checkpoint_bytes(tmp_path / "failing", 8) == checkpoint_bytes(tmp_path / "whole", 8)
    for at, more in (((4,), {}), ((4, 6), {"save_failures": 1})):
        ended = run_ranks(_disk_full_at, ranks, at, (config | more | {"save": str(tmp_path / f"ended {at}")}, loss))
        assert all(f"File too large: the checkpoint of iteration {at[-1]} was not saved" in one for one in ended)


def test_older_checkpoints_are_removed_and_nothing_else(tmp_path):
    """Not the one just saved, nor later ones, nor those that another run or program has put there."""
    from megatron_lossy.lab.train.checkpoint import _remove_older

    names = [*(f"iter_{number:07}" for number in (2, 3, 4, 6, 40)), "iter_0000008.tmp", "other"]
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    (tmp_path / "written_checkpoints.txt").write_text("2\n4\n5\n6\n40\n")
    left = lambda: sorted(path.name for path in tmp_path.iterdir() if path.is_dir())
    _remove_older(tmp_path, 6, 4)
    assert left() == sorted(names)
    _remove_older(tmp_path, 6, 2)
    assert left() == sorted(set(names) - {"iter_0000002"})
    _remove_older(tmp_path, 6, 1)
    assert left() == sorted(set(names) - {"iter_0000002", "iter_0000004"})


def test_what_changes_with_a_checkpoint_of_another_run_is_said(data, tmp_path):
    config = TINY | data | {"train_iters": 2, "lr_warmup_iters": 0, "eval_iters": 0, "save": str(tmp_path / "first")}
    other = config | {"save": str(tmp_path / "second"), "load": str(tmp_path / "first"), "train_iters": 3, "lr": 0.02}
    other |= {"data_path": data["valid_data_path"]}
    again = config | {"load": str(tmp_path / "first")}
    (summaries, output), *_ = run_ranks(train_runs, 2, (config, {}), (other, {"p_grad": 0.1}), (again, {}))
    assert [summary["iteration"] for summary in summaries] == [2, 3, 2]
    said = "loss: none, the exchanges are Megatron's own | data-parallel ranks 2, over gloo, on cpu | 0.064 epochs"
    assert said in output
    said = "--train-iters was 2 there and is 3 here; --lr was 0.01 there and is 0.02 here; --p-grad was 0.0 there and "
    assert f"--load {tmp_path / 'first'}: goes on with other settings: {said}" in output
    assert output.count("other settings") == 1 and "; the data had other contents\n" in output
    assert output.count("nothing is left to do: iteration 2 of --train-iters is made\n") == 1


def test_a_finished_run_goes_on_as_if_it_had_been_longer(data, tmp_path):
    config = TINY | data | {"lr_decay_iters": 6, "eval_iters": 0, "log_interval": 1}
    loss = {"p_grad": 0.3, "p_param": 0.3, "save_replicas": True}
    whole, longer = ({"save": str(tmp_path / name), "train_iters": 12} for name in ("whole", "longer"))
    logged = loss | {"delivery_log": str(tmp_path / "log")}
    again = longer | {"load": longer["save"]}
    runs = (config | whole, loss), (config | longer | {"train_iters": 8}, logged), (config | again, logged)
    (_, output), *_ = run_ranks(train_runs, 2, *runs, (config | again, logged))
    assert "goes on with other settings: --train-iters was 8 there and is 12 here" in output
    assert "nothing is left to do: iteration 12" in output
    assert recorded_losses(tmp_path / "whole") == recorded_losses(tmp_path / "longer")
    assert checkpoint_bytes(tmp_path / "whole", 12) == checkpoint_bytes(tmp_path / "longer", 12)
    for more in ({"train_iters": 16, "lr": 0.02}, {"train_iters": 16, "lr_decay_iters": 5}, {"train_iters": 40}):
        [said] = run_ranks(refused, 1, config | again | more)
        assert "holds another run (--train-iters was 12 there" in said


def _diverge(rank: int, config: dict):
    """A run whose weights become NaN in iteration 3, and another one after it in the same processes."""
    from megatron_lossy.lab.train import loop

    step = loop._Run._step

    def break_weights(self, batches):
        if self.config.save and self.progress.iteration == 2:
            for parameter in self.model[0].parameters():
                parameter.data.fill_(math.nan)
        return step(self, batches)

    loop._Run._step = break_weights
    return train_runs(rank, (config, {}), (config | {"save": None}, {}))


def test_diverged_run_keeps_its_checkpoint(data, tmp_path):
    config = TINY | data | {"save": str(tmp_path / "run"), "save_interval": 2, "train_iters": 4}
    for (broken, fine), _ in run_ranks(_diverge, 2, config):
        assert broken["diverged"] == "the loss of iteration 3 is nan" and not broken["finished"]
        assert fine["diverged"] is None and fine["finished"]
    assert latest_iteration(tmp_path / "run") == 2
    records = [(r["iteration"], r["lm loss"] is None) for r in read_records(tmp_path / "run", "train")]
    assert records == [(2, False), (3, True)]


def refused(rank: int, config: dict, loss: dict | None = None) -> str:
    with pytest.raises(UsageError) as caught:
        train_runs(rank, (config, loss or {}))
    return str(caught.value)


def test_folders_of_other_runs_are_refused(data, tmp_path):
    run = tmp_path / "run"
    config = TINY | data | {"save": str(run), "eval_iters": 0, "train_iters": 3}
    run_ranks(train_runs, 1, (config, {}))
    before = (run / "metrics.jsonl").read_bytes()

    def refusal(loss=None, **settings):
        with pytest.raises(UsageError) as caught:
            check_folders(TrainConfig(**config | settings), LossyConfig(**loss or {}))
        return str(caught.value)

    assert refusal() == f"--save {run}: holds a run with these settings; --load it as well to continue"
    assert refusal(lr=2e-2, load=str(run)).startswith(
        f"--save {run}: holds another run (--lr was 0.01 there and is 0.02"
    )
    assert "(--p-grad was 0.0 there and is 0.1 here)" in refusal({"p_grad": 0.1}, load=str(run))
    assert "holds another run (--lr was" in refusal(metrics_dir=str(run), save=None, lr=2e-2)
    # A flag that is newer than the run had its default.
    settings = json.loads((run / "settings.json").read_text())
    default = {"train": {f.name: f.default for f in dataclasses.fields(TrainConfig)}, "loss": vars(LossyConfig())}
    for part, known in json.loads(json.dumps(default)).items():
        settings[part] = {name: value for name, value in settings[part].items() if value != known[name]}
    (run / "settings.json").write_text(json.dumps(settings))
    assert "lr" in settings["train"] and not settings["loss"]
    assert refusal() == f"--save {run}: holds a run with these settings; --load it as well to continue"
    assert "(--grad-error was none there and is bit-flip here)" in refusal({"grad_error": "bit-flip"}, load=str(run))
    assert "(--use-distributed-optimizer was True there" in refusal(use_distributed_optimizer=False, load=str(run))
    fresh = {"save": str(tmp_path / "fresh"), "load": str(run)}
    assert refusal(**fresh, hidden_size=128) == f"--load {run}: --hidden-size was 64 there and is 128 here"
    assert "--pipeline-model-parallel-size was 1" in refusal(**fresh, pipeline_model_parallel_size=2)
    check_folders(TrainConfig(**config | fresh | {"lr": 2e-2}), LossyConfig())
    (run / "latest_checkpointed_iteration.txt").write_text("7")
    assert "names '7', which is no checkpoint" in refusal(load=str(run))
    (error,) = run_ranks(refused, 1, config)
    assert "holds a run with these settings" in error
    assert (run / "metrics.jsonl").read_bytes() == before


def _compare(rank: int) -> str:
    assert same_everywhere(["same"]) == ["same"]
    with pytest.raises(UsageError) as caught:
        same_everywhere([f"of site {rank // 2}"])
    return str(caught.value)


def test_hosts_with_other_data_are_refused_on_all_ranks():
    expected = "--data-path on rank 2: is not what rank 0 has there; copy one to all hosts"
    assert run_ranks(_compare, 3) == [expected] * 3


def _parse(*arguments: str) -> tuple[TrainConfig, LossyConfig]:
    return configurations(read_arguments(make_parser("test", ""), arguments))


@pytest.mark.parametrize(
    "file",
    # Those with a base are the launcher's: test_launch.py.
    [
        file
        for file in sorted((ROOT / "configs").rglob("*.yaml"))
        if file.parent.name not in ("studies", "fct", "presets") and "\nbase: " not in file.read_text()
    ],
    ids=lambda path: path.stem,
)
def test_shipped_configurations(file):
    text = ["--data-path", "a", "--valid-data-path", "b"] if "data: stdlib" not in file.read_text() else []
    config, loss = _parse("--config", str(file), *text)
    config.check_world(1 if config.virtual_workers else 4)
    assert loss.lossless


def test_command_line_wins_over_yaml(tmp_path):
    file = tmp_path / "run.yaml"
    shape = {key: value for key, value in TINY.items() if key not in ("lr", "eval_iters")}
    lines = [f"{key.replace('_', '-')}: {value}" for key, value in shape.items()]
    file.write_text(
        "\n".join([*lines, "lr: 3e-3", "bf16: true", "data_path: [0.3, x, 0.7, y]", "eval-iters: 0", "p-grad: 0.1"])
    )
    config, loss = _parse("--config", str(file), "--p-grad", "0.2", "--no-bf16", "--train-iters", "9")
    assert (config.lr, config.bf16, config.train_iters) == (3e-3, False, 9)
    assert (config.hidden_size, loss.p_grad) == (64, 0.2)
    assert config.data_path == ("0.3", "x", "0.7", "y")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hiden-size: 3", "--config FILE: unknown key hiden-size, did you mean hidden-size"),
        ("bf16: 3", "--config FILE: bf16 3: must be true or false"),
        ("lr: fast", "--config FILE: --lr: invalid float value: 'fast'"),
        ("data: web", "--config FILE: --data: invalid choice: 'web' (choose from 'stdlib')"),
        ("- lr", "--config FILE: must be a mapping from names to values"),
        ("lr: {a: 1}", "--config FILE: lr {'a': 1}: must be a value or a list of values"),
    ],
)
def test_wrong_yaml(tmp_path, text, message):
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(UsageError) as caught:
        _parse("--config", str(file))
    assert str(caught.value) == message.replace("FILE", str(file))


@pytest.mark.parametrize(
    ("change", "ranks", "message"),
    [
        ({"lr": math.nan}, 1, "--lr nan: must be a positive number"),
        ({"lr": None}, 1, "--lr: needs a value, here or in the --config file"),
        ({"train_iters": None}, 1, "--train-iters: needs a value, here or in the --config file"),
        ({"hidden_dropout": 1.0}, 1, "--hidden-dropout 1.0: must be in [0, 1)"),
        ({"num_query_groups": 3}, 1, "--num-query-groups 3: must divide --num-attention-heads 4"),
        ({"overlap_param_gather": True}, 1, "--overlap-param-gather on: needs --overlap-grad-reduce"),
        ({"valid_data_path": None}, 1, "--eval-iters 2: needs --valid-data-path, or --eval-iters 0"),
        ({"pipeline_model_parallel_size": 3}, 3, "--num-layers 2: must be divisible by 3 pipeline stages"),
        ({"tensor_model_parallel_size": 4}, 4, "--num-query-groups 2: must be divisible by 4 tensor-parallel ranks"),
        ({"num_distributed_optimizer_instances": 2}, 1, "--num-distributed-optimizer-instances 2: must divide the 1 "),
        ({"optimizer": "sgd", "sgd_momentum": 1.0}, 1, "--sgd-momentum 1.0: must be in"),
        ({"nadam_momentum_decay": 0.1}, 1, "--nadam-momentum-decay 0.1: needs --optimizer nadam"),
        ({"optimizer": "nadam", "nadam_momentum_decay": -1}, 1, "--nadam-momentum-decay -1: must be at least 0"),
        (VIRTUAL | {"tensor_model_parallel_size": 2}, 1, "--tensor-model-parallel-size 2: must be 1 with --virtual-w"),
        (VIRTUAL | {"pipeline_model_parallel_size": 2}, 1, "--pipeline-model-parallel-size 2: must be 1 with --virt"),
        (VIRTUAL | {"num_distributed_optimizer_instances": 2}, 1, "--num-distributed-optimizer-instances 2: must be 1"),
        (VIRTUAL, 2, "--virtual-workers 4: all share one device: needs 1 process, not 2"),
        ({"virtual_workers": 3}, 1, "--global-batch-size 8: must be divisible by --micro-batch-size 2 x 3 data-"),
        ({"virtual_workers": 0}, 1, "--virtual-workers 0: must be at least 1"),
        ({"sharpness_interval": 5}, 1, "--sharpness-interval 5: needs all workers in one process"),
        (VIRTUAL | {"sharpness_interval": 5, "bf16": True}, 1, "--sharpness-interval 5: needs weights in float32"),
        (VIRTUAL | {"sharpness_interval": 5, "use_distributed_optimizer": False}, 1, "--sharpness-interval 5: needs o"),
        (VIRTUAL | {"sharpness_interval": -1}, 1, "--sharpness-interval -1: must be at least 0"),
    ],
)
def test_wrong_settings(change, ranks, message):
    with pytest.raises(UsageError) as caught:
        TrainConfig(**TINY | {"data_path": ("x",), "valid_data_path": ("y",)} | change).check_world(ranks)
    assert str(caught.value).startswith(message)
