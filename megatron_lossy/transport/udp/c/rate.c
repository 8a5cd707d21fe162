/* Rate: how fast one destination may be sent to, by one of three rules. The tests have models of them in Python.
 *
 *   FIXED      as fast as is said
 *   DEDICATED  a link of one's own. Loss alone says nothing: links lose data at any rate. What says that a link is full is that
 *              datagrams wait in its queue, or that much more is lost than was lost before. Then the rate becomes a little less
 *              than what arrives.
 *   SHARED     beside others: shared.c. All flows between two hosts are one sender there, whose state is that of a path.
 */
enum { FIXED, DEDICATED, SHARED };

#define ACTIVE (100 * MS) /* flows that sent in the last of these are active */
#define WAITED MS         /* for a flow that does not take its turn */
#define TURN_PACKETS 8   /* that a flow sends in a turn, if others wait */

/* What all flows from this host to another one share; in memory of all processes of this host, if there are several. */
struct path {
    uint64_t kind; /* what it was made for */
    pthread_mutex_t lock;
    struct shared shared;
    ns free_at, used_at;
    struct { uint64_t next, now; ns since; } turns; /* the next one's number, whose it is, since when */
    struct { uint64_t datagrams, top; uint32_t clock; int begun; ns sent_at, came; } sum; /* of the reports of all flows */
    struct { uint32_t flows, last, number; ns ends; } active; /* in this interval, and in the last one */
};

static void path_init(struct path *p, double ceiling, double packet, double flows)
{
    pthread_mutexattr_t attributes;
    memset(p, 0, sizeof *p);
    pthread_mutexattr_init(&attributes);
    pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
    pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
    pthread_mutex_init(&p->lock, &attributes);
    pthread_mutexattr_destroy(&attributes);
    shared_init(&p->shared, ceiling, packet, flows);
}

static void path_lock(struct path *p)
{
    if (pthread_mutex_lock(&p->lock) == EOWNERDEAD) /* a process was killed in here: rates are never quite right */
        pthread_mutex_consistent(&p->lock);
}

static void path_unlock(struct path *p) { pthread_mutex_unlock(&p->lock); }

/* Flows that send. */
static uint32_t path_flows(const struct path *p)
{
    uint32_t flows = p->active.flows > p->active.last ? p->active.flows : p->active.last;
    return flows ? flows : 1;
}

/* A flow sends. `seen`: the interval in which it did so last. */
static void path_active(struct path *p, uint32_t *seen, ns now)
{
    if (now >= p->active.ends) {
        p->active.last = now < p->active.ends + ACTIVE ? p->active.flows : 0;
        p->active.flows = 0;
        p->active.number++;
        p->active.ends = now + ACTIVE;
    }
    p->active.flows += *seen != p->active.number;
    *seen = p->active.number;
}

/* More of one flow has been reported: so many numbers, and so many datagrams that came. `sent_at`: of the last one, or -1. */
static void path_report(struct path *p, ns now, uint64_t datagrams, uint64_t numbers, uint32_t clock, ns sent_at)
{
    int32_t passed = p->sum.begun ? (int32_t)(clock - p->sum.clock) : 0;
    if (passed > 0 || !p->sum.begun) { /* all processes of the other host have one clock */
        p->sum.came += (ns)passed * US;
        p->sum.clock = clock;
    }
    p->sum.begun = 1;
    p->sum.datagrams += datagrams;
    p->sum.top += numbers;
    if (sent_at < 0)
        return;
    p->sum.sent_at = greatest(p->sum.sent_at, sent_at);
    shared_report(&p->shared, now, p->sum.datagrams, p->sum.top, p->sum.sent_at, p->sum.came);
}

struct rate {
    double rate, floor, ceiling;
    double foreign;  /* the share that is lost whatever we do */
    double greatest; /* of the last delivery rates */
    ns rtt_min, stepped_at;
    int rule, starting, known, begun;
    ns came; /* the receiver's clock at the last report */
    struct path *path, own; /* of SHARED: `own`, unless other flows have it too */
    /* On the path: its number and what is left of it, if it has one; the interval in which it sent last. */
    struct { int has; uint64_t number; double bytes; uint32_t interval; } turn;
    struct { double last[8]; unsigned next; } delivered;
    struct { ns least[2], at; } slot; /* of round trips: this one and the one before, and when this one began */
    struct { uint64_t datagrams, bytes, top; uint32_t clock; } report; /* the last one */
    struct { double span, bytes; uint64_t numbers, arrived; ns least; } interval; /* since the last decision; ns, without gaps */
};

