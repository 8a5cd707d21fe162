/* Callers at random against the engine's contract: udp_stateful OPERATIONS SEED CIPHER.
 *
 * Three engines without sockets, joined by a network that loses, doubles, delays and is cut one way. Their callers post, send,
 * skip steps, set deadlines, stop for a while, do without others and close in the middle. Every buffer is exactly as long as it must be and is
 * freed as soon as the contract allows: a sanitizer sees what the engine touches after that. Data reported as arrived are compared with
 * those sent. At the end of an epoch the network is well again: then everything must come to its end.
 * Prints what happened; status 1 and the line of what was wrong. */
#include "udp_draws.h"

enum { RANKS = 3, UNIT = 64, BUCKETS = 3, NEAR = 5, PENDING = 64, MEMORY = 150000, WAYS = 1 << 17, PACKET = 64 };

static const struct { int phase; uint32_t bucket, shard; } kinds[] = {
    {0, 0, 12 * UNIT - 7}, {0, 1, 5 * UNIT}, {0, 2, 9 * UNIT - 1}, {1, 0, 3 * UNIT}, {1, 1, 7 * UNIT - 63}, {1, 2, UNIT - 5},
};
enum { KINDS = sizeof kinds / sizeof *kinds };
static int chooses(int kind) { return kinds[kind].phase == 0 && kinds[kind].bucket > 0; }

static uint64_t epoch;
static uint64_t counted[9];
enum { POSTED, SENT, OVER, LEFT_OPEN, CLOSES, EPOCHS, CUTS, LOST, WITHOUT };

static void fail(int line, const char *what)
{
    fprintf(stderr, "udp_stateful.c:%d: %s (epoch %llu)\n", line, what, (unsigned long long)epoch);
    exit(1);
}

/* ---- The network ---- */

struct way { ns at; uint32_t from, to, size; uint8_t *bytes; };
static struct way ways[WAYS];
static uint32_t under_way;
static ns cut_until[RANKS][RANKS];
static uint32_t loss; /* per mille */

static void carry(ns at, uint32_t from, uint32_t to, const uint8_t *bytes, uint32_t size)
{
    if (under_way == WAYS)
        return;
    struct way way = {at, from, to, size, malloc(size)};
    memcpy(way.bytes, bytes, size);
    uint32_t k = under_way++;
    for (; k && ways[(k - 1) / 2].at > at; k = (k - 1) / 2)
        ways[k] = ways[(k - 1) / 2];
    ways[k] = way;
}

static struct way arrives(void)
{
    struct way first = ways[0], last = ways[--under_way];
    uint32_t k = 0;
    for (uint32_t child; (child = 2 * k + 1) < under_way; k = child) {
        child += child + 1 < under_way && ways[child + 1].at < ways[child].at;
        if (ways[child].at >= last.at)
            break;
        ways[k] = ways[child];
    }
    ways[k] = last;
    return first;
}

/* ---- Callers ---- */

struct half {
    struct exchange *handle;
    uint32_t step, deadlined;
    uint8_t *buffers[RANKS], *arrived; /* a buffer of its own for each other rank */
};
struct caller {
    struct engine *engine;
    struct channel *channel;
    struct half posts[KINDS][PENDING], sends[KINDS][PENDING];
    uint32_t next_post[KINDS], next_send[KINDS];
    ns stopped_until;
};
static struct caller callers[RANKS];
static ns now = SECOND;

static uint8_t right(uint32_t from, uint32_t to, int kind, uint32_t step, uint32_t offset)
{
    return (uint8_t)(from * 31 + to * 17 + (uint32_t)kind * 101 + step * 13 + offset * 7 + epoch * 3);
}

/* Whether ranks may do without others. */
static int bears(void) { return epoch % 5 == 4; }

static void half_free(struct half *h)
{
    for (int i = 0; i < RANKS; i++)
        free(h->buffers[i]);
    free(h->arrived);
    memset(h, 0, sizeof *h);
}

