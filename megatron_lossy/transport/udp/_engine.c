/* The datagram engine of --transport udp: one socket and one thread per process.
 *
 * Two layers. The protocol (everything above "The socket") does no input or output and never asks for the time: what
 * arrives goes into ml_handle, what is due comes out of ml_produce, ml_timers does what waits for a time, and `now` is
 * an argument. The thread below joins it to a socket and a clock; tests join several by functions that lose datagrams.
 *
 * An exchange is (channel, phase, step, bucket). Of each source it expects the units of one shard, a datagram each.
 *
 *   receiver: posted, no END yet      READY 0 until END or everything arrived        (also asks for a lost END)
 *             all arrived, or END and the reorder window passed, or the deadline     READY 1: done, once and on request
 *   sender:   up to `eager` bytes, then ASK until READY; DATA; END until READY 1 comes back
 *
 * A receiver answers ASK with READY 0 or 1, and not at all before it has posted.
 *
 * So each side of each wait repeats what the other may have lost, at intervals that double up to a second: a process
 * that is stopped finds a short queue when it goes on. Lost DATA is not repeated.
 *
 * In a bucket with reports senders name units that must arrive, in END: a receiver that lacks one puts it together from
 * PARITY, or asks for it by NACK until it is there or the deadline has passed: for little of it twice in a row, so that
 * what is sent again is sent twice, and seldom lost for another round trip. With READY 1 it says which units it did not get.
 * END and that READY come in as many parts as they need. A receiver may do without some of what must arrive: if parity
 * leaves no more missing than it tolerates, that is lost; else it asks for all of it.
 *
 * All state belongs to the holder of `lock`, which is the thread but for short calls. Only `over` and `unsent` of an
 * exchange and `failed` of a channel are also read under `told`, on which callers wait.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <endian.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/udp.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include <linux/errqueue.h> /* after time.h */

#ifndef UDP_SEGMENT
#define UDP_SEGMENT 103
#endif
#ifndef UDP_GRO
#define UDP_GRO 104
#endif
#ifndef SO_RCVBUFFORCE
#define SO_RCVBUFFORCE 33
#endif
#ifndef SO_SNDBUFFORCE
#define SO_SNDBUFFORCE 32
#endif
#ifndef SO_MAX_PACING_RATE
#define SO_MAX_PACING_RATE 47
#endif

#define API __attribute__((visibility("default")))

typedef int64_t ns;
#define US ((ns)1000)
#define MS ((ns)1000000)
#define SECOND ((ns)1000000000)
#define NEVER INT64_MAX

enum { DATA = 1, END, READY, REPORT, ALIVE, PROBE, PARITY, NACK, ASK };
enum { VERSION = 2, HEADER = 28, TAG = 16, REPORT_BYTES = 40, PHASES = 2 };
enum { LARGEST = 65507, SEGMENTS = 64, BATCH_BYTES = 65000, RECEIVE = 32, RECEIVE_BYTES = 65536 };
enum { AHEAD = 8, CONTROLS = 8192, FORCED = 4, REPEATS = 12, REPLIES = 64 /* in a millisecond, to a rank */ };
enum { REPORTS = 4, RESENDS = 4096, AGAIN = 2 /* the tag of what is sent again */ };
enum { SILENT = 1, REFUSED, LEFT, DEAF }; /* why a channel failed */
enum { DEAF_STEPS = 10, DEAF_UNITS = 100 };
enum { LEAST_REPLAY = 128, MOST_REPLAY = 2048 }; /* words of 64 numbers */
#define ALL UINT32_MAX /* in END, in the place of a list: every unit must arrive */
#define JUMP ((uint64_t)1 << 20)    /* numbers that a flow cannot skip: no window is so large */
#define SLOWEST SECOND              /* between repetitions of one control datagram */
#define BELIEVED (3 * SECOND)       /* of silence: then a host that refuses datagrams is believed */
#define AT_LEAST_EVERY (10 * MS)    /* timers, however much comes in */

static ns clock_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * SECOND + t.tv_nsec;
}

static ns least(ns a, ns b) { return a < b ? a : b; }
static ns greatest(ns a, ns b) { return a > b ? a : b; }

static uint16_t get16(const uint8_t *p) { uint16_t v; memcpy(&v, p, 2); return le16toh(v); }
static uint32_t get32(const uint8_t *p) { uint32_t v; memcpy(&v, p, 4); return le32toh(v); }
static uint64_t get64(const uint8_t *p) { uint64_t v; memcpy(&v, p, 8); return le64toh(v); }
static void put16(uint8_t *p, uint16_t v) { v = htole16(v); memcpy(p, &v, 2); }
static void put32(uint8_t *p, uint32_t v) { v = htole32(v); memcpy(p, &v, 4); }
static void put64(uint8_t *p, uint64_t v) { v = htole64(v); memcpy(p, &v, 8); }

/* ---- Rate: how fast one destination may be sent to. The tests have a model of it in Python. ---- */

struct rate {
    double rate, floor, ceiling;
    double foreign; /* the share that is lost whatever we do */
    double recent[8], greatest;
    ns rtt_min, rtt_slot[2], rtt_slot_at;
    int fixed, starting, known, begun;
    unsigned recent_next;
    ns stepped_at;
    uint64_t datagrams, bytes, top; /* of the last report */
    uint32_t clock;
    double span, span_bytes; /* of this interval: ns and bytes, without gaps */
    uint64_t numbers, arrived;
    ns least;
};

#define INTERVAL (4 * MS)
#define GAP_US 8000u
#define ENOUGH 128 /* datagrams that say something about a share of a tenth */

static void rate_init(struct rate *r, double floor, double ceiling, int fixed)
{
    memset(r, 0, sizeof *r);
    r->floor = floor < ceiling ? floor : ceiling;
    r->ceiling = ceiling;
    r->fixed = fixed;
    r->rate = fixed ? ceiling : r->floor;
    r->foreign = 0.3;
    r->starting = 1;
    r->rtt_slot[0] = r->rtt_slot[1] = r->least = NEVER;
}

static void rate_set(struct rate *r, double rate)
{
    r->rate = rate < r->floor ? r->floor : rate > r->ceiling ? r->ceiling : rate;
}

/* The least of the last 5 to 10 seconds in which there were samples. */
static void rate_sample(struct rate *r, ns now, ns rtt)
{
    if (rtt < 1)
        rtt = 1;
    if (!r->known) {
        r->rtt_slot_at = now;
    } else if (now - r->rtt_slot_at >= 5 * SECOND) {
        r->rtt_slot[1] = r->rtt_slot[0];
        r->rtt_slot[0] = NEVER;
        r->rtt_slot_at = now;
    }
    r->rtt_slot[0] = least(r->rtt_slot[0], rtt);
    r->rtt_min = least(r->rtt_slot[0], r->rtt_slot[1]);
    r->least = least(r->least, rtt);
    if (!r->known && !r->fixed) /* 256 KiB in the first round trip */
        rate_set(r, 262144.0 * 1e9 / (double)r->rtt_min);
    r->known = 1;
}

static void rate_close_interval(struct rate *r, ns now)
{
    double lost = r->numbers ? 1.0 - (double)r->arrived / (double)r->numbers : 0.0;
    if (lost < 0.0)
        lost = 0.0;
    r->foreign = lost < r->foreign ? lost : r->foreign + 0.02 * (lost - r->foreign);
    double delivered = r->span_bytes * 1e9 / r->span;
    r->recent[r->recent_next++ % 8] = delivered / (1.0 - r->foreign);
    r->greatest = 0.0;
    for (int i = 0; i < 8; i++)
        if (r->recent[i] > r->greatest)
            r->greatest = r->recent[i];
    int queued = r->least != NEVER && r->least - r->rtt_min > greatest(r->rtt_min / 8, 2 * MS);
    int full = queued || lost > r->foreign + 0.12;
    ns step = greatest(r->rtt_min, INTERVAL);
    if (r->starting) {
        if (full) {
            r->starting = 0;
            rate_set(r, r->greatest);
        } else if (now - r->stepped_at >= r->rtt_min && r->greatest > 0.6 * r->rate) {
            rate_set(r, 2.0 * r->rate);
            r->stepped_at = now;
        }
    } else if (full) {
        if (0.9 * r->greatest < r->rate)
            rate_set(r, 0.9 * r->greatest);
        r->stepped_at = now;
    } else {
        if (r->rate < 1.5 * r->greatest) { /* not without proof; from 16 MB/s on by a constant, so that flows get even */
            double share = (double)(now - r->stepped_at) / (double)step;
            double gain = 0.15 * (share < 1.0 ? share : 1.0);
            double slower = 32e6 / (r->rate + 16e6);
            rate_set(r, r->rate * (1.0 + gain * (slower < 1.0 ? slower : 1.0)));
        }
        r->stepped_at = now;
    }
    r->span = r->span_bytes = 0.0;
    r->numbers = r->arrived = 0;
    r->least = NEVER;
}

/* A REPORT: what has arrived, the highest number + 1, and the receiver's clock (µs) when that came. */
static void rate_report(struct rate *r, ns now, uint64_t datagrams, uint64_t bytes, uint64_t top, uint32_t clock)
{
    if (r->begun && (datagrams <= r->datagrams || top < r->top))
        return;
    if (r->begun) {
        uint32_t passed = clock - r->clock;
        if (passed <= GAP_US) {
            r->span += (double)passed * 1e3;
            r->span_bytes += (double)(bytes - r->bytes);
        }
        r->numbers += top - r->top;
        r->arrived += datagrams - r->datagrams;
    }
    r->begun = 1;
    r->datagrams = datagrams;
    r->bytes = bytes;
    r->top = top;
    r->clock = clock;
    if (!r->fixed && r->known && r->numbers >= ENOUGH && r->span >= (double)greatest(r->rtt_min / 4, INTERVAL))
        rate_close_interval(r, now);
}

/* ---- AES-128-GCM of libcrypto, loaded when a cipher is asked for ---- */

static struct {
    void *(*cipher_new)(void);
    void (*cipher_free)(void *);
    const void *(*aes_128_gcm)(void);
    int (*control)(void *, int, int, void *);
    int (*seal_init)(void *, const void *, void *, const uint8_t *, const uint8_t *);
    int (*seal_update)(void *, uint8_t *, int *, const uint8_t *, int);
    int (*seal_final)(void *, uint8_t *, int *);
    int (*open_init)(void *, const void *, void *, const uint8_t *, const uint8_t *);
    int (*open_update)(void *, uint8_t *, int *, const uint8_t *, int);
    int (*open_final)(void *, uint8_t *, int *);
} ssl;

API int ml_load_cipher(void)
{
    void *library = dlopen("libcrypto.so.3", RTLD_NOW | RTLD_LOCAL);
    if (!library)
        library = dlopen("libcrypto.so.1.1", RTLD_NOW | RTLD_LOCAL);
    if (!library)
        return -1;
    const struct { void *function; const char *name; } wanted[] = {
        {&ssl.cipher_new, "EVP_CIPHER_CTX_new"},      {&ssl.cipher_free, "EVP_CIPHER_CTX_free"},
        {&ssl.aes_128_gcm, "EVP_aes_128_gcm"},        {&ssl.control, "EVP_CIPHER_CTX_ctrl"},
        {&ssl.seal_init, "EVP_EncryptInit_ex"},       {&ssl.seal_update, "EVP_EncryptUpdate"},
        {&ssl.seal_final, "EVP_EncryptFinal_ex"},     {&ssl.open_init, "EVP_DecryptInit_ex"},
        {&ssl.open_update, "EVP_DecryptUpdate"},      {&ssl.open_final, "EVP_DecryptFinal_ex"},
    };
    for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++) {
        void *found = dlsym(library, wanted[i].name);
        if (!found)
            return -1;
        memcpy(wanted[i].function, &found, sizeof found);
    }
    return 0;
}

static void *cipher_new(const uint8_t *key, int sealing)
{
    void *cipher = ssl.cipher_new();
    int (*init)(void *, const void *, void *, const uint8_t *, const uint8_t *) = sealing ? ssl.seal_init : ssl.open_init;
    if (cipher && init(cipher, ssl.aes_128_gcm(), NULL, key, NULL) == 1)
        return cipher;
    if (cipher)
        ssl.cipher_free(cipher);
    return NULL;
}

/* The nonce: 4 zero bytes and the number, as it stands in the header. */
static int cipher_seal(void *cipher, uint8_t *header, const uint8_t *text, int size, uint8_t *out)
{
    uint8_t nonce[12] = {0};
    int n;
    memcpy(nonce + 4, header + 8, 8);
    return ssl.seal_init(cipher, NULL, NULL, NULL, nonce) == 1 && ssl.seal_update(cipher, NULL, &n, header, HEADER) == 1
        && (size == 0 || ssl.seal_update(cipher, out, &n, text, size) == 1) && ssl.seal_final(cipher, out + size, &n) == 1
        && ssl.control(cipher, 0x10, TAG, out + size) == 1;
}

static int cipher_open(void *cipher, const uint8_t *header, const uint8_t *text, int size, uint8_t *out)
{
    uint8_t nonce[12] = {0}, tag[TAG];
    int n;
    memcpy(nonce + 4, header + 8, 8);
    memcpy(tag, text + size, TAG);
    return ssl.open_init(cipher, NULL, NULL, NULL, nonce) == 1 && ssl.open_update(cipher, NULL, &n, header, HEADER) == 1
        && (size == 0 || ssl.open_update(cipher, out, &n, text, size) == 1)
        && ssl.control(cipher, 0x11, TAG, tag) == 1 && ssl.open_final(cipher, out + size, &n) == 1;
}

/* ---- State ---- */

#define ENGINE_COUNTERS(X) \
    X(datagrams_sent) X(bytes_sent) X(datagrams_received) X(bytes_received) X(malformed) X(foreign) \
    X(socket_overflow) X(send_blocked) X(send_failed) X(too_big) X(unreachable) X(early_bytes) X(early_most) \
    X(segmented) X(gathered)
#define MEMBER_COUNTERS(X) \
    X(sent) X(received) X(units) X(lost) X(late) X(duplicate) X(early) X(early_dropped) X(malformed) X(bad_tag) \
    X(repeated) X(by_deadline) X(ends) X(readies) X(asks) X(forced) X(asked) X(nacks) X(resent) X(parities) X(repaired)

#define FIELD(name) uint64_t name;
#define NAME(name) #name ","
struct engine_counters { ENGINE_COUNTERS(FIELD) };
struct member_counters { MEMBER_COUNTERS(FIELD) };

API const char *ml_engine_counter_names(void) { return ENGINE_COUNTERS(NAME); }
API const char *ml_member_counter_names(void) { return MEMBER_COUNTERS(NAME); }

struct stamp { ns at; uint64_t data; };

