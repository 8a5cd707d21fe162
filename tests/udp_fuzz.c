/* Mutated datagrams against the engine's handle(): udp_fuzz COUNT SEED CIPHER. Built with the engine inside, and
 * sanitizers; ends with a line of what was refused, or with status 1 and the line. */
#include "udp_draws.h"

enum { RANKS = 3, UNIT = 64, SHARD = 10 * UNIT - 7, UNITS = 10, BUCKETS = 4, MEMORY = 200000, GUARD = 32, WINDOW = 8000, STEPS = 50 };

static void fail(int line)
{
    fprintf(stderr, "udp_fuzz.c:%d\n", line);
    exit(1);
}

static struct channel *open_channel(struct engine *e, uint32_t rank)
{
    static const uint8_t key[16] = "0123456789abcdef";
    struct channel *c = ml_channel(e, 7, rank, RANKS, BUCKETS, BUCKETS, 0);
    for (int phase = 0; phase < PHASES; phase++)
        for (uint32_t b = 0; b < BUCKETS; b++)
            if (ml_bucket(c, phase, b, SHARD, UNIT, 0, phase == 0 && b % 2))
                fail(__LINE__);
    for (uint32_t i = 0; i < RANKS; i++) {
        struct sockaddr_in a = address_of(i);
        if (i != rank && ml_member(c, i, (struct sockaddr *)&a, sizeof a, i, WINDOW, WINDOW, 1 << 20, key, key, 0))
            fail(__LINE__);
    }
    ml_open(c);
    return c;
}

struct half { uint8_t guarded[RANKS][GUARD + SHARD + GUARD], arrived[RANKS * UNITS]; struct exchange *handle, *sending; };

/* In one of the two buckets with reports some units must arrive, in the other one all; every second one is copied. */
static int send_all(struct channel *c, int phase, uint32_t step, uint32_t b, const uint8_t *const *from, struct exchange **handle)
{
    static const uint8_t must[RANKS * UNITS] = {0, 1, 1, 0, 0, 0, 1, 0, 0, 1, 0, 1, 1, 0, 0, 0, 1, 0, 0, 1, 0, 1, 1, 0, 0, 0, 1, 0, 0, 1};
    static uint8_t all[RANKS * UNITS];
    memset(all, 1, sizeof all);
    return ml_send(c, phase, step, b, from, phase == 0 && b == 1 ? must : phase == 0 && b == 3 ? all : NULL, 2, 1, handle);
}

static uint8_t right(uint32_t source, uint32_t offset) { return (uint8_t)(source * 31 + offset * 7 + 1); }

static void close_all(struct engine *engines[RANKS], struct channel *channels[RANKS])
{
    for (int i = 0; i < RANKS; i++) {
        ml_close(channels[i], 0);
        ml_free(engines[i]);
    }
}

static void post_all(struct channel *c, uint32_t step, struct half halves[PHASES][BUCKETS], const uint8_t *source, ns now)
{
    const uint8_t *from[RANKS] = {NULL, source, source};
    for (int phase = 0; phase < PHASES; phase++)
        for (uint32_t b = 0; b < BUCKETS; b++) {
            struct half *h = &halves[phase][b];
            uint8_t *to[RANKS] = {NULL};
            memset(h, 0, sizeof *h);
            memset(h->guarded, 0xEE, sizeof h->guarded);
            for (uint32_t i = 1; i < RANKS; i++)
                to[i] = h->guarded[i] + GUARD;
            if (ml_post(c, phase, step, b, to, h->arrived, 0, now, &h->handle)
                || send_all(c, phase, step, b, from, &h->sending)) {
                if (!c->failed) /* a forged last word came before */
                    fail(__LINE__);
                return;
            }
        }
}

/* Nothing is written but whole units that are said to have arrived; with a cipher only what was sent. */
static void check(struct half halves[PHASES][BUCKETS], int cipher)
{
    for (int phase = 0; phase < PHASES; phase++)
        for (uint32_t b = 0; b < BUCKETS; b++)
            for (uint32_t i = 0; i < RANKS; i++)
                for (uint32_t k = 0; k < GUARD + SHARD + GUARD; k++) {
                    const struct half *h = &halves[phase][b];
                    uint8_t value = h->guarded[i][k];
                    int inside = i && k >= GUARD && k < GUARD + SHARD;
                    uint32_t offset = k - GUARD;
                    if (!inside || !h->arrived[i * UNITS + offset / UNIT]) {
                        if (value != 0xEE)
                            fail(__LINE__);
                    } else if (cipher && value != right(i, offset)) {
                        fail(__LINE__);
                    }
                }
}

