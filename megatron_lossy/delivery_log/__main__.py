"""``python -m megatron_lossy.delivery_log``: shows the contents of a delivery log (docs/delivery_log.md)."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from ..base.errors import ArgumentParser, check_package, refuse, usage_errors
from ..base.files import writing
from .events import event_files
from .reader import BadLog, DeliveryLogFolder, log_files
from .schema import check_pyarrow

PROGRAM = "megatron_lossy.delivery_log"
_SUFFIXES = (".png", ".pdf", ".svg")


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog=f"python -m {PROGRAM}", description="Look at what --delivery-log recorded.", allow_abbrev=False
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=ArgumentParser)
    for name, text in (
        ("summary", "loss rates, per link and in all, lengths of bursts, ages of parameters"),
        ("verify", "read everything and check it; status 1 if a record is wrong or missing"),
        ("plot", "a heat map of losses per link"),
    ):
        command = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        command.add_argument("folder", metavar="DIR", help="the folder that --delivery-log wrote")
        if name == "plot":
            picture = f"picture to write, {', '.join(_SUFFIXES)}"
            command.add_argument("--out", required=True, metavar="FILE", help=picture)
            command.add_argument("--stream", metavar="NAME", help="whose buckets; default the first stream")
    return parser


def _open(folder: str) -> DeliveryLogFolder:
    try:
        return DeliveryLogFolder(Path(folder))
    except FileNotFoundError:
        events = event_files(Path(folder))
        what = "holds events and no deliveries" if events else "must be a folder that --delivery-log wrote"
        raise refuse("DIR", folder, what) from None


def _verify(folder: str) -> bool:
    """Print the problems of deliveries and events. Returns whether there are none."""
    from .verify import verify, verify_events

    events, deliveries, verdicts = event_files(Path(folder)), None, []
    if not events or log_files(Path(folder)):
        deliveries = _open(folder)
        verdicts.append(verify(deliveries))
    if events:
        verdicts.append(verify_events(Path(folder), deliveries))
    for verdict in verdicts:
        print(verdict.text(Path(folder)))
    return not any(verdict.problems for verdict in verdicts)


def _plot(folder: DeliveryLogFolder, stream: str | None, out: Path) -> None:
    streams = sorted({name for name, _ in folder.writers})
    if stream is not None and stream not in streams:
        raise refuse("--stream", stream, f"must be one of {', '.join(streams)}")
    if out.suffix not in _SUFFIXES:
        raise refuse("--out", out, f"must end in {', '.join(_SUFFIXES)}")
    if not out.parent.is_dir():
        raise refuse("--out", out, f"{out.parent} must be a folder")
    check_package("matplotlib", "--out", out, "matplotlib")
    from .plot import plot_links

    with writing("--out", out):
        plot_links(folder, stream or streams[0], out)
    print(f"wrote {out}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command."""
    with usage_errors(PROGRAM):
        namespace = _parser().parse_args(sys.argv[1:] if arguments is None else arguments)
        check_pyarrow("DIR", namespace.folder)
        if namespace.command == "verify":
            sys.exit(0 if _verify(namespace.folder) else 1)
        folder = _open(namespace.folder)
        try:
            if namespace.command == "summary":
                from .summary import summary_text

                print(summary_text(folder))
            else:
                _plot(folder, namespace.stream, Path(namespace.out))
        except BadLog as error:
            raise refuse("DIR", namespace.folder, f"{error}; python -m {PROGRAM} verify says what is usable") from None


if __name__ == "__main__":
    main()
