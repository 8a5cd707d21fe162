/* The socket, and the thread that joins it and a clock to the protocol. */

/* A privileged process gets the buffer that it asks for; other processes get at most net.core.rmem_max. */
static int granted(int fd, int option, int force, int wanted)
{
    int value = 0;
    socklen_t size = sizeof value;
    if (setsockopt(fd, SOL_SOCKET, force, &wanted, sizeof wanted) < 0)
        setsockopt(fd, SOL_SOCKET, option, &wanted, sizeof wanted);
    getsockopt(fd, SOL_SOCKET, option, &value, &size);
    return value;
}

static void socket_options(const struct engine *e, int family)
{
    int fd = e->net.socket, on = 1, probe = IP_PMTUDISC_PROBE, v6 = family == AF_INET6, level = v6 ? IPPROTO_IPV6 : IPPROTO_IP;
    setsockopt(fd, SOL_UDP, UDP_GRO, &on, sizeof on);
    setsockopt(fd, SOL_SOCKET, SO_RXQ_OVFL, &on, sizeof on);
    setsockopt(fd, SOL_SOCKET, SO_TIMESTAMPNS, &on, sizeof on); /* when it came, however late this process is woken */
    setsockopt(fd, level, v6 ? IPV6_MTU_DISCOVER : IP_MTU_DISCOVER, &probe, sizeof probe);
    setsockopt(fd, level, v6 ? IPV6_RECVERR : IP_RECVERR, &on, sizeof on);
    if (e->set.rate < 4e9) {
        uint32_t most = (uint32_t)e->set.rate; /* has an effect where the qdisc is fq */
        setsockopt(fd, SOL_SOCKET, SO_MAX_PACING_RATE, &most, sizeof most);
    }
}

/* All of it in a child process, which has neither the thread nor a lock that it may trust. */
API void ml_close_sockets(struct engine *e)
{
    if (e->net.socket >= 0)
        close(e->net.socket);
    if (e->net.wake >= 0)
        close(e->net.wake);
}

#define AT_LEAST_EVERY (10 * MS) /* timers, however much comes in */

static void read_errors(struct engine *e)
{
    for (;;) {
        uint8_t control_bytes[512], data[64];
        struct sockaddr_storage to;
        struct iovec part = {data, sizeof data};
        struct msghdr message = {.msg_name = &to, .msg_namelen = sizeof to, .msg_iov = &part, .msg_iovlen = 1,
                                 .msg_control = control_bytes, .msg_controllen = sizeof control_bytes};
        if (recvmsg(e->net.socket, &message, MSG_ERRQUEUE | MSG_DONTWAIT) < 0)
            return;
        for (struct cmsghdr *h = CMSG_FIRSTHDR(&message); h; h = CMSG_NXTHDR(&message, h)) {
            struct sock_extended_err error;
            if (!(h->cmsg_level == IPPROTO_IP && h->cmsg_type == IP_RECVERR)
                && !(h->cmsg_level == IPPROTO_IPV6 && h->cmsg_type == IPV6_RECVERR))
                continue;
            memcpy(&error, CMSG_DATA(h), sizeof error);
            e->count.unreachable += error.ee_origin != SO_EE_ORIGIN_LOCAL;
            ns now = clock_now();
            for (struct flow *f = e->flows; f && error.ee_errno == ECONNREFUSED; f = f->next)
                if (same_address(&f->to, (struct sockaddr *)&to) && now - f->refused_at >= 30 * MS) {
                    f->refused++; /* those of one burst count once */
                    f->refused_at = now;
                    due(e, 0);
                }
        }
    }
}

enum { REFUSALS = 5 }; /* of a datagram by a queue that is full; an interface that will never take it says the same */

/* 1: sent or given up; 0: the kernel has no room for what is left. `sent`: the bytes before that, 0 in the beginning. */
static int transmit(struct engine *e, const struct output *o, uint32_t *sent)
{
    while (*sent < o->bytes) {
        uint32_t left = o->bytes - *sent, size = e->net.gso || o->segment > left ? left : o->segment;
        union { char bytes[CMSG_SPACE(sizeof(uint16_t))]; struct cmsghdr align; } space = {{0}};
        struct iovec part = {e->batch + *sent, size};
        struct msghdr message = {.msg_name = (void *)&o->to, .msg_namelen = o->to_size, .msg_iov = &part, .msg_iovlen = 1};
        if (size > o->segment) {
            uint16_t segment = (uint16_t)o->segment;
            message.msg_control = space.bytes;
            message.msg_controllen = sizeof space.bytes;
            struct cmsghdr *h = CMSG_FIRSTHDR(&message);
            h->cmsg_level = SOL_UDP;
            h->cmsg_type = UDP_SEGMENT;
            h->cmsg_len = CMSG_LEN(sizeof segment);
            memcpy(CMSG_DATA(h), &segment, sizeof segment);
        }
        int tries = 0;
        ssize_t result;
        while ((result = sendmsg(e->net.socket, &message, MSG_DONTWAIT | MSG_NOSIGNAL)) < 0 && tries++ < 4
               && (errno == EINTR || errno == ECONNREFUSED))
            read_errors(e); /* an earlier datagram's error: this one was not sent */
        if (result < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || (errno == ENOBUFS && ++e->net.refusals < REFUSALS)))
            return 0;
        e->net.refusals = 0;
        if (result < 0 && size > o->segment && (errno == EIO || errno == EINVAL || errno == ENOTSUP || errno == ENOPROTOOPT)) {
            e->net.gso = 0; /* this interface or kernel does not cut: we do */
            continue;
        }
        if (result < 0)
            *(errno == EMSGSIZE ? &e->count.too_big : &e->count.send_failed) += 1;
        e->count.segmented += size > o->segment;
        e->count.bytes_sent += size;
        *sent += size;
    }
    return 1;
}

