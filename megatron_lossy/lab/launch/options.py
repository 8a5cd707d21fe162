"""The launcher's own flags; accelerators by name; what this node has of them, tokenizers on a disk."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from ...base.errors import Collector, UsageError, refuse
from ...base.flags import as_text, flag, flag_name

GIB = 2**30

#: Variables for the environment of every rank, by kind. Without them Megatron's calls of CUDA fail on Gaudi.
ENVIRONMENT = {"hpu": {"PT_HPU_GPU_MIGRATION": "1"}}


@dataclass(frozen=True)
class Device:
    """``kind``: cuda, hpu or cpu. ``memory``: bytes, as nvidia-smi or hl-smi shows them; None if unlimited."""

    kind: str
    memory: int | None


_MIB = 2**20
DEVICES = {
    "a100-40gb": Device("cuda", 40960 * _MIB),
    "a100-80gb": Device("cuda", 81920 * _MIB),
    "h100": Device("cuda", 81559 * _MIB),
    "h200": Device("cuda", 143771 * _MIB),
    "b200": Device("cuda", 183359 * _MIB),
    "gaudi2": Device("hpu", 98304 * _MIB),
    "gaudi3": Device("hpu", 131072 * _MIB),
    "cpu": Device("cpu", None),
}


_FILES = {"cuda": ("/dev", r"nvidia\d+"), "hpu": ("/dev/accel", r"accel\d+")}


def device_count(kind: str) -> int:
    """Return accelerators of this machine, counted by their device files, which any process may list."""
    folder, pattern = _FILES[kind]
    return sum(re.fullmatch(pattern, path.name) is not None for path in Path(folder).glob("*"))


def check_devices(kind: str, wanted: int) -> None:
    """Raise :class:`UsageError` unless this machine has ``wanted`` accelerators of ``kind``."""
    if kind == "cpu":
        return
    if (found := device_count(kind)) < wanted:
        raise refuse("--device", f"({kind})", f"{wanted} accelerators are asked for on this node, {found} are there")


def check_tokenizer(name: str) -> None:
    """Raise :class:`UsageError` unless the tokenizer is on a disk: ranks must not all fetch it, maybe without a network."""
    kind, _, source = name.partition(":")
    if kind == "sentencepiece" and not os.path.isfile(source):
        raise refuse("--tokenizer", name, "there is no such model file")
    if kind == "hf" and not os.path.isdir(source):
        cache = Path(os.environ.get("HF_HUB_CACHE") or Path(os.environ.get("HF_HOME", "~/.cache/huggingface"), "hub"))
        if not (cache.expanduser() / f"models--{source.replace('/', '--')}").is_dir():
            why = f"is neither a folder nor in {cache}; download it once, or give hf:FOLDER or sentencepiece:FILE"
            raise refuse("--tokenizer", name, why)


_OF_CONTAINERS = ("container_image", "container_mounts")


@dataclass(frozen=True)
class LaunchConfig:
    """The program to start, its devices, and the folder of its output. Raises :class:`UsageError`."""

    program: str | None = flag(
        None,
        "what every rank runs: Megatron-LM's pretrain_gpt.py, by its path, or train, our own trainer",
        metavar="SCRIPT",
    )
    out: str | None = flag(
        None,
        "folder of the runs, on a disk that all nodes share; a run is a folder in it, named by its --rate",
        metavar="FOLDER",
    )
    rate: float | None = flag(
        None, "loss rate of gradients and parameters; without it the loss flags decide", metavar="P"
    )
    rates: tuple[float, ...] = flag((0.0, 0.1, 0.2, 0.3, 0.4), "the rates of a sweep", metavar="P")
    rate_index: int | None = flag(
        None, "take this one of --rates, counted from 0: the index of a Slurm array", metavar="I"
    )
    launcher: str = flag(
        "torchrun",
        "what starts the ranks: torchrun on every node, or srun in a Slurm job",
        choices=("torchrun", "srun"),
    )
    device: str | None = flag(None, "accelerator, whose memory the run must fit", choices=tuple(DEVICES))
    accelerators: int | None = flag(None, "accelerators, which is ranks, of the run")
    accelerators_per_node: int = flag(8, "accelerators of a node")
    vocab_size: int = flag(32000, "vocabulary for the memory estimate (that of byte is known)")
    environment: tuple[str, ...] | None = flag(None, "environment variables of every rank", metavar="NAME=VALUE")
    max_epochs: float = flag(
        4.0,
        "refuse a run that would read its training data more often; repeats up to 4 are about as good as new text "
        "(Muennighoff et al., 2023)",
        metavar="N",
    )
    rdzv_endpoint: str | None = flag(
        None, "torchrun on several nodes: host and port of one of them, the same on all", metavar="HOST:PORT"
    )
    max_restarts: int = flag(0, "torchrun: start all ranks again, from the last checkpoint, after this many failures")
    master_port: int = flag(29500, "srun: port on the first node", metavar="PORT")
    container_image: str | None = flag(
        None, "image that pyxis (enroot) of srun, or --render, runs the ranks in", metavar="IMAGE"
    )
    container_mounts: str | None = flag(
        None,
        "what is mounted in it, SOURCE:TARGET,…; of k8s a source is a volume claim, of skypilot a bucket",
        metavar="MOUNTS",
    )
    render: str | None = flag(
        None,
        "with --rendezvous and without --island: print the run as YAML for Kubernetes, with a JobSet for each island, "
        "or as a task of SkyPilot, and start nothing",
        choices=("k8s", "skypilot"),
    )
    run: bool = flag(
        False,
        "with --rendezvous and without --island: start the coordinator and all islands here, and end all with a signal",
    )
    dry_run: bool = flag(False, "check everything, print the exact command and environment, and start nothing")

    def __post_init__(self) -> None:
        missing = Collector()
        for name, what in (
            ("program", "pretrain_gpt.py of a checkout of Megatron-LM, or train"),
            ("out", "the folder of the runs"),
            ("device", f"one of {', '.join(DEVICES)}"),
            *((name, f"for --render {self.render}") for name in _OF_CONTAINERS if self.render is not None),
        ):
            if getattr(self, name) is None:
                missing.note(UsageError(f"{flag_name(LaunchConfig, name)}: needs a value, {what}"))
        missing.finish()
        assert self.device is not None
        if self.device not in DEVICES:  # argparse does not check a default from a file
            raise refuse("--device", self.device, f"must be one of {', '.join(DEVICES)}")
        for name in ("accelerators", "accelerators_per_node", "vocab_size", "master_port"):
            value = getattr(self, name)
            self._check(name, value is None or value >= 1, "must be at least 1")
        self._check("max_restarts", self.max_restarts >= 0, "must be at least 0")
        self._check("max_epochs", self.max_epochs > 0, "must be above 0")
        for pair in self.environment or ():
            self._check("environment", "=" in pair[1:], "must be pairs NAME=VALUE")
        if self.rate is not None and self.rate_index is not None:
            raise refuse("--rate-index", self.rate_index, "cannot be combined with --rate")
        fine = self.rate_index is None or 0 <= self.rate_index < len(self.rates)
        self._check("rate_index", fine, f"must be from 0 to {len(self.rates) - 1}, the last of --rates")
        for name, launcher in (
            ("rdzv_endpoint", "torchrun"),
            ("render", "torchrun"),
            *((name, "srun") for name in _OF_CONTAINERS if self.render is None),
        ):
            self._check(name, getattr(self, name) is None or self.launcher == launcher, f"needs --launcher {launcher}")
        if self.max_restarts and self.launcher != "torchrun":
            raise refuse("--max-restarts", self.max_restarts, "needs --launcher torchrun")

    def _check(self, name: str, good: bool, allowed: str) -> None:
        if not good:
            raise refuse(flag_name(LaunchConfig, name), as_text(getattr(self, name)), allowed)

    def check_program(self) -> None:
        """Raise :class:`UsageError` unless the program is there."""
        if not self.trainer and not os.path.isfile(self.program or ""):
            why = "must be train or a file, for example Megatron-LM's pretrain_gpt.py"
            raise refuse("--program", self.program, why)

    @property
    def chosen_rate(self) -> float | None:
        """The loss rate of this run, if the launcher sets it."""
        return self.rates[self.rate_index] if self.rate_index is not None else self.rate

    @property
    def trainer(self) -> bool:
        """Whether our own trainer runs, not a script of Megatron-LM."""
        return self.program == "train"

    @property
    def nodes(self) -> int:
        """Nodes of the run; :attr:`accelerators` must be known."""
        return -(-self.accelerators // self.accelerators_per_node)
