"""Lives of memory, handles, sockets and threads of the engine: closing under load, waits, fork, ICMP, timers."""

import contextlib
import gc
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch.distributed import FileStore, HashStore

from megatron_lossy.base import native
from megatron_lossy.config import LossyConfig
from megatron_lossy.transport import BucketSpec, LossyGroup
from megatron_lossy.transport.udp import Engine, PeerLost, Settings
from megatron_lossy.transport.udp.engine import windows
from megatron_lossy.transport.udp.library import load
from tests.programs import until
from tests.ranks import run_ranks
from tests.rules import reduce
from tests.test_udp_engine import UNIT, Ranks, in_threads

pytestmark = pytest.mark.shows("memory, threads and sockets: closing under load, fork, forged ICMP", device=False)


BEGIN = """
import os, sys, time
from megatron_lossy.base import native
from megatron_lossy.transport.udp import Engine, Settings
from torch.distributed import FileStore, HashStore
from tests.test_udp_engine import in_threads
"""


def run_program(text, **environment):
    """A program of its own: what it touches after the end of memory kills it, not the tests."""
    return subprocess.run(
        [sys.executable, "-c", BEGIN + text], capture_output=True, text=True, timeout=120, env=os.environ | environment
    )


class Instead:
    """The compiled engine: notes in ``used`` what is asked for by name, and has other functions in the place of some."""

    def __init__(self, library, used, **others):
        self.library, self.used, self.others = library, used, others

    def __getattr__(self, name):
        self.used.append(name)
        return self.others.get(name) or getattr(self.library, name)


# ---- Memory ----


def test_memory_goes_after_the_engine_has_forgotten_the_exchange():
    """The same without a race: in which order ``close`` does it."""
    order = []

    class Memory:
        def __del__(self):
            order.append("memory")

    with Ranks(2) as ranks:
        channel = ranks.dense[0]
        transfer, _ = ranks.post(0, "grad", 0, 0)
        transfer.keep = Memory()
        del transfer
        channel._lib = Instead(channel._lib, order)
        channel.close(0.0)
    assert order.index("ml_close") < order.index("memory")


# ---- Handles ----


def test_a_channel_lasts_as_long_as_somebody_uses_it():
    """A thread that finds a rank gone asks the engine why, while another thread closes the channel."""
    with Ranks(2, buckets={"grad": [(UNIT, UNIT)]}) as ranks:
        channel = ranks.dense[0]
        with channel._using():
            closing = threading.Thread(target=channel.close, args=[0.0])
            closing.start()
            while not channel._ends:
                time.sleep(0.001)
            assert channel._channel is not None
            with pytest.raises(RuntimeError, match="is closed"), channel._using():
                pass
        closing.join()
        assert channel._channel is None


def test_two_threads_may_wait_for_one_transfer():
    """The first that sees the end gives the handle back; the other may be inside the engine with it."""
    with Ranks(2, buckets={"grad": [(UNIT, UNIT)]}) as ranks:
        for step in range(60):
            transfer, _ = ranks.post(0, "grad", step, 0)
            ranks.send(0, "grad", step, 0)
            gate = threading.Barrier(5)

            def wait(rank, transfer=transfer, gate=gate, step=step):
                gate.wait(20)
                if rank == 4:
                    other, _ = ranks.post(1, "grad", step, 0)
                    ranks.send(1, "grad", step, 0)
                    return other.wait(20).all()
                transfer.sent(20)
                return transfer.wait(20).all()

            assert in_threads(5, wait) == [True] * 5


def test_a_channel_is_closed_while_somebody_asks_for_reports():
    """Between the engine's answer and what is made of it: also then the handle is there."""
    buckets = {"grad": [(20 * UNIT, UNIT)]}
    store, engines = HashStore(), [Engine(Settings(), "127.0.0.1") for _ in range(2)]
    channels = in_threads(2, lambda r: engines[r].open("x", r, 2, store, "p", buckets, reported=("grad",)))
    data, pieces = np.ones((2, 20 * UNIT), np.uint8), np.zeros((2, 20 * UNIT), np.uint8)
    channels[1].post("grad", 0, 0, [pieces[0].ctypes.data, None])
    sent = channels[0].send("grad", 0, 0, [None, data[1].ctypes.data], np.ones((2, 20), bool))
    sent.expects_reports()
    answered, closing = threading.Event(), []

    def slow(*args):
        result = load().ml_reports(*args)
        if not result:
            closing.append(threading.Thread(target=channels[0].close, args=(0.0,)))
            closing[0].start()
            time.sleep(0.2)
            answered.set()
        return result

    sent._lib = Instead(sent._lib, [], ml_reports=slow)
    while (lost := sent.reports()) is None:
        time.sleep(0.01)
    closing[0].join(20)
    assert answered.is_set() and not closing[0].is_alive() and not lost[1].any()
    in_threads(2, lambda r: engines[r].close(0.0))


