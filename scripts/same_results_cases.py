"""The runs that scripts/same_results.py compares: a name, ranks, and the command lines one after another."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

TINY = """--num-layers 2 --hidden-size 64 --ffn-hidden-size 64 --num-attention-heads 4 --num-query-groups 2
--seq-length 32 --micro-batch-size 2 --global-batch-size 8 --train-iters 6 --lr 1e-2 --lr-warmup-iters 2
--lr-decay-iters 12 --hidden-dropout 0.1 --eval-interval 3 --eval-iters 1 --log-interval 1 --data-path ../data/train
--valid-data-path ../data/valid --save save"""
PRETRAIN = """--transformer-impl local --use-cpu-initialization --no-gradient-accumulation-fusion
--no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion --no-rope-fusion
--no-persist-layer-norm --distributed-backend gloo --use-distributed-optimizer --num-layers 2 --hidden-size 64
--num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 --micro-batch-size 2 --global-batch-size 8
--train-iters 6 --lr 1e-3 --lr-decay-style cosine --clip-grad 1.0 --mock-data --tokenizer-type NullTokenizer
--vocab-size 4999 --eval-interval 3 --eval-iters 1 --log-interval 1 --attention-backend unfused
--data-cache-path cache"""
RULES = ("renormalize", "renormalize-remote", "previous", "zero")
UNITS = {
    "shard": "--loss-unit shard",
    "bucket": "--loss-unit bucket",
    "packet": "--loss-unit packet --packet-bytes 256",
}
OVERLAPS = {
    "none": "",
    "grad": "--overlap-grad-reduce --ddp-bucket-size 9000",
    "both": "--overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 9000",
}
LOSS = "--p-grad 0.3 --p-param 0.3"
BURSTS = f"{LOSS} --loss-model gilbert-elliott:3"
BOTH = "--eval-weights both"
#: Everything that is recorded about a run.
ON = f"{BOTH} --save-replicas --drift-interval 2 --delivery-log log"
RATES = """0 .1 .5 .2
.3 0 .1 .9
.2 .4 0 .1
.6 .1 .3 0
"""


@dataclass(frozen=True)
class Case:
    """``runs``: command lines in one folder, one after another. ``status``: the exit status of the last."""

    name: str
    ranks: int
    runs: tuple[str, ...]
    files: dict[str, str] = field(default_factory=dict)
    status: int = 0
    program: str = "train"
    quick: bool = False

    def order(self, megatron_lm: str | None) -> dict[str, Any]:
        """Return the task for the runner."""
        first = [f"{megatron_lm}/pretrain_gpt.py", *PRETRAIN.split()] if self.program == "launcher" else TINY.split()
        runs = [[*first, *run.split()] for run in self.runs]
        return {"ranks": self.ranks, "program": self.program, "files": self.files, "runs": runs}

    @property
    def spelled(self) -> list[Any]:
        """All that defines the case, for a record of it."""
        base = PRETRAIN if self.program == "launcher" else TINY
        return [self.ranks, self.program, self.files, [f"{base} {run}".split() for run in self.runs]]


def _matrix() -> Iterator[Case]:
    """Yield every rule, unit and overlap: on two ranks with all that can be recorded, on four without."""
    for _number, (rule, unit, overlap) in enumerate(itertools.product(RULES, UNITS, OVERLAPS)):
        flags = f"{LOSS} --grad-recovery {rule} {UNITS[unit]} {OVERLAPS[overlap]}"
        name = f"{rule}/{unit}/overlap {overlap}"
        # A Latin square: all pairs of rule, unit and overlap with the fewest runs.
        rules, units, overlaps = RULES.index(rule), list(UNITS).index(unit), list(OVERLAPS).index(overlap)
        quick = (rules + units + overlaps) % 3 == 0
        yield Case(f"2 ranks/{name}", 2, (f"{flags} {ON}",), quick=quick)
        yield Case(f"4 ranks/{name}", 4, (flags,), quick=quick and rule == "previous" and unit == "bucket")


def _virtual() -> Iterator[Case]:
    for rule, unit in itertools.product(RULES, UNITS):
        flags = f"--virtual-workers 4 {LOSS} --grad-recovery {rule} {UNITS[unit]} {OVERLAPS['both']} {ON}"
        yield Case(f"4 virtual workers/{rule}/{unit}", 0, (flags,), quick=(rule, unit) == ("previous", "packet"))
    two = f"--virtual-workers 2 {OVERLAPS['both']}"
    yield Case("virtual workers/2, plain", 0, (f"{two} {LOSS}",))
    yield Case("virtual workers/bf16", 0, (f"{two} --bf16 {LOSS} {UNITS['packet']} {ON}",), quick=True)
    yield Case("virtual workers/bursts", 0, (f"{two} {BURSTS} {UNITS['packet']} --grad-recovery zero {ON}",))
    yield Case("virtual workers/source", 0, (f"--virtual-workers 4 {LOSS} --loss-correlation source {ON}",))
    nodes = "--lossy-links inter-node:2"
    yield Case("virtual workers/inter-node", 0, (f"--virtual-workers 4 {LOSS} {nodes} {ON}",))
    yield Case("virtual workers/lossy self", 0, (f"--virtual-workers 4 {LOSS} --lossy-self {ON}",))
    for rule in ("renormalize", "previous"):
        flags = f"--virtual-workers 4 {LOSS} {UNITS['bucket']} --grad-recovery {rule}"
        yield from _resumed(f"virtual workers/{rule}", 0, flags, quick=rule == "previous")
    yield Case("virtual workers/lossless", 0, ("--virtual-workers 4",))
    yield Case("one process/alone", 0, (f"{LOSS} {BOTH}",), status=2)


def _resumed(
    name: str, ranks: int, flags: str, quick: bool = False, kept: str = "--save-replicas --drift-interval 2"
) -> Iterator[Case]:
    """Yield runs stopped after three iterations and continued, with replicas (and the flags ``kept``) and without."""
    for how, more in (("with", kept), ("without", "")):
        first = f"{flags} {more} {BOTH} --delivery-log log"
        runs = (f"{first} --exit-interval 3 --load save", f"{first} --load save")
        yield Case(f"resume/{name}, {how} replicas", ranks, runs, quick=quick and how == "with")


def _resume() -> Iterator[Case]:
    units = itertools.cycle(UNITS)
    for rule, overlap in itertools.product(RULES, ("none", "both")):
        flags = f"{LOSS} --grad-recovery {rule} {UNITS[next(units)]} {OVERLAPS[overlap]}"
        yield from _resumed(f"{rule}, overlap {overlap}", 2, flags, quick=(rule, overlap) == ("previous", "both"))
    yield from _resumed("bursts, 4 ranks", 4, f"{BURSTS} {UNITS['packet']} --grad-recovery previous")
    yield from _resumed("bf16", 2, f"{LOSS} --bf16 {UNITS['packet']} --grad-recovery previous {OVERLAPS['grad']}")
    yield Case("resume/lossless", 2, ("--exit-interval 3 --load save", "--load save"))
    other = f"{LOSS} {BOTH} --save-interval 2"
    yield Case("resume/another folder", 2, (other, f"{other} --load save --save other --train-iters 8"))


def _models() -> Iterator[Case]:
    """Yield the cases of loss models."""
    for unit, overlap in zip(UNITS, OVERLAPS):
        flags = f"{BURSTS} {UNITS[unit]} {OVERLAPS[overlap]} {ON}"
        yield Case(f"bursts/{unit}", 2, (flags,), quick=unit == "packet")
    yield Case("bursts/4 ranks", 4, (f"{BURSTS} {UNITS['packet']} --grad-recovery renormalize-remote",))
    four = "--loss-model gilbert-elliott:.2,.4,.05,.9 gilbert-elliott:.1,.5,0,.8"
    yield Case("bursts/four parameters", 2, (f"{four} {UNITS['bucket']} {OVERLAPS['both']} {ON}",))
    mixed = "--loss-model bernoulli gilbert-elliott:5 --p-grad 0.2 --p-param 0.4"
    yield Case("bursts/parameters only", 2, (f"{mixed} {UNITS['packet']} {ON}",))
    plan = "--loss-schedule 0:0,2:0.5,4:0.1"
    yield Case("schedule/bernoulli", 2, (f"{plan} {UNITS['packet']} {ON}",), quick=True)
    yield Case("schedule/bursts", 2, (f"{plan} --loss-model gilbert-elliott {UNITS['packet']} {ON}",))
    two = "--loss-schedule 0:0.4,3:0 0:0,2:0.6"
    yield Case("schedule/two, overlapped", 2, (f"{two} --grad-recovery previous {OVERLAPS['both']} {ON}",))
    files = {"rates.txt": RATES}
    links = "--loss-model per-link:rates.txt"
    yield Case("per link/4 ranks", 4, (f"{links} {UNITS['packet']} {ON}",), files)
    yield Case("per link/gradients only", 4, (f"{links} bernoulli {UNITS['bucket']} {OVERLAPS['grad']}",), files)
    yield Case("per link/virtual", 0, (f"--virtual-workers 4 {links} {ON}",), files)
    source = f"{LOSS} --loss-correlation source"
    for unit, overlap in zip(UNITS, reversed(OVERLAPS)):
        yield Case(f"source/{unit}", 4, (f"{source} {UNITS[unit]} {OVERLAPS[overlap]} {BOTH} --drift-interval 1",))
    yield Case("source/bursts", 2, (f"{BURSTS} --loss-correlation source {UNITS['packet']} {ON}",))
    for rule, unit in (("renormalize", "shard"), ("previous", "packet"), ("zero", "bucket")):
        flags = f"{LOSS} --lossy-self --grad-recovery {rule} {UNITS[unit]} {OVERLAPS['both']} {ON}"
        yield Case(f"lossy self/{rule}", 2, (flags,))
    nodes = f"{LOSS} --lossy-links inter-node"
    yield Case("nodes/of two ranks", 4, (f"{nodes}:2 {UNITS['packet']} {ON}",))
    yield Case("nodes/of one rank", 2, (f"{nodes}:1 --grad-recovery previous {OVERLAPS['grad']}",))
    yield Case("nodes/by host name", 2, (f"{nodes} {ON}",), status=2)
    yield Case("one phase/gradients", 2, (f"--p-grad 0.4 {UNITS['packet']} {OVERLAPS['both']} {ON}",))
    yield Case("one phase/parameters", 2, (f"--p-param 0.4 {UNITS['packet']} {OVERLAPS['both']} {ON}",))
    yield Case("seed", 2, (f"{LOSS} --loss-seed 18446744073709551615 {ON}",))


def _replay() -> Iterator[Case]:
    """Yield a delivery log that is written and replayed with another seed, on ranks and on virtual workers."""
    record = {
        "shard": LOSS,
        "bucket": BURSTS,
        "packet": LOSS,
        "packet in bursts": BURSTS,
    }
    for unit, loss in record.items():
        same = f"{UNITS[unit.split()[0]]} {OVERLAPS['both']} {BOTH}"
        replay = f"{same} --loss-model trace --trace log --loss-seed 9"
        runs = (f"{same} {loss} --delivery-log log", f"{replay} --save again --delivery-log log2")
        yield Case(f"replay/{unit}", 2, runs, quick=unit == "packet")
        virtual = f"--virtual-workers 4 --grad-recovery previous {same}"
        runs = (f"{virtual} {loss} --delivery-log log", f"--virtual-workers 4 {replay} --save again")
        yield Case(f"replay/{unit}, virtual", 0, runs)
    archive = f"--loss-model trace --trace ../data/trace.npz {UNITS['shard']} {ON}"
    yield Case("replay/archive", 2, (archive,))
    yield Case("replay/archive, virtual", 0, (f"--virtual-workers 2 {archive}",))


def _training() -> Iterator[Case]:
    """Yield cases of the training program's own settings."""
    for (overlap, flags), rates in itertools.product(OVERLAPS.items(), ("", "--p-grad 0 --p-param 0")):
        name = "rates of 0" if rates else "no flags"
        yield Case(f"lossless/{name}, overlap {overlap}", 2, (f"{flags} {rates}",), quick=overlap == "both")
    yield Case("lossless/4 ranks", 4, (OVERLAPS["both"],))
    yield Case("lossless/bf16", 2, (f"--bf16 {OVERLAPS['both']}",))
    yield Case("lossless/everything on", 2, (ON,))
    units = itertools.cycle(reversed(UNITS))
    for rule, (overlap, flags) in itertools.product(RULES, OVERLAPS.items()):
        flags = f"--bf16 {LOSS} --grad-recovery {rule} {UNITS[next(units)]} {flags} {ON}"
        yield Case(f"bf16/{rule}, overlap {overlap}", 2, (flags,), quick=(rule, overlap) == ("zero", "both"))
    yield Case("bf16/4 ranks", 4, (f"--bf16 {LOSS} {UNITS['packet']} --grad-recovery previous {OVERLAPS['both']}",))
    for weights in ("replica", "owner"):
        yield Case(f"evaluation/{weights}", 2, (f"{LOSS} --eval-weights {weights} {OVERLAPS['both']}",))
    yield Case("records/every second", 2, (f"{LOSS} --log-interval 2 --drift-interval 4 {BOTH}",))
    yield Case("records/drift always", 2, (f"{LOSS} --drift-interval 1 --metrics-dir metrics {OVERLAPS['both']}",))
    yield Case("records/TensorBoard", 2, (f"{LOSS} --drift-interval 2 --tensorboard-dir events {BOTH}",))
    yield Case("accumulation/none", 2, (f"{LOSS} --micro-batch-size 4 {OVERLAPS['both']} {BOTH}",))
    yield Case("accumulation/4", 2, (f"{LOSS} --micro-batch-size 1 --grad-recovery previous {OVERLAPS['grad']}",))
    yield Case("3 ranks", 3, (f"{LOSS} --global-batch-size 6 {UNITS['packet']} {OVERLAPS['both']} {BOTH}",))
    average = "--ddp-average-in-collective"
    yield Case("averaging/in the collective", 2, (f"{LOSS} {average} --grad-recovery zero {OVERLAPS['both']} {BOTH}",))
    yield Case("averaging/per token", 2, (f"{LOSS} --calculate-per-token-loss {OVERLAPS['grad']} {BOTH}",))
    yield Case("optimizer/sgd", 2, (f"{LOSS} --optimizer sgd {UNITS['bucket']} {OVERLAPS['both']} {BOTH}",))
    yield Case("optimizer/no clipping", 2, (f"{LOSS} --clip-grad 0 --grad-recovery zero {BOTH}",))
    tied = "--share-embeddings-and-output-weights"
    yield Case("tied embeddings", 2, (f"{LOSS} {tied} {UNITS['bucket']} {OVERLAPS['both']} {ON}",))
    tp, pp = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"
    yield Case("tensor parallel", 4, (f"{LOSS} {tp} {UNITS['packet']} {OVERLAPS['both']} {ON}",), quick=True)
    yield Case("pipeline", 4, (f"{LOSS} {pp} {UNITS['bucket']} {OVERLAPS['grad']} {ON}",))
    yield Case("pipeline, tied", 4, (f"{LOSS} {pp} {tied} {UNITS['packet']} --grad-recovery previous {ON}",))
    instances = "--num-distributed-optimizer-instances 2"
    yield Case("optimizer instances", 4, (f"{LOSS} {instances} {UNITS['packet']} {BOTH} --drift-interval 2",))
    config = {"run.yaml": "p-grad: 0.2\np_param: 0.3\nloss-unit: packet\npacket-bytes: 512\neval-weights: owner\n"}
    yield Case("YAML file", 2, ("--config run.yaml --p-param 0.1",), config)


