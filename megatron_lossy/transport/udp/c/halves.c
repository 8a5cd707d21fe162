/* The two halves of an exchange: posting it, by which this rank becomes a receiver, and sending it; what a sender does when a
 * receiver is ready, and when it is done.
 */

/* Whether more may come from a member. Its datagrams from before it left may be under way. */
static int comes(const struct member *m, const struct source *s)
{
    return !m->lost || (m->lost == LEFT && s->ended && !s->must.count);
}

static int post(struct channel *c, int phase, uint32_t step, uint32_t bucket, uint8_t *const *to, uint8_t *arrived,
                ns deadline, ns now, struct exchange **handle)
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
        while (chunk) {
            struct early *next = chunk->next;
            if (s->expected)
                unit_arrived(x, i, chunk->unit, chunk->bytes);
            free(chunk);
            chunk = next;
        }
        if (s->expected && (s->got == b->units || !comes(&c->members[i], s)))
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

static int send_pieces(struct channel *c, int phase, uint32_t step, uint32_t bucket, const uint8_t *const *from,
                       struct musts *musts, uint32_t block, uint32_t copies, struct exchange **handle)
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
    x->order = c->engine->orders++;
    for (uint32_t k = 1; k < c->size; k++) {
        uint32_t i = (c->rank + k) % c->size;
        struct dest *d = &x->dests[i];
        struct member *m = &c->members[i];
        if (!from[i] || !m->flow || m->lost || d->done)
            continue;
        d->from = from[i];
        d->wanted = 1;
        if (musts) {
            d->must.list = musts[i].list;
            d->must.copies = musts[i].copies;
            d->must.count = musts[i].count;
            musts[i].list = NULL;
            musts[i].copies = NULL;
            d->must.repeats = (uint32_t)((uint64_t)d->must.count * copies / block);
            if (d->must.count == b->units)
                d->from = d->must.copies; /* so that the caller's memory is not needed any more */
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

/* Nothing comes from member `i` any more, and it takes nothing. Either the channel fails, or what was to come from it is lost. */
static void member_lost(struct channel *c, uint32_t i, int reason, ns now)
{
    struct member *m = &c->members[i];
    if (!c->bears) {
        channel_fail(c, i, reason);
        return;
    }
    if (m->lost || c->failed || !c->open)
        return;
    m->lost = (uint8_t)reason;
    for (struct exchange *x = c->engine->live, *next; x; x = next) {
        next = x->next;
        if (x->channel != c)
            continue;
        struct source *s = &x->sources[i];
        if (x->posted && s->expected && !s->over && !comes(m, s))
            source_over(x, i, now);
        if (x->dests[i].wanted)
            dest_done(&x->dests[i], now);
        else
            exchange_settle(x);
    }
}
