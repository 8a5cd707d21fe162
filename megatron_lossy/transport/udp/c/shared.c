/* Rate on a shared network: `struct shared` finds how much of a path is there for one aggregate of two hosts.
 *
 * Loss is ours until it is proven to be the path's: what a path loses does not fall when everybody sends less at once. So
 * without proof (`credit` 0) the rate falls after a loss that chance does not explain, and grows as a Cubic flow's would, by
 * RFC 9438, but not faster than a bound that knows no round trip. Who falls three times and loses as before is a suspect; all
 * suspects send less at the same moments of a clock that both sites know, and what they lose then is the path's. Only this
 * raises `credit`. A flow with credit goes on proving it, seldom.
 *
 * Times are ns, rates bytes/s. Numbers count datagrams. The tests have a model of it in Python (tests/udp_models.py).
 */
#include <math.h>

#define TICK (2 * SECOND)  /* of the common clock */
#define LEAST_WINDOW (6 * MS)
#define SETTLE (15 * MS)   /* of a dip: others' clocks differ, and the queue drains */
#define TOLERATED 0.003    /* share of loss that says nothing */
#define LEAST_RATE 30e3
#define PACKET 1500.0
#ifndef QUEUE
#define QUEUE (1 * MS)
#endif
#ifndef COMP
#define COMP 1.2
#endif
#ifndef KEEP
#define KEEP 1
#endif
#ifndef TOL1
#define TOL0 0.001
#define TOL1 0.005
#define TOL2 0.01
#endif
#ifndef GROWTH
#define GROWTH 0.8
#endif
#ifndef BOUND
#define BOUND 3e6
#endif
#ifndef POWER
#define POWER 1.0
#endif
#ifndef PATIENCE
#define PATIENCE 0.4
#endif
#ifndef PATIENCE_CUBIC
#define PATIENCE_CUBIC 0.65
#endif
#ifndef ROUND
#define ROUND (25 * MS)
#endif
#ifndef BACK
#define BACK 0.78
#endif
#ifndef BACK_LOSSY
#define BACK_LOSSY 0.92
#endif
#ifndef MEMORY
#define MEMORY 0.9
#endif

enum { STARTS, GROWS, DIPS };

struct tally { double sent, lost; };
struct look { uint64_t datagrams, top; ns sent_at, came; };

struct shared {
    double rate, proven, floor, ceiling;
    double credit; /* the share that the path loses, proven */
    double share;  /* what the receiver has for this aggregate; 0: it did not say */
    int phase, competes, drains;
    ns rtt, srtt, skew; /* least and smoothed round trip; skew: the common clock less ours */
    struct { ns least[2], at; } slot;
    struct look base, last; /* where the window begins; the last report */
    uint64_t mark;          /* the window begins with this number: what was sent before was sent at another rate */
    int begun, based;
    ns queued, gap; /* of the window: least round trip, longest pause between reports' datagrams */
    ns calm_at;
    double before; /* what was proven when the queue began to grow */
    double step, grew; /* of a rise; seconds since the last loss */
    /* Losses in a row, none of which came at a rate as high as the first. */
    struct { int length; double rate, delivered, loss; struct tally held; } chain;
    struct { ns counts, ends; uint64_t last; double rate; int64_t tick; struct tally sum; } dip;
    struct tally since; /* the last loss */
    int lost_any;       /* since the last dip */
};

static double between(double low, double x, double high) { return x < low ? low : x > high ? high : x; }
static ns trip(const struct shared *s) { return s->srtt ? s->srtt : 10 * MS; }

static void shared_init(struct shared *s, double floor, double ceiling)
{
    memset(s, 0, sizeof *s);
    s->floor = floor < LEAST_RATE ? floor : LEAST_RATE;
    s->floor = s->floor < ceiling ? s->floor : ceiling;
    s->ceiling = ceiling;
    s->rate = between(s->floor, 10 * PACKET / 0.01, ceiling);
    s->slot.least[0] = s->slot.least[1] = s->queued = NEVER;
    s->dip.tick = -1;
}

static void restart(struct shared *s, uint64_t number)
{
    s->mark = number;
    s->based = 0;
    s->queued = NEVER;
}

static void set_rate(struct shared *s, double rate) { s->rate = between(s->floor, rate, s->ceiling); }