static void open_all(int cipher, uint32_t memory)
{
    static const uint8_t key[16] = "0123456789abcdef";
    struct settings set = {.rate = 1e9, .reorder = draw(2) ? MS : 0, .peer_timeout = (ns)1 << 60, .eager = draw(3) ? 2000 : 100,
                           .memory = memory, .packet = PACKET, .cipher = cipher, .rule = (int)(epoch % 3)};
    int64_t unused[3];
    for (uint32_t rank = 0; rank < RANKS; rank++) {
        struct caller *one = &callers[rank];
        memset(one, 0, sizeof *one);
        one->engine = ml_create(&set, NULL, 0, 0, unused);
        ml_promise(one->engine, 40, 60);
        struct channel *c = one->channel = ml_channel(one->engine, (uint32_t)epoch, rank, RANKS, BUCKETS, BUCKETS, bears());
        for (int kind = 0; kind < KINDS; kind++) {
            if (ml_bucket(c, kinds[kind].phase, kinds[kind].bucket, kinds[kind].shard, UNIT, 0, chooses(kind)))
                fail(__LINE__, "memory");
        }
        for (uint32_t other = 0; other < RANKS; other++) {
            struct sockaddr_in a = address_of(other);
            if (other != rank && ml_member(c, other, (struct sockaddr *)&a, sizeof a, other, 40, 60, set.eager, key, key, now))
                fail(__LINE__, "member");
        }
        ml_open(c);
    }
}

static uint32_t least_step(int kind)
{
    uint32_t result = UINT32_MAX;
    for (int i = 0; i < RANKS; i++) {
        struct caller *one = &callers[i];
        uint32_t step = one->next_post[kind] < one->next_send[kind] ? one->next_post[kind] : one->next_send[kind];
        result = step < result ? step : result;
    }
    return result;
}

static int open_halves(const struct half *halves)
{
    int count = 0;
    for (int k = 0; k < PENDING; k++)
        count += halves[k].handle != NULL;
    return count;
}

static struct half *place(struct half *halves)
{
    for (int k = 0; k < PENDING; k++)
        if (!halves[k].handle && !halves[k].arrived)
            return &halves[k];
    return NULL;
}

static void begin_post(uint32_t rank, int kind, uint32_t step, ns deadline)
{
    struct caller *one = &callers[rank];
    struct half *h = place(one->posts[kind]);
    if (!h)
        fail(__LINE__, "more is open than begins");
    uint32_t units = (kinds[kind].shard + UNIT - 1) / UNIT;
    uint8_t *to[RANKS] = {NULL};
    h->step = step;
    h->deadlined = deadline > 0;
    h->arrived = calloc(RANKS, units);
    for (uint32_t i = 0; i < RANKS; i++)
        if (i != rank) {
            to[i] = h->buffers[i] = malloc(kinds[kind].shard);
            memset(to[i], 0xEE, kinds[kind].shard);
        }
    if (ml_post(one->channel, kinds[kind].phase, step, kinds[kind].bucket, to, h->arrived, deadline, now, &h->handle)) {
        if (!one->channel->failed)
            fail(__LINE__, "post");
        h->handle = NULL;
        half_free(h);
    }
    counted[POSTED]++;
}

static void begin_send(uint32_t rank, int kind, uint32_t step)
{
    struct caller *one = &callers[rank];
    struct half *h = place(one->sends[kind]);
    if (!h)
        fail(__LINE__, "more is open than begins");
    uint32_t units = (kinds[kind].shard + UNIT - 1) / UNIT;
    const uint8_t *from[RANKS] = {NULL};
    uint8_t must[RANKS * 64];
    for (uint32_t k = 0; k < RANKS * units; k++)
        must[k] = kind == 2 || draw(3) == 0;
    h->step = step;
    for (uint32_t i = 0; i < RANKS; i++)
        if (i != rank) {
            from[i] = h->buffers[i] = malloc(kinds[kind].shard);
            for (uint32_t k = 0; k < kinds[kind].shard; k++)
                h->buffers[i][k] = right(rank, i, kind, step, k);
        }
    if (ml_send(one->channel, kinds[kind].phase, step, kinds[kind].bucket, from, chooses(kind) ? must : NULL, 1 + draw(4), draw(3),
                &h->handle)) {
        if (!one->channel->failed)
            fail(__LINE__, "send");
        h->handle = NULL;
        half_free(h);
    }
    counted[SENT]++;
}

