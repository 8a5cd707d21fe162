/* Rate on a shared network: how much of a path there is for one flow of datagrams, next to others.
 *
 * Loss is ours until it is proven to be the path's. Losses of a path do not fall when all flows send less at once, those of a
 * full queue do. So a flow falls after each loss that chance does not explain, and grows as a TCP flow would that got
 * back in the same time what it gave (Cubic, RFC 9438, or Reno), but not faster than a bound without a round trip. When it
 * has waited as long without loss, it looks for more by steps that double.
 *
 * At each tick of a clock that all hosts have, the flows that lost anything dip: they send less for 65 ms. Losses of the last 50
 * ms are the path's (`credit`), and get no answer any more. Until the first tick a flow that fell three times and loses
 * as before holds a part of its rate, so that its dip has enough datagrams. Nothing else raises `credit`.
 *
 * A rate is judged after so much sending at it, in one burst or in several, and what came is timed by the receiver's kernel: neither a
 * sender with little to send nor a process that sleeps is taken for a path that is full.
 *
 * A queue is drained, three times; then it is another flow's, and this one competes: it answers loss only.
 *
 * Times are ns, rates bytes/s. benchmarks/lab/bottleneck.c has the networks for which the constants were found.
 */
#include <math.h>

#define TICK (2 * SECOND)
#define SETTLE (15 * MS)       /* of a dip: clocks differ, and queues drain */
#define DIP (50 * MS)          /* after that, or half a round trip */
#define DIPPED 0.4             /* of the rate */
#define LEAST_WINDOW (6 * MS)  /* of sending at this rate, in one burst or in several, from which a decision is made */
#define PAUSE (5 * MS)         /* of a sender that had nothing to send, or slept: arrivals over it are no measure of the path's rate */
#define ROUND (25 * MS)        /* between steps that double */
#define WAITS (1 * MS)         /* of a round trip: something waits in a queue */
#define HOLDS (20 * MS)        /* that something must wait, to be drained */
#define COMPETES (2 * SECOND)  /* after the last time that something did */
#define LEAST_RATE 30e3
#define GROWTH 0.8             /* of a TCP flow's */
#define BESIDE 1.1             /* the same for one that competes */
#define PATIENCE 25            /* round trips from a drained queue to a search for more, the most */
#define BOUND 3e6              /* bytes/s gained in a second at USUAL, the most */
#define USUAL 7.5e6
#define KEPT 0.78              /* of the rate after a loss */
#define KEPT_LOSSY 0.92        /* on a path that loses */
#define KEPT_DRAINED 0.92      /* of what came through, once a queue is drained */
#define REMEMBERED 0.9         /* of earlier dips */
#define MOST_CREDIT 0.3

enum { STARTS, GROWS, DIPS };

/* Of this span of time and the one before: the least samples. `at`: when this one began; 0: there was none. */
struct slots { ns least[2], at; };

/* The least of the last one or two spans, with `x`. */
static ns slots_least(struct slots *s, ns now, ns x, ns span)
{
    if (!s->at || now - s->at >= span) {
        s->least[1] = s->at ? s->least[0] : NEVER;
        s->least[0] = NEVER;
        s->at = now;
    }
    s->least[0] = least(s->least[0], x);
    return least(s->least[0], s->least[1]);
}

struct tally { double sent, lost; };
struct look { uint64_t datagrams, top; ns sent_at, came; };

struct shared {
    double rate, floor, ceiling, packet; /* packet: bytes of a datagram on the wire */
    double flows;  /* that grow and fall as one, each as a TCP flow */
    double proven; /* the rate that came through when there was loss */
    double credit; /* the share that the path loses */
    double share;  /* what the receiver has for this flow; 0: it did not say */
    int phase, competes, drains;
    ns rtt, srtt; /* least and smoothed round trip */
    struct slots slots;
    struct look base, last; /* where the window begins; the last report */
    ns mark;                /* counted is what is sent from `mark` on: before it was sent at another rate */
    int based;
    ns least; /* of the window: least round trip */
    struct came { double datagrams; ns took; } came; /* of the window: those that came in a row, without pauses, and in what time */
    ns calm_at, queued_at;
    double before;     /* what was proven when the queue began to grow */
    double drained;    /* the rate to go on with when a queue is drained; 0: it fell by a loss since */
    double step, grew; /* of a search for more; seconds of growth since the last loss */
    /* Losses in a row, none of which came at a rate as high as the first. */
    struct { int length; double rate, delivered; struct tally held; } chain;
    struct { ns counts, ends, ended; double rate; int64_t tick; struct tally sum; } dip;
    int lost_any; /* since the last dip */
};

