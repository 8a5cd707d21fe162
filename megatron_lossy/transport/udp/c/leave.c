/* Departures: datagrams of control first, then units asked for again, then DATA in the order of the exchanges, in
 * turn over destinations, as far as pace and window have room.
 */

static uint32_t build(struct engine *e, struct member *m, int type, int tag, int phase, uint32_t step, uint32_t bucket,
                      uint32_t index, const uint8_t *payload, uint32_t size, uint8_t *out, ns now)
{
    struct flow *f = m->flow;
    struct header h = {.type = (uint8_t)type, .tag = (uint8_t)tag, .phase = (uint8_t)phase, .step = step, .index = index,
                       .source = (uint16_t)m->channel->rank, .bucket = (uint16_t)bucket, .channel = m->channel->id,
                       .number = f->out.number};
    header_write(&h, out);
    f->out.data += type == DATA;
    f->out.sent[f->out.number & f->out.mask] = (struct stamp){now, f->out.data};
    f->out.number++;
    m->count.sent++;
    if (e->set.cipher) {
        if (!cipher_seal(key_of(&m->seal, h.number, 1), out, payload, (int)size, out + HEADER))
            memset(out + HEADER, 0, size + TAG); /* libcrypto has no memory left: the other side will refuse it */
    } else {
        memcpy(out + HEADER, payload, size);
    }
    return HEADER + size + tag_bytes(e);
}

/* Datagrams that go out together, `most` or fewer, of one length but for the last. */
struct train { uint8_t *out; uint32_t datagram, most, n, bytes; };

/* Add a unit of an exchange. */
static void train_add(struct engine *e, struct member *m, struct train *t, int priority, const struct exchange *x, uint32_t unit,
                      const uint8_t *payload, ns now)
{
    t->bytes += build(e, m, DATA, priority | x->bucket->code << CODE, x->phase, x->step, x->number, unit, payload,
                      unit_bytes(x->bucket, unit), t->out + t->bytes, now);
    t->n++;
}

/* Add a unit that must arrive, from the copy of it. */
static void train_copy(struct engine *e, struct member *m, struct train *t, int priority, const struct dest *d, uint32_t position,
                       ns now)
{
    const uint8_t *copy = d->must.copies + (uint64_t)position * d->x->bucket->unit;
    train_add(e, m, t, priority, d->x, d->must.list[position], copy, now);
}

/* Whether there is room for another unit: only the last datagram may be shorter. */
static int train_room(const struct train *t)
{
    return !t->n || (t->n < t->most && t->bytes == t->n * t->datagram);
}

static void address(struct output *o, const struct flow *f, uint32_t bytes, uint32_t segment)
{
    memcpy(&o->to, &f->to, sizeof f->to);
    o->to_size = (uint32_t)f->to_size;
    o->bytes = bytes;
    o->segment = segment;
}

static int produce_control(struct engine *e, ns now, uint8_t *out, struct output *o)
{
    static uint8_t zeros[LARGEST];
    uint8_t *list = e->scratch;
    while (e->control.first != e->control.last) {
        const struct control *k = &e->control.ring[e->control.first++ % CONTROLS];
        struct channel *c = k->channel;
        struct member *m = &c->members[k->rank];
        struct flow *f = m->flow;
        struct arrivals arrivals;
        const uint8_t *payload = zeros;
        uint32_t index = k->index, size = 0;
        if (c->failed && !(k->type == ALIVE && k->index == 1))
            continue;
        if (k->type == PROBE)
            size = e->set.packet;
        if (k->type == END && c->bucket[k->phase][k->bucket].reports) {
            const struct exchange *x = find(c, k->phase, k->step, k->bucket);
            if (!x)
                continue;
            payload = list;
            size = end_payload(e, &x->dests[k->rank], k->index - x->bucket->units, list);
        }
        if (k->type == READY && k->index && c->bucket[k->phase][k->bucket].reports) {
            const struct bucket *b = &c->bucket[k->phase][k->bucket];
            const struct report *r = report_of(b, k->rank, k->step);
            if (r) {
                payload = r->lost + (uint64_t)(k->index - 1) * control_bytes(e);
                size = bits_bytes(e, b, k->index - 1);
            } else if (k->index > 1) {
                continue;
            }
        }
        if (k->type == NACK) {
            const struct exchange *x = find(c, k->phase, k->step, k->bucket);
            index = x && !x->sources[k->rank].over ? nack_payload(x, k->rank, index, list) : 0;
            if (!index)
                continue;
            payload = list;
            size = 4 * index;
        }
        if (k->type == REPORT) {
            arrivals = (struct arrivals){f->in.received, f->in.bytes, f->in.top,
                                         (uint32_t)least((now - f->in.top_at) / US, UINT32_MAX), (uint32_t)(f->in.top_at / US),
                                         e->window, e->limit, e->arrivals.share};
            payload = (const uint8_t *)&arrivals;
            size = REPORT_BYTES;
        }
        uint32_t bytes = build(e, m, k->type, 0, k->phase, k->step, k->bucket, index, payload, size, out, now);
        address(o, f, bytes, bytes);
        return 1;
    }
    return 0;
}

