/* The engine inside a program: draws from a seed, and addresses of ranks. */
#include "udp_hooks.c"

static uint64_t state;
static uint32_t draw(uint32_t below)
{
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)((state >> 33) % (below ? below : 1));
}

static struct sockaddr_in address_of(uint32_t rank)
{
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons((uint16_t)(1000 + rank))};
    a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    return a;
}
