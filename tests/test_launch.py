"""The launcher: configurations, memory, checks, commands, and what it does in a Slurm job."""

import contextlib
import dataclasses
import os
import shlex
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from megatron_lossy.base.errors import UsageError
from megatron_lossy.config import LossyConfig
from megatron_lossy.lab.launch.__main__ import all_checkpoints, estimates
from megatron_lossy.lab.launch.__main__ import main as launch
from megatron_lossy.lab.launch.checks import (
    check,
    check_host_memory,
    check_megatron,
    check_memory,
    check_training,
    describe_network,
    network_memory,
)
from megatron_lossy.lab.launch.command import (
    check_job,
    check_shape,
    done_iterations,
    job_name,
    launch_command,
    run_in_job,
    shell,
)
from megatron_lossy.lab.launch.memory import Layout, estimate, parameters
from megatron_lossy.lab.launch.options import DEVICES
from megatron_lossy.lab.launch.plan import make_plan
from megatron_lossy.lab.launch.rank import rank_environment
from megatron_lossy.lab.train.arguments import configurations, make_parser, read_arguments
from megatron_lossy.lab.train.config import TrainConfig

from .ranks import run_ranks
from .trainer import ROOT, TINY, read_records

pytestmark = pytest.mark.shows(
    "configurations: sizes, memory, flags, dry runs, refusals",
    "commands of torchrun and srun; requeued jobs",
    device=False,
)

LARGE = sorted((ROOT / "configs").glob("llama*/*_dp*.yaml"))
DP64 = ROOT / "configs/llama2_7b/cuda_dp64.yaml"
TINY_FILE = ROOT / "configs/tiny/llama_1m.yaml"


def arguments(file, text, out, *more):
    return [
        f"--config={file}", "--program=train", f"--out={out}", "--tokenizer=byte",
        f"--data-path={text}/train", f"--valid-data-path={text}/valid", "--max-epochs=1e9", *map(str, more),
    ]  # fmt: skip


def test_llama2_7b_by_hand():
    """The published number of weights, and DP 64 added up without the module's own functions."""
    assert parameters(llama2_7b(), 32000) == 6_738_415_616
    found = components(p_param=0.4, loss_unit="packet")
    weights = 6_738_415_616
    assert found["weights"] == 2 * weights and found["gradients"] == 4 * weights
    assert found["optimizer shard"] == 12 * weights / 64
    assert found["stale units"] == pytest.approx(0.4 * 63 / 64 * 2 * weights)
    layer = 2 * 4096 * (4 * 4096 + 3 * 4096 + 4096 + 3 * 11008) + 4 * 4096 * 32  # bf16; 4 bytes per head and token
    assert found["activations"] == 32 * layer
    assert found["logits"] == 4096 * 32000 * 8
    assert "last gradients" not in found and "selection" not in found


def test_what_loss_adds():
    weights = components()["weights"] / 2
    assert components().keys() == {"weights", "gradients", "optimizer shard", "activations", "logits", "reserved"}
    previous = components(p_grad=0.1, grad_recovery="previous", loss_unit="packet")
    assert previous["last gradients"] == pytest.approx(2 * 0.1 * 63 / 64 * 4 * weights)
    shards = components(p_param=0.1)["stale units"] / (2 * weights)
    assert 0.1 < shards < 0.3  # whole shards: the mean and four standard deviations
    gaudi = components("gaudi3", p_grad=0.1, p_param=0.1)
    assert gaudi["stale units"] == 2 * weights and gaudi["selection"] == 4 * weights / 64
    lead = components(p_param=0.1, param_send="compensated")["lead"]
    assert lead == (4 + 4 + 2) * weights / 64


def test_what_an_asynchronous_pipeline_adds():
    staged = {"pipeline_model_parallel_size": 4, "micro_batch_size": 1, "global_batch_size": 16 * 3}
    flushed, stashed = components(settings=staged), components(settings=staged, async_pipeline=True)
    activations = flushed["activations"] / 3  # of a micro-batch; three of them are there at once
    assert stashed["activations"] == (3 * 3 + 1) * activations  # three batches of three ahead
    assert stashed["old weights"] == 4 * stashed["weights"]


def test_what_islands_add():
    """In copies of a rank's shard: four islands of 16 ranks."""
    shard = 6_738_415_616 / 16
    assert components(islands=4, sync_method="none")["optimizer shard"] == 12 * shard
    few = {"islands": 4, "sync_method": "parameters", "sync_fraction": 0.05, "sync_delay": 10}
    found = components(**few)
    assert found["averages under way"] == pytest.approx(11 * 0.05 * (2 * 4 + 8) * shard)
    assert components(**few, delay_correction="ema")["correction"] == 4 * shard
    predicted = components(**few | {"sync_delay": 50}, delay_correction="smith")
    assert predicted["averages under way"] == pytest.approx(51 * 0.05 * (3 * 4 + 8) * shard)
    assert predicted["correction"] == 4 * shard
    assert components(**few, delay_correction="smith") == found  # nothing is under way twice
    assert components(islands=4, sync_method="diloco", sync_interval=9)["outer optimizer"] == 2 * 4 * shard


