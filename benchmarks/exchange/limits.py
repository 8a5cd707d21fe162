"""Limits of one core of this machine: copy, encrypt, and send datagrams through the kernel."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from benchmarks.lab import MissingRequirement
from megatron_lossy.base.native import ENGINE, compiler


def limits(packet_bytes: int) -> dict[str, float]:
    """Return CPU seconds per GB of payload, in packets of so many bytes, both ends together."""
    source, cc = Path(__file__).with_name("limits.c"), compiler()
    if cc is None:
        raise MissingRequirement("limits of the machine need a C compiler, cc (Debian: apt install gcc libc6-dev)")
    with tempfile.TemporaryDirectory(prefix="megatron-lossy-limits-") as folder:
        program = f"{folder}/limits"
        command = [cc, "-std=gnu11", "-O2", "-I", str(ENGINE.source.parent), "-o", program, str(source), "-ldl", "-lm"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if not done.returncode:
            done = subprocess.run([program, str(packet_bytes)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise MissingRequirement(f"{source.name} ends with {done.returncode}: {' '.join(done.stderr.split())[:200]}")
    lines = (line.split("\t") for line in done.stdout.splitlines())
    return {what: float(seconds) for what, seconds in lines}


def best(first: Mapping[str, float], second: Mapping[str, float]) -> dict[str, float]:
    """Return the less disturbed of two measurements."""
    return {what: min(seconds, second.get(what, seconds)) for what, seconds in first.items()}


def limits_table(packet_bytes: int, seconds: Mapping[str, float]) -> list[str]:
    """Return the lines of a report."""
    what_of = f"Packets of {packet_bytes:,} bytes of payload, both ends; UDP over the loopback, without a cipher"
    return [
        "## Limits of one core, in the same run",
        "",
        f"{what_of}. The least of many repetitions, before and after the exchanges.",
        "",
        "| what | CPU seconds per GB | GB/s |",
        "| --- | --- | --- |",
        *(f"| {what} | {value:.2f} | {1 / value:.1f} |" for what, value in seconds.items()),
        "",
    ]
