"""The memory of paths: what all processes of this host know of the way to another host, so that they send as one."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import mmap
import os
import stat
import time
from collections.abc import Callable, Mapping
from pathlib import Path

#: Memory that processes of one host share, as files.
SHARED_MEMORY = Path("/dev/shm")
#: Seconds to wait for another process that makes the same path.
_LOCKED = 5.0
#: What the processes of one job on one host have in common, and those of another job do not.
_JOB = (
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
)


def job_name(environment: Mapping[str, str]) -> str | None:
    """The name of this process's job on its host; ``None`` if nothing says that it has other processes."""
    if "MASTER_PORT" not in environment:
        return None
    return " ".join(environment.get(name, "") for name in _JOB)


class Paths:
    """The paths of one engine, by the address of the other host.

    Args:
        job: names the processes that share paths; ``None``: this one alone.
        own: the address that is sent from.
        size: bytes of a path.
        log: called with a line for the user if memory cannot be shared.
        folder: where shared memory is; default :data:`SHARED_MEMORY`.
    """

    def __init__(
        self, job: str | None, own: str, size: int, log: Callable[[str], None], folder: Path | None = None
    ) -> None:
        self._job, self._own, self._size, self._log = job, own, size, log
        self._folder = SHARED_MEMORY if folder is None else folder
        self._memory: dict[str, ctypes.Array[ctypes.c_char]] = {}
        self._files: list[Path] = []

    def to(self, other: str, make: Callable[[int], int]) -> int:
        """Return the address of the path to ``other``. ``make(address)`` makes a path unless there is one; returns 0, or an errno."""
        if other not in self._memory:
            self._memory[other] = self._shared(other, make) or self._alone(make)
        return ctypes.addressof(self._memory[other])

    def _alone(self, make: Callable[[int], int]) -> ctypes.Array[ctypes.c_char]:
        memory = ctypes.create_string_buffer(self._size)
        make(ctypes.addressof(memory))
        return memory

    def _shared(self, other: str, make: Callable[[int], int]) -> ctypes.Array[ctypes.c_char] | None:
        if self._job is None:
            return None
        digest = hashlib.sha256(repr((self._job, self._own, other)).encode()).hexdigest()[:24]
        path = self._folder / f"megatron-lossy-{os.getuid()}-{digest}"
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                there = os.fstat(file)
                if not stat.S_ISREG(there.st_mode) or there.st_uid != os.getuid():
                    raise PermissionError("it is another user's")
                _lock(file)
                self._files.append(path)
                os.posix_fallocate(
                    file, 0, self._size
                )  # of a full file system a page that is touched later kills the process
                memory = (ctypes.c_char * self._size).from_buffer(mmap.mmap(file, self._size))
                if error := make(ctypes.addressof(memory)):
                    raise OSError(error, os.strerror(error))
            finally:
                fcntl.flock(file, fcntl.LOCK_UN)  # the mapping has a copy of the descriptor
                os.close(file)
        except OSError as error:
            self._log(f"udp: {path}: {error.strerror or error}; each process of this host sends as a sender of its own")
            return None
        return memory

    def close(self) -> None:
        """Remove the files. Processes that have them go on; the engine must not use the memory any more."""
        for path in self._files:
            path.unlink(missing_ok=True)
        self._files.clear()
        self._memory.clear()


def _lock(file: int) -> None:
    """Lock ``file``. Raises ``TimeoutError`` if another process, as one that was stopped, has held the lock for too long."""
    until = time.monotonic() + _LOCKED
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                raise TimeoutError(f"another process has locked it for {_LOCKED:g} s") from None
            time.sleep(0.01)