#define INTERVAL (4 * MS)
#define GAP_US 8000u
#define ENOUGH 128 /* datagrams that say something about a share of a tenth */

/* `packet`: bytes of a full datagram on the wire; `flows`: fair as so many TCP flows; `path`: that of SHARED, or NULL. */
static void rate_init(struct rate *r, double floor, double ceiling, int rule, double packet, double flows, struct path *path)
{
    memset(r, 0, sizeof *r);
    r->floor = floor < ceiling ? floor : ceiling;
    r->ceiling = ceiling;
    r->rule = rule;
    r->rate = rule == FIXED ? ceiling : r->floor;
    r->foreign = 0.3;
    r->starting = 1;
    r->slot.least[0] = r->slot.least[1] = r->interval.least = NEVER;
    if (rule == SHARED) {
        if (!path)
            path_init(path = &r->own, ceiling, packet, flows);
        r->path = path;
        r->rate = path->shared.rate;
    }
}

/* What was lost said nothing of how much the path takes: find out again. */
static void rate_restart(struct rate *r, ns now)
{
    struct path *path = r->path;
    if (r->rule == SHARED) {
        path_lock(path);
        shared_restart(&path->shared, now);
        r->rate = path->shared.rate;
        path_unlock(path);
    } else if (r->rule == DEDICATED) {
        r->starting = 1;
        r->foreign = 0.3;
        memset(&r->interval, 0, sizeof r->interval);
        r->interval.least = NEVER;
    }
}

/* It goes over another path now. */
static void rate_moved(struct rate *r, ns now)
{
    if (r->rule == SHARED) {
        path_lock(r->path);
        shared_moved(&r->path->shared, now);
        r->rate = r->path->shared.rate;
        path_unlock(r->path);
    } else {
        rate_init(r, r->floor, r->ceiling, r->rule, 0, 0, NULL);
    }
}

static void rate_set(struct rate *r, double rate)
{
    r->rate = rate < r->floor ? r->floor : rate > r->ceiling ? r->ceiling : rate;
}

/* The least of the last 5 to 10 seconds in which there were samples. */
static void rate_sample(struct rate *r, ns now, ns rtt)
{
    if (rtt < 1)
        rtt = 1;
    if (!r->known) {
        r->slot.at = now;
    } else if (now - r->slot.at >= 5 * SECOND) {
        r->slot.least[1] = r->slot.least[0];
        r->slot.least[0] = NEVER;
        r->slot.at = now;
    }
    r->slot.least[0] = least(r->slot.least[0], rtt);
    r->rtt_min = least(r->slot.least[0], r->slot.least[1]);
    r->interval.least = least(r->interval.least, rtt);
    if (!r->known && r->rule == DEDICATED) /* 256 KiB in the first round trip */
        rate_set(r, 262144.0 * 1e9 / (double)r->rtt_min);
    r->known = 1;
    if (r->rule == SHARED) {
        path_lock(r->path);
        shared_sample(&r->path->shared, now, rtt);
        path_unlock(r->path);
    }
}

static void rate_close_interval(struct rate *r, ns now)
{
    double lost = r->interval.numbers ? 1.0 - (double)r->interval.arrived / (double)r->interval.numbers : 0.0;
    if (lost < 0.0)
        lost = 0.0;
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
    r->interval.span = r->interval.bytes = 0.0;
    r->interval.numbers = r->interval.arrived = 0;
    r->interval.least = NEVER;
}

/* What was sent from then on counts in the window of a path; NEVER: nothing does. */
static ns rate_mark(struct rate *r)
{
    if (r->rule != SHARED)
        return 0;
    path_lock(r->path);
    ns mark = r->path->shared.mark;
    path_unlock(r->path);
    return mark;
}

