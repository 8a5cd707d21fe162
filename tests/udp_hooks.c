/* The engine, and its protocol and rates without socket, thread and clock. */
#include "../megatron_lossy/transport/udp/c/engine.c"

API int ml_handle(struct engine *e, const struct sockaddr *from, const uint8_t *bytes, size_t size, ns now)
{
    return handle(e, from, bytes, size, now, now);
}
API int ml_produce(struct engine *e, ns now, uint8_t *out, struct output *o) { return produce(e, now, out, o); }
API void ml_timers(struct engine *e, ns now) { timers(e, now); }
API ns ml_due(const struct engine *e) { return least(e->timers_at, e->blocked_until); }

API struct rate *ml_rate_new(double floor, double ceiling, int rule, double packet, double flows)
{
    struct rate *r = calloc(1, sizeof *r);
    if (r)
        rate_init(r, floor, ceiling, rule, packet, flows);
    return r;
}
API void ml_rate_free(struct rate *r) { free(r); }
API void ml_rate_sample(struct rate *r, ns now, ns rtt) { rate_sample(r, now, rtt); }
API void ml_rate_report(struct rate *r, ns now, uint64_t datagrams, uint64_t bytes, uint64_t top, uint32_t clock, ns sent_at,
                        double share)
{
    rate_report(r, now, datagrams, bytes, top, clock, sent_at, share);
}
API void ml_rate_look(struct rate *r, ns now, ns clock) { rate_look(r, now, clock); }
/* Of SHARED: rate, what came through, credit, phase, whether it competes. */
API void ml_rate_shared(const struct rate *r, double *out)
{
    out[0] = r->shared.rate;
    out[1] = r->shared.proven;
    out[2] = r->shared.credit;
    out[3] = r->shared.phase;
    out[4] = r->shared.competes;
}
API void ml_rate_get(const struct rate *r, double *out)
{
    out[0] = r->rate;
    out[1] = r->foreign;
    out[2] = r->greatest;
    out[3] = r->known ? (double)r->rtt_min : -1.0;
    out[4] = r->starting;
}
