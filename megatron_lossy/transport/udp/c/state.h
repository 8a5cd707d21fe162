/* State: what an engine remembers of flows, channels, members, buckets and exchanges, and how it asks for a later look.
 *
 *   engine -> flow      another process: numbers, window, rate, reports
 *          -> channel -> member    a rank of it, reached over a flow
 *                     -> bucket -> exchange -> source    what comes from a rank
 *                                           -> dest      what goes to a rank
 *
 * All of it belongs to the holder of `lock`, which is the thread but for short calls. Only `over` and `unsent` of an exchange and
 * `failed` of a channel are also read under `tell`, on which callers wait.
 */

enum { PHASES = 2 };
enum { SEGMENTS = 64, BATCH_BYTES = 65000 }; /* that go out together */
enum { RECEIVE = 32, RECEIVE_BYTES = 65536 }; /* that come in together */
enum { AHEAD = 8 };                          /* steps that a peer may be ahead, and be kept */
enum { CONTROLS = 8192, REPORTS = 4, RESENDS = 4096 };
enum { SILENT = 1, REFUSED, LEFT, DEAF, IN_VAIN }; /* why a channel failed, or a member is done without */
#define SILENCE (200 * MS)        /* of a process: it may receive nothing either */
#define PULSE (50 * MS)           /* between signs of life meanwhile, to few others */
#define PULSES (6 * SECOND)       /* of silence: then they are rare, for a process that is stopped finds all of them */
#define SLOWEST SECOND                    /* between repetitions of one control datagram */

/* The fate of a datagram. */
enum { TAKEN, MALFORMED, FOREIGN, BAD_TAG, DUPLICATE, LATE, EARLY_KEPT, EARLY_DROPPED };

#define ENGINE_COUNTERS(X) \
    X(bytes_sent) X(malformed) X(foreign) X(socket_overflow) X(send_failed) X(too_big) X(unreachable) \
    X(early_bytes) X(early_most) X(segmented)
#define MEMBER_COUNTERS(X) \
    X(sent) X(received) X(lost) X(late) X(duplicate) X(early) X(early_dropped) X(malformed) X(bad_tag) X(asks) \
    X(resent) X(copies)

#define FIELD(name) uint64_t name;
#define NAME(name) #name ","
struct engine_counters { ENGINE_COUNTERS(FIELD) };
struct member_counters { MEMBER_COUNTERS(FIELD) };

API const char *ml_engine_counter_names(void) { return ENGINE_COUNTERS(NAME); }
API const char *ml_member_counter_names(void) { return MEMBER_COUNTERS(NAME); }

struct stamp { ns at; uint64_t data; };

/* The latest of steps that rise modulo 2^32. */
struct latest { uint32_t step; uint8_t known; };

static int later(uint32_t step, const struct latest *l) { return !l->known || (int32_t)(step - l->step) > 0; }
static int near(const struct latest *l, uint32_t step) { return !l->known || (int32_t)(step - l->step) <= AHEAD; }
static void reach(struct latest *l, uint32_t step)
{
    if (later(step, l))
        *l = (struct latest){step, 1};
}

/* Between this process and another one, for all channels that have both. */
struct flow {
    struct flow *next;
    struct sockaddr_storage to;
    socklen_t to_size;
    uint64_t instance; /* of the other process */
    struct member *members, *speaker;
    struct rate rate;
    struct {
        uint64_t number, data;       /* next number; DATA sent */
        uint64_t reported;           /* DATA sent up to the highest number that it has reported */
        struct stamp *sent;              /* when a number was sent; a ring of `mask` + 1 */
        uint64_t mask, reported_top;
        uint32_t window, limit; /* datagrams that it may not have reported; up to `limit` with what the network holds */
        ns free_at, force_at, force_wait;
    } out;
    struct {
        uint64_t received, bytes, top, control_top; /* top: highest number + 1 */
        ns top_at;
        uint32_t interval; /* of arrivals in which it came last */
        uint64_t *seen, seen_words; /* which of the last numbers came, a bit each; a ring, behind `sent` */
    } in;
    struct { uint32_t due, repeats; ns at; } report; /* due: datagrams that are not reported */
    ns heard, refused_at;
    struct { ns at, until; } pulse; /* the next one, while it is silent; it receives nothing from here, until when that is believed */
    uint32_t refused; /* times that its host said so, since its last datagram */
};

/* When a datagram goes again, and the interval, which doubles each time; NEVER: not now. */
struct repeat { ns at, wait; };

/* Required units of a message that goes. */
struct must_out {
    uint32_t *list, count, repeats, repeat; /* repeat: the next of `repeats` datagrams with units that have been sent once */
    uint8_t *copies;                        /* of the units in the list, behind it */
};

struct dest {
    struct dest *next;
    struct exchange *x;
    const uint8_t *from;
    uint32_t rank, position;
    uint64_t eager; /* bytes sent without READY */
    uint8_t wanted, ready, sent, done;
    struct repeat end, ask;
    struct must_out must;
    struct { uint8_t *lost; uint32_t parts; } report; /* units, a bit each, then the parts that came; their number */
};

struct early {
    struct early *next;
    uint32_t unit, size;
    uint8_t bytes[];
};

/* Required units of a message that comes. */
struct must_in {
    uint32_t *list, count, parts_told; /* what END says */
    uint8_t *told; /* the parts of it, behind the list */
    ns told_at; /* when the first part of its END came; 0: not yet */
    uint32_t asked; /* how many were missing when it was last asked for them */
    uint8_t twice;  /* asked once, of two times in a row */
    ns nack_at, nack_wait;
};

