"""The settings of streams, the messages of a channel's ranks through the store, and the keys that come of them. No input or output."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from ...base.errors import UsageError
from ..udp.session import Buckets, Store, digest_buckets, prove

#: The version of frames, handshakes and entries in the store.
PROTOCOL = 1


@dataclass(frozen=True)
class Settings:
    """The settings of a process. ``deadline``: seconds; ``None``: there is none. ``timeout``: seconds; a silent rank is waited for a tenth
    of it."""

    interface: str | None = None
    port: int = 0
    flows: int = 1
    congestion: str | None = None
    deadline: float | str | None = "auto"
    arrive: float = 0.99
    memory: int = 2**28
    cipher: str = "aes-128-gcm"
    key: bytes | None = None
    timeout: float = 30.0


@dataclass(frozen=True)
class Hello:
    """The description that one rank gives of itself."""

    address: str
    port: int
    random: str  # hexadecimal, new for each channel
    proof: str  # that it has the same key file
    size: int
    cipher: str
    codes: str
    buckets: str  # digest of buckets, dtypes and ranks
    protocol: int = PROTOCOL

    @property
    def where(self) -> str:
        """Address and port, for messages."""
        return f"[{self.address}]:{self.port}" if ":" in self.address else f"{self.address}:{self.port}"

    def encode(self) -> bytes:
        """The entry of the store."""
        return json.dumps(asdict(self)).encode()


#: Field, its name in messages, and the flag that sets it.
_EQUAL = (
    ("protocol", "protocol version", "--transport stream"),
    ("size", "number of ranks", "--transport stream"),
    ("cipher", "cipher", "--udp-key-file"),
    ("codes", "form of values", "--grad-wire, --param-wire, --sync-dtype"),
    ("buckets", "digest of buckets, dtypes and ranks", "--transport stream"),
)


def meet(
    name: str,
    rank: int,
    where: tuple[str, int],
    size: int,
    store: Store,
    prefix: str,
    buckets: Buckets,
    phases: Sequence[str],
    alike: str,
    codes: Mapping[str, str],
    settings: Settings,
) -> list[Hello]:
    """The hellos of all ranks, exchanged through ``store``. Raises :class:`UsageError` unless they can exchange."""
    key, random = settings.key, os.urandom(16).hex()
    forms = " ".join(f"{phase}: {codes.get(phase, 'raw')}" for phase in phases)
    digest = digest_buckets(buckets, alike, phases)
    mine = Hello(*where, random, prove(key, random), size, settings.cipher, forms, digest)
    hellos = []
    for other, text in enumerate(share(store, f"{prefix}/hello", rank, size, mine.encode())):
        try:
            # The own one is not the stored copy: a writer to the store could bring back an old random.
            hellos.append(mine if other == rank else Hello(**json.loads(text)))
        except (ValueError, TypeError):
            another = f"rank {other} of {name} runs another version of megatron-lossy"
            raise UsageError(f"--transport stream: {another}") from None
    for other, hello in enumerate(hellos):
        for field, called, flag in _EQUAL:
            first, theirs = getattr(hellos[0], field), getattr(hello, field)
            if first != theirs:
                raise UsageError(f"{flag}: {called} of {name} is {first} on rank 0 and {theirs} on rank {other}")
        if not hmac.compare_digest(hello.proof, prove(key, hello.random)):
            found = "another key than this rank" if key else "a key, and this rank has none"
            raise UsageError(f"--udp-key-file: rank {other} of {name} ({hello.where}) has {found}")
    return hellos


def share(store: Store, key: str, rank: int, size: int, value: bytes) -> list[bytes]:
    """The values of all ranks under ``key``."""
    store.set(f"{key}/{rank}", value)
    return [bytes(store.get(f"{key}/{other}")) for other in range(size)]


class Secret:
    """The secret of a channel: of the key file and the hellos of all ranks. Its handshakes prove it, and make keys of it.

    The hello of this rank is fresh, and so are the random numbers of a connection: no key serves twice.
    """

    def __init__(self, name: str, hellos: Sequence[Hello], key: bytes | None) -> None:
        said = b"".join(hashlib.sha256(hello.encode()).digest() for hello in hellos)
        self._base = _mac(key or b"", b"megatron-lossy stream", str(PROTOCOL).encode(), name.encode(), said)
        #: Names the channel in handshakes.
        self.channel = self.proof(b"channel")[:16]

    def proof(self, *texts: bytes) -> bytes:
        """32 bytes that prove the secret, and belong to ``texts``."""
        return _mac(self._base, b"proof", *texts)

    def key(self, *texts: bytes) -> bytes:
        """A key of 16 bytes for ``texts``."""
        return _mac(self._base, b"key", *texts)[:16]


def _mac(key: bytes, *texts: bytes) -> bytes:
    return hmac.digest(key, b"".join(len(text).to_bytes(4, "little") + text for text in texts), "sha256")
