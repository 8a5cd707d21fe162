"""Launches that find each other at a real lighthouse of torchft, which dies, comes back, and is one of two."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
import time
from types import SimpleNamespace

import pytest

from megatron_lossy.base.errors import UsageError
from megatron_lossy.mechanisms.islands.rendezvous import lighthouse as module
from megatron_lossy.mechanisms.islands.rendezvous.lighthouse import JOIN, Lighthouse, Unreachable, addresses_of
from megatron_lossy.mechanisms.islands.rendezvous.watch import Watch
from tests.lighthouse import TIMEOUT
from tests.programs import run_program

pytestmark = pytest.mark.shows("islands find each other at a lighthouse of torchft", device=False)


class Island:
    """Asks all the time, as a launch does."""

    def __init__(self, name, *addresses, **data):
        self.heard, self.said = [], []
        data = {"name": name, **data}
        self.watch = Watch(
            Lighthouse(addresses, name, TIMEOUT), 0.1, lambda: (0, data), self.heard.append, self.said.append
        )

    @property
    def sees(self):
        """The names of the last answer."""
        return sorted(one["name"] for one in self.heard[-1]) if self.heard else []


class Cable:
    """A way to ``url`` that can be pulled: what is connected then never hears again, and nobody can connect."""

    def __init__(self, url):
        host, _, port = url.removeprefix("http://").rpartition(":")
        self._to, self._listener, self.pulled = (host, int(port)), socket.create_server(("127.0.0.1", 0)), False
        self._sockets = []
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._connect, daemon=True).start()

    def pull(self):
        self.pulled = True
        self._dead, self._sockets = self._sockets, []

    def plug(self):
        self.pulled = False

    def close(self):
        self._listener.close()

    def _connect(self):
        while True:
            try:
                inside, _ = self._listener.accept()
            except OSError:
                return
            if self.pulled:
                self._sockets.append(inside)  # it hears nothing
                continue
            outside = socket.create_connection(self._to)
            self._sockets += [inside, outside]
            for pair in ((inside, outside), (outside, inside)):
                threading.Thread(target=self._carry, args=pair, daemon=True).start()

    def _carry(self, one, other):
        with contextlib.suppress(OSError):
            while data := one.recv(65536):
                if one in self._sockets:
                    other.sendall(data)


@pytest.fixture
def cable():
    made = []

    def cable(url):
        made.append(Cable(url))
        return made[-1]

    yield cable
    for one in made:
        one.close()


@pytest.fixture
def island(serve):
    made = []

    def island(*arguments, **data):
        made.append(Island(*arguments, **data))
        return made[-1]

    yield island
    for one in made:
        one.watch.close()


def until(condition, seconds=30.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)


def meet(**islands):
    """All see all, and nobody else."""
    until(lambda: all(one.sees == sorted(islands) for one in islands.values()))


@pytest.mark.programs
def test_all_hear_what_each_says_of_itself(serve, island, tmp_path):
    _, url = serve()
    data = {"slot": 3, "member": [1, 2**63 - 1, "send"], "nested": {"seconds": 0.25, "none": None}}
    one, two = island("one", url, **data), island("two", url)
    meet(one=one, two=two)
    said = [{"name": "one", **data}, {"name": "two"}]
    assert all(sorted(answer.heard[-1], key=lambda x: x["name"]) == said for answer in (one, two))
    assert (tmp_path / "lighthouse_0.txt").read_text() == ""  # a line for each answer would be gigabytes a day


@pytest.mark.programs
def test_who_falls_silent_is_dead_for_the_others_and_another_may_come(serve, island):
    _, url = serve()
    one, two = island("one", url), island("two", url)
    meet(one=one, two=two)
    two.watch.close()
    meet(one=one)
    meet(one=one, again=island("again", url))


@pytest.mark.programs
def test_a_lighthouse_dies_and_comes_back(serve, island):
    process, url = serve()
    one = island("one", url)
    meet(one=one)
    one.said.clear()  # it may have asked before it was connected
    process.kill()
    process.wait()
    until(lambda: one.said)
    time.sleep(1)
    before = len(one.heard)
    assert len(one.said) == 1 and one.said[0].startswith(f"--rendezvous: nobody answers at {url} (")
    assert one.said[0].endswith("; going on as before")
    serve(int(url.rpartition(":")[2]))
    until(lambda: len(one.heard) > before)
    assert one.said[1:] == ["--rendezvous: answers again"]
    one.watch.check()


@pytest.mark.programs
def test_who_asks_a_lighthouse_that_is_back_hears_of_all(serve, island):
    """It knows nobody at first, and those who find it before others must not take these for dead."""
    process, url = serve()
    islands = [island(f"{number}", url) for number in range(5)]
    names = [f"{number}" for number in range(5)]
    until(lambda: all(one.sees == names for one in islands))
    for one in islands:
        one.said.clear()
    process.kill()
    process.wait()
    until(lambda: all(one.said for one in islands))
    before = [len(one.heard) for one in islands]
    serve(int(url.rpartition(":")[2]), join=JOIN)
    until(lambda: all(len(one.heard) > count + 3 for one, count in zip(islands, before)))
    for one, count in zip(islands, before):
        assert all(len(answer) == len(islands) for answer in one.heard[count:])


@pytest.mark.programs
def test_of_two_lighthouses_the_first_that_answers_counts(serve, island):
    """While the first is down all meet at the second, and at the first once it is back."""
    first, url = serve()
    _, other = serve()
    one, two = (island(name, url, other) for name in ("one", "two"))
    meet(one=one, two=two)
    first.kill()
    first.wait()
    before = len(one.heard), len(two.heard)
    until(lambda: len(one.heard) > before[0] + 5 and len(two.heard) > before[1] + 5)
    meet(one=one, two=two)
    serve(int(url.rpartition(":")[2]))
    meet(one=one, two=two, three=island("three", url))  # which knows the first alone


@pytest.mark.programs
def test_who_was_cut_off_does_not_wait_for_the_connection_that_it_had(serve, island, cable):
    """TCP would try it again ever more rarely: here never."""
    _, url = serve()
    between = cable(url)
    one, two = island("one", between.url), island("two", url)
    meet(one=one, two=two)
    between.pull()
    meet(two=two)
    between.plug()
    meet(one=one, two=two)
    one.watch.check()


@pytest.mark.programs
def test_who_is_cut_off_from_the_first_lighthouse_asks_the_second(serve, island, cable):
    (_, url), (_, other) = serve(), serve()
    between = cable(url)
    one, two = island("one", between.url, other), island("two", other)
    until(lambda: one.heard)
    assert not between.pulled and two.sees in ([], ["two"])
    between.pull()
    meet(one=one, two=two)


@pytest.mark.parametrize("late", ["now and then", "always"])
def test_a_connection_is_given_up_if_signs_of_life_are_late_twice_in_a_row(monkeypatch, late):
    made = []

    class Client:
        def __init__(self, *arguments):
            made.append(0)

        def heartbeat(self, *arguments):
            made[-1] += 1
            if late == "always" or made[-1] % 2:
                raise TimeoutError("deadline exceeded")

    monkeypatch.setattr(module, "torchft", lambda: SimpleNamespace(LighthouseClient=Client))
    monkeypatch.setattr(module, "HEARTBEAT", 0.01)
    one = Lighthouse(["http://nowhere:1"], "one", TIMEOUT)
    until(lambda: sum(made) >= 10)
    one.close()
    assert made == ([2] * (len(made) - 1) + made[-1:] if late == "always" else [sum(made)])


class Silent:
    timeout = 1.0

    def __init__(self):
        self.closed = False

    def ask(self, step, data):
        raise Unreachable("nobody answers at http://nowhere:1 (no route)")

    def close(self):
        self.closed = True


def test_a_watch_ends_without_an_answer():
    said, silent = [], Silent()
    watch = Watch(silent, 0.01, lambda: (0, {}), lambda answer: None, said.append)
    until(lambda: said)
    watch.close()
    assert silent.closed and len(said) == 1


def test_what_fails_on_the_thread_of_a_watch_is_raised_to_who_asks():
    def tell():
        raise UsageError("--island 3: wrong")

    watch = Watch(Silent(), 0.01, tell, lambda answer: None)
    until(lambda: watch._failed)
    with pytest.raises(UsageError, match="--island 3: wrong"):
        watch.check()


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("host", ["http://host:29510"]),
        ("host:1234,other", ["http://host:1234", "http://other:29510"]),
        ("http://host:1234", ["http://host:1234"]),
        ("[::1]:5, [fe80::1]", ["http://[::1]:5", "http://[fe80::1]:29510"]),
    ],
)
def test_addresses(text, found):
    assert addresses_of(text) == found


@pytest.mark.parametrize("text", ["", "host:", "host:0", "host:70000", "host:x", "a,,b", "::1", "https://host"])
def test_addresses_that_cannot_be(text):
    with pytest.raises(UsageError, match=r"--rendezvous.*must be HOST:PORT"):
        addresses_of(text)


def test_without_torchft_it_says_what_to_install(monkeypatch):
    def missing(name):
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(module.importlib, "import_module", missing)
    with pytest.raises(UsageError, match=r"pip install 'megatron-lossy\[elastic\]'"):
        Lighthouse(["http://host:1"], "one")


@pytest.mark.programs
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_command_ends_in_order(serve, number):
    process, _ = serve()
    process.send_signal(number)
    assert process.wait(timeout=20) == 0


@pytest.mark.programs
@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--timeout", "0"], "--timeout 0.0: must be seconds above 0 and below 3600"),
        (["--bind", "nonsense"], "--bind nonsense: "),
    ],
)
def test_the_command_refuses(arguments, why):
    pytest.importorskip("torchft")
    done = run_program("megatron_lossy", "lighthouse", *arguments)
    assert done.returncode == 2 and why in done.stderr