/* Between this process and another one, for all channels that have both. */
struct flow {
    struct flow *next;
    struct sockaddr_storage to;
    socklen_t to_size;
    uint64_t instance; /* of the other process */
    struct member *members, *speaker;
    /* Towards it. */
    uint64_t number, data, reported; /* next number; DATA sent; DATA sent up to the highest number that it has reported */
    struct stamp *sent;              /* when a number was sent; a ring of `mask` + 1 */
    uint64_t mask, reported_top;
    uint32_t window, limit; /* datagrams that it may not have reported; up to `limit` with what the network holds */
    ns free_at, force_at, force_wait;
    struct rate rate;
    /* From it. */
    uint64_t received, bytes, top, control_top; /* top: highest number + 1 */
    ns top_at, heard, refused_at;
    uint32_t unreported, threshold, report_count, refused;
    ns report_at;
    uint64_t *seen, seen_words; /* which of the last numbers came, a bit each; a ring */
};

struct dest {
    struct dest *next;
    struct exchange *x;
    const uint8_t *from;
    uint32_t rank, position;
    uint64_t eager; /* bytes sent without READY */
    uint8_t wanted, ready, sent, done;
    ns end_at, end_wait, ask_at, ask_wait;
    /* Of a bucket with reports: units that must arrive, and their bytes; what did not, a bit each, in parts. */
    uint32_t *must, musts, code, parities, parity, parts_heard;
    uint8_t *copies, *lost, *heard;
};

struct early {
    struct early *next;
    uint32_t unit, size;
    uint8_t bytes[];
};

struct source {
    uint8_t *to, *row; /* row: of `arrived`, or our own before the exchange is posted */
    struct early *early, *parity;
    uint32_t got;
    uint8_t expected, over, ended, own_row, full; /* full: a datagram of the bucket's length came */
    uint8_t twice;                                /* asked once, of two times in a row */
    ns ended_at, ready_at, ready_wait, told_at; /* told_at: when the first part of its END came; 0: not yet */
    uint32_t *must, musts, code, parts_told; /* what END says */
    uint8_t *told;
    ns nack_at, nack_wait;
    uint8_t *parities; /* which have come, a bit each; of so many there is room for bits */
    uint32_t parities_room;
    /* What must arrive: so many may be missing for good, unless they are asked for; what was missing before and after
     * repair; what was when it was last asked for. */
    uint32_t tolerance, raw, residual, asked;
    uint8_t judged, again;
    uint8_t *dropped; /* that it shall lose: units, then parities */
    uint32_t drops;
};

/* What a source lost in a step, a bit for each unit: it may ask again. */
struct report { uint32_t step; uint8_t known, *lost; };

struct bucket {
    uint64_t shard;
    uint32_t unit, units, entries; /* entries: of the order in which units are sent; more than units with copies */
    uint32_t *order;
    uint8_t *tags;
    uint32_t posted, sent; /* the last steps */
    uint8_t any_posted, any_sent;
    struct exchange *live;
    struct report *reports; /* [size][REPORTS], of a bucket with reports */
};

struct exchange {
    struct exchange *same, *next, *previous; /* of the bucket; of the engine */
    struct channel *channel;
    struct bucket *bucket;
    uint32_t step;
    uint16_t number;
    uint8_t phase, posted, sending, over;
    uint8_t rows_gone; /* it was over, and nobody had a handle: a later one is not of who owns what `row` points to */
    int handles;
    uint32_t open, unsent, unacknowledged; /* sources not over; destinations not sent to, or that have not said done */
    ns posted_at, over_at, deadline, due;
    uint64_t order; /* in which exchanges are sent */
    uint32_t in, out; /* units of a message that comes, and that goes: all of the bucket, or the first of them */
    uint64_t in_bytes;
    size_t charge; /* of the early pool */
    struct source *sources;
    struct dest *dests;
};

struct resend { struct dest *dest; uint32_t position; };

struct member {
    struct flow *flow;
    struct member *next; /* of the flow */
    struct channel *channel;
    uint32_t rank;
    void *seal, *open;
    struct dest *queue[PHASES], *last[PHASES];
    uint64_t eager, eager_limit; /* bytes sent without READY */
    uint32_t posted[PHASES];     /* the latest step that it is known to have posted, or the first that it was sent */
    uint8_t any_posted[PHASES];
    uint8_t probed, confirmed, gone;
    uint32_t replies;
    ns probe_at, probe_until, replies_at;
    /* Since the last datagram of the channel's full length: steps, and their units, of which none came although their end was
     * known, and when the last of them was over. */
    uint32_t deaf_steps, deaf_units;
    ns deaf_at;
    ns full_at; /* when the last datagram of its bucket's length came */
    struct resend *resend; /* a ring of RESENDS */
    uint32_t resend_first, resend_last;
    struct member_counters count;
};

struct channel {
    struct engine *engine;
    struct channel *next;
    uint32_t id, rank, size, buckets[PHASES], cursor;
    uint32_t full; /* bytes of the largest unit */
    struct bucket *bucket[PHASES];
    struct member *members;
    uint32_t newest[PHASES], probe_bytes;
    uint8_t any[PHASES], open, closing;
    int failed, culprit;
    uint32_t unacknowledged; /* over its exchanges */
    size_t early, early_limit;
    ns free_at;
};

struct control {
    struct channel *channel;
    uint32_t rank, step, index;
    uint16_t bucket;
    uint8_t type, phase;
};

struct settings {
    double rate;
    ns reorder, peer_timeout; /* reorder < 0: by the round trip */
    uint64_t eager, memory, instance;
    uint32_t packet;
    int cipher, delay_based;
};

struct engine {
    pthread_mutex_t lock, tell;
    pthread_cond_t told, given;
    atomic_int waiting;
    struct settings set;
    int socket, wake, gso, running, giving;
    atomic_int stop, asleep;
    pthread_t thread;
    struct flow *flows;
    struct channel *channels, *cursor;
    struct exchange *live;
    struct control *controls;
    uint32_t control_first, control_last;
    ns free_at, alive_at, timers_at, blocked_until;
    uint32_t wire_overhead, overflow_seen;
    uint32_t window, limit; /* DATA that this process's buffer holds for each other one: with ease, and at most */
    size_t early;
    uint64_t orders;
    struct engine_counters count;
    uint8_t scratch[LARGEST + 1];
    uint8_t batch[BATCH_BYTES + LARGEST];
    uint8_t *receive;
};

struct output { struct sockaddr_storage to; uint32_t to_size, bytes, segment; };

static uint32_t tag_bytes(const struct engine *e) { return e->set.cipher ? TAG : 0; }
static uint32_t unit_bytes(const struct bucket *b, uint32_t unit)
{
    uint64_t rest = b->shard - (uint64_t)unit * b->unit;
    return rest < b->unit ? (uint32_t)rest : b->unit;
}

/* Of a message that comes. */
static uint32_t in_unit_bytes(const struct exchange *x, uint32_t unit)
{
    uint64_t start = (uint64_t)unit * x->bucket->unit, rest = x->in_bytes > start ? x->in_bytes - start : 0;
    return rest < x->bucket->unit ? (uint32_t)rest : x->bucket->unit;
}

/* Units of a message of so many bytes; 0: of all of the bucket. */
static uint32_t units_of(const struct bucket *b, uint64_t length)
{
    return length ? (uint32_t)((length + b->unit - 1) / b->unit) : b->units;
}

/* ---- Units that must arrive, and reports. The code is that of coding.py. ---- */

static uint32_t parts_of(uint32_t count, uint32_t room) { return count ? (count + room - 1) / room : 1; }
static uint32_t list_room(const struct engine *e) { return e->set.packet / 4 - 2; }
static uint32_t bits_room(const struct engine *e) { return e->set.packet * 8; }
static uint32_t bits_bytes(const struct engine *e, const struct bucket *b, uint32_t part)
{
    uint32_t rest = b->units - part * bits_room(e), bits = rest < bits_room(e) ? rest : bits_room(e);
    return (bits + 7) / 8;
}
static void end_said(struct engine *e, struct member *m, const struct dest *d);

/* `code`: block << 16 | parities of a block. */
static uint32_t last_parities(uint32_t count, uint32_t code)
{
    uint32_t block = code >> 16, rest = count % block, parities = ((code & 0xffff) * rest + block - 1) / block;
    return parities ? parities : 1;
}
static uint32_t parities_of(uint32_t count, uint32_t code)
{
    if (!(code & 0xffff) || !count)
        return 0;
    uint32_t block = code >> 16;
    return count / block * (code & 0xffff) + (count % block ? last_parities(count, code) : 0);
}
/* Of parity `index`: its first packet, the distance to the next one, and the end of its block. More parities than packets
 * repeat those before them. */
static void group_of(uint32_t index, uint32_t count, uint32_t code, uint32_t *first, uint32_t *step, uint32_t *end)
{
    uint32_t block = code >> 16, parities = code & 0xffff, number = least(index / parities, count / block), size = block;
    *step = parities;
    if (number == count / block) {
        *step = last_parities(count, code);
        size = count % block;
    }
    *step = least(*step, size);
    *first = number * block + (index - number * parities) % *step;
    *end = number * block + size;
}

static struct report *report_of(const struct bucket *b, uint32_t rank, uint32_t step)
{
    struct report *r = &b->reports[rank * REPORTS + step % REPORTS];
    return r->known && r->step == step ? r : NULL;
}

static ns round_trip(const struct flow *f) { return f->rate.known ? f->rate.rtt_min : 10 * MS; }
static ns reorder_window(const struct engine *e, const struct flow *f)
{
    return e->set.reorder >= 0 ? e->set.reorder : greatest(MS, round_trip(f) / 8);
}
static void due(struct engine *e, ns at) { e->timers_at = least(e->timers_at, at); }
static void exchange_due(struct exchange *x, ns at)
{
    x->due = least(x->due, at);
    due(x->channel->engine, at);
}

static void control(struct engine *e, struct member *m, int type, const struct exchange *x, uint32_t index)
{
    if (e->control_last - e->control_first == CONTROLS)
        return; /* as if it were lost */
    struct control *c = &e->controls[e->control_last++ % CONTROLS];
    *c = (struct control){.channel = m->channel, .rank = m->rank, .type = (uint8_t)type, .index = index};
    if (x) {
        c->step = x->step;
        c->bucket = x->number;
        c->phase = x->phase;
    }
}

/* ---- Exchanges ---- */

static struct exchange *find(struct channel *c, int phase, uint32_t step, uint32_t bucket)
{
    for (struct exchange *x = c->bucket[phase][bucket].live; x; x = x->same)
        if (x->step == step)
            return x;
    return NULL;
}

static int early_room(struct channel *c, size_t size)
{
    struct engine *e = c->engine;
    return c->early + size <= c->early_limit && e->early + size <= e->set.memory;
}

static void early_charge(struct exchange *x, size_t size)
{
    struct engine *e = x->channel->engine;
    x->charge += size;
    x->channel->early += size;
    e->early += size;
    e->count.early_bytes = e->early;
    if (e->early > e->count.early_most)
        e->count.early_most = e->early;
}

static void early_release(struct exchange *x)
{
    struct engine *e = x->channel->engine;
    x->channel->early -= x->charge;
    e->early -= x->charge;
    e->count.early_bytes = e->early;
    x->charge = 0;
}

/* `early`: a peer's datagram wants it, so that it counts as memory that peers may take. */
static struct exchange *exchange_new(struct channel *c, int phase, uint32_t step, uint32_t bucket, int early)
{
    struct engine *e = c->engine;
    size_t size = sizeof(struct exchange) + c->size * (sizeof(struct source) + sizeof(struct dest));
    if (early && !early_room(c, size))
        return NULL;
    struct exchange *x = calloc(1, size);
    if (!x)
        return NULL;
    x->sources = (struct source *)(x + 1);
    x->dests = (struct dest *)(x->sources + c->size);
    x->channel = c;
    x->bucket = &c->bucket[phase][bucket];
    x->step = step;
    x->number = (uint16_t)bucket;
    x->phase = (uint8_t)phase;
    x->due = NEVER;
    x->in = x->out = x->bucket->units;
    x->in_bytes = x->bucket->shard;
    x->same = x->bucket->live;
    x->bucket->live = x;
    x->next = e->live;
    if (e->live)
        e->live->previous = x;
    e->live = x;
    for (uint32_t i = 0; i < c->size; i++) {
        x->dests[i].x = x;
        x->dests[i].rank = i;
        x->sources[i].ready_at = NEVER;
        x->dests[i].end_at = x->dests[i].ask_at = NEVER;
    }
    if (early)
        early_charge(x, size);
    return x;
}

static void chunks_free(struct early **list)
{
    while (*list) {
        struct early *chunk = *list;
        *list = chunk->next;
        free(chunk);
    }
}

/* Of what must arrive. */
static void musts_forget(struct source *s)
{
    chunks_free(&s->parity);
    free(s->must);
    free(s->told);
    free(s->parities);
    free(s->dropped);
    s->must = NULL;
    s->told = s->parities = s->dropped = NULL;
    s->musts = s->drops = s->parities_room = 0;
}

static void source_forget(struct source *s)
{
    chunks_free(&s->early);
    musts_forget(s);
    if (s->own_row)
        free(s->row);
    s->row = NULL;
    s->own_row = 0;
}

/* Nothing of it is sent again. */
static void dest_forget(struct dest *d)
{
    struct member *m = &d->x->channel->members[d->rank];
    uint32_t kept = m->resend_first;
    for (uint32_t k = m->resend_first; k != m->resend_last; k++)
        if (m->resend[k % RESENDS].dest != d)
            m->resend[kept++ % RESENDS] = m->resend[k % RESENDS];
    m->resend_last = kept;
    free(d->must);
    free(d->copies);
    d->must = NULL;
    d->copies = NULL;
    d->musts = d->parities = 0;
}

static void exchange_free(struct exchange *x)
{
    struct engine *e = x->channel->engine;
    for (uint32_t i = 0; i < x->channel->size; i++) {
        source_forget(&x->sources[i]);
        dest_forget(&x->dests[i]);
        free(x->dests[i].lost);
        free(x->dests[i].heard);
    }
    struct exchange **link = &x->bucket->live;
    while (*link != x)
        link = &(*link)->same;
    *link = x->same;
    if (x->previous)
        x->previous->next = x->next;
    else
        e->live = x->next;
    if (x->next)
        x->next->previous = x->previous;
    early_release(x);
    free(x);
}

/* One that only received or only sent stays until a later step of its bucket, for the other half may follow. */
static void exchange_settle(struct exchange *x)
{
    const struct bucket *b = x->bucket;
    int busy = x->handles || (x->posted && !x->over) || (x->sending && x->unacknowledged);
    int whole = x->posted && x->sending;
    int passed = (b->any_posted && (int32_t)(b->posted - x->step) > 0) || (b->any_sent && (int32_t)(b->sent - x->step) > 0);
    if (!busy && (whole || passed))
        exchange_free(x);
}

/* After a post or send: what peers began and nobody here will ever join. */
static void forget_passed(struct channel *c, int phase, struct bucket *b)
{
    for (struct exchange *x = b->live, *same; x; x = same) {
        same = x->same;
        exchange_settle(x);
    }
    if (!c->early)
        return;
    for (struct exchange *x = c->engine->live, *next; x; x = next) {
        next = x->next;
        if (x->channel == c && x->phase == phase && !x->posted && !x->sending && !x->handles
            && (int32_t)(x->step - c->newest[phase]) > AHEAD)
            exchange_free(x);
    }
}