/* The least of the last 3 to 6 seconds. */
static void shared_sample(struct shared *s, ns now, ns rtt)
{
    rtt = rtt < 1 ? 1 : rtt;
    if (!s->srtt) {
        s->slot.at = now;
    } else if (now - s->slot.at >= 3 * SECOND) {
        s->slot.least[1] = s->slot.least[0];
        s->slot.least[0] = NEVER;
        s->slot.at = now;
    }
    s->slot.least[0] = least(s->slot.least[0], rtt);
    s->rtt = least(s->slot.least[0], s->slot.least[1]);
    s->srtt = s->srtt ? s->srtt + (rtt - s->srtt) / 8 : rtt;
    s->queued = least(s->queued, rtt);
}

static int lossy(const struct shared *s) { return s->credit >= 0.005; }
static ns queue(const struct shared *s) { return s->queued == NEVER ? 0 : s->queued - s->rtt; }

/* What is lost while nothing waits may be chance; small flows are many, and see little of what they do. */
static double allowed(const struct shared *s)
{
    double chance = queue(s) > QUEUE ? TOL0 : between(TOL0, TOL1 * sqrt(s->rate / 12.5e6), TOL2);
    return fmax(s->credit, chance);
}

/* More than chance explains, where the credit is known from so many datagrams. */
static int excess(const struct shared *s, double n, double l)
{
    double m = allowed(s), known = lossy(s) ? s->dip.sum.sent : 0;
    return l > m * n + 3.5 * sqrt(m * (1 - m) * n * (1 + (known > 0 ? n / known : 0))) + 0.5;
}

/* Seconds in which a TCP flow of this rate would get back what it gives after a loss: as Reno, or as Cubic. */
static double reno_epoch(const struct shared *s)
{
    double t = (double)trip(s) / 1e9;
    return 0.3 / 0.53 * s->rate * t * t / PACKET;
}
static double cubic_epoch(const struct shared *s) { return cbrt(0.75 * s->rate * (double)trip(s) / 1e9 / PACKET); }
static double epoch(const struct shared *s) { return fmin(reno_epoch(s), cubic_epoch(s)); }
static double patience(const struct shared *s) { return fmin(PATIENCE * reno_epoch(s), PATIENCE_CUBIC * cubic_epoch(s)); }

/* Bytes/s gained in a second. */
static double growth(const struct shared *s)
{
    double most = BOUND * pow(s->rate / 7.5e6, s->rate < 7.5e6 ? POWER : 0.5), g = GROWTH * 0.3 * s->rate / epoch(s);
    return g < most ? g : most;
}

/* It fell three times and loses as before. */
static int suspect(const struct shared *s)
{
    double few = 0.005 * (12.5e6 / s->chain.rate) * (12.5e6 / s->chain.rate), p = s->chain.held.lost, n = s->chain.held.sent;
    return s->chain.length >= 3 && n >= 30 && p >= n * between(TOLERATED, few, 0.05) && p <= 0.4 * n;
}

static void lost(struct shared *s, double n, double l, ns took, uint64_t number)
{
    double share = l / (l < 4 && n < 100 ? 100 : n), delivered = s->rate * (1 - share) / (1 - s->credit);
    if (s->chain.length && s->rate < 0.97 * s->chain.rate) {
        s->chain.length++;
    } else {
        s->chain.length = 1;
        s->chain.rate = s->rate;
        s->chain.loss = s->since.sent > 0 ? s->since.lost / s->since.sent : share;
        s->chain.delivered = s->rate * (1 - share);
        s->chain.held = (struct tally){0, 0};
    }
#ifdef DEBUG
    fprintf(stderr, "%.3f lost n %.0f l %.0f rate %.3f chain %d (%.3f, %.3f) held %.0f/%.0f susp %d credit %.4f\n", s->last.sent_at/1e9, n, l, s->rate/1e6, s->chain.length, s->chain.rate/1e6, s->chain.loss, s->chain.held.lost, s->chain.held.sent, suspect(s), s->credit);
#endif
    s->since = (struct tally){0, 0};
    s->step = s->grew = 0;
    s->phase = GROWS;
    s->lost_any = 1;
    restart(s, number);
    double hold = 0.4 * (s->chain.delivered < s->chain.rate ? s->chain.delivered : s->chain.rate);
    if (suspect(s) && s->rate <= hold)
        return; /* it falls no more before the next dip has told whose loss that is */
    if (n >= 100 && took >= LEAST_WINDOW / 2) /* so fast they came */
        delivered = (n - l) * PACKET * 1e9 / (double)took / (1 - s->credit);
    delivered = between(s->rate / 4, delivered, s->rate);
    s->proven = delivered;
    double rate = s->rate * (lossy(s) ? BACK_LOSSY : BACK);
    if (rate > 0.95 * delivered)
        rate = 0.95 * delivered;
    if (s->share > 0 && !suspect(s))
        rate += 0.5 * (between(rate / 4, BACK * s->share / (1 - s->credit), 2 * rate) - rate);
    set_rate(s, suspect(s) && rate < hold ? hold : rate);
}

