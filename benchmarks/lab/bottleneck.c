/* A bottleneck and the flows that share it, packet by packet, with the engine's own rate control.
 *
 *     senders -> drop-tail queue -> link of so many bytes/s -> loss of the path -> receivers
 *
 * Flows of ours send exchanges, with pauses; receivers report after 256 datagrams or 2 ms, as the engine's do. TCP flows send all
 * they may, Cubic (RFC 9438) or Reno, with an acknowledgement of each packet. Nothing but the queue takes time that varies.
 */
#include "../../megatron_lossy/transport/udp/c/base.h"
#include "../../megatron_lossy/transport/udp/c/shared.c"
#include "../../megatron_lossy/transport/udp/c/rate.c"

enum { CUBIC = SHARED + 1, RENO }; /* in addition to the rules of rate.c */
enum { SEND, ARRIVE, HEAR, DUE }; /* kinds of events */
enum { BYTES = 1500, RING = 1 << 17, STEPS = 8, GROUPS = 64 };

/* The layout is repeated in bottleneck.py. */
struct flow_in {
    int32_t kind, group, as;                 /* group: flows to one process, which reports to each its share; -1: none; as: so many
                                              * TCP flows */
    double begin, end;                       /* seconds */
    double least, most;                      /* bytes of an exchange; 0: without end */
    double pause_least, pause_most, ceiling; /* seconds; bytes/s */
};
struct flow_out { uint64_t sent, delivered, overflowed, lost; double rate, credit; };
struct step { double at, rate, rtt; };
struct setting {
    double rate, rtt, queue, loss, burst, jitter; /* bytes/s, seconds, seconds at `rate`, share, packets in a row, seconds */
    double skew;                                  /* seconds, the most between two clocks */
    double sleep;                                 /* seconds, the mean of the times in which a process of ours does not run */
    double seconds, warm;                         /* counted after `warm` */
    double interval;                              /* seconds of a row of the trace */
    uint64_t seed;
    int32_t flows, steps;
    struct step step[STEPS];
};

struct event { ns at; uint64_t order; int32_t flow, kind; uint64_t a, b; ns since, kernel /* when the kernel had it, if its process slept; else 0 */, came; };

struct sim { struct event *heap; size_t events, room; uint64_t order, random; };

static double draw(struct sim *s)
{
    uint64_t z = s->random += 0x9E3779B97F4A7C15u;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return (double)((z ^ z >> 31) >> 11) * 0x1p-53;
}

static int before(const struct event *a, const struct event *b) { return a->at < b->at || (a->at == b->at && a->order < b->order); }

static void push(struct sim *s, struct event e)
{
    if (s->events == s->room)
        s->heap = realloc(s->heap, (s->room = s->room ? 2 * s->room : 1024) * sizeof *s->heap);
    e.order = s->order++;
    size_t k = s->events++;
    for (; k && before(&e, &s->heap[(k - 1) / 2]); k = (k - 1) / 2)
        s->heap[k] = s->heap[(k - 1) / 2];
    s->heap[k] = e;
}

static struct event pop(struct sim *s)
{
    struct event first = s->heap[0], last = s->heap[--s->events];
    size_t k = 0;
    for (size_t child; (child = 2 * k + 1) < s->events; k = child) {
        if (child + 1 < s->events && before(&s->heap[child + 1], &s->heap[child]))
            child++;
        if (!before(&s->heap[child], &last))
            break;
        s->heap[k] = s->heap[child];
    }
    s->heap[k] = last;
    return first;
}

struct sender {
    struct flow_in in;
    struct flow_out out;
    struct rate rate;
    uint64_t number, reported;
    ns *sent_at, free_at, heard_at, skew; /* skew: of the clock that all hosts have */
    double left; /* bytes of the exchange */
    int active, blocked;
    /* Its receiver. */
    uint64_t received, top, serial, turn; /* turn: of the one SEND that is not void */
    ns top_at, came_at;
    uint32_t unreported;
    int in_burst, seen; /* seen: in this interval of its group */
    /* TCP: the state of RFC 9438, in packets. */
    double window, threshold, most, k, reno;
    uint64_t acked, recover, flight, timer;
    ns epoch, srtt;
};