static void newest(struct channel *c, int phase, uint32_t step)
{
    if (!c->any[phase] || (int32_t)(step - c->newest[phase]) > 0)
        c->newest[phase] = step;
    c->any[phase] = 1;
}

/* A peer's exchange: whether this rank has come to it, or left it out. */
static int passed(const struct channel *c, const struct bucket *b, uint32_t step, int to_receive)
{
    int any = to_receive ? b->any_posted : b->any_sent;
    return c->closing || (any && (int32_t)(step - (to_receive ? b->posted : b->sent)) <= 0);
}

/* A peer's exchange that is not known here: whether it is still to come, and near enough to be kept. */
static int may_come(const struct channel *c, int phase, const struct bucket *b, uint32_t step, int to_receive)
{
    if (passed(c, b, step, to_receive))
        return 0;
    return !c->any[phase] || (int32_t)(step - c->newest[phase]) <= AHEAD;
}

static void exchange_over(struct exchange *x, ns now)
{
    struct engine *e = x->channel->engine;
    early_release(x);
    x->rows_gone = !x->handles;
    pthread_mutex_lock(&e->tell);
    x->over = 1;
    x->over_at = now;
    pthread_cond_broadcast(&e->told);
    pthread_mutex_unlock(&e->tell);
}

/* What source `i` lost can be asked for when the exchange is gone. */
static void report_lost(struct exchange *x, uint32_t i)
{
    const struct bucket *b = x->bucket;
    if (!b->reports)
        return;
    struct report *r = &b->reports[i * REPORTS + x->step % REPORTS];
    r->step = x->step;
    r->known = 1;
    memset(r->lost, 0, (b->units + 7) / 8);
    for (uint32_t unit = 0; unit < b->units; unit++)
        r->lost[unit / 8] |= (uint8_t)(!x->sources[i].row[unit] << unit % 8);
}

/* READY 1: all of its parts, or that nothing is known. */
static void done_said(struct member *m, int phase, uint32_t step, uint32_t bucket)
{
    struct engine *e = m->channel->engine;
    const struct bucket *b = &m->channel->bucket[phase][bucket];
    struct exchange x = {.step = step, .number = (uint16_t)bucket, .phase = (uint8_t)phase};
    uint32_t parts = b->reports && report_of(b, m->rank, step) ? parts_of(b->units, bits_room(e)) : 1;
    for (uint32_t part = 0; part < parts; part++)
        control(e, m, READY, &x, 1 + part);
}

static void channel_fail(struct channel *c, uint32_t culprit, int reason);

/* Its end came and nothing of full length: by chance, or since no such datagram passes any more. Exchanges that were under way
 * together count once, for one outage takes them all. */
static void count_deaf(struct exchange *x, uint32_t i, ns now)
{
    const struct source *s = &x->sources[i];
    struct member *m = &x->channel->members[i];
    if (!s->ended || s->full || x->bucket->unit < x->channel->full || x->in_bytes < x->bucket->unit)
        return;
    m->deaf_units += (uint32_t)(x->in_bytes / x->bucket->unit);
    m->deaf_steps += !m->deaf_steps || x->posted_at >= m->deaf_at;
    m->deaf_at = now;
    if (m->deaf_steps >= DEAF_STEPS && m->deaf_units >= DEAF_UNITS)
        channel_fail(x->channel, i, DEAF);
}

static void source_over(struct exchange *x, uint32_t i, ns now)
{
    struct source *s = &x->sources[i];
    struct member *m = &x->channel->members[i];
    s->over = 1;
    count_deaf(x, i, now);
    s->ready_at = NEVER;
    m->count.units += x->in;
    m->count.lost += x->bucket->units - s->got;
    musts_forget(s);
    report_lost(x, i);
    done_said(m, x->phase, x->step, x->number);
    if (--x->open == 0)
        exchange_over(x, now);
}

static ns nack_base(const struct flow *f) { return greatest(3 * round_trip(f) / 2, 5 * MS); }
static ns ready_base(const struct flow *f) { return greatest(round_trip(f) / 2, 5 * MS); }

/* `place`: a unit, or the units of a message and a parity. */
static int shall_lose(const struct source *s, uint32_t place) { return place < s->drops && s->dropped[place]; }

static void unit_arrived(struct exchange *x, uint32_t i, uint32_t unit, const uint8_t *bytes, uint32_t size)
{
    struct source *s = &x->sources[i];
    uint32_t room = in_unit_bytes(x, unit); /* the last unit of a message that does not fill its bucket is filled up */
    memcpy(s->to + (uint64_t)unit * x->bucket->unit, bytes, size < room ? size : room);
    s->row[unit] = 1;
    s->got++;
}

static void channel_fail(struct channel *c, uint32_t culprit, int reason)
{
    struct engine *e = c->engine;
    if (c->failed || !c->open)
        return;
    for (uint32_t i = 0; i < c->size; i++)
        for (int phase = 0; phase < PHASES; phase++)
            c->members[i].queue[phase] = c->members[i].last[phase] = NULL; /* nothing is read or written any more */
    for (uint32_t i = 0; i < c->size; i++)
        c->members[i].resend_first = c->members[i].resend_last;
    pthread_mutex_lock(&e->tell);
    c->culprit = (int)culprit;
    c->failed = reason;
    pthread_cond_broadcast(&e->told);
    pthread_mutex_unlock(&e->tell);
}

/* Bytes of a message, if not all of the bucket; what a receiver tolerates of each source, and what it shall lose. */
struct terms { uint64_t length; uint32_t tolerance, drops; const uint8_t *dropped; };

static void parities_drop(struct source *s, uint32_t units)
{
    for (struct early **link = &s->parity; *link;) {
        struct early *chunk = *link;
        if (shall_lose(s, units + chunk->unit)) {
            *link = chunk->next;
            free(chunk);
        } else {
            link = &chunk->next;
        }
    }
}

static int post(struct channel *c, int phase, uint32_t step, uint32_t bucket, uint8_t *const *to, uint8_t *arrived,
                ns deadline, const struct terms *terms, ns now, struct exchange **handle)
{
    struct bucket *b = &c->bucket[phase][bucket];
    if (c->failed)
        return -1;
    if (b->any_posted && (int32_t)(step - b->posted) <= 0)
        return -2;
    struct exchange *x = find(c, phase, step, bucket);
    if (!x && !(x = exchange_new(c, phase, step, bucket, 0)))
        return -3;
    b->posted = step;
    b->any_posted = 1;
    newest(c, phase, step);
    x->handles++;
    x->posted = 1;
    x->in = units_of(b, terms->length);
    x->in_bytes = terms->length ? terms->length : b->shard;
    x->posted_at = now;
    x->deadline = deadline > 0 ? now + deadline : NEVER;
    exchange_due(x, x->deadline);
    x->open = 1; /* until all are posted */
    for (uint32_t i = 0; i < c->size; i++) {
        struct source *s = &x->sources[i];
        struct early *chunk = s->early;
        uint8_t *row = arrived + (uint64_t)i * b->units;
        s->early = NULL;
        if (s->own_row)
            free(s->row);
        s->own_row = 0;
        s->got = 0;
        s->row = row;
        if (i == c->rank)
            memset(row, 1, b->units);
        s->expected = i != c->rank && to[i] && c->members[i].flow;
        s->to = to[i];
        x->open += s->expected;
        s->tolerance = terms->tolerance;
        if (s->expected) { /* as if what is no part of the message had come */
            memset(row + x->in, 1, b->units - x->in);
            s->got = b->units - x->in;
        }
        if (s->expected && terms->drops && (s->dropped = malloc(terms->drops))) {
            memcpy(s->dropped, terms->dropped, terms->drops);
            s->drops = terms->drops;
            parities_drop(s, x->in);
        }
        while (chunk) {
            struct early *next = chunk->next;
            if (s->expected && chunk->unit < x->in && !shall_lose(s, chunk->unit))
                unit_arrived(x, i, chunk->unit, chunk->bytes, chunk->size);
            free(chunk);
            chunk = next;
        }
        if (s->expected && s->got == b->units)
            source_over(x, i, now);
        else if (s->expected && s->ended)
            exchange_due(x, s->ended_at + reorder_window(c->engine, c->members[i].flow));
        else if (s->expected && c->members[i].gone)
            channel_fail(c, i, LEFT);
        else if (s->expected) {
            control(c->engine, &c->members[i], READY, x, 0);
            s->ready_wait = ready_base(c->members[i].flow);
            s->ready_at = now + s->ready_wait;
            exchange_due(x, s->ready_at);
        }
    }
    early_release(x);
    if (--x->open == 0)
        exchange_over(x, now);
    *handle = x;
    forget_passed(c, phase, b);
    return 0;
}

/* What each destination must get, and a copy of it: sources may change when all has been sent once. */
struct musts { uint32_t count, *list; uint8_t *copies; };

static void musts_free(struct musts *musts, uint32_t size)
{
    for (uint32_t i = 0; musts && i < size; i++) {
        free(musts[i].list);
        free(musts[i].copies);
    }
    free(musts);
}

static struct musts *musts_new(const struct channel *c, const struct bucket *b, const uint8_t *const *from, const uint8_t *must,
                               uint64_t length)
{
    struct musts *result = calloc(c->size, sizeof *result);
    uint32_t units = units_of(b, length);
    uint64_t end = length ? length : b->shard;
    for (uint32_t i = 0; result && i < c->size; i++) {
        const uint8_t *row = must + (uint64_t)i * b->units;
        uint32_t count = 0;
        for (uint32_t unit = 0; from[i] && unit < units; unit++)
            count += row[unit] != 0;
        if (!count)
            continue;
        result[i].list = malloc(count * sizeof *result[i].list);
        result[i].copies = calloc(count, b->unit);
        if (!result[i].list || !result[i].copies) {
            musts_free(result, c->size);
            return NULL;
        }
        for (uint32_t unit = 0; unit < units; unit++) {
            if (!row[unit])
                continue;
            uint64_t start = (uint64_t)unit * b->unit, rest = end - start;
            memcpy(result[i].copies + (uint64_t)result[i].count * b->unit, from[i] + start, rest < b->unit ? rest : b->unit);
            result[i].list[result[i].count++] = unit;
        }
    }
    return result;
}

static int send_pieces(struct channel *c, int phase, uint32_t step, uint32_t bucket, const uint8_t *const *from,
                       struct musts *musts, uint32_t code, uint32_t units, struct exchange **handle)
{
    struct bucket *b = &c->bucket[phase][bucket];
    if (c->failed)
        return -1;
    if (b->any_sent && (int32_t)(step - b->sent) <= 0)
        return -2;
    struct exchange *x = find(c, phase, step, bucket);
    if (!x && !(x = exchange_new(c, phase, step, bucket, 0)))
        return -3;
    b->sent = step;
    b->any_sent = 1;
    newest(c, phase, step);
    pthread_mutex_lock(&c->engine->tell);
    x->sending = 1;
    x->out = units;
    x->order = c->engine->orders++;
    for (uint32_t k = 1; k < c->size; k++) {
        uint32_t i = (c->rank + k) % c->size;
        struct dest *d = &x->dests[i];
        struct member *m = &c->members[i];
        if (!from[i] || !m->flow || d->done)
            continue;
        d->from = from[i];
        d->wanted = 1;
        if (musts) {
            d->must = musts[i].list;
            d->copies = musts[i].copies;
            d->musts = musts[i].count;
            musts[i].list = NULL;
            musts[i].copies = NULL;
            d->code = code;
            d->parities = parities_of(d->musts, code);
            if (d->musts == units)
                d->from = d->copies; /* so that the caller's memory is not needed any more */
        }
        x->unsent++;
        x->unacknowledged++;
        c->unacknowledged++;
        if (m->last[phase])
            m->last[phase]->next = d;
        else
            m->queue[phase] = d;
        m->last[phase] = d;
    }
    pthread_cond_broadcast(&c->engine->told);
    pthread_mutex_unlock(&c->engine->tell);
    c->engine->blocked_until = 0;
    x->handles++;
    *handle = x;
    forget_passed(c, phase, b);
    return 0;
}

/* Takes it from the queue: everything went out, or the receiver has finished without the rest. */
static void dest_sent(struct dest *d, ns now)
{
    struct exchange *x = d->x;
    struct channel *c = x->channel;
    struct engine *e = c->engine;
    struct member *m = &c->members[d->rank];
    struct dest **link = &m->queue[x->phase], *before = NULL;
    while (*link != d) {
        before = *link;
        link = &(*link)->next;
    }
    *link = d->next;
    if (m->last[x->phase] == d)
        m->last[x->phase] = before;
    d->sent = 1;
    d->end_wait = MS / 2;
    d->end_at = now + d->end_wait;
    exchange_due(x, d->end_at);
    pthread_mutex_lock(&e->tell);
    if (--x->unsent == 0)
        pthread_cond_broadcast(&e->told);
    pthread_mutex_unlock(&e->tell);
}

static void has_posted(struct member *m, const struct exchange *x)
{
    if (!m->any_posted[x->phase] || (int32_t)(x->step - m->posted[x->phase]) > 0)
        m->posted[x->phase] = x->step;
    m->any_posted[x->phase] = 1;
}

static void dest_ready(struct dest *d)
{
    struct member *m = &d->x->channel->members[d->rank];
    if (!d->ready)
        m->eager -= d->eager;
    has_posted(m, d->x);
    d->ready = 1;
    d->ask_at = NEVER;
    d->x->channel->engine->blocked_until = 0;
}

static void dest_done(struct dest *d, ns now)
{
    struct exchange *x = d->x;
    struct channel *c = x->channel;
    if (d->done || c->failed) /* a failed channel has no queues */
        return;
    dest_ready(d);
    d->done = 1;
    dest_forget(d);
    if (!d->wanted)
        return;
    if (!d->sent)
        dest_sent(d, now);
    d->end_at = NEVER;
    pthread_mutex_lock(&c->engine->tell);
    x->unacknowledged--;
    if (--c->unacknowledged == 0)
        pthread_cond_broadcast(&c->engine->told);
    pthread_mutex_unlock(&c->engine->tell);
    exchange_settle(x);
}

/* ---- What arrives ---- */

static int same_address(const struct sockaddr_storage *a, const struct sockaddr *b)
{
    if (a->ss_family != b->sa_family)
        return 0;
    if (b->sa_family == AF_INET) {
        const struct sockaddr_in *x = (const void *)a, *y = (const void *)b;
        return x->sin_port == y->sin_port && x->sin_addr.s_addr == y->sin_addr.s_addr;
    }
    const struct sockaddr_in6 *x = (const void *)a, *y = (const void *)b;
    return b->sa_family == AF_INET6 && x->sin6_port == y->sin6_port
        && !memcmp(&x->sin6_addr, &y->sin6_addr, sizeof x->sin6_addr);
}