def llama2_7b():
    settings = yaml.safe_load((ROOT / "configs/llama2_7b/llama2_7b.yaml").read_text())
    names = {key.replace("-", "_"): value for key, value in settings.items()}
    return TrainConfig(**names, data="stdlib")


def components(device="h100", settings=None, **loss):
    """The memory of a rank of 64, by what takes it."""
    config = dataclasses.replace(llama2_7b(), **(settings or {}))
    return estimate(config, LossyConfig(**loss), Layout(64), DEVICES[device]).components


def weights_and_saved(rank, config):
    """Parameters of this rank's stage, what memory.py says, bytes kept by autograd, and what memory.py says."""
    import torch

    from megatron_lossy.base import device

    device.prepare()
    from megatron.core import parallel_state

    from megatron_lossy.lab.launch import memory
    from megatron_lossy.lab.train.model import build_model, model_parallel

    with model_parallel(config):
        chunk = build_model(config, 257)[0]
        stage = parallel_state.get_pipeline_model_parallel_rank()
        last = stage == config.pipeline_model_parallel_size - 1
        weights = sum(parameter.numel() for parameter in chunk.parameters())
        expected = memory._weights(config, 257, stage == 0, last, config.pipeline_model_parallel_size)
        if config.pipeline_model_parallel_size > 1:
            return weights, expected, None, None
        own = {buffer.param_data.untyped_storage().data_ptr() for buffer in chunk.buffers}
        kept, sizes = [], {}

        def pack(tensor):
            storage = tensor.untyped_storage()
            kept.append(tensor)  # or its address is given to the next one
            sizes[storage.data_ptr()] = 0 if storage.data_ptr() in own else storage.nbytes()
            return tensor

        tokens = torch.zeros(config.micro_batch_size, config.seq_length, dtype=torch.long)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            chunk(tokens, torch.arange(config.seq_length).expand_as(tokens), None, labels=tokens)
        layout = memory.Layout(1, 257, flash_attention=False)
        return weights, expected, sum(sizes.values()), memory._activations(config, layout, 4)


def test_weights_of_every_stage_are_those_of_the_model():
    config = TrainConfig(**TINY | dict(
        num_layers=4, tensor_model_parallel_size=2, pipeline_model_parallel_size=2, data="stdlib"
    ))  # fmt: skip
    for weights, expected, *_ in run_ranks(weights_and_saved, 4, config):
        assert weights == expected


def test_activations_are_those_that_autograd_keeps():
    """On CPU norms and SwiGLU are not fused and keep intermediate values, so that more is kept than computed."""
    config = TrainConfig(
        **TINY | dict(num_layers=4, seq_length=128, ffn_hidden_size=192, hidden_dropout=0.0, data="stdlib")
    )
    [(_, _, kept, computed)] = run_ranks(weights_and_saved, 1, config)
    logits = 12 * 384 * config.seq_length * config.micro_batch_size
    assert 1.0 < kept / (computed + logits) < 1.5


def over_datagrams(*more):
    """The plan of 7 B on 64 H100, over UDP."""
    paths = ["--program=pretrain_gpt.py", "--out=x", "--data-path=a", "--valid-data-path=b", "--launcher=srun"]
    return make_plan([f"--config={DP64}", *paths, "--transport=udp", *more])


def test_a_dry_run_says_what_datagrams_take_of_a_node():
    """By hand; and as docs/cluster.md has it."""
    plan, weights = over_datagrams(), 6_738_415_616
    memory = check_memory(plan)
    assert network_memory(plan, memory) == (2**28, 2**29, 3) and "pieces" not in memory.components
    page = (ROOT / "docs/cluster.md").read_text()
    for line in describe_network(plan, memory):
        assert line in page and line in estimates(plan)
    memory = check_memory(over_datagrams("--lossy-links=inter-node"))
    assert memory.components["pieces"] == pytest.approx(7 / 64 * 4 * weights)
    on_cpu = over_datagrams("--device=cpu")
    found = describe_network(on_cpu, check_memory(on_cpu))
    assert len(found) == 1 and "0.25 GiB of the host and 1 thread a rank" in found[0]
    alone = over_datagrams("--transport=torch")
    assert describe_network(alone, check_memory(alone)) == []


