"""The store where islands agree: our coordinator and etcd keep one contract, and strangers change nothing."""

import asyncio
import contextlib
import http.client
import json
import os
import random
import signal
import socket
import ssl
import threading
import time

import psutil
import pytest

from megatron_lossy.base.errors import UsageError
from megatron_lossy.mechanisms.islands.membership import coordinator
from megatron_lossy.mechanisms.islands.membership.coordinator import Dictionary, Server, Watcher, open_journal
from megatron_lossy.mechanisms.islands.membership.messages import Beat, Entry, Slot, write
from megatron_lossy.mechanisms.islands.membership.store import NAME, Store, Unreachable, open_store, tls_of
from tests.coordinator import KEY, Coordinator, Etcd

pytest.importorskip("cryptography")
pytestmark = pytest.mark.shows("coordinator and etcd are one store; strangers change nothing", device=False)


@pytest.fixture(scope="module")
def coordinator_server(tmp_path_factory):
    server = Coordinator(tmp_path_factory.mktemp("coordinator"))
    yield server
    server.end(signal.SIGTERM)


@pytest.fixture(scope="module")
def etcd_server(tmp_path_factory):
    server = Etcd(tmp_path_factory.mktemp("etcd"))
    yield server
    server.end()


@pytest.fixture(params=[pytest.param(name, marks=pytest.mark.programs) for name in ("coordinator", "etcd")])
def server(request):
    return request.getfixturevalue(f"{request.param}_server")


@pytest.fixture
def connect(server, request):
    """Make a client of a run that no other test has."""
    run = f"{request.node.originalname[:30]}-{random.getrandbits(32):x}"
    return lambda name=run: open_store(server.url(name), KEY)


def test_values_are_text_and_runs_apart(connect):
    store = connect()
    assert store.get("a") is None and store.list("") == {}
    store.put("a", "é\x00\n" * 100)
    store.put("b/1", "")
    store.put("b/2", "2")
    store.put("a", "new")
    assert store.get("a") == "new" and store.get("b/1") == "" and store.get("b/") is None
    assert store.list("b/") == {"b/1": "", "b/2": "2"} and len(store.list("")) == 3
    store.put("a", "\udcff é\x00\n")  # bytes of somebody else that are no text
    assert store.get("a") == "\udcff é\x00\n"
    assert connect("another").list("") == {}


def test_a_value_is_swapped_only_if_it_is_the_old_one(connect):
    store = connect()
    assert store.put_if("a", None, "1") and not store.put_if("a", None, "2")
    assert not store.put_if("a", "2", "3") and store.get("a") == "1"
    assert store.put_if("a", "1", "3") and store.get("a") == "3"
    assert not store.put_if("b", "1", "2") and store.get("b") is None
    store.put("c", "")
    assert not store.put_if("c", None, "1") and store.put_if("c", "", "1")


def in_threads(work, count):
    """The results of ``work(number)`` on ``count`` threads at once."""
    found = [None] * count
    threads = [
        threading.Thread(target=lambda number=number: found.__setitem__(number, work(number)))
        for number in range(count)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_of_many_who_write_at_once_one_wins(connect):
    def race(number):
        store = connect()
        return [key for key in range(10) if store.put_if(f"race/{key}", None, str(number))]

    def count(number):
        store, made = connect(), 0
        while made < 5:
            old = store.get("count")
            made += store.put_if("count", old, f"{1 + int((old or '0 x').split()[0])} {number}.{made}")

    won = sorted(key for keys in in_threads(race, 8) for key in keys)
    assert won == list(range(10))
    in_threads(count, 4)
    assert connect().get("count").split()[0] == "20"


@pytest.mark.parametrize("came", [True, False])
def test_a_write_without_an_answer_is_read_before_it_is_repeated(connect, came):
    """Its answer is lost, or the request is."""
    store, asked = connect(), []
    ask = store._ask

    def lose(path, body, end):
        asked.append(path)
        if asked.count("kv/txn") == 1 and path == "kv/txn":
            if came:
                ask(path, body, end)
            raise OSError("lost")
        return ask(path, body, end)

    store._ask = lose
    assert store.put_if("a", None, "mine")
    assert asked == ["kv/txn", "kv/range"] + ([] if came else ["kv/txn"])
    asked.clear()
    connect().put("a", "theirs")
    assert not store.put_if("a", "mine", "again") and connect().get("a") == "theirs"


def test_a_frozen_server_holds_no_call_and_goes_on_later(connect, server):
    process = psutil.Process((getattr(server, "program", None) or server.process).pid)
    store = connect()
    store.put("a", "1")
    process.suspend()
    try:
        while process.status() != psutil.STATUS_STOPPED:  # it may answer until then
            time.sleep(0.01)
        for late in (store, connect()):
            with pytest.raises(Unreachable, match="no answer within 2 s"):
                late.put_if("a", "1", "2")
    finally:
        process.resume()
    while True:  # a busy machine may take its time
        try:
            assert store.get("a") in ("1", "2")  # who has no answer may have written
            break
        except Unreachable:
            continue


def test_nobody_answers():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(Unreachable, match=f"127.0.0.1:{port}: .*refused"):
        open_store(f"tcp://127.0.0.1:{port}/run", KEY).get("a")


def test_a_name_that_nobody_finds_holds_no_call(monkeypatch):
    found = threading.Event()

    def look_up(*arguments, **options):
        found.wait()
        raise OSError("not found")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    with pytest.raises(Unreachable, match="no answer within 2 s"):
        open_store("tcp://somewhere/run", KEY).get("a")
    found.set()


def test_an_answer_that_never_ends_holds_no_call():
    """A byte now and then, which a timeout of each read does not end."""
    over = threading.Event()

    def trickle(listening):
        line, _ = listening.accept()
        with line, contextlib.suppress(OSError):
            line.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
            while not over.wait(0.1):
                line.sendall(b" ")

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=trickle, args=[listening], daemon=True)
        thread.start()
        with pytest.raises(Unreachable, match="no answer within 2 s"):
            Store([listening.getsockname()], "run").get("a")
        over.set()
        thread.join()


