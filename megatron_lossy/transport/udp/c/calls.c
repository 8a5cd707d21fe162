/* The interface to Python: exchanges, counters and rates. */

/* 0: everything that was sent is acknowledged. */
API int ml_linger(struct channel *c, ns timeout)
{
    struct engine *e = c->engine;
    struct timespec until = timespec_of(clock_now() + timeout);
    pthread_mutex_lock(&e->tell);
    int late = 0;
    while (c->unacknowledged && !c->failed && !late)
        late = pthread_cond_timedwait(&e->told, &e->tell, &until) != 0;
    int left = c->unacknowledged && !c->failed;
    pthread_mutex_unlock(&e->tell);
    return left;
}

/* The order of `entries` units, of which each is there at least once; tags of all units. Before the first send. */
API int ml_copies(struct channel *c, int phase, uint32_t bucket, const uint32_t *order, uint32_t entries, const uint8_t *tags)
{
    struct bucket *b = &c->bucket[phase][bucket];
    uint32_t *old = malloc(entries * sizeof *order + b->units), *new = old;
    if (!new)
        return -3;
    memcpy(new, order, entries * sizeof *order);
    memcpy(new + entries, tags, b->units);
    acquire(c->engine);
    int busy = 0;
    for (const struct exchange *x = b->live; x; x = x->same)
        busy |= x->sending && x->unsent;
    if (!busy) {
        old = b->order;
        b->order = new;
        b->tags = (uint8_t *)(new + entries);
        b->entries = entries;
    }
    release(c->engine);
    free(old);
    return busy ? -2 : 0;
}

/* 0 and a handle; -1 failed, -2 not a later step, -3 no memory. `to` is written until ml_wait says that it is over; `arrived` is
 * read as long as there is a handle of the exchange. Neither is touched in a closed or failed channel. */
API int ml_post(struct channel *c, int phase, uint32_t step, uint32_t bucket, uint8_t *const *to, uint8_t *arrived, ns deadline,
                ns now, struct exchange **handle)
{
    acquire(c->engine);
    int result = post(c, phase, step, bucket, to, arrived, deadline, at(now), handle);
    release(c->engine);
    return result;
}

/* `must` [size][units], or NULL: units that must arrive, of a bucket with reports; of `block` of them go
 * `copies` more, in turn. */
API int ml_send(struct channel *c, int phase, uint32_t step, uint32_t bucket, const uint8_t *const *from, const uint8_t *must,
                uint32_t block, uint32_t copies, struct exchange **handle)
{
    struct must_out *musts = NULL;
    if (must && !(musts = musts_new(c, &c->bucket[phase][bucket], from, must)))
        return -3;
    acquire(c->engine);
    int result = send_pieces(c, phase, step, bucket, from, musts, block, copies, handle);
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
        int known = d->report.lost && d->report.parts == parts_of(b->units, bits_room(c->engine));
        for (uint32_t unit = 0; unit < b->units; unit++)
            lost[(uint64_t)i * b->units + unit] = known ? d->report.lost[unit / 8] >> unit % 8 & 1 : 1;
    }
    release(c->engine);
    return result;
}

/* `what`: 0 everything arrived that will; 1 nothing is read from the sources any more. 0 yes, 1 not yet, -1 failed. */
API int ml_wait(struct exchange *x, int what, ns timeout)
{
    struct channel *c = x->channel;
    struct engine *e = c->engine;
    struct timespec until = timespec_of(timeout > 0 ? clock_now() + timeout : 0);
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

/* Does without member `rank` from now on, in a channel that bears that. It gets a message: if it lives, it need not wait for this one. */
API void ml_lose(struct channel *c, uint32_t rank, ns now)
{
    acquire(c->engine);
    if (!c->members[rank].lost) {
        member_lost(c, rank, IN_VAIN, at(now));
        if (c->members[rank].lost)
            last_word(c, rank);
    }
    release(c->engine);
}

/* Why member `rank` is done without; 0: it is not. */
API int ml_lost(const struct channel *c, uint32_t rank) { return c->members[rank].lost; }

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

API void ml_engine_counters(struct engine *e, uint64_t *out)
{
    acquire(e);
    memcpy(out, &e->count, sizeof e->count);
    release(e);
}

/* Counters; rate (bytes/s), least round trip (s), DATA that its buffer holds for us, with ease and at most. */
API void ml_member_counters(struct channel *c, uint32_t rank, uint64_t *counts, double *rates)
{
    acquire(c->engine);
    const struct flow *f = c->members[rank].flow;
    memcpy(counts, &c->members[rank].count, sizeof c->members[rank].count);
    rates[0] = f->rate.rate;
    rates[1] = f->rate.known ? (double)f->rate.rtt_min / 1e9 : 0.0;
    rates[2] = f->out.window;
    rates[3] = f->out.limit;
    release(c->engine);
}
