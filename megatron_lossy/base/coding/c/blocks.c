/* Codes in blocks, on a CPU: the bits of coding/blocks.py, which describes them.
 *
 * Loops have no branches inside, so that compilers make vectors of them. Floating point is that of IEEE 754 throughout: no
 * contraction, no reciprocals.
 */

#include <stdint.h>
#include <string.h>

#define API __attribute__((visibility("default")))
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define CLONES __attribute__((target_clones("avx512f", "avx2", "default"))) /* chosen when the library is loaded */
#else
#define CLONES
#endif

enum { MOST_BLOCK = 256, SCALE = 2 };
#define INFINITE 0x7f800000u
#define NOT_A_NUMBER 0x7fc00000u
#define LEAST 0x1p-126f
#define NEAREST 0x1.8p23f /* added to a small number and subtracted again it leaves the nearest whole one, half to even */

static uint32_t bits_of(float x) { uint32_t v; memcpy(&v, &x, sizeof v); return v; }
static float float_of(uint32_t v) { float x; memcpy(&x, &v, sizeof x); return x; }

/* The bits of s: max |x| / most in bfloat16, rounded up; 0 for zeros, NaN where a value is not finite. */
static inline uint32_t scale_of(const float *x, int64_t n, int most)
{
    uint32_t bits[MOST_BLOCK], largest = 0;
    memcpy(bits, x, (size_t)n * sizeof *x);
    for (int64_t i = 0; i < n; i++) {
        uint32_t magnitude = bits[i] & 0x7fffffffu;
        largest = magnitude > largest ? magnitude : largest;
    }
    if (!largest)
        return 0;
    if (largest >= INFINITE)
        return NOT_A_NUMBER;
    float s = float_of(largest) / (float)most;
    return (bits_of(s < LEAST ? LEAST : s) + 0xffffu) & 0xffff0000u;
}

/* u of n elements, an even number or the last ones, from pair number `pair` on. */
static inline void uniforms(float *u, int64_t n, uint32_t pair, const uint32_t *key)
{
    uint32_t hashed[MOST_BLOCK / 2];
    int64_t pairs = (n + 1) / 2;
    for (int64_t i = 0; i < pairs; i++) {
        uint32_t h = ((pair + (uint32_t)i) * 0x9e3779b1u) ^ key[0];
        h ^= h >> 16;
        h = h * 0x85ebca6bu + key[1];
        h ^= h >> 13;
        h *= 0xc2b2ae35u;
        hashed[i] = h ^ h >> 16;
    }
    for (int64_t i = 0; i < pairs; i++) {
        u[2 * i] = (float)(int32_t)(hashed[i] & 0xffffu) * 0x1p-16f;
        u[2 * i + 1] = (float)(int32_t)(hashed[i] >> 16) * 0x1p-16f;
    }
}

/* The codes of n values with the scale whose bits are `scale`; u of each, or NULL: to nearest. */
static inline void codes_of(const float *x, int32_t *c, int64_t n, uint32_t scale, const float *u)
{
    if (!scale || scale >= INFINITE) {
        memset(c, 0, (size_t)n * sizeof *c);
        return;
    }
    float s = float_of(scale);
    if (!u) {
        for (int64_t i = 0; i < n; i++)
            c[i] = (int32_t)((x[i] / s + NEAREST) - NEAREST);
        return;
    }
    for (int64_t i = 0; i < n; i++) {
        float v = x[i] / s + u[i];
        int32_t whole = (int32_t)v;
        c[i] = whole - ((float)whole > v);
    }
}

static inline void pack(const int32_t *c, uint8_t *out, int64_t n, int bits)
{
    if (bits == 8) {
        for (int64_t i = 0; i < n; i++)
            out[i] = (uint8_t)c[i];
        return;
    }
    for (int64_t i = 0; i < n / 2; i++)
        out[i] = (uint8_t)((c[2 * i] & 15) | c[2 * i + 1] << 4);
    if (n % 2)
        out[n / 2] = (uint8_t)(c[n - 1] & 15);
}

