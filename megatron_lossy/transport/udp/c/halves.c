/* The two halves of an exchange: posting it, by which this rank becomes a receiver, and sending it; what a sender does when a
 * receiver is ready, and when it is done.
 */

/* Whether more may come from a member. Its datagrams from before it left may be under way. */
static int comes(const struct member *m, const struct source *s)
{
    return !m->lost || (m->lost == LEFT && s->ended && !s->must.count);
}

/* The exchange of a half that begins: 0, or what ml_post returns. `last`: of its bucket. */
static int half(struct channel *c, int phase, uint32_t step, uint32_t bucket, struct latest *last, struct exchange **handle)
{
    if (c->failed)
        return -1;
    if (!later(step, last))
        return -2;
    struct exchange *x = find(c, phase, step, bucket);
    if (!x && !(x = exchange_new(c, phase, step, bucket, 0)))
        return -3;
    reach(last, step);
    reach(&c->newest[phase], step);
    x->handles++;
    *handle = x;
    return 0;
}

static int post(struct channel *c, int phase, uint32_t step, uint32_t bucket, uint8_t *const *to, uint8_t *arrived,
                ns deadline, ns now, struct exchange **handle)
{
    struct bucket *b = &c->bucket[phase][bucket];
    int result = half(c, phase, step, bucket, &b->posted, handle);
    if (result)
        return result;
    struct exchange *x = *handle;
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
            repeat_first(x, &s->ready, now, ready_base(c->members[i].flow));
        }
    }
    early_release(x);
    if (--x->open == 0)
        exchange_over(x, now);
    forget_passed(c, phase, b);
    return 0;
}

static int send_pieces(struct channel *c, int phase, uint32_t step, uint32_t bucket, const uint8_t *const *from,
                       struct must_out *musts, uint32_t block, uint32_t copies, struct exchange **handle)
{
    struct bucket *b = &c->bucket[phase][bucket];
    int result = half(c, phase, step, bucket, &b->sent, handle);
    if (result)
        return result;
    struct exchange *x = *handle;
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
            d->must = musts[i];
            musts[i].list = NULL;
            d->must.repeats = (uint32_t)((uint64_t)d->must.count * copies / block);
            if (d->must.count == b->units)
                d->from = d->must.copies; /* so that the caller's memory is not needed any more */
        }
        x->unsent++;
        x->unacknowledged++;
        c->unacknowledged++;
        struct dest **end = m->queue[phase] ? m->end[phase] : &m->queue[phase];
        *end = d;
        m->end[phase] = &d->next;
    }
    pthread_cond_broadcast(&c->engine->told);
    pthread_mutex_unlock(&c->engine->tell);
    c->engine->blocked_until = 0;
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
    struct dest **link = &m->queue[x->phase];
    while (*link != d)
        link = &(*link)->next;
    *link = d->next;
    if (!d->next)
        m->end[x->phase] = link;
    d->sent = 1;
    repeat_first(x, &d->end, now, MS / 2);
    pthread_mutex_lock(&e->tell);
    if (--x->unsent == 0)
        pthread_cond_broadcast(&e->told);
    pthread_mutex_unlock(&e->tell);
}

static void dest_ready(struct dest *d)
{
    struct member *m = &d->x->channel->members[d->rank];
    if (!d->ready)
        m->eager -= d->eager;
    reach(&m->posted[d->x->phase], d->x->step);
    d->ready = 1;
    d->ask.at = NEVER;
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
    d->end.at = NEVER;
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