int main(int count_of_arguments, char **arguments)
{
    if (count_of_arguments != 4)
        return 2;
    uint64_t count = strtoull(arguments[1], NULL, 10);
    int cipher = atoi(arguments[3]);
    state = strtoull(arguments[2], NULL, 10);
    if (cipher && ml_load_cipher())
        return 3;
    struct settings set = {.rate = 1e12, .reorder = MS, .peer_timeout = (ns)1 << 60, .eager = 1 << 20, .memory = MEMORY,
                           .packet = UNIT, .cipher = cipher};
    int64_t unused[3];
    static struct half halves[2][PHASES][BUCKETS]; /* an exchange before may still be open */
    static uint8_t source[SHARD], pieces[RANKS][SHARD];
    struct sockaddr_in from[RANKS + 1];
    struct engine *engines[RANKS]; /* the first is fuzzed, with mutations of what the others send */
    struct channel *channels[RANKS];
    for (uint32_t i = 0; i <= RANKS; i++)
        from[i] = address_of(i);
    for (uint32_t i = 1; i < RANKS; i++)
        for (uint32_t k = 0; k < SHARD; k++)
            pieces[i][k] = right(i, k);
    uint64_t verdicts[8] = {0}, batch = 0, done = 0;
    ns now = SECOND;
    int again = 1;
    for (uint32_t step = 1; done < count; step++) {
        static uint8_t wire[512][256];
        static uint32_t sizes[512], sources[512];
        uint32_t stored = 0;
        if (again) {
            for (uint32_t i = 0; i < RANKS; i++) {
                engines[i] = ml_create(&set, NULL, 0, 0, unused);
                channels[i] = open_channel(engines[i], i);
            }
            again = 0;
        }
        struct engine *e = engines[0];
        struct channel *c = channels[0];
        int early = draw(4) == 0;
        if (!early)
            post_all(c, step, halves[step % 2], source, now);
        for (uint32_t i = 1; i < RANKS; i++) {
            const uint8_t *to[RANKS] = {NULL};
            struct exchange *handle;
            struct output o;
            to[0] = pieces[i];
            memset(channels[i]->members[0].posted, 0, sizeof channels[i]->members[0].posted); /* what the first says does not come here */
            for (int phase = 0; phase < PHASES; phase++)
                for (uint32_t b = 0; b < BUCKETS; b++) {
                    if (send_all(channels[i], phase, step, b, to, &handle))
                        fail(__LINE__);
                    ml_release(handle);
                }
            ml_timers(engines[i], now);
            while (ml_produce(engines[i], now, engines[i]->batch, &o)) {
                int port = ntohs(((struct sockaddr_in *)&o.to)->sin_port);
                for (uint32_t at = 0; port == 1000 && at < o.bytes && stored < 512; at += o.segment, stored++) {
                    sizes[stored] = o.segment < o.bytes - at ? o.segment : o.bytes - at;
                    memcpy(wire[stored], engines[i]->batch + at, sizes[stored]);
                    sources[stored] = i;
                }
            }
        }
        for (batch = 0; batch < 2000 && done < count; batch++, done++) {
            uint32_t k = draw(stored), size = sizes[k];
            uint8_t datagram[512];
            struct sockaddr_in *sender = draw(50) ? &from[sources[k]] : &from[draw(RANKS + 1)];
            memcpy(datagram, wire[k], size);
            for (uint32_t times = draw(4); times; times--)
                switch (draw(7)) {
                case 0: datagram[draw(size ? size : 1)] ^= (uint8_t)(1 << draw(8)); break;
                case 1: size = draw(size + 1); break;
                case 2: while (size < 200 && draw(8)) datagram[size++] = (uint8_t)draw(256); break;
                case 3: datagram[draw(HEADER)] = (uint8_t)(draw(2) ? 0xFF : draw(256)); break;
                case 4: datagram[0] = (uint8_t)(VERSION << 4 | draw(12)); break;
                case 5: put32(datagram + 24, draw(3) ? draw(UNITS + 2) : UINT32_MAX - draw(3)); break;
                default: put32(datagram + 16, step + draw(12) - 4); datagram[20] = (uint8_t)draw(BUCKETS + 1); datagram[21] = 0;
                }
            uint8_t *exact = malloc(size ? size : 1); /* so that a sanitizer sees a read beyond it */
            memcpy(exact, datagram, size);
            verdicts[ml_handle(e, (struct sockaddr *)sender, exact, size, now)]++;
            free(exact);
            now += draw(5000);
        }
        struct output o;
        ml_timers(e, now);
        while (ml_produce(e, now, e->batch, &o))
            ;
        if (early)
            post_all(c, step, halves[step % 2], source, now);
        check(halves[step % 2], cipher);
        int live = 0;
        for (struct exchange *x = e->live; x; x = x->next)
            live++;
        if (e->count.early_bytes > MEMORY || live > 4 * BUCKETS * PHASES + MEMORY / 200 || (cipher && c->failed))
            fail(__LINE__);
        if (c->failed || step % STEPS == 0) { /* a forged last word, where there is no cipher */
            close_all(engines, channels);
            again = 1;
            continue;
        }
        for (int phase = 0; phase < PHASES; phase++)
            for (uint32_t b = 0; b < BUCKETS; b++) {
                ml_release(halves[step % 2][phase][b].handle);
                ml_release(halves[step % 2][phase][b].sending);
            }
    }
    printf("%llu datagrams:", (unsigned long long)done);
    const char *names[] = {"taken", "malformed", "foreign", "bad tag", "duplicate", "late", "early", "early dropped"};
    for (int i = 0; i < 8; i++)
        printf(" %s %llu", names[i], (unsigned long long)verdicts[i]);
    printf("\n");
    if (!again)
        close_all(engines, channels);
    return 0;
}