def test_datagrams_that_cannot_fit_are_refused(monkeypatch):
    for more, whole in ((["--grad-recovery=error-feedback"], 1), (["--grad-recovery=previous"], 2)):
        with pytest.raises(UsageError, match="--device h100: has 79.6 GiB"):
            check_memory(over_datagrams(*more))
        kept = check_memory(over_datagrams(*more, "--device=h200")).components
        gradients = kept["gradients"]
        assert kept.get("pieces", 0) + kept.get("last gradients", 0) == whole * gradients
    plan = over_datagrams(f"--udp-memory={2**37}")
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(total=2**40))
    with pytest.raises(UsageError, match=r"--udp-memory 137438953472: takes up to 256.0 GiB of each of 8 ranks"):
        check_host_memory(plan, check_memory(plan))
    check_host_memory(over_datagrams(), check_memory(plan))


@pytest.mark.parametrize("file", LARGE, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_shipped_configuration_states_what_is_computed_and_fits(file, tmp_path):
    given = [f"--config={file}", "--program=pretrain_gpt.py", f"--out={tmp_path}", "--launcher=srun"]
    plan = make_plan([*given, "--data-path=a", "--valid-data-path=b", "--rate-index=4"])
    assert plan.lossy.p_grad == plan.lossy.p_param == 0.4
    check_shape(plan)
    plan.train.check_world(plan.launch.accelerators)
    check_memory(plan)
    comments = [line[1:] for line in file.read_text().splitlines() if line.startswith("#")]
    header = " ".join(" ".join(comments).split())
    for line in estimates(plan):
        assert " ".join(line.split()) in header


@pytest.mark.parametrize(
    ("flags", "number"),
    [
        ([], 4),  # the file has a --save-retain-interval
        (["--save-retain-interval=1000"], 7),
        (["--program=train", "--tokenizer=byte"], 20),
        (["--program=train", "--tokenizer=byte", "--save-retain=2"], 3),
    ],
)
def test_a_dry_run_counts_the_checkpoints_that_are_there_at_once(monkeypatch, flags, number):
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=400 * 2**30))
    line = all_checkpoints(over_datagrams(*flags))  # of 87.9 GiB each
    assert f" GiB in at most {number} checkpoints" in line
    assert ("more than the 400.0 GiB that are free at /" in line) == (number > 4)


