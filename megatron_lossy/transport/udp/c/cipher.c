/* Cipher: AES-128-GCM of libcrypto, loaded when a cipher is asked for.
 *
 * A key may seal at most 2^28 packets of this length (RFC 9001, appendix B.1). So the key changes with each 2^26 numbers: that of
 * an epoch is derived from that of the channel, by HMAC-SHA256 over the number of the epoch, and the first 16 bytes of it.
 */

static struct {
    void *(*cipher_new)(void);
    void (*cipher_free)(void *);
    const void *(*aes_128_gcm)(void);
    int (*control)(void *, int, int, void *);
    int (*init)(void *, const void *, void *, const uint8_t *, const uint8_t *, int);
    int (*update)(void *, uint8_t *, int *, const uint8_t *, int);
    int (*final)(void *, uint8_t *, int *);
    const void *(*sha256)(void);
    uint8_t *(*hmac)(const void *, const void *, int, const uint8_t *, size_t, uint8_t *, unsigned *);
} ssl;

API int ml_load_cipher(void)
{
    void *library = dlopen("libcrypto.so.3", RTLD_NOW | RTLD_LOCAL);
    if (!library)
        library = dlopen("libcrypto.so.1.1", RTLD_NOW | RTLD_LOCAL);
    if (!library)
        return -1;
    const struct { void *function; const char *name; } wanted[] = {
        {&ssl.cipher_new, "EVP_CIPHER_CTX_new"}, {&ssl.cipher_free, "EVP_CIPHER_CTX_free"},
        {&ssl.aes_128_gcm, "EVP_aes_128_gcm"},   {&ssl.control, "EVP_CIPHER_CTX_ctrl"},
        {&ssl.init, "EVP_CipherInit_ex"},        {&ssl.update, "EVP_CipherUpdate"},
        {&ssl.final, "EVP_CipherFinal_ex"},      {&ssl.sha256, "EVP_sha256"},
        {&ssl.hmac, "HMAC"},
    };
    for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++) {
        void *found = dlsym(library, wanted[i].name);
        if (!found)
            return -1;
        memcpy(wanted[i].function, &found, sizeof found);
    }
    return 0;
}

enum { KEY = 16 };
#ifndef EPOCH_BITS /* tests have shorter ones */
#define EPOCH_BITS 26
#endif

/* Of one direction. `cipher`: with the key of the last epoch that was asked for; NULL: libcrypto has no memory. */
struct key { uint8_t base[KEY]; void *cipher; uint64_t epoch; };

static int key_set(struct key *k, uint64_t epoch, int sealing)
{
    uint8_t derived[32];
    if (!epoch)
        memcpy(derived, k->base, KEY);
    else if (!ssl.hmac(ssl.sha256(), k->base, KEY, (const uint8_t *)&epoch, sizeof epoch, derived, NULL))
        return 0;
    k->epoch = epoch;
    return ssl.init(k->cipher, ssl.aes_128_gcm(), NULL, derived, NULL, sealing) == 1;
}

static void key_free(struct key *k)
{
    if (k->cipher)
        ssl.cipher_free(k->cipher);
    k->cipher = NULL;
}

static int key_new(struct key *k, const uint8_t *base, int sealing)
{
    memcpy(k->base, base, KEY);
    if ((k->cipher = ssl.cipher_new()) && key_set(k, 0, sealing))
        return 1;
    key_free(k);
    return 0;
}

/* The cipher for the datagram of this number. */
static void *key_of(struct key *k, uint64_t number, int sealing)
{
    uint64_t epoch = number >> EPOCH_BITS;
    if (epoch != k->epoch && !key_set(k, epoch, sealing))
        k->epoch = UINT64_MAX; /* what it has is of no use: the tag will not fit, and the next call tries again */
    return k->cipher;
}

/* The nonce: 4 zero bytes and the number, as it stands in the header. */
static int cipher_pass(void *cipher, const uint8_t *header, const uint8_t *text, int size, uint8_t *out)
{
    uint8_t nonce[12] = {0};
    int n;
    memcpy(nonce + 4, header + 8, 8);
    return ssl.init(cipher, NULL, NULL, NULL, nonce, -1) == 1 && ssl.update(cipher, NULL, &n, header, HEADER) == 1
        && (size == 0 || ssl.update(cipher, out, &n, text, size) == 1);
}

static int cipher_seal(void *cipher, uint8_t *header, const uint8_t *text, int size, uint8_t *out)
{
    int n;
    return cipher_pass(cipher, header, text, size, out) && ssl.final(cipher, out + size, &n) == 1
        && ssl.control(cipher, 0x10, TAG, out + size) == 1;
}

static int cipher_open(void *cipher, const uint8_t *header, const uint8_t *text, int size, uint8_t *out)
{
    uint8_t tag[TAG];
    int n;
    memcpy(tag, text + size, TAG);
    return cipher_pass(cipher, header, text, size, out) && ssl.control(cipher, 0x11, TAG, tag) == 1
        && ssl.final(cipher, out + size, &n) == 1;
}
