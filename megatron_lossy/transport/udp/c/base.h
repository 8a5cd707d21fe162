/* Needs of every part: the system's headers, time, and the mark of functions that Python calls. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/udp.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include <linux/errqueue.h> /* after time.h */

#ifndef UDP_SEGMENT
#define UDP_SEGMENT 103
#endif
#ifndef UDP_GRO
#define UDP_GRO 104
#endif

#define API __attribute__((visibility("default")))

typedef int64_t ns;
#define US ((ns)1000)
#define MS ((ns)1000000)
#define SECOND ((ns)1000000000)
#define NEVER INT64_MAX

static ns clock_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * SECOND + t.tv_nsec;
}

static struct timespec timespec_of(ns t) { return (struct timespec){t / SECOND, t % SECOND}; }
static ns least(ns a, ns b) { return a < b ? a : b; }
static ns greatest(ns a, ns b) { return a > b ? a : b; }