/* Of what was sent after rate_mark something bore a mark of congestion. */
static void rate_marked(struct rate *r, ns now)
{
    if (r->rule != SHARED)
        return;
    path_lock(r->path);
    shared_marked(&r->path->shared, now);
    r->rate = r->path->shared.rate;
    path_unlock(r->path);
}

/* A REPORT: what has arrived, the highest number + 1, and the receiver's clock (µs) when that came. Of ours: when it was sent
 * (-1: forgotten). `share`: bytes/s that the receiver has for each flow; 0: unknown. `fresh`: numbers that are new in the report
 * and were sent after rate_mark. */
static void rate_report(struct rate *r, ns now, uint64_t datagrams, uint64_t bytes, uint64_t top, uint32_t clock, ns sent_at,
                        double share, uint64_t fresh)
{
    if (r->begun && (datagrams <= r->report.datagrams || top < r->report.top))
        return;
    if (r->rule == SHARED) {
        path_lock(r->path);
        r->path->shared.share = share * path_flows(r->path);
        /* What it sent before and lost at the end of a turn shows only now that it had another one: of another window. */
        uint64_t came = datagrams - r->report.datagrams;
        path_report(r->path, now, came < fresh ? came : fresh, fresh, clock, sent_at);
        r->rate = r->path->shared.rate;
        path_unlock(r->path);
    }
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
    r->report.datagrams = datagrams;
    r->report.bytes = bytes;
    r->report.top = top;
    r->report.clock = clock;
    if (r->rule == DEDICATED && r->known && r->interval.numbers >= ENOUGH && r->interval.span >= (double)greatest(r->rtt_min / 4, INTERVAL))
        rate_close_interval(r, now);
}

/* What may go out together, and be caught up with: queues may be short. */
static ns rate_burst(const struct rate *r) { return r->rule == SHARED ? MS / 4 : MS; }

static ns rate_cost(const struct path *p, double bytes) { return (ns)(bytes * 1e9 / p->shared.rate); }

static void turn_over(struct rate *r)
{
    if (r->turn.has && r->turn.number == r->path->turns.now) {
        r->path->turns.now++;
        r->path->turns.since = r->path->free_at;
    }
    r->turn.has = 0;
}

/* When a flow may send so many bytes over its path, or should ask again. Flows take turns, in the order in which they asked; one
 * that does not take its turn in WAITED loses it. `clock`: that all hosts have. */
static ns rate_turn(struct rate *r, ns now, ns clock, double bytes)
{
    struct path *p = r->path;
    path_lock(p);
    if (now - p->free_at > 5 * MS) /* for so long nothing was sent that could have been */
        shared_resume(&p->shared, now);
    shared_clock(&p->shared, now, clock);
    r->rate = p->shared.rate;
    if (!r->turn.has || r->turn.number < p->turns.now) {
        r->turn.has = 1;
        r->turn.number = p->turns.next++;
        r->turn.bytes = path_flows(p) == 1 ? bytes : TURN_PACKETS * p->shared.packet;
    }
    while (p->turns.now < r->turn.number && now > greatest(p->free_at, p->turns.since) + WAITED) {
        p->turns.now++;
        p->turns.since = now;
    }
    ns at = p->free_at, ahead = (ns)(r->turn.number - p->turns.now);
    if (ahead) /* about half of the time that those before it may take */
        at = greatest(at, now) + greatest(ahead * rate_cost(p, TURN_PACKETS * p->shared.packet) / 2, 20 * US);
    path_unlock(p);
    return at;
}

/* It has sent so many in its turn. */
static void rate_spend(struct rate *r, double bytes, ns now)
{
    struct path *p = r->path;
    path_lock(p);
    p->free_at = greatest(p->free_at, now - rate_burst(r)) + rate_cost(p, bytes);
    p->used_at = now;
    path_active(p, &r->turn.interval, now);
    r->turn.bytes -= bytes;
    if (r->turn.bytes <= 0)
        turn_over(r);
    path_unlock(p);
}

/* It may not send before it has heard something: others that wait for their turn may. */
static void rate_pass(struct rate *r)
{
    if (r->rule != SHARED)
        return;
    path_lock(r->path);
    turn_over(r);
    path_unlock(r->path);
}