def test_the_dataset_helper_is_built_before_ranks_start(text, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr("megatron_lossy.hooks.dataset_helper.build_helper", asked.append)
    plan = make_plan(arguments(TINY_FILE, text, tmp_path, "--device=cpu", "--accelerators=2", "--rate=0.1"))
    for starting in (False, True):
        check(plan, starting)
        assert asked == [None] * starting


def test_layers_of_files(tmp_path):
    (tmp_path / "base.yaml").write_text("num-layers: 2\nlr: 1.0e-3\nlaunch: {device: cpu, accelerators: 2}\n")
    (tmp_path / "top.yaml").write_text("base: base.yaml\nlr: 2.0e-3\nlaunch: {accelerators: 4}\n")
    tiny = [f"--{key.replace('_', '-')}={value}" for key, value in TINY.items() if key not in ("num_layers", "lr")]
    plan = make_plan([f"--config={tmp_path}/top.yaml", "--program=train", "--out=x", "--data=stdlib", *tiny])
    assert (plan.train.num_layers, plan.train.lr, plan.launch.accelerators) == (2, 2e-3, 4)
    assert plan.folder == Path("x/top")


def test_flags_for_megatron(text, tmp_path):
    command = arguments(ROOT / "configs/llama2_7b/gaudi3_dp32.yaml", text, tmp_path, "--rate=0.1")
    command[1] = "--program=pretrain_gpt.py"
    plan = make_plan([*command, "--tokenizer=sentencepiece:t.model", "--eod-mask-loss"])
    line = " ".join(plan.module)
    assert line.startswith("megatron_lossy pretrain_gpt.py --num-layers 32 ")
    for flags in (
        "--optimizer fusedadamw", "--normalization RMSNorm", "--position-embedding-type rope", "--swiglu",
        "--tensor-model-parallel-size 2", "--untie-embeddings-and-output-weights", "--attention-dropout 0.0",
        "--tokenizer-type GPTSentencePieceTokenizer --tokenizer-model t.model", "--p-grad 0.1 --p-param 0.1",
        f"--train-data-path {text}/train --valid-data-path {text}/valid", f"--save {tmp_path}/p_0.10 --load",
        "--exit-signal-handler", "--sequence-parallel", "--eod-mask-loss", "--use-fused-sdpa 1",
    ):  # fmt: skip
        assert f" {flags}" in line
    assert " ".join(make_plan([*command, "--optimizer=sgd"]).module).count("--optimizer sgd") == 1
    assert line.count("--optimizer ") == 1 and "--overlap-grad-reduce" not in line and "--group-query" not in line
    assert plan.environment["PT_HPU_GPU_MIGRATION"] == "1"
    assert plan.layout.sequence_parallel and plan.layout.flash_attention


@pytest.mark.parametrize(
    "flags",
    [
        ("--no-use-distributed-optimizer", "--param-sync-interval=4", "--replica-check=log"),
        ("--p-grad=0.1", "--p-param=0.2", "--loss-unit=packet"),
        ("--islands=2", "--sync-method=parameters", "--sync-delay=3", "--save-replicas"),
    ],
    ids=lambda flags: flags[0],
)
def test_the_trainer_is_told_what_the_plan_says(flags, text, tmp_path):
    plan = make_plan(arguments(TINY_FILE, text, tmp_path, "--device=cpu", "--accelerators=4", *flags))
    check(plan, starting=False)
    assert plan.module[0] == "megatron_lossy.train"
    told = configurations(read_arguments(make_parser("train", ""), plan.module[1:]))
    assert told == (plan.train, plan.lossy)


def test_megatron_is_told_which_optimizer(text, tmp_path):
    for flags, sharded in ((), True), (("--no-use-distributed-optimizer", "--param-sync-interval=4"), False):
        command = arguments(TINY_FILE, text, tmp_path, "--device=cpu", "--accelerators=4", "--tokenizer=byte", *flags)
        command[1] = "--program=pretrain_gpt.py"
        plan = make_plan(command)
        assert ("--use-distributed-optimizer" in plan.module) == sharded
        found = estimate(plan.train, plan.lossy, plan.layout, plan.device).components
        assert ("optimizer shard" in found) == sharded
        whole = found.get("optimizer", 0) or 4 * found["optimizer shard"]
        assert whole == 8 * found["weights"] / 4


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--accelerators=72"], "--global-batch-size 1024: must be divisible by"),
        (["--accelerators-per-node=7"], "--accelerators 64: must fill nodes"),
        (["--device=h1000"], "--device: invalid choice"),
        (["--rate=0.1", "--p-grad=0.2"], "--rate 0.1: cannot be combined with --p-grad"),
        (["--rate-index=5"], "--rate-index 5: must be from 0 to 4"),
        (["--tensor-model-parallel-size=3"], "TP x PP = 3 x 1 needs a multiple of 3 ranks"),
        (["--num-attention-heads=30"], "--hidden-size 4096: must be divisible by"),
        (["--tokenizer=hf:absent/model"], "--tokenizer hf:absent/model: is neither a folder nor in"),
        (["--save=x"], "--save x: cannot be given to launch"),
        (["--loss-model=trace", "--trace=absent"], "--trace absent"),
        (["--environment=A"], "--environment A: must be pairs NAME=VALUE"),
        (["--launcher=srun"], "--rdzv-endpoint n:1: needs --launcher torchrun"),
        (["--save-retain=2", "--program=p.py"], "--save-retain 2: needs --program train; Megatron-LM has --save-r"),
        (["--context-parallel-size=2", "--program=p.py"], "--context-parallel-size 2: launch cannot check it"),
    ],
)
def test_one_line_says_what_is_wrong(flags, message, text, tmp_path):
    command = arguments(DP64, text, tmp_path, "--rdzv-endpoint=n:1", *flags)
    with pytest.raises(UsageError, match=message) as raised:
        check(make_plan(command), starting=False)
    assert "\n" not in str(raised.value)


def test_status_2_and_nothing_started(text, tmp_path):
    """The node has no accelerator."""
    command = arguments(DP64, text, tmp_path / "out", "--rdzv-endpoint=n:1")
    done = subprocess.run([sys.executable, "-m", "megatron_lossy.launch", *command], capture_output=True, text=True)
    assert done.returncode == 2 and not done.stdout and not (tmp_path / "out").exists()
    assert done.stderr.strip() == (
        f"megatron_lossy.launch: error: --device (cuda) (from {DP64}): 8 accelerators are asked for on this node, 0 are there"
    )


def test_a_file_may_not_be_its_own_base(tmp_path):
    (tmp_path / "a.yaml").write_text("base: b.yaml\n")
    (tmp_path / "b.yaml").write_text("base: a.yaml\n")
    with pytest.raises(UsageError, match="leads back to it"):
        make_plan([f"--config={tmp_path}/a.yaml", "--program=train", "--out=x"])


