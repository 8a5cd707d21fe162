"""``--udp-key-file``: a secret that all ranks share."""

from __future__ import annotations

import logging
import os
import stat
from functools import cache
from pathlib import Path

from ..errors import cannot, refuse

logger = logging.getLogger(__name__)

#: Bytes of the least secret: as many as AES-128 has.
LEAST_BYTES = 16


def read_key_file(path: str | None) -> bytes | None:
    """The secret. Raises :class:`UsageError` if it cannot be read, or is too short to be one."""
    if path is None:
        return None
    try:
        key, mode = Path(path).read_bytes(), stat.S_IMODE(Path(path).stat().st_mode)
    except OSError as error:
        raise cannot("--udp-key-file", path, "read", error) from None
    if len(key) < LEAST_BYTES:
        allowed = f"has {len(key)} bytes, and a secret needs {LEAST_BYTES} at least: head -c 32 /dev/urandom > {path}"
        raise refuse("--udp-key-file", path, allowed)
    if mode & 0o077 and os.environ.get("LOCAL_RANK", "0") == "0":  # one rank of a host says so
        _say_open(path, mode)
    return key


@cache
def _say_open(path: str, mode: int) -> None:
    # No error: secrets that a container mounts often have such a mode, and cannot be given another.
    logger.warning(
        "--udp-key-file %s: other users of this host may read it (mode %03o); chmod 600 %s", path, mode, path
    )
