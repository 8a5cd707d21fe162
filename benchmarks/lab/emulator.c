/* A link emulator: IP packets are read from a TUN device per node, and written to the one of their destination later,
 * or never.
 *
 *     emulator SHARED TUN...      file descriptors: the memory of struct lab, and the device of each node
 *
 * A packet goes from the site of its source to the site of its destination through the pipe between the two: it waits
 * in a queue of finite length, is sent at the rate of the pipe, may be lost, is delayed, and may be late or come twice.
 * Nodes of one site reach each other at once. The number of a node is the last byte of its address, less one, modulo 64: it may
 * have several addresses, and change them.
 *
 * Settings may change at any time. Python writes them, then raises `generation`; the next packet finds them. The draws
 * of a pipe start anew with each generation: the k-th packet after it meets the same fate in every run of one seed.
 * Ends when standard input does, which is when the process at its other end has gone.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define MAX_NODES 64
#define READS_AT_ONCE 64
#define SLAB 1024

/* The layout is repeated in __init__.py. */
struct settings {
    double delay;         /* seconds */
    double loss;          /* share of packets */
    double burst;         /* mean packets lost in a row; 0: independent losses */
    double rate;          /* bytes a second; 0: no limit */
    double queue;         /* bytes that may wait */
    double reorder;       /* share of packets that are `late` seconds later */
    double late;
    double duplicate;     /* share of packets that come twice */
    double mtu;           /* bytes; longer packets vanish without a word; 0: no limit */
    uint64_t seed;
    uint64_t generation;
};

struct counters {
    uint64_t packets, bytes;          /* that came in */
    uint64_t overflowed;              /* did not fit the queue */
    uint64_t lost;                    /* by the draws, or too long */
    uint64_t reordered, duplicated;
    uint64_t delivered, delivered_bytes;
};

struct pipe {
    struct settings settings;
    struct counters counters;
};

struct lab {
    uint32_t nodes, sites, mtu, ready;
    uint64_t unknown;                 /* packets for no node, such as multicast */
    uint64_t failed;                  /* writes that the kernel refused */
    uint32_t site[MAX_NODES];
    struct pipe pipes[];              /* [source site * sites + destination site] */
};

/* State of a pipe in the emulator, beyond the shared one. A stream of draws for each thing that is drawn, so that
 * reordering changes no loss. */
struct state {
    struct settings now;
    uint64_t loss_draws, reorder_draws, duplicate_draws;
    int in_burst;
    double idle_at;                   /* when all that waits will have been sent */
};

struct packet {
    double due;
    uint64_t order;                   /* packets due at once leave in the order they came */
    uint32_t bytes;
    uint16_t node;
    struct packet *next_free;
    struct counters *counters;
    uint8_t data[];
};

static struct lab *lab;
static int tun[MAX_NODES];
static struct packet **heap;
static size_t heap_length, heap_room;
static struct packet *free_packets;
static uint64_t arrivals;

static void fail(const char *what)
{
    perror(what);
    exit(1);
}

static double seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec + 1e-9 * now.tv_nsec;
}

/* Uniform in [0, 1): splitmix64. */
static double draw(uint64_t *state)
{
    uint64_t z = (*state += 0x9e3779b97f4a7c15ull);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return ((z ^ (z >> 31)) >> 11) * 0x1p-53;
}

static struct packet *take_packet(void)
{
    if (!free_packets) {
        size_t size = (sizeof(struct packet) + lab->mtu + 63) & ~(size_t)63;
        uint8_t *slab = malloc(SLAB * size);
        if (!slab)
            fail("malloc");
        for (int i = 0; i < SLAB; i++) {
            struct packet *packet = (struct packet *)(slab + i * size);
            packet->next_free = free_packets;
            free_packets = packet;
        }
    }
    struct packet *packet = free_packets;
    free_packets = packet->next_free;
    return packet;
}

static void give_back(struct packet *packet)
{
    packet->next_free = free_packets;
    free_packets = packet;
}

static int before(const struct packet *a, const struct packet *b)
{
    return a->due < b->due || (a->due == b->due && a->order < b->order);
}

static void push(struct packet *packet)
{
    if (heap_length == heap_room) {
        heap_room = heap_room ? 2 * heap_room : 4096;
        heap = realloc(heap, heap_room * sizeof *heap);
        if (!heap)
            fail("realloc");
    }
    size_t at = heap_length++;
    for (; at && before(packet, heap[(at - 1) / 2]); at = (at - 1) / 2)
        heap[at] = heap[(at - 1) / 2];
    heap[at] = packet;
}

static struct packet *pop(void)
{
    struct packet *first = heap[0], *last = heap[--heap_length];
    size_t at = 0;
    for (size_t child; (child = 2 * at + 1) < heap_length; at = child) {
        if (child + 1 < heap_length && before(heap[child + 1], heap[child]))
            child++;
        if (!before(heap[child], last))
            break;
        heap[at] = heap[child];
    }
    heap[at] = last;
    return first;
}

static void deliver(struct packet *packet)
{
    if (write(tun[packet->node], packet->data, packet->bytes) != packet->bytes) {
        lab->failed++;
    } else if (packet->counters) {
        packet->counters->delivered++;
        packet->counters->delivered_bytes += packet->bytes;
    }
    give_back(packet);
}

static void send_at(double due, struct packet *packet)
{
    packet->due = due;
    packet->order = arrivals++;
    push(packet);
}