/* When the process of a flow's sender (0) or receiver (1) runs, from `at` on. It sleeps once in each five of its usual sleeps. */
static ns wakes(const struct setting *set, int flow, int side, ns at)
{
    if (set->sleep <= 0)
        return at;
    ns slot = (ns)(5e9 * set->sleep), number = at / slot;
    struct sim one = {.random = set->seed * 31 + (uint64_t)(number * 4096 + flow * 2 + side) * 0x2545F4914F6CDD1Du};
    ns from = number * slot + (ns)(draw(&one) * (double)slot), to = from - (ns)(log(1 - draw(&one)) * set->sleep * 1e9);
    to = least(to, (number + 1) * slot); /* what comes later comes no earlier */
    return at >= from && at < to ? to : at;
}

struct group { double bytes, share; int senders; ns until; };

static int tcp(const struct sender *f) { return f->in.kind >= CUBIC; }

static void tcp_lost(struct sender *f, ns now, int timeout)
{
    double share = f->in.kind == CUBIC ? 0.7 : 0.5;
    f->most = f->window < f->most ? 0.85 * f->window : f->window;
    f->threshold = f->window * share > 2 ? f->window * share : 2;
    f->window = timeout ? 1 : f->threshold;
    f->k = cbrt(f->most * 0.3 / 0.4);
    f->epoch = now;
    f->reno = f->window;
    f->recover = f->number;
}

static void tcp_acked(struct sender *f, ns now)
{
    if (f->window < f->threshold) {
        f->window += 1;
        return;
    }
    if (f->in.kind == RENO) {
        f->window += 1 / f->window;
        return;
    }
    double t = (double)(now - f->epoch + f->srtt) / 1e9, target = 0.4 * (t - f->k) * (t - f->k) * (t - f->k) + f->most;
    f->reno += (f->reno < f->most ? 0.53 : 1.0) / f->window;
    if (target > 1.5 * f->window)
        target = 1.5 * f->window;
    f->window += target > f->window ? (target - f->window) / f->window : 0.01 / f->window;
    if (f->window < f->reno)
        f->window = f->reno;
}

/* `used`: bytes that left the link, and those that it could have carried while any flow had data to send. `trace`
 * [rows][flows][2]: bytes delivered and lost by overflow in each interval. */