def test_an_engine_is_not_freed_while_another_thread_closes_a_channel():
    """A lingering channel still needs it."""
    with Ranks(2, buckets={"grad": [(3000 * UNIT, UNIT)]}, eager_bytes=0) as ranks:
        ranks.send(0, "grad", 0, 0)  # which nobody asks for
        slow = threading.Thread(target=ranks.dense[0].close, args=(2.0,))
        slow.start()
        time.sleep(0.3)
        ranks.engines[0].close(0.0)
        assert ranks.engines[0].closed
        slow.join(20)
        assert not slow.is_alive()
        with pytest.raises(RuntimeError, match="the engine of 127.0.0.1 is closed"):
            ranks.engines[0].open("other", 0, 2, ranks.store, "q", ranks.buckets)


def test_who_waits_sleeps_in_the_engine():
    """A fifth of a second at a time, for signals; not in a loop that asks again and again."""
    with Ranks(2) as ranks:
        transfer, _ = ranks.post(0, "grad", 0, 0)
        asked = []
        transfer._lib = Instead(transfer._lib, asked)
        with pytest.raises(TimeoutError):
            transfer.wait(1.0)
        assert 0 < asked.count("ml_wait") < 20


# ---- Fork ----

FORKS = """
store, engines = HashStore(), [Engine(Settings(), "127.0.0.1") for _ in range(2)]
channels = in_threads(2, lambda r: engines[r].open("x", r, 2, store, "p", {"grad": [(1000, 100)]}))

def sockets():
    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    return {name for name in (os.readlink(link) for link in links if os.path.islink(link)) if name.startswith("socket:")}

held = sockets()
child = os.fork()
if not child:
    assert len(held) == 2 and not held & sockets(), (held, sockets())
    assert engines[0].closed and engines[0].counters() == {} and channels[0].counters() == {}
    try:
        channels[0].post("grad", 0, 0, [None, None])
    except RuntimeError as error:
        assert "is closed" in str(error)
    sys.exit(7)  # with all that runs at the end of a program
_, status = os.waitpid(child, 0)
in_threads(2, lambda r: engines[r].close())
print(os.waitstatus_to_exitcode(status))
"""


def test_a_forked_child_ends_and_holds_no_socket():
    done = run_program(FORKS)
    assert (done.returncode, done.stdout) == (0, "7\n"), done.stderr[-2000:]


def test_a_killed_rank_is_noticed_though_its_child_lives(tmp_path):
    """A data loader's worker that outlives it must not keep its port open."""
    program = """
engine = Engine(Settings(), "127.0.0.1")
channel = engine.open("x", 1, 2, FileStore(sys.argv[1] + "/store", -1), "p", {"grad": [(1000, 100)]})
child = os.fork()
if not child:
    time.sleep(60)
    os._exit(0)
print(child, flush=True)
time.sleep(60)
"""
    with Engine(Settings(peer_timeout=300), "127.0.0.1") as engine:
        other = subprocess.Popen([sys.executable, "-c", BEGIN + program, tmp_path], stdout=subprocess.PIPE, text=True)
        try:
            channel = engine.open("x", 0, 2, FileStore(f"{tmp_path}/store", -1), "p", {"grad": [(1000, 100)]})
            child = int(other.stdout.readline())
            os.kill(other.pid, signal.SIGKILL)
            other.wait()
            memory = np.zeros(1000, np.uint8)
            transfer = channel.post("grad", 0, 0, [None, memory.ctypes.data])
            try:
                # Its host refuses: without that it would be the timeout of 300 s.
                with pytest.raises(PeerLost, match="its host refuses datagrams, process gone"):
                    transfer.wait(60)
                os.kill(child, 0)  # lives
            finally:
                os.kill(child, signal.SIGKILL)
        finally:
            other.kill()
            other.wait()


