/* Wire format: a header of 28 bytes, all numbers little-endian, then the payload, then the tag of the cipher if there is one.
 * The table is that of tests/udp_packet.py. Nothing here depends on the content of a datagram.
 */

static uint16_t get16(const uint8_t *p) { uint16_t v; memcpy(&v, p, 2); return le16toh(v); }
static uint32_t get32(const uint8_t *p) { uint32_t v; memcpy(&v, p, 4); return le32toh(v); }
static uint64_t get64(const uint8_t *p) { uint64_t v; memcpy(&v, p, 8); return le64toh(v); }
static void put16(uint8_t *p, uint16_t v) { v = htole16(v); memcpy(p, &v, 2); }
static void put32(uint8_t *p, uint32_t v) { v = htole32(v); memcpy(p, &v, 4); }
static void put64(uint8_t *p, uint64_t v) { v = htole64(v); memcpy(p, &v, 8); }

enum { DATA = 1, END, READY, REPORT, ALIVE, PROBE, NACK, ASK };
enum { VERSION = 6, HEADER = 28, TAG = 16, REPORT_BYTES = 48, LARGEST = 65507 };
enum { COPIED = 1, AGAIN }; /* the priority of what is sent several times, and of what is sent again */
enum { CODE = 3, CODES = 3 }; /* raw, int8, int4 */
#define ALL UINT32_MAX /* in END, in the place of a list: every unit must arrive */

struct header {
    uint8_t type, tag, phase; /* tag: the priority, and the code of the bucket from bit CODE on */
    uint16_t source, bucket;
    uint32_t channel, step, index;
    uint64_t number;
};

/* 0: no datagram of ours, or one of another version. */
static int header_read(struct header *h, const uint8_t *p)
{
    *h = (struct header){.type = p[0] & 15, .tag = p[1], .phase = p[22], .source = get16(p + 2), .bucket = get16(p + 20),
                         .channel = get32(p + 4), .step = get32(p + 16), .index = get32(p + 24), .number = get64(p + 8)};
    return p[0] >> 4 == VERSION && h->type >= DATA && h->type <= ASK && h->tag < CODES << CODE && !p[23];
}

static void header_write(const struct header *h, uint8_t *p)
{
    p[0] = (uint8_t)(VERSION << 4 | h->type);
    p[1] = h->tag;
    put16(p + 2, h->source);
    put32(p + 4, h->channel);
    put64(p + 8, h->number);
    put32(p + 16, h->step);
    put16(p + 20, h->bucket);
    p[22] = h->phase;
    p[23] = 0;
    put32(p + 24, h->index);
}

/* The payload of a REPORT: what has arrived, the highest number + 1, how long ago that came (µs) and by which clock (µs),
 * DATA that may be on the way: with ease, and at most; bytes/s that come to this process, for each that sends, 0: unknown. */
struct arrivals {
    uint64_t datagrams, bytes, top;
    uint32_t since, clock, window, limit;
    uint64_t share;
};

static struct arrivals arrivals_read(const uint8_t *p)
{
    return (struct arrivals){get64(p), get64(p + 8), get64(p + 16), get32(p + 24), get32(p + 28), get32(p + 32), get32(p + 36),
                             get64(p + 40)};
}

static void arrivals_write(const struct arrivals *a, uint8_t *p)
{
    put64(p, a->datagrams);
    put64(p + 8, a->bytes);
    put64(p + 16, a->top);
    put32(p + 24, a->since);
    put32(p + 28, a->clock);
    put32(p + 32, a->window);
    put32(p + 36, a->limit);
    put64(p + 40, a->share);
}

static int same_address(const struct sockaddr_storage *a, const struct sockaddr *b)
{
    if (a->ss_family != b->sa_family)
        return 0;
    if (b->sa_family == AF_INET) {
        const struct sockaddr_in *x = (const void *)a, *y = (const void *)b;
        return x->sin_port == y->sin_port && x->sin_addr.s_addr == y->sin_addr.s_addr;
    }
    const struct sockaddr_in6 *x = (const void *)a, *y = (const void *)b;
    return b->sa_family == AF_INET6 && x->sin6_port == y->sin6_port
        && !memcmp(&x->sin6_addr, &y->sin6_addr, sizeof x->sin6_addr);
}