def test_commands_of_the_launchers(text, tmp_path):
    def command(*flags, environment=None):
        return " ".join(launch_command(make_plan(arguments(DP64, text, tmp_path, *flags)), environment or {}))

    nodes = command("--launcher=torchrun", "--rdzv-endpoint=n1:29400", "--rate=0.1", "--max-restarts=3")
    assert "--nnodes 8 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint n1:29400 --rdzv-id p_0.10" in nodes
    assert "--max-restarts 3" in nodes and " -m megatron_lossy.train " in nodes
    assert "--standalone" in command("--launcher=torchrun", "--accelerators=4")
    with pytest.raises(UsageError, match="8 nodes need --rdzv-endpoint"):
        command("--launcher=torchrun")

    job = {"SLURM_JOB_ID": "70012", "SLURM_RESTART_COUNT": "2", "SLURM_CPUS_PER_TASK": "8"}
    image = ["--container-image=/images/a.sqsh", "--container-mounts=/d:/d"]
    slurm = command("--launcher=srun", "--rate=0", *image, environment=job)
    assert slurm.startswith("srun --nodes 8 --ntasks 64 --ntasks-per-node 8 ")
    assert f"--output={tmp_path}/p_0.00/logs/70012.2/rank-%t.log" in slurm and "--cpus-per-task 8" in slurm
    assert "--container-image=/images/a.sqsh --container-mounts=/d:/d python -m megatron_lossy.lab.launch.rank" in slurm
    assert "--ranks 64" in slurm and "--master-port 29512" in slurm


def test_what_a_dry_run_prints_is_a_shell_command():
    text = shell(["echo", "--a", "x y", "--b"], {"NAME": "it's"})
    done = subprocess.run(["bash", "-c", text + ' "$NAME"'], capture_output=True, text=True)
    assert done.stdout == "--a x y --b \n"


