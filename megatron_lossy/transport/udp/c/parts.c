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
