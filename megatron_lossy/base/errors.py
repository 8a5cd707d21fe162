"""Errors that a user sees: one line, and an exit status that says whose fault it is.

* 2, the user's: another flag, value or path would have been accepted. A path that is missing, of the wrong kind,
  without permission, read-only or damaged is one. Every check raises :class:`UsageError`. Its text names the flag, the
  value and the allowed values.
* 3, of islands that come and go, and no error: a signal ended the island before the end of its run, and it has saved
  (:data:`STOPPED`).
* 4, of islands that come and go: a later start has taken the slot. It is an error with another :attr:`UsageError.status`.
* 1, the machine's: the command was right, and the disk is full or broken, or files or memory ran out. That is an
  :class:`OSError` of :data:`MACHINE_ERRORS`, which names the path.
* Ctrl-C, if nothing remains to be saved, ends a program as it ends others, by SIGINT. A closed output
  (``| head``) ends it by SIGPIPE, without a word. A pipe or socket of a library is no such output.

Anything else is a defect of ours, and shows its traceback. Programs wrap their main function in :func:`usage_errors`.

A value may come from a file, a preset or a default, and not from the user. The program that reads it notes that
(:func:`note_origins`). Then the line says where the value came from, and errors about typed values come first.

torchrun ends the ranks of a node when one has failed, and prints a report. The rank that failed first reports its error
to it (:func:`tell_torchrun`). The others print nothing, and torchrun does not report them.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import importlib.util
import json
import os
import re
import select
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import NoReturn, TextIO

#: The exit status of an island that a signal ended, while the others go on.
STOPPED = 3
#: Errors that hit a right command: no space, broken disks and mounts, no files or memory left.
MACHINE_ERRORS = frozenset(
    {
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EFBIG,
        errno.EIO,
        errno.ESTALE,
        errno.EMFILE,
        errno.ENFILE,
        errno.ENOMEM,
    }
)
#: Seconds that all but the first rank of a node wait before they print their error.
_GRACE = 5.0
#: The flag and the value that an error begins with.
_FLAG_AND_VALUE = re.compile(r"(--[\w-]+) .*?(?=: )")
#: The origins of values, by flag, while a program runs. Flags that are not among them were typed.
_origins: dict[str, str] | None = None


class UsageError(ValueError):
    """A wrong input. The text is one line that names the flag, the value and the allowed values. ``status``: that of the exit."""

    status = 2


#: Found while modules were imported, where no program could report them yet.
_postponed: list[UsageError] = []


def postpone(error: UsageError) -> None:
    """Let the next program that begins, or :class:`.LossyConfig` that is made, raise ``error``."""
    _postponed.append(error)


def raise_postponed() -> None:
    """Raise the first :class:`UsageError` that was postponed, if there is one."""
    if _postponed:
        raise _postponed[0]


def refuse(flag: str, value: object, allowed: str) -> UsageError:
    """Return the :class:`UsageError` for a ``flag`` that may not be ``value``. ``allowed``: the allowed values."""
    return UsageError(f"{flag} {value}: {allowed}")


class Problems(UsageError):
    """Several wrong inputs. A reader that does not look at ``found`` sees the first."""

    def __init__(self, found: list[UsageError]) -> None:
        super().__init__(str(found[0]))
        self.found = found


class Collector:
    """Gathers errors of checks that do not depend on each other."""

    def __init__(self) -> None:
        self.found: list[UsageError] = []

    def note(self, error: UsageError) -> None:
        """Add ``error``, or all errors that it contains."""
        known = {str(earlier) for earlier in self.found}
        more = error.found if isinstance(error, Problems) else [error]
        self.found += [new for new in more if str(new) not in known]

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Note a :class:`UsageError` from inside the context, and go on after it."""
        try:
            yield
        except UsageError as error:
            self.note(error)

    def finish(self) -> None:
        """Raise the errors, if there are any: first those about typed values."""
        self.found.sort(key=lambda error: origin_of(error) is not None)
        if len(self.found) > 1:
            raise Problems(self.found) from None
        if self.found:
            raise self.found[0] from None


def note_origins(origins: Mapping[str, str]) -> None:
    """Note where values came from, by flag and in words ("from run.yaml"), for the errors of the program that runs.

    It replaces earlier notes. Flags that were typed are not in ``origins``. Outside of a program nothing is noted.
    """
    global _origins
    if _origins is not None:
        _origins = dict(origins)


def origin_of(error: UsageError) -> str | None:
    """Return the origin of the value that ``error`` is about; ``None`` if it was typed, or is not known."""
    found = _FLAG_AND_VALUE.match(str(error))
    return (_origins or {}).get(found[1]) if found else None


def with_origin(error: UsageError) -> str:
    """Return the text of ``error``, with the origin of the value in brackets unless it was typed."""
    text, origin = str(error), origin_of(error)
    found = _FLAG_AND_VALUE.match(text)
    return text if origin is None or found is None else f"{found[0]} ({origin}){text[found.end() :]}"


@contextlib.contextmanager
def errors_in(place: str) -> Iterator[None]:
    """Put ``place`` before the text of a :class:`UsageError` from inside the context."""
    try:
        yield
    except UsageError as error:
        raise UsageError(f"{place}: {error}") from None


def check_package(package: str, flag: str, value: object, install: str) -> None:
    """Raise :class:`UsageError` unless ``package`` is there. ``install``: the argument for pip."""
    if importlib.util.find_spec(package) is None:
        raise refuse(flag, value, f"needs the package {package}: pip install {install}")