def test_more_connections_than_there_may_be_are_closed(monkeypatch):
    monkeypatch.setattr(coordinator, "CONNECTIONS", 2)

    async def connect():
        server = Server(lambda *request: (200, "text/plain", b"here"))
        listening = await server.start("127.0.0.1", 0, None)
        port = listening.sockets[0].getsockname()[1]
        answers = []
        for _ in range(3):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            with contextlib.suppress(ConnectionError):
                writer.write(b"GET / HTTP/1.1\r\n\r\n")
                answers.append((writer, await reader.read(10)))
        listening.close()
        return [answer for _, answer in answers], server.accepted, server.connections

    answers, accepted, connections = asyncio.run(connect())
    assert answers[:2] == [b"HTTP/1.1 2"] * 2 and answers[2:] in ([], [b""]) and (accepted, connections) == (3, 2)


def test_a_dead_host_is_left_for_another(etcd_server):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        dead = free.getsockname()[1]
    store = open_store(f"etcd://127.0.0.1:{dead},127.0.0.1:{etcd_server.port}/hosts", None)
    assert store.put_if("a", None, "1") and store.get("a") == "1"


def test_etcd_with_a_password_is_logged_in_to_again(tmp_path):
    server = Etcd(tmp_path)
    try:
        for user, role in (("root", "root"), ("islands", "islands")):
            server.post("auth/user/add", {"name": user, "password": "pass"})
            server.post("auth/role/add", {"name": role})
            server.post("auth/user/grant", {"user": user, "role": role})
        of_run = {"permType": 2, "key": "cnVuLw==", "range_end": "cnVuMA=="}  # run/ to run0
        server.post("auth/role/grant", {"name": "islands", "perm": of_run})
        server.post("auth/enable", {})
        access = tmp_path / "access.yaml"
        access.write_text("{user: islands, password: pass}")
        store = open_store(f"{server.url()}?access={access}", None)
        assert store.put_if("a", None, "1")
        server.end()
        server.start()  # which forgets who is logged in
        assert store.get("a") == "1"
        with pytest.raises(Unreachable, match="permission denied"):
            open_store(f"{server.url('other')}?access={access}", None).get("a")
        access.write_text("{user: islands, password: another}")
        with pytest.raises(Unreachable, match="invalid user ID or password"):
            open_store(f"{server.url()}?access={access}", None).get("a")
    finally:
        server.end()


def test_a_coordinator_that_comes_back_has_all_but_beats(tmp_path):
    server = Coordinator(tmp_path)
    store = open_store(server.url(), KEY)
    assert store.put_if("now/birth", None, "1") and store.put_if("now/birth", "1", "2")
    store.put("now/beat/0", "beat")
    server.end(signal.SIGKILL)
    again = Coordinator(tmp_path, server.port)
    assert store.list("now/") == {"now/birth": "2"}
    assert store.put_if("now/birth", "2", "3")
    output, errors = again.end(signal.SIGTERM)
    assert errors == "" and output.startswith("coordinator: tcp://127.0.0.1:")


