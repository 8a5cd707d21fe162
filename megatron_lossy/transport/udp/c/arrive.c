/* Arrivals: each datagram is checked, opened, counted, and given to its exchange.
 *
 * A datagram whose version, type, channel, source, address, phase, bucket, index or length does not fit is dropped before it is
 * opened, and counted. Nothing in it is used as a size, an address or an offset without a check against what was agreed.
 */

enum { REPLIES = 64 }; /* in a millisecond, to a rank */
#define JUMP ((uint64_t)1 << 20) /* numbers that a flow cannot skip: no window is so large */

static void say_done(struct member *m, const struct header *h, ns now)
{
    if (now >= m->replies.at) {
        m->replies.at = now + MS;
        m->replies.count = 0;
    }
    if (m->replies.count++ < REPLIES)
        done_said(m, h->phase, h->step, h->bucket);
}

static int early_keep(struct exchange *x, struct member *m, uint32_t unit, const uint8_t *bytes, uint32_t size)
{
    struct source *s = &x->sources[m->rank];
    struct channel *c = x->channel;
    size_t charge = sizeof(struct early) + size + 16 + (s->row ? 0 : x->bucket->units);
    if (s->row && s->row[unit])
        return DUPLICATE;
    struct early *chunk = early_room(c, charge) ? malloc(sizeof *chunk + size) : NULL;
    if (!chunk || (!s->row && !(s->row = calloc(1, x->bucket->units)))) {
        free(chunk);
        return EARLY_DROPPED;
    }
    s->own_row = 1;
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

static int take_data(struct member *m, const struct header *h, const uint8_t *bytes, uint32_t size, ns now)
{
    int verdict = TAKEN, copied = h->tag & ((1 << CODE) - 1);
    struct exchange *x = come_to(m, h, 1, &verdict);
    if (verdict == LATE && copied != COPIED) { /* else another one may have come */
        say_done(m, h, now);
        m->count.late++;
    }
    m->count.early_dropped += !x && verdict == EARLY_DROPPED;
    if (!x)
        return verdict;
    struct source *s = &x->sources[m->rank];
    uint32_t unit = h->index;
    if (!x->posted) {
        verdict = admit(m->channel, h->phase, x->bucket, h->step, 1);
        if (verdict == TAKEN)
            verdict = early_keep(x, m, unit, bytes, size);
    } else if (!s->expected) {
        verdict = LATE;
    } else if (s->over && x->rows_gone) {
        verdict = s->got == x->bucket->units ? DUPLICATE : LATE;
    } else if (s->row[unit]) {
        verdict = DUPLICATE;
    } else if (s->over) {
        verdict = LATE;
    } else {
        unit_arrived(x, m->rank, unit, bytes);
        if (!s->ended) {
            s->ready.wait = ready_base(m->flow);
            s->ready.at = now + s->ready.wait;
        } else if (s->must.count) {
            /* It may have been the last that must arrive. While more comes nothing is asked for. */
            exchange_due(x, s->must.count < x->bucket->units ? now : now + MS);
            if (copied == AGAIN)
                s->must.nack_at = greatest(s->must.nack_at, now + greatest(round_trip(m->flow) / 4, 5 * MS));
        }
        if (s->got == x->bucket->units)
            source_over(x, m->rank, now);
    }
    if (x->posted && s->over && verdict != TAKEN && copied != COPIED)
        say_done(m, h, now);
    m->count.early += verdict == EARLY_KEPT;
    m->count.late += verdict == LATE;
    m->count.early_dropped += verdict == EARLY_DROPPED;
    m->count.duplicate += verdict == DUPLICATE && !copied; /* copies are many */
    if (x->posted)
        exchange_settle(x);
    return verdict;
}

static int take_end(struct member *m, const struct header *h, const uint8_t *payload, uint32_t size, ns now)
{
    int verdict = TAKEN;
    struct exchange *x = come_to(m, h, 1, &verdict);
    if (x && !x->posted)
        verdict = admit(m->channel, h->phase, x->bucket, h->step, 1);
    if (verdict == LATE)
        say_done(m, h, now);
    if (verdict != TAKEN)
        return verdict; /* what there was no room for comes again */
    struct source *s = &x->sources[m->rank];
    if (x->posted && (s->over || !s->expected)) {
        say_done(m, h, now);
        return DUPLICATE;
    }
    if (s->ended)
        return DUPLICATE;
    s->must.told_at = s->must.told_at ? s->must.told_at : now;
    if (x->bucket->reports) {
        int result = end_part(x, s, h->index - x->bucket->units, payload, size);
        if (result < 0) {
            m->count.malformed++;
            return MALFORMED;
        }
        if (!result)
            return TAKEN;
    }
    s->ended = 1;
    s->ended_at = now;
    s->ready.at = NEVER;
    s->must.nack_wait = nack_base(m->flow);
    if (x->posted)
        exchange_due(x, now + reorder_window(m->channel->engine, m->flow));
    return TAKEN;
}

/* With an index it wants no more of this exchange; else it has posted it, and has not seen our END. */
static int take_ready(struct member *m, const struct header *h, const uint8_t *payload, uint32_t size, ns now)
{
    int verdict = TAKEN;
    struct exchange *x = come_to(m, h, 0, &verdict);
    if (!x)
        return verdict;
    struct dest *d = &x->dests[m->rank];
    if (h->index) {
        if (!d->wanted || d->done || !size || reported(d, h->index - 1, payload, size))
            dest_done(d, now);
        return TAKEN;
    }
    dest_ready(d);
    if (d->sent && !d->done)
        end_said(m->channel->engine, m, d);
    return TAKEN;
}

/* It waits for our READY, which may have been lost. */
static int take_ask(struct member *m, const struct header *h, ns now)
{
    struct channel *c = m->channel;
    const struct exchange *x = find(c, h->phase, h->step, h->bucket);
    m->count.asks++;
    if (x && x->posted && x->sources[m->rank].expected && !x->sources[m->rank].over)
        control(c->engine, m, READY, x, 0);
    else if ((x && x->posted) || passed(c, &c->bucket[h->phase][h->bucket], h->step, 1)) /* one far ahead is still to come */
        say_done(m, h, now);
    return TAKEN;
}

static int take_report(struct engine *e, struct flow *f, const uint8_t *payload, ns now, ns came)
{
    struct arrivals a;
    memcpy(&a, payload, sizeof a);
    if (a.top > f->out.number || a.datagrams > UINT64_MAX / 2 || a.bytes > UINT64_MAX / 2)
        return MALFORMED;
    uint32_t most = (uint32_t)((f->out.mask + 1) / 4); /* what `sent` has room for */
    f->out.window = (uint32_t)least(greatest(a.window, 1), most);
    f->out.limit = (uint32_t)least(greatest(a.limit, 1), most);
    if (a.top == 0 || a.top < f->out.reported_top)
        return TAKEN;
    const struct stamp *stamp = &f->out.sent[(a.top - 1) & f->out.mask];
    int known = f->out.number - a.top <= f->out.mask && stamp->at; /* else it was sent long ago */
    if (known) {
        ns rtt = came - stamp->at - (ns)a.since * US;
        if (a.top > f->out.reported_top && rtt >= 0)
            rate_sample(&f->rate, now, rtt);
        if (stamp->data > f->out.reported) {
            f->out.reported = stamp->data;
            f->out.force_wait = greatest(2 * round_trip(f), 30 * MS);
            f->out.force_at = now + f->out.force_wait;
            e->blocked_until = 0;
        }
    }
    f->out.reported_top = a.top;
    rate_report(&f->rate, now, a.datagrams, a.bytes, a.top, a.clock, known ? stamp->at : -1, (double)a.share);
    return TAKEN;
}

/* The share of each flow in all arrivals, by intervals of 100 ms. */
static void shares(struct engine *e, struct flow *f, size_t bytes, ns now)
{
    if (now >= e->arrivals.ends) {
        int whole = now < e->arrivals.ends + 100 * MS && e->arrivals.flows > 1; /* alone it has all, and learns nothing */
        e->arrivals.share = whole ? e->arrivals.bytes * 10 / e->arrivals.flows : 0;
        e->arrivals.bytes = e->arrivals.flows = 0;
        e->arrivals.number++;
        e->arrivals.ends = now + 100 * MS;
    }
    e->arrivals.flows += f->in.interval != e->arrivals.number;
    f->in.interval = e->arrivals.number;
    e->arrivals.bytes += bytes + e->wire_overhead;
}

static void report_later(struct engine *e, struct flow *f, ns now)
{
    uint32_t threshold = (uint32_t)between(1, e->window / 4, 256);
    f->report.repeats = 0;
    if (++f->report.due >= threshold)
        f->report.at = now;
    else if (f->report.due == 1)
        f->report.at = now + 2 * MS;
    due(e, f->report.at);
}

/* DUPLICATE: a number came before; LATE: it is older than the window; else TAKEN. Before `top` moves. A ring of words as in
 * RFC 6479: the one that begins anew may not be one that is still asked about, so that the window has 64 numbers less. */
static int replayed(struct flow *f, uint64_t number)
{
    if (number + 64 * (f->in.seen_words - 1) < f->in.top)
        return LATE;
    if (number >= f->in.top) {
        uint64_t last = number / 64, first = f->in.top ? (f->in.top - 1) / 64 + 1 : 0;
        for (uint64_t k = 0; first + k <= last && k < f->in.seen_words; k++)
            f->in.seen[(first + k) % f->in.seen_words] = 0;
    }
    uint64_t *seen = &f->in.seen[number / 64 % f->in.seen_words], bit = (uint64_t)1 << number % 64;
    int again = (*seen & bit) != 0;
    *seen |= bit;
    return again ? DUPLICATE : TAKEN;
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
            repeat_sooner(x, &s->ready, now, ready_base(f));
            repeat_sooner(x, &d->ask, now, ready_base(f));
            repeat_sooner(x, &d->end, now, MS);
        }
}