static void dip_over(struct shared *s, double n, double l)
{
    struct tally *d = &s->dip.sum, *h = &s->chain.held;
    double m = s->credit, off = l - m * n;
    double kept = off * off < 6.25 * (m * (1 - m) * n + 0.25) ? MEMORY : off < 0 ? 0.1 : 0.3;
    d->sent = kept * d->sent + n;
    d->lost = kept * d->lost + l;
    int held = suspect(s);
    double share = held ? h->lost / h->sent : 0, due = share * d->sent;
    s->lost_any = 0;
    if (held && !m && due >= 6 && d->lost > 0.6 * due) { /* it loses as much when everybody sends less */
        d->sent += h->sent;
        d->lost += h->lost;
    }
    s->credit = between(0, d->lost / (d->sent + 30), 0.3);
    if (s->credit < TOLERATED || d->lost < 2)
        s->credit = 0;
#ifdef DEBUG
    fprintf(stderr, "%.3f dip n %.0f l %.0f credit %.4f rate %.3f chain %d held %.0f/%.0f\n", s->last.sent_at/1e9, n, l, s->credit, s->rate/1e6, s->chain.length,h->lost,h->sent);
#endif
    if (held && s->credit > m) {
        double rate = s->chain.delivered / (1 - s->credit);
        s->proven = rate < s->chain.rate ? rate : s->chain.rate;
        set_rate(s, s->proven * BACK_LOSSY);
    }
    if (!(KEEP && held && !s->credit && due < 6 && share < 0.02))
        s->chain.length = 0;
    else
        s->lost_any = 1;
}

/* The clock: dips begin and end. `busy`: there is something to send. */
static void shared_clock(struct shared *s, ns now, uint64_t number, int busy)
{
    if (s->phase == DIPS) {
        if (s->dip.counts && now >= s->dip.counts) {
            s->dip.counts = 0;
            restart(s, number);
        }
        if (s->dip.ends && now >= s->dip.ends) {
            s->dip.last = number;
            s->dip.ends = 0;
            set_rate(s, s->dip.rate);
        }
        return;
    }
    int64_t tick = (now + s->skew) / TICK;
    if (tick == s->dip.tick)
        return;
    int first = s->dip.tick < 0;
    s->dip.tick = tick;
    if (first || !busy || s->phase == STARTS || !(s->lost_any || s->credit > 0))
        return;
    s->dip.rate = s->rate;
    s->dip.counts = now + SETTLE;
    s->dip.ends = s->dip.counts + greatest(trip(s) / 2, 50 * MS);
    s->dip.last = 0;
    s->phase = DIPS;
    set_rate(s, 0.4 * (s->rate < s->proven ? s->rate : s->proven));
    restart(s, UINT64_MAX);
}

