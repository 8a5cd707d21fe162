"""``python -m megatron_lossy lighthouse``: serve torchft's lighthouse, where islands find each other (docs/elastic.md)."""

from __future__ import annotations

import signal
import threading

from ....base.errors import ArgumentParser, UsageError, refuse
from .lighthouse import JOIN, PORT, TIMEOUT, torchft


def main(arguments: list[str] | None = None) -> None:
    """Serve until SIGINT or SIGTERM. Raises :class:`UsageError`."""
    parser = ArgumentParser(
        prog="python -m megatron_lossy lighthouse",
        description="Serve a lighthouse of torchft, where islands find each other. It has no encryption: whoever reaches it can "
        "tell islands anything. It keeps nothing; islands go on without it.",
    )
    parser.add_argument("--bind", default=f"[::]:{PORT}", metavar="ADDR:PORT", help="default %(default)s")
    parser.add_argument(
        "--timeout",
        type=float,
        default=TIMEOUT,
        metavar="S",
        help="a silent island is dead after S seconds; default %(default)s",
    )
    parser.add_argument(
        "--join",
        type=float,
        default=JOIN,
        metavar="S",
        help="islands that are alive and have not asked are waited for so many seconds; default %(default)s",
    )
    options = parser.parse_args(arguments)
    for name in ("timeout", "join"):
        if not 0 < getattr(options, name) < 3600:
            raise refuse(f"--{name}", getattr(options, name), "must be seconds above 0 and below 3600")
    library = torchft()
    try:
        server = library.LighthouseServer(options.bind, 1, int(1000 * options.join), 100, int(1000 * options.timeout))
    except Exception as error:  # of Rust
        raise UsageError(f"--bind {options.bind}: {error}") from None
    end = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: end.set())
    print(f"lighthouse: {server.address()}", flush=True)
    while not end.wait(0.2):
        pass
    server.shutdown()