/* What became of a datagram. */
enum { TAKEN, MALFORMED, FOREIGN, BAD_TAG, DUPLICATE, LATE, EARLY_KEPT, EARLY_DROPPED };

static void say_done(struct member *m, int phase, uint32_t step, uint32_t bucket, ns now)
{
    if (now >= m->replies_at) {
        m->replies_at = now + MS;
        m->replies = 0;
    }
    if (m->replies++ >= REPLIES)
        return;
    done_said(m, phase, step, bucket);
}

static int early_keep(struct exchange *x, struct member *m, uint32_t unit, const uint8_t *bytes, uint32_t size)
{
    struct source *s = &x->sources[m->rank];
    struct channel *c = x->channel;
    size_t charge = sizeof(struct early) + size + 16 + (s->row ? 0 : x->bucket->units);
    if (s->row && s->row[unit])
        return DUPLICATE;
    if (!early_room(c, charge))
        return EARLY_DROPPED;
    if (!s->row && !(s->row = calloc(1, x->bucket->units)))
        return EARLY_DROPPED;
    s->own_row = 1;
    struct early *chunk = malloc(sizeof *chunk + size);
    if (!chunk)
        return EARLY_DROPPED;
    early_charge(x, charge);
    chunk->unit = unit;
    chunk->size = size;
    memcpy(chunk->bytes, bytes, size);
    chunk->next = s->early;
    s->early = chunk;
    s->row[unit] = 1;
    s->got++;
    return EARLY_KEPT;
}

static int take_data(struct channel *c, struct member *m, int phase, uint32_t step, uint32_t bucket, uint32_t unit,
                     const uint8_t *bytes, uint32_t size, int copied, ns now)
{
    struct exchange *x = find(c, phase, step, bucket);
    if (!x) {
        if (!may_come(c, phase, &c->bucket[phase][bucket], step, 1)) {
            say_done(m, phase, step, bucket, now);
            m->count.late++;
            return LATE;
        }
        if (!(x = exchange_new(c, phase, step, bucket, 1))) {
            m->count.early_dropped++;
            return EARLY_DROPPED;
        }
    }
    struct source *s = &x->sources[m->rank];
    int verdict = TAKEN;
    s->full |= size == x->bucket->unit;
    if (!x->posted) {
        if (!may_come(c, phase, x->bucket, step, 1))
            verdict = LATE;
        else
            verdict = early_keep(x, m, unit, bytes, size);
    } else if (!s->expected) {
        verdict = LATE;
    } else if (s->over && x->rows_gone) {
        verdict = s->got == x->bucket->units ? DUPLICATE : LATE;
    } else if (s->row[unit]) {
        verdict = DUPLICATE;
    } else if (s->over) {
        verdict = LATE;
    } else if (copied != AGAIN && shall_lose(s, unit)) {
        verdict = TAKEN;
    } else {
        unit_arrived(x, m->rank, unit, bytes, size);
        if (!s->ended) {
            s->ready_wait = ready_base(m->flow);
            s->ready_at = now + s->ready_wait;
        } else if (s->musts) {
            /* It may have been the last that must arrive, or make parity useful. While more comes nothing is asked for. */
            exchange_due(x, s->musts < x->in ? now : now + MS);
            if (copied == AGAIN)
                s->nack_at = greatest(s->nack_at, now + greatest(round_trip(m->flow) / 4, 5 * MS));
        }
        if (s->got == x->bucket->units)
            source_over(x, m->rank, now);
    }
    if (x->posted && s->over && verdict != TAKEN)
        say_done(m, phase, step, bucket, now);
    m->count.early += verdict == EARLY_KEPT;
    m->count.late += verdict == LATE;
    m->count.early_dropped += verdict == EARLY_DROPPED;
    if (verdict == DUPLICATE && copied)
        m->count.repeated++;
    else
        m->count.duplicate += verdict == DUPLICATE;
    if (x->posted)
        exchange_settle(x);
    return verdict;
}

/* A part of the list of what must arrive; 1: that was the last one. */
static int end_part(struct exchange *x, struct source *s, uint32_t part, const uint8_t *p, uint32_t size)
{
    struct engine *e = x->channel->engine;
    const struct bucket *b = x->bucket;
    if (size < 8)
        return -1;
    uint32_t count = get32(p), code = get32(p + 4), room = list_room(e), all = count == ALL;
    uint32_t listed = all ? 0 : count, parts = parts_of(listed, room);
    uint32_t here = part < parts ? (listed - part * room < room ? listed - part * room : room) : 0;
    if (all)
        count = b->units;
    if (count > b->units || part >= parts || size != 8 + 4 * here || (code & 0xffff) > 255 || ((code & 0xffff) && !(code >> 16))
        || (s->told && (s->musts != count || s->code != code)))
        return -1;
    if (!s->told) {
        size_t charge = x->posted ? 0 : parts + (size_t)count * 4; /* of what waits here peers take no memory */
        if (charge && !early_room(x->channel, charge))
            return 0;
        s->told = calloc(1, parts);
        s->must = malloc((size_t)count * 4 + 1);
        if (!s->told || !s->must) {
            free(s->told);
            free(s->must);
            s->told = NULL;
            s->must = NULL;
            return 0;
        }
        early_charge(x, charge);
        s->musts = count;
        s->code = code;
        s->parts_told = 0;
        for (uint32_t k = 0; all && k < count; k++)
            s->must[k] = k;
    }
    if (!s->told[part]) {
        for (uint32_t k = 0; k < here; k++)
            s->must[part * room + k] = get32(p + 8 + 4 * k);
        s->told[part] = 1;
        s->parts_told++;
    }
    if (s->parts_told < parts)
        return 0;
    for (uint32_t k = 0; k < count; k++)
        if (s->must[k] >= b->units || (k && s->must[k] <= s->must[k - 1]))
            count = 0; /* no list of ours */
    s->musts = count;
    return 1;
}

static int take_end(struct channel *c, struct member *m, int phase, uint32_t step, uint32_t bucket, uint32_t part,
                    const uint8_t *payload, uint32_t size, ns now)
{
    struct exchange *x = find(c, phase, step, bucket);
    m->count.ends++;
    if (!x || !x->posted) {
        if (!may_come(c, phase, &c->bucket[phase][bucket], step, 1)) {
            say_done(m, phase, step, bucket, now);
            return LATE;
        }
        if (!x && !(x = exchange_new(c, phase, step, bucket, 1)))
            return EARLY_DROPPED; /* it comes again */
    }
    struct source *s = &x->sources[m->rank];
    if (x->posted && (s->over || !s->expected)) {
        say_done(m, phase, step, bucket, now);
        return DUPLICATE;
    }
    if (s->ended)
        return DUPLICATE;
    s->told_at = s->told_at ? s->told_at : now;
    if (x->bucket->reports) {
        int result = end_part(x, s, part, payload, size);
        if (result < 0) {
            m->count.malformed++;
            return MALFORMED;
        }
        if (!result)
            return TAKEN;
    }
    s->ended = 1;
    s->ended_at = now;
    s->ready_at = NEVER;
    s->nack_at = 0;
    s->twice = 0;
    s->nack_wait = nack_base(m->flow);
    if (x->posted)
        exchange_due(x, now + reorder_window(c->engine, m->flow));
    return TAKEN;
}

/* A part of what did not arrive; 1: that was the last one. */
static int reported(struct dest *d, uint32_t part, const uint8_t *payload, uint32_t size)
{
    struct engine *e = d->x->channel->engine;
    const struct bucket *b = d->x->bucket;
    uint32_t parts = parts_of(b->units, bits_room(e));
    if (!d->lost && (!(d->lost = malloc((b->units + 7) / 8)) || !(d->heard = calloc(1, parts)))) {
        free(d->lost);
        d->lost = NULL;
        return 1; /* as if nothing had arrived */
    }
    if (!d->heard[part]) {
        memcpy(d->lost + (uint64_t)part * e->set.packet, payload, size);
        d->heard[part] = 1;
        d->parts_heard++;
    }
    return d->parts_heard == parts;
}

/* `done`: it wants no more of this exchange; else it has posted it, and has not seen our END. */
static int take_ready(struct channel *c, struct member *m, int phase, uint32_t step, uint32_t bucket, uint32_t done,
                      const uint8_t *payload, uint32_t size, ns now)
{
    struct exchange *x = find(c, phase, step, bucket);
    m->count.readies++;
    if (!x) {
        if (!may_come(c, phase, &c->bucket[phase][bucket], step, 0))
            return LATE;
        if (!(x = exchange_new(c, phase, step, bucket, 1)))
            return EARLY_DROPPED;
    }
    struct dest *d = &x->dests[m->rank];
    if (done) {
        if (!d->wanted || d->done || !size || reported(d, done - 1, payload, size))
            dest_done(d, now);
        return TAKEN;
    }
    dest_ready(d);
    if (d->sent && !d->done)
        end_said(c->engine, m, d);
    return TAKEN;
}

/* It waits for our READY, which may have been lost. */
static int take_ask(struct channel *c, struct member *m, int phase, uint32_t step, uint32_t bucket, ns now)
{
    const struct exchange *x = find(c, phase, step, bucket);
    m->count.asks++;
    if (x && x->posted && x->sources[m->rank].expected && !x->sources[m->rank].over)
        control(c->engine, m, READY, x, 0);
    else if ((x && x->posted) || passed(c, &c->bucket[phase][bucket], step, 1)) /* one far ahead is still to come */
        say_done(m, phase, step, bucket, now);
    return TAKEN;
}

/* It lacks units that must arrive. */
static int take_nack(struct channel *c, struct member *m, int phase, uint32_t step, uint32_t bucket, uint32_t count,
                     const uint8_t *payload)
{
    struct exchange *x = find(c, phase, step, bucket);
    if (!x || !x->dests[m->rank].wanted || x->dests[m->rank].done || !m->resend)
        return LATE;
    struct dest *d = &x->dests[m->rank];
    m->count.nacks++;
    for (uint32_t k = 0; k < count; k++) {
        uint32_t unit = get32(payload + 4 * k), low = 0, high = d->musts;
        while (low < high) {
            uint32_t middle = (low + high) / 2;
            if (d->must[middle] < unit)
                low = middle + 1;
            else
                high = middle;
        }
        if (low < d->musts && d->must[low] == unit && m->resend_last - m->resend_first < RESENDS)
            m->resend[m->resend_last++ % RESENDS] = (struct resend){d, low};
    }
    c->engine->blocked_until = 0;
    return TAKEN;
}

static int take_parity(struct channel *c, struct member *m, int phase, uint32_t step, uint32_t bucket, uint32_t index,
                       const uint8_t *bytes, uint32_t size)
{
    struct exchange *x = find(c, phase, step, bucket);
    if (!x) {
        if (!may_come(c, phase, &c->bucket[phase][bucket], step, 1))
            return LATE;
        if (!(x = exchange_new(c, phase, step, bucket, 1)))
            return EARLY_DROPPED;
    }
    struct source *s = &x->sources[m->rank];
    s->full = 1;
    if (s->over || (x->posted && !s->expected))
        return LATE;
    if (index < s->parities_room && s->parities[index / 8] >> index % 8 & 1)
        return DUPLICATE;
    if (shall_lose(s, x->in + index))
        return TAKEN;
    /* Of what was asked for there are no more than it has units. */
    size_t known = s->parities_room / 8, wanted = known;
    if (index >= s->parities_room) /* with copies there are more of them than units */
        wanted = ((size_t)(index > x->bucket->units ? index : x->bucket->units) + 8) / 8;
    size_t charge = x->posted ? 0 : sizeof(struct early) + size + wanted - known;
    struct early *chunk = early_room(c, charge) ? malloc(sizeof *chunk + size) : NULL;
    uint8_t *bits = chunk && wanted > known ? realloc(s->parities, wanted) : s->parities;
    if (!chunk || !bits) {
        free(chunk);
        return EARLY_DROPPED;
    }
    memset(bits + known, 0, wanted - known);
    s->parities = bits;
    s->parities_room = (uint32_t)(8 * wanted);
    early_charge(x, charge);
    s->parities[index / 8] |= (uint8_t)(1 << index % 8);
    chunk->unit = index;
    chunk->size = size;
    memcpy(chunk->bytes, bytes, size);
    chunk->next = s->parity;
    s->parity = chunk;
    return TAKEN;
}

static uint32_t musts_missing(const struct source *s)
{
    uint32_t missing = 0;
    for (uint32_t k = 0; k < s->musts; k++)
        missing += !s->row[s->must[k]];
    return missing;
}

/* Put together what one parity of its group makes up for. */
static void repair(struct exchange *x, uint32_t i)
{
    struct source *s = &x->sources[i];
    const struct bucket *b = x->bucket;
    struct member *m = &x->channel->members[i];
    for (struct early *chunk = s->parity; chunk; chunk = chunk->next) {
        if (chunk->unit >= parities_of(s->musts, s->code) || !chunk->size) /* no size: it has been used */
            continue;
        uint32_t first, step, end, missing = 0, place = 0;
        group_of(chunk->unit, s->musts, s->code, &first, &step, &end);
        for (uint32_t k = first; k < end; k += step)
            if (!s->row[s->must[k]]) {
                missing++;
                place = k;
            }
        if (missing != 1)
            continue;
        for (uint32_t k = first; k < end; k += step) {
            const uint8_t *bytes = s->to + (uint64_t)s->must[k] * b->unit;
            uint32_t size = k == place ? 0 : in_unit_bytes(x, s->must[k]);
            for (uint32_t n = 0; n < size; n++)
                chunk->bytes[n] ^= bytes[n];
        }
        unit_arrived(x, i, s->must[place], chunk->bytes, unit_bytes(b, s->must[place]));
        chunk->size = 0;
        m->count.repaired++;
    }
}

/* How many units that must arrive are missing, if more are than may. The first look decides, when all has come that will. */
static uint32_t lacks(struct exchange *x, uint32_t i)
{
    struct source *s = &x->sources[i];
    if (s->musts > x->in)
        s->musts = x->in; /* all, which may have been said before it was known how many those are */
    uint32_t raw = s->judged ? s->raw : musts_missing(s);
    repair(x, i);
    uint32_t missing = musts_missing(s);
    if (!s->judged) {
        s->judged = 1;
        s->raw = raw;
        s->residual = s->asked = missing;
        s->again = missing > s->tolerance;
    }
    return s->again ? missing : 0;
}

/* Ask for it: at once for all of it, as far as the sender keeps track of so much. */
static void ask(struct exchange *x, uint32_t i, uint32_t missing, ns now)
{
    struct engine *e = x->channel->engine;
    struct source *s = &x->sources[i];
    struct member *m = &x->channel->members[i];
    uint32_t parts = parts_of(missing, list_room(e)), most = RESENDS / list_room(e) ? RESENDS / list_room(e) : 1;
    for (uint32_t part = 0; part < parts && part < most; part++)
        control(e, m, NACK, x, part);
    if (missing < s->asked)
        s->nack_wait = nack_base(m->flow);
    s->asked = missing;
    s->twice = parts == 1 && !s->twice;
    s->nack_at = now + (s->twice ? reorder_window(e, m->flow) : s->nack_wait);
    if (!s->twice)
        s->nack_wait = least(2 * s->nack_wait, SLOWEST);
}

