"""Mutated datagrams against the engine, with sanitizers: nothing but whole units is written, and memory stays bounded."""

import subprocess
from pathlib import Path

import pytest

from megatron_lossy.transport.udp import build

DRIVER = Path(__file__).with_name("udp_fuzz.c")


@pytest.fixture(scope="module")
def fuzz(tmp_path_factory):
    compiler = build.compiler()
    if compiler is None:
        pytest.skip("no C compiler")
    program = tmp_path_factory.mktemp("fuzz") / "fuzz"
    command = [compiler, "-std=gnu11", "-O1", "-g", "-pthread", "-o", program, DRIVER, "-ldl"]
    sanitizers = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    if subprocess.run([*command, *sanitizers], capture_output=True).returncode:
        subprocess.run(command, check=True)  # they are packages of their own on some systems

    def run(count, seed, cipher):
        done = subprocess.run([program, str(count), str(seed), str(int(cipher))], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        words = done.stdout.replace("bad tag", "bad-tag").replace("early dropped", "dropped").split(":")[1].split()
        return dict(zip(words[::2], map(int, words[1::2])))

    return run


@pytest.mark.parametrize("cipher", [False, True])
def test_mutated_datagrams_change_nothing(fuzz, cipher):
    verdicts = fuzz(100_000, 1, cipher)
    assert sum(verdicts.values()) == 100_000
    assert min(verdicts[name] for name in ("taken", "malformed", "foreign", "duplicate", "early")) > 1000
    assert (verdicts["bad-tag"] > 1000) == cipher


@pytest.mark.slow
@pytest.mark.parametrize("cipher", [False, True])
def test_ten_million_mutated_datagrams_change_nothing(fuzz, cipher):
    fuzz(10_000_000, 2, cipher)
