/* Rate: how fast one destination may be sent to, by one of three rules.
 *
 *   FIXED      as fast as is said
 *   DEDICATED  a link of one's own. Loss alone is no sign: links lose data at any rate. The signs of a full link are that
 *              datagrams wait in its queue, or that much more is lost than was lost before. Then the rate becomes a little less
 *              than what arrives.
 *   SHARED     next to others: shared.c. Each flow is a sender of its own, as a TCP connection is.
 */
enum { FIXED, DEDICATED, SHARED };

struct rate {
    double rate, floor, ceiling;
    double foreign;  /* the share that is lost whatever we do */
    double greatest; /* of the last delivery rates */
    ns rtt_min, stepped_at;
    int rule, starting, known, begun;
    ns came; /* the receiver's clock at the last report */
    struct shared shared; /* of SHARED */
    struct { double last[8]; unsigned next; } delivered;
    struct slots slots; /* of round trips */
    struct last { uint64_t datagrams, bytes, top; uint32_t clock; } report;
    struct interval { double span, bytes; uint64_t numbers, arrived; ns least; } interval; /* since the last decision; ns, without gaps */
};

#define INTERVAL (4 * MS)
#define GAP_US 8000u
#define ENOUGH 128 /* datagrams that say something about a share of a tenth */

/* `packet`: bytes of a full datagram on the wire; `flows`: fair as so many TCP flows. */
static void rate_init(struct rate *r, double floor, double ceiling, int rule, double packet, double flows)
{
    memset(r, 0, sizeof *r);
    r->floor = floor < ceiling ? floor : ceiling;
    r->ceiling = ceiling;
    r->rule = rule;
    r->rate = rule == FIXED ? ceiling : r->floor;
    r->foreign = 0.3;
    r->starting = 1;
    r->interval.least = NEVER;
    if (rule == SHARED) {
        shared_init(&r->shared, ceiling, packet, flows);
        r->rate = r->shared.rate;
    }
}

static void rate_set(struct rate *r, double rate) { r->rate = between(r->floor, rate, r->ceiling); }

/* The least of the last 5 to 10 seconds in which there were samples. */
static void rate_sample(struct rate *r, ns now, ns rtt)
{
    rtt = greatest(rtt, 1);
    r->rtt_min = slots_least(&r->slots, now, rtt, 5 * SECOND);
    r->interval.least = least(r->interval.least, rtt);
    if (!r->known && r->rule == DEDICATED) /* 256 KiB in the first round trip */
        rate_set(r, 262144.0 * 1e9 / (double)r->rtt_min);
    r->known = 1;
    if (r->rule == SHARED)
        shared_sample(&r->shared, now, rtt);
}

static void rate_close_interval(struct rate *r, ns now)
{
    double lost = between(0.0, 1.0 - (double)r->interval.arrived / (double)r->interval.numbers, 1.0);
    r->foreign = lost < r->foreign ? lost : r->foreign + 0.02 * (lost - r->foreign);
    double delivered = r->interval.bytes * 1e9 / r->interval.span;
    r->delivered.last[r->delivered.next++ % 8] = delivered / (1.0 - r->foreign);
    r->greatest = 0.0;
    for (int i = 0; i < 8; i++)
        if (r->delivered.last[i] > r->greatest)
            r->greatest = r->delivered.last[i];
    int queued = r->interval.least != NEVER && r->interval.least - r->rtt_min > greatest(r->rtt_min / 8, 2 * MS);
    int full = queued || lost > r->foreign + 0.12;
    ns step = greatest(r->rtt_min, INTERVAL);
    if (r->starting) {
        if (full) {
            r->starting = 0;
            rate_set(r, r->greatest);
        } else if (now - r->stepped_at >= r->rtt_min && r->greatest > 0.6 * r->rate) {
            rate_set(r, 2.0 * r->rate);
            r->stepped_at = now;
        }
    } else if (full) {
        if (0.9 * r->greatest < r->rate)
            rate_set(r, 0.9 * r->greatest);
        r->stepped_at = now;
    } else {
        if (r->rate < 1.5 * r->greatest) { /* not without proof; from 16 MB/s on by a constant, so that flows get even */
            double share = (double)(now - r->stepped_at) / (double)step;
            double gain = 0.15 * (share < 1.0 ? share : 1.0);
            double slower = 32e6 / (r->rate + 16e6);
            rate_set(r, r->rate * (1.0 + gain * (slower < 1.0 ? slower : 1.0)));
        }
        r->stepped_at = now;
    }
    r->interval = (struct interval){.least = NEVER};
}

/* A REPORT: what has arrived, the highest number + 1, and the receiver's clock (µs) when that came. Of ours: when it was sent
 * (-1: forgotten). `share`: bytes/s that the receiver has for each flow; 0: unknown. */
static void rate_report(struct rate *r, ns now, uint64_t datagrams, uint64_t bytes, uint64_t top, uint32_t clock, ns sent_at,
                        double share)
{
    if (r->begun && (datagrams <= r->report.datagrams || top < r->report.top))
        return;
    if (r->begun) {
        uint32_t passed = clock - r->report.clock;
        r->came += (ns)passed * US;
        if (passed <= GAP_US) {
            r->interval.span += (double)passed * 1e3;
            r->interval.bytes += (double)(bytes - r->report.bytes);
        }
        r->interval.numbers += top - r->report.top;
        r->interval.arrived += datagrams - r->report.datagrams;
    }
    r->begun = 1;
    r->report = (struct last){datagrams, bytes, top, clock};
    if (r->rule == SHARED) {
        r->shared.share = share;
        if (sent_at >= 0)
            shared_report(&r->shared, now, datagrams, top, sent_at, r->came);
        r->rate = r->shared.rate;
    }
    if (r->rule == DEDICATED && r->known && r->interval.numbers >= ENOUGH && r->interval.span >= (double)greatest(r->rtt_min / 4, INTERVAL))
        rate_close_interval(r, now);
}

/* The burst that may go out together, to catch up: queues may be short. */
static ns rate_burst(const struct rate *r) { return r->rule == SHARED ? MS / 4 : MS; }

/* Before something is sent. `clock`: that all hosts have. */
static void rate_look(struct rate *r, ns now, ns clock)
{
    if (r->rule != SHARED)
        return;
    shared_clock(&r->shared, now, clock);
    r->rate = r->shared.rate;
}