static double between(double low, double x, double high) { return x < low ? low : x > high ? high : x; }

static void shared_set(struct shared *s, double rate) { s->rate = between(s->floor, rate, s->ceiling); }

static void shared_init(struct shared *s, double ceiling, double packet, double flows)
{
    memset(s, 0, sizeof *s);
    s->floor = LEAST_RATE < ceiling ? LEAST_RATE : ceiling;
    s->ceiling = ceiling;
    s->packet = packet;
    s->flows = pow(flows, 0.6); /* in the packet model these leave Cubic what so many Cubic flows would */
    shared_set(s, 10 * packet / 0.01);
    s->least = NEVER;
    s->dip.tick = -1;
}

static ns shared_trip(const struct shared *s) { return s->srtt ? s->srtt : 10 * MS; }

/* The least of the last 3 to 6 seconds. */
static void shared_sample(struct shared *s, ns now, ns rtt)
{
    s->rtt = slots_least(&s->slots, now, rtt, 3 * SECOND);
    s->srtt = s->srtt ? s->srtt + (rtt - s->srtt) / 8 : rtt;
    s->least = least(s->least, rtt);
}

/* A window of what is sent from `mark` on. */
static void window_later(struct shared *s, ns mark)
{
    s->mark = mark;
    s->based = 0;
    s->least = NEVER;
}

static void window_next(struct shared *s)
{
    s->based = 1;
    s->base = s->last;
    s->least = NEVER;
    s->came = (struct came){0, 0};
}

static ns queue(const struct shared *s) { return s->least == NEVER ? 0 : s->least - s->rtt; }
static int lossy(const struct shared *s) { return s->credit >= 0.005; }

/* Losses while nothing waits may be chance. Small flows are many, and see little of what they do. */
static double allowed(const struct shared *s)
{
    double chance = queue(s) > WAITS ? 0.001 : between(0.001, 0.005 * sqrt(s->rate / 12.5e6), 0.01);
    return s->credit > chance ? s->credit : chance;
}

/* Of a start, which is to find the rate of a path that may lose a tenth. */
static int starts_excess(double sent, double lost) { return lost > 0.05 * sent + 3 * sqrt(0.4 * sent); }

/* More than chance explains, as well as the credit is known. */
static int excess(const struct shared *s, double sent, double lost)
{
    double m = allowed(s), known = lossy(s) ? 1 + sent / s->dip.sum.sent : 1;
    return lost > m * sent + 3.5 * sqrt(m * (1 - m) * sent * known) + 0.5;
}

/* Of `flows` equal ones, the rate of one, and what is left of all after one of them has answered a loss. */
static double each(const struct shared *s) { return s->rate / s->flows; }
static double kept(const struct shared *s, double share) { return 1 - (1 - share) / s->flows; }

/* Seconds in which a TCP flow of this rate would get back what it gives after a loss. */
static double reno_epoch(const struct shared *s)
{
    double t = (double)shared_trip(s) / 1e9;
    return 0.3 / 0.53 * each(s) * t * t / s->packet;
}
static double cubic_epoch(const struct shared *s) { return cbrt(0.75 * each(s) * (double)shared_trip(s) / 1e9 / s->packet); }

/* Bytes/s gained in a second. */
static double growth(const struct shared *s)
{
    double reno = reno_epoch(s), cubic = cubic_epoch(s), tcp = 0.3 * s->rate / (reno < cubic ? reno : cubic);
    if (s->competes)
        return BESIDE * tcp;
    double most = s->flows * BOUND * (each(s) < USUAL ? each(s) / USUAL : sqrt(each(s) / USUAL));
    return GROWTH * tcp < most ? GROWTH * tcp : most;
}

/* It waited long enough to look for more. No flow has lost data by a queue that was drained. */
static int patient(const struct shared *s)
{
    double reno = 0.4 * reno_epoch(s), cubic = 0.65 * cubic_epoch(s), wait = reno < cubic ? reno : cubic;
    double most = PATIENCE * (double)shared_trip(s) / 1e9;
    return s->rate >= s->proven || s->step > 0 || s->grew > (s->drained > 0 && wait > most ? most : wait);
}

/* It fell three times, and loses as before: more than what flows of its size do to each other, less than a path can lose. */
static int suspect(const struct shared *s)
{
    const struct tally *h = &s->chain.held;
    double few = 0.005 * (12.5e6 / s->chain.rate) * (12.5e6 / s->chain.rate);
    return s->chain.length >= 3 && h->sent >= 30 && h->lost >= h->sent * between(0.003, few, 0.05) && h->lost <= 0.4 * h->sent;
}