def test_ranks_of_srun():
    slurm = {"SLURM_PROCID": "9", "SLURM_NTASKS": "12", "SLURM_LOCALID": "1", "SLURM_NODEID": "1"}
    slurm["SLURM_STEP_TASKS_PER_NODE"] = "8,4"
    expected = {"RANK": "9", "WORLD_SIZE": "12", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    assert rank_environment(slurm) == expected
    assert rank_environment(slurm | {"SLURM_STEP_TASKS_PER_NODE": "4(x3)"}) == expected
    with pytest.raises(UsageError, match="srun did not start"):
        rank_environment({})


def test_torchrun_trains_and_writes_a_log_per_rank(text, tmp_path):
    flags = ["--device=cpu", "--accelerators=2", "--rate=0.1", "--train-iters=2", "--lr-warmup-iters=1"]
    flags += ["--num-layers=2", "--hidden-size=64", "--seq-length=32", "--eval-iters=1", "--log-interval=1"]
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [ROOT / "launch/torchrun.sh", *arguments(TINY_FILE, text, tmp_path, *flags, "--no-save-replicas")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    run = tmp_path / "p_0.10"
    assert [record["iteration"] for record in read_records(run, "train")] == [1, 2]
    assert (run / "latest_checkpointed_iteration.txt").read_text() == "2"
    logs = sorted(run.glob("logs/**/stdout.log"))
    assert [path.parent.name for path in logs] == ["0", "1"] and "iteration" in logs[0].read_text()


RUNNING = "JobState=RUNNING PreemptTime=None"


@pytest.mark.parametrize(
    ("done_before", "saves", "status", "state", "expected", "requeued"),
    [
        (0, 60, 0, RUNNING, 0, True),  # stopped before the time limit
        (60, 200, 0, RUNNING, 0, False),  # complete
        (60, None, 0, RUNNING, 1, False),  # would come back for ever
        (60, None, 7, RUNNING, 7, False),  # crashed
        (200, None, 7, RUNNING, 0, False),  # nothing to do: srun would fail
        (60, 80, 0, "JobState=COMPLETING", 0, False),  # cancelled, and must not come back
        (0, None, 143, "JobState=RUNNING PreemptTime=2026-11-21T10:57:30", 0, True),  # preempted while starting
        (0, 60, 0, "", 1, False),  # Slurm does not answer
    ],
)
def test_a_job_is_requeued_until_the_run_is_complete(
    done_before, saves, status, state, expected, requeued, text, tmp_path, monkeypatch
):
    """With programs named srun and scontrol in place of Slurm's; test_launch_slurm.py has the real ones."""
    plan = make_plan(arguments(TINY_FILE, text, tmp_path, "--device=cpu", "--launcher=srun", "--rate=0.1"), tasks=2)

    def checkpoint(iteration):
        tracker = plan.folder / "latest_checkpointed_iteration.txt"
        return f"mkdir -p {plan.folder}/iter_{iteration:07d}; echo {iteration} > {tracker}"

    programs = {
        # A signal to the batch script must not keep it from deciding what is next.
        "srun": f"kill -TERM $PPID\n{checkpoint(saves) if saves else ''}\nexit {status}",
        "scontrol": f'[ "$1" = requeue ] && echo $@ > {tmp_path}/called || echo "JobId=11 {state}"',
    }
    (tmp_path / "bin").mkdir()
    for name, body in programs.items():
        path = tmp_path / "bin" / name
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    if done_before:
        subprocess.run(["sh", "-c", checkpoint(done_before)], check=True)
    environment = os.environ | {"SLURM_JOB_ID": "11", "PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
    monkeypatch.setenv("PATH", environment["PATH"])
    assert run_in_job(plan, launch_command(plan, environment), environment) == expected
    assert (tmp_path / "called").exists() == requeued
    if requeued:
        assert (tmp_path / "called").read_text() == "requeue 11\n"
        assert (plan.folder / "logs/11.0").is_dir()


def test_a_job_of_an_array_is_not_the_whole_array():
    assert job_name({"SLURM_JOB_ID": "11", "SLURM_ARRAY_JOB_ID": "11", "SLURM_ARRAY_TASK_ID": "4"}) == "11_4"


def test_a_job_of_another_size_or_with_other_nodes_is_refused(text, tmp_path):
    command = arguments(DP64, text, tmp_path, "--launcher=srun")
    with pytest.raises(UsageError, match="--accelerators 64: must be the 32 tasks of the Slurm job"):
        make_plan(command, tasks=32)
    plan = make_plan(command, tasks=64)
    check_job(plan, {"SLURM_JOB_NUM_NODES": "8"})
    with pytest.raises(UsageError, match="--accelerators-per-node 8: must be 4: the Slurm job has 16 nodes"):
        check_job(plan, {"SLURM_JOB_NUM_NODES": "16"})
    with pytest.raises(UsageError, match="--accelerators-per-node 8: the Slurm job has 7 nodes for 64 ranks"):
        check_job(plan, {"SLURM_JOB_NUM_NODES": "7"})


def test_epochs_are_said_and_limited(text, tmp_path, capsys):
    command = arguments(TINY_FILE, text, tmp_path, "--device=cpu", "--accelerators=4", "--rate=0.1", "--dry-run")
    with pytest.raises(UsageError, match="G tokens for a run of 0.00041 G, 51.2 epochs; .* --max-epochs"):
        check(make_plan([*command, "--max-epochs=4"]), starting=False)
    launch([*command, "--max-epochs=60"])
    assert f"data     51.2 epochs of {text}/train" in capsys.readouterr().out
    with pytest.raises(UsageError, match="--max-epochs 0.0: must be above 0"):
        make_plan([*command, "--max-epochs=0"])


ISLANDS = ["--islands=2", "--sync-method=parameters", "--sync-fraction=0.25", "--sync-delay=3"]


def test_islands(text, tmp_path, capsys):
    command = arguments(TINY_FILE, text, tmp_path, "--device=cpu", "--accelerators=4", "--max-epochs=60", *ISLANDS)
    launch([*command, "--dry-run"])
    printed = capsys.readouterr().out
    assert "islands  2, each a job of 2 consecutive ranks, data 2, in island_0 and so on\n" in printed
    assert "ranks    4 on 1 node: data 4 x" in printed and "--islands 2" in printed
    plan, whole = make_plan([*command, "--program=pretrain_gpt.py"]), make_plan(command[: -len(ISLANDS)])
    # Each island shards all of the optimizer; a quarter of the weights (float32, its mean, and where) is under way four times.
    mine, alone = (check_memory(one).components for one in (plan, whole))
    assert mine["optimizer shard"] == 2 * alone["optimizer shard"]
    assert mine["averages under way"] == pytest.approx(mine["weights"] / 4 / 2 * 0.25 * 4 * 16)
    # Under Megatron-LM each island has its own batch.
    assert f"--global-batch-size {plan.train.global_batch_size // 2} " in " ".join(plan.module)
    folder = plan.folder / "island_1" / "iter_0000010"
    folder.mkdir(parents=True)
    (folder.parent / "latest_checkpointed_iteration.txt").write_text("10")
    assert done_iterations(plan) == 0  # the other one has none
    for flags, line in (
        (["--islands=3"], "--islands 3: must divide the 4 data-parallel ranks"),
        (["--island-speeds", "1", "2"], "--island-speeds 1.0 2.0: needs --virtual-workers"),
        (["--num-distributed-optimizer-instances=2"], "--num-distributed-optimizer-instances 2: several ranks"),
    ):
        with pytest.raises(UsageError, match=line):
            check(make_plan([*command, *flags]), starting=False)


@pytest.mark.parametrize("file", ["llama2_7b/cuda_dp64", "llama2_7b/gaudi3_dp64", "llama_2b_public/cuda_dp64"])
def test_shipped_configurations_go_with_islands(file, tmp_path):
    given = ["--program=train", f"--out={tmp_path}", "--tokenizer=byte", "--data=stdlib", "--island-join=3"]
    apart = ["--islands=2", "--sync-method=parameters", "--save-replicas", "--rendezvous=etcd://one.example/run"]
    plan = make_plan([f"--config={ROOT}/configs/{file}.yaml", *given, *apart])
    check_training(plan)
    assert plan.ranks == 128


APART = [*ISLANDS, "--save-replicas", "--rendezvous=tcp://one.example:29511/run"]


def test_islands_that_are_launches_of_their_own(text, tmp_path, capsys):
    """A command for each of them and for the coordinator; --accelerators are those of one."""
    key = tmp_path / "run.key"
    key.write_bytes(bytes(32))
    more = ["--device=cpu", "--accelerators=2", "--max-epochs=60", f"--udp-key-file={key}"]
    command = arguments(TINY_FILE, text, tmp_path, *more, *APART)
    with pytest.raises(SystemExit, match="0"):
        launch([*command, "--dry-run"])
    printed = capsys.readouterr().out
    assert "--dry-run" not in printed
    assert "ranks    4 on 1 node for each island: data 4 x" in printed
    assert "islands  2, each a launch of its own, of 2 ranks, data 2, in island_0 and so on\n" in printed
    assert "coordinator \\\n    --bind one.example:29511 \\\n    --key-file " in printed
    commands = printed.partition("--key-file ")[2].split("# island ")[1:]
    assert [one[0] for one in commands] == ["0", "1"]
    for number, one in enumerate(commands):
        words = shlex.split(one.partition("\n")[2].replace("\\\n", " "))
        plan = make_plan(words[3:])
        assert (plan.island, plan.lossy.island) == (number, number)
        assert plan.own_folder == plan.folder / f"island_{number}"
        assert str(plan.own_folder / "logs") in launch_command(plan, {})
        assert plan.ranks == 4 and "--nproc-per-node 2" in " ".join(launch_command(plan, {}))
    with pytest.raises(UsageError, match="--run on: needs --rendezvous, and no --island"):
        check(make_plan([*command, "--island=1", "--run"]), starting=False)


def test_a_signal_ends_all_jobs_and_then_what_they_need(tmp_path):
    # One write a line: the jobs share a pipe, and print may write the end of a line by itself (PYTHONUNBUFFERED).
    wait = "import os, signal, sys, time; signal.signal(15, lambda *_: sys.exit({})); os.write(1, b'on\\n'); time.sleep(60)"
    serve = [sys.executable, "-c", "import time; time.sleep(60)"]
    program = f"""
import sys
from pathlib import Path
from megatron_lossy.lab.launch.command import _run
jobs = [[sys.executable, "-c", one] for one in {[wait.format(status) for status in (0, 3, 4)]!r}]
print("status", _run([{serve!r}], jobs, Path({str(tmp_path / "log")!r})))
"""
    running = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    said = [running.stdout.readline() for _ in range(3)]
    running.terminate()
    rest, _ = running.communicate(60)
    assert (said, rest) == (["on\n"] * 3, "status 3\n")


def _errors(rows, *command) -> list[str]:
    """Return the output of the launcher."""
    done = rows.run("megatron_lossy.launch", *command)
    lines = done.stderr.splitlines()
    assert done.returncode == 2 and all(line.startswith("megatron_lossy.launch: error: ") for line in lines), (
        done.stderr
    )
    return [line.removeprefix("megatron_lossy.launch: error: ") for line in lines]


def test_all_that_is_missing_is_told_at_once(rows):
    said = _errors(rows, "--config=configs/llama2_7b/llama2_7b.yaml", "--tokenizer=sentencepiece:none", "--dry-run")
    starts = ["--program: ne", "--out: ne", "--device: ne", "--data-path: ne", "--eval-iters 10: ne", "--tok"]
    assert len(said) == len(starts) and all(line.startswith(start) for line, start in zip(said, starts)), said


def test_all_that_is_wrong_is_told_at_once(rows, tmp_path):
    wrong = ["--device=a100-40gb", "--program=none.py", "--tokenizer=sentencepiece:none", f"--out={tmp_path}"]
    wrong += ["--data-path=none", "--valid-data-path=no", "--dry-run"]
    said = _errors(rows, "--config=configs/llama2_7b/cuda_dp64.yaml", *wrong)
    starts = ["--device a100-40gb: has", "--program none.py: must", "--tokenizer sentencepiece:none: there is no such"]
    starts += ["--data-path none: there is no", "--valid-data-path no: there is no"]
    assert len(said) == len(starts) and all(line.startswith(start) for line, start in zip(said, starts)), said
    stdlib, program = _errors(rows, "--config=configs/llama2_7b/cuda_dp64.yaml", *wrong[:2], "--data=stdlib", "--out=x")
    assert stdlib.startswith("--data stdlib: needs --program train") and program.startswith("--program none.py: must")


@pytest.mark.parametrize("file", sorted((ROOT / "configs").glob("*/gaudi3_*.yaml")), ids=lambda path: path.stem)
def test_our_trainer_cannot_run_on_the_megatron_of_a_gaudi(file, text, tmp_path):
    with pytest.raises(UsageError, match="--program train: needs megatron-core 0.16; HabanaAI's forks"):
        check(make_plan(arguments(file, text, tmp_path)), starting=False)


def test_a_dry_run_looks_at_the_version_of_megatron(text, tmp_path, monkeypatch):
    core = tmp_path / "path/megatron/core"
    core.mkdir(parents=True)
    (core / "__init__.py").write_text("raise ImportError('it is not imported')")
    (core / "package_info.py").write_text("__version__ = '0.13.1'")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: SimpleNamespace(origin=str(core / "__init__.py")))
    plan = make_plan(arguments(TINY_FILE, text, tmp_path, "--device=cpu", "--accelerators=2"))
    with pytest.raises(UsageError, match="megatron-core 0.13.1: is not supported; use at least 0.16"):
        check(plan, starting=False)


def test_gaudi_needs_the_fork(text, tmp_path, monkeypatch):
    refused = "megatron-lossy: error: --optimizer: invalid choice: 'fusedadamw' (choose from adam, sgd)\n"
    done = SimpleNamespace(returncode=2, stdout="", stderr=refused)
    monkeypatch.setattr("megatron_lossy.lab.launch.checks.subprocess.run", lambda command, **_: done)
    file = ROOT / "configs/llama2_7b/gaudi3_dp64.yaml"
    plan = make_plan(arguments(file, text, tmp_path, "--program=pretrain_gpt.py"))
    with pytest.raises(UsageError, match="'fusedadamw' .*; Gaudi needs HabanaAI's fork: git clone"):
        check_megatron(plan)


@pytest.mark.shows("Megatron-LM accepts the flags of each configuration", device=False)
@pytest.mark.megatron_lm
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], None),
        (["--foo", "3"], "unrecognized arguments: --foo 3"),
        (["--recompute-granularity", "some"], "--recompute-granularity: invalid choice: 'some'"),
        (["--use-megatron-fsdp"], "--use-megatron-fsdp: cannot go with loss"),
        (["--recompute-granularity", "selective", "--recompute-method", "uniform"], "Megatron-LM says: "),
    ],
    ids=["fits", "unknown", "wrong", "refused", "invalid"],
)
def test_megatron_itself_checks_its_flags(flags, message, megatron_lm, text, tmp_path):
    command = arguments(ROOT / "configs/llama2_7b/cuda_dp16.yaml", text, tmp_path, "--rate=0.1", "--launcher=srun")
    command[1] = f"--program={megatron_lm}/pretrain_gpt.py"
    plan = make_plan([*command, *flags])
    with pytest.raises(UsageError, match=message) if message else contextlib.nullcontext():
        check(plan, starting=False)