static int take_report(struct engine *e, struct flow *f, const uint8_t *p, ns now)
{
    uint64_t datagrams = get64(p), bytes = get64(p + 8), top = get64(p + 16);
    if (top > f->number || datagrams > UINT64_MAX / 2 || bytes > UINT64_MAX / 2)
        return MALFORMED;
    uint32_t most = (uint32_t)((f->mask + 1) / 4); /* what `sent` has room for */
    f->window = (uint32_t)least(greatest(get32(p + 32), 1), most);
    f->limit = (uint32_t)least(greatest(get32(p + 36), 1), most);
    if (top == 0 || top < f->reported_top)
        return TAKEN;
    const struct stamp *stamp = &f->sent[(top - 1) & f->mask];
    if (f->number - top <= f->mask) {
        ns rtt = now - stamp->at - (ns)get32(p + 24) * US;
        if (top > f->reported_top && rtt >= 0)
            rate_sample(&f->rate, now, rtt);
        if (stamp->data > f->reported) {
            f->reported = stamp->data;
            f->force_wait = greatest(2 * round_trip(f), 30 * MS);
            f->force_at = now + f->force_wait;
            e->blocked_until = 0;
        }
    }
    f->reported_top = top;
    rate_report(&f->rate, now, datagrams, bytes, top, get32(p + 28));
    return TAKEN;
}

static void report_later(struct engine *e, struct flow *f, ns now)
{
    f->report_count = 0;
    if (++f->unreported >= f->threshold)
        f->report_at = now;
    else if (f->unreported == 1)
        f->report_at = now + 2 * MS;
    due(e, f->report_at);
}

/* A process was silent and is there again: what waits for it need not wait for its long intervals. */
static void flow_back(struct engine *e, const struct flow *f, ns now)
{
    for (const struct member *m = f->members; m; m = m->next)
        for (struct exchange *x = e->live; x; x = x->next) {
            if (x->channel != m->channel)
                continue;
            struct source *s = &x->sources[m->rank];
            struct dest *d = &x->dests[m->rank];
            if (s->ready_at != NEVER) {
                s->ready_wait = ready_base(f);
                s->ready_at = least(s->ready_at, now + s->ready_wait);
                exchange_due(x, s->ready_at);
            }
            if (d->ask_at != NEVER) {
                d->ask_wait = ready_base(f);
                d->ask_at = least(d->ask_at, now + d->ask_wait);
                exchange_due(x, d->ask_at);
            }
            if (d->end_at != NEVER) {
                d->end_wait = MS;
                d->end_at = least(d->end_at, now + d->end_wait);
                exchange_due(x, d->end_at);
            }
        }
}

/* DUPLICATE: a number came before; LATE: it is older than the window; else TAKEN. Before `top` moves. A ring of words as in
 * RFC 6479: the one that begins anew may not be one that is still asked about, so that the window has 64 numbers less. */
static int replayed(struct flow *f, uint64_t number)
{
    if (number + 64 * (f->seen_words - 1) < f->top)
        return LATE;
    if (number >= f->top) {
        uint64_t last = number / 64, first = f->top ? (f->top - 1) / 64 + 1 : 0;
        for (uint64_t k = 0; first + k <= last && k < f->seen_words; k++)
            f->seen[(first + k) % f->seen_words] = 0;
    }
    uint64_t *seen = &f->seen[number / 64 % f->seen_words], bit = (uint64_t)1 << number % 64;
    int again = (*seen & bit) != 0;
    *seen |= bit;
    return again ? DUPLICATE : TAKEN;
}

static int handle(struct engine *e, const struct sockaddr *from, const uint8_t *p, size_t n, ns now)
{
    uint32_t tag = tag_bytes(e);
    e->count.datagrams_received++;
    e->count.bytes_received += n;
    if (n < HEADER + tag || n > LARGEST || p[0] >> 4 != VERSION || (p[0] & 15) < DATA || (p[0] & 15) > ASK
        || p[1] & 0xf8 || p[23]) {
        e->count.malformed++;
        return MALFORMED;
    }
    int type = p[0] & 15, phase = p[22], verdict = TAKEN;
    uint32_t source = get16(p + 2), id = get32(p + 4), step = get32(p + 16), bucket = get16(p + 20);
    uint32_t index = get32(p + 24), size = (uint32_t)n - HEADER - tag;
    uint64_t number = get64(p + 8);
    struct channel *c = e->channels;
    while (c && c->id != id)
        c = c->next;
    if (!c || c->failed || source >= c->size || !c->members[source].flow
        || !same_address(&c->members[source].flow->to, from)) {
        e->count.foreign++;
        return FOREIGN;
    }
    struct member *m = &c->members[source];
    struct flow *f = m->flow;
    int keyed = type <= READY || type >= PARITY; /* it names an exchange */
    int fits = keyed ? phase < PHASES && bucket < c->buckets[phase] : !phase && !bucket && !step;
    if (fits) {
        const struct bucket *b = keyed ? &c->bucket[phase][bucket] : NULL;
        switch (type) {
        case DATA: fits = index < b->units && size == unit_bytes(b, index); break;
        case END: fits = b->reports ? index >= b->units && size >= 8 && size <= e->set.packet : index == b->units && !size; break;
        case READY:
            fits = index <= 1 && !size;
            if (b->reports && index && index <= parts_of(b->units, bits_room(e)))
                fits |= size == bits_bytes(e, b, index - 1);
            break;
        case PARITY: fits = b->reports && index / 255 < b->units && size == b->unit; break;
        case NACK: fits = b->reports && index && index <= list_room(e) && size == 4 * index; break;
        case ASK: fits = !index && !size; break;
        case REPORT: fits = !index && size == REPORT_BYTES; break;
        case ALIVE: fits = index <= 1 && !size; break;
        default: fits = index <= 2 && size <= e->set.packet;
        }
    }
    if (!fits || number >= f->top + JUMP) {
        m->count.malformed++;
        return MALFORMED;
    }
    const uint8_t *payload = p + HEADER;
    if (tag) {
        if (!cipher_open(m->open, p, payload, (int)size, e->scratch)) {
            m->count.bad_tag++;
            return BAD_TAG;
        }
        payload = e->scratch;
        if ((verdict = replayed(f, number)) != TAKEN) {
            *(verdict == LATE ? &m->count.late : &m->count.duplicate) += 1;
            return verdict;
        }
    }
    m->count.received++;
    f->received++;
    f->bytes += n;
    if (number >= f->top) {
        f->top = number + 1;
        f->top_at = now;
        if (now - f->heard > 200 * MS)
            flow_back(e, f, now);
        for (struct member *one = now - f->heard > 2 * SECOND ? f->members : NULL; one; one = one->next)
            one->full_at = now; /* while nothing came at all, nothing full could */
        f->heard = now;
        f->refused = 0;
    }
    if (type == REPORT || type == ALIVE) { /* replayed, they would do harm */
        if (number < f->control_top)
            return LATE;
        f->control_top = number + 1;
    }
    if (type == DATA || type == END || type == PROBE || type == PARITY)
        report_later(e, f, now);
    if (type == DATA || type == PARITY) {
        if (size == c->bucket[phase][bucket].unit)
            m->full_at = now;
        if (size == c->full)
            m->deaf_steps = m->deaf_units = 0;
    }
    switch (type) {
    case DATA: verdict = take_data(c, m, phase, step, bucket, index, payload, size, p[1] & 7, now); break;
    case END:
        verdict = take_end(c, m, phase, step, bucket, index - c->bucket[phase][bucket].units, payload, size, now);
        break;
    case READY: verdict = take_ready(c, m, phase, step, bucket, index, payload, size, now); break;
    case PARITY: verdict = take_parity(c, m, phase, step, bucket, index, payload, size); break;
    case NACK: verdict = take_nack(c, m, phase, step, bucket, index, payload); break;
    case ASK: verdict = take_ask(c, m, phase, step, bucket, now); break;
    case REPORT:
        if ((verdict = take_report(e, f, payload, now)) == MALFORMED)
            m->count.malformed++;
        break;
    case ALIVE:
        if (index && !m->gone) { /* its last word: what we sent it is done, what it did not send will not come */
            m->gone = 1;
            for (struct exchange *x = e->live, *next; x; x = next) {
                next = x->next;
                if (x->channel != c)
                    continue;
                const struct source *s = &x->sources[source];
                if (x->posted && s->expected && !s->over && !s->ended) /* else the reorder window ends it */
                    channel_fail(c, source, LEFT);
                else if (x->dests[source].wanted)
                    dest_done(&x->dests[source], now);
            }
        }
        break;
    case PROBE:
        m->probed = 1;
        if (index)
            m->confirmed = 1;
        if (index < 2) /* 0: hear me; 1: I have heard you, hear me; 2: I have heard you */
            control(e, m, PROBE, NULL, 2);
        break;
    }
    return verdict;
}

/* ---- What goes out ---- */

static uint32_t build(struct engine *e, struct member *m, int type, int priority, int phase, uint32_t step, uint32_t bucket,
                      uint32_t index, const uint8_t *payload, uint32_t size, uint8_t *out, ns now)
{
    struct flow *f = m->flow;
    out[0] = (uint8_t)(VERSION << 4 | type);
    out[1] = (uint8_t)priority;
    put16(out + 2, (uint16_t)m->channel->rank);
    put32(out + 4, m->channel->id);
    put64(out + 8, f->number);
    put32(out + 16, step);
    put16(out + 20, (uint16_t)bucket);
    out[22] = (uint8_t)phase;
    out[23] = 0;
    put32(out + 24, index);
    f->data += type == DATA;
    f->sent[f->number & f->mask] = (struct stamp){now, f->data};
    f->number++;
    m->count.sent++;
    if (e->set.cipher) {
        if (!cipher_seal(m->seal, out, payload, (int)size, out + HEADER))
            memset(out + HEADER, 0, size + TAG); /* libcrypto has no memory left: the other side will refuse it */
    } else {
        memcpy(out + HEADER, payload, size);
    }
    return HEADER + size + tag_bytes(e);
}

static void address(struct output *o, const struct flow *f, uint32_t bytes, uint32_t segment)
{
    memcpy(&o->to, &f->to, sizeof f->to);
    o->to_size = (uint32_t)f->to_size;
    o->bytes = bytes;
    o->segment = segment;
}

/* How many units END lists: none where all must arrive. */
static uint32_t must_list(const struct dest *d) { return d->musts < d->x->out ? d->musts : 0; }

/* What is sent of a message, copies with it. */
static uint32_t entries_of(const struct dest *d)
{
    return d->x->out < d->x->bucket->units ? d->x->out : d->x->bucket->entries;
}

static uint32_t end_payload(const struct engine *e, const struct dest *d, uint32_t part, uint8_t *p)
{
    uint32_t room = list_room(e), listed = must_list(d), from = part * room, left = from < listed ? listed - from : 0;
    uint32_t here = left < room ? left : room;
    put32(p, d->musts && !listed ? ALL : d->musts);
    put32(p + 4, d->code);
    for (uint32_t k = 0; k < here; k++)
        put32(p + 8 + 4 * k, d->must[from + k]);
    return 8 + 4 * here;
}

static void end_said(struct engine *e, struct member *m, const struct dest *d)
{
    uint32_t parts = d->x->bucket->reports ? parts_of(must_list(d), list_room(e)) : 1;
    for (uint32_t part = 0; part < parts; part++)
        control(e, m, END, d->x, d->x->bucket->units + part);
}

/* The `part`-th of what is missing. */
static uint32_t nack_payload(const struct exchange *x, uint32_t rank, uint32_t part, uint8_t *p)
{
    const struct source *s = &x->sources[rank];
    uint32_t room = list_room(x->channel->engine), skip = part * room, count = 0;
    for (uint32_t k = 0; k < s->musts && count < room; k++) {
        if (s->row[s->must[k]])
            continue;
        if (skip)
            skip--;
        else
            put32(p + 4 * count++, s->must[k]);
    }
    return count;
}

static int produce_control(struct engine *e, ns now, uint8_t *out, struct output *o)
{
    static uint8_t zeros[LARGEST];
    uint8_t *list = e->scratch;
    while (e->control_first != e->control_last) {
        const struct control *k = &e->controls[e->control_first++ % CONTROLS];
        struct channel *c = k->channel;
        struct member *m = &c->members[k->rank];
        struct flow *f = m->flow;
        uint8_t report[REPORT_BYTES];
        const uint8_t *payload = zeros;
        uint32_t size = 0;
        if (c->failed && !(k->type == ALIVE && k->index))
            continue;
        if (k->type == PROBE)
            size = c->probe_bytes;
        if (k->type == END && c->bucket[k->phase][k->bucket].reports) {
            const struct exchange *x = find(c, k->phase, k->step, k->bucket);
            if (!x)
                continue;
            payload = list;
            size = end_payload(e, &x->dests[k->rank], k->index - x->bucket->units, list);
        }
        if (k->type == READY && k->index && c->bucket[k->phase][k->bucket].reports) {
            const struct bucket *b = &c->bucket[k->phase][k->bucket];
            const struct report *r = report_of(b, k->rank, k->step);
            if (r) {
                payload = r->lost + (uint64_t)(k->index - 1) * e->set.packet;
                size = bits_bytes(e, b, k->index - 1);
            } else if (k->index > 1) {
                continue;
            }
        }
        if (k->type == NACK) {
            const struct exchange *x = find(c, k->phase, k->step, k->bucket);
            uint32_t count = x && !x->sources[k->rank].over ? nack_payload(x, k->rank, k->index, list) : 0;
            if (!count)
                continue;
            payload = list;
            size = 4 * count;
            m->count.asked += count;
            uint32_t bytes = build(e, m, NACK, 0, k->phase, k->step, k->bucket, count, payload, size, out, now);
            address(o, f, bytes, bytes);
            return 1;
        }
        if (k->type == REPORT) {
            put64(report, f->received);
            put64(report + 8, f->bytes);
            put64(report + 16, f->top);
            put32(report + 24, (uint32_t)least((now - f->top_at) / US, UINT32_MAX));
            put32(report + 28, (uint32_t)(f->top_at / US));
            put32(report + 32, e->window);
            put32(report + 36, e->limit);
            payload = report;
            size = REPORT_BYTES;
        }
        uint32_t bytes = build(e, m, k->type, 0, k->phase, k->step, k->bucket, k->index, payload, size, out, now);
        address(o, f, bytes, bytes);
        return 1;
    }
    return 0;
}