def metrics(server):
    connection = http.client.HTTPConnection("127.0.0.1", server.page)
    connection.request("GET", "/metrics")
    lines = connection.getresponse().read().decode().splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}


def strangers(server):
    found = metrics(server)
    accepted, known = (found[f"megatron_lossy_coordinator_{name}_total"] for name in ("accepted", "authenticated"))
    return accepted - known


def test_strangers_change_nothing_but_a_counter(coordinator_server):
    """No TLS, TLS without a certificate, and with that of another key file; the last says so."""
    store = open_store(coordinator_server.url("strangers"), KEY)
    assert store.put_if("a", None, "1")
    before = strangers(coordinator_server)
    nobody = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    nobody.check_hostname, nobody.verify_mode = False, ssl.CERT_NONE
    unchecked = tls_of(b"another key of 32 bytes for test")
    unchecked.check_hostname, unchecked.verify_mode = False, ssl.CERT_NONE
    for tls in (None, nobody, unchecked):
        for text in (b"POST /v3/kv/range HTTP/1.1\r\n\r\n", b"\xff" * 64, os.urandom(100)):
            sock = socket.create_connection(("127.0.0.1", coordinator_server.port))
            with pytest.raises(OSError), sock, tls.wrap_socket(sock) if tls else sock as line:
                line.sendall(text)
                if line.recv(100) == b"":
                    raise OSError("closed")
    with pytest.raises(Unreachable, match="another key file or certificate"):
        open_store(coordinator_server.url("strangers"), b"another key of 32 bytes for test").put("a", "2")
    assert store.get("a") == "1"
    assert strangers(coordinator_server) >= before + 10


def test_who_has_the_key_and_sends_nonsense_is_closed(coordinator_server):
    tls = tls_of(KEY)
    for text in (
        b"GET / HTTP/1.0\r\n\r\n",
        b"x" * 20_000,
        b"POST /v3/kv/put HTTP/1.1\r\nContent-Length: 99999999\r\n\r\n",
    ):
        sock = socket.create_connection(("127.0.0.1", coordinator_server.port))
        with sock, tls.wrap_socket(sock, server_hostname=NAME) as line:
            line.sendall(text)
            assert line.recv(100) == b""
    with pytest.raises(Unreachable, match="status 400, ValueError: a key of"):
        open_store(coordinator_server.url("nonsense"), KEY).put("a" * 300, "1")
    assert open_store(coordinator_server.url("nonsense"), KEY).list("") == {}


def requests(rng):
    """A right request, as its path and body."""
    key = lambda: coordinator._text(f"run/now/{rng.choice(['slot/1', 'beat/2', 'epoch'])}".encode())
    value = lambda: coordinator._text(write(Slot("1/0123abcd", "host", "host:1", "flags")).encode())
    put = {"key": key(), "value": value()}
    compare = {"key": key(), "result": "EQUAL"} | rng.choice(
        [{"target": "VALUE", "value": value()}, {"target": "CREATE", "create_revision": "0"}]
    )
    bodies = {
        "/v3/kv/range": {"key": key(), "range_end": key()},
        "/v3/kv/put": put,
        "/v3/kv/txn": {"compare": [compare], "success": [{"request_put": put}]},
    }
    path = rng.choice(list(bodies))
    return path, json.dumps(bodies[path]).encode()


def mutate(rng, body):
    """One to three bytes are others, are missing, or are there twice."""
    body = bytearray(body)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(body))
        body[at : at + rng.choice([1, 1, 1, 8])] = rng.choice(
            [b"", rng.randbytes(1), body[at : at + 1] * 2, b"[[{", b"null"]
        )
    return bytes(body)


@pytest.mark.parametrize("count", [10_000, pytest.param(1_000_000, marks=pytest.mark.nightly)])
def test_mutated_requests_are_refused_or_requests(count):
    rng, watcher = random.Random(1), Watcher(time.time)
    store = Dictionary(None, watcher.note)
    statuses = set()
    for _ in range(count):
        path, body = requests(rng)
        status, _, answer = store.answer(rng.choice(["POST"] * 9 + ["GET"]), path, mutate(rng, body))
        statuses.add(status)
        json.loads(answer)
    assert statuses == {200, 400} and count / 10 < store.malformed < count
    assert store._size == sum(len(key) + len(value) for key, value in store._values.items())
    for path in ("/", "/metrics"):
        assert watcher.answer("GET", path, b"")[0] == 200


