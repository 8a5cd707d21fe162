/* Timers: ends of exchanges, questions that are repeated, reports, signs of life. */

static void exchange_timers(struct exchange *x, ns now)
{
    struct channel *c = x->channel;
    struct engine *e = c->engine;
    ns at = NEVER;
    for (uint32_t i = 0; x->posted && !x->over && i < c->size; i++) {
        struct source *s = &x->sources[i];
        struct member *m = &c->members[i];
        if (!s->expected || s->over)
            continue;
        if (s->must.told_at && m->flow->heard > now - 2 * SECOND
            && now - greatest(greatest(s->must.told_at, m->full_at), x->posted_at) >= e->set.peer_timeout) {
            channel_fail(c, i, DEAF); /* what must arrive is asked for, and nothing comes but what is short */
            return;
        }
        ns ends = s->ended ? s->ended_at + reorder_window(e, m->flow) : NEVER;
        uint32_t missing = now >= ends && now < x->deadline && s->must.count ? lacks(s) : 0;
        if (missing) {
            if (now >= s->must.nack_at)
                ask(x, i, missing, now);
            at = least(at, least(s->must.nack_at, x->deadline));
            continue;
        }
        if (now >= ends || now >= x->deadline) {
            source_over(x, i, now);
            continue;
        }
        if (repeats(&s->ready, now))
            control(e, m, READY, x, 0);
        at = least(at, least(least(ends, s->ready.at), x->deadline));
    }
    for (uint32_t i = 0; x->unacknowledged && i < c->size; i++) {
        struct dest *d = &x->dests[i];
        if (!d->wanted || d->done)
            continue;
        if (repeats(&d->ask, now))
            control(e, &c->members[i], ASK, x, 0);
        if (repeats(&d->end, now))
            end_said(e, &c->members[i], d);
        at = least(at, least(d->ask.at, d->end.at));
    }
    x->due = at;
    due(e, at);
    exchange_settle(x);
}

enum { REPEATS = 12 }; /* of a report, when nothing more comes */

static struct member *speaker(struct flow *f)
{
    f->speaker = f->speaker && f->speaker->next ? f->speaker->next : f->members;
    return f->speaker;
}

/* Reports go out even while more keeps coming in: senders wait for them. */
static void reports(struct engine *e, ns now)
{
    for (struct flow *f = e->flows; f; f = f->next) {
        if (!f->members)
            continue;
        if (now >= f->report.at) {
            control(e, speaker(f), REPORT, NULL, 0);
            f->report.due = 0;
            ns wait = greatest(round_trip(f), 5 * MS) << (f->report.repeats > 4 ? f->report.repeats - 4 : 0);
            f->report.at = f->report.repeats++ < REPEATS ? now + least(wait, SLOWEST) : NEVER;
        }
        due(e, f->report.at);
    }
}

/* Of silence: then a host that refuses datagrams is believed; where the channel goes on without a rank, an error costs less. */
static ns believed(const struct member *m)
{
    return least(m->channel->bears ? SECOND / 2 : 3 * SECOND, m->channel->engine->set.peer_timeout);
}

static void flow_timers(struct engine *e, struct flow *f, int alive, ns now)
{
    if (!f->members)
        return;
    /* A silent peer gets signs of life, often: both ends shall notice at once when the way is free again. */
    int silent = e->live && now - f->heard >= SILENCE;
    if (alive || ((silent || now < f->pulse.until) && now >= f->pulse.at)) {
        control(e, speaker(f), ALIVE, NULL, silent ? 2 : 0);
        f->pulse.at = now + (now - f->heard < PULSES ? e->pulse : 10 * e->pulse);
    }
    if (silent || now < f->pulse.until)
        due(e, f->pulse.at);
    else if (e->live)
        due(e, f->heard + SILENCE);
    for (struct member *m = f->members; m; m = m->next) {
        /* Anybody can forge an ICMP message: it is believed where silence says the same. */
        int refused = f->refused >= 3 && now - f->heard >= believed(m);
        if (f->refused >= 3 && !refused)
            due(e, f->heard + believed(m));
        if (now - f->heard >= e->set.peer_timeout || refused) {
            if (!m->gone && !m->channel->closing)
                member_lost(m->channel, m->rank, refused ? REFUSED : SILENT, now);
            for (struct exchange *x = e->live, *next; x; x = next) { /* no acknowledgement will come any more */
                next = x->next;
                if (m->gone && x->channel == m->channel && x->dests[m->rank].wanted)
                    dest_done(&x->dests[m->rank], now);
            }
        }
        if (m->probe.confirmed || now >= m->probe.until)
            continue;
        if (now >= m->probe.at) {
            control(e, m, PROBE, NULL, m->probe.heard);
            m->probe.at = now + 40 * MS;
        }
        due(e, m->probe.at);
    }
}

/* `now` must be a time at which everything that had arrived before was handled. */
static void timers(struct engine *e, ns now)
{
    if (now < e->timers_at)
        return;
    e->timers_at = NEVER;
    for (struct exchange *x = e->live, *next; x; x = next) {
        next = x->next;
        if (x->channel->failed)
            continue;
        if (now >= x->due)
            exchange_timers(x, now);
        else
            due(e, x->due);
    }
    reports(e, now);
    int alive = now >= e->alive_at;
    if (alive)
        e->alive_at = now + SECOND;
    due(e, e->alive_at);
    ns flows = 0;
    for (struct flow *f = e->flows; f; f = f->next)
        flows += f->members != NULL;
    e->pulse = least(PULSE * (1 + flows / 16), SECOND); /* of many others each gets them less often */
    for (struct flow *f = e->flows; f; f = f->next)
        flow_timers(e, f, alive, now);
    for (struct channel *c = e->channels, *next; c; c = next) {
        next = c->next;
        if (c->closing && now >= c->free_at)
            channel_free(c);
        else if (c->closing)
            due(e, c->free_at);
    }
}
