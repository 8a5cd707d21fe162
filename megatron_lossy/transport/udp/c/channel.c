/* Channels: how one is opened, finds its members, and is closed. Called from Python, by any thread. */

static void acquire(struct engine *e)
{
    atomic_fetch_add(&e->thread.waiting, 1);
    pthread_mutex_lock(&e->lock);
    atomic_fetch_sub(&e->thread.waiting, 1);
}

static void release(struct engine *e)
{
    if (e->thread.giving)
        pthread_cond_signal(&e->thread.given);
    pthread_mutex_unlock(&e->lock);
    if (e->thread.running && atomic_load(&e->thread.asleep)) {
        uint64_t one = 1;
        if (write(e->net.wake, &one, sizeof one) < 0) { /* full: it is being woken */ }
    }
}

static ns at(ns now) { return now < 0 ? clock_now() : now; }

/* `bears`: lost members are left out, and the channel goes on. */
API struct channel *ml_channel(struct engine *e, uint32_t id, uint32_t rank, uint32_t size, uint32_t grad, uint32_t param,
                               int bears)
{
    struct channel *c = calloc(1, sizeof *c + size * sizeof *c->members + ((size_t)grad + param) * sizeof(struct bucket));
    if (!c)
        return NULL;
    c->members = (struct member *)(c + 1);
    c->bucket[0] = (struct bucket *)(c->members + size);
    c->bucket[1] = c->bucket[0] + grad;
    c->engine = e;
    c->id = id;
    c->rank = rank;
    c->size = size;
    c->buckets[0] = grad;
    c->buckets[1] = param;
    c->bears = bears;
    c->cursor = (rank + 1) % size;
    for (uint32_t i = 0; i < size; i++) {
        c->members[i].channel = c;
        c->members[i].rank = i;
    }
    uint64_t limit = (uint64_t)(size - 1) * (2 * e->set.eager + (1 << 20));
    c->early_limit = limit < e->set.memory ? limit : e->set.memory;
    return c;
}

/* `code` of the values: 0 raw, 1 int8, 2 int4. `reported`: senders of this bucket get reports of missing units, and may name units
 * that must arrive. Before ml_open. */
API int ml_bucket(struct channel *c, int phase, uint32_t bucket, uint64_t shard, uint32_t unit, int code, int reported)
{
    struct bucket *b = &c->bucket[phase][bucket];
    b->shard = shard;
    b->unit = unit;
    b->units = b->entries = (uint32_t)((shard + unit - 1) / unit);
    b->code = (uint8_t)code;
    uint32_t kept = c->size * REPORTS, bytes = (b->units + 7) / 8;
    if (reported && !(b->reports = calloc(kept, sizeof *b->reports + bytes)))
        return -3;
    for (uint32_t k = 0; reported && k < kept; k++)
        b->reports[k].lost = (uint8_t *)(b->reports + kept) + (uint64_t)k * bytes;
    for (uint32_t i = 0; reported && i < c->size; i++)
        if (!c->members[i].resend.ring && !(c->members[i].resend.ring = malloc(RESENDS * sizeof *c->members[i].resend.ring)))
            return -3;
    return 0;
}

enum { LEAST_REPLAY = 128, MOST_REPLAY = 2048 }; /* words of 64 numbers */

/* Room for all that may overtake a datagram: what is sent at full rate in 100 ms, or in the time that is waited for them. */
static uint64_t replay_words(const struct engine *e)
{
    double numbers = e->set.rate * (double)greatest(e->set.reorder, 100 * MS) / 1e9 / (HEADER + e->set.packet + tag_bytes(e));
    uint64_t words = LEAST_REPLAY;
    while (words < MOST_REPLAY && 64.0 * (double)words < numbers)
        words *= 2;
    return words;
}

static void flow_empty(struct flow *f)
{
    free(f->out.sent);
    f->out.sent = NULL;
}

/* 0: no memory. `limit`: numbers that it may be sent and may not have reported. */
static int flow_fill(struct flow *f, uint64_t limit)
{
    if (f->out.sent)
        return 1;
    f->out.mask = 1023;
    while (f->out.mask < 4 * limit)
        f->out.mask = 2 * f->out.mask + 1;
    if (!(f->out.sent = calloc(1, (f->out.mask + 1) * sizeof *f->out.sent + f->in.seen_words * sizeof *f->in.seen)))
        return 0;
    f->in.seen = (uint64_t *)(f->out.sent + f->out.mask + 1);
    f->out.reported = f->out.data; /* of what went out before nothing is known any more */
    return 1;
}

