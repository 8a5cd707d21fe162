"""``--udp-key-file``: a secret that all ranks share."""

from __future__ import annotations

import logging
import os
import stat
from functools import cache
from pathlib import Path

from ..base.errors import cannot, refuse

logger = logging.getLogger(__name__)

#: The least number of bytes of a secret: as many as an AES-128 key has.
LEAST_BYTES = 16


def read_key_file(path: str | None) -> bytes | None:
    """The secret in ``path``; ``None`` for ``None`` and "none". Raises :class:`UsageError` if the file cannot be read or is too short."""
    if path in (None, "none"):
        return None
    try:
        key, mode = Path(path).read_bytes(), stat.S_IMODE(Path(path).stat().st_mode)
    except OSError as error:
        raise cannot("--udp-key-file", path, "read", error) from None
    if len(key) < LEAST_BYTES:
        new = "(set -C; umask 077; head -c 32 /dev/urandom > new.key)"  # -C: no file that is there is overwritten
        allowed = f"has {len(key)} bytes, and a secret needs {LEAST_BYTES} at least; give another file: {new}"
        raise refuse("--udp-key-file", path, allowed)
    if mode & 0o077 and os.environ.get("LOCAL_RANK", "0") == "0":  # one rank of a host says so
        _say_open(path, mode)
    return key


@cache
def _say_open(path: str, mode: int) -> None:
    # This is no error: secrets that a container mounts often have such a mode, and it cannot be changed.
    logger.warning(
        "--udp-key-file %s: other users of this host may read it (mode %03o); chmod 600 %s", path, mode, path
    )
