/* Required units: those that senders of a bucket with reports name in END.
 *
 * Some of them go out several times. A receiver that lacks one asks for it by NACK until it is there or the deadline has passed:
 * for little of it twice in a row, so that what is sent again is sent twice, and seldom lost for another round trip. The sender
 * keeps copies, and sends again what it is asked for.
 */

static void musts_free(struct must_out *musts, uint32_t size)
{
    for (uint32_t i = 0; musts && i < size; i++)
        free(musts[i].list);
    free(musts);
}

/* The required units of each destination, and a copy of them: sources may change when all has been sent once. */
static struct must_out *musts_new(const struct channel *c, const struct bucket *b, const uint8_t *const *from,
                                  const uint8_t *must)
{
    struct must_out *result = calloc(c->size, sizeof *result);
    for (uint32_t i = 0; result && i < c->size; i++) {
        const uint8_t *row = must + (uint64_t)i * b->units;
        struct must_out *one = &result[i];
        uint32_t count = 0;
        for (uint32_t unit = 0; from[i] && unit < b->units; unit++)
            count += row[unit] != 0;
        if (!count)
            continue;
        if (!(one->list = calloc(count, sizeof *one->list + b->unit))) {
            musts_free(result, c->size);
            return NULL;
        }
        one->copies = (uint8_t *)(one->list + count);
        for (uint32_t unit = 0; unit < b->units; unit++) {
            if (!row[unit])
                continue;
            memcpy(one->copies + (uint64_t)one->count * b->unit, from[i] + (uint64_t)unit * b->unit, unit_bytes(b, unit));
            one->list[one->count++] = unit;
        }
    }
    return result;
}

/* How many units END lists: none where all must arrive. */
static uint32_t must_list(const struct dest *d) { return d->must.count < d->x->bucket->units ? d->must.count : 0; }

static uint32_t end_payload(const struct engine *e, const struct dest *d, uint32_t part, uint8_t *p)
{
    uint32_t room = list_room(e), listed = must_list(d), from = part * room, left = from < listed ? listed - from : 0;
    uint32_t here = left < room ? left : room;
    put32(p, d->must.count && !listed ? ALL : d->must.count);
    for (uint32_t k = 0; k < here; k++)
        put32(p + 4 + 4 * k, d->must.list[from + k]);
    return 4 + 4 * here;
}

static void end_said(struct engine *e, struct member *m, const struct dest *d)
{
    uint32_t parts = d->x->bucket->reports ? parts_of(must_list(d), list_room(e)) : 1;
    for (uint32_t part = 0; part < parts; part++)
        control(e, m, END, d->x, d->x->bucket->units + part);
}

/* A part of the list of what must arrive; 1: that was the last one. */
static int end_part(struct exchange *x, struct source *s, uint32_t part, const uint8_t *p, uint32_t size)
{
    struct engine *e = x->channel->engine;
    const struct bucket *b = x->bucket;
    if (size < 4)
        return -1;
    uint32_t count = get32(p), room = list_room(e), all = count == ALL;
    uint32_t listed = all ? 0 : count, parts = parts_of(listed, room);
    uint32_t here = part < parts ? (listed - part * room < room ? listed - part * room : room) : 0;
    if (all)
        count = b->units;
    if (count > b->units || part >= parts || size != 4 + 4 * here || (s->must.told && s->must.count != count))
        return -1;
    if (!s->must.told) {
        size_t charge = x->posted ? 0 : parts + (size_t)count * 4; /* of what waits here peers take no memory */
        if (charge && !early_room(x->channel, charge))
            return 0;
        if (!(s->must.list = calloc(1, (size_t)count * 4 + parts)))
            return 0;
        s->must.told = (uint8_t *)(s->must.list + count);
        early_charge(x, charge);
        s->must.count = count;
        s->must.parts_told = 0;
        for (uint32_t k = 0; all && k < count; k++)
            s->must.list[k] = k;
    }
    if (!s->must.told[part]) {
        memcpy(s->must.list + part * room, p + 4, 4 * here);
        s->must.told[part] = 1;
        s->must.parts_told++;
    }
    if (s->must.parts_told < parts)
        return 0;
    for (uint32_t k = 0; k < count; k++)
        if (s->must.list[k] >= b->units || (k && s->must.list[k] <= s->must.list[k - 1]))
            count = 0; /* no list of ours */
    s->must.count = count;
    return 1;
}

