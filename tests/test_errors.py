"""How programs end."""

import signal
import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("raised", "status", "line"),
    [
        ("UsageError('--p 2: must be 1')", 2, "x: error: --p 2: must be 1\n"),
        ("OSError(28, 'No space left on device', 'out/file')", 1, "x: error: out/file: No space left on device\n"),
        ("OSError(5, 'Input/output error')", 1, "x: error: Input/output error\n"),
        ("cannot('--in', 'a', 'read', OSError(13, 'Permission denied'))", 2, "x: error: --in a: cannot be read: Perm"),
        ("cannot('--in', 'a', 'read', OSError(5, 'Input/output error'))", 1, "x: error: a: Input/output error\n"),
        ("KeyboardInterrupt", -signal.SIGINT, "x: interrupted\n"),
        ("BrokenPipeError", -signal.SIGPIPE, ""),
        ("OSError(2, 'No such file', 'ours')", 1, "Traceback (most recent call last):\n"),
    ],
)
def test_status_and_line(raised, status, line):
    program = f"from megatron_lossy.errors import *\nwith usage_errors('x'):\n    raise {raised}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout, bool(done.stderr)) == (status, "", bool(line))
    assert done.stderr.startswith(line)
