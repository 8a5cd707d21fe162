/* Processes with several interfaces: each has an address, and a socket that takes what comes to any of them.
 *
 * A flow goes to its first address. Where an exchange is under way and nothing comes for a while, it goes to the next one, and on
 * until something comes. Who gets what is newer than all before from another address follows there, once that has answered
 * (moved.c). From time to time the first address is asked whether it answers again. Each interface is a network of its own, so
 * that the address which is sent to says over which interface it goes.
 */
#define HOME (10 * SECOND) /* between questions to the first address */

static void way_timers(struct engine *e, struct flow *f, ns now)
{
    if (f->ways.count < 2)
        return;
    uint32_t way = way_of(f, (struct sockaddr *)&f->to);
    ns patience = 2 * (round_trip(f) + e->pulse); /* for who was asked to say that it is there, twice */
    int silent = e->live && f->ways.asked > f->heard;
    if (silent && now >= f->ways.asked + patience) {
        if (f->ways.at < f->heard) /* once, however many are tried */
            rate_moved(&f->rate, now);
        f->to = f->ways.to[way < f->ways.count ? (way + 1) % f->ways.count : 0];
        f->ways.at = f->ways.asked = f->pulse.at = now;
        f->ways.home_at = now + HOME;
        f->move.until = 0;
        f->refused = 0;
        e->blocked_until = 0;
        e->count.switched++;
    }
    if (silent) {
        due(e, f->ways.asked + patience);
        return;
    }
    if (!way)
        return;
    if (now >= f->ways.home_at) {
        move_seen(e, f, (struct sockaddr *)&f->ways.to[0], now);
        f->ways.home_at = now + HOME;
    }
    due(e, f->ways.home_at);
}