/* How many DATA this destination may get now, as far as its socket's buffer and the network have room. */
static uint32_t window_room(struct engine *e, struct member *m, ns now)
{
    struct flow *f = m->flow;
    uint64_t outstanding = f->data - f->reported, allowed = f->window;
    if (f->rate.known && f->rate.rtt_min >= 2 * MS) {
        double speed = f->rate.fixed ? f->rate.rate : f->rate.greatest;
        allowed += (uint64_t)(speed * (double)f->rate.rtt_min / 1e9 / (HEADER + e->set.packet));
    }
    if (allowed > f->limit)
        allowed = f->limit;
    if (outstanding < allowed) {
        f->force_wait = greatest(2 * round_trip(f), 30 * MS);
        f->force_at = now + f->force_wait;
        return (uint32_t)(allowed - outstanding);
    }
    if (now < f->force_at) {
        e->blocked_until = least(e->blocked_until, f->force_at);
        return 0;
    }
    f->force_wait = least(2 * f->force_wait, 2 * SECOND); /* reports were lost, or all that they would have reported */
    f->force_at = now + f->force_wait;
    m->count.forced++;
    return FORCED;
}

static int may_begin(const struct member *m, const struct dest *d)
{
    const struct bucket *b = d->x->bucket;
    if (d->ready || d->position == entries_of(d)) /* parities are left */
        return 1;
    if (m->any_posted[d->x->phase] && (int32_t)(d->x->step - m->posted[d->x->phase]) > AHEAD)
        return 0; /* it would not be kept */
    return m->eager + unit_bytes(b, b->order ? b->order[d->position] : d->position) <= m->eager_limit;
}

/* As may_begin; if not, asks later for its READY, which may have been lost: where a deadline has passed nothing else would come. */
static int begins(const struct member *m, struct dest *d, ns now)
{
    if (may_begin(m, d))
        return 1;
    if (d->ask_at == NEVER) {
        d->ask_wait = greatest(2 * round_trip(m->flow), 20 * MS);
        d->ask_at = now + d->ask_wait;
        exchange_due(d->x, d->ask_at);
    }
    return 0;
}

/* How many datagrams of a bucket's length go out together. */
static uint32_t batch_most(const struct flow *f, uint32_t datagram, uint32_t room)
{
    uint32_t most = BATCH_BYTES / datagram;
    double in_one_ms = f->rate.rate / 1000.0 / datagram;
    most = most > SEGMENTS ? SEGMENTS : most;
    most = in_one_ms < most ? (uint32_t)in_one_ms : most;
    most = most > room ? room : most;
    return most ? most : 1;
}

static void spend(struct engine *e, struct flow *f, uint32_t bytes, uint32_t n, ns now)
{
    double wire = bytes + (double)n * e->wire_overhead;
    f->free_at = greatest(f->free_at, now - 2 * MS) + (ns)(wire * 1e9 / f->rate.rate);
    e->free_at = greatest(e->free_at, now - 2 * MS) + (ns)(wire * 1e9 / e->set.rate);
}

static int produce_again(struct engine *e, struct member *m, ns now, uint8_t *out, struct output *o)
{
    struct flow *f = m->flow;
    if (now < f->free_at) {
        e->blocked_until = least(e->blocked_until, f->free_at);
        return 0;
    }
    uint32_t room = window_room(e, m, now);
    if (!room)
        return 0;
    const struct dest *d = m->resend[m->resend_first % RESENDS].dest;
    const struct bucket *b = d->x->bucket;
    uint32_t datagram = HEADER + b->unit + tag_bytes(e), most = batch_most(f, datagram, room), n = 0, bytes = 0;
    while (n < most && m->resend_first != m->resend_last && m->resend[m->resend_first % RESENDS].dest == d) {
        uint32_t position = m->resend[m->resend_first++ % RESENDS].position, unit = d->must[position], size = unit_bytes(b, unit);
        bytes += build(e, m, DATA, AGAIN, d->x->phase, d->x->step, d->x->number, unit, d->copies + (uint64_t)position * b->unit,
                       size, out + bytes, now);
        m->count.resent++;
        n++;
        if (size < b->unit)
            break;
    }
    address(o, f, bytes, n > 1 ? datagram : bytes);
    spend(e, f, bytes, n, now);
    return 1;
}

static void parity_bytes(const struct dest *d, uint32_t index, uint8_t *out)
{
    uint32_t first, step, end, unit = d->x->bucket->unit;
    group_of(index, d->musts, d->code, &first, &step, &end);
    memset(out, 0, unit);
    for (uint32_t k = first; k < end; k += step)
        for (uint32_t n = 0; n < unit; n++)
            out[n] ^= d->copies[(uint64_t)k * unit + n];
}

static int produce_data(struct engine *e, struct member *m, ns now, uint8_t *out, struct output *o)
{
    struct flow *f = m->flow;
    if (m->resend_first != m->resend_last)
        return produce_again(e, m, now, out, o);
    struct dest *d = m->queue[0], *other = m->queue[1];
    if (!d || (other && other->x->order < d->x->order)) {
        d = other;
        other = m->queue[0];
    }
    if (!begins(m, d, now)) {
        d = other;
        if (!d || !begins(m, d, now))
            return 0;
    }
    if (now < f->free_at) {
        e->blocked_until = least(e->blocked_until, f->free_at);
        return 0;
    }
    uint32_t room = window_room(e, m, now);
    if (!room)
        return 0;
    const struct bucket *b = d->x->bucket;
    uint32_t datagram = HEADER + b->unit + tag_bytes(e), most = batch_most(f, datagram, room), n = 0, bytes = 0;
    uint32_t entries = entries_of(d);
    while (n < most && d->position < entries && may_begin(m, d)) {
        uint32_t unit = b->order ? b->order[d->position] : d->position, size = unit_bytes(b, unit);
        bytes += build(e, m, DATA, b->tags ? b->tags[unit] : 0, d->x->phase, d->x->step, d->x->number, unit,
                       d->from + (uint64_t)unit * b->unit, size, out + bytes, now);
        if (!m->any_posted[d->x->phase])
            has_posted(m, d->x);
        if (!d->ready) {
            m->eager += size;
            d->eager += size;
        }
        d->position++;
        n++;
        if (size < b->unit)
            break; /* only the last segment may be shorter */
    }
    while (!n || (n < most && bytes == n * datagram)) {
        if (d->position < entries || d->parity == d->parities)
            break;
        parity_bytes(d, d->parity, e->scratch);
        bytes += build(e, m, PARITY, 0, d->x->phase, d->x->step, d->x->number, d->parity, e->scratch, b->unit, out + bytes, now);
        m->count.parities++;
        d->parity++;
        n++;
    }
    address(o, f, bytes, n > 1 ? datagram : bytes);
    spend(e, f, bytes, n, now);
    if (d->position == entries && d->parity == d->parities) {
        end_said(e, m, d);
        dest_sent(d, now);
    }
    return 1;
}

/* Write the next datagrams to one destination, of one length but for the last, into `out`. 0: nothing is due now. */
static int produce(struct engine *e, ns now, uint8_t *out, struct output *o)
{
    if (produce_control(e, now, out, o))
        return 1;
    if (now < e->blocked_until)
        return 0;
    e->blocked_until = NEVER;
    if (now < e->free_at) {
        e->blocked_until = e->free_at;
        return 0;
    }
    struct channel *c = e->cursor ? e->cursor : e->channels;
    for (struct channel *first = c; c;) {
        for (uint32_t k = 0; k < c->size && !c->failed; k++) {
            uint32_t i = (c->cursor + k) % c->size;
            struct member *m = &c->members[i];
            if ((m->queue[0] || m->queue[1] || m->resend_first != m->resend_last) && produce_data(e, m, now, out, o)) {
                c->cursor = (i + 1) % c->size;
                e->cursor = c->next;
                e->blocked_until = 0; /* others may have something */
                return 1;
            }
        }
        c = c->next ? c->next : e->channels;
        if (c == first)
            break;
    }
    return 0;
}

/* ---- What waits for a time ---- */

static void exchange_timers(struct exchange *x, ns now)
{
    struct channel *c = x->channel;
    struct engine *e = c->engine;
    ns at = NEVER;
    for (uint32_t i = 0; x->posted && !x->over && i < c->size; i++) {
        struct source *s = &x->sources[i];
        struct member *m = &c->members[i];
        if (!s->expected || s->over)
            continue;
        if (s->told_at && m->flow->heard > now - 2 * SECOND
            && now - greatest(greatest(s->told_at, m->full_at), x->posted_at) >= e->set.peer_timeout) {
            channel_fail(c, i, DEAF); /* what must arrive is asked for, and nothing comes but what is short */
            return;
        }
        ns ends = s->ended ? s->ended_at + reorder_window(e, m->flow) : NEVER;
        uint32_t missing = now >= ends && now < x->deadline && s->musts ? lacks(x, i) : 0;
        if (missing) {
            if (now >= s->nack_at)
                ask(x, i, missing, now);
            at = least(at, least(s->nack_at, x->deadline));
            continue;
        }
        if (now >= ends || now >= x->deadline) {
            if (now < ends)
                m->count.by_deadline += x->bucket->units - s->got;
            source_over(x, i, now);
            continue;
        }
        if (now >= s->ready_at) {
            control(e, m, READY, x, 0);
            s->ready_wait = least(2 * s->ready_wait, SLOWEST);
            s->ready_at = now + s->ready_wait;
        }
        at = least(at, least(least(ends, s->ready_at), x->deadline));
    }
    for (uint32_t i = 0; x->unacknowledged && i < c->size; i++) {
        struct dest *d = &x->dests[i];
        if (!d->wanted || d->done)
            continue;
        if (now >= d->ask_at) {
            control(e, &c->members[i], ASK, x, 0);
            d->ask_wait = least(2 * d->ask_wait, SLOWEST);
            d->ask_at = now + d->ask_wait;
        }
        at = least(at, d->ask_at);
        if (!d->sent)
            continue;
        if (now >= d->end_at) {
            end_said(e, &c->members[i], d);
            d->end_wait = least(2 * d->end_wait, SLOWEST);
            d->end_at = now + d->end_wait;
        }
        at = least(at, d->end_at);
    }
    x->due = at;
    due(e, at);
    exchange_settle(x);
}

static struct member *speaker(struct flow *f)
{
    f->speaker = f->speaker && f->speaker->next ? f->speaker->next : f->members;
    return f->speaker;
}

/* Reports go out even while more keeps coming in: senders wait for them. */
static void reports(struct engine *e, ns now)
{
    for (struct flow *f = e->flows; f; f = f->next) {
        if (!f->members)
            continue;
        if (now >= f->report_at) {
            control(e, speaker(f), REPORT, NULL, 0);
            f->unreported = 0;
            ns wait = greatest(round_trip(f), 5 * MS) << (f->report_count > 4 ? f->report_count - 4 : 0);
            f->report_at = f->report_count++ < REPEATS ? now + least(wait, SLOWEST) : NEVER;
        }
        due(e, f->report_at);
    }
}

static void flow_timers(struct engine *e, struct flow *f, int alive, ns now)
{
    if (!f->members)
        return;
    if (alive)
        control(e, speaker(f), ALIVE, NULL, 0);
    for (struct member *m = f->members; m; m = m->next) {
        /* Anybody can forge an ICMP message: it is believed where silence says the same. */
        int refused = f->refused >= 3 && now - f->heard >= least(BELIEVED, e->set.peer_timeout);
        if (f->refused >= 3 && !refused)
            due(e, f->heard + BELIEVED);
        if (now - f->heard >= e->set.peer_timeout || refused) {
            int silent = !refused;
            if (!m->gone && !m->channel->closing)
                channel_fail(m->channel, m->rank, silent ? SILENT : REFUSED);
            for (struct exchange *x = e->live, *next; x; x = next) { /* nobody will acknowledge any more */
                next = x->next;
                if (m->gone && x->channel == m->channel && x->dests[m->rank].wanted)
                    dest_done(&x->dests[m->rank], now);
            }
        }
        if (m->confirmed || now >= m->probe_until)
            continue;
        if (now >= m->probe_at) {
            control(e, m, PROBE, NULL, m->probed);
            m->probe_at = now + 40 * MS;
        }
        due(e, m->probe_at);
    }
}

static void channel_free(struct channel *c);

/* `now` must be a time at which everything that had arrived before was handled. */
static void timers(struct engine *e, ns now)
{
    if (now < e->timers_at)
        return;
    e->timers_at = NEVER;
    for (struct exchange *x = e->live, *next; x; x = next) {
        next = x->next;
        if (x->channel->failed)
            continue;
        if (now >= x->due)
            exchange_timers(x, now);
        else
            due(e, x->due);
    }
    reports(e, now);
    int alive = now >= e->alive_at;
    if (alive)
        e->alive_at = now + SECOND;
    due(e, e->alive_at);
    for (struct flow *f = e->flows; f; f = f->next)
        flow_timers(e, f, alive, now);
    for (struct channel *c = e->channels, *next; c; c = next) {
        next = c->next;
        if (c->closing && now >= c->free_at)
            channel_free(c);
        else if (c->closing)
            due(e, c->free_at);
    }
}

/* ---- Opening and closing ---- */

static void acquire(struct engine *e)
{
    atomic_fetch_add(&e->waiting, 1);
    pthread_mutex_lock(&e->lock);
    atomic_fetch_sub(&e->waiting, 1);
}

static void release(struct engine *e)
{
    if (e->giving)
        pthread_cond_signal(&e->given);
    pthread_mutex_unlock(&e->lock);
    if (e->running && atomic_load(&e->asleep)) {
        uint64_t one = 1;
        if (write(e->wake, &one, sizeof one) < 0) { /* full: it is being woken */ }
    }
}

static ns at(ns now) { return now < 0 ? clock_now() : now; }

API struct channel *ml_channel(struct engine *e, uint32_t id, uint32_t rank, uint32_t size, uint32_t grad, uint32_t param,
                               uint32_t probe_bytes)
{
    struct channel *c = calloc(1, sizeof *c);
    if (!c || !(c->members = calloc(size, sizeof *c->members)) || !(c->bucket[0] = calloc(grad + 1, sizeof(struct bucket)))
        || !(c->bucket[1] = calloc(param + 1, sizeof(struct bucket)))) {
        if (c) {
            free(c->members);
            free(c->bucket[0]);
            free(c);
        }
        return NULL;
    }
    c->engine = e;
    c->id = id;
    c->rank = rank;
    c->size = size;
    c->buckets[0] = grad;
    c->buckets[1] = param;
    c->probe_bytes = probe_bytes;
    c->cursor = (rank + 1) % size;
    for (uint32_t i = 0; i < size; i++) {
        c->members[i].channel = c;
        c->members[i].rank = i;
    }
    uint64_t limit = (uint64_t)(size - 1) * (2 * e->set.eager + (1 << 20));
    c->early_limit = limit < e->set.memory ? limit : e->set.memory;
    return c;
}

API void ml_bucket(struct channel *c, int phase, uint32_t bucket, uint64_t shard, uint32_t unit)
{
    struct bucket *b = &c->bucket[phase][bucket];
    b->shard = shard;
    b->unit = unit;
    b->units = b->entries = (uint32_t)((shard + unit - 1) / unit);
    c->full = unit > c->full ? unit : c->full;
}

