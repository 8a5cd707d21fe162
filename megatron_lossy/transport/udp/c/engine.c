/* The datagram engine of --transport udp: one socket and one thread per process.
 *
 * Two layers. The protocol (all but thread.c) does no input or output and never asks for the time: what arrives goes into handle,
 * what is due comes out of produce, timers does what waits for a time, and `now` is an argument. The thread joins it to a socket
 * and a clock; tests join several by functions that lose datagrams.
 *
 * An exchange is (channel, phase, step, bucket). Of each source it expects the units of one shard, a datagram each.
 *
 *   receiver: posted, no END yet      READY 0 until END or everything arrived        (also asks for a lost END)
 *             all arrived, or END and the reorder window passed, or the deadline     READY 1: done, once and on request
 *   sender:   up to `eager` bytes, then ASK until READY; DATA; END until READY 1 comes back
 *
 * A receiver answers ASK with READY 0 or 1, and not at all before it has posted.
 *
 * So each side of each wait repeats what the other may have lost, at intervals that double up to a second: a process that is
 * stopped finds a short queue when it goes on. Lost DATA is not repeated, but for units that must arrive (must.c). With READY 1 a
 * receiver of a bucket with reports says which units it did not get. END and that READY come in as many parts as they need.
 *
 * The parts are one translation unit: the compiler sees every call, as it would in one file, and needs no optimisation at link
 * time, which not every machine's compiler has. Each part uses those above it and none below.
 */
#include "base.h"
#include "wire.c"     /* wire format: header, payload of reports, addresses */
#include "cipher.c"   /* cipher: AES-128-GCM of libcrypto */
#include "shared.c"   /* rate next to others */
#include "rate.c"     /* rate: how fast one destination may be sent to */
#include "state.h"    /* state of flows, channels, members, buckets, exchanges */
#include "exchange.c" /* exchange state: begin, early pool, end; parts of lists and reports */
#include "must.c"     /* what must arrive: lists, requests */
#include "halves.c"   /* the two halves of an exchange: posting, sending */
#include "arrive.c"   /* what arrives: one datagram */
#include "leave.c"    /* what leaves: the next datagrams */
#include "channel.c"  /* channels: opening and closing */
#include "timers.c"   /* what waits for a time */
#include "calls.c"    /* interface to Python */
#include "thread.c"   /* the socket and the thread */
