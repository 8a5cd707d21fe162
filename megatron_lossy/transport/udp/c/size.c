/* Paths whose MTU changes. Large datagrams that vanish while small ones pass are a black hole (RFC 8899): the MTU of the way has
 * fallen, and the message that should say so was lost or would be a forgery as likely.
 *
 * A sender sees it in REPORTs: no more has come than was shorter. Then it sends MEASURE of several lengths; what comes is answered
 * by MEASURED. From then on units that are longer go in as few pieces as get through, and a unit is lost with any of its pieces.
 * As long as that is so, the longer ones are tried again.
 */

enum { ABSENT = 32 }; /* of the longest in a row, of which none came */
enum { ROUNDS = 4, MOST_ROUNDS = 20 }; /* of MEASURE, before one looks at what came; and at all */
#define TRIED_AGAIN (10 * SECOND)
#define CHANCE 0.002 /* that loss alone looks like a shorter path */

/* Into so many pieces a unit may be cut. */
static const uint8_t cuts[] = {1, 2, 3, 4, 6, 8, 12, 16};

static uint32_t piece_of(uint32_t unit, uint32_t pieces) { return (unit + pieces - 1) / pieces; }

/* Bytes of a piece of `size` bytes, in a bucket with units of `unit`; UINT32_MAX: it has no such piece. */
static uint32_t piece_bytes(uint32_t unit, uint32_t size, uint32_t pieces, uint32_t piece)
{
    uint32_t length = piece_of(unit, pieces), from = piece * length;
    return from >= size ? UINT32_MAX : size - from < length ? size - from : length;
}

static uint32_t pieces_to(const struct flow *f, uint32_t unit)
{
    return f->size.most ? parts_of(unit, f->size.most) : 1;
}

static void measure(struct engine *e, struct flow *f, ns now)
{
    f->size.measures = 1;
    f->size.rounds = 0;
    memset(f->size.heard, 0, sizeof f->size.heard);
    f->size.at = now;
    due(e, now);
}

/* A REPORT: of what was sent before the number `top` `full` were the longest, and `datagrams` came. */
static void size_reported(struct engine *e, struct flow *f, uint64_t datagrams, uint64_t top, uint64_t full, ns now)
{
    uint64_t sent = full - f->size.looked, numbers = top - f->out.reported_top, others = numbers > sent ? numbers - sent : 0;
    f->size.looked = full;
    if (datagrams - f->rate.report.datagrams > others)
        f->size.silent = 0; /* not all of them were shorter */
    else
        f->size.silent += (uint32_t)least(sent, ABSENT);
    if (f->size.silent >= ABSENT && !f->size.measures && now >= f->size.from) {
        f->size.silent = 0;
        measure(e, f, now);
    }
}

/* The least number of pieces in which what was measured gets through, if that can be told; else 0. */
static uint32_t best_cut(const struct engine *e, const struct flow *f)
{
    uint32_t now = pieces_to(f, e->set.packet), k = 0, lengths = sizeof cuts, came = 0;
    while (k < lengths && !f->size.heard[cuts[k]])
        k++;
    if (k == lengths)
        return 0;
    if (cuts[k] <= now)
        return cuts[k];
    for (uint32_t i = k; i < lengths; i++)
        came += f->size.heard[cuts[i]];
    /* If what is longer got through as often, none would have come by this chance. */
    double none = pow(fmax(0, 1 - (double)came / ((lengths - k) * f->size.rounds)), f->size.rounds);
    return none < CHANCE ? cuts[k] : 0;
}

static void measured(struct engine *e, struct flow *f, uint32_t cut, ns now)
{
    uint32_t before = pieces_to(f, e->set.packet);
    f->size.measures = 0;
    f->size.silent = 0;
    if (!cut) { /* an outage, or so much loss that nothing can be told */
        f->size.wait = f->size.wait ? least(2 * f->size.wait, 2 * SECOND) : 100 * MS;
        f->size.from = now + f->size.wait;
        f->size.again_at = greatest(f->size.again_at, f->size.from);
        return;
    }
    f->size.wait = 0;
    e->net.gso = e->net.cuts; /* an older kernel refuses it for the length of what it shall cut */
    f->size.most = cut == 1 ? 0 : piece_of(e->set.packet, cut);
    f->size.from = now + 100 * MS;
    f->size.again_at = now + TRIED_AGAIN;
    e->count.shortened += cut > before;
    e->count.lengthened += cut < before;
    if (cut > before)
        rate_restart(&f->rate, now);
}

static void size_timers(struct engine *e, struct flow *f, ns now)
{
    if (!f->size.measures && f->size.most && now >= f->size.again_at)
        measure(e, f, now);
    if (f->size.measures && now >= f->size.at) {
        uint32_t cut = f->size.rounds % ROUNDS || !f->size.rounds ? 0 : best_cut(e, f);
        if (cut || f->size.rounds == MOST_ROUNDS) {
            measured(e, f, cut, now);
        } else {
            for (uint32_t k = 0; k < sizeof cuts; k++)
                control(e, f->members, MEASURE, NULL, cuts[k]);
            f->size.at = now + (++f->size.rounds % ROUNDS ? 5 * MS : 3 * round_trip(f) / 2 + 20 * MS);
        }
        due(e, now);
    }
    due(e, f->size.measures ? f->size.at : f->size.most ? f->size.again_at : NEVER);
}

/* A piece has come. Returns the unit or parity, once it is whole, or NULL. It is kept aside till then: the memory of a unit that
 * is lost in the end stays as it was. */
static const uint8_t *assemble(struct channel *c, struct member *m, const struct header *h, const uint8_t *payload, uint32_t size)
{
    const struct bucket *b = &c->bucket[h->phase][h->bucket];
    if (!m->assembly.of) {
        m->assembly.of = calloc(ASSEMBLIES, sizeof *m->assembly.of);
        m->assembly.bytes = malloc((size_t)ASSEMBLIES * c->full);
        if (!m->assembly.of || !m->assembly.bytes) {
            free(m->assembly.of);
            free(m->assembly.bytes);
            m->assembly.of = NULL;
            m->assembly.bytes = NULL;
            return NULL; /* as if it were lost */
        }
    }
    uint32_t k = 0;
    struct assembly *a = NULL;
    for (; k < ASSEMBLIES; k++) {
        a = &m->assembly.of[k];
        if (a->have && a->type == h->type && a->phase == h->phase && a->pieces == h->pieces && a->bucket == h->bucket
            && a->step == h->step && a->index == h->index)
            break;
    }
    if (k == ASSEMBLIES) { /* the oldest one has to go */
        k = m->assembly.next++ % ASSEMBLIES;
        a = &m->assembly.of[k];
        *a = (struct assembly){.type = h->type, .phase = h->phase, .pieces = h->pieces, .bucket = h->bucket, .step = h->step,
                               .index = h->index};
    }
    uint8_t *bytes = m->assembly.bytes + (size_t)k * c->full;
    uint32_t length = piece_of(b->unit, h->pieces), whole = h->type == DATA ? unit_bytes(b, h->index) : b->unit;
    memcpy(bytes + h->piece * length, payload, size);
    a->have |= (uint16_t)(1u << h->piece);
    uint32_t count = parts_of(whole, length);
    if (a->have != (uint16_t)((1u << count) - 1))
        return NULL;
    a->have = 0;
    return bytes;
}