# ---- ICMP ----


def unreachable(source, destination):
    """An ICMP message of ``destination``'s host: the UDP datagram from port ``source`` found nobody."""

    def checksum(data):
        total = sum(struct.unpack(f"!{len(data) // 2}H", data))
        while total >> 16:
            total = (total & 0xFFFF) + (total >> 16)
        return ~total & 0xFFFF

    loopback = socket.inet_aton("127.0.0.1")
    inner = struct.pack("!BBHHHBBH4s4s", 0x45, 0, 36, 0, 0, 64, socket.IPPROTO_UDP, 0, loopback, loopback)
    inner += struct.pack("!HHHH", source, destination, 16, 0) + bytes(8)
    head = struct.pack("!BBHI", 3, 3, 0, 0)
    return struct.pack("!BBHI", 3, 3, checksum(head + inner), 0) + inner


@pytest.mark.skipif(
    not hasattr(socket, "SOCK_RAW") or os.geteuid() != 0, reason="forging ICMP needs a raw socket, and so root"
)
def test_forged_icmp_does_not_end_a_channel():
    """Both sides are there and idle: whoever claims that a port is closed is not believed."""
    with Ranks(2) as ranks, socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP) as forger:
        ranks.exchange("grad", 0, 0)
        for _ in range(30):
            forger.sendto(unreachable(ranks.engines[0].port, ranks.engines[1].port), ("127.0.0.1", 0))
            time.sleep(0.1)  # those of one burst count once
        assert ranks.engines[0].counters()["unreachable"] >= 10
        assert all(arrived.all() for arrived in ranks.exchange("grad", 1, 0))


# ---- Timers while the socket is never empty ----

FLOODED = r"""
#define _GNU_SOURCE
#include <sys/socket.h>
static int always_something(int fd, struct mmsghdr *messages, unsigned int count, int flags, struct timespec *timeout);
#define recvmmsg always_something
#include "{source}"
static int always_something(int fd, struct mmsghdr *messages, unsigned int count, int flags, struct timespec *timeout)
{{
    (void)fd, (void)count, (void)flags, (void)timeout;
    struct sockaddr_in *from = messages[0].msg_hdr.msg_name;
    *from = (struct sockaddr_in){{.sin_family = AF_INET}};
    messages[0].msg_hdr.msg_controllen = 0;
    messages[0].msg_hdr.msg_flags = 0;
    messages[0].msg_len = 7; /* somebody's noise */
    return 1;
}}
int main(void)
{{
    struct settings set = {{.rate = 1e9, .reorder = MS, .peer_timeout = 300 * SECOND, .eager = 1 << 20, .memory = 1 << 20, .packet = 64}};
    struct sockaddr_in here = {{.sin_family = AF_INET}}, there = {{.sin_family = AF_INET, .sin_port = htons(9)}};
    here.sin_addr.s_addr = there.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    int64_t result[3];
    struct engine *e = ml_create(&set, (struct sockaddr *)&here, sizeof here, 1 << 16, result);
    struct channel *c = ml_channel(e, 7, 0, 2, 1, 0, 0);
    if (ml_bucket(c, 0, 0, 640, 64, 0, 0) || ml_member(c, 1, (struct sockaddr *)&there, sizeof there, 1, 100, 100, 1 << 20, NULL, NULL, -1))
        return 2;
    ml_open(c);
    static uint8_t memory[640], arrived[20];
    uint8_t *to[2] = {{NULL, memory}};
    struct exchange *x;
    if (ml_post(c, 0, 0, 0, to, arrived, 20 * MS, -1, &x))
        return 3;
    int late = ml_wait(x, 0, 20 * SECOND);
    ml_close(c, -1);
    ml_free(e);
    return late;
}}
"""


def run_c(folder, text):
    """The exit status of a C program that includes the engine as ``{source}``."""
    compiler = native.compiler() or pytest.skip("no C compiler")
    source, program = folder / "program.c", folder / "program"
    source.write_text(text.format(source=native.ENGINE.source))
    subprocess.run([compiler, "-std=gnu11", "-O1", "-pthread", "-o", program, source, "-ldl", "-lm"], check=True)
    return subprocess.run([program], timeout=60).returncode