struct source {
    uint8_t *to, *row; /* row: of `arrived`, or our own before the exchange is posted */
    struct early *early;
    uint32_t got;
    uint8_t expected, over, ended, own_row;
    ns ended_at;
    struct repeat ready;
    struct must_in must;
};

/* Losses of a source in a step, a bit for each unit: it may ask again. */
struct report { uint32_t step; uint8_t known, *lost; };

struct bucket {
    uint64_t shard;
    uint32_t unit, units, entries; /* entries: of the order in which units are sent; more than units with copies */
    uint32_t *order;
    uint8_t *tags; /* behind the order */
    struct latest posted, sent;
    uint8_t code; /* of its values: 0 raw, 1 int8, 2 int4 */
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
    struct key seal, open;
    struct dest *queue[PHASES], **end[PHASES]; /* end: where the next one goes */
    uint64_t eager, eager_limit; /* bytes sent without READY */
    struct latest posted[PHASES]; /* that it is known to have posted, or the first that it was sent */
    uint8_t gone, lost; /* gone: it has closed the channel, or does without this one; lost: why the others do without it */
    ns told_at; /* that it is done without */
    struct { uint8_t heard, confirmed; ns at, until; } probe;
    struct { uint32_t count; ns at; } replies; /* in this millisecond */
    ns full_at; /* when the last datagram of its bucket's length came */
    struct { struct resend *ring; uint32_t first, last; } resend; /* a ring of RESENDS */
    struct member_counters count;
};

struct channel {
    struct engine *engine;
    struct channel *next;
    uint32_t id, rank, size, buckets[PHASES], cursor;
    struct bucket *bucket[PHASES]; /* behind the members, which are behind this */
    struct member *members;
    struct latest newest[PHASES];
    uint8_t open, closing;
    int failed, culprit, bears; /* bears: lost members are left out, and the channel goes on */
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
    uint64_t eager, memory;
    uint32_t packet;
    int cipher, rule, flows; /* rule: of rates; flows: to others as so many TCP flows; 0: as one */
    ns clock;         /* of all hosts, less this one's */
};

struct engine {
    pthread_mutex_t lock, tell;
    pthread_cond_t told;
    struct settings set;
    struct flow *flows;
    struct channel *channels, *cursor;
    struct exchange *live;
    struct { struct control ring[CONTROLS]; uint32_t first, last; } control; /* that is to go out */
    ns free_at, alive_at, timers_at, blocked_until, pulse;
    uint32_t wire_overhead;
    uint32_t window, limit; /* DATA that this process's buffer holds for each other one: with ease, and at most */
    uint64_t orders;
    /* Arrivals of this interval and their flows, and of the last one bytes/s of each flow. */
    struct { uint64_t bytes, share; uint32_t flows, number; ns ends; } arrivals;
    struct engine_counters count;
    struct {
        int socket, wake, gso, refusals; /* gso: whether the kernel cuts what goes out together */
        uint32_t overflow_seen;
        uint8_t receive[RECEIVE][RECEIVE_BYTES];
    } net;
    struct { pthread_t id; int running, giving; atomic_int stop, asleep, waiting; pthread_cond_t given; } thread;
    uint8_t scratch[LARGEST + 1];
    uint8_t batch[BATCH_BYTES + LARGEST];
};

struct output { struct sockaddr_storage to; uint32_t to_size, bytes, segment; };

static uint32_t tag_bytes(const struct engine *e) { return e->set.cipher ? TAG : 0; }
/* Bytes of a full datagram on the wire. */
static double full_datagram(const struct engine *e) { return HEADER + e->set.packet + tag_bytes(e) + e->wire_overhead; }
static uint32_t unit_bytes(const struct bucket *b, uint32_t unit)
{
    uint64_t rest = b->shard - (uint64_t)unit * b->unit;
    return rest < b->unit ? (uint32_t)rest : b->unit;
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

static void repeat_first(struct exchange *x, struct repeat *r, ns now, ns wait)
{
    *r = (struct repeat){now + wait, wait};
    exchange_due(x, r->at);
}

/* Whether it is to be said again now. */
static int repeats(struct repeat *r, ns now)
{
    if (now < r->at)
        return 0;
    r->wait = least(2 * r->wait, SLOWEST);
    r->at = now + r->wait;
    return 1;
}

static void repeat_sooner(struct exchange *x, struct repeat *r, ns now, ns wait)
{
    if (r->at == NEVER)
        return;
    r->wait = wait;
    r->at = least(r->at, now + wait);
    exchange_due(x, r->at);
}

static void control(struct engine *e, struct member *m, int type, const struct exchange *x, uint32_t index)
{
    if (e->control.last - e->control.first == CONTROLS)
        return; /* as if it were lost */
    struct control *c = &e->control.ring[e->control.last++ % CONTROLS];
    *c = (struct control){.channel = m->channel, .rank = m->rank, .type = (uint8_t)type, .index = index};
    if (x) {
        c->step = x->step;
        c->bucket = x->number;
        c->phase = x->phase;
    }
}

/* To member `rank`: nothing more comes. Twice, as one may be lost. */
static void last_word(struct channel *c, uint32_t rank)
{
    for (int k = 0; c->members[rank].flow && k < 2; k++)
        control(c->engine, &c->members[rank], ALIVE, NULL, 1);
}