#define FORGOTTEN (60 * SECOND) /* of silence, after which a flow that no channel has gives its rings back */

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
    f->out.window = f->out.limit = UINT32_MAX;
    f->in.seen_words = replay_words(e);
    f->report.at = NEVER;
    rate_init(&f->rate, 4e6, e->set.rate, e->set.rule, full_datagram(e), e->set.flows ? e->set.flows : 1);
    f->next = e->flows;
    e->flows = f;
    return f;
}

/* `window`, `limit`: DATA that the peer's buffer holds for us, until its REPORTs say otherwise; `eager`: bytes that it keeps of
 * what it has not posted. Before ml_open. */
API int ml_member(struct channel *c, uint32_t rank, const struct sockaddr *to, uint32_t to_size, uint64_t instance,
                  uint32_t window, uint32_t limit, uint64_t eager, const uint8_t *key_out, const uint8_t *key_in, ns now)
{
    struct engine *e = c->engine;
    struct member *m = &c->members[rank];
    acquire(e);
    /* Of processes that came and went there may be many. Their numbers stay: the other end may have kept its state of them. */
    for (struct flow *old = e->flows; old; old = old->next)
        if (!old->members && at(now) - old->heard >= FORGOTTEN)
            flow_empty(old);
    struct flow *f = flow_find(e, to, (socklen_t)to_size, instance);
    int keys = !e->set.cipher || (key_new(&m->seal, key_out, 1) && key_new(&m->open, key_in, 0));
    int room = f && flow_fill(f, limit) && keys;
    if (room) {
        f->out.window = window < f->out.window ? window : f->out.window;
        f->out.limit = limit < f->out.limit ? limit : f->out.limit;
        f->heard = at(now);
        m->eager_limit = eager;
        m->flow = f;
        m->next = f->members;
        f->members = m;
    }
    release(e);
    return room ? 0 : -1;
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

/* DATA that each other process may have on the way here, now that there are so many of them; REPORTs carry it. */
API void ml_promise(struct engine *e, uint32_t window, uint32_t limit)
{
    acquire(e);
    e->window = window;
    e->limit = limit;
    for (struct flow *f = e->flows; f; f = f->next) {
        f->report.repeats = 0;
        f->report.at = 0;
    }
    due(e, 0);
    release(e);
}

/* Send every member PROBEs until it says that one came, or `until`. */
API void ml_probe(struct channel *c, ns until)
{
    acquire(c->engine);
    for (uint32_t i = 0; i < c->size; i++)
        c->members[i].probe.until = until;
    due(c->engine, 0);
    release(c->engine);
}

/* Bit 0: its PROBE came; bit 1: ours came there. */
API int ml_probed(struct channel *c, uint32_t rank)
{
    acquire(c->engine);
    int result = c->members[rank].probe.heard | c->members[rank].probe.confirmed << 1;
    release(c->engine);
    return result;
}

static void exchanges_free(struct channel *c)
{
    for (struct exchange *x = c->engine->live, *next; x; x = next) {
        next = x->next;
        if (x->channel == c)
            exchange_free(x);
    }
}

/* Without lock: of a channel that is not called any more. */
static void channel_free(struct channel *c)
{
    struct engine *e = c->engine;
    exchanges_free(c);
    uint32_t kept = e->control.first;
    for (uint32_t k = e->control.first; k != e->control.last; k++)
        if (e->control.ring[k % CONTROLS].channel != c)
            e->control.ring[kept++ % CONTROLS] = e->control.ring[k % CONTROLS];
    e->control.last = kept;
    for (uint32_t i = 0; i < c->size; i++) {
        struct member *m = &c->members[i];
        key_free(&m->seal);
        key_free(&m->open);
        free(m->resend.ring);
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
    for (uint32_t b = 0; b < c->buckets[0] + c->buckets[1]; b++) {
        free(c->bucket[0][b].order);
        free(c->bucket[0][b].reports);
    }
    free(c);
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
            c->members[i].queue[0] = c->members[i].queue[1] = NULL;
            last_word(c, i);
        }
        exchanges_free(c);
        c->closing = 1;
        c->unacknowledged = 0;
        c->free_at = at(now) + 2 * SECOND;
        due(e, c->free_at);
    }
    release(e);
}