/* How many messages came; 0: none are there. */
static int receive(struct engine *e)
{
    struct mmsghdr messages[RECEIVE];
    struct iovec parts[RECEIVE];
    struct sockaddr_storage froms[RECEIVE];
    union { char bytes[128]; struct cmsghdr align; } spaces[RECEIVE];
    for (int i = 0; i < RECEIVE; i++) {
        parts[i] = (struct iovec){e->net.receive[i], RECEIVE_BYTES};
        messages[i].msg_hdr = (struct msghdr){.msg_name = &froms[i], .msg_namelen = sizeof froms[i], .msg_iov = &parts[i],
                                              .msg_iovlen = 1, .msg_control = spaces[i].bytes,
                                              .msg_controllen = sizeof spaces[i].bytes};
    }
    int n = recvmmsg(e->net.socket, messages, RECEIVE, MSG_DONTWAIT, NULL);
    if (n < 0) {
        if (errno == EAGAIN || errno == EWOULDBLOCK)
            return 0;
        read_errors(e);
        return 1;
    }
    ns now = clock_now();
    for (int i = 0; i < n; i++) {
        uint32_t size = messages[i].msg_len, segment = size;
        ns came = now;
        for (struct cmsghdr *h = CMSG_FIRSTHDR(&messages[i].msg_hdr); h; h = CMSG_NXTHDR(&messages[i].msg_hdr, h)) {
            if (h->cmsg_level == SOL_UDP && h->cmsg_type == UDP_GRO) {
                int length;
                memcpy(&length, CMSG_DATA(h), sizeof length);
                segment = length > 0 && (uint32_t)length < size ? (uint32_t)length : size;
            } else if (h->cmsg_level == SOL_SOCKET && h->cmsg_type == SO_RXQ_OVFL) {
                uint32_t dropped;
                memcpy(&dropped, CMSG_DATA(h), sizeof dropped);
                e->count.socket_overflow += dropped - e->net.overflow_seen;
                e->net.overflow_seen = dropped;
            } else if (h->cmsg_level == SOL_SOCKET && h->cmsg_type == SCM_TIMESTAMPNS) {
                struct timespec stamp;
                memcpy(&stamp, CMSG_DATA(h), sizeof stamp);
                ns at = stamp.tv_sec * SECOND + stamp.tv_nsec - e->set.clock;
                came = at < now && at > now - SECOND ? at : now; /* that clock may have been set meanwhile */
            }
        }
        if (messages[i].msg_hdr.msg_flags & MSG_TRUNC || !size) {
            e->count.malformed++;
            continue;
        }
        for (uint32_t from = 0; from < size; from += segment)
            handle(e, (struct sockaddr *)&froms[i], (uint8_t *)parts[i].iov_base + from,
                   segment < size - from ? segment : size - from, now, came);
    }
    return n;
}

/* A mutex alone would let the thread take it again and again. Not by sched_yield: the scheduler may take each call for
 * a slice of time used, and let the thread wait for as many. */
static void give_way(struct engine *e)
{
    if (!atomic_load(&e->thread.waiting))
        return;
    struct timespec until = timespec_of(clock_now() + MS);
    e->thread.giving = 1;
    pthread_cond_timedwait(&e->thread.given, &e->lock, &until);
    e->thread.giving = 0;
}