API void bottleneck_run(const struct setting *set, const struct flow_in *in, struct flow_out *out, double *used, double *trace, int rows)
{
    struct sim sim = {.random = set->seed * 7919 + 1};
    struct sender *flows = calloc((size_t)set->flows, sizeof *flows);
    struct group groups[GROUPS] = {{0}};
    double rate = set->rate, queue = set->queue * set->rate, rtt = set->rtt;
    ns end = (ns)(set->seconds * 1e9), warm = (ns)(set->warm * 1e9), idle_at = 0, looked = 0;
    int step = 0, active = 0;
    for (int i = 0; i < set->flows; i++) {
        struct sender *f = &flows[i];
        f->in = in[i];
        f->sent_at = calloc(RING, sizeof *f->sent_at);
        f->skew = (ns)(draw(&sim) * set->skew * 1e9);
        rate_init(&f->rate, 4e6, f->in.ceiling, f->in.kind, BYTES, f->in.as);
        f->window = 10;
        f->threshold = 1e9;
        push(&sim, (struct event){.at = (ns)(f->in.begin * 1e9), .flow = i, .kind = SEND, .a = 1});
    }
    while (sim.events) {
        struct event v = pop(&sim);
        ns now = v.at;
        if (now >= end)
            break;
        if (now > warm && active)
            used[1] += rate * (double)(now - greatest(looked, warm)) / 1e9;
        looked = now;
        if (step < set->steps && now >= (ns)(set->step[step].at * 1e9)) {
            double waiting = idle_at > now ? (double)(idle_at - now) * rate : 0;
            rate = set->step[step].rate;
            rtt = set->step[step++].rtt;
            idle_at = now + (ns)(waiting / rate);
        }
        struct sender *f = &flows[v.flow];
        if (!tcp(f) && !(v.kind == SEND && v.b != f->turn)) {
            ns awake = wakes(set, v.flow, v.kind == ARRIVE || v.kind == DUE, now);
            if (awake > now) {
                v.kernel = v.kernel ? v.kernel : now;
                v.at = awake;
                push(&sim, v);
                continue;
            }
        }
        ns kernel = v.kernel ? v.kernel : now;
        ns half = (ns)(rtt * 5e8);
        int burst = 0;
        if (v.kind == SEND && v.b != f->turn)
            continue;
        if (v.kind == SEND) {
            if (now >= (ns)(f->in.end * 1e9)) {
                active -= f->active;
                f->active = 0;
                continue;
            }
            if (v.a == 1) { /* an exchange begins */
                f->left = f->in.least > 0 ? f->in.least + draw(&sim) * (f->in.most - f->in.least) : 1e18;
                active += !f->active;
                f->active = 1;
            }
            f->blocked = 0;
            if (tcp(f)) {
                burst = f->window > (double)f->flight ? (int)(f->window - (double)f->flight) : 0;
            } else {
                int shared = f->in.kind == SHARED;
                rate_look(&f->rate, now, now + f->skew);
                burst = (int)(f->rate.rate * (double)rate_burst(&f->rate) / 1e9 / BYTES);
                burst = burst < 1 ? 1 : burst > 44 ? 44 : burst;
                double r = f->rate.rate, trip = (double)shared_trip(&f->rate.shared) / 1e9;
                if (shared) {
                    double room = 2 * r * (trip + 0.01) / BYTES + 16 - (double)(f->number - f->reported);
                    if (room < burst)
                        burst = (int)room;
                    if (burst < 1) {
                        ns again = greatest(f->heard_at, f->free_at) + (ns)(trip * 1e9) + 30 * MS;
                        if (now >= again) {
                            burst = 1;
                        } else {
                            f->blocked = 1;
                            push(&sim, (struct event){.at = again, .flow = v.flow, .kind = SEND, .b = ++f->turn});
                            continue;
                        }
                    }
                }
                f->free_at = (shared ? greatest(f->free_at, now - rate_burst(&f->rate)) : now) + (ns)(burst * (double)BYTES * 1e9 / r);
            }
        } else if (v.kind == ARRIVE) {
            if (now >= warm)
                f->out.delivered++;
            if (trace && now / (ns)(set->interval * 1e9) < rows)
                trace[(now / (ns)(set->interval * 1e9) * set->flows + v.flow) * 2] += BYTES;
            if (tcp(f)) {
                push(&sim, (struct event){.at = now + half, .flow = v.flow, .kind = HEAR, .a = v.a});
                continue;
            }
            if (f->in.group >= 0) {
                struct group *g = &groups[f->in.group];
                if (now >= g->until) {
                    g->share = g->senders ? g->bytes / 0.1 / g->senders : 0;
                    g->bytes = 0;
                    g->senders = 0;
                    g->until = now + 100 * MS;
                    for (int k = 0; k < set->flows; k++)
                        flows[k].seen = flows[k].in.group == f->in.group ? 0 : flows[k].seen;
                }
                g->senders += !f->seen;
                f->seen = 1;
                g->bytes += BYTES;
            }
            f->received++;
            if (v.a >= f->top) {
                f->top = v.a + 1;
                f->top_at = kernel;
            }
            if (++f->unreported == 1)
                push(&sim, (struct event){.at = now + 2 * MS, .flow = v.flow, .kind = DUE, .a = f->serial});
            if (f->unreported >= 256)
                push(&sim, (struct event){.at = now, .flow = v.flow, .kind = DUE, .a = f->serial});
            continue;
        } else if (v.kind == DUE) {
            if (tcp(f)) { /* a timeout */
                if (v.a == f->timer && f->flight) {
                    f->flight = 0;
                    f->acked = f->number;
                    tcp_lost(f, now, 1);
                    burst = 1;
                } else {
                    continue;
                }
            } else if (v.a != f->serial) {
                continue;
            } else {
                f->serial++;
                f->unreported = 0;
                push(&sim, (struct event){.at = now + half, .flow = v.flow, .kind = HEAR, .a = f->received, .b = f->top,
                                          .since = now - f->top_at, .came = f->top_at});
                continue;
            }
        } else if (tcp(f)) {
            ns rtt_now = now - f->sent_at[v.a % RING];
            f->srtt = f->srtt ? f->srtt + (rtt_now - f->srtt) / 8 : rtt_now;
            if (v.a < f->acked)
                continue;
            uint64_t missing = v.a - f->acked;
            f->flight -= missing + 1 < f->flight ? missing + 1 : f->flight;
            if (missing && f->acked >= f->recover)
                tcp_lost(f, now, 0);
            else if (v.a >= f->recover)
                tcp_acked(f, now);
            f->acked = v.a + 1;
            push(&sim, (struct event){.at = now + greatest(200 * MS, 2 * f->srtt), .flow = v.flow, .kind = DUE, .a = ++f->timer});
            burst = f->window > (double)f->flight ? (int)(f->window - (double)f->flight) : 0;
        } else {
            ns sent_at = f->sent_at[(v.b - 1) % RING], trip = kernel - sent_at - v.since;
            f->heard_at = now;
            if (v.b > f->reported)
                f->reported = v.b;
            rate_sample(&f->rate, now, trip);
            rate_report(&f->rate, now, v.a, v.a * BYTES, v.b, (uint32_t)(v.came / US), sent_at,
                        f->in.group >= 0 ? groups[f->in.group].share : 0);
            if (f->blocked)
                push(&sim, (struct event){.at = greatest(now, f->free_at), .flow = v.flow, .kind = SEND, .b = ++f->turn});
            f->blocked = 0;
            continue;
        }
        for (; burst > 0 && f->left > 0; burst--) {
            int fits = (double)greatest(idle_at - now, 0) / 1e9 * rate <= queue;
            f->sent_at[f->number % RING] = now;
            f->out.sent += now >= warm;
            f->left -= BYTES;
            uint64_t number = f->number++;
            f->flight++;
            if (tcp(f) && f->flight == 1)
                push(&sim, (struct event){.at = now + greatest(200 * MS, 2 * f->srtt), .flow = v.flow, .kind = DUE, .a = ++f->timer});
            if (!fits) {
                f->out.overflowed += now >= warm;
                if (trace && now / (ns)(set->interval * 1e9) < rows)
                    trace[(now / (ns)(set->interval * 1e9) * set->flows + v.flow) * 2 + 1] += BYTES;
                continue;
            }
            idle_at = greatest(idle_at, now) + (ns)(BYTES * 1e9 / rate);
            if (idle_at >= warm)
                used[0] += BYTES;
            double lost = set->loss;
            if (set->burst > 1) {
                lost = f->in_burst ? 1 - 1 / set->burst : set->loss / (1 - set->loss) / set->burst;
                f->in_burst = draw(&sim) < lost;
                lost = f->in_burst;
            }
            if (draw(&sim) < lost) {
                f->out.lost += now >= warm;
                continue;
            }
            f->came_at = greatest(f->came_at, idle_at + half + (ns)(set->jitter * draw(&sim) * 1e9));
            push(&sim, (struct event){.at = f->came_at, .flow = v.flow, .kind = ARRIVE, .a = number});
        }
        if (tcp(f) || v.kind != SEND)
            continue;
        if (f->left > 0) {
            push(&sim, (struct event){.at = f->free_at, .flow = v.flow, .kind = SEND, .b = ++f->turn});
        } else {
            active--;
            f->active = 0;
            double pause = f->in.pause_least + draw(&sim) * (f->in.pause_most - f->in.pause_least);
            push(&sim, (struct event){.at = f->free_at + (ns)(pause * 1e9), .flow = v.flow, .kind = SEND, .a = 1, .b = ++f->turn});
        }
    }
    for (int i = 0; i < set->flows; i++) {
        out[i] = flows[i].out;
        out[i].rate = flows[i].rate.rate;
        out[i].credit = flows[i].rate.shared.credit;
        free(flows[i].sent_at);
    }
    free(flows);
    free(sim.heap);
}