static void check(uint32_t rank, int kind, const struct half *h)
{
    uint32_t units = (kinds[kind].shard + UNIT - 1) / UNIT;
    for (uint32_t i = 0; i < RANKS; i++)
        for (uint32_t k = 0; i != rank && k < kinds[kind].shard; k++) {
            int arrived = h->arrived[i * units + k / UNIT];
            counted[LOST] += !arrived && k % UNIT == 0;
            if (h->buffers[i][k] != (arrived ? right(i, rank, kind, h->step, k) : 0xEE))
                fail(__LINE__, arrived ? "other bytes than were sent" : "bytes of a unit that is lost");
            if (kind == 2 && !arrived && !h->deadlined && !ml_lost(callers[rank].channel, i))
                fail(__LINE__, "what must arrive is lost");
        }
}

/* Finished halves are freed at once. Returns the number of halves left. */
static uint32_t give_back(uint32_t rank)
{
    struct caller *one = &callers[rank];
    uint32_t left = 0;
    for (int kind = 0; kind < KINDS; kind++)
        for (int k = 0; k < PENDING; k++) {
            struct half *in = &one->posts[kind][k], *out = &one->sends[kind][k];
            if (in->handle && ml_wait(in->handle, 0, 0) == 0) {
                check(rank, kind, in);
                counted[OVER]++;
                ml_release(in->handle);
                in->handle = NULL;
                for (uint32_t i = 0; i < RANKS; i++) {
                    free(in->buffers[i]);
                    in->buffers[i] = NULL;
                }
            }
            left += in->handle != NULL;
            if (out->handle && ml_wait(out->handle, 1, 0) == 0) {
                uint8_t lost[RANKS * 64];
                if (chooses(kind) && draw(2))
                    (void)ml_reports(out->handle, lost); /* they may come later: nobody asks again */
                ml_release(out->handle);
                half_free(out);
            }
            left += out->handle != NULL;
        }
    for (int kind = 0; kind < KINDS; kind++)
        for (int k = 0; k < PENDING; k++) {
            struct half *in = &one->posts[kind][k];
            int other = 0; /* what has arrived is looked at as long as somebody has a handle of the exchange */
            for (int n = 0; n < PENDING; n++)
                other |= one->sends[kind][n].handle && one->sends[kind][n].step == in->step;
            if (!in->handle && in->arrived && !other)
                half_free(in);
        }
    return left;
}

/* Memory goes at once, whatever is under way. */
static void close_rank(uint32_t rank)
{
    struct caller *one = &callers[rank];
    ml_close(one->channel, now);
    for (int kind = 0; kind < KINDS; kind++)
        for (int k = 0; k < PENDING; k++) {
            counted[LEFT_OPEN] += one->posts[kind][k].handle || one->sends[kind][k].handle;
            half_free(&one->posts[kind][k]);
            half_free(&one->sends[kind][k]);
        }
    one->channel = NULL;
}

/* ---- Time ---- */

static void turn(void)
{
    for (uint32_t rank = 0; rank < RANKS; rank++) {
        struct engine *e = callers[rank].engine;
        struct output o;
        if (now < callers[rank].stopped_until)
            continue;
        ml_timers(e, now);
        while (ml_produce(e, now, e->batch, &o)) {
            uint32_t to = ntohs(((struct sockaddr_in *)&o.to)->sin_port) - 1000u;
            for (uint32_t at = 0; at < o.bytes; at += o.segment) {
                uint32_t size = o.segment < o.bytes - at ? o.segment : o.bytes - at, copies = draw(100) ? 1 : 2;
                for (; copies && now >= cut_until[rank][to]; copies--)
                    if (draw(1000) >= loss)
                        carry(now + MS + draw(3) * draw((uint32_t)MS), rank, to, e->batch + at, size);
            }
        }
        if (e->count.early_bytes > MEMORY)
            fail(__LINE__, "memory of what came early");
    }
    now += 50 * US + draw((uint32_t)MS);
    while (under_way && ways[0].at <= now) {
        struct way way = arrives();
        struct sockaddr_in from = address_of(way.from);
        if (now < callers[way.to].stopped_until)
            carry(callers[way.to].stopped_until + draw((uint32_t)MS), way.from, way.to, way.bytes, way.size); /* in its socket */
        else
            ml_handle(callers[way.to].engine, (struct sockaddr *)&from, way.bytes, way.size, now);
        free(way.bytes);
    }
}