static void *run(void *argument)
{
    struct engine *e = argument;
    struct output o = {.bytes = 0};
    uint32_t sent = 0; /* of `o` */
    ns retry_at = 0, timed_at = 0, clock_at = 0;
    pthread_mutex_lock(&e->lock);
    for (;;) {
        /* A clock that is read before the socket is found empty: no timer may run out before what came in time. */
        int drained = 0;
        ns before = 0;
        for (int i = 0; i < 8 && !drained; i++) {
            before = clock_now();
            if (before - clock_at >= SECOND) { /* it may be set */
                struct timespec t;
                clock_gettime(CLOCK_REALTIME, &t);
                e->set.clock = t.tv_sec * SECOND + t.tv_nsec - before;
                clock_at = before;
            }
            drained = !receive(e);
            give_way(e);
        }
        if (drained || before - timed_at >= AT_LEAST_EVERY) {
            timers(e, drained ? before : before - AT_LEAST_EVERY); /* what came in time may still be waiting to be read */
            timed_at = before;
        } else {
            reports(e, before);
        }
        int stopping = atomic_load(&e->thread.stop);
        int busy = !drained;
        for (int i = 0; i < 4; i++) {
            if (!o.bytes && !produce(e, clock_now(), e->batch, &o))
                break;
            if (clock_now() < retry_at || !transmit(e, &o, &sent)) {
                if (clock_now() >= retry_at)
                    retry_at = clock_now() + MS;
                busy = !drained;
                break;
            }
            o.bytes = sent = 0;
            busy = 1;
        }
        give_way(e);
        if (busy && !stopping)
            continue;
        if (stopping) {
            for (int i = 0; i < 256; i++) {
                if (!produce_control(e, clock_now(), e->batch, &o))
                    break;
                sent = 0;
                transmit(e, &o, &sent);
            }
            break;
        }
        ns until = least(e->timers_at, o.bytes ? retry_at : e->blocked_until), now = clock_now();
        ns rest = until <= now ? 0 : least(until - now, SECOND);
        atomic_store(&e->thread.asleep, 1);
        pthread_mutex_unlock(&e->lock);
        struct pollfd polled[2] = {{.fd = e->net.socket, .events = POLLIN}, {.fd = e->net.wake, .events = POLLIN}};
        struct timespec pause = timespec_of(rest);
        if (rest && !atomic_load(&e->thread.waiting))
            ppoll(polled, 2, &pause, NULL);
        atomic_store(&e->thread.asleep, 0);
        if (polled[1].revents & POLLIN) {
            uint64_t count;
            if (read(e->net.wake, &count, sizeof count) < 0) { /* another thread's wake */ }
        }
        pthread_mutex_lock(&e->lock);
        if (polled[0].revents & POLLERR)
            read_errors(e);
    }
    pthread_mutex_unlock(&e->lock);
    return NULL;
}

/* Without `address` there is neither socket nor thread. `result`: port, granted receive buffer, errno of a failure. */
API struct engine *ml_create(const struct settings *set, const struct sockaddr *address, uint32_t address_size, int buffer,
                             int64_t *result)
{
    struct engine *e = calloc(1, sizeof *e);
    if (!e)
        return NULL;
    e->net.socket = e->net.wake = -1;
    e->set = *set;
    e->window = e->limit = UINT32_MAX;
    pthread_mutex_init(&e->lock, NULL);
    pthread_mutex_init(&e->tell, NULL);
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&e->told, &monotonic);
    pthread_cond_init(&e->thread.given, &monotonic);
    pthread_condattr_destroy(&monotonic);
    e->wire_overhead = address && address->sa_family == AF_INET6 ? 48 : 28;
    if (!address)
        return e;
    e->net.wake = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    e->net.socket = socket(address->sa_family, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, IPPROTO_UDP);
    if (e->net.wake < 0 || e->net.socket < 0 || bind(e->net.socket, address, address_size) < 0)
        goto failed;
    int none = 0; /* a kernel without it takes the control message, and sends one datagram that is too long */
    e->net.gso = setsockopt(e->net.socket, SOL_UDP, UDP_SEGMENT, &none, sizeof none) == 0;
    result[1] = granted(e->net.socket, SO_RCVBUF, SO_RCVBUFFORCE, buffer);
    granted(e->net.socket, SO_SNDBUF, SO_SNDBUFFORCE, buffer);
    socket_options(e, address->sa_family);
    struct sockaddr_storage bound;
    socklen_t size = sizeof bound;
    if (getsockname(e->net.socket, (struct sockaddr *)&bound, &size) < 0)
        goto failed;
    result[0] = ntohs(((struct sockaddr_in *)&bound)->sin_port); /* where that of IPv6 is, too */
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are the interpreter's */
    e->thread.running = 1;
    int error = pthread_create(&e->thread.id, NULL, run, e);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (!error)
        return e;
    e->thread.running = 0;
    errno = error;
failed:
    result[2] = errno;
    ml_close_sockets(e);
    free(e);
    return NULL;
}

/* Channels must be closed, and no thread may call or wait any more. */
API void ml_free(struct engine *e)
{
    if (e->thread.running) {
        uint64_t one = 1;
        atomic_store(&e->thread.stop, 1);
        if (write(e->net.wake, &one, sizeof one) < 0) { /* full: it is being woken */ }
        pthread_join(e->thread.id, NULL);
    }
    while (e->channels)
        channel_free(e->channels);
    for (struct flow *f = e->flows, *next; f; f = next) {
        next = f->next;
        flow_empty(f);
        free(f);
    }
    ml_close_sockets(e);
    pthread_cond_destroy(&e->told);
    pthread_cond_destroy(&e->thread.given);
    pthread_mutex_destroy(&e->tell);
    pthread_mutex_destroy(&e->lock);
    free(e);
}