def test_deadlines_pass_while_the_socket_is_never_empty(tmp_path):
    assert run_c(tmp_path, FLOODED) == 0


BOUNDS = """
#include "{source}"
#include <assert.h>
enum {{ UNIT = 1408, UNITS = 2000 }};
static struct engine *engine(void)
{{
    struct settings set = {{.rate = 1e9, .reorder = -1, .peer_timeout = 30 * SECOND, .eager = 1 << 20,
                           .memory = 16 << 20, .packet = UNIT, .rule = FIXED}};
    int64_t result[3];
    return ml_create(&set, NULL, 0, 0, result);
}}
static struct channel *channel(struct engine *e, uint32_t id, struct sockaddr_in *other, ns now)
{{
    static uint8_t key[16];
    struct channel *c = ml_channel(e, id, 0, 2, 1, 0, 0);
    assert(!ml_bucket(c, 0, 0, UNITS * UNIT, UNIT, 0, 1));
    *other = (struct sockaddr_in){{.sin_family = AF_INET, .sin_port = htons((uint16_t)(1000 + id))}};
    assert(!ml_member(c, 1, (void *)other, sizeof *other, id, 1000, 1000, 1 << 20, key, key, now));
    ml_open(c);
    return c;
}}
int main(void)
{{
    struct engine *e = engine();
    struct sockaddr_in other;
    ns now = SECOND;
    for (uint32_t id = 1; id <= 200; id++) {{ /* processes that come and go */
        ml_close(channel(e, id, &other, now), now);
        now += 3 * SECOND;
        timers(e, now);
    }}
    int flows = 0;
    for (struct flow *f = e->flows; f; f = f->next)
        flows += f->out.sent != NULL;
    if (flows > 25)
        return 1;
    struct flow *first = e->flows; /* it comes again, and the other end may have its numbers */
    while (first->next)
        first = first->next;
    first->out.number = 77;
    ml_close(channel(e, 1, &other, now), now);
    if (first->out.number != 77 || !first->out.sent)
        return 4;
    ml_free(e);
    return 0;
}}
"""


def test_peers_that_come_and_go_take_bounded_memory(tmp_path):
    assert run_c(tmp_path, BOUNDS) == 0


