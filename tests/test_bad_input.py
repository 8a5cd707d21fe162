"""Bad input to every command: one line, status 2, or 1 where the machine is at fault; nothing lost, nothing left."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.programs import ROOT, run_program
from tests.ranks import run_ranks
from tests.trainer import TINY, as_flags, train_runs, write_data

pytestmark = pytest.mark.shows("wrong input to every command: one line, status 2, nothing lost", device=False)

SETTINGS = TINY | dict(data_path=("data/train",), train_iters=2, eval_iters=0, lr_warmup_iters=0)
LOSS = dict(p_grad=0.1, p_param=0.1, save_replicas=True)
SEVEN_B = (
    f"--config {ROOT}/configs/llama2_7b/cuda_dp64.yaml --program train --out out --rate 0.1 --tokenizer byte --dry-run"
)
STDLIB = f"{SEVEN_B} --data stdlib"
APART = "--islands 3 --sync-method parameters --rendezvous"
NEW = "--input text.txt --output-prefix new"
STUDY = "title: Mine\nlevels: {10 %: {p: 0.1}}\nsettings: {virtual-workers: 2, num-layers: 1, hidden-size: 32, "
STUDY += "num-attention-heads: 2, seq-length: 16, micro-batch-size: 1, global-batch-size: 2, train-iters: 2, lr: 1e-3, "
STUDY += "data-path: data/train, eval-iters: 0}\n"


@dataclass(frozen=True)
class Case:
    """A command line in the folder of :func:`world`, and how the one line begins that it ends with; * is anything.

    ``cripple``: as of :mod:`tests.crippled`.
    """

    command: str
    line: str
    status: int = 2
    ranks: int = 0
    cripple: str = ""


def full(command: str, line: str, limit: int = 200, **more) -> Case:
    """Return a case with files of at most ``limit`` bytes: a full disk where none can be mounted."""
    return Case(command, line, status=1, cripple=f"bytes={limit}", **more)


TRAIN = [
    Case("--p-grad 1.0", "--p-grad 1.0: must be in [0, 1)"),
    Case("--p-grads 0.1 --sav=3", "unrecognized arguments: --p-grads 0.1 --sav=3, did you mean --p-grad and --save"),
    Case("--xyzzy 0.1", "unrecognized arguments: --xyzzy 0.1\n"),
    Case("--p-grad 0.1 --loss-model bernoulli:16", "--loss-model bernoulli:16: bernoulli takes nothing after a colon"),
    Case("--p-grad 0.1 --lossy-links inter-node:0", "--lossy-links inter-node:0: must be all, inter-node or"),
    Case("--packet-bytes most", "--packet-bytes: must be a whole number or auto, not 'most'"),
    Case("--transport stream --udp-key-file gone.key", "--udp-key-file gone.key: cannot be read: No", ranks=2),
    Case("--sgd-momentum 0.5", "--sgd-momentum 0.5: needs --optimizer sgd, not adam"),
    Case("--p-act 1.0", "--p-act 1.0: must be in [0, 1)"),
    Case("--p-act 0.1 --act-fec 9,1,0 10,11,0 0.5", "--act-fec 10 11: needs 1 <= C <= B"),
    Case("--islands 2 --virtual-workers 4", "--islands 2: needs --sync-method: parameters, diloco, eager-diloco, no"),
    Case("--config own.yaml", "--adam-beta1 2.0 (from own.yaml): must be in [0, 1)"),
    Case("--config own.yaml --p-grad 2", "--p-grad 2.0: must be in [0, 1)"),
    Case("--config own.yaml --adam-beta2 3", "--adam-beta2 3.0: must be in [0, 1)"),
    Case("--config twice.yaml", "--config twice.yaml: has p_grad twice in a mapping, in lines 1 and 3"),
    Case("--loss-preset smart --loss-unit shard", "--grad-priority packet-mean:0.01 (of the preset smart): needs -"),
    Case("--grad-recovery error-feedback --loss-unit shard", "--grad-priority packet-mean (default): needs --loss-"),
    Case("--help-loss island", "--help-loss island: must be one of all, presets, *did you mean islands\n"),
    Case("--loss-preset=paff", "--loss-preset paff: *, did you mean paft\n"),
    Case("--loss-preset", "--loss-preset: expected one argument"),
    Case("--sync-method parameters", "--sync-method parameters: needs --islands of at least 2"),
    Case("--virtual-stages 2", "--virtual-stages 2: needs --async-pipeline"),
    Case("--config none.yaml", "--config none.yaml: cannot be read: No such file or directory"),
    Case("--config data", "--config data: cannot be read: Is a directory"),
    Case("--config /proc/self/mem", "/proc/self/mem: Input/output error", status=1),
    Case("--data-path data/none", "--data-path data/none: there is no data/none.bin"),
    Case("--data-path broken/short", "--data-path broken/short: broken/short.bin has 100 bytes, not the 16002"),
    Case("--data-path broken/nothing", "--data-path broken/nothing: broken/nothing.bin holds no token"),
    Case("--data-path 0 data/train", "--data-path 0 data/train: must be prefixes, or each after its weight; no weight"),
    Case("--tokenizer hf:/none/at/all", "--tokenizer hf:/none/at/all: "),
    Case("--load none", "--load none: is no folder; to start a run, leave it out"),
    Case("--load empty --save new", "--load empty: has no latest_checkpointed_iteration.txt, which names"),
    Case("--load broken/gone", "--load broken/gone: latest_checkpointed_iteration.txt there names '7'"),
    Case("--load broken/checkpoint", "--load broken/checkpoint/iter_0000002: cannot be read (*)\n"),
    Case("--save-retain 2", "--save-retain 2: needs --save"),
    Case("--save new --save-retain 0", "--save-retain 0: must be at least 1"),
    Case(
        "--save new --save-replicas --save-retain 1 --islands 2 --sync-method parameters",
        "--save-retain 1: must be at least 2 with --islands: after a kill between their saves",
        ranks=2,
    ),
    Case("--config list.yaml", "--config list.yaml: p-grad [0.1, 0.2]: must be one value, not a list"),
    Case(f"{APART} etcd://one.example/run", "--island: needs a value: --islands"),
    Case(f"{APART} one.example:29511 --island 1", "--rendezvous one.example:29511: must be tcp://HOST:PORT/RUN"),
    Case(f"{APART} tcp://one.example/run --island 1", "--udp-key-file: needs the key file of the coordinator"),
    Case("--load broken/settings", "--load broken/settings: settings.json there is not of this program"),
    Case("--load runs/p_0.10 --num-layers 4", "--load runs/p_0.10: --num-layers was 2 there and is 4 here"),
    Case("--save runs/p_0.10 --load runs/p_0.10 --lr 1", "--save runs/p_0.10: holds another run (--lr was 0.01"),
    Case(
        "--save runs/p_0.10 --load runs/p_0.10 --train-iters 3",
        "--save runs/p_0.10: holds another run (--train-iters was 2 there and is 3 here); *a finished run takes more --train-iters if",
    ),
    Case("--save text.txt", "--save text.txt: must be a folder that can be written to; it is no folder"),
    Case("--metrics-dir text.txt/run", "--metrics-dir text.txt/run: must be a folder that can be written to; /"),
    Case("--save /proc/none", "--save /proc/none: "),
    Case("--loss-model trace --trace text.txt", "--trace text.txt: must be a folder that", ranks=2),
    Case("--p-grad 0.1 --delivery-log log", "--delivery-log log: holds another run (--p-param was 0.1", ranks=2),
    Case("--tensor-model-parallel-size 2", "--tensor-model-parallel-size 2: TP x PP = 2 x 1 needs a multiple of 2"),
    full("--data-cache-path cache", "cache: File too large"),
]
DATA = [
    Case("", "--input (none): give files"),
    Case("--input empty.txt --output-prefix new", "--input empty.txt: is empty"),
    Case(f"{NEW} --tokenizer mystery", "--tokenizer mystery: "),
    Case(f"{NEW} --tokenizer hf:", "--tokenizer hf:"),
    Case("--input *.md --output-prefix new", "--input *.md: matches no file"),
    Case("--input blank.txt --output-prefix new", "--input: no document holds text"),
    Case("--input text.txt/part --output-prefix new", "--input text.txt/part: cannot be read: Not a directory"),
    Case(f"{NEW} --split 0.9 0.1", "--split (1 documents): needs at least 2"),
    Case(f"{NEW} --split nan 0.1", "--split nan 0.1: must be two positive numbers"),
    Case("--input latin.jsonl --output-prefix new --format jsonl", "--input *latin.jsonl: line 1 is not valid Unicode"),
    Case(f"{NEW} --format jsonl --split-documents blank-line", "--split-documents blank-line: needs --format text"),
    Case("--inpt x", "unrecognized arguments: --inpt x, did you mean --input"),
    Case("--input none.txt --output-prefix new", "--input none.txt: cannot be read: No such file or directory"),
    Case("--input empty --output-prefix new", "--input empty: holds no file"),
    Case("--input text.txt --output-prefix data/train", "--output-prefix data/train: data/train.bin exists already"),
    Case("--input text.txt --output-prefix text.txt/new", "--output-prefix text.txt: must be a folder that can"),
    Case(f"{NEW} --format jsonl", "--input *text.txt: line 1 is not JSON"),
    Case(f"{NEW} --split 0.5 0.6", "--split 0.5 0.6: must be two positive numbers that"),
    Case("--input /proc/self/mem --output-prefix new", "/proc/self/mem: Input/output error", status=1),
    full(NEW, "new: File too large"),
    full("--input text.txt --output-prefix data/train --overwrite", "data/train: File too large", limit=1000),
]
STUDIES = [
    Case("none.yaml", "STUDY none.yaml: cannot be read: No such file or directory"),
    Case("text.txt", "STUDY text.txt: must be a mapping"),
    Case("study.yaml --job 1", "unrecognized arguments: --job, did you mean --jobs"),
    Case("study.yaml --p-gred 0.1", "unrecognized arguments: --p-gred, did you mean --p-grad"),
    Case("study.yaml --jobs 0", "--jobs 0: must be at least 1"),
    Case("study.yaml --cells text.txt", "--cells text.txt: must be a folder that can be written to; it is no folder"),
    Case("study.yaml --out text.txt", "--out text.txt: must be a folder that can be written to; it is no folder"),
    Case("study.yaml --out runs", "--out runs: holds a run (runs/p_0.10/metrics.jsonl); choose another folder for the"),
    Case("study.yaml --out runs/p_0.10", "--out runs/p_0.10: holds a run (runs/p_0.10/metrics.jsonl); choose another"),
    Case("study.yaml --cells new --out new", "--out new: is the folder of --cells; choose another"),
    Case("study.yaml --out other", "--out other: holds the report of another study, 'Theirs'"),
    Case("study.yaml", "--out runs/study: needs the package matplotlib", cripple="without=matplotlib"),
    full("study.yaml --cells cells", "cells/*/config.yaml: File too large"),
    Case("report text.txt", "FOLDER text.txt: must hold a report with study.json"),
    Case("report other", "FOLDER other: its study.json cannot be made again here: STUDY theirs.yaml: cannot be read"),
    Case("study.yaml --virtual-workers 3", "Mine, 0 %: --global-batch-size 2 (from the study, settings): must be"),
]
REPORT = [
    Case("none", "RUNS_DIR none: holds no run"),
    Case("empty", "RUNS_DIR empty: holds no run"),
    Case("broken", "RUNS_DIR broken/metrics/metrics.jsonl line 1: is not JSON"),
    Case("runs --out old", "--out old: old/loss_table.md exists already; give another, or --overwrite"),
    Case("runs --out text.txt", "--out text.txt: must be a folder that can be written to; it is no folder"),
    Case("runs", "--out runs: needs the package matplotlib", cripple="without=matplotlib"),
    full("runs --out old --overwrite", "old: File too large", limit=4000),
]
DELIVERY_LOG = [
    Case("summary none", "DIR none: must be a folder that --delivery-log wrote"),
    Case("summary broken/log", "DIR broken/log: "),
    Case("verify empty", "DIR empty: must be a folder that --delivery-log wrote"),
]
LAUNCH = [
    Case(f"{STDLIB} --acelerators 8", "--acelerators 8: is no flag of python -m"),
    Case("--config configs", "--config configs: cannot be read: No such file or directory"),
    Case("", "--config: needs a value, for example configs/llama2_7b/cuda_dp64.yaml"),
    Case(f"{STDLIB} --device a100-40gb", "--device a100-40gb: has 40.0 GiB, pipeline stage"),
    Case(f"{STDLIB} --rate-index 1", "--rate-index 1: cannot be combined with --rate"),
    Case(f"{SEVEN_B} --data-path data/train --valid-data-path data/train", "--data-path data/train: has 8e-06 G"),
    Case(f"{SEVEN_B} --data-path broken/nothing --valid-data-path data/train", "--data-path broken/nothing: broken"),
    Case(f"{STDLIB} --train-iters 10", "--lr-warmup-iters 500 (from *llama2_7b/llama2_7b.yaml): must be below the 10"),
    Case(f"{STDLIB} --rate 2", "--p-grad 2.0 (of --rate): must be in [0, 1)"),
    Case(f"{STDLIB} --out text.txt", "--out text.txt/p_0.10: must be a folder that can be"),
]
LAUNCHER = [
    Case("", "usage: python -m megatron_lossy SCRIPT"),
    Case("text.txt --p-grad much", "--p-grad: invalid float value: 'much'"),
    Case("text.txt --loss-unit byte", "--loss-unit: invalid choice: 'byte'"),
    Case("none.py", "SCRIPT none.py: must be a Python file, for example Megatron-LM's pretrain_gpt.py"),
    Case("docter", "SCRIPT docter: must be a Python file, *copy, coordinator, did you mean doctor\n"),
    Case("text.txt --loss-preset papr", "--loss-preset papr: must be a file or one of asyncmesh"),
    Case("text.txt --p-grad 2", "--p-grad 2.0: must be in [0, 1)"),
    Case("other/doctor --p-grad 2", "--p-grad 2.0: must be in [0, 1)"),  # a script of this name
    Case("text.txt --loss-preset smart --loss-unit shard", "--grad-priority packet-mean:0.01 (of the preset smart"),
    Case("text.txt --loss-model trace --trace none", "--trace none: must be a folder that", ranks=2),
    Case("refusals leads", "SECTION leads: must be one of core, pytorch, transport"),
    Case("copy text.txt", "FOLDER text.txt: cannot be written: Not a directory"),
    Case("copy /proc/none", "FOLDER /proc/none: cannot be written: No such file or directory"),
    full("copy new", "new: File too large"),
    full("copy empty", "empty: File too large"),
    Case("doctor --megatron-lm none", "--megatron-lm none: must be a checkout of Megatron-LM"),
    Case("doctor --step gpu", "--step: invalid choice: 'gpu'"),
    Case("coordinator", "the following arguments are required: --key-file"),
    Case("coordinator --key-file none", "--key-file none: cannot be read: No such file or directory"),
    Case("coordinator --key-file own.yaml", "--key-file own.yaml: has 14 bytes, and a secret needs 16 at least"),
    Case("coordinator --key-file text.txt --page a:b", "--page a:b: must be HOST:PORT"),
    Case("coordinator --key-file text.txt --journal text.txt/a", "--journal text.txt/a: cannot be used: unable to"),
    Case("doctor --link host", "--link host: needs a port in [1, 65535], as in HOST:29500"),
    Case("doctor --serve 0", "--serve 0: needs a port in [1, 65535]"),
    Case("doctor --link host:1 --key-file none", "--key-file none: cannot be read"),
    Case("plan --step 1s", "--mbit (none): needs a value, or --link FILE of doctor --link"),
    Case("plan --mbit 1 --rtt 1", "--step (none): needs a value, or else --metrics FILE"),
    Case("plan --mbit 1 --rtt 1 --step fast", "--step fast: must be a number of at least 1e-06, with a unit of ms"),
    Case("plan --mbit 0 --rtt 1 --step 1", "--mbit 0.0: must be at least 0.001"),
    Case("plan --mbit 1 --rtt 1 --step 1 --loss 100%", "--loss 1.0: must be in [0, 1)"),
    Case("plan --link run.yaml --step 1", "--link run.yaml: "),
    Case("plan --link run.yaml --rtt 1 --step 1", "--rtt 1.0: is in the file of --link; omit one"),
    Case("plan --mbit 1 --rtt 1 --step 1 --tp 3", "--ranks-per-site 8: must be a multiple of --tp times --pp, 3"),
    Case("plan --mbit 1 --rtt 1 --step 1 --parameters 1K", "--parameters 1000: no LLaMA is about so large"),
    Case("plan --mbit 1 --rtt 1 --step 1 --parameters 70B", "--device h100: has 79.6 GiB, pipeline stage 0 needs"),
    Case("plan --mbit 1 --rtt 1 --metrics none", "--metrics none: cannot be read: No such file"),
]
#: Commands and their cases.
PROGRAMS = {
    "megatron_lossy.train": TRAIN,
    "megatron_lossy.data": DATA,
    "megatron_lossy.lab": STUDIES,
    "megatron_lossy.report": REPORT,
    "megatron_lossy.delivery_log": DELIVERY_LOG,
    "megatron_lossy.launch": LAUNCH,
    "megatron_lossy": LAUNCHER,
}


def _train(rank: int, folder: str) -> None:
    os.chdir(folder)
    train_runs(rank, (SETTINGS | {"save": "runs/p_0.10"}, LOSS | {"delivery_log": "log"}))


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    """A folder with data, a run of two ranks and its log, reports, a study, and all of that broken."""
    folder = tmp_path_factory.mktemp("world")
    for name in ("data", "empty", "broken/metrics", "other", "old", "data.png"):
        (folder / name).mkdir(parents=True)
    (folder / "text.txt").write_text("A text of a line.\n" * 200)
    (folder / "empty.txt").touch()
    (folder / "blank.txt").write_text(" \n\n")
    (folder / "latin.jsonl").write_bytes(b'{"text": "\xff"}\n')
    (folder / "study.yaml").write_text(STUDY)
    (folder / "own.yaml").write_text("adam-beta1: 2\n")
    (folder / "list.yaml").write_text("p-grad: [0.1, 0.2]\n")
    (folder / "twice.yaml").write_text("p-grad: 0.1\nlossy-self: true\np_grad: 0.2\n")
    (folder / "other/study.json").write_text(
        '{"title": "Theirs", "command": "python -m megatron_lossy.lab theirs.yaml", "runs": []}'
    )
    (folder / "other/doctor").write_text("print('ran')")
    (folder / "old/loss_table.md").write_text("old")
    (folder / "broken/metrics/metrics.jsonl").write_text("{\n")
    run_ranks(write_data, 1, str(folder / "data"))
    run_ranks(_train, 2, str(folder))
    for file in (folder / "data").glob("train.*"):
        shutil.copy(file, folder / "broken" / f"short{file.suffix}")
    os.truncate(folder / "broken/short.bin", 100)
    shutil.copy(folder / "data/train.idx", folder / "broken/nothing.idx")
    (folder / "broken/nothing.bin").touch()
    for name in ("gone", "settings", "checkpoint"):
        shutil.copytree(folder / "runs/p_0.10", folder / "broken" / name)
    (folder / "broken/gone/latest_checkpointed_iteration.txt").write_text("7")
    (folder / "broken/settings/settings.json").write_text('{"train": ')
    for name in ("gone", "settings", "checkpoint"):
        (folder / "broken" / name / "metrics.jsonl").unlink()
    for file in (folder / "broken/checkpoint/iter_0000002").glob("*.distcp"):
        os.truncate(file, file.stat().st_size // 2)
    shutil.copytree(folder / "log", folder / "broken/log")
    for file in (folder / "broken/log").glob("*.parquet"):
        os.truncate(file, 100)
    return folder


def _content(folder: Path) -> dict[str, tuple]:
    """Return all files, by whatever shows a change of them, and folders that lie aside. Others are nothing."""
    found = {}
    for path in folder.rglob("*"):
        file = path.stat()
        if path.is_file():
            found[path.relative_to(folder).as_posix()] = (file.st_ino, file.st_size, file.st_mtime_ns)
        elif path.name.startswith(".") or ".tmp" in path.name:
            found[path.relative_to(folder).as_posix()] = (file.st_ino,)
    return found


def _parameters(programs: bool) -> list:
    """Return cases of several ranks and of crippled machines, which need programs of their own, or the others."""
    return [
        pytest.param(program, case, id=f"{program.removeprefix('megatron_lossy.')} {case.command[-60:]} {case.cripple}")
        for program, cases in PROGRAMS.items()
        for case in cases
        if programs == bool(case.ranks or case.cripple)
    ]


def _one_line_and_nothing_lost_or_left(world: Path, program: str, case: Case, run: Callable) -> None:
    name = "megatron-lossy" if program == "megatron_lossy" else program
    needed = as_flags(SETTINGS) if program == "megatron_lossy.train" else []
    before = _content(world)
    done = run(program, *needed, *case.command.split(), folder=world)
    after = _content(world)
    line = re.escape(f"{name}: error: {case.line}").replace(r"\*", ".*")
    assert re.match(line, done.stderr), done.stderr
    assert (done.stderr.count("\n"), done.returncode) == (1, case.status), done.stderr
    assert not after.keys() - before.keys()
    assert {path: after.get(path) for path in before} == before


@pytest.mark.parametrize(("program", "case"), _parameters(programs=False))
def test_one_line_and_nothing_lost_or_left(world, rows, program, case):
    _one_line_and_nothing_lost_or_left(world, program, case, rows.run)


@pytest.mark.parametrize(("program", "case"), _parameters(programs=True))
def test_one_line_and_nothing_lost_or_left_by_a_program(world, program, case):
    def run(*words, folder):
        command = ["tests.crippled", case.cripple, *words] if case.cripple else words
        return run_program(*command, ranks=case.ranks, folder=folder, PYTHONPATH=ROOT)

    _one_line_and_nothing_lost_or_left(world, program, case, run)


def test_the_first_rank_tells_what_the_machine_failed(world):
    """The others end as well, and say at most the same."""
    words = [*as_flags(SETTINGS), "--save", "new", "--save-interval", "1"]
    before = _content(world)
    done = run_program("tests.crippled", "bytes=60000", "megatron_lossy.train", *words, ranks=2, folder=world)
    after = _content(world)
    shutil.rmtree(world / "new")
    first, *others = done.stderr.splitlines()
    assert first == "megatron_lossy.train: error: new: File too large: the checkpoint of iteration 1 was not saved"
    assert all(line == first for line in others) and done.returncode == 1
    assert after.keys() - before.keys() == {"new/settings.json", "new/metrics.jsonl"}


SRUN = "error: SLURM_STEP_NUM_TASKS 2: srun started them, but RANK and WORLD_SIZE are not set"


@pytest.mark.parametrize(
    ("command", "tasks", "status", "said"),
    [
        ("megatron_lossy.train FLAGS --exit-interval 1", 1, 0, ""),
        ("megatron_lossy.train FLAGS --lr 1e30 --clip-grad 0 --train-iters 3", 1, 1, "the loss of iteration 3 is "),
        ("megatron_lossy.train FLAGS", 2, 2, SRUN),
        ("megatron_lossy text.txt", 2, 2, SRUN),
    ],
)
def test_statuses_are_those_of_the_page(world, rows, command, tasks, status, said):
    """Those of wrong input, machines and signals: above, and in test_errors.py."""
    assert f"\n| {status} | " in (ROOT / "docs/index.md").read_text()
    module, *words = command.replace("FLAGS", " ".join(as_flags(SETTINGS))).split()
    done = rows.run(module, *words, folder=world, SLURM_STEP_NUM_TASKS=tasks)
    assert done.returncode == status and said in done.stderr and done.stderr.count("\n") <= 1, done.stderr
