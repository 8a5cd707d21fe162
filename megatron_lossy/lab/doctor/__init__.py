"""``python -m megatron_lossy doctor``: is this machine ready to train with loss, and if not, what is missing?

It looks at versions, at the fit of the hooks to the installed Megatron, and at devices, and tries a lossy step on two
processes. With ``--transport udp`` or ``stream`` it tries the links between all ranks of a launcher instead, and with ``--link``
it measures one for ``plan``. Exit status 0 if ready, 1 if not, 2 for a wrong command line; ``--json`` for machines.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from ... import __version__
from ...base.errors import ArgumentParser, cannot, refuse
from ...base.files import check_folder, write_text, writing
from ...base.flags import add_flags, from_namespace
from ...config import LossyConfig
from .found import Finding

PROGRAM = "megatron_lossy doctor"
_MARKS = {"ok": "ok", "absent": "-", "warning": "warning", "problem": "PROBLEM"}


def examine(config: argparse.Namespace) -> list[Finding]:
    """Return all findings that ``config`` asks for. It imports Megatron, so a process can examine only one."""
    from .found import devices, hook_targets, versions
    from .step import try_step

    if config.megatron_lm is not None:
        sys.path.insert(0, str(Path(config.megatron_lm).resolve()))
    kind, count, found = devices()
    findings = versions(config.megatron_lm) + found
    if ready(findings):
        findings += hook_targets(config.megatron_lm is not None)
    if not ready(findings):
        findings.append(Finding("step", "two processes", "warning", "not tried, because of the problems above"))
    elif config.step != "none":
        findings.append(try_step(kind if config.step == "auto" and count >= 2 else "cpu", config.megatron_lm))
    return findings


def report(findings: Sequence[Finding]) -> str:
    """Return the findings as text."""
    lines, section = [f"megatron-lossy {__version__}"], None
    for finding in findings:
        if finding.section != section:
            section = finding.section
            lines.append(f"{section}:")
        lines.append(f"  {_MARKS[finding.status]:8} {finding.name:25} {finding.text}".rstrip())
    return "\n".join([*lines, f"ready: {'yes' if ready(findings) else 'no'}"])


def ready(findings: Sequence[Finding]) -> bool:
    """Return whether nothing prevents training."""
    return all(finding.status != "problem" for finding in findings)


def main(arguments: Sequence[str]) -> int:
    """Print the findings; returns the exit status."""
    question = "Is this machine ready to train with loss?"
    parser = ArgumentParser(f"python -m {PROGRAM}", description=question, allow_abbrev=False)
    checkout = "checkout of Megatron-LM, whose Megatron is looked at instead of an installed wheel"
    parser.add_argument("--megatron-lm", metavar="PATH", help=checkout)
    step = "two-process step: on the accelerators if there are two, else on the CPU (auto, the default); on the CPU; or none"
    parser.add_argument("--step", default="auto", choices=("auto", "cpu", "none"), help=step)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    calibrate = "instead, run rows of the matrix on CUDA devices, and compare with a pretended one (docs/impostor.md)"
    parser.add_argument("--calibrate", action="store_true", help=calibrate)
    add = parser.add_argument_group("a link between sites, measured for plan, and nothing else").add_argument
    link = "measure the link to a host that runs --serve; of two ranks of a launcher rank 0 serves at this address"
    add("--link", metavar="HOST:PORT", help=link)
    serve = "let another host measure the link to this one, over IPv4; TCP and UDP"
    add("--serve", type=int, metavar="PORT", help=serve)
    add("--full", action="store_true", help="fill the link for 8 s each way, not for 0.4 s")
    key = "secret that both ends share; without it anybody who can reach --serve may measure"
    add("--key-file", metavar="FILE", help=key)
    add("--out", default="link.json", metavar="FILE", help="of --link; default link.json")
    title = "network: with --transport udp or stream the links between all ranks are tried, and nothing else"
    others = ("transport", "packet_bytes", "lossy_links")
    add_flags(parser, LossyConfig, title, only=lambda name: name in others or name.startswith("udp_"))
    config = parser.parse_args(arguments)
    if config.megatron_lm is not None and not Path(config.megatron_lm, "megatron", "core").is_dir():
        why = "must be a checkout of Megatron-LM; there is no megatron/core"
        raise refuse("--megatron-lm", config.megatron_lm, why)
    if config.link is not None or config.serve is not None:
        _examine_link(config)
        return 0
    if (network := from_namespace(LossyConfig, config)).observed:
        from .network import examine_network

        if not (findings := examine_network(network)):
            return 0  # rank 0 says it
    elif config.calibrate:
        from ..calibration.real import calibrate

        findings = calibrate()
    else:
        findings = examine(config)
    if config.json:
        content = {"ready": ready(findings), "megatron-lossy": __version__}
        print(json.dumps({**content, "findings": [asdict(found) for found in findings]}, indent=1))
    else:
        print(report(findings))
    return 0 if ready(findings) else 1


def _examine_link(config: argparse.Namespace) -> None:
    """Measure a link, or serve a measurement."""
    from .link import measure, serve

    key = b""
    if config.key_file is not None:
        try:
            key = Path(config.key_file).read_bytes()
        except OSError as error:
            raise cannot("--key-file", config.key_file, "read", error) from None
    host, _, port = (config.link or f":{config.serve}").rpartition(":")
    if not port.isdecimal() or not 0 < int(port) < 65536:
        flag, value = ("--serve", config.serve) if config.link is None else ("--link", config.link)
        raise refuse(flag, value, "needs a port in [1, 65535]" + (", as in HOST:29500" if config.link else ""))
    rank = os.environ.get("RANK")
    if config.serve is not None or rank == "0":
        if config.serve is not None and config.link is not None:
            raise refuse("--serve", config.serve, "is for the other end of --link; omit one")
        serve(int(port), key, lambda line: print(line, flush=True))
        return
    if rank not in (None, "1"):
        raise refuse("--link", config.link, f"is for two ranks of a launcher, and this is rank {rank}")
    check_folder("--out", Path(config.out).parent)
    found = measure(host, int(port), key, config.full, patience=0 if rank is None else 60)
    with writing("--out", config.out):
        write_text(config.out, json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))
    print(f"wrote {config.out}, for python -m megatron_lossy plan --link {config.out}")
