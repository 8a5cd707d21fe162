"""A real Slurm of two nodes on this machine, for tests: slurmctld, two slurmd and munged of its own.

Everything is in one folder under /tmp, on free ports; an installed Slurm's configuration, key and daemons are not
touched. ``python -m tests.slurm_cluster FOLDER`` is the keeper: it starts the daemons and, as soon as nobody holds
its standard input any more, ends them and every process of their jobs. So nothing is left however the tests end.
Without FOLDER it says what is missing for that, if anything is.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[1]
NODES, CPUS_OF_NODE = 2, 4
#: Packages to install on Debian and Ubuntu.
PACKAGES = "slurm-wlm munge"
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h

# cred_expire: what a requeued job waits before it starts again. config_overrides: the machine may have fewer CPUs.
# MessageTimeout: daemons on a busy machine. grace: preempted jobs get a signal a minute before.
_CONFIGURATION = """
ClusterName=megatron-lossy
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdPidFile={folder}/%n.pid
SlurmdLogFile={folder}/%n.log
SlurmdSpoolDir={folder}/%n
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=30
MessageTimeout=60
OverTimeLimit=0
JobRequeue=1
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=1,sched_min_interval=0,bf_interval=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{nodes}
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 DefaultTime=60 MaxTime=60
PartitionName=grace Nodes=ALL PriorityTier=1 DefaultTime=60 MaxTime=60 GraceTime=60
PartitionName=high Nodes=ALL PriorityTier=10 DefaultTime=60 MaxTime=60
"""


def missing() -> str | None:
    """Return the reason why there can be no cluster here, or None."""
    absent = [name for name in ("munged", "slurmctld", "slurmd", "sbatch", "srun") if shutil.which(name) is None]
    if absent:
        return f"{', '.join(absent)} not found: apt-get install --no-install-recommends {PACKAGES}"
    return None if os.geteuid() == 0 else "a Slurm of our own needs root"


class Cluster:
    """The running Slurm. Jobs see the environment of ``environment``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = os.environ | {
            "SLURM_CONF": str(folder / "slurm.conf"),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
        }

    def run(self, *command: str | Path, folder: Path | None = None) -> str:
        """Return the output of one of Slurm's programs."""
        done = subprocess.run(command, cwd=folder, env=self.environment, capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout

    def submit(self, folder: Path, *arguments: str | Path) -> str:
        """Run ``sbatch arguments`` in ``folder``, where Slurm writes the log; return the number of the job."""
        return self.run("sbatch", "--parsable", *arguments, folder=folder).strip()

    def job(self, job: str) -> dict[str, str]:
        """Return the fields of ``scontrol show job`` by name."""
        text = self.run("scontrol", "--oneliner", "show", "job", job)
        return dict(re.findall(r"(\S+?)=(\S*)", text))

    def update(self, job: str, setting: str) -> None:
        """``scontrol update``, for example ``TimeLimit=5``."""
        self.run("scontrol", "update", f"JobId={job}", setting)

    def wait(self, what: str, done: Callable[[], bool], seconds: float = 240) -> None:
        """Wait until ``done()``. Raise AssertionError after ``seconds``, with all that Slurm says."""
        deadline = time.monotonic() + seconds
        while not done():
            if time.monotonic() > deadline:
                state = self.run("scontrol", "show", "job")
                log = "".join((self.folder / "slurmctld.log").read_text().splitlines(keepends=True)[-40:])
                raise AssertionError(f"{what}: not within {seconds:g} s\n{state}\n{log}")
            time.sleep(0.5)

    def wait_end(self, job: str, seconds: float = 240) -> str:
        """Wait for the end of ``job``; returns its state, for example ``COMPLETED``."""
        running = ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "REQUEUED")
        self.wait(f"end of job {job}", lambda: self.job(job)["JobState"] not in running, seconds)
        return self.job(job)["JobState"]


@contextlib.contextmanager
def slurm_cluster() -> Iterator[Cluster]:
    """Start a cluster, and end it with everything that runs in it. Raise RuntimeError if it does not start."""
    # Not pytest's folder: the path of a socket has at most 107 characters.
    folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
    keeper = subprocess.Popen(
        [sys.executable, "-m", "tests.slurm_cluster", str(folder)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C is for pytest, which then ends the keeper
    )
    try:
        answer = keeper.stdout.readline().strip()
        if answer != "ready":
            logs = "\n".join(f"{path.name}: {path.read_text()[-1000:]}" for path in folder.glob("*.log"))
            raise RuntimeError(f"Slurm did not start: {answer}\n{logs}")
        yield Cluster(folder)
    finally:
        keeper.stdin.close()
        keeper.wait(60)


def keep(folder: Path) -> None:
    """The keeper's main function."""
    # Processes that a daemon leaves behind become children of this process, not of init.
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        sys.exit(f"prctl: {os.strerror(ctypes.get_errno())}")
    try:
        _start(folder)
        print("ready", flush=True)
        sys.stdin.read()
    except Exception as error:
        print(" ".join(str(error).split()), flush=True)
        sys.stdin.read()  # the other side reads the logs
    finally:
        _end_everything()
        shutil.rmtree(folder, ignore_errors=True)


def _start(folder: Path) -> None:
    ports = free_ports(1 + NODES)
    names = [f"n{number}" for number in range(NODES)]
    host = socket.gethostname()
    nodes = "\n".join(
        f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={CPUS_OF_NODE} State=UNKNOWN"
        for name, port in zip(names, ports[1:], strict=True)
    )
    (folder / "slurm.conf").write_text(_CONFIGURATION.format(folder=folder, host=host, ports=ports, nodes=nodes))
    (folder / "munge.key").touch(0o600)
    (folder / "munge.key").write_bytes(secrets.token_bytes(128))
    for name in ("state", *names):
        (folder / name).mkdir()
    munge = [f"--{what}-file={folder}/munge.{what}" for what in ("key", "pid", "log", "seed")]
    environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}
    daemons: list[subprocess.Popen] = []

    def start(*command: str) -> None:
        with open(folder / "output.log", "a") as output:
            daemons.append(
                subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
            )

    start("munged", "--foreground", "--force", f"--socket={folder}/munge.socket", *munge)
    _until("munged", lambda: (folder / "munge.socket").exists())
    start("slurmctld", "-D", "-c")
    for name in names:
        start("slurmd", "-D", "-N", name)

    def idle() -> bool:
        if any(daemon.poll() is not None for daemon in daemons):
            raise RuntimeError("one of the daemons ended")
        done = subprocess.run(["sinfo", "-h", "-N", "-p", "low", "-o", "%T"], env=environment, capture_output=True)
        return done.stdout.split() == [b"idle"] * NODES

    _until("idle nodes", idle)


def _until(what: str, done: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() > deadline:
            raise RuntimeError(f"{what}: not within {seconds:g} s")
        time.sleep(0.1)


def free_ports(count: int) -> list[int]:
    """Return ports that nobody listens on."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for opened in sockets:
            opened.bind(("127.0.0.1", 0))
        return [opened.getsockname()[1] for opened in sockets]


def _end_everything() -> None:
    """Daemons, the processes of jobs, and Slurm's own for every step, which outlive slurmd."""
    while children := psutil.Process().children(recursive=True):
        for process in children:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(children, timeout=5)


if __name__ == "__main__":
    if sys.argv[1:]:
        keep(Path(sys.argv[1]))
    else:
        sys.exit(missing())
