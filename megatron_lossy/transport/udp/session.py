"""The messages of a channel's ranks through the store, over datagrams and streams, and the values that they must agree on."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ...base.errors import UsageError, host_port

#: The version of the datagrams and of the entries in the store.
PROTOCOL = 12
PHASES = ("grad", "param")
#: The number of each code of values in a datagram.
CODES = {"raw": 0, "int8": 1, "int4": 2}
HEADER_BYTES, TAG_BYTES = 28, 16
NO_CIPHER = "needs libcrypto.so.3 or libcrypto.so.1.1: install OpenSSL, or give --udp-key-file none"
#: For each phase and each bucket: bytes of a shard, and of a unit.
Buckets = Mapping[str, Sequence[tuple[int, int]]]


@dataclass(frozen=True)
class Opening:
    """The opening of a channel of ranks, over datagrams or streams.

    ``name``: of the channel, for messages. ``rank``: of this process, of ``size``. ``store``: that all ranks read and write; ``get`` waits
    for a key. ``prefix``: of the keys; no other channel has it, nor had it in this store. ``buckets``: for each of ``phases`` and each
    bucket: bytes of a shard, and of a unit. ``peers``: the ranks that are reached here, all if ``None``; if i names j, j must name i.
    ``alike``: other text that must be the same on all ranks. ``reported``: phases, or phases and buckets, whose senders get reports of lost units, and
    may name units that must arrive. ``phases``: the two kinds of exchanges. ``called``: the names of the ranks in messages, by their number.
    ``codes``: by phase, the code of its values: one of :data:`CODES`; raw if it is not there. ``bears``: a rank that is lost is done without, and nothing
    of it arrives; else the channel fails.

    Streams report no units, and always bear a loss.
    """

    name: str
    rank: int
    size: int
    store: Any  # torch's, of which ``set`` and ``get`` are called
    prefix: str
    buckets: Buckets
    peers: Collection[int] | None = None
    alike: str = ""
    reported: Collection[str | tuple[str, int]] = ()
    phases: Sequence[str] = PHASES
    called: Sequence[int] | None = None
    codes: Mapping[str, str] | None = None
    bears: bool = False

    @property
    def others(self) -> list[int]:
        return sorted(set(range(self.size) if self.peers is None else self.peers) - {self.rank})

    def number(self, rank: int) -> int:
        """Return the number of ``rank`` in messages."""
        return rank if self.called is None else self.called[rank]

    def named(self, rank: int) -> str:
        return f"rank {self.number(rank)} of {self.name}"

    def code(self, phase: str) -> str:
        return (self.codes or {}).get(phase, "raw")

    def cut(self, phase: str) -> Sequence[tuple[int, int]]:
        """Return bytes of a shard and of a unit, for each bucket of ``phase``."""
        return self.buckets.get(phase, ())

    def share(self, key: str, value: bytes) -> list[bytes]:
        """Return the values of all ranks under ``key``."""
        self.store.set(f"{self.prefix}/{key}/{self.rank}", value)
        return [bytes(self.store.get(f"{self.prefix}/{key}/{other}")) for other in range(self.size)]


@dataclass(frozen=True)
class Hello:
    """The description that one rank gives of itself."""

    address: str
    port: int
    random: str  # a random number for this channel, hexadecimal
    proof: str  # proves that it has the same --udp-key-file
    buckets: str  # their digest
    size: int
    protocol: int
    cipher: str
    codes: str  # of the values of each phase
    # Of datagrams alone:
    packet_bytes: int = 0
    instance: str = ""  # names the process, hexadecimal
    eager: int = 0  # bytes that it keeps from each sender before it has posted
    window: int = 0  # DATA from one sender that its buffer holds with ease
    limit: int = 0  # DATA from one sender that its buffer holds at most

    @property
    def where(self) -> str:
        return host_port(self.address, self.port)

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()


def meet(transport: str, end: Any, opening: Opening, protocol: int, **more: Any) -> list[Hello]:
    """Return the hellos of all ranks, exchanged through the store. Raise :class:`UsageError` unless they can exchange.

    ``end``: of this process, with its address, port and settings. ``more``: other fields of this rank's hello.
    """
    key, random, name = end.settings.key, os.urandom(16).hex(), opening.name
    cut = [[[int(shard), int(unit)] for shard, unit in opening.cut(phase)] for phase in opening.phases]
    shared = json.dumps([cut, opening.alike + repr(sorted(opening.reported))])
    mine = Hello(
        address=end.address,
        port=end.port,
        random=random,
        proof=prove(key, random),
        buckets=hashlib.blake2b(shared.encode(), digest_size=16).hexdigest(),
        size=opening.size,
        protocol=protocol,
        cipher=end.settings.cipher,
        codes=" ".join(f"{phase}: {opening.code(phase)}" for phase in opening.phases),
        **more,
    )
    hellos = []
    for other, text in enumerate(opening.share("hello", mine.encode())):
        try:
            # The own one is not the stored copy: a writer to the store could bring back an old random.
            hellos.append(mine if other == opening.rank else Hello(**json.loads(text)))
        except (ValueError, TypeError):
            another = f"rank {other} of {name} runs another version of megatron-lossy"
            raise UsageError(f"--transport {transport}: {another}") from None
    check_agreement(name, hellos, key, transport)
    return hellos


def overhead(cipher: str) -> int:
    """Return the bytes of a datagram besides its unit."""
    return HEADER_BYTES + (0 if cipher == "none" else TAG_BYTES)


def channel_id(drawn: bytes, name: str) -> int:
    """Return the number of a channel in datagrams; ``drawn``: the random number of its first rank."""
    return int.from_bytes(hashlib.blake2b(drawn + name.encode(), digest_size=4).digest(), "little")


def prove(file_key: bytes | None, random: str) -> str:
    """Return the proof that this rank has the key file, for ranks that have it too.

    A replay of the proof gains nothing: :meth:`Secrets.proof` is new for each channel.
    """
    return _mac(file_key or b"", b"megatron-lossy proof", bytes.fromhex(random)).hex()


class Secrets:
    """The keys of a channel, from the hellos of all ranks and from the key file.

    The order is that of Noise's NNpsk0, without its Diffie-Hellman: the key file, the transcript, then the randoms of
    both ends. ``hellos[rank]`` must be the hello that this rank made itself, not the copy in the store. Its own fresh
    random ensures that no key, and so no pair of key and nonce, is used twice, whatever the store replays. The hellos
    of others are in the transcript: a changed address, port or window changes every key, and :meth:`check` reports it.
    """

    def __init__(self, name: str, channel: int, hellos: Sequence[Hello], file_key: bytes | None) -> None:
        self.channel = channel
        self._name = name
        self._hellos = list(hellos)
        said = b"".join(hashlib.sha256(hello.encode()).digest() for hello in hellos)
        prologue = f"{PROTOCOL} {channel} {name}".encode()
        self._chain = _mac(_mac(b"megatron-lossy udp 2", file_key or b""), hashlib.sha256(prologue).digest() + said)

    def key(self, source: int, destination: int) -> bytes:
        """Return the key of datagrams from ``source`` to ``destination``: HKDF-SHA256, 16 bytes for AES-128."""
        randoms = b"".join(bytes.fromhex(self._hellos[rank].random) for rank in (source, destination))
        info = b"".join(number.to_bytes(4, "little") for number in (self.channel, source, destination))
        return _mac(_mac(self._chain, randoms), info + b"\x01")[:16]

    def derive(self, *texts: bytes) -> bytes:
        """Return 32 bytes that belong to ``texts``, and that only ranks with the same secret can make."""
        return _mac(self._chain, *(len(text).to_bytes(4, "little") + text for text in texts))

    def proof(self, rank: int) -> bytes:
        """Return the proof that ``rank`` has received the same of all ranks, and has the key file."""
        return _mac(self._chain, b"heard", rank.to_bytes(4, "little"))

    def check(self, proofs: Sequence[bytes]) -> None:
        """Raise :class:`UsageError` unless the ``proofs`` of all ranks show that they have received the same."""
        for rank, proof in enumerate(proofs):
            if not hmac.compare_digest(proof, self.proof(rank)):
                raise UsageError(
                    f"--transport udp: rank {rank} of {self._name} ({self._hellos[rank].where}) has received other addresses, "
                    "keys or windows than this rank: somebody else writes to the store of --master-addr"
                )


def _mac(key: bytes, *texts: bytes) -> bytes:
    return hmac.new(key, b"".join(texts), hashlib.sha256).digest()


#: Field, its name in messages, and the flag that sets it; ``None``: --transport.
_EQUAL = (
    ("protocol", "protocol version", None),
    ("size", "number of ranks", None),
    ("cipher", "cipher", "--udp-key-file"),
    ("packet_bytes", "bytes of a unit", "--packet-bytes"),
    ("codes", "form of values", "--grad-wire, --param-wire, --sync-dtype"),
    ("buckets", "digest of buckets, dtypes and ranks", None),
)


def check_agreement(name: str, hellos: Sequence[Hello], file_key: bytes | None, transport: str = "udp") -> None:
    """Raise :class:`UsageError`, the same on every rank, unless all ranks can exchange."""
    first = hellos[0]
    for rank, hello in enumerate(hellos):
        for field, what, flag in _EQUAL:
            mine, theirs = getattr(first, field), getattr(hello, field)
            if mine != theirs:
                flag = flag or f"--transport {transport}"
                raise UsageError(f"{flag}: {what} of {name} is {mine} on rank 0 and {theirs} on rank {rank}")
        if (":" in hello.address) != (":" in first.address):
            raise UsageError(
                f"--udp-interface: rank 0 of {name} has the address {first.address} and rank {rank} {hello.address}: "
                "all must be IPv4 or all IPv6"
            )
        if not hmac.compare_digest(hello.proof, prove(file_key, hello.random)):
            other = "another key than this rank" if file_key else "a key, and this rank has none"
            raise UsageError(f"--udp-key-file: rank {rank} of {name} ({hello.where}) has {other}")
    places: dict[tuple[str, int], int] = {}
    for rank, hello in enumerate(hellos):
        other = places.setdefault((hello.address, hello.port), rank)
        if other != rank:
            raise UsageError(f"--udp-interface: ranks {other} and {rank} of {name} have the same address {hello.where}")


def check_reached(name: str, hellos: Sequence[Hello], heard: Sequence[Sequence[bool]], datagram: int) -> None:
    """Raise :class:`UsageError`, the same on every rank, if some rank got nothing from another rank."""
    for rank, row in enumerate(heard):
        for source, came in enumerate(row):
            if not came:
                raise UsageError(
                    f"--transport udp: rank {rank} of {name} ({hellos[rank].where}) does not get UDP datagrams of "
                    f"{datagram:,} bytes from rank {source} ({hellos[source].where}): a firewall, or an MTU below "
                    f"{datagram + (48 if ':' in hellos[rank].address else 28):,}; --udp-interface names another path"
                )
