"""A lighthouse of torchft for tests."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

#: Seconds after which it takes a silent island for dead.
TIMEOUT = 1.5


@pytest.fixture
def serve(tmp_path):
    """Starts a lighthouse, at ``port`` if that is given; the process and its URL. All end with the test.

    Errors are in ``lighthouse_0.txt``, … of ``tmp_path``. ``join``: seconds for which others are waited for that have not asked.
    Islands ask once a second: with less than that they would be in answers in turns.
    """
    pytest.importorskip("torchft")
    started = []

    def serve(port=0, join=2.0):
        command = [sys.executable, "-m", "megatron_lossy", "lighthouse", "--bind", f"127.0.0.1:{port}"]
        options = ["--timeout", str(TIMEOUT), "--join", str(join)]
        errors = open(tmp_path / f"lighthouse_{len(started)}.txt", "w")
        environment = {name: value for name, value in os.environ.items() if name != "RUST_LOG"}
        process = subprocess.Popen(
            [*command, *options], stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
        )
        started.append(process)
        line = process.stdout.readline()
        assert line.startswith("lighthouse: http://"), line
        return process, "http://127.0.0.1:" + line.strip().rpartition(":")[2]

    yield serve
    for process in started:
        process.kill()
        process.wait()