/* A part of what did not arrive; 1: that was the last one. */
static int reported(struct dest *d, uint32_t part, const uint8_t *payload, uint32_t size)
{
    struct engine *e = d->x->channel->engine;
    const struct bucket *b = d->x->bucket;
    uint32_t parts = parts_of(b->units, bits_room(e)), bytes = (b->units + 7) / 8;
    if (!d->report.lost && !(d->report.lost = calloc(1, bytes + parts)))
        return 1; /* as if nothing had arrived */
    uint8_t *come = d->report.lost + bytes + part;
    if (!*come) {
        memcpy(d->report.lost + (uint64_t)part * control_bytes(e), payload, size);
        *come = 1;
        d->report.parts++;
    }
    return d->report.parts == parts;
}

/* How many units that must arrive are missing. */
static uint32_t lacks(const struct source *s)
{
    uint32_t missing = 0;
    for (uint32_t k = 0; k < s->must.count; k++)
        missing += !s->row[s->must.list[k]];
    return missing;
}

/* Ask for it: at once for all of it, as far as the sender keeps track of so much. */
static void ask(struct exchange *x, uint32_t i, uint32_t missing, ns now)
{
    struct engine *e = x->channel->engine;
    struct source *s = &x->sources[i];
    struct member *m = &x->channel->members[i];
    uint32_t parts = parts_of(missing, list_room(e)), most = RESENDS / list_room(e) ? RESENDS / list_room(e) : 1;
    for (uint32_t part = 0; part < parts && part < most; part++)
        control(e, m, NACK, x, part);
    if (missing < s->must.asked)
        s->must.nack_wait = nack_base(m->flow);
    s->must.asked = missing;
    s->must.twice = parts == 1 && !s->must.twice;
    s->must.nack_at = now + (s->must.twice ? reorder_window(e, m->flow) : s->must.nack_wait);
    if (!s->must.twice)
        s->must.nack_wait = least(2 * s->must.nack_wait, SLOWEST);
}

/* The `part`-th of what is missing. */
static uint32_t nack_payload(const struct exchange *x, uint32_t rank, uint32_t part, uint8_t *p)
{
    const struct source *s = &x->sources[rank];
    uint32_t room = list_room(x->channel->engine), skip = part * room, count = 0;
    for (uint32_t k = 0; k < s->must.count && count < room; k++) {
        if (s->row[s->must.list[k]])
            continue;
        if (skip)
            skip--;
        else
            put32(p + 4 * count++, s->must.list[k]);
    }
    return count;
}

static int compare_units(const void *one, const void *other)
{
    const uint32_t *a = one, *b = other;
    return (*a > *b) - (*a < *b);
}

/* It lacks units that must arrive. */
static int take_nack(struct member *m, const struct header *h, const uint8_t *payload)
{
    struct exchange *x = find(m->channel, h->phase, h->step, h->bucket);
    if (!x || !x->dests[m->rank].wanted || x->dests[m->rank].done || !m->resend.ring)
        return LATE;
    struct dest *d = &x->dests[m->rank];
    for (uint32_t k = 0; d->must.count && k < h->index; k++) {
        uint32_t unit = get32(payload + 4 * k);
        const uint32_t *found = bsearch(&unit, d->must.list, d->must.count, sizeof unit, compare_units);
        if (found && m->resend.last - m->resend.first < RESENDS)
            m->resend.ring[m->resend.last++ % RESENDS] = (struct resend){d, (uint32_t)(found - d->must.list)};
    }
    m->channel->engine->blocked_until = 0;
    return TAKEN;
}