/* Senders of this bucket are told what did not arrive, and may name units that must. Before ml_open. */
API int ml_reported(struct channel *c, int phase, uint32_t bucket)
{
    struct bucket *b = &c->bucket[phase][bucket];
    if (!(b->reports = calloc((size_t)c->size * REPORTS, sizeof *b->reports)))
        return -3;
    for (uint32_t k = 0; k < c->size * REPORTS; k++)
        if (!(b->reports[k].lost = malloc((b->units + 7) / 8)))
            return -3;
    for (uint32_t i = 0; i < c->size; i++)
        if (!c->members[i].resend && !(c->members[i].resend = malloc(RESENDS * sizeof *c->members[i].resend)))
            return -3;
    return 0;
}

/* Datagrams after which a REPORT is due. */
static uint32_t report_threshold(const struct engine *e)
{
    uint32_t quarter = e->window / 4;
    return quarter > 256 ? 256 : quarter ? quarter : 1;
}

/* Room for all that may overtake a datagram: what is sent at full rate in 100 ms, or in the time that is waited for them. */
static uint64_t replay_words(const struct engine *e)
{
    double numbers = e->set.rate * (double)greatest(e->set.reorder, 100 * MS) / 1e9 / (HEADER + e->set.packet + tag_bytes(e));
    uint64_t words = LEAST_REPLAY;
    while (words < MOST_REPLAY && 64.0 * (double)words < numbers)
        words *= 2;
    return words;
}

static struct flow *flow_find(struct engine *e, const struct sockaddr *to, socklen_t to_size, uint64_t instance)
{
    for (struct flow *f = e->flows; f; f = f->next)
        if (f->instance == instance && same_address(&f->to, to))
            return f;
    struct flow *f = calloc(1, sizeof *f);
    if (!f)
        return NULL;
    memcpy(&f->to, to, to_size);
    f->to_size = to_size;
    f->instance = instance;
    f->window = f->limit = UINT32_MAX;
    f->threshold = report_threshold(e);
    f->seen_words = replay_words(e);
    f->report_at = NEVER;
    rate_init(&f->rate, 4e6, e->set.rate, !e->set.delay_based);
    return f;
}

/* `window`, `limit`: DATA that the peer's buffer holds for us, until its REPORTs say otherwise; `eager`: bytes that it keeps of
 * what it has not posted. Before ml_open. */
API int ml_member(struct channel *c, uint32_t rank, const struct sockaddr *to, uint32_t to_size, uint64_t instance,
                  uint32_t window, uint32_t limit, uint64_t eager, const uint8_t *key_out, const uint8_t *key_in, ns now)
{
    struct engine *e = c->engine;
    struct member *m = &c->members[rank];
    int result = -1;
    acquire(e);
    struct flow *f = flow_find(e, to, (socklen_t)to_size, instance);
    if (!f)
        goto out;
    if (!f->sent) {
        f->mask = 1023;
        while (f->mask < 4 * (uint64_t)limit)
            f->mask = 2 * f->mask + 1;
        f->sent = calloc(f->mask + 1, sizeof *f->sent);
        f->seen = calloc(f->seen_words, sizeof *f->seen);
        if (!f->sent || !f->seen) {
            free(f->sent);
            free(f->seen);
            free(f);
            goto out;
        }
        f->next = e->flows;
        e->flows = f;
    }
    f->window = window < f->window ? window : f->window;
    f->limit = limit < f->limit ? limit : f->limit;
    f->heard = at(now);
    if (e->set.cipher && (!(m->seal = cipher_new(key_out, 1)) || !(m->open = cipher_new(key_in, 0))))
        goto out;
    m->eager_limit = eager;
    m->flow = f;
    m->next = f->members;
    f->members = m;
    result = 0;
out:
    release(e);
    return result;
}

API void ml_open(struct channel *c)
{
    struct engine *e = c->engine;
    acquire(e);
    c->open = 1;
    c->next = e->channels;
    e->channels = c;
    due(e, 0);
    release(e);
}

/* DATA that each other process may have on the way here, now that there are so many of them; REPORTs tell. */
API void ml_promise(struct engine *e, uint32_t window, uint32_t limit)
{
    acquire(e);
    e->window = window;
    e->limit = limit;
    for (struct flow *f = e->flows; f; f = f->next) {
        f->threshold = report_threshold(e);
        f->report_count = 0;
        f->report_at = 0;
    }
    due(e, 0);
    release(e);
}

/* Send every member PROBEs until it says that one came, or `until`. */
API void ml_probe(struct channel *c, ns until)
{
    acquire(c->engine);
    for (uint32_t i = 0; i < c->size; i++)
        c->members[i].probe_until = until;
    due(c->engine, 0);
    release(c->engine);
}

/* Bit 0: its PROBE came; bit 1: ours came there. */
API int ml_probed(struct channel *c, uint32_t rank)
{
    acquire(c->engine);
    int result = c->members[rank].probed | c->members[rank].confirmed << 1;
    release(c->engine);
    return result;
}

/* Without lock: of a channel that nobody calls any more. */
static void channel_free(struct channel *c)
{
    struct engine *e = c->engine;
    for (struct exchange *x = e->live, *next; x; x = next) {
        next = x->next;
        if (x->channel == c)
            exchange_free(x);
    }
    uint32_t kept = e->control_first;
    for (uint32_t k = e->control_first; k != e->control_last; k++)
        if (e->controls[k % CONTROLS].channel != c)
            e->controls[kept++ % CONTROLS] = e->controls[k % CONTROLS];
    e->control_last = kept;
    for (uint32_t i = 0; i < c->size; i++) {
        struct member *m = &c->members[i];
        if (m->seal)
            ssl.cipher_free(m->seal);
        if (m->open)
            ssl.cipher_free(m->open);
        if (!m->flow)
            continue;
        struct member **link = &m->flow->members;
        while (*link != m)
            link = &(*link)->next;
        *link = m->next;
        m->flow->speaker = NULL;
    }
    struct channel **link = &e->channels;
    while (*link && *link != c)
        link = &(*link)->next;
    if (*link)
        *link = c->next;
    e->cursor = NULL;
    for (int phase = 0; phase < PHASES; phase++) {
        for (uint32_t b = 0; b < c->buckets[phase]; b++) {
            free(c->bucket[phase][b].order);
            free(c->bucket[phase][b].tags);
            for (uint32_t k = 0; c->bucket[phase][b].reports && k < c->size * REPORTS; k++)
                free(c->bucket[phase][b].reports[k].lost);
            free(c->bucket[phase][b].reports);
        }
        free(c->bucket[phase]);
    }
    for (uint32_t i = 0; i < c->size; i++)
        free(c->members[i].resend);
    free(c->members);
    free(c);
}

/* 0: everything that was sent is acknowledged. */
API int ml_linger(struct channel *c, ns timeout)
{
    struct engine *e = c->engine;
    struct timespec until;
    ns end = clock_now() + timeout;
    until.tv_sec = end / SECOND;
    until.tv_nsec = end % SECOND;
    pthread_mutex_lock(&e->tell);
    int late = 0;
    while (c->unacknowledged && !c->failed && !late)
        late = pthread_cond_timedwait(&e->told, &e->tell, &until) != 0;
    int left = c->unacknowledged && !c->failed;
    pthread_mutex_unlock(&e->tell);
    return left;
}

/* Buffers are not touched after this. The engine answers for the channel for two more seconds, then frees it. */
API void ml_close(struct channel *c, ns now)
{
    struct engine *e = c->engine;
    acquire(e);
    if (!c->open) {
        channel_free(c);
    } else {
        for (uint32_t i = 0; i < c->size; i++) {
            struct member *m = &c->members[i];
            for (int phase = 0; phase < PHASES; phase++)
                m->queue[phase] = m->last[phase] = NULL;
            for (int k = 0; m->flow && k < 2; k++)
                control(e, m, ALIVE, NULL, 1);
        }
        for (struct exchange *x = e->live, *next; x; x = next) {
            next = x->next;
            if (x->channel == c)
                exchange_free(x);
        }
        c->closing = 1;
        c->unacknowledged = 0;
        c->free_at = at(now) + 2 * SECOND;
        due(e, c->free_at);
    }
    release(e);
}

/* The order of `entries` units, of which each is there at least once; tags of all units. Before the first send. */
API int ml_copies(struct channel *c, int phase, uint32_t bucket, const uint32_t *order, uint32_t entries, const uint8_t *tags)
{
    struct bucket *b = &c->bucket[phase][bucket];
    uint32_t *new_order = malloc(entries * sizeof *order);
    uint8_t *new_tags = malloc(b->units);
    if (!new_order || !new_tags) {
        free(new_order);
        free(new_tags);
        return -3;
    }
    memcpy(new_order, order, entries * sizeof *order);
    memcpy(new_tags, tags, b->units);
    acquire(c->engine);
    int busy = 0;
    for (const struct exchange *x = b->live; x; x = x->same)
        busy |= x->sending && x->unsent;
    if (busy) {
        free(new_order);
        free(new_tags);
    } else {
        free(b->order);
        free(b->tags);
        b->order = new_order;
        b->tags = new_tags;
        b->entries = entries;
    }
    release(c->engine);
    return busy ? -2 : 0;
}

/* 0 and a handle; -1 failed, -2 not a later step, -3 no memory. Of what must arrive of a source `tolerance` units may be
 * missing for good. `dropped` [drops]: units, and after all of them parities, that count as lost when they come. */
/* `length`: bytes of each message, if fewer than the bucket has; 0 for all. `to` is written until ml_wait says that it is over;
 * `arrived` is read as long as somebody has a handle of the exchange. Neither is touched in a closed or failed channel. */
API int ml_post(struct channel *c, int phase, uint32_t step, uint32_t bucket, uint64_t length, uint8_t *const *to,
                uint8_t *arrived, ns deadline, uint32_t tolerance, const uint8_t *dropped, uint32_t drops, ns now,
                struct exchange **handle)
{
    struct terms terms = {length, tolerance, drops, dropped};
    acquire(c->engine);
    int result = post(c, phase, step, bucket, to, arrived, deadline, &terms, at(now), handle);
    release(c->engine);
    return result;
}

/* `must` [size][units], or NULL: units that must arrive, of a bucket with reports; in blocks of `block` of them go
 * `parity` packets of parity. `length`: as of ml_post; of a shorter message all units must arrive. */
API int ml_send(struct channel *c, int phase, uint32_t step, uint32_t bucket, uint64_t length, const uint8_t *const *from,
                const uint8_t *must, uint32_t block, uint32_t parity, struct exchange **handle)
{
    struct musts *musts = NULL;
    const struct bucket *b = &c->bucket[phase][bucket];
    if (must && !(musts = musts_new(c, b, from, must, length)))
        return -3;
    acquire(c->engine);
    int result = send_pieces(c, phase, step, bucket, from, musts, block << 16 | parity, units_of(b, length), handle);
    release(c->engine);
    musts_free(musts, c->size);
    return result;
}

/* `lost` [size][units]: 1 for what did not arrive at those that were sent to. 0 all have said, 1 not yet, -1 failed. */
API int ml_reports(struct exchange *x, uint8_t *lost)
{
    struct channel *c = x->channel;
    const struct bucket *b = x->bucket;
    acquire(c->engine);
    int result = c->failed ? -1 : !x->sending;
    for (uint32_t i = 0; !result && i < c->size; i++)
        result = x->dests[i].wanted && !x->dests[i].done;
    for (uint32_t i = 0; !result && i < c->size; i++) {
        const struct dest *d = &x->dests[i];
        int known = d->lost && d->parts_heard == parts_of(b->units, bits_room(c->engine));
        for (uint32_t unit = 0; unit < b->units; unit++)
            lost[(uint64_t)i * b->units + unit] = known ? d->lost[unit / 8] >> unit % 8 & 1 : 1;
    }
    release(c->engine);
    return result;
}

/* `out` [size][3], of what had to arrive of each source: units missing when its end was known, after repair, and whether they
 * were asked for. */
API void ml_outcomes(struct exchange *x, uint32_t *out)
{
    acquire(x->channel->engine);
    for (uint32_t i = 0; i < x->channel->size; i++, out += 3) {
        const struct source *s = &x->sources[i];
        out[0] = s->raw;
        out[1] = s->residual;
        out[2] = s->again;
    }
    release(x->channel->engine);
}

/* What: 0 everything arrived that will; 1 nothing is read from the sources any more. 0 yes, 1 not yet, -1 failed. */
API int ml_wait(struct exchange *x, int what, ns timeout)
{
    struct channel *c = x->channel;
    struct engine *e = c->engine;
    struct timespec until;
    ns end = timeout > 0 ? clock_now() + timeout : 0;
    until.tv_sec = end / SECOND;
    until.tv_nsec = end % SECOND;
    pthread_mutex_lock(&e->tell);
    int done, late = timeout <= 0;
    while (!(done = what ? x->sending && !x->unsent : x->over) && !c->failed && !late)
        late = pthread_cond_timedwait(&e->told, &e->tell, &until) != 0;
    int failed = c->failed;
    pthread_mutex_unlock(&e->tell);
    return done ? 0 : failed ? -1 : 1;
}

/* ns from post to the end. */
API ns ml_took(const struct exchange *x) { return x->over_at - x->posted_at; }

/* Sources that are still missing, for a message; -1 none. */
API int ml_missing(struct exchange *x)
{
    int result = -1;
    acquire(x->channel->engine);
    for (uint32_t i = 0; x->posted && result < 0 && i < x->channel->size; i++)
        if (x->sources[i].expected && !x->sources[i].over)
            result = (int)i;
    release(x->channel->engine);
    return result;
}

API void ml_release(struct exchange *x)
{
    struct engine *e = x->channel->engine;
    acquire(e);
    x->handles--;
    x->rows_gone |= !x->handles && x->over;
    exchange_settle(x);
    release(e);
}

API int ml_failed(const struct channel *c, int *culprit)
{
    *culprit = c->culprit;
    return c->failed;
}

API void ml_member_counters(struct channel *c, uint32_t rank, uint64_t *out)
{
    acquire(c->engine);
    memcpy(out, &c->members[rank].count, sizeof c->members[rank].count);
    release(c->engine);
}

API void ml_engine_counters(struct engine *e, uint64_t *out)
{
    acquire(e);
    memcpy(out, &e->count, sizeof e->count);
    release(e);
}

/* rate (bytes/s), least round trip (s), lost share that is not ours, delivery rate, outstanding DATA; how much of that its buffer
 * holds for us: with ease, and at most */
API void ml_member_rate(struct channel *c, uint32_t rank, double *out)
{
    acquire(c->engine);
    const struct flow *f = c->members[rank].flow;
    out[0] = f->rate.rate;
    out[1] = f->rate.known ? (double)f->rate.rtt_min / 1e9 : 0.0;
    out[2] = f->rate.foreign;
    out[3] = f->rate.greatest;
    out[4] = (double)(f->data - f->reported);
    out[5] = f->window;
    out[6] = f->limit;
    release(c->engine);
}

/* ---- The protocol without socket and thread, for tests and fuzzers ---- */

