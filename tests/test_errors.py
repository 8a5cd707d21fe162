"""The ends of programs."""

import signal
import subprocess
import sys

import pytest

pytestmark = pytest.mark.shows("how programs end: status and one line", device=False)


@pytest.mark.parametrize(
    ("raised", "status", "line"),
    [
        ("UsageError('--p 2: must be 1')", 2, "x: error: --p 2: must be 1\n"),
        ("OSError(28, 'No space left on device', 'out/file')", 1, "x: error: out/file: No space left on device\n"),
        ("OSError(5, 'Input/output error')", 1, "x: error: Input/output error\n"),
        ("cannot('--in', 'a', 'read', OSError(13, 'Permission denied'))", 2, "x: error: --in a: cannot be read: Perm"),
        ("cannot('--in', 'a', 'read', OSError(5, 'Input/output error'))", 1, "x: error: a: Input/output error\n"),
        ("KeyboardInterrupt", -signal.SIGINT, "x: interrupted\n"),
        ("BrokenPipeError(32, 'Broken pipe')", 1, "Traceback (most recent call last):\n"),
        ("OSError(2, 'No such file', 'ours')", 1, "Traceback (most recent call last):\n"),
    ],
)
def test_status_and_line(raised, status, line):
    program = f"from megatron_lossy.base.errors import *\nwith usage_errors('x'):\n    raise {raised}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout, bool(done.stderr)) == (status, "", bool(line))
    assert done.stderr.startswith(line)


@pytest.mark.parametrize("options", [[], ["-u"]])
@pytest.mark.parametrize("ranks", ["", ", rank_errors('x')"])
def test_an_output_without_a_reader_ends_the_program_silently(options, ranks):
    """But not the pipe of somebody else: see above."""
    program = "from megatron_lossy.base.errors import *\nfrom megatron_lossy.lab.train.process import rank_errors\n"
    program += f"input()\nwith usage_errors('x'){ranks}:\n    print('text', flush=True)"
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process = subprocess.Popen([sys.executable, *options, "-c", program], **pipes)
    process.stdout.close()
    process.stdin.write("\n")
    process.stdin.close()
    assert (process.wait(60), process.stderr.read()) == (-signal.SIGPIPE, "")
    process.stderr.close()


def test_a_rank_tells_of_the_broken_pipe_of_a_library():
    program = "from megatron_lossy.base.errors import *\nfrom megatron_lossy.lab.train.process import rank_errors\n"
    program += "with usage_errors('x'), rank_errors('x'):\n    raise BrokenPipeError(32, 'Broken pipe')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("x: rank 0 stops: an error\nTraceback") and "BrokenPipeError" in done.stderr
