"""A lighthouse of torchft for tests."""

from __future__ import annotations

import subprocess
import sys

import pytest

#: Seconds after which it takes a silent island for dead.
TIMEOUT = 1.5


@pytest.fixture
def serve():
    """Starts a lighthouse, at ``port`` if that is given; the process and its URL. All end with the test.

    ``join``: seconds for which others are waited for that have not asked.
    """
    pytest.importorskip("torchft")
    started = []

    def serve(port=0, join=0.3):
        command = [sys.executable, "-m", "megatron_lossy", "lighthouse", "--bind", f"127.0.0.1:{port}"]
        options = ["--timeout", str(TIMEOUT), "--join", str(join)]
        process = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        started.append(process)
        line = process.stdout.readline()
        assert line.startswith("lighthouse: http://"), line
        return process, "http://127.0.0.1:" + line.strip().rpartition(":")[2]

    yield serve
    for process in started:
        process.kill()
        process.wait()