OLD_KERNEL = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <netinet/in.h>
#include <string.h>
#include <sys/socket.h>
enum { SEGMENT = 103 };
int setsockopt(int fd, int level, int name, const void *value, socklen_t size)
{
    if (level == IPPROTO_UDP && name == SEGMENT) {
        errno = ENOPROTOOPT;
        return -1;
    }
    return ((int (*)(int, int, int, const void *, socklen_t))dlsym(RTLD_NEXT, "setsockopt"))(fd, level, name, value, size);
}
ssize_t sendmsg(int fd, const struct msghdr *message, int flags) /* a control message of a level that UDP does not read */
{
    struct msghdr read = *message;
    const struct cmsghdr *h = CMSG_FIRSTHDR(message);
    if (h && h->cmsg_level == IPPROTO_UDP)
        read.msg_control = NULL, read.msg_controllen = 0;
    return ((ssize_t(*)(int, const struct msghdr *, int))dlsym(RTLD_NEXT, "sendmsg"))(fd, &read, flags);
}
"""
EXCHANGE = """
import numpy as np
store, engines = HashStore(), [Engine(Settings(), "127.0.0.1") for _ in range(2)]
channels = in_threads(2, lambda r: engines[r].open("x", r, 2, store, "p", {"grad": [(1408 * 200, 1408)]}))
sent, came = np.ones(1408 * 200, np.uint8), np.zeros(1408 * 200, np.uint8)
transfer = channels[0].post("grad", 0, 0, [None, came.ctypes.data])
channels[1].send("grad", 0, 0, [sent.ctypes.data, None])
transfer.wait(60)
print(int(came.sum()), engines[1].counters()["segmented"])
in_threads(2, lambda r: engines[r].close())
"""


@pytest.mark.programs
def test_a_kernel_that_does_not_cut_datagrams_is_noticed(tmp_path):
    """Before Linux 4.18 it takes the request for one of another protocol, and sends one datagram that is too long."""
    library = tmp_path / "old.so"
    (tmp_path / "old.c").write_text(OLD_KERNEL)
    compiler = native.compiler() or pytest.skip("no C compiler")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, tmp_path / "old.c", "-ldl"], check=True)
    done = run_program(EXCHANGE, LD_PRELOAD=str(library))
    assert done.stdout.split() == ["281600", "0"], done.stderr[-2000:]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.setsockopt(socket.IPPROTO_UDP, 103, 0)
        assert int(run_program(EXCHANGE).stdout.split()[1]) > 0


# ---- Receive windows ----


def test_all_channels_together_promise_the_buffer_once():
    """Rank 0 is in two channels with two others each: what all may have on the way fits its buffer."""
    members = {"a": [0, 1, 2], "b": [0, 3, 4], "c": [0, 1, 3]}
    store, engines = HashStore(), [Engine(Settings(socket_buffer=1 << 20), "127.0.0.1") for _ in range(5)]
    buckets = {"grad": [(100 * UNIT, UNIT)]}
    try:
        channels = {}

        def run(rank):
            for name, ranks in members.items():
                if rank in ranks:
                    channels[name, rank] = engines[rank].open(name, ranks.index(rank), 3, store, name, buckets)

        assert in_threads(5, run) == [None] * 5
        promised = engines[0].windows()
        assert promised == windows(engines[0].granted, engines[0].datagram, 4)
        # And the others learn of it, whichever channel they saw first.

        def seen():
            told = [channels[name, rank].rates() for name, rank in channels if rank]
            return [(rates[0]["window"], rates[0]["limit"]) for rates in told if 0 in rates]

        until(lambda: seen() == [promised] * 6)
        in_threads(5, lambda rank: [c.close(0.0) for (name, r), c in channels.items() if name == "b" and r == rank])
        assert (
            engines[0].windows() == windows(engines[0].granted, engines[0].datagram, 3)
            and engines[0].windows()[0] > promised[0]
        )
    finally:
        in_threads(5, lambda rank: engines[rank].close(0.0))


def kept_by_a_closed_group(rank, config):
    """Return whether a wire is kept after its group is closed, until garbage is collected."""
    gc.collect()
    gc.disable()
    try:
        group = LossyGroup.create(config, [BucketSpec(50), BucketSpec(7)])
        for step in range(3):
            for bucket, shard in enumerate((50, 7)):
                reduce(group, bucket, torch.ones(2 * shard), torch.empty(shard), step, lambda: None).wait()
                group.all_gather(bucket, torch.ones(2 * shard), torch.ones(shard), step, lambda: None).wait()
            group.finish_step(step, True)
        wire = weakref.ref(group.wire)
        group.close()
        del group
        return wire() is not None
    finally:
        gc.enable()


@pytest.mark.parametrize("flags", [{}, {"grad_recovery": "error-feedback"}])
def test_a_closed_group_is_kept_by_nobody(flags):
    """Else threads of its process group are alive when Python ends, which can abort the process."""
    config = LossyConfig(transport="udp", packet_bytes=48, udp_key_file="none", **flags)
    assert run_ranks(kept_by_a_closed_group, 2, config) == [False, False]


def test_counters_may_be_asked_for_while_the_channel_is_closed():
    """They are those at its end from then on, whichever comes first."""
    store = HashStore()
    with Engine(Settings(), "127.0.0.1") as first, Engine(Settings(), "127.0.0.1") as second:
        for turn in range(20):
            with ThreadPoolExecutor(3) as pool:
                opened = [
                    pool.submit(engine.open, "c", rank, 2, store, f"c{turn}", {"grad": [(64, 64)]})
                    for rank, engine in enumerate((first, second))
                ]
                channels = [one.result() for one in opened]
                ask = channels[0].counters
                asking = [pool.submit(lambda ask: [ask() for _ in range(200)], ask) for _ in range(2)]
                channels[0].close(linger=0.0)
                assert all(list(counts) == [1] for one in asking for counts in one.result())
                assert list(channels[0].rates()) == [1]
                channels[1].close(linger=0.0)