/* Bytes/s that came in this window, by the receiver's clock; `unknown`, if it has too few. */
static double came(const struct shared *s, double unknown)
{
    return s->came.took >= LEAST_WINDOW / 2 ? s->came.datagrams * s->packet * 1e9 / (double)s->came.took : unknown;
}

static void shared_lost(struct shared *s, ns now, double n, double l)
{
    double share = l / (l < 4 && n < 100 ? 100 : n), delivered = s->rate * (1 - share);
    if (n >= 100)
        delivered = came(s, delivered);
    delivered = between(s->rate / 4, delivered / (1 - s->credit), s->rate);
    if (s->chain.length && s->rate < 0.97 * s->chain.rate) {
        s->chain.length++;
    } else {
        s->chain.length = 1;
        s->chain.rate = s->rate;
        s->chain.delivered = s->rate * (1 - share);
        s->chain.held = (struct tally){0, 0};
    }
    s->step = s->grew = s->drained = 0;
    s->phase = GROWS;
    s->lost_any = 1;
    window_later(s, now);
    int held = suspect(s);
    double hold = DIPPED * s->chain.delivered, rate = s->rate * kept(s, lossy(s) ? KEPT_LOSSY : KEPT);
    if (held && s->rate <= hold)
        return; /* it falls no more before a dip has shown whose loss that is */
    double most = kept(s, 0.95) * delivered;
    rate = rate < most ? rate : most;
    if (s->share > 0 && !held)
        rate += 0.5 * (between(rate / 4, kept(s, KEPT) * s->share / (1 - s->credit), 2 * rate) - rate);
    s->proven = delivered;
    shared_set(s, held && rate < hold ? hold : rate);
}

static void dip_over(struct shared *s, double n, double l)
{
    struct tally *d = &s->dip.sum;
    const struct tally *h = &s->chain.held;
    double m = s->credit, off = l - m * n, known = REMEMBERED;
    if (off * off >= 6.25 * (m * (1 - m) * n + 0.25)) /* another path: better at once, worse with care */
        known = off < 0 ? 0.1 : 0.3;
    d->sent = known * d->sent + n;
    d->lost = known * d->lost + l;
    int held = suspect(s);
    double share = held ? h->lost / h->sent : 0, due = share * d->sent;
    if (held && m == 0 && due >= 6 && d->lost > 0.6 * due) { /* it loses as much when all send less */
        d->sent += h->sent;
        d->lost += h->lost;
    }
    s->credit = between(0, d->lost / (d->sent + 30), MOST_CREDIT);
    if (s->credit < 0.003 || d->lost < 3)
        s->credit = 0;
    if (held && s->credit > m) {
        double rate = s->chain.delivered / (1 - s->credit);
        s->proven = rate < s->chain.rate ? rate : s->chain.rate;
        shared_set(s, s->proven * KEPT_LOSSY);
    }
    /* Too few are due to decide, or fewer were lost than would be, but more than nothing: the next dip goes on. */
    int unsure = due < 6 ? share < 0.02 || d->lost > 0.3 * due : due < 24 && d->lost > 0.2 * due;
    s->lost_any = held && s->credit == 0 && unsure;
    if (!s->lost_any)
        s->chain.length = 0;
}

/* `clock`: that all hosts have. Before something is sent. */
static void shared_clock(struct shared *s, ns now, ns clock)
{
    if (s->phase == DIPS) {
        if (s->dip.counts && now >= s->dip.counts) {
            s->dip.counts = 0;
            window_later(s, now);
        }
        if (s->dip.ends && now >= s->dip.ends) {
            s->dip.ended = now;
            s->dip.ends = 0;
            shared_set(s, s->dip.rate);
        }
        return;
    }
    int64_t tick = clock / TICK;
    if (tick == s->dip.tick)
        return;
    int first = s->dip.tick < 0, late = clock % TICK > SETTLE;
    s->dip.tick = tick;
    if (first || late || s->phase == STARTS || !(s->lost_any || s->credit > 0))
        return;
    s->dip.rate = s->rate;
    s->dip.counts = now + SETTLE;
    s->dip.ends = s->dip.counts + greatest(shared_trip(s) / 2, DIP);
    s->dip.ended = 0;
    s->phase = DIPS;
    shared_set(s, DIPPED * (s->rate < s->proven ? s->rate : s->proven));
    window_later(s, NEVER);
}

static void starts(struct shared *s, ns now, double n, double l, int queued)
{
    if (!starts_excess(n, l) && !queued) {
        s->proven = s->rate;
        shared_set(s, 2 * s->rate);
        window_later(s, now);
        return;
    }
    double delivered = came(s, s->rate);
    s->phase = GROWS;
    s->proven = delivered < s->rate ? delivered : s->rate;
    if (l > 0) {
        shared_lost(s, now, n, l);
    } else {
        shared_set(s, 0.8 * s->proven);
        window_later(s, now);
    }
}

