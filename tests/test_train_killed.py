"""Real ranks of the training program, killed with SIGKILL at any moment: the run ends as if nobody had killed it."""

from __future__ import annotations

import contextlib
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.programs import Program, run_program, start_ranks
from tests.ranks import run_ranks
from tests.trainer import TINY, as_flags, checkpoint_bytes, read_records, recorded_losses, write_data

pytestmark = pytest.mark.shows("ranks killed at any moment go on bit for bit")

ITERATIONS = 12
PACKETS = {"p_grad": 0.3, "p_param": 0.3, "loss_unit": "packet", "packet_bytes": 64, "eval_weights": "both"}
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True, "ddp_bucket_size": 9000}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    run_ranks(write_data, 1, str(folder))
    data = {"data_path": (str(folder / "train"),), "valid_data_path": (str(folder / "valid"),)}
    return TINY | data | {"train_iters": ITERATIONS, "save_interval": 2, "log_interval": 1, "save_replicas": True}


def seconds_of(run: Path) -> float:
    """The time that all iterations of an uninterrupted run took."""
    return sum(record["seconds"] for record in read_records(run, "train"))


class Killer:
    """Kills one rank of a run in ``folder``. ``random`` chooses the rank, and the moment within what is asked for."""

    def __init__(self, folder: Path, chance: random.Random, duration: float) -> None:
        self.folder = folder
        self.chance = chance
        self.duration = duration

    def kill(self, ranks: list[Program], when: str) -> bool:
        """Kill one of ``ranks`` and see the others end; whether it happened before the run was over.

        Those that train notice it by themselves. One that waits for the others to start cannot: a launcher ends it.
        """
        getattr(self, when)(lambda: any(rank.poll() is not None for rank in ranks))
        first, *others = self.chance.sample(ranks, len(ranks))
        happened = first.poll() is None and first.send_signal(signal.SIGKILL)
        for rank in others if when == "at_any_moment" else []:
            if rank.poll() is None:
                rank.send_signal(signal.SIGKILL)
        for rank in ranks:
            rank.communicate(timeout=60)
        return happened

    def at_any_moment(self, over) -> None:
        """From the start of the processes to the end of the run, as far as it is ahead."""
        self._wait(lambda: False, over, self.chance.uniform(0, 1) * (1.0 + self.duration))

    def while_saving(self, over) -> None:
        """While a checkpoint is written beside its place."""
        self._wait(self._something_new("iter_*.tmp"), over)
        time.sleep(self.chance.uniform(0, 0.1))

    def after_the_rename(self, over) -> None:
        """When a checkpoint is in its place, before or just after the tracker names it."""
        self._wait(self._something_new("iter_*[0-9]"), over)

    def _something_new(self, pattern: str) -> Callable[[], bool]:
        """Whether there is a folder that was not there now: runs that were killed leave some of the same names."""

        def found() -> set[tuple[str, int]]:
            with contextlib.suppress(FileNotFoundError):  # renamed or removed meanwhile
                return {(path.name, path.stat().st_ino) for path in self.folder.glob(pattern)}
            return set()

        before = found()
        return lambda: bool(found() - before)

    def _wait(self, reached, over, seconds: float = 60.0) -> None:
        end = time.monotonic() + seconds
        while not reached() and not over() and time.monotonic() < end:
            time.sleep(0.0005)


def whole_and_killed(base: dict, folder: Path, ranks: int, moments: list[str], seed: int) -> None:
    """A run that nobody kills, and one that is killed at each of ``moments``, and then left alone."""
    once, often = folder / "once", folder / "often"
    done = run_program("megatron_lossy.train", *as_flags(base | {"save": str(once)}), ranks=ranks)
    assert done.returncode == 0, done.stderr
    flags = as_flags(base | {"save": str(often), "load": str(often)})
    killer = Killer(often, random.Random(seed), seconds_of(once))
    killed = [killer.kill(start_ranks("megatron_lossy.train", *flags, ranks=ranks), when) for when in moments]
    done = run_program("megatron_lossy.train", *flags, ranks=ranks)
    assert done.returncode == 0, done.stderr
    assert any(killed)
    assert recorded_losses(once) == recorded_losses(often)
    assert checkpoint_bytes(once, ITERATIONS) == checkpoint_bytes(often, ITERATIONS)
    last = [record["lm loss"] for record in read_records(once, "valid")[-2:]]
    assert last[0] != last[1]  # replicas differ from the owners' weights, or nothing was to be restored
    replicas = [
        [file.read_bytes() for file in sorted((run / f"iter_{ITERATIONS:07d}" / "lossy_replicas").iterdir())]
        for run in (once, often)
    ]
    assert replicas[0] == replicas[1] and len(replicas[0]) == ranks


def test_killed_ranks_continue_bit_for_bit(base, tmp_path):
    settings = base | OVERLAP | PACKETS | {"grad_recovery": "previous"}
    whole_and_killed(settings, tmp_path, 2, ["while_saving", "at_any_moment", "after_the_rename"], seed=1)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    ("ranks", "settings"),
    [
        (2, PACKETS | {"bf16": True, "grad_recovery": "error-feedback"}),
        (2, OVERLAP | PACKETS | {"grad_recovery": "previous", "loss_model": "gilbert-elliott:3"}),
        (4, OVERLAP | PACKETS | {"tensor_model_parallel_size": 2, "make_vocab_size_divisible_by": 64}),
        (4, PACKETS | {"num_distributed_optimizer_instances": 2, "loss_unit": "bucket", "packet_bytes": 1024}),
    ],
    ids=["bf16, feedback", "bursts, previous", "tensor parallel", "two instances"],
)
def test_killed_again_and_again(base, tmp_path, ranks, settings, seed):
    moments = ["at_any_moment"] * 5 + ["while_saving"] * 3 + ["after_the_rename"] * 2
    random.Random(seed).shuffle(moments)
    whole_and_killed(base | settings, tmp_path, ranks, moments, seed)