/* `came`: when the datagram arrived at this host; at `now` this process looks at it. */
static int handle(struct engine *e, const struct sockaddr *from, const uint8_t *p, size_t n, ns now, ns came)
{
    uint32_t tag = tag_bytes(e);
    struct header h;
    if (n < HEADER + tag || n > LARGEST || !header_read(&h, p)) {
        e->count.malformed++;
        return MALFORMED;
    }
    int type = h.type, phase = h.phase, verdict = TAKEN;
    uint32_t source = h.source, step = h.step, bucket = h.bucket, index = h.index, size = (uint32_t)n - HEADER - tag;
    uint64_t number = h.number;
    struct channel *c = e->channels;
    while (c && c->id != h.channel)
        c = c->next;
    if (!c || c->failed || source >= c->size || !c->members[source].flow
        || !same_address(&c->members[source].flow->to, from)) {
        e->count.foreign++;
        return FOREIGN;
    }
    struct member *m = &c->members[source];
    struct flow *f = m->flow;
    int keyed = type <= READY || type >= NACK; /* it names an exchange */
    int fits = keyed ? phase < PHASES && bucket < c->buckets[phase] : !phase && !bucket && !step;
    if (fits) {
        const struct bucket *b = keyed ? &c->bucket[phase][bucket] : NULL;
        uint8_t code = type == DATA ? b->code : 0;
        switch (type) {
        case DATA: fits = index < b->units && size == unit_bytes(b, index); break;
        case END: fits = b->reports ? index >= b->units && size >= 4 && size <= e->set.packet : index == b->units && !size; break;
        case READY:
            fits = index <= 1 && !size;
            if (b->reports && index && index <= parts_of(b->units, bits_room(e)))
                fits |= size == bits_bytes(e, b, index - 1);
            break;
        case NACK: fits = b->reports && index && index <= list_room(e) && size == 4 * index; break;
        case ASK: fits = !index && !size; break;
        case REPORT: fits = !index && size == REPORT_BYTES; break;
        case ALIVE: fits = index <= 2 && !size; break;
        default: fits = index <= 2 && size <= e->set.packet;
        }
        fits = fits && h.tag >> CODE == code;
    }
    if (!fits || number >= f->in.top + JUMP) {
        m->count.malformed++;
        return MALFORMED;
    }
    const uint8_t *payload = p + HEADER;
    if (tag) {
        if (!cipher_open(key_of(&m->open, number, 0), p, payload, (int)size, e->scratch)) {
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
    f->in.received++;
    f->in.bytes += n;
    if (number >= f->in.top) {
        f->in.top = number + 1;
        f->in.top_at = came;
        if (now - f->heard > SILENCE + round_trip(f) + 20 * MS) /* it did not answer to the first pulse */
            flow_back(e, f, now);
        for (struct member *one = now - f->heard > 2 * SECOND ? f->members : NULL; one; one = one->next)
            one->full_at = now; /* while nothing came at all, nothing full could */
        f->heard = now;
        f->refused = 0;
    }
    if (type == REPORT || type == ALIVE) { /* replayed, they would do harm */
        if (number < f->in.control_top)
            return LATE;
        f->in.control_top = number + 1;
    }
    if (type == DATA || type == END || type == PROBE)
        report_later(e, f, now);
    if (type == DATA)
        shares(e, f, n, now);
    if (type == DATA && size == c->bucket[phase][bucket].unit)
        m->full_at = now;
    if (m->lost && m->lost != LEFT && keyed && now >= m->told_at + e->pulse) { /* it has no message that it is left out */
        m->told_at = now;
        control(e, m, ALIVE, NULL, 1);
    }
    switch (type) {
    case DATA: verdict = take_data(m, &h, payload, size, now); break;
    case END: verdict = take_end(m, &h, payload, size, now); break;
    case READY: verdict = take_ready(m, &h, payload, size, now); break;
    case NACK: verdict = take_nack(m, &h, payload); break;
    case ASK: verdict = take_ask(m, &h, now); break;
    case REPORT:
        if ((verdict = take_report(e, f, payload, now, came)) == MALFORMED)
            m->count.malformed++;
        break;
    case ALIVE:
        if (index == 2) {
            f->pulse.until = now + 4 * e->pulse;
            due(e, now);
        }
        if (index == 1 && !m->gone) { /* its last word: what we sent it is done, what it did not send will not come */
            m->gone = 1;
            if (c->bears) {
                member_lost(c, source, LEFT, now);
                break;
            }
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
        m->probe.heard = 1;
        if (index)
            m->probe.confirmed = 1;
        if (index < 2) /* 0: answer; 1: received, answer; 2: received */
            control(e, m, PROBE, NULL, 2);
        break;
    }
    return verdict;
}
