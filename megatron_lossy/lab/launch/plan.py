"""The plan of a run: the configuration file and the command line, made into one command that every rank runs."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ...base.errors import ArgumentParser, Collector, UsageError, errors_in, refuse
from ...base.flags import add_flags, did_you_mean, flag_name, from_namespace
from ...base.jobs import Jobs
from ...config import LossyConfig
from ...config.loss_flags import preset_arguments
from ...config.settings import arguments_of, from_origin, note_origins_of
from ..train.arguments import configurations, make_parser
from ..train.config import TrainConfig
from .memory import Layout
from .options import DEVICES, ENVIRONMENT, Device, LaunchConfig, check_tokenizer
from .recipe import Recipe, changed_arguments, flag_arguments, megatron_arguments, read_recipe

PROGRAM = "megatron_lossy.launch"
# Flags of the trainer that follow from --out.
_FROM_OUT = ("save", "load", "tensorboard_dir", "metrics_dir")
# Megatron's flags that would make the checks of sizes and memory wrong.
_UNKNOWN_SIZES = ("--context-parallel-size", "--expert-model-parallel-size", "--num-experts")


@dataclass(frozen=True)
class Plan:
    """A complete run, before its checks (:mod:`.checks`).

    ``module``: module and arguments of every rank, after ``python -m``. ``only_megatron``: flags that only Megatron-LM
    has, as it will see them. ``folder``: the run's own. ``island``: the number of the one job that this is, of several that are
    launches of their own; ``None``: all jobs, of which the command here is that of the first.
    """

    launch: LaunchConfig
    train: TrainConfig
    lossy: LossyConfig
    module: list[str]
    only_megatron: list[str]
    environment: dict[str, str]
    folder: Path
    island: int | None = None

    @property
    def device(self) -> Device:
        """The accelerator that ``--device`` names."""
        return DEVICES[self.launch.device]

    @property
    def jobs(self) -> Jobs:
        """The jobs among which ranks are divided."""
        return self.lossy.jobs()

    @property
    def ranks(self) -> int:
        """Ranks of all jobs; ``--accelerators`` are those of one launch."""
        assert self.launch.accelerators is not None
        return self.launch.accelerators * self.jobs.launches

    @property
    def own_folder(self) -> Path:
        """The folder of this launch: the run's, or that of its job if each job is a launch of its own."""
        return self.job_folders[self.island or 0] if self.jobs.apart else self.folder

    @property
    def checkpoints(self) -> int:
        """The number of checkpoints that are there at once, at most."""
        train, megatron = self.train, _value(self.only_megatron, "--save-retain-interval")
        number = -(-train.train_iters // (train.save_interval or train.train_iters))
        if train.save_retain and self.launch.trainer:
            number = min(number, train.save_retain + 1)  # an older one is deleted once the next is whole
        if megatron is not None:
            number = min(number, train.train_iters // int(megatron) + 2)
        return number

    @property
    def job_folders(self) -> list[Path]:
        """The run's folder, or those of its jobs in it."""
        return [Path(self.jobs.folder(self.folder, job)) for job in range(self.jobs.number)]

    @property
    def mock_data(self) -> bool:
        """Whether Megatron-LM makes its data up."""
        return "--mock-data" in self.only_megatron

    @property
    def layout(self) -> Layout:
        """Return the values besides the configurations that decide the memory."""
        flags = self.only_megatron
        recompute = _value(flags, "--recompute-granularity")
        if "--recompute-activations" in flags:
            recompute = "selective"
        unfused = _value(flags, "--attention-backend") in ("unfused", "local")
        if self.launch.trainer:  # our trainer has Transformer Engine's layers on CUDA only
            engine = self.device.kind == "cuda" and self.train.transformer_impl != "local"
        else:
            engine = self.device.kind != "cpu" and _value(self.module, "--transformer-impl") != "local"
        return Layout(
            self.ranks,
            257 if self.train.tokenizer == "byte" else self.launch.vocab_size,
            "--sequence-parallel" in flags,
            (engine and not unfused) or "--use-flash-attn" in flags,
            recompute,
            min(self.launch.accelerators, self.launch.accelerators_per_node),
        )


def make_parser_of_launch() -> argparse.ArgumentParser:
    """Return a parser of the launcher's own flags, and ``--config``."""
    parser = ArgumentParser(
        prog=f"python -m {PROGRAM}",
        description="Check a run completely, then start it on every rank.",
        epilog="All other flags are those of megatron_lossy.train or of Megatron-LM; they win over the file.",
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="FILE.yaml", help="configuration, for example one of configs/llama2_7b")
    return add_flags(parser, LaunchConfig, "launch")


def make_plan(arguments: Sequence[str], tasks: int | None = None) -> Plan:
    """Return the run that the command line asks for. Raise :class:`UsageError`.

    ``tasks``: the number of tasks of the Slurm job, if there is one.
    """
    parser = make_parser_of_launch()
    first, _ = parser.parse_known_args(arguments)
    if first.config is None:
        raise UsageError("--config: needs a value, for example configs/llama2_7b/cuda_dp64.yaml")
    recipe = read_recipe(first.config)
    missing = Collector()
    with errors_in(f"--config {first.config}"):
        words = recipe.with_origins(flag_arguments(recipe.launch, "launch"))
    note_origins_of([*words, *arguments], LaunchConfig)
    with missing.noting():
        with errors_in(f"--config {first.config}"):
            namespace, unknown = parser.parse_known_args(words)
            if unknown:
                raise refuse("launch", unknown[0], f"must be a flag of python -m {PROGRAM}")
        namespace, rest = parser.parse_known_args(arguments, namespace)
        launch = from_namespace(LaunchConfig, namespace)
    if missing.found:
        _note_missing_of_training(missing, recipe, first.config, parser.parse_known_args(arguments)[1])
        missing.finish()
    if launch.launcher != "srun":
        tasks = None
    if launch.accelerators is None:
        if tasks is None:
            missing.note(UsageError("--accelerators: needs a value, here or under launch: in the --config file"))
        launch = replace(launch, accelerators=tasks)
    elif tasks is not None and tasks != launch.accelerators and not launch.dry_run:
        raise refuse("--accelerators", launch.accelerators, f"must be the {tasks} tasks of the Slurm job")
    _note_missing_of_training(missing, recipe, first.config, rest)
    with _with_error_of_program(launch):
        missing.finish()
    rate, name = launch.chosen_rate, Path(first.config).stem
    if rate is not None:
        name = f"p_{rate:.2f}" if round(rate, 2) == rate else f"p_{rate!r}"
    folder = Path(launch.out) / name
    note_origins_of(
        [
            *words,
            *_settings(recipe, first.config, rest),
            *recipe.with_origins(flag_arguments(recipe.megatron, "megatron")),
            *from_origin([flag_name(TrainConfig, name) for name in _FROM_OUT], "of --out"),
            *from_origin(["--p-grad", "--p-param"] if rate is not None else [], "of --rate"),
            *arguments,
        ],
        LaunchConfig,
        TrainConfig,
        LossyConfig,
    )
    with _with_error_of_program(launch):
        train, lossy, module, only_megatron, island = _program(launch, recipe, first.config, rest, folder)
    given = dict(pair.split("=", 1) for pair in launch.environment or ())
    environment = ENVIRONMENT.get(DEVICES[launch.device].kind, {}) | given
    return Plan(launch, train, lossy, module, only_megatron, environment, folder, island)


@contextlib.contextmanager
def _with_error_of_program(launch: LaunchConfig) -> Iterator[None]:
    """Return a context whose errors come together with that of a program that is not there."""
    problems = Collector()
    with problems.noting():
        yield
    if problems.found and (launch.container_image is None or launch.dry_run):
        with problems.noting():
            launch.check_program()
    problems.finish()


def _note_missing_of_training(missing: Collector, recipe: Recipe, file: str, rest: list[str]) -> None:
    """Note missing flags of the training, as far as the flags can be read."""
    with contextlib.suppress(UsageError):
        settings = _settings(recipe, file, rest)
        known, others = make_parser(f"python -m {PROGRAM}", "").parse_known_args([*settings, *rest])
        if "--mock-data" in others or recipe.megatron.get("mock-data"):
            known.data = "stdlib"
        for error in TrainConfig.missing(vars(known)):
            missing.note(error)
        if missing.found:  # otherwise it is checked with all else
            with missing.noting():
                check_tokenizer(known.tokenizer)


def _settings(recipe: Recipe, file: str, rest: Sequence[str]) -> list[str]:
    """Return the flags below ``rest``: those of the preset that it names, then those of the file."""
    with errors_in(f"--config {file}"):
        settings = arguments_of(recipe.settings, (TrainConfig, LossyConfig))
    return [*preset_arguments(rest), *recipe.with_origins(settings)]


def _program(
    launch: LaunchConfig, recipe: Recipe, file: str, rest: list[str], folder: Path
) -> tuple[TrainConfig, LossyConfig, list[str], list[str], int | None]:
    settings = _settings(recipe, file, rest)
    parser = make_parser(f"python -m {PROGRAM}", "")
    given, from_command_line = parser.parse_known_args(rest)
    for name in _FROM_OUT:
        if getattr(given, name):
            raise refuse(flag_name(TrainConfig, name), getattr(given, name), "cannot be given to launch; --out sets it")
    if launch.chosen_rate is not None:
        if given.p_grad or given.p_param:
            raise refuse("--rate", launch.chosen_rate, "cannot be combined with --p-grad or --p-param")
        rest = [*rest, "--p-grad", str(launch.chosen_rate), "--p-param", str(launch.chosen_rate)]
    known, _ = parser.parse_known_args([*settings, *rest])
    if given.data_path and not given.data:
        known.data = None
    given_flags = {item.partition("=")[0] for item in rest if item.startswith("--")}
    of_file = {name: value for name, value in recipe.megatron.items() if f"--{name}" not in given_flags}
    only_megatron = flag_arguments(of_file, "megatron") + from_command_line
    if "--mock-data" in only_megatron and not known.data_path:
        known.data = "stdlib"  # a trainer needs some data; Megatron-LM will not see it
    known.config, known.save, known.load = file, str(folder), str(folder)
    known.tensorboard_dir = str(folder / "tensorboard")
    island = known.island
    if known.rendezvous is not None and island is None:
        known.island = 0  # all are alike but for their numbers
    train, lossy = configurations(known)
    if train.virtual_workers:
        why = "share one process: python -m megatron_lossy.train starts it"
        raise refuse("--virtual-workers", train.virtual_workers, why)
    if launch.trainer:
        if from_command_line:
            flags = [word for word in from_command_line if word.startswith("--")]
            known = [*parser._option_string_actions, *make_parser_of_launch()._option_string_actions]
            why = f"is no flag of python -m megatron_lossy.train{did_you_mean(flags, known)}"
            raise UsageError(f"{' '.join(from_command_line)}: {why}")
        return train, lossy, ["megatron_lossy.train", *changed_arguments(train), *changed_arguments(lossy)], [], island
    for flag in _UNKNOWN_SIZES:
        if (size := _value(only_megatron, flag)) not in (None, "1"):
            raise refuse(flag, size, "launch cannot check it; start pretrain_gpt.py with torchrun")
    flags = megatron_arguments(train, lossy, of_file, "--mock-data" in only_megatron)
    return train, lossy, ["megatron_lossy", launch.program, *flags, *from_command_line], only_megatron, island


def _value(arguments: Sequence[str], flag: str) -> str | None:
    """Return the last value of ``flag`` in a command line."""
    value = None
    for item, following in zip(arguments, [*arguments[1:], None]):
        if item == flag:
            value = following
        elif item.startswith(flag + "="):
            value = item.partition("=")[2]
    return value