enum { FORCED = 4 }; /* datagrams that go out where nothing is reported */

/* How many DATA this destination may get now, as far as its socket's buffer and the network have room. */
static uint32_t window_room(struct engine *e, struct member *m, ns now)
{
    struct flow *f = m->flow;
    uint64_t outstanding = f->out.data - f->out.reported, allowed = f->out.window;
    if (f->rate.known && f->rate.rtt_min >= 2 * MS) {
        double speed = f->rate.rule == DEDICATED ? f->rate.greatest : f->rate.rate;
        allowed += (uint64_t)(speed * (double)f->rate.rtt_min / 1e9 / (HEADER + e->set.packet));
    }
    if (f->rate.rule == SHARED) { /* no more than a queue that has grown meanwhile can say */
        const struct shared *s = &f->rate.shared;
        double most = 2 * s->rate * (double)(shared_trip(s) + 10 * MS) / 1e9 / s->packet + 16;
        allowed = allowed < most ? allowed : (uint64_t)most;
    }
    allowed = allowed < f->out.limit ? allowed : f->out.limit;
    if (outstanding < allowed) {
        f->out.force_wait = greatest(2 * round_trip(f), 30 * MS);
        f->out.force_at = now + f->out.force_wait;
        return (uint32_t)(allowed - outstanding);
    }
    if (now < f->out.force_at) {
        e->blocked_until = least(e->blocked_until, f->out.force_at);
        return 0;
    }
    f->out.force_wait = least(2 * f->out.force_wait, 2 * SECOND); /* reports were lost, or all that they would have reported */
    f->out.force_at = now + f->out.force_wait;
    return FORCED;
}

static int may_begin(const struct member *m, const struct dest *d)
{
    const struct bucket *b = d->x->bucket;
    if (d->ready || d->position == b->entries) /* copies are left */
        return 1;
    if (!near(&m->posted[d->x->phase], d->x->step))
        return 0; /* it would not be kept */
    return m->eager + unit_bytes(b, b->order ? b->order[d->position] : d->position) <= m->eager_limit;
}

/* As may_begin; if not, asks later for its READY, which may have been lost: where a deadline has passed nothing else would
 * come. */
static int begins(const struct member *m, struct dest *d, ns now)
{
    if (may_begin(m, d))
        return 1;
    if (d->ask.at == NEVER)
        repeat_first(d->x, &d->ask, now, greatest(2 * round_trip(m->flow), 20 * MS));
    return 0;
}

/* How many datagrams of a bucket's length go out together. */
static uint32_t batch_most(const struct flow *f, uint32_t datagram, uint32_t room)
{
    double in_burst = f->rate.rate * (double)rate_burst(&f->rate) / 1e9 / datagram;
    ns most = least(least(BATCH_BYTES / datagram, SEGMENTS), least((ns)in_burst, room));
    return (uint32_t)greatest(most, 1);
}

static void spend(struct engine *e, struct flow *f, uint32_t bytes, uint32_t n, ns now)
{
    double wire = bytes + (double)n * e->wire_overhead;
    ns caught = f->rate.rule == SHARED ? rate_burst(&f->rate) : 2 * MS;
    f->out.free_at = greatest(f->out.free_at, now - caught) + (ns)(wire * 1e9 / f->rate.rate);
    e->free_at = greatest(e->free_at, now - 2 * MS) + (ns)(wire * 1e9 / e->set.rate);
}

