/* CPU cost of a payload on one core of this machine: a line "what<tab>CPU seconds per GB" for each task. Argument: bytes of a packet.
 *
 * The cipher is the engine's own. Of UDP over the loopback it is both ends, and what the kernel does between them.
 */
#include "base.h"
#include "wire.c"
#include "cipher.c"
#include <arpa/inet.h>

enum { REPEATS = 15, PACKETS = 2000, MOST = 65536 };

static uint8_t from[64 << 20], to[64 << 20];
static int payload, sender, receiver;

static double cpu(void)
{
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

/* The least CPU seconds per GB of payload; `work` returns how many bytes it did. */
static void measure(const char *what, long (*work)(void))
{
    double least_time = 0;
    for (int k = 0; k < REPEATS; k++) {
        double start = cpu(), bytes = (double)work(), time = (cpu() - start) / bytes * 1e9;
        least_time = k && least_time < time ? least_time : time;
    }
    printf("%s\t%.4f\n", what, least_time);
}

static long copy(void)
{
    memcpy(to, from, sizeof to);
    __asm__ volatile("" ::: "memory");
    return sizeof to;
}

static struct key seal, open_;
static long seal_and_open(void)
{
    uint8_t sealed[MOST];
    struct header h = {.type = DATA};
    for (int k = 0; k < PACKETS; k++) {
        h.number++;
        header_write(&h, sealed);
        if (!cipher_seal(key_of(&seal, h.number, 1), sealed, from + k * payload, payload, sealed + HEADER)
            || !cipher_open(key_of(&open_, h.number, 0), sealed, sealed + HEADER, payload, to))
            exit(1);
    }
    return (long)PACKETS * payload;
}

/* `together` packets in each call. */
static long datagrams(int together)
{
    int packet = HEADER + payload + TAG, segment = packet, off = 0, size = together * packet;
    long left = PACKETS, bytes = 0;
    setsockopt(sender, SOL_UDP, UDP_SEGMENT, together > 1 ? &segment : &off, sizeof segment);
    while (left > 0) {
        if (send(sender, from, (size_t)size, 0) != size)
            exit(1);
        for (int got = 0; got < size;) {
            ssize_t n = recv(receiver, to, MOST, 0);
            if (n <= 0)
                exit(1);
            got += (int)n;
        }
        left -= together;
        bytes += (long)together * payload;
    }
    return bytes;
}

static long one_by_one(void) { return datagrams(1); }
static long with_offload(void)
{
    int most = 65000 / (HEADER + payload + TAG);
    return datagrams(most < 64 ? most : 64);
}

int main(int count, char **arguments)
{
    payload = count > 1 ? atoi(arguments[1]) : 0;
    if (payload < 1 || payload > 32000)
        return 2;
    memset(from, 1, sizeof from);
    memset(to, 1, sizeof to);
    measure("memcpy", copy);
    uint8_t key[16] = {1};
    if (!ml_load_cipher() && key_new(&seal, key, 1) && key_new(&open_, key, 0))
        measure("AES-128-GCM, seal and open", seal_and_open);
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof address;
    int on = 1;
    sender = socket(AF_INET, SOCK_DGRAM, 0);
    receiver = socket(AF_INET, SOCK_DGRAM, 0);
    struct timeval patience = {5, 0};
    if (bind(receiver, (struct sockaddr *)&address, size) || getsockname(receiver, (struct sockaddr *)&address, &size)
        || connect(sender, (struct sockaddr *)&address, size))
        return 1;
    setsockopt(receiver, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    measure("UDP, a packet at a time", one_by_one);
    setsockopt(receiver, SOL_UDP, UDP_GRO, &on, sizeof on);
    measure("UDP, many packets at a time (GSO, GRO)", with_offload);
    return 0;
}
