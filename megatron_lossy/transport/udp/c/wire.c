/* Wire format: a header of 28 bytes, all numbers little-endian, then the payload, then the tag of the cipher if there is one.
 * The table is that of tests/udp_packet.py. Nothing here depends on the content of a datagram.
 */

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "what is sent lies in memory as it is sent");

static uint32_t get32(const uint8_t *p) { uint32_t v; memcpy(&v, p, 4); return v; }
static void put32(uint8_t *p, uint32_t v) { memcpy(p, &v, 4); }

enum { DATA = 1, END, READY, REPORT, ALIVE, PROBE, NACK, ASK };
enum { VERSION = 6, HEADER = 28, TAG = 16, REPORT_BYTES = 48, LARGEST = 65507 };
enum { COPIED = 1, AGAIN }; /* the priority of what is sent several times, and of what is sent again */
enum { CODE = 3, CODES = 3 }; /* raw, int8, int4 */
#define ALL UINT32_MAX /* in END, in the place of a list: every unit must arrive */

struct header {
    uint8_t type, tag; /* type: below the version; tag: the priority, and the code of the bucket from bit CODE on */
    uint16_t source;
    uint32_t channel;
    uint64_t number;
    uint32_t step;
    uint16_t bucket;
    uint8_t phase, zero;
    uint32_t index;
};

/* 0: no datagram of ours, or one of another version. */
static int header_read(struct header *h, const uint8_t *p)
{
    memcpy(h, p, HEADER);
    h->type &= 15;
    return p[0] >> 4 == VERSION && h->type >= DATA && h->type <= ASK && h->tag < CODES << CODE && !h->zero;
}

static void header_write(const struct header *h, uint8_t *p)
{
    memcpy(p, h, HEADER);
    p[0] = (uint8_t)(VERSION << 4 | h->type);
}

/* The payload of a REPORT: what has arrived, the highest number + 1, how long ago that came (µs) and by which clock (µs),
 * DATA that may be on the way: with ease, and at most; bytes/s that come to this process, for each that sends, 0: unknown. */
struct arrivals {
    uint64_t datagrams, bytes, top;
    uint32_t since, clock, window, limit;
    uint64_t share;
};

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