/* Whether it is its time to send. */
static int may_send(struct engine *e, struct flow *f, ns now)
{
    rate_look(&f->rate, now, now + e->set.clock);
    if (now >= f->out.free_at)
        return 1;
    e->blocked_until = least(e->blocked_until, f->out.free_at);
    return 0;
}

/* 0: it is not its time to send, or there is no room. */
static int train_begins(struct engine *e, struct member *m, const struct bucket *b, ns now, uint8_t *out, struct train *t)
{
    uint32_t datagram = HEADER + b->unit + tag_bytes(e), room = may_send(e, m->flow, now) ? window_room(e, m, now) : 0;
    *t = (struct train){.out = out, .datagram = datagram, .most = batch_most(m->flow, datagram, room)};
    return room > 0;
}

static void train_leaves(struct engine *e, struct flow *f, const struct train *t, struct output *o, ns now)
{
    address(o, f, t->bytes, t->n > 1 ? t->datagram : t->bytes);
    spend(e, f, t->bytes, t->n, now);
}

static int produce_again(struct engine *e, struct member *m, ns now, uint8_t *out, struct output *o)
{
    const struct dest *d = m->resend.ring[m->resend.first % RESENDS].dest;
    struct train t;
    if (!train_begins(e, m, d->x->bucket, now, out, &t))
        return 0;
    while (train_room(&t) && m->resend.first != m->resend.last && m->resend.ring[m->resend.first % RESENDS].dest == d) {
        train_copy(e, m, &t, AGAIN, d, m->resend.ring[m->resend.first++ % RESENDS].position, now);
        m->count.resent++;
    }
    train_leaves(e, m->flow, &t, o, now);
    return 1;
}

static int produce_data(struct engine *e, struct member *m, ns now, uint8_t *out, struct output *o)
{
    if (m->resend.first != m->resend.last)
        return produce_again(e, m, now, out, o);
    struct dest *d = m->queue[0], *other = m->queue[1];
    if (!d || (other && other->x->order < d->x->order)) {
        d = other;
        other = m->queue[0];
    }
    if (!begins(m, d, now)) {
        d = other;
        if (!d || !begins(m, d, now))
            return 0;
    }
    const struct bucket *b = d->x->bucket;
    struct train t;
    if (!train_begins(e, m, b, now, out, &t))
        return 0;
    while (train_room(&t) && d->position < b->entries && may_begin(m, d)) {
        uint32_t unit = b->order ? b->order[d->position] : d->position, size = unit_bytes(b, unit);
        train_add(e, m, &t, b->tags ? b->tags[unit] : 0, d->x, unit, d->from + (uint64_t)unit * b->unit, now);
        if (!m->posted[d->x->phase].known)
            reach(&m->posted[d->x->phase], d->x->step);
        if (!d->ready) {
            m->eager += size;
            d->eager += size;
        }
        d->position++;
    }
    while (train_room(&t) && d->position == b->entries && d->must.repeat < d->must.repeats) {
        train_copy(e, m, &t, COPIED, d, d->must.repeat++ % d->must.count, now);
        m->count.copies++;
    }
    train_leaves(e, m->flow, &t, o, now);
    if (d->position == b->entries && d->must.repeat == d->must.repeats) {
        end_said(e, m, d);
        dest_sent(d, now);
    }
    return 1;
}

/* Write the next datagrams to one destination, of one length but for the last, into `out`. 0: nothing is due now. */
static int produce(struct engine *e, ns now, uint8_t *out, struct output *o)
{
    if (produce_control(e, now, out, o))
        return 1;
    if (now < e->blocked_until)
        return 0;
    e->blocked_until = NEVER;
    if (now < e->free_at) {
        e->blocked_until = e->free_at;
        return 0;
    }
    struct channel *c = e->cursor ? e->cursor : e->channels;
    for (struct channel *first = c; c;) {
        for (uint32_t k = 0; k < c->size && !c->failed; k++) {
            uint32_t i = (c->cursor + k) % c->size;
            struct member *m = &c->members[i];
            if ((m->queue[0] || m->queue[1] || m->resend.first != m->resend.last) && produce_data(e, m, now, out, o)) {
                c->cursor = (i + 1) % c->size;
                e->cursor = c->next;
                e->blocked_until = 0; /* others may have something */
                return 1;
            }
        }
        c = c->next ? c->next : e->channels;
        if (c == first)
            break;
    }
    return 0;
}
