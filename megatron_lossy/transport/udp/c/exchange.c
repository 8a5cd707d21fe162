/* Exchange state: how an exchange begins, what it may cost before it is posted, when a source of it is over, and when it
 * will not be asked for any more.
 *
 * An exchange exists from the first of: a post, a send, a datagram of a peer. Memory that peers make it keep is charged to the early
 * pool, which is bounded.
 */

/* In how many parts lists of units and reports come. */
static uint32_t parts_of(uint32_t count, uint32_t room) { return count ? (count + room - 1) / room : 1; }
/* The bytes of a datagram that a list or a report takes: it passes wherever IP does. */
static uint32_t control_bytes(const struct engine *e) { return e->set.packet < 480 ? e->set.packet : 480; }
static uint32_t list_room(const struct engine *e) { return control_bytes(e) / 4 - 1; }
static uint32_t bits_room(const struct engine *e) { return control_bytes(e) * 8; }
static uint32_t bits_bytes(const struct engine *e, const struct bucket *b, uint32_t part)
{
    uint32_t rest = b->units - part * bits_room(e), bits = rest < bits_room(e) ? rest : bits_room(e);
    return (bits + 7) / 8;
}

static struct report *report_of(const struct bucket *b, uint32_t rank, uint32_t step)
{
    struct report *r = &b->reports[rank * REPORTS + step % REPORTS];
    return r->known && r->step == step ? r : NULL;
}

static struct exchange *find(struct channel *c, int phase, uint32_t step, uint32_t bucket)
{
    for (struct exchange *x = c->bucket[phase][bucket].live; x; x = x->same)
        if (x->step == step)
            return x;
    return NULL;
}

static int early_room(struct channel *c, size_t size)
{
    return c->early + size <= c->early_limit && c->engine->count.early_bytes + size <= c->engine->set.memory;
}

static void early_charge(struct exchange *x, size_t size)
{
    struct engine *e = x->channel->engine;
    x->charge += size;
    x->channel->early += size;
    e->count.early_bytes += size;
    if (e->count.early_bytes > e->count.early_most)
        e->count.early_most = e->count.early_bytes;
}

static void early_release(struct exchange *x)
{
    x->channel->early -= x->charge;
    x->channel->engine->count.early_bytes -= x->charge;
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
    x->same = x->bucket->live;
    x->bucket->live = x;
    x->next = e->live;
    if (e->live)
        e->live->previous = x;
    e->live = x;
    for (uint32_t i = 0; i < c->size; i++) {
        x->dests[i].x = x;
        x->dests[i].rank = i;
        x->sources[i].ready.at = x->dests[i].end.at = x->dests[i].ask.at = NEVER;
    }
    if (early)
        early_charge(x, size);
    return x;
}

/* Of what must arrive. */
static void musts_forget(struct source *s)
{
    free(s->must.list);
    memset(&s->must, 0, sizeof s->must);
}

static void source_forget(struct source *s)
{
    for (struct early *next; s->early; s->early = next) {
        next = s->early->next;
        free(s->early);
    }
    musts_forget(s);
    if (s->own_row)
        free(s->row);
}

/* Nothing of it is sent again. */
static void dest_forget(struct dest *d)
{
    struct member *m = &d->x->channel->members[d->rank];
    uint32_t kept = m->resend.first;
    for (uint32_t k = m->resend.first; k != m->resend.last; k++)
        if (m->resend.ring[k % RESENDS].dest != d)
            m->resend.ring[kept++ % RESENDS] = m->resend.ring[k % RESENDS];
    m->resend.last = kept;
    free(d->must.list);
    memset(&d->must, 0, sizeof d->must);
}

static void exchange_free(struct exchange *x)
{
    struct engine *e = x->channel->engine;
    for (uint32_t i = 0; i < x->channel->size; i++) {
        source_forget(&x->sources[i]);
        dest_forget(&x->dests[i]);
        free(x->dests[i].report.lost);
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
    int passed = !later(x->step + 1, &b->posted) || !later(x->step + 1, &b->sent);
    if (!busy && (whole || passed))
        exchange_free(x);
}

/* After a post or send: exchanges of peers that this rank will never join. */
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
            && !near(&c->newest[phase], x->step))
            exchange_free(x);
    }
}

/* A peer's exchange: whether this rank has come to it, or left it out. */
static int passed(const struct channel *c, const struct bucket *b, uint32_t step, int to_receive)
{
    return c->closing || !later(step, to_receive ? &b->posted : &b->sent);
}

/* A peer's exchange that this rank has not come to: TAKEN, LATE, or EARLY_DROPPED: it is too far ahead to be kept, and comes again. */
static int admit(const struct channel *c, int phase, const struct bucket *b, uint32_t step, int to_receive)
{
    return passed(c, b, step, to_receive) ? LATE : near(&c->newest[phase], step) ? TAKEN : EARLY_DROPPED;
}

/* The exchange of a peer's datagram. NULL: it is over or left out here (LATE), or it is not kept (EARLY_DROPPED). */
static struct exchange *come_to(struct member *m, const struct header *h, int to_receive, int *verdict)
{
    struct channel *c = m->channel;
    struct exchange *x = find(c, h->phase, h->step, h->bucket);
    if (x)
        return x;
    *verdict = admit(c, h->phase, &c->bucket[h->phase][h->bucket], h->step, to_receive);
    if (*verdict == TAKEN && !(x = exchange_new(c, h->phase, h->step, h->bucket, 1)))
        *verdict = EARLY_DROPPED;
    return x;
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

/* The losses of source `i` can be asked for when the exchange is gone. */
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

static void channel_fail(struct channel *c, uint32_t culprit, int reason)
{
    struct engine *e = c->engine;
    if (c->failed || !c->open)
        return;
    for (uint32_t i = 0; i < c->size; i++) { /* nothing is read or written any more */
        c->members[i].queue[0] = c->members[i].queue[1] = NULL;
        c->members[i].resend.first = c->members[i].resend.last;
    }
    pthread_mutex_lock(&e->tell);
    c->culprit = (int)culprit;
    c->failed = reason;
    pthread_cond_broadcast(&e->told);
    pthread_mutex_unlock(&e->tell);
}

static void source_over(struct exchange *x, uint32_t i, ns now)
{
    struct source *s = &x->sources[i];
    struct member *m = &x->channel->members[i];
    s->over = 1;
    s->ready.at = NEVER;
    m->count.lost += x->bucket->units - s->got;
    musts_forget(s);
    report_lost(x, i);
    done_said(m, x->phase, x->step, x->number);
    if (--x->open == 0)
        exchange_over(x, now);
}

static ns nack_base(const struct flow *f) { return greatest(3 * round_trip(f) / 2, 5 * MS); }
static ns ready_base(const struct flow *f) { return greatest(round_trip(f) / 2, 5 * MS); }

static void unit_arrived(struct exchange *x, uint32_t i, uint32_t unit, const uint8_t *bytes)
{
    struct source *s = &x->sources[i];
    memcpy(s->to + (uint64_t)unit * x->bucket->unit, bytes, unit_bytes(x->bucket, unit));
    s->row[unit] = 1;
    s->got++;
}
