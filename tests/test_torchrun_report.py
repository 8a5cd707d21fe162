"""The report that a user of torchrun sees when a run ends: of torchrun, and of the launcher's agent in its place.

One test of each kind starts all of it afresh; in the others the fork server starts the ranks (tests/programs.py).
"""

import os
import re
import signal
import subprocess
import sys
import time

import pytest

from tests.programs import AGENT, TORCHRUN, Program
from tests.trainer import ROOT

pytestmark = pytest.mark.shows("what torchrun reports when ranks fail or are killed", device=False)

BEGIN = """
import os, pathlib, signal, time
from megatron_lossy.base.errors import UsageError, usage_errors
from megatron_lossy.lab.train.process import rank_errors
from megatron_lossy.transport.udp import PeerLost
rank, here = int(os.environ["RANK"]), pathlib.Path(__file__).parent
def wait(*ranks):  # until they are where they call at()
    while not all((here / str(rank)).exists() for rank in ranks): time.sleep(0.01)
def at(): (here / str(rank)).touch()
"""


def start(module, *arguments, ranks=3, afresh=False):
    words = ["--standalone", "--nproc-per-node", str(ranks), *map(str, arguments)]
    if not afresh:
        return Program(module, *words)
    return subprocess.Popen(
        [sys.executable, "-m", module, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )


def run_script(folder, script, afresh=False):
    """The end of three ranks of ``script``: what was said outside and inside of torchrun's report, and the status."""
    (folder / "script.py").write_text(BEGIN + script)
    process = start(TORCHRUN, folder / "script.py", afresh=afresh)
    _, said = process.communicate(timeout=120)
    before, _, report = said.partition("script.py FAILED")
    return before, report, process.returncode


def signalled(folder, script, number):
    """The end of the agent that gets a signal once its three ranks are there: what was said, and the status."""
    (folder / "script.py").write_text(BEGIN + script)
    process = start(AGENT, folder / "script.py")
    while not all((folder / str(rank)).exists() for rank in range(3)):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(number)
    _, said = process.communicate(timeout=120)
    return said, process.returncode


@pytest.mark.parametrize("module", [TORCHRUN, AGENT])
def test_a_wrong_flag_is_the_root_cause(module):
    process = start(module, "-m", "megatron_lossy.train", "--config", "configs/tiny/llama_1m.yaml", "--p-grad", "2")
    _, said = process.communicate(timeout=120)
    line = "megatron_lossy.train: error: --p-grad 2.0: must be in [0, 1)"
    assert said.splitlines().count(line) == 1
    if module == AGENT:
        assert said.splitlines()[-1] == f"megatron_lossy.launch: rank 0 failed: {line}" and "Traceback" not in said
        assert process.returncode == 2
    else:  # as docs/index.md says
        assert said.splitlines()[-2].strip() == f"traceback : {line}" and process.returncode == 1
        assert "rank      : 0 " in said.partition("Root Cause")[2]


def test_ranks_that_find_the_same_are_not_reported(tmp_path):
    """They wait for torchrun, which ends them."""
    before, report, status = run_script(
        tmp_path,
        "with usage_errors('x'):\n"
        "    at() if rank else (wait(1, 2), time.sleep(2))\n"
        "    raise UsageError('--p 2: must be 1')\n",
    )
    assert before.count("--p 2") == 1 and "<NO_OTHER_FAILURES>" in report and status == 1
    assert "traceback : x: error: --p 2: must be 1" in report


def test_ranks_that_lose_contact_leave_the_word_to_the_one_that_failed(tmp_path):
    before, report, status = run_script(
        tmp_path,
        "with usage_errors('x'), rank_errors('x'):\n"
        "    if rank == 1:\n"
        "        wait(0, 2)\n"
        "        raise ValueError('ours')\n"
        "    at()\n"
        "    from megatron_lossy.lab.train.process import told_to_end\n"
        "    signal.signal(signal.SIGTERM, lambda *_: told_to_end()) if rank == 0 else None\n"
        "    time.sleep(2)\n"
        "    raise PeerLost('rank 1: gone')\n",
    )
    assert "x: rank 1 stops: an error\nTraceback" in before and "ValueError: ours" in before
    assert "lost contact" not in before + report
    root = report.partition("Root Cause")[2]
    assert "rank      : 1 " in root and "ValueError: ours" in root and status == 1


def test_a_dataset_helper_that_cannot_be_built_is_the_root_cause(tmp_path):
    (tmp_path / "megatron/core/datasets").mkdir(parents=True)
    _, report, status = run_script(
        tmp_path,
        "from megatron_lossy.hooks.dataset_helper import build_helper\n"
        "with usage_errors('x'), rank_errors('x'):\n"
        "    if rank == 0:\n"
        "        wait(1, 2)\n"
        "        build_helper(here)\n"
        "    at()\n"
        "    import torch\n"
        "    torch.distributed.init_process_group('gloo')\n",
    )
    root = report.partition("Root Cause")[2]
    assert "rank      : 0 " in root and "has no dataset helper, and it cannot be built" in root and status == 1


def test_a_rank_that_is_killed_is_the_root_cause(tmp_path):
    before, report, status = run_script(
        tmp_path,
        "with usage_errors('x'), rank_errors('x'):\n"
        "    if rank == 1:\n"
        "        wait(0, 2)\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    at()\n"
        "    raise PeerLost('rank 1: gone')\n",
        afresh=True,
    )
    assert "rank      : 1 " in report.partition("Root Cause")[2] and "SIGKILL" in report and status == 1
    assert len(re.findall("rank . stops", before)) <= 1


def test_one_rank_tells_that_contact_was_lost_where_none_failed(tmp_path):
    """As on a node whose ranks lost those of another one."""
    before, report, status = run_script(
        tmp_path,
        "with usage_errors('x'), rank_errors('x'):\n    at()\n    wait(0, 1, 2)\n    raise PeerLost('rank 5: gone')\n",
    )
    line = "x: rank 0 stops: lost contact with another rank (rank 5: gone)"
    assert line in before and f"traceback : {line}" in report and status == 1


def test_a_rank_that_somebody_else_told_to_end_and_that_fails_is_started_again(tmp_path):
    """It prints nothing by itself, but it has not ended well."""
    (tmp_path / "script.py").write_text(
        BEGIN
        + "from megatron_lossy.lab.train.process import told_to_end\n"
        + "with usage_errors('x'), rank_errors('x'):\n"
        + "    if not (here / '0').exists():\n"
        + "        at()\n"
        + "        signal.signal(signal.SIGTERM, lambda *_: told_to_end())\n"
        + "        os.kill(os.getpid(), signal.SIGTERM)\n"
        + "        raise PeerLost('rank 1: gone')\n"
        + "    (here / 'again').touch()\n"
    )
    process = start(AGENT, "--max-restarts", 1, tmp_path / "script.py", ranks=1, afresh=True)
    process.communicate(timeout=120)
    assert process.returncode == 0 and (tmp_path / "again").exists()


@pytest.mark.parametrize("well", [True, False])
def test_after_sigterm_the_agent_ends_well_if_all_ranks_did(tmp_path, well):
    script = f"signal.signal(signal.SIGTERM, lambda *_: os._exit({int(not well)} * rank))\nat(); time.sleep(600)\n"
    said, status = signalled(tmp_path, script, signal.SIGTERM)
    assert status == (0 if well else -signal.SIGTERM)
    assert said.splitlines()[-1].startswith("megatron_lossy.launch: ") and ("all ranks ended well" in said) == well


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_agent_ends_by_the_signal_that_it_got(tmp_path, number):
    script = "with usage_errors('x'):\n    at(); time.sleep(600)\n"  # Ctrl-C, and the default of SIGTERM
    said, status = signalled(tmp_path, script, number)
    assert status == -number
    assert said.splitlines()[-1] == f"megatron_lossy.launch: ended by {number.name}" and "Traceback" not in said
    assert said.count("x: interrupted") == (number == signal.SIGINT)
