"""``python -m megatron_lossy.delivery_log``: shows the contents of a delivery log (docs/delivery_log.md)."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from ..base.errors import ArgumentParser, lab_module, refuse, usage_errors
from .events import event_files
from .reader import BadLog, DeliveryLogFolder, log_files
from .schema import check_pyarrow

PROGRAM = "megatron_lossy.delivery_log"


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog=f"python -m {PROGRAM}", description="Look at what --delivery-log recorded.", allow_abbrev=False
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=ArgumentParser)
    for name, text in (
        ("summary", "loss rates, per link and in all"),
        ("verify", "read everything and check it; status 1 if a record is wrong or missing"),
    ):
        command = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        command.add_argument("folder", metavar="DIR", help="the folder that --delivery-log wrote")
    return parser


def _open(folder: str) -> DeliveryLogFolder:
    try:
        return DeliveryLogFolder(Path(folder))
    except FileNotFoundError:
        events = event_files(Path(folder))
        what = "holds events and no deliveries" if events else "must be a folder that --delivery-log wrote"
        raise refuse("DIR", folder, what) from None


def _verify(folder: str) -> bool:
    """Print the problems of deliveries and events. Return whether there are none."""
    tool = lab_module("delivery_log.verify", "verify")
    events, deliveries, verdicts = event_files(Path(folder)), None, []
    if not events or log_files(Path(folder)):
        deliveries = _open(folder)
        verdicts.append(tool.verify(deliveries))
    if events:
        verdicts.append(tool.verify_events(Path(folder), deliveries))
    for verdict in verdicts:
        print(verdict.text(Path(folder)))
    return not any(verdict.problems for verdict in verdicts)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command."""
    with usage_errors(PROGRAM):
        namespace = _parser().parse_args(sys.argv[1:] if arguments is None else arguments)
        check_pyarrow("DIR", namespace.folder)
        if namespace.command == "verify":
            sys.exit(0 if _verify(namespace.folder) else 1)
        tool = lab_module("delivery_log.summary", "summary")
        try:
            print(tool.summary_text(_open(namespace.folder)))
        except BadLog as error:
            raise refuse("DIR", namespace.folder, f"{error}; python -m {PROGRAM} verify says what is usable") from None


if __name__ == "__main__":
    main()