static void operate(void)
{
    uint32_t rank = draw(RANKS);
    int kind = (int)draw(KINDS);
    struct caller *one = &callers[rank];
    if (!one->channel)
        return;
    switch (draw(40)) {
    case 0: /* a cut of up to 5 s, one way */
        cut_until[rank][draw(RANKS)] = now + draw(40) * draw(120) * MS;
        counted[CUTS]++;
        break;
    case 1: one->stopped_until = now + draw(800) * MS; break;
    case 2: loss = draw(3) ? draw(150) : draw(700); break;
    case 3: /* this step is not asked for */
        if (one->next_post[kind] < least_step(kind) + NEAR)
            one->next_post[kind]++;
        break;
    case 5: /* it does without another one from now on */
        if (bears() && !draw(4)) {
            ml_lose(one->channel, (rank + 1 + draw(RANKS - 1)) % RANKS, now);
            counted[WITHOUT]++;
        }
        break;
    case 4: for (int k = 0; k < 200; k++) turn(); break;
    default:
        if (draw(2)) {
            if (one->next_post[kind] < least_step(kind) + NEAR && open_halves(one->posts[kind]) < PENDING / 2)
                begin_post(rank, kind, one->next_post[kind]++, draw(2) ? 0 : (1 + draw(300)) * MS);
        } else if (one->next_send[kind] < least_step(kind) + NEAR && open_halves(one->sends[kind]) < PENDING / 2) {
            begin_send(rank, kind, one->next_send[kind]++);
        }
    }
    give_back(rank);
}

/* The network is well: all that was begun ends, if everybody does his part up to the last step. */
static void settle(void)
{
    loss = 0;
    memset(cut_until, 0, sizeof cut_until);
    for (uint32_t rank = 0; rank < RANKS; rank++) /* who is done without waits in vain, until it does without the other */
        for (uint32_t other = 0; other < RANKS; other++)
            if (other != rank && ml_lost(callers[rank].channel, other))
                ml_lose(callers[other].channel, rank, now);
    for (int kind = 0; kind < KINDS; kind++) {
        uint32_t last = 0;
        for (uint32_t rank = 0; rank < RANKS; rank++) {
            last = callers[rank].next_post[kind] > last ? callers[rank].next_post[kind] : last;
            last = callers[rank].next_send[kind] > last ? callers[rank].next_send[kind] : last;
        }
        for (uint32_t rank = 0; rank < RANKS; rank++) {
            callers[rank].stopped_until = 0;
            while (callers[rank].next_send[kind] <= last)
                begin_send(rank, kind, callers[rank].next_send[kind]++);
            begin_post(rank, kind, last, 0);
        }
    }
    ns end = now + 20 * SECOND;
    for (uint32_t left = 1; left;) {
        turn();
        left = 0;
        for (uint32_t rank = 0; rank < RANKS; rank++) {
            if (callers[rank].channel->failed)
                fail(__LINE__, "a channel failed");
            left += give_back(rank);
        }
        if (now > end)
            fail(__LINE__, "something never ends");
    }
}

int main(int count_of_arguments, char **arguments)
{
    if (count_of_arguments != 4)
        return 2;
    uint64_t operations = strtoull(arguments[1], NULL, 10);
    state = strtoull(arguments[2], NULL, 10);
    int cipher = atoi(arguments[3]);
    if (cipher && ml_load_cipher())
        return 3;
    for (uint64_t done = 0; done < operations;) {
        epoch++;
        loss = draw(300);
        open_all(cipher, draw(2) ? MEMORY : 30000);
        for (uint32_t k = 0, count = 100 + draw(400); k < count && done < operations; k++, done++) {
            operate();
            for (uint32_t turns = draw(4); turns; turns--)
                turn();
        }
        if (draw(2)) {
            settle();
        } else {
            memset(cut_until, 0, sizeof cut_until);
            uint32_t first = draw(RANKS);
            for (uint32_t k = 0; k < RANKS; k++) { /* with data on the way; the others find out */
                close_rank((first + k) % RANKS);
                for (uint32_t turns = draw(60); turns; turns--)
                    turn();
            }
            counted[CLOSES] += RANKS;
        }
        counted[EPOCHS]++;
        for (uint32_t rank = 0; rank < RANKS; rank++) {
            if (callers[rank].channel)
                close_rank(rank);
            ml_free(callers[rank].engine);
        }
        while (under_way)
            free(ways[--under_way].bytes);
    }
    const char *names[] = {"posted", "sent", "over", "open-at-close", "closes", "epochs", "cuts", "lost", "without"};
    for (int i = 0; i < 9; i++)
        printf("%s %llu ", names[i], (unsigned long long)counted[i]);
    printf("\n");
    return 0;
}