static void drain(struct shared *s, ns now, double n)
{
    double rate = came(s, s->rate) / (1 - s->credit);
    if (!s->drains)
        s->before = s->rate > s->proven ? s->rate : s->proven;
    if (n >= 32 && rate <= 0.85 * s->rate)
        s->proven = s->before = rate;
    double through = s->rate < s->proven ? s->rate : s->proven;
    if (s->drains++ >= 2) { /* another flow's queue, or a longer way */
        s->competes = 1;
        s->proven = s->before;
        s->drained = 0;
        shared_set(s, 0.95 * s->proven);
    } else {
        s->drained = s->drains == 1 ? KEPT_DRAINED * through : s->drained;
        shared_set(s, (queue(s) > s->rtt / 2 + 10 * MS ? 0.5 : 0.85) * through);
    }
    s->step = s->grew = 0;
    window_later(s, now);
}

/* A window without more loss than is allowed. */
static void window_over(struct shared *s, ns now, ns passed, double n, double l)
{
    int queued = queue(s) > greatest(4 * MS, s->rtt / 8);
    if (s->phase == STARTS) {
        starts(s, now, n, l, queued);
        return;
    }
    s->calm_at = queued ? 0 : s->calm_at ? s->calm_at : now;
    if (s->competes && s->calm_at && now - s->calm_at > COMPETES)
        s->competes = s->drains = 0;
    if (queued && !s->competes) {
        if (s->queued_at && now - s->queued_at >= HOLDS) {
            s->queued_at = 0;
            drain(s, now, n);
        } else { /* a machine that was busy looks the same, for a moment */
            s->queued_at = s->queued_at ? s->queued_at : now;
            window_next(s);
        }
        return;
    }
    s->queued_at = 0;
    if (!s->competes && s->drains) {
        s->drains = 0;
        if (s->rate < s->drained) {
            shared_set(s, s->drained);
            window_later(s, now);
            return;
        }
    }
    if (s->chain.length && l == 0 && s->rate >= 0.97 * s->chain.rate)
        s->chain.length = 0;
    if (patient(s) && !s->competes) {
        if (passed < ROUND)
            return;
        double most = s->rate < 1.25 * s->proven ? s->rate / 32 : s->rate / 2;
        s->step = s->step > 0 ? 2 * s->step : s->rate / 64;
        s->step = s->step < most ? s->step : most;
        shared_set(s, s->rate + s->step);
        window_later(s, now);
        return;
    }
    double seconds = (double)passed / 1e9;
    shared_set(s, s->rate + growth(s) * seconds);
    s->grew += seconds;
    window_next(s);
}

/* Of rising `datagrams`. `sent_at`: when the number below `top` was sent; `came_at`: when it came, by the receiver's clock. */
static void shared_report(struct shared *s, ns now, uint64_t datagrams, uint64_t top, ns sent_at, ns came_at)
{
    if (s->based) {
        double n = (double)(top - s->last.top), got = (double)(datagrams - s->last.datagrams), l = n > got ? n - got : 0;
        if (sent_at - s->last.sent_at < (ns)(2e9 * n * s->packet / s->rate) + PAUSE) {
            s->came.datagrams += got;
            s->came.took += came_at - s->last.came;
        }
        if (s->phase == GROWS && s->chain.length) {
            s->chain.held.sent += n;
            s->chain.held.lost += l;
        }
    }
    s->last = (struct look){datagrams, top, sent_at, came_at};
    if (!s->based) {
        if (sent_at >= s->mark)
            window_next(s);
        return;
    }
    double n = (double)(top - s->base.top), got = (double)(datagrams - s->base.datagrams), l = n > got ? n - got : 0;
    if (n < 2)
        return;
    if (s->phase == DIPS) {
        if (s->dip.ended && sent_at >= s->dip.ended) {
            s->phase = GROWS;
            dip_over(s, n, l);
            window_later(s, now);
        }
        return;
    }
    ns passed = (ns)(n * s->packet * 1e9 / s->rate);
    if (s->phase != STARTS && passed >= LEAST_WINDOW && excess(s, n, l)) {
        shared_lost(s, now, n, l);
        return;
    }
    ns wanted = greatest(s->rtt / 4, LEAST_WINDOW);
    double enough = s->phase == STARTS ? 8 : lossy(s) ? 4000 * s->credit : 2, most = 0.3 * s->rate / s->packet;
    if (n >= (enough < most ? enough : most) && passed >= wanted)
        window_over(s, now, passed, n, l);
}