def lab_module(name: str, command: str) -> ModuleType:
    """Return the module ``megatron_lossy.lab.NAME``. Raise :class:`UsageError` for ``command`` if there is no lab."""
    try:
        return importlib.import_module(f"megatron_lossy.lab.{name}")
    except ModuleNotFoundError as error:
        if error.name != "megatron_lossy.lab":
            raise
        raise UsageError(f"{command}: needs megatron_lossy.lab, which this installation was made without") from None


def machine_error(error: BaseException | None) -> OSError | None:
    """Return the failure of the machine in ``error``, or in its causes; ``None`` if there is none."""
    while error is not None and not (isinstance(error, OSError) and error.errno in MACHINE_ERRORS):
        error = error.__cause__ or error.__context__
    return error


def cannot(flag: str, path: str | os.PathLike[str], verb: str, error: OSError) -> UsageError | OSError:
    """Return the error that ``path``, which ``flag`` names, cannot be ``verb`` ("read", "written"): ``error``."""
    if error.errno in MACHINE_ERRORS:
        return OSError(error.errno, error.strerror, os.fspath(path))
    return refuse(flag, path, f"cannot be {verb}: {error.strerror or error}")


def host_port(host: str, port: int) -> str:
    """Return HOST:PORT, with an address of IPv6 in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_unread(error: BaseException) -> bool:
    """Return whether ``error`` means that the output of this program has been closed."""
    return isinstance(error, BrokenPipeError) and any(map(_has_no_reader, (sys.stdout, sys.stderr)))


def _has_no_reader(stream: TextIO | None) -> bool:
    if stream is None:
        return False
    poll = select.poll()
    try:
        poll.register(stream.fileno(), 0)  # poll reports errors in any case
    except (AttributeError, OSError, ValueError):  # closed, or no file
        return False
    return any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0))


class ArgumentParser(argparse.ArgumentParser):
    """A parser that raises :class:`UsageError` instead of printing its usage and exiting."""

    def error(self, message: str) -> NoReturn:
        """Raise argparse's own description of the error as ours."""
        raise UsageError(message.removeprefix("argument "))


def first_line(error: BaseException) -> str:
    """Return the first line of the message of ``error``, of a library that writes many; or the name of its class."""
    return (str(error).splitlines() or [type(error).__name__])[0]


@contextlib.contextmanager
def usage_errors(program: str = "megatron-lossy") -> Iterator[None]:
    """Print a :class:`UsageError` or a failure of the machine as one line, and exit with its status.

    The ranks of a node usually find the same error. The first (``LOCAL_RANK`` 0 or unset) prints it and exits, and the
    launcher ends the others while they wait. A rank that is still there afterwards was alone with its error and prints
    it too. The exit skips the clean-up of process groups, which would wait for other ranks. Errors that imports found
    (:func:`postpone`) come first.
    """
    global _origins
    outer, _origins = _origins, _origins or {}
    try:
        raise_postponed()
        yield
    except UsageError as error:
        _end(f"{program}: error: {with_origin(error)}", error.status)
    except OSError as error:
        if is_unread(error):
            _end_by(signal.SIGPIPE)
        if error.errno not in MACHINE_ERRORS:
            raise
        where = f"{error.filename}: " if error.filename is not None else ""
        _end(f"{program}: error: {where}{error.strerror}", 1)
    except KeyboardInterrupt:
        sys.stdout.flush()
        if _first_of_node():
            print(f"{program}: interrupted", file=sys.stderr, flush=True)
        _end_by(signal.SIGINT)
    finally:
        _origins = outer


def under_torchrun() -> bool:
    """Return whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def tell_torchrun(text: str, follows: bool = False) -> None:
    """Make torchrun's report, if torchrun started this rank, name ``text`` as the failure of this rank.

    ``follows``: another rank's failure caused it. torchrun takes the earliest failure, in whole seconds, for the root
    cause.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    more = {"py_callstack": text, "timestamp": str(int(time.time()) + follows)}
    with contextlib.suppress(OSError), open(path, "w", encoding="utf-8") as file:
        json.dump({"message": {"message": text, "extraInfo": more}}, file)


def let_launcher_end(seconds: float) -> None:
    """Wait for the launcher, which ends this rank if another one failed before: then this rank reports nothing."""

    def ended(*_: object) -> None:
        if not under_torchrun() or a_rank_of_this_node_ended():
            os._exit(0)

    with contextlib.suppress(ValueError):  # not the main thread
        signal.signal(signal.SIGTERM, ended)
    time.sleep(seconds)


def a_rank_of_this_node_ended() -> bool:
    """Return whether torchrun, which started this rank, has lost another rank of this node."""
    import psutil  # type: ignore[import-untyped]

    with contextlib.suppress(psutil.Error):
        ranks = [rank for rank in psutil.Process(os.getppid()).children() if rank.status() != psutil.STATUS_ZOMBIE]
        return len(ranks) < int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return True  # torchrun itself has ended


def _first_of_node() -> bool:
    return os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")) == "0"


def _end_by(number: signal.Signals) -> None:
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _end(line: str, status: int) -> NoReturn:
    with contextlib.suppress(OSError):  # standard output may be on the disk that is full
        sys.stdout.flush()
    if not _first_of_node():
        let_launcher_end(_GRACE)
    tell_torchrun(line)
    print(line, file=sys.stderr, flush=True)
    os._exit(status)