def _mechanisms() -> Iterator[Case]:
    """Yield cases of mechanisms that have a real and a virtual form."""
    forms = {"ranks": (4, ""), "virtual": (0, "--virtual-workers 4")}
    same = f"{LOSS} {UNITS['packet']}"
    islands = f"--islands 2 --p-sync 0.3 {same}"
    part = "--sync-method parameters --sync-fraction 0.3 --sync-subset partition"
    methods = {
        "late": f"{part} --sync-delay 2 --save-consensus",
        "late, bf16": f"{part} --sync-delay 1 --delay-correction smith --sync-dtype bf16 --bf16",
        "outer": "--sync-method diloco --sync-interval 2 --eval-weights consensus --save-replicas",
    }
    for (form, (ranks, how)), (name, flags) in itertools.product(forms.items(), methods.items()):
        if name == "late":
            yield from _resumed(f"islands/{form}, {name}", ranks, f"{how} {islands} {flags}", kept="--save-replicas")
        else:
            yield Case(f"islands/{form}, {name}", ranks, (f"{how} {islands} {flags} --delivery-log log",))
    errors = "--grad-error gaussian:1rms"
    replicas = {
        "averaged": f"{errors} --param-sync-interval 2 --param-sync-rule snr --replica-check log",
        "averaged late": f"{errors} --param-sync-interval 2 --param-sync-overlap",
        "repaired, bf16": "--grad-error bit-flip --grad-error-rate 0.5 --replica-check repair --bf16",
    }
    forms["virtual"] = (0, "--virtual-workers 2")
    for (form, (ranks, how)), (name, flags) in itertools.product(forms.items(), replicas.items()):
        whole = f"{how} --no-use-distributed-optimizer {flags}"
        yield from _resumed(f"full replicas/{form}, {name}", ranks // 2, whole)
    leads = {
        "given": f"{same} --param-send compensated:1,0.5",
        "by law, bf16": f"{same} --param-send compensated --bf16",
    }
    for (form, (ranks, how)), (name, flags) in itertools.product(forms.items(), leads.items()):
        yield from _resumed(f"lead/{form}, {name}", ranks // 2, f"{how} {flags}")
    for form, (ranks, how) in forms.items():
        counted = f"{UNITS['packet']} --loss-model trace --trace log --param-send compensated --save again {BOTH}"
        yield Case(f"lead/{form}, counted", ranks // 2, (f"{how} {same} --delivery-log log", f"{how} {counted}"))
    priority = f"{same} --grad-recovery zero --grad-priority packet-mean:0.3 {ON}"
    yield Case("priority/ranks", 2, (priority,))
    yield Case("priority/virtual", 0, (f"--virtual-workers 2 {priority}",))
    stages = f"--virtual-workers 2 --async-pipeline --virtual-stages 2 {same}"
    yield from _resumed("stages/virtual", 0, stages)
    yield Case("stages/ranks", 2, ("--async-pipeline --pipeline-model-parallel-size 2",))


def _refusals() -> Iterator[Case]:
    for name, flags in {
        "a rate": "--p-grad 1.5",
        "a trace without its path": "--loss-model trace",
        "a rate along with a schedule": "--p-grad 0.1 --loss-schedule 0:0.1",
        "overlap": "--overlap-param-gather",
        "own shard": f"{LOSS} --lossy-self --grad-recovery renormalize-remote",
    }.items():
        yield Case(f"refused/{name}", 0, (flags,), status=2)
    again = f"{LOSS} --train-iters 3 --eval-iters 0"
    yield Case("refused/another run's folder", 0, (f"{again} --virtual-workers 2", again), status=2)


def _pretrain() -> Iterator[Case]:
    """Yield cases of the unmodified pretrain_gpt.py."""

    def case(name: str, *runs: str, ranks: int = 2) -> Case:
        return Case(f"pretrain_gpt.py/{name}", ranks, runs, program="launcher")

    save = "--save save --save-interval 3"
    packets = f"{LOSS} --loss-unit packet --packet-bytes 512"
    yield case("lossless", f"{OVERLAPS_OF_MEGATRON} {save}")
    yield case("packets", f"{packets} {save} --eval-weights both --drift-interval 2 --delivery-log log")
    flags = f"{packets} {OVERLAPS_OF_MEGATRON} {save} --grad-recovery previous --eval-weights both --save-replicas"
    yield case("resumed, overlapped", f"{flags} --exit-interval 3", f"{flags} --load save")
    yield case("bursts, bf16", f"{BURSTS} --bf16 {save} --eval-weights owner --ckpt-format torch --delivery-log log")


OVERLAPS_OF_MEGATRON = "--overlap-grad-reduce --overlap-param-gather"


def all_cases(pretrain: bool) -> list[Case]:
    """Return the whole matrix; that of pretrain_gpt.py if there is a checkout of Megatron-LM."""
    groups = [_refusals, _matrix, _virtual, _models, _replay, _resume, _training, _mechanisms] + [_pretrain] * pretrain
    return [case for group in groups for case in group()]