/* Gilbert and Elliott's chain of two states that loses everything in one of them; it moves once for each packet. */
static int is_lost(struct state *state)
{
    const struct settings *now = &state->now;
    double uniform = draw(&state->loss_draws);
    if (now->burst == 0)
        return uniform < now->loss;
    double to_good = 1 / now->burst, to_burst = now->loss / (now->burst * (1 - now->loss));
    state->in_burst = state->in_burst ? uniform >= to_good : uniform < to_burst;
    return state->in_burst;
}

static void renew(struct state *state, const struct settings *settings)
{
    state->now = *settings;
    state->loss_draws = settings->seed * 3;
    state->reorder_draws = settings->seed * 3 + 1;
    state->duplicate_draws = settings->seed * 3 + 2;
    /* Neighbouring seeds lie apart after one scrambling draw. */
    uint64_t *draws[] = {&state->loss_draws, &state->reorder_draws, &state->duplicate_draws};
    for (int i = 0; i < 3; i++)
        *draws[i] = (uint64_t)(draw(draws[i]) * 0x1p63) * 2 + 1;
    state->in_burst = settings->burst > 0 && draw(&state->loss_draws) < settings->loss;
}

static void through(struct pipe *pipe, struct state *state, struct packet *packet)
{
    struct counters *counters = packet->counters = &pipe->counters;
    if (__atomic_load_n(&pipe->settings.generation, __ATOMIC_ACQUIRE) != state->now.generation)
        renew(state, &pipe->settings);
    const struct settings *now = &state->now;
    double time = seconds(), due = time;
    counters->packets++;
    counters->bytes += packet->bytes;
    if (now->rate > 0) {
        double start = state->idle_at > time ? state->idle_at : time;
        if (start > time && (start - time) * now->rate + packet->bytes > now->queue) {
            counters->overflowed++;
            give_back(packet);
            return;
        }
        due = state->idle_at = start + packet->bytes / now->rate;
    }
    if (is_lost(state) || (now->mtu > 0 && packet->bytes > now->mtu)) {
        counters->lost++;
        give_back(packet);
        return;
    }
    due += now->delay;
    if (now->duplicate > 0 && draw(&state->duplicate_draws) < now->duplicate) {
        struct packet *copy = take_packet();
        memcpy(copy, packet, sizeof *packet + packet->bytes);
        counters->duplicated++;
        send_at(due, copy);
    }
    if (now->reorder > 0 && draw(&state->reorder_draws) < now->reorder) {
        counters->reordered++;
        due += now->late;
    }
    send_at(due, packet);
}

/* The node that an IP packet is for, or -1. */
static int destination(const struct packet *packet)
{
    const uint8_t *data = packet->data;
    int last = 0;
    if (data[0] >> 4 == 4 && packet->bytes >= 20 && data[16] < 224)
        last = data[19];
    else if (data[0] >> 4 == 6 && packet->bytes >= 40 && data[24] < 0xff)
        last = data[39];
    last = (last + MAX_NODES - 1) % MAX_NODES;
    return last < (int)lab->nodes ? last : -1;
}

static void take_in(int node, struct state *states)
{
    for (int i = 0; i < READS_AT_ONCE; i++) {
        struct packet *packet = take_packet();
        ssize_t bytes = read(tun[node], packet->data, lab->mtu);
        if (bytes <= 0) {
            give_back(packet);
            if (bytes < 0 && errno != EAGAIN && errno != EINTR)
                fail("read");
            return;
        }
        packet->bytes = bytes;
        packet->counters = NULL;
        int to = destination(packet);
        if (to < 0) {
            lab->unknown++;
            give_back(packet);
            continue;
        }
        packet->node = to;
        uint32_t pipe = lab->site[node] * lab->sites + lab->site[to];
        if (lab->site[node] == lab->site[to])
            deliver(packet);
        else
            through(&lab->pipes[pipe], &states[pipe], packet);
    }
}

int main(int count, char **arguments)
{
    int shared = atoi(arguments[1]);
    struct stat file;
    if (fstat(shared, &file))
        fail("fstat");
    lab = mmap(NULL, file.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, shared, 0);
    if (lab == MAP_FAILED)
        fail("mmap");
    for (int node = 0; node < (int)lab->nodes && node + 2 < count; node++)
        tun[node] = atoi(arguments[node + 2]);
    struct state *states = calloc(lab->sites * lab->sites, sizeof *states);
    /* A packet must not wait for whatever else computes here, nor for the slack that timers have. */
    setpriority(PRIO_PROCESS, 0, -20);
    prctl(PR_SET_TIMERSLACK, 1ul);
    struct pollfd watched[MAX_NODES + 1] = {{.fd = 0, .events = 0}};
    for (uint32_t node = 0; node < lab->nodes; node++)
        watched[node + 1] = (struct pollfd){.fd = tun[node], .events = POLLIN};
    __atomic_store_n(&lab->ready, 1, __ATOMIC_RELEASE);
    for (;;) {
        double now = seconds();
        while (heap_length && heap[0]->due <= now)
            deliver(pop());
        struct timespec rest = {0, 0}, *timeout = NULL;
        if (heap_length) {
            double left = heap[0]->due - seconds();
            left = left > 0 ? left : 0;
            rest.tv_sec = (time_t)left;
            rest.tv_nsec = (long)(1e9 * (left - rest.tv_sec));
            timeout = &rest;
        }
        if (ppoll(watched, lab->nodes + 1, timeout, NULL) < 0 && errno != EINTR)
            fail("ppoll");
        if (watched[0].revents)
            return 0;
        for (uint32_t node = 0; node < lab->nodes; node++)
            if (watched[node + 1].revents)
                take_in(node, states);
    }
}
