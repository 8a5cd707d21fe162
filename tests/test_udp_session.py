"""The keys of a channel, and the store over which ranks meet: who can write there learns nothing and changes nothing unseen."""

import dataclasses
import hashlib
import hmac
import json
import logging
import subprocess

import pytest
from torch.distributed import HashStore

from megatron_lossy.base.errors import UsageError
from megatron_lossy.config import LossyConfig
from megatron_lossy.transport.network import _say_open, read_key_file
from megatron_lossy.transport.settings import settings_of
from megatron_lossy.transport.udp import Engine, Settings, session
from tests.test_udp_engine import BUCKETS, in_threads

pytestmark = pytest.mark.shows("keys of a channel; a store that others write to", device=False)

HELLOS = [
    session.Hello(
        address="127.0.0.1", port=1000 + rank, instance=f"{rank:016x}", random=f"{rank + 1:032x}", proof="", buckets="b",
        size=3, protocol=session.PROTOCOL, packet_bytes=1408, cipher="aes-128-gcm", eager=1, window=2, limit=3,
        codes="grad: raw param: raw",
    )
    for rank in range(3)
]  # fmt: skip
SECRET = b"0123456789abcdef"


def test_keys_are_those_of_the_description():
    """The key file, the transcript, the randoms of both ends: written down once more with hashlib alone."""

    def mac(key, text):
        return hmac.new(key, text, hashlib.sha256).digest()

    said = b"".join(hashlib.sha256(json.dumps(dataclasses.asdict(hello)).encode()).digest() for hello in HELLOS)
    prologue = hashlib.sha256(f"{session.PROTOCOL} 77 dense".encode()).digest()
    chain = mac(mac(b"megatron-lossy udp 2", SECRET), prologue + said)
    extracted = mac(chain, bytes.fromhex(HELLOS[2].random + HELLOS[0].random))
    info = b"".join(number.to_bytes(4, "little") for number in (77, 2, 0))
    assert session.Secrets("dense", 77, HELLOS, SECRET).key(2, 0) == mac(extracted, info + b"\x01")[:16]


@pytest.mark.parametrize(
    ("one_has", "line"),
    [
        ({"address": "::1"}, "--udp-interface: .*all must be IPv4 or all IPv6"),
        ({"cipher": "none"}, "--udp-key-file: cipher of dense is aes-128-gcm on rank 0 and none on rank 1$"),
    ],
)
def test_ranks_have_the_same_family_and_cipher(one_has, line):
    hellos = [dataclasses.replace(one, proof=session.prove(None, one.random)) for one in HELLOS]
    session.check_agreement("dense", hellos, None)
    hellos[1] = dataclasses.replace(hellos[1], **one_has)
    with pytest.raises(UsageError, match="^" + line):
        session.check_agreement("dense", hellos, None)


def test_everything_that_was_said_changes_every_key():
    """The key file too, and the direction."""

    def keys(name="dense", channel=77, hellos=HELLOS, secret=SECRET):
        secrets = session.Secrets(name, channel, hellos, secret)
        return {secrets.key(source, destination) for source in range(3) for destination in range(3)}

    known = keys()
    assert len(known) == 9
    others = [keys(name="expert"), keys(channel=78), keys(secret=None), keys(secret=SECRET + b"0")]
    for field in dataclasses.fields(session.Hello):
        old = getattr(HELLOS[1], field.name)
        new = old + 1 if isinstance(old, int) else "f" * len(old or "f")
        others.append(keys(hellos=[HELLOS[0], dataclasses.replace(HELLOS[1], **{field.name: new}), HELLOS[2]]))
    for other in others:
        assert not known & other


class Replaying(HashStore):
    """An attacker writes to the store: some keys keep what they had in an earlier session."""

    def __init__(self, earlier, keeps):
        super().__init__()
        self.earlier, self.keeps = earlier, keeps

    def get(self, key):
        return self.earlier.get(key) if self.keeps(key) else super().get(key)


@pytest.fixture
def keys(monkeypatch):
    """Every key that was made."""
    made, original = [], session.Secrets.key
    monkeypatch.setattr(session.Secrets, "key", lambda *args: made.append(original(*args)) or made[-1])
    return made


def opened(store, stores=None):
    """Two ranks open a channel with the same secret; what was raised."""

    def run(rank):
        with Engine(Settings(key=SECRET), "127.0.0.1") as engine:
            engine.open("dense", rank, 2, (stores or [store] * 2)[rank], "p", BUCKETS)

    return in_threads(2, run)


@pytest.mark.parametrize("replayed", ["/hello/0", "/hello/1", "/hello/"])
def test_a_store_that_replays_an_old_session_brings_back_no_key(keys, replayed):
    """A rank's own greeting does not matter; with the random number of either end alone every key is a new one."""
    first = HashStore()
    assert opened(first) == [None, None]
    assert len(set(keys)) == 2 and len(keys) == 4  # each direction, at both ends
    earlier = set(keys)
    keys.clear()
    errors = opened(Replaying(first, lambda key: replayed in key))
    assert keys and not earlier & set(keys)
    assert all(isinstance(error, UsageError) for error in errors)
    assert all("somebody else writes to the store" in str(error) and "\n" not in str(error) for error in errors)


@pytest.mark.parametrize(
    "change", [{"window": 1}, {"limit": 10**6}, {"eager": 0}, {"port": 9}, {"address": "127.0.0.2"}], ids=str
)
def test_who_changes_what_a_rank_has_said_is_noticed(change):
    """Before any exchange: what reached rank 1 is not what rank 0 has said."""
    store = HashStore()

    class Changed:
        set = staticmethod(store.set)

        @staticmethod
        def get(key):
            value = store.get(key)
            return json.dumps(json.loads(value) | change).encode() if key.endswith("/hello/0") else value

    errors = opened(store, [store, Changed])
    assert all(isinstance(error, UsageError) and "has received other addresses" in str(error) for error in errors)


@pytest.mark.parametrize("size", [0, 5, 15])
def test_a_file_that_is_too_short_for_a_secret_is_refused(tmp_path, size):
    path = tmp_path / "key"
    path.write_bytes(bytes(size))
    config = LossyConfig(transport="udp", udp_key_file=str(path))
    with pytest.raises(UsageError, match=f"--udp-key-file {path}: has {size} bytes, .*16 at least; ") as error:
        settings_of(config)
    remedy = str(error.value).partition("give another file: ")[2]
    for name in ("key", "new.key"):  # of which the second is made
        subprocess.run(["bash", "-c", remedy.replace("new.key", name)], cwd=tmp_path, stderr=subprocess.DEVNULL)
    assert path.read_bytes() == bytes(size) and len((tmp_path / "new.key").read_bytes()) == 32


def test_a_file_that_others_can_read_is_said_once(tmp_path, caplog):
    path = tmp_path / "key"
    path.write_bytes(SECRET)
    path.chmod(0o640)
    _say_open.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert read_key_file(str(path)) == read_key_file(str(path)) == SECRET
    assert [record.getMessage() for record in caplog.records] == [
        f"--udp-key-file {path}: other users of this host may read it (mode 640); chmod 600 {path}"
    ]
    caplog.clear()
    path.chmod(0o600)
    with caplog.at_level(logging.WARNING):
        assert read_key_file(str(path)) == SECRET and read_key_file(None) is None
    assert not caplog.records
    with pytest.raises(UsageError, match=f"--udp-key-file {tmp_path / 'none'}: cannot be read"):
        read_key_file(str(tmp_path / "none"))
