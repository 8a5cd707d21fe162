"""The unmodified pretrain_gpt.py of a checkout of Megatron-LM, on two ranks, over gloo or on CUDA.

    pytest tests/test_plugin_megatron_lm.py --megatron-lm=/path/to/Megatron-LM      (about four minutes)

On CPU the checkout must have its data helpers compiled (megatron/core/datasets: make), or those of the wheel copied.
"""

import collections
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from torch.utils import cpp_extension

import tests.ranks
from megatron_lossy.lab.report.read import read_megatron_run
from tests.slurm_cluster import free_ports
from tests.trainer import tensorboard

pytestmark = [
    pytest.mark.shows(
        "the unmodified `pretrain_gpt.py`: Megatron's digits, resumed, full replicas, stages",
        "the unmodified `pretrain_gpt.py` over UDP: digits of `pieces`, a killed rank",
        "the unmodified `pretrain_gpt.py` in two sites: as torch, in pieces, over UDP",
    ),
    pytest.mark.megatron_lm,
    pytest.mark.timeout(600),
]

MODEL = shlex.split("""
    --transformer-impl local --use-cpu-initialization --no-gradient-accumulation-fusion --no-masked-softmax-fusion
    --no-bias-gelu-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion --no-rope-fusion --no-persist-layer-norm
    --distributed-backend gloo --use-distributed-optimizer --num-layers 2 --hidden-size 64 --num-attention-heads 4
    --seq-length 64 --max-position-embeddings 64 --micro-batch-size 2 --global-batch-size 8 --train-iters 20
    --lr 1e-3 --lr-decay-style cosine --clip-grad 1.0 --mock-data --tokenizer-type NullTokenizer --vocab-size 4999
    --eval-interval 10 --eval-iters 2 --log-interval 1 --attention-backend unfused
""")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
#: HabanaAI's asks for the second on every device.
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
#: Ranks share the output: of one of them, not whole lines.
PRINTED = r"iteration +\d+/.*?number of nan iterations: +\d+ \||validation loss at iteration [^|\n]*(?:\| [^|\n:]+: [\d.E+-]+ )+\|"
ASYNCHRONOUS = ["--async-save", "--use-persistent-ckpt-worker"]
LOSS = ["--p-grad", "0.3", "--p-param", "0.3", "--loss-unit", "packet", "--packet-bytes", "512"]


def pretrain(megatron_lm, *arguments, plugin=True, ranks=2, distributed=True, module="megatron_lossy"):
    """The columns of the log that do not depend on time, and the process. ``distributed``: with sharded optimizers.

    ``module``: the plugin, or a program that runs it.
    """
    model = list(MODEL)
    if not distributed:
        model.remove("--use-distributed-optimizer")
    if "--train-samples" in arguments:  # Megatron wants one of them
        del model[(at := model.index("--train-iters")) : at + 2]
    if tests.ranks.kind == "cuda":
        model[model.index("gloo")] = "nccl"
        model += ["--local-rank", 0] if torch.cuda.device_count() < ranks else []
    script = os.path.join(megatron_lm, "pretrain_gpt.py")
    launcher = ["-m", module] if plugin else [os.path.join(os.path.dirname(__file__), "bare.py")]
    command = [*TORCHRUN, "--standalone", "--nproc-per-node", ranks, *launcher, script, *model, *arguments]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=ENVIRONMENT)
    lines = re.findall(PRINTED, done.stdout)
    return [re.sub(r"elapsed time per iteration \(ms\): [\d.]+ \|", "", line) for line in lines], done


def test_a_killed_rank_is_started_again_and_finds_the_others(megatron_lm, tmp_path):
    """With one store over both attempts, and a node that is slower to start again than the other."""
    port = free_ports(1)[0]
    flags = [*MODEL, *LOSS, "--save", tmp_path / "run", "--load", tmp_path / "run", "--save-interval", 5]
    script = tmp_path / "script.py"
    script.write_text(
        "import os, runpy, sys, time\n"
        "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '1' and os.environ['RANK'] == '0': time.sleep(5)\n"
        f"sys.argv[0] = {str(megatron_lm)!r} + '/pretrain_gpt.py'\n"
        "from megatron_lossy.__main__ import main\n"
        "main(sys.argv)\n"
    )
    nodes, logs = [], [tmp_path / f"{node}.log" for node in range(2)]
    for node, path in enumerate(logs):
        where = ["--nnodes", 2, "--node-rank", node, "--master-addr", "127.0.0.1", "--master-port", port]
        command = list(map(str, [*TORCHRUN, *where, "--max-restarts", 2, script, *flags]))
        with open(path, "w") as log:
            nodes.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=ENVIRONMENT))
    try:
        while not (tmp_path / "run" / "latest_checkpointed_iteration.txt").exists():
            assert all(node.poll() is None for node in nodes), logs[0].read_text()
            time.sleep(0.1)
        psutil.Process(nodes[1].pid).children()[0].kill()
        assert [node.wait(240) for node in nodes] == [0, 0], logs[0].read_text()
    finally:
        for node in nodes:
            node.kill()
    said = logs[0].read_text() + logs[1].read_text()
    assert "successfully loaded checkpoint" in said and "iteration       20/" in said