def put(store, key, value):
    body = {"key": coordinator._text(key), "value": coordinator._text(value)}
    return store.answer("POST", "/v3/kv/put", json.dumps(body).encode())[0]


def test_a_store_is_never_larger_than_its_limits(monkeypatch):
    monkeypatch.setattr(coordinator, "KEYS", 3)
    monkeypatch.setattr(coordinator, "ALL", 100)
    store = Dictionary(None)
    assert [put(store, b"%d" % key, b"") for key in range(4)] == [200, 200, 200, 400]
    assert put(store, b"1", b"x" * 96) == 200 and put(store, b"2", b"xx") == 400
    assert put(store, b"1", b"") == 200 and put(store, b"2", b"xx") == 200


def test_a_write_that_the_disk_does_not_take_is_not_there(tmp_path):
    journal = open_journal(tmp_path / "journal")
    store = Dictionary(journal)
    assert put(store, b"a", b"1") == 200
    journal.execute("PRAGMA max_page_count = 1")  # no more than there are
    assert put(store, b"a", b"x" * 60_000) == 503
    assert store._values == {b"a": b"1"} and put(store, b"b", b"3") == 200
    journal.close()
    assert Dictionary(open_journal(tmp_path / "journal"))._values == {b"a": b"1", b"b": b"3"}


def test_a_journal_stays_short_and_belongs_to_one(tmp_path):
    path = tmp_path / "journal"
    journal = open_journal(path)
    store = Dictionary(journal)
    for number in range(200):
        assert put(store, b"a", b"%d" % number) == 200
    assert path.stat().st_size < 20_000
    with pytest.raises(UsageError, match="--journal .* belongs to a coordinator that runs"):
        open_journal(path)
    journal.close()
    assert Dictionary(open_journal(path))._values == {b"a": b"199"}


def test_the_page_shows_each_island(coordinator_server):
    store = open_store(coordinator_server.url("page"), KEY)
    member = "1/0123abcd"
    store.put("now/slot/1", write(Slot(member, '<b>"host', "host:1", "flags")))
    store.put("now/beat/1", write(Beat(member, 7, "sends", 123, 12, lag=3, loss=2.5, lost=0.25, event="lost contact")))
    store.put("now/epoch", write(Entry(1_700_000_000, (member,), (member,), 4, 40, "", "nonce")))
    store.put("now/beat/2", "nonsense")
    found = metrics(coordinator_server)
    labels = '{run="page",slot="1",host="<b>\\"host"}'
    assert found[f"megatron_lossy_island_iteration{labels}"] == 123
    assert (
        found[f"megatron_lossy_island_lost_ratio{labels}"] == 0.25
        and found[f"megatron_lossy_island_sends{labels}"] == 1
    )
    assert found['megatron_lossy_epoch{run="page"}'] == 1_700_000_000
    assert found['megatron_lossy_members{run="page"}'] == 1
    connection = http.client.HTTPConnection("127.0.0.1", coordinator_server.page)
    connection.request("GET", "/")
    page = connection.getresponse().read().decode()
    for text in (
        "&lt;b&gt;&quot;host",
        "sends",
        "123",
        "2.5",
        "25.0%",
        "lost contact",
        "epoch 1700000000 from exchange 4",
    ):
        assert text in page
    connection.request("GET", "/other")
    assert connection.getresponse().status == 404


@pytest.mark.parametrize(
    ("url", "error"),
    [
        ("host:1/run", "must be tcp://"),
        ("tcp://host:1", "must be tcp://"),
        ("tcp://host:1/a b", "must be tcp://"),
        ("tcp://a:1,b:1/run", "must be tcp://"),
        ("tcp://host:99999/run", "must be HOST:PORT"),
        ("tcp://::1/run", "must be HOST:PORT"),
        ("etcd://a:1,/run", "must be HOST:PORT"),
        ("etcd://a/run?access=no/such/file", "cannot be read"),
    ],
)
def test_a_url_that_names_no_store(url, error):
    with pytest.raises(UsageError, match=f"--rendezvous .*{error}"):
        open_store(url, KEY)


def test_stores_and_their_ports():
    with pytest.raises(UsageError, match="needs the key file"):
        open_store("tcp://host/run", None)
    assert open_store("tcp://host/run", KEY)._hosts == [("host", 29510)]
    assert open_store("etcd://[::1]:9,b/run", None)._hosts == [("::1", 9), ("b", 2379)]
    assert isinstance(open_store("etcd://a/run", None), Store)
