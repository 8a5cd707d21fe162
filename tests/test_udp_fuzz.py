"""The engine in C with sanitizers: against mutated datagrams, and against callers at random."""

import subprocess
from collections import Counter
from pathlib import Path

import pytest

from megatron_lossy.base import native

pytestmark = pytest.mark.shows("the engine under sanitizers: mutated datagrams, callers at random", device=False)

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Run a driver of this folder with the engine inside; return its last line."""
    compiler = native.compiler() or pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("fuzz")

    def run(driver, *arguments):
        program = folder / driver
        if not program.exists():
            words = [*["-std=gnu11", "-O1", "-g", "-pthread", "-o"], program, HERE / f"{driver}.c", "-ldl", "-lm"]
            command = [compiler, *words]
            sanitizers = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
            if subprocess.run([*command, *sanitizers], capture_output=True).returncode:
                subprocess.run(command, check=True)  # they are packages of their own on some systems
        done = subprocess.run([program, *map(str, arguments)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    return run


def mutated(run, count, seed, cipher):
    """Return the fates of ``count`` datagrams."""
    words = run("udp_fuzz", count, seed, int(cipher)).replace("bad tag", "bad-tag").replace("early dropped", "dropped")
    words = words.split(":")[1].split()
    return dict(zip(words[::2], map(int, words[1::2])))


@pytest.mark.parametrize("count", [100_000, pytest.param(10_000_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("cipher", [False, True])
def test_mutated_datagrams_change_nothing(run, cipher, count):
    """Nothing but whole units is written, and memory stays bounded."""
    verdicts = mutated(run, count, 1, cipher)
    assert sum(verdicts.values()) == count
    assert min(verdicts[name] for name in ("taken", "malformed", "foreign", "duplicate", "early")) > 1000
    assert (verdicts["bad-tag"] > 1000) == cipher


def at_random(run, operations, seed, cipher):
    """Return the calls of callers, and their results."""
    words = run("udp_stateful", operations, seed, int(cipher)).split()
    return dict(zip(words[::2], map(int, words[1::2])))


@pytest.mark.parametrize("operations", [3000, pytest.param(60_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("cipher", [False, True])
def test_callers_at_random_lose_no_memory_and_wait_for_nothing_for_ever(run, cipher, operations):
    """They skip steps, set deadlines, stop, are cut off, do without others, and close in the middle; buffers go as soon as they may."""
    counts = sum((Counter(at_random(run, operations, seed, cipher)) for seed in range(4)), Counter())
    assert min(counts[name] for name in ("over", "open-at-close", "closes", "cuts", "lost", "without")) > 5