@pytest.mark.on_cuda
@pytest.mark.shows("the unmodified `pretrain_gpt.py`: without loss every digit is Megatron's")
def test_without_loss_every_digit_is_megatrons(megatron_lm, ranks_on, tmp_path, monkeypatch):
    """Without our flags, with rates 0, and against Megatron with nothing of ours but the CPU in place."""
    if ranks_on == "cuda" and cpp_extension.CUDA_HOME is None:  # it is asked for its version, and for no kernel
        (tmp_path / "bin").mkdir()
        (tmp_path / "bin" / "nvcc").write_text("#!/bin/sh\necho release 13.0,\n")
        (tmp_path / "bin" / "nvcc").chmod(0o755)
        monkeypatch.setitem(ENVIRONMENT, "CUDA_HOME", str(tmp_path))
    bare, done = pretrain(megatron_lm, plugin=False)
    assert len(bare) == 24, done.stderr
    assert pretrain(megatron_lm)[0] == bare
    assert pretrain(megatron_lm, "--p-grad", 0, "--p-param", 0)[0] == bare
    lossy, done = pretrain(megatron_lm, "--p-grad", 0.1, "--p-param", 0.1)
    assert len(lossy) == 24 and lossy != bare, done.stderr


def test_full_replicas(megatron_lm, tmp_path):
    """Without errors every digit is Megatron's; with errors replicas are averaged, and a run that stopped goes on."""
    watched = ["--param-sync-interval", 3, "--replica-check", "repair"]
    bare, _ = pretrain(megatron_lm, plugin=False, distributed=False)
    lines, done = pretrain(megatron_lm, *watched, distributed=False)
    assert len(bare) == 24 and lines == bare
    assert re.search(r"param syncs: 0 \| param sync interval: 3", done.stdout)
    errors = shlex.split("--grad-error gaussian:1rms --eval-weights both --save-replicas") + watched[:2]
    whole, done = pretrain(megatron_lm, *errors, "--overlap-grad-reduce", distributed=False)
    assert "param syncs: 1 |" in done.stdout and "(owner weights)" in done.stdout and whole[:-4] != bare[:-4]
    folder = ["--save", tmp_path, "--load", tmp_path, "--save-interval", 8, "--ckpt-format", "torch_dist"]
    first, _ = pretrain(megatron_lm, *errors, "--overlap-grad-reduce", *folder, "--exit-interval", 8, distributed=False)
    second, done = pretrain(megatron_lm, *errors, "--overlap-grad-reduce", *folder, distributed=False)
    # Without us, too, Megatron 0.16 reports another loss of the second iteration after a resume, with the same gradients.
    assert [*first[:8], second[0], *second[2:]] == [*whole[:9], *whole[10:]], done.stderr[-2000:]
    _, done = pretrain(megatron_lm, *watched)
    assert done.returncode != 0 and "--param-sync-interval 3: needs replicas" in done.stderr