static void close_window(struct shared *s, ns now, ns passed, double n, double l, ns took, uint64_t number)
{
    double seconds = (double)passed / 1e9, delivered = took > 0 ? (n - l) * PACKET * 1e9 / (double)took : s->rate;
#ifdef DEBUG
    if (s->last.sent_at > 5.0e9 && s->last.sent_at < 7.5e9) fprintf(stderr, "%.3f window n %.0f l %.0f passed %.1f rate %.3f proven %.3f step %.4f q %.1f competes %d\n", s->last.sent_at/1e9, n, l, passed/1e6, s->rate/1e6, s->proven/1e6, s->step/1e6, s->queued==NEVER?0:(s->queued-s->rtt)/1e6, s->competes);
#endif
    ns waits = queue(s), much = greatest(4 * MS, s->rtt / 8);
    if (s->phase == STARTS) {
        if (l > 0.05 * n + 3 * sqrt(0.4 * n) || waits > much) {
            s->phase = GROWS;
            s->proven = delivered < s->rate ? delivered : s->rate;
            s->since = (struct tally){n, l};
            if (l > 0) {
                lost(s, n, l, took, number);
            } else {
                set_rate(s, 0.8 * s->proven);
                restart(s, number);
            }
            return;
        }
        s->proven = s->rate;
        set_rate(s, 2 * s->rate);
        restart(s, number);
        return;
    }
    s->calm_at = waits > much ? 0 : s->calm_at ? s->calm_at : now;
    if (s->competes && s->calm_at && now - s->calm_at > 2 * SECOND)
        s->competes = s->drains = 0;
    if (waits > much && !s->competes) {
        if (took > s->gap + LEAST_WINDOW / 2) /* a longer way makes one */
            delivered = (n - l) * PACKET * 1e9 / (double)(took - s->gap);
        double rate = delivered / (1 - s->credit);
        int follows = rate > 0.85 * s->rate;
        if (!s->drains)
            s->before = s->rate > s->proven ? s->rate : s->proven;
        if (n >= 32 && !follows)
            s->proven = s->before = rate;
        if (s->drains++ >= 2) { /* somebody else's queue, or a longer way */
            s->competes = 1;
            s->proven = s->before;
            set_rate(s, 0.95 * s->proven);
        } else {
            set_rate(s, (waits > s->rtt / 2 + 10 * MS ? 0.5 : 0.85) * (s->rate < s->proven ? s->rate : s->proven));
        }
        s->step = s->grew = 0;
        restart(s, number);
        return;
    }
    if (!s->competes && waits <= much)
        s->drains = 0;
    if (s->chain.length && !l && s->rate >= 0.97 * s->chain.rate)
        s->chain.length = 0;
    if ((s->rate >= s->proven || s->step > 0 || s->grew > patience(s)) && !s->competes) { /* not known: by steps that double */
        if (passed < ROUND)
            return;
        s->step = s->step > 0 ? 2 * s->step : s->rate / 64;
        double most = s->rate < 1.25 * s->proven ? s->rate / 32 : s->rate / 2;
        if (s->step > most)
            s->step = most;
        set_rate(s, s->rate + s->step);
        restart(s, number);
        return;
    }
    double g = s->competes ? COMP * 0.3 * s->rate / epoch(s) : growth(s);
    set_rate(s, s->rate + g * seconds);
    s->grew += seconds;
    s->base = s->last;
    s->queued = NEVER;
    s->gap = 0;
}

/* `number`: the next one; `sent_at`: when the highest reported one was sent; `came`: when it came, by the receiver's clock. */
static void shared_report(struct shared *s, ns now, uint64_t datagrams, uint64_t top, ns sent_at, ns came, uint64_t number)
{
    if (s->begun && (datagrams <= s->last.datagrams || top < s->last.top))
        return;
    if (s->begun && s->phase == GROWS) {
        double n = (double)(top - s->last.top), got = (double)(datagrams - s->last.datagrams), l = n > got ? n - got : 0;
        s->since.sent += n;
        s->since.lost += l;
        if (s->chain.length && s->based)
            s->chain.held.sent += n, s->chain.held.lost += l;
    }
    if (s->begun && s->based)
        s->gap = greatest(s->gap, came - s->last.came);
    s->begun = 1;
    s->last = (struct look){datagrams, top, sent_at, came};
    if (!s->based) {
        if (top <= s->mark)
            return;
        s->based = 1;
        s->base = s->last;
        s->queued = NEVER;
        s->gap = 0;
        return;
    }
    double n = (double)(top - s->base.top), got = (double)(datagrams - s->base.datagrams), l = n > got ? n - got : 0;
    if (n < 2)
        return;
    if (s->phase == DIPS) {
        if (!s->dip.last || top < s->dip.last)
            return;
        s->phase = GROWS;
        dip_over(s, n, l);
        restart(s, number);
        return;
    }
    ns passed = sent_at - s->base.sent_at, took = came - s->base.came;
    int long_enough = passed >= LEAST_WINDOW || took >= 2 * LEAST_WINDOW;
    if (s->phase != STARTS && long_enough && excess(s, n, l)) {
        lost(s, n, l, took, number);
        return;
    }
    double enough = lossy(s) ? 4000 * s->credit : 2, most = 0.3 * s->rate / PACKET;
    if (s->phase == STARTS)
        enough = 8;
    if (enough > most)
        enough = most;
    ns wanted = greatest(s->rtt / 4, LEAST_WINDOW);
    if (n >= enough && (passed >= wanted || took >= 2 * wanted)) {
        close_window(s, now, passed, n, l, took, number);
    }
}

/* Something is to be sent after a pause: what comes next says nothing of what was before. */
static void shared_resume(struct shared *s, uint64_t number) { if (s->phase != DIPS) restart(s, number); }