API int ml_handle(struct engine *e, const struct sockaddr *from, const uint8_t *bytes, size_t size, ns now)
{
    return handle(e, from, bytes, size, now);
}
API int ml_produce(struct engine *e, ns now, uint8_t *out, struct output *o) { return produce(e, now, out, o); }
API void ml_timers(struct engine *e, ns now) { timers(e, now); }
API ns ml_due(const struct engine *e) { return least(e->timers_at, e->blocked_until); }

API struct rate *ml_rate_new(double floor, double ceiling, int fixed)
{
    struct rate *r = calloc(1, sizeof *r);
    if (r)
        rate_init(r, floor, ceiling, fixed);
    return r;
}
API void ml_rate_free(struct rate *r) { free(r); }
API void ml_rate_sample(struct rate *r, ns now, ns rtt) { rate_sample(r, now, rtt); }
API void ml_rate_report(struct rate *r, ns now, uint64_t datagrams, uint64_t bytes, uint64_t top, uint32_t clock)
{
    rate_report(r, now, datagrams, bytes, top, clock);
}
API void ml_rate_get(const struct rate *r, double *out)
{
    out[0] = r->rate;
    out[1] = r->foreign;
    out[2] = r->greatest;
    out[3] = r->known ? (double)r->rtt_min : -1.0;
    out[4] = r->starting;
}

/* ---- The socket ---- */

static void read_errors(struct engine *e)
{
    for (;;) {
        uint8_t control_bytes[512], data[64];
        struct sockaddr_storage to;
        struct iovec part = {data, sizeof data};
        struct msghdr message = {.msg_name = &to, .msg_namelen = sizeof to, .msg_iov = &part, .msg_iovlen = 1,
                                 .msg_control = control_bytes, .msg_controllen = sizeof control_bytes};
        if (recvmsg(e->socket, &message, MSG_ERRQUEUE | MSG_DONTWAIT) < 0)
            return;
        for (struct cmsghdr *h = CMSG_FIRSTHDR(&message); h; h = CMSG_NXTHDR(&message, h)) {
            struct sock_extended_err error;
            if (!(h->cmsg_level == IPPROTO_IP && h->cmsg_type == IP_RECVERR)
                && !(h->cmsg_level == IPPROTO_IPV6 && h->cmsg_type == IPV6_RECVERR))
                continue;
            memcpy(&error, CMSG_DATA(h), sizeof error);
            e->count.unreachable += error.ee_origin != SO_EE_ORIGIN_LOCAL;
            ns now = clock_now();
            for (struct flow *f = e->flows; f && error.ee_errno == ECONNREFUSED; f = f->next)
                if (same_address(&f->to, (struct sockaddr *)&to) && now - f->refused_at >= 30 * MS) {
                    f->refused++; /* those of one burst count once */
                    f->refused_at = now;
                    due(e, 0);
                }
        }
    }
}

/* 1: sent or given up; 0: the kernel has no room for what is left. `sent`: the bytes before that, 0 in the beginning. */
static int transmit(struct engine *e, const struct output *o, uint32_t *sent)
{
    while (*sent < o->bytes) {
        uint32_t left = o->bytes - *sent, size = e->gso || o->segment > left ? left : o->segment;
        union { char bytes[CMSG_SPACE(sizeof(uint16_t))]; struct cmsghdr align; } space = {{0}};
        struct iovec part = {e->batch + *sent, size};
        struct msghdr message = {.msg_name = (void *)&o->to, .msg_namelen = o->to_size, .msg_iov = &part, .msg_iovlen = 1};
        if (size > o->segment) {
            uint16_t segment = (uint16_t)o->segment;
            message.msg_control = space.bytes;
            message.msg_controllen = sizeof space.bytes;
            struct cmsghdr *h = CMSG_FIRSTHDR(&message);
            h->cmsg_level = SOL_UDP;
            h->cmsg_type = UDP_SEGMENT;
            h->cmsg_len = CMSG_LEN(sizeof segment);
            memcpy(CMSG_DATA(h), &segment, sizeof segment);
        }
        int tries = 0;
        ssize_t result;
        while ((result = sendmsg(e->socket, &message, MSG_DONTWAIT | MSG_NOSIGNAL)) < 0 && tries++ < 4
               && (errno == EINTR || errno == ECONNREFUSED))
            read_errors(e); /* an earlier datagram's error: this one was not sent */
        if (result < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == ENOBUFS)) {
            e->count.send_blocked++;
            return 0;
        }
        if (result < 0 && size > o->segment && (errno == EIO || errno == EINVAL || errno == ENOTSUP || errno == ENOPROTOOPT)) {
            e->gso = 0; /* this interface or kernel does not cut: we do */
            continue;
        }
        if (result < 0)
            *(errno == EMSGSIZE ? &e->count.too_big : &e->count.send_failed) += 1;
        e->count.segmented += size > o->segment;
        e->count.datagrams_sent += (size + o->segment - 1) / o->segment;
        e->count.bytes_sent += size;
        *sent += size;
    }
    return 1;
}

/* How many messages came; 0: none are there. */
static int receive(struct engine *e)
{
    struct mmsghdr messages[RECEIVE];
    struct iovec parts[RECEIVE];
    struct sockaddr_storage froms[RECEIVE];
    union { char bytes[128]; struct cmsghdr align; } spaces[RECEIVE];
    for (int i = 0; i < RECEIVE; i++) {
        parts[i] = (struct iovec){e->receive + (size_t)i * RECEIVE_BYTES, RECEIVE_BYTES};
        messages[i].msg_hdr = (struct msghdr){.msg_name = &froms[i], .msg_namelen = sizeof froms[i], .msg_iov = &parts[i],
                                              .msg_iovlen = 1, .msg_control = spaces[i].bytes,
                                              .msg_controllen = sizeof spaces[i].bytes};
    }
    int n = recvmmsg(e->socket, messages, RECEIVE, MSG_DONTWAIT, NULL);
    if (n < 0) {
        if (errno == EAGAIN || errno == EWOULDBLOCK)
            return 0;
        read_errors(e);
        return 1;
    }
    ns now = clock_now();
    for (int i = 0; i < n; i++) {
        uint32_t size = messages[i].msg_len, segment = size;
        for (struct cmsghdr *h = CMSG_FIRSTHDR(&messages[i].msg_hdr); h; h = CMSG_NXTHDR(&messages[i].msg_hdr, h)) {
            if (h->cmsg_level == SOL_UDP && h->cmsg_type == UDP_GRO) {
                int length;
                memcpy(&length, CMSG_DATA(h), sizeof length);
                segment = length > 0 && (uint32_t)length < size ? (uint32_t)length : size;
            } else if (h->cmsg_level == SOL_SOCKET && h->cmsg_type == SO_RXQ_OVFL) {
                uint32_t dropped;
                memcpy(&dropped, CMSG_DATA(h), sizeof dropped);
                e->count.socket_overflow += dropped - e->overflow_seen;
                e->overflow_seen = dropped;
            }
        }
        e->count.gathered += segment < size;
        if (messages[i].msg_hdr.msg_flags & MSG_TRUNC || !size) {
            e->count.malformed++;
            continue;
        }
        for (uint32_t from = 0; from < size; from += segment)
            handle(e, (struct sockaddr *)&froms[i], (uint8_t *)parts[i].iov_base + from,
                   segment < size - from ? segment : size - from, now);
    }
    return n;
}

/* A mutex alone would let the thread take it again and again. Not by sched_yield: the scheduler may take each call for
 * a slice of time used, and let the thread wait for as many. */
static void give_way(struct engine *e)
{
    if (!atomic_load(&e->waiting))
        return;
    struct timespec until;
    ns end = clock_now() + MS;
    until.tv_sec = end / SECOND;
    until.tv_nsec = end % SECOND;
    e->giving = 1;
    pthread_cond_timedwait(&e->given, &e->lock, &until);
    e->giving = 0;
}

static void *run(void *argument)
{
    struct engine *e = argument;
    struct output o = {.bytes = 0};
    uint32_t sent = 0; /* of `o` */
    ns retry_at = 0, timed_at = 0;
    pthread_mutex_lock(&e->lock);
    for (;;) {
        /* A clock that is read before the socket is found empty: no timer may run out before what came in time. */
        int drained = 0;
        ns before = 0;
        for (int i = 0; i < 8 && !drained; i++) {
            before = clock_now();
            drained = !receive(e);
            give_way(e);
        }
        if (drained || before - timed_at >= AT_LEAST_EVERY) {
            timers(e, drained ? before : before - AT_LEAST_EVERY); /* what came in time may still be waiting to be read */
            timed_at = before;
        } else {
            reports(e, before);
        }
        int stopping = atomic_load(&e->stop);
        int busy = !drained;
        for (int i = 0; i < 4; i++) {
            if (!o.bytes && !produce(e, clock_now(), e->batch, &o))
                break;
            if (clock_now() < retry_at || !transmit(e, &o, &sent)) {
                if (clock_now() >= retry_at)
                    retry_at = clock_now() + MS;
                busy = !drained;
                break;
            }
            o.bytes = sent = 0;
            busy = 1;
        }
        give_way(e);
        if (busy && !stopping)
            continue;
        if (stopping) {
            for (int i = 0; i < 256 && e->control_first != e->control_last && produce_control(e, clock_now(), e->batch, &o); i++) {
                sent = 0;
                transmit(e, &o, &sent);
            }
            break;
        }
        ns until = o.bytes ? retry_at : least(e->timers_at, e->blocked_until), now = clock_now();
        if (o.bytes)
            until = least(until, greatest(e->timers_at, now));
        ns rest = until <= now ? 0 : least(until - now, SECOND);
        atomic_store(&e->asleep, 1);
        pthread_mutex_unlock(&e->lock);
        struct pollfd polled[2] = {{.fd = e->socket, .events = POLLIN}, {.fd = e->wake, .events = POLLIN}};
        struct timespec pause = {rest / SECOND, rest % SECOND};
        if (rest && !atomic_load(&e->waiting))
            ppoll(polled, 2, &pause, NULL);
        atomic_store(&e->asleep, 0);
        if (polled[1].revents & POLLIN) {
            uint64_t count;
            if (read(e->wake, &count, sizeof count) < 0) { /* somebody else's wake */ }
        }
        pthread_mutex_lock(&e->lock);
        if (polled[0].revents & POLLERR)
            read_errors(e);
    }
    pthread_mutex_unlock(&e->lock);
    return NULL;
}

static int granted(int fd, int option, int force, int wanted)
{
    int value = 0;
    socklen_t size = sizeof value;
    if (setsockopt(fd, SOL_SOCKET, force, &wanted, sizeof wanted) < 0)
        setsockopt(fd, SOL_SOCKET, option, &wanted, sizeof wanted);
    getsockopt(fd, SOL_SOCKET, option, &value, &size);
    return value;
}

/* Without `address` there is neither socket nor thread. `result`: port, granted receive buffer, errno of a failure. */
API struct engine *ml_create(const struct settings *set, const struct sockaddr *address, uint32_t address_size, int buffer,
                             int force, int64_t *result)
{
    struct engine *e = calloc(1, sizeof *e);
    if (e)
        e->socket = e->wake = -1;
    if (!e || !(e->controls = calloc(CONTROLS, sizeof *e->controls)))
        goto failed;
    e->set = *set;
    e->gso = 1;
    e->window = e->limit = UINT32_MAX;
    e->timers_at = 0;
    pthread_mutex_init(&e->lock, NULL);
    pthread_mutex_init(&e->tell, NULL);
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&e->told, &monotonic);
    pthread_cond_init(&e->given, &monotonic);
    pthread_condattr_destroy(&monotonic);
    e->wire_overhead = address && address->sa_family == AF_INET6 ? 48 : 28;
    if (!address)
        return e;
    e->receive = malloc((size_t)RECEIVE * RECEIVE_BYTES);
    e->wake = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    e->socket = socket(address->sa_family, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, IPPROTO_UDP);
    if (!e->receive || e->wake < 0 || e->socket < 0 || bind(e->socket, address, address_size) < 0)
        goto failed;
    int on = 1, probe = IP_PMTUDISC_PROBE;
    result[1] = granted(e->socket, SO_RCVBUF, force ? SO_RCVBUFFORCE : SO_RCVBUF, buffer);
    granted(e->socket, SO_SNDBUF, force ? SO_SNDBUFFORCE : SO_SNDBUF, buffer);
    setsockopt(e->socket, SOL_UDP, UDP_GRO, &on, sizeof on);
    setsockopt(e->socket, SOL_SOCKET, SO_RXQ_OVFL, &on, sizeof on);
    if (address->sa_family == AF_INET6) {
        setsockopt(e->socket, IPPROTO_IPV6, IPV6_MTU_DISCOVER, &probe, sizeof probe);
        setsockopt(e->socket, IPPROTO_IPV6, IPV6_RECVERR, &on, sizeof on);
    } else {
        setsockopt(e->socket, IPPROTO_IP, IP_MTU_DISCOVER, &probe, sizeof probe);
        setsockopt(e->socket, IPPROTO_IP, IP_RECVERR, &on, sizeof on);
    }
    if (set->rate < 4e9) {
        uint32_t most = (uint32_t)set->rate; /* has an effect where the qdisc is fq */
        setsockopt(e->socket, SOL_SOCKET, SO_MAX_PACING_RATE, &most, sizeof most);
    }
    struct sockaddr_storage bound;
    socklen_t size = sizeof bound;
    if (getsockname(e->socket, (struct sockaddr *)&bound, &size) < 0)
        goto failed;
    result[0] = ntohs(bound.ss_family == AF_INET6 ? ((struct sockaddr_in6 *)&bound)->sin6_port
                                                  : ((struct sockaddr_in *)&bound)->sin_port);
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are the interpreter's */
    e->running = 1;
    int error = pthread_create(&e->thread, NULL, run, e);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (!error)
        return e;
    e->running = 0;
    errno = error;
failed:
    result[2] = errno;
    if (e) {
        if (e->socket >= 0)
            close(e->socket);
        if (e->wake >= 0)
            close(e->wake);
        free(e->receive);
        free(e->controls);
        free(e);
    }
    return NULL;
}

/* In a child process, which has neither the thread nor a lock that it may trust: the sockets belong to the parent. */
API void ml_forked(struct engine *e)
{
    close(e->socket);
    close(e->wake);
}

/* Channels must be closed, and nobody may call or wait any more. */
API void ml_free(struct engine *e)
{
    if (e->running) {
        uint64_t one = 1;
        atomic_store(&e->stop, 1);
        if (write(e->wake, &one, sizeof one) < 0) { /* full: it is being woken */ }
        pthread_join(e->thread, NULL);
    }
    while (e->channels)
        channel_free(e->channels);
    for (struct flow *f = e->flows, *next; f; f = next) {
        next = f->next;
        free(f->sent);
        free(f->seen);
        free(f);
    }
    if (e->socket >= 0)
        close(e->socket);
    if (e->wake >= 0)
        close(e->wake);
    pthread_cond_destroy(&e->told);
    pthread_cond_destroy(&e->given);
    pthread_mutex_destroy(&e->tell);
    pthread_mutex_destroy(&e->lock);
    free(e->receive);
    free(e->controls);
    free(e);
}