@pytest.mark.parametrize(
    "flags",
    [
        ["--overlap-grad-reduce", "--overlap-param-gather", "--grad-recovery", "previous", "--eval-weights", "both"],
        ["--bf16", "--eval-weights", "owner", "--ckpt-format", "torch"],
        # From four to eight samples in iterations 8 and 9, and a checkpoint that is written while training goes on.
        [*ASYNCHRONOUS, "--rampup-batch-size", "4", "4", "40", "--train-samples", "128", "--eval-weights", "both"],
        ["--sites", "2", "--overlap-grad-reduce", "--overlap-param-gather", "--param-send", "compensated"],
    ],
    ids=["overlapped", "bf16", "asynchronous, batch ramp-up", "two sites, with a lead"],
)
def test_a_resumed_run_equals_an_uninterrupted_one(megatron_lm, flags, tmp_path):
    flags, ranks = [*LOSS, *flags, "--save-replicas"], 4 if "--sites" in flags else 2
    if "--async-save" in flags and "async_strategy" in Path(megatron_lm, "megatron/training/arguments.py").read_text():
        flags += ["--async-strategy", "mcore"]  # the other one needs CUDA
    whole, done = pretrain(megatron_lm, *flags, "--save", tmp_path / "whole", "--save-interval", 10, ranks=ranks)
    if "'numpy' has no attribute 'product'" in done.stderr:
        pytest.skip("torch_dist checkpoints of this Megatron need NumPy 1")  # 0.14
    assert done.returncode == 0, done.stderr[-3000:]
    if "--async-save" in flags:
        assert "scheduled an async checkpoint save" in done.stdout
        sizes = [int(size) for size in re.findall(r"global batch size: +(\d+)", " ".join(whole))]
        ramps_up = "--async-strategy" not in flags  # from 0.18 on Megatron takes that flag and ignores it
        assert sizes == sorted(sizes) and (min(sizes) < max(sizes)) == ramps_up
    half = tmp_path / "half"
    half.mkdir()
    shutil.copytree(tmp_path / "whole" / "iter_0000010", half / "iter_0000010")
    (half / "latest_checkpointed_iteration.txt").write_text("10")
    resumed, done = pretrain(megatron_lm, *flags, "--load", half, ranks=ranks)
    if "No module named 'transformer_engine'" in done.stderr:
        pytest.skip("torch_dist checkpoints of this Megatron need Transformer Engine")  # 0.12
    assert done.returncode == 0, done.stderr[-3000:]
    assert "(owner weights)" in resumed[-1] or "both" not in flags
    # Megatron's first line after a resume stays in the mean that the second one reports: compare from the third on.
    assert resumed[0] == whole[-len(resumed)]
    assert resumed[2:] == whole[-len(resumed) + 2 :]


def test_over_datagrams_every_digit_is_that_of_the_same_losses_in_pieces(megatron_lm):
    """The loopback device loses nothing: what a channel draws is all that is lost."""
    flags = [*LOSS, "--overlap-grad-reduce", "--overlap-param-gather", "--param-send", "compensated:0.4"]
    pieces, done = pretrain(megatron_lm, *flags, "--transport", "pieces")
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(pieces) == 24
    udp, done = pretrain(megatron_lm, *flags, "--transport", "udp")
    assert udp == pieces, done.stderr[-3000:]
    assert "over UDP, aes-128-gcm" in done.stdout and "Error" not in done.stderr
    assert done.stdout.count("udp, rank 0, all: sent") == done.stdout.count("udp, rank 1, all: sent") == 1


def test_two_sites(megatron_lm):
    """Without loss every digit is Megatron's; with loss the digits are those of any transport, with and without overlap."""
    bare, _ = pretrain(megatron_lm, plugin=False, ranks=4)
    assert len(bare) == 24
    assert pretrain(megatron_lm, "--sites", 2, "--p-grad", 0, "--p-param", 0, ranks=4)[0] == bare
    lossy, done = pretrain(megatron_lm, "--sites", 2, *LOSS, ranks=4)
    assert len(lossy) == 24 and "between 2 sites only" in done.stdout, done.stderr[-3000:]
    losses = [float(re.search(r"lm loss: ([\d.E+-]+)", line)[1]) for line in lossy if line.startswith("iteration")]
    assert losses[-1] < losses[0] and lossy[1:] != bare[1:]
    overlapped = ["--sites", 2, *LOSS, "--overlap-grad-reduce", "--overlap-param-gather", "--transport"]
    for transport in ("torch", "pieces", "udp"):
        lines, done = pretrain(megatron_lm, *overlapped, transport, ranks=4)
        assert lines == lossy, transport + done.stderr[-3000:]


