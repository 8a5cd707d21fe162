/* Processes whose address changes: by network address translation, or because their host got another one (RFC 9000, section 9).
 *
 * An authentic datagram that is newer than all before and comes from elsewhere says that its process may have moved. Anybody on
 * the way could have sent it on from there, so it is believed only once a CHALLENGE, 8 random bytes to that address, comes back
 * as an ANSWER. Until then everything goes where it went. Without a cipher nothing is authentic, and addresses stay as they are.
 */
#include <sys/random.h>

#define BELIEVES (3 * SECOND) /* that it may have moved, without an answer */

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

/* Newer than all before, from another address than we send to. */
static void move_seen(struct engine *e, struct flow *f, const struct sockaddr *from, ns now)
{
    if (now < f->move.until && same_address(&f->move.to, from))
        return;
    if (now < f->move.changed_at + 50 * MS || getrandom(f->move.nonce, NONCE, 0) != NONCE)
        return; /* it comes again */
    memset(&f->move.to, 0, sizeof f->move.to);
    memcpy(&f->move.to, from, f->to_size);
    f->move.changed_at = f->move.at = now;
    f->move.until = now + BELIEVES;
    f->move.wait = greatest(2 * round_trip(f), 20 * MS);
    due(e, now);
}

static void move_timers(struct engine *e, struct flow *f, struct member *m, ns now)
{
    if (now >= f->move.until)
        return;
    if (now >= f->move.at) {
        control(e, m, CHALLENGE, NULL, 0);
        f->move.at = now + f->move.wait;
        f->move.wait = least(2 * f->move.wait, SLOWEST);
    }
    due(e, least(f->move.at, f->move.until));
}

static void challenged(struct engine *e, struct member *m, const struct sockaddr *from, const uint8_t *payload)
{
    struct flow *f = m->flow;
    memcpy(f->move.answer, payload, NONCE);
    memset(&f->move.asker, 0, sizeof f->move.asker);
    memcpy(&f->move.asker, from, f->to_size);
    control(e, m, ANSWER, NULL, 0);
}

static int same_host(const struct sockaddr_storage *a, const struct sockaddr_storage *b)
{
    if (a->ss_family == AF_INET)
        return ((const struct sockaddr_in *)a)->sin_addr.s_addr == ((const struct sockaddr_in *)b)->sin_addr.s_addr;
    return !memcmp(&((const struct sockaddr_in6 *)a)->sin6_addr, &((const struct sockaddr_in6 *)b)->sin6_addr,
                   sizeof(struct in6_addr));
}

/* It is there. Another port is the same path. */
static int answered(struct engine *e, struct flow *f, const uint8_t *payload, ns now)
{
    if (now >= f->move.until || memcmp(payload, f->move.nonce, NONCE))
        return LATE;
    if (!same_host(&f->to, &f->move.to))
        rate_moved(&f->rate, now);
    f->to = f->move.to;
    f->move.until = 0;
    f->refused = 0;
    e->count.moved++;
    e->blocked_until = 0;
    flow_back(e, f, now);
    return TAKEN;
}