def test_a_program_without_megatron_is_refused_in_one_line(tmp_path):
    """Nothing of ours imports Megatron before the line that says that it is missing."""
    program = tmp_path / "pretrain_gpt.py"
    program.write_text("")
    code = (
        "import sys; sys.modules['megatron'] = None\n"
        f"sys.argv = ['check', {str(program)!r}, '--p-grad', '0.1']\n"
        "from megatron_lossy.lab.launch.megatron_flags import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=100)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
    assert f"--program {program}: megatron.training cannot be imported from its folder" in done.stderr


def test_a_dry_run_says_what_crosses_between_sites():
    """By hand: half of the gradients in float32 and of the weights in bfloat16, whatever the ranks of a site; and codes."""
    plan, weights = over_datagrams("--sites=2"), 6_738_415_616
    sent = "13.5 GB of gradients and 6.74 GB of parameters"
    assert f"sites    2 of 32 ranks; out of each {sent} an iteration, and as much into it" in estimates(plan)
    assert check_memory(plan).components["parts of a site"] == pytest.approx(weights * 6 / 32)
    coded = over_datagrams("--sites=4", "--grad-wire=int8", "--param-wire=int8")
    assert any("4 of 16 ranks; out of each 5.05 GB of gradients and 5.05 GB" in line for line in estimates(coded))
    assert not any("--udp-rate" in line for line in estimates(coded))
    rated = over_datagrams("--sites=2", "--udp-rate", "dedicated", "10gbit")
    assert "         at --udp-rate dedicated 10gbit in 16.2 s at least" in estimates(rated)