def test_small_sums_of_an_iteration_cross_between_sites_in_two_round_trips_at_most(megatron_lm):
    """Three, of half a round trip each: a flag of reruns, the norm and the loss. Barriers are at the log alone."""
    crossed = []
    for iterations in (4, 8):
        quiet = ["--train-iters", iterations, "--log-interval", iterations, "--eval-iters", 0, "--sites", 2, *LOSS]
        _, done = pretrain(megatron_lm, *quiet, ranks=4, module="tests.between_sites")
        assert done.returncode == 0, done.stderr[-3000:]
        lines = re.findall(r"^crossed (\w+) (\d) (\d+) (\d+)$", done.stdout, re.MULTILINE)
        few = [
            (name.replace("alltoall_base", "all_to_all_single"), ranks, n)
            for name, ranks, size, n in lines
            if int(size) < 65
        ]
        crossed.append(collections.Counter())
        for name, ranks, number in few:
            crossed[-1][name, int(ranks)] += int(number)
    assert crossed[1] - crossed[0] == {("all_to_all_single", 2): 3 * 4}


@pytest.mark.shows("datagrams: packets as long as all paths carry", device=False)
def test_packets_as_long_as_the_paths_carry_are_those_of_a_run_with_their_number(megatron_lm):
    flags = [*LOSS, "--packet-bytes"]
    pieces, done = pretrain(megatron_lm, *flags, 8896, "--transport", "pieces")
    assert done.returncode == 0 and len(pieces) == 24, done.stderr[-3000:]
    udp, done = pretrain(megatron_lm, *flags, "auto", "--transport", "udp")
    assert udp == pieces, done.stderr[-3000:]
    assert done.stdout.count("udp: --packet-bytes auto takes 8896: ") == 1 and "packet of 8896 bytes" in done.stdout


@pytest.mark.shows("monitors in Megatron's log and TensorBoard")
def test_monitors_write_to_megatrons_log_and_tensorboard(megatron_lm, tmp_path):
    flags = [*LOSS, "--overlap-grad-reduce", "--overlap-param-gather"]
    plain, _ = pretrain(megatron_lm, *flags)
    lines, done = pretrain(megatron_lm, *flags, "--drift-interval", 5, "--tensorboard-dir", tmp_path)
    assert lines == plain
    header = (
        "loss: gradients 30 %, parameters 30 %; bernoulli, seed 1234; unit packet of 512 bytes; recovery renormalize; "
    )
    assert done.stdout.count(header + "simulated | data-parallel ranks 2\n") == 1
    assert len(re.findall(r"exchanges up to iteration +\d+ \| loss rate grad: 0\.\d+ \|", done.stdout)) == 20
    assert len(re.findall(r"\| drift pairs: [1-9]", done.stdout)) == 4
    events = tensorboard(tmp_path)
    assert [event.step for event in events.Scalars("stale age max")] == list(range(1, 21))
    assert [event.step for event in events.Scalars("drift owner predicted")] == [5, 10, 15, 20]
    # Of the text log too, whose lines other ranks may have broken.
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "run.log").write_text(done.stdout)
    assert len(read_megatron_run(tmp_path / "text").train) >= 15


def test_help_shows_our_flags_in_groups_of_their_own(megatron_lm):
    _, done = pretrain(megatron_lm, "--help", ranks=1)
    if done.returncode and pretrain(megatron_lm, "--help", plugin=False, ranks=1)[1].returncode:
        pytest.skip("the --help of this Megatron fails by itself")  # a per cent sign in a help text of 0.18
    assert "loss (megatron-lossy): islands:" in done.stdout and "--p-grad P" in done.stdout


def test_what_cannot_be_right_is_refused_before_training(megatron_lm):
    _, done = pretrain(megatron_lm, *LOSS, "--check-weight-hash-across-dp-replicas-interval", 5)
    assert "error: --check-weight-hash-across-dp-replicas-interval with parameter loss" in done.stderr
    assert "iteration        1/" not in done.stdout


def test_stage_boundaries(megatron_lm):
    """Two stages: training loses activations, evaluation does not, and beyond the bound nothing is lost."""
    pipeline = ("--pipeline-model-parallel-size", 2, "--untie-embeddings-and-output-weights")
    lossless, _ = pretrain(megatron_lm, *pipeline)
    rates = ("--p-act", 0.3, "--p-act-grad", 0.3, "--packet-bytes", 512)
    lossy, done = pretrain(megatron_lm, *pipeline, *rates, "--act-fec", "off")
    assert len(lossy) == len(lossless) == 24 and lossy[0] != lossless[0]
    [rate, *_] = re.findall(r"loss rate act: ([\d.]+)", done.stdout)
    assert 0.2 < float(rate) < 0.4
    bound = ("--act-fec", "100,34,0", "100,10,0", 0.5)
    assert pretrain(megatron_lm, *pipeline, *rates, *bound)[0] == lossless