static inline void unpack(const uint8_t *in, int32_t *c, int64_t n, int bits)
{
    if (bits == 8) {
        for (int64_t i = 0; i < n; i++)
            c[i] = (int8_t)in[i];
        return;
    }
    for (int64_t i = 0; i < n / 2; i++) {
        c[2 * i] = (int32_t)((uint32_t)in[i] << 28) >> 28;
        c[2 * i + 1] = (int32_t)((uint32_t)in[i] << 24) >> 28;
    }
    if (n % 2)
        c[n - 1] = (int32_t)((uint32_t)in[n / 2] << 28) >> 28;
}

/* The values of n codes with the scale s, of at most `largest`; NaN stays NaN. */
static inline void values_of(const int32_t *c, float *x, int64_t n, float s, float largest)
{
    for (int64_t i = 0; i < n; i++) {
        float v = (float)c[i] * s;
        v = largest < v ? largest : v;
        x[i] = -largest > v ? -largest : v;
    }
}

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* `rows` rows of `shard` values, `stride` apart, in units of `unit` values and blocks of `block`. `keys`: two words for each row, or
 * NULL: to nearest. `first`: the number of the first value of a row, an even one. The payloads go to `out`, rows one after another;
 * or, if that is NULL, their values, of at most `largest`, in the place of those of `x`. */
API CLONES void mb_encode(float *x, uint8_t *out, int64_t rows, int64_t stride, int64_t shard, int64_t unit, int bits, int64_t block,
                          const uint32_t *keys, uint64_t first, float largest)
{
    int most = (1 << (bits - 1)) - 1;
    float u[MOST_BLOCK];
    int32_t c[MOST_BLOCK];
    for (int64_t row = 0; row < rows; row++)
        for (int64_t start = 0; start < shard; start += unit) {
            int64_t elements = least(unit, shard - start), blocks = (elements + block - 1) / block;
            uint8_t *codes = out ? out + SCALE * blocks : NULL;
            for (int64_t k = 0; k < blocks; k++) {
                int64_t place = k * block, n = least(block, elements - place);
                float *values = x + row * stride + start + place;
                uint32_t scale = scale_of(values, n, most);
                if (keys)
                    uniforms(u, n, (uint32_t)((first + (uint64_t)(start + place)) / 2), keys + 2 * row);
                codes_of(values, c, n, scale, keys ? u : NULL);
                if (!out) {
                    values_of(c, values, n, float_of(scale), largest);
                    continue;
                }
                out[SCALE * k] = (uint8_t)(scale >> 16);
                out[SCALE * k + 1] = (uint8_t)(scale >> 24);
                pack(c, codes + place * bits / 8, n, bits);
            }
            if (out)
                out = codes + (elements * bits + 7) / 8;
        }
}

/* The values of payloads, rows `size` bytes apart, of at most `largest`, into `rows` rows of `x` that are `stride` apart. */
API CLONES void mb_decode(const uint8_t *in, float *x, int64_t rows, int64_t size, int64_t stride, int64_t shard, int64_t unit, int bits,
                          int64_t block, float largest)
{
    int32_t c[MOST_BLOCK];
    for (int64_t row = 0; row < rows; row++) {
        const uint8_t *payload = in + row * size;
        for (int64_t start = 0; start < shard; start += unit) {
            int64_t elements = least(unit, shard - start), blocks = (elements + block - 1) / block;
            const uint8_t *codes = payload + SCALE * blocks;
            for (int64_t k = 0; k < blocks; k++) {
                int64_t place = k * block, n = least(block, elements - place);
                float *values = x + row * stride + start + place;
                float s = float_of((uint32_t)payload[SCALE * k] << 16 | (uint32_t)payload[SCALE * k + 1] << 24);
                unpack(codes + place * bits / 8, c, n, bits);
                values_of(c, values, n, s, largest);
            }
            payload = codes + (elements * bits + 7) / 8;
        }
    }
}
