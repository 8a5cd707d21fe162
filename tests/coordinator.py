"""Stores for tests: a coordinator, and an etcd, each a process of its own."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import time

import pytest

from megatron_lossy.mechanisms.islands.membership.store import Store, Unreachable
from tests.programs import Program

#: The secret of the key file of tests.
KEY = b"a secret of 32 bytes for tests  "


class Coordinator:
    """A coordinator in ``folder`` with :data:`KEY`, and its page. ``port``: 0 for any."""

    def __init__(self, folder, port=0):
        self.folder = folder
        (folder / "key").write_bytes(KEY)
        options = ["--key-file", "key", "--bind", f"127.0.0.1:{port}", "--page", "127.0.0.1:0"]
        self.program = Program("megatron_lossy", "coordinator", *options, folder=folder)
        while self.program.printed().count("\n") < 2:
            assert self.program.poll() is None, self.program.communicate()
            time.sleep(0.02)
        self.port, self.page = map(int, re.findall(r":(\d+)$", self.program.printed(), re.MULTILINE))

    def url(self, run="run"):
        return f"tcp://127.0.0.1:{self.port}/{run}"

    def end(self, number):
        """End it by a signal. Its output and errors."""
        self.program.send_signal(number)
        return self.program.communicate()


class Etcd:
    """An etcd of one member in ``folder``. Skips the test where it is not installed."""

    def __init__(self, folder):
        if shutil.which("etcd") is None:
            pytest.skip("no etcd; Debian's package is etcd-server")
        with socket.socket() as one, socket.socket() as other:
            one.bind(("127.0.0.1", 0))
            other.bind(("127.0.0.1", 0))
            self.port, peer = one.getsockname()[1], f"http://127.0.0.1:{other.getsockname()[1]}"
        client = f"http://127.0.0.1:{self.port}"
        self._command = ["etcd", "--data-dir", str(folder / "etcd")]
        self._command += ["--listen-client-urls", client, "--advertise-client-urls", client]
        self._command += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]
        self._command += ["--initial-cluster", f"default={peer}"]
        self.start()

    def start(self):
        self.process = subprocess.Popen(
            self._command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "ETCD_UNSUPPORTED_ARCH": ""},
        )
        while True:
            assert self.process.poll() is None
            with contextlib.suppress(Unreachable):
                self.post("maintenance/status", {})
                return
            time.sleep(0.1)

    def post(self, path, body):
        """Ask it for anything, without a user."""
        return Store([("127.0.0.1", self.port)], "run")._post(path, body, time.monotonic() + 5)

    def url(self, run="run"):
        return f"etcd://127.0.0.1:{self.port}/{run}"

    def end(self):
        self.process.kill()
        self.process.wait()


@pytest.fixture
def serve(tmp_path):
    """Starts a coordinator, at ``port`` if that is given. It ends with the test."""
    pytest.importorskip("cryptography")
    started = []

    def serve(port=0):
        started.append(Coordinator(tmp_path, port))
        return started[-1]

    yield serve
    for one in started:
        one.end(signal.SIGKILL)
