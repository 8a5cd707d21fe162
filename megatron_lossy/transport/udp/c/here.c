/* Sockets of this process, and the addresses of its host, which may change.
 *
 * A socket is bound to the address that others were told. When the host loses it, another socket takes its place, bound to none:
 * the kernel takes whichever the route to the others has. They notice by what comes from there, and verify it (moved.c).
 */
#include <linux/rtnetlink.h>

static int granted(int fd, int option, int force, int wanted)
{
    int value = 0;
    socklen_t size = sizeof value;
    if (setsockopt(fd, SOL_SOCKET, force, &wanted, sizeof wanted) < 0)
        setsockopt(fd, SOL_SOCKET, option, &wanted, sizeof wanted);
    getsockopt(fd, SOL_SOCKET, option, &value, &size);
    return value;
}

static void socket_options(struct engine *e, int fd)
{
    int on = 1, probe = IP_PMTUDISC_PROBE;
    setsockopt(fd, SOL_UDP, UDP_GRO, &on, sizeof on);
    setsockopt(fd, SOL_SOCKET, SO_RXQ_OVFL, &on, sizeof on);
    if (e->net.local.ss_family == AF_INET6) {
        setsockopt(fd, IPPROTO_IPV6, IPV6_MTU_DISCOVER, &probe, sizeof probe);
        setsockopt(fd, IPPROTO_IPV6, IPV6_RECVERR, &on, sizeof on);
    } else {
        setsockopt(fd, IPPROTO_IP, IP_MTU_DISCOVER, &probe, sizeof probe);
        setsockopt(fd, IPPROTO_IP, IP_RECVERR, &on, sizeof on);
    }
    if (e->set.rate < 4e9) {
        uint32_t most = (uint32_t)e->set.rate; /* has an effect where the qdisc is fq */
        setsockopt(fd, SOL_SOCKET, SO_MAX_PACING_RATE, &most, sizeof most);
    }
}

static void close_sockets(struct engine *e)
{
    int sockets[] = {e->net.socket, e->net.wake, e->net.watch};
    for (int i = 0; i < 3; i++)
        if (sockets[i] >= 0)
            close(sockets[i]);
}

/* A socket that can be read when an address of this host came or went; -1: there is none. */
static int watch_addresses(void)
{
    struct sockaddr_nl what = {.nl_family = AF_NETLINK, .nl_groups = RTMGRP_IPV4_IFADDR | RTMGRP_IPV6_IFADDR};
    int fd = socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC | SOCK_NONBLOCK, NETLINK_ROUTE);
    if (fd >= 0 && bind(fd, (struct sockaddr *)&what, sizeof what) < 0) {
        close(fd);
        fd = -1;
    }
    return fd;
}

static socklen_t address_size(const struct sockaddr_storage *a)
{
    return a->ss_family == AF_INET6 ? sizeof(struct sockaddr_in6) : sizeof(struct sockaddr_in);
}

static struct sockaddr_storage any_address(sa_family_t family, in_port_t port)
{
    struct sockaddr_storage any = {.ss_family = family}; /* of both families, zeros are any address */
    ((struct sockaddr_in *)&any)->sin_port = port;       /* at the same place for both */
    return any;
}

static int bound_to_any(const struct engine *e)
{
    struct sockaddr_storage any = any_address(e->net.local.ss_family, 0);
    return same_host(&e->net.local, &any);
}

/* Whether what is sent to the others comes from elsewhere since the last call. */
static int source_changed(struct engine *e)
{
    struct sockaddr_storage source = {0};
    socklen_t size = sizeof source;
    int fd = socket(e->net.local.ss_family, SOCK_DGRAM | SOCK_CLOEXEC, IPPROTO_UDP), changed = 0;
    if (fd >= 0 && e->flows && !connect(fd, (struct sockaddr *)&e->flows->to, e->flows->to_size)
        && !getsockname(fd, (struct sockaddr *)&source, &size)) {
        changed = !e->net.source.ss_family || !same_host(&source, &e->net.source);
        e->net.source = source;
    }
    if (fd >= 0)
        close(fd);
    return changed;
}

/* They hear it from there at once, though one of these may be lost. It is another path for what is sent, too. */
static void announce(struct engine *e, ns now)
{
    for (struct flow *f = e->flows; f; f = f->next) {
        f->pulse.until = now + 20 * PULSE;
        f->pulse.at = now;
        rate_moved(&f->rate, now);
    }
    due(e, now);
}

/* Nothing can be sent from the address of the socket any more. */
static void address_lost(struct engine *e, ns now)
{
    e->net.lost = 0;
    if (!e->set.cipher || bound_to_any(e))
        return; /* without a cipher nobody believes it; or there is no way to them for now, from anywhere */
    struct sockaddr_storage any = any_address(e->net.local.ss_family, ((struct sockaddr_in *)&e->net.local)->sin_port);
    int fd = socket(any.ss_family, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, IPPROTO_UDP);
    if (fd < 0)
        return;
    close(e->net.socket); /* its port is free now */
    e->net.socket = fd;
    if (bind(fd, (struct sockaddr *)&any, address_size(&any)) < 0) { /* somebody else has taken the port: another one does */
        ((struct sockaddr_in *)&any)->sin_port = 0;
        if (bind(fd, (struct sockaddr *)&any, address_size(&any)) < 0)
            e->count.send_failed++;
    }
    e->net.local = any;
    granted(fd, SO_RCVBUF, e->net.force ? SO_RCVBUFFORCE : SO_RCVBUF, e->net.buffer);
    granted(fd, SO_SNDBUF, e->net.force ? SO_SNDBUFFORCE : SO_SNDBUF, e->net.buffer);
    socket_options(e, fd);
    e->net.overflow_seen = 0;
    e->count.rebound++;
    source_changed(e);
    announce(e, now);
}

/* Most changes are of others: interfaces of containers come and go. */
static void addresses_changed(struct engine *e, ns now)
{
    uint8_t bytes[8192];
    while (recv(e->net.watch, bytes, sizeof bytes, MSG_DONTWAIT) > 0 || errno == ENOBUFS) { /* which ones is no matter */ }
    if (bound_to_any(e)) {
        if (source_changed(e))
            announce(e, now);
        return;
    }
    struct sockaddr_storage same = e->net.local;
    ((struct sockaddr_in *)&same)->sin_port = 0;
    int fd = socket(same.ss_family, SOCK_DGRAM | SOCK_CLOEXEC, IPPROTO_UDP);
    if (fd >= 0 && bind(fd, (struct sockaddr *)&same, address_size(&same)) < 0 && errno == EADDRNOTAVAIL)
        address_lost(e, now);
    if (fd >= 0)
        close(fd);
}
