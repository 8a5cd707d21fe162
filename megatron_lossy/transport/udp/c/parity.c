/* Parity: which packets each parity is the sum of, as coding.py has it; in how many parts lists of units and reports come. */

static uint32_t parts_of(uint32_t count, uint32_t room) { return count ? (count + room - 1) / room : 1; }
/* The bytes of a datagram that a list or a report takes: it passes wherever IP does. */
static uint32_t control_bytes(const struct engine *e) { return e->set.packet < 480 ? e->set.packet : 480; }
static uint32_t list_room(const struct engine *e) { return control_bytes(e) / 4 - 2; }
static uint32_t bits_room(const struct engine *e) { return control_bytes(e) * 8; }
static uint32_t bits_bytes(const struct engine *e, const struct bucket *b, uint32_t part)
{
    uint32_t rest = b->units - part * bits_room(e), bits = rest < bits_room(e) ? rest : bits_room(e);
    return (bits + 7) / 8;
}
static void end_said(struct engine *e, struct member *m, const struct dest *d);

/* `code`: block << 16 | parities of a block. */
static uint32_t last_parities(uint32_t count, uint32_t code)
{
    uint32_t block = code >> 16, rest = count % block, parities = ((code & 0xffff) * rest + block - 1) / block;
    return parities ? parities : 1;
}
static uint32_t parities_of(uint32_t count, uint32_t code)
{
    if (!(code & 0xffff) || !count)
        return 0;
    uint32_t block = code >> 16;
    return count / block * (code & 0xffff) + (count % block ? last_parities(count, code) : 0);
}
/* Of parity `index`: its first packet, the distance to the next one, and the end of its block. More parities than packets
 * repeat those before them. */
static void group_of(uint32_t index, uint32_t count, uint32_t code, uint32_t *first, uint32_t *step, uint32_t *end)
{
    uint32_t block = code >> 16, parities = code & 0xffff, number = least(index / parities, count / block), size = block;
    *step = parities;
    if (number == count / block) {
        *step = last_parities(count, code);
        size = count % block;
    }
    *step = least(*step, size);
    *first = number * block + (index - number * parities) % *step;
    *end = number * block + size;
}

static struct report *report_of(const struct bucket *b, uint32_t rank, uint32_t step)
{
    struct report *r = &b->reports[rank * REPORTS + step % REPORTS];
    return r->known && r->step == step ? r : NULL;
}
