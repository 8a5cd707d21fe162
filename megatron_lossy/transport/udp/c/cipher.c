/* Cipher: AES-128-GCM of libcrypto, loaded when a cipher is asked for. */

static struct {
    void *(*cipher_new)(void);
    void (*cipher_free)(void *);
    const void *(*aes_128_gcm)(void);
    int (*control)(void *, int, int, void *);
    int (*seal_init)(void *, const void *, void *, const uint8_t *, const uint8_t *);
    int (*seal_update)(void *, uint8_t *, int *, const uint8_t *, int);
    int (*seal_final)(void *, uint8_t *, int *);
    int (*open_init)(void *, const void *, void *, const uint8_t *, const uint8_t *);
    int (*open_update)(void *, uint8_t *, int *, const uint8_t *, int);
    int (*open_final)(void *, uint8_t *, int *);
} ssl;

API int ml_load_cipher(void)
{
    void *library = dlopen("libcrypto.so.3", RTLD_NOW | RTLD_LOCAL);
    if (!library)
        library = dlopen("libcrypto.so.1.1", RTLD_NOW | RTLD_LOCAL);
    if (!library)
        return -1;
    const struct { void *function; const char *name; } wanted[] = {
        {&ssl.cipher_new, "EVP_CIPHER_CTX_new"},      {&ssl.cipher_free, "EVP_CIPHER_CTX_free"},
        {&ssl.aes_128_gcm, "EVP_aes_128_gcm"},        {&ssl.control, "EVP_CIPHER_CTX_ctrl"},
        {&ssl.seal_init, "EVP_EncryptInit_ex"},       {&ssl.seal_update, "EVP_EncryptUpdate"},
        {&ssl.seal_final, "EVP_EncryptFinal_ex"},     {&ssl.open_init, "EVP_DecryptInit_ex"},
        {&ssl.open_update, "EVP_DecryptUpdate"},      {&ssl.open_final, "EVP_DecryptFinal_ex"},
    };
    for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++) {
        void *found = dlsym(library, wanted[i].name);
        if (!found)
            return -1;
        memcpy(wanted[i].function, &found, sizeof found);
    }
    return 0;
}

static void *cipher_new(const uint8_t *key, int sealing)
{
    void *cipher = ssl.cipher_new();
    int (*init)(void *, const void *, void *, const uint8_t *, const uint8_t *) = sealing ? ssl.seal_init : ssl.open_init;
    if (cipher && init(cipher, ssl.aes_128_gcm(), NULL, key, NULL) == 1)
        return cipher;
    if (cipher)
        ssl.cipher_free(cipher);
    return NULL;
}

/* The nonce: 4 zero bytes and the number, as it stands in the header. */
static int cipher_seal(void *cipher, uint8_t *header, const uint8_t *text, int size, uint8_t *out)
{
    uint8_t nonce[12] = {0};
    int n;
    memcpy(nonce + 4, header + 8, 8);
    return ssl.seal_init(cipher, NULL, NULL, NULL, nonce) == 1 && ssl.seal_update(cipher, NULL, &n, header, HEADER) == 1
        && (size == 0 || ssl.seal_update(cipher, out, &n, text, size) == 1) && ssl.seal_final(cipher, out + size, &n) == 1
        && ssl.control(cipher, 0x10, TAG, out + size) == 1;
}

static int cipher_open(void *cipher, const uint8_t *header, const uint8_t *text, int size, uint8_t *out)
{
    uint8_t nonce[12] = {0}, tag[TAG];
    int n;
    memcpy(nonce + 4, header + 8, 8);
    memcpy(tag, text + size, TAG);
    return ssl.open_init(cipher, NULL, NULL, NULL, nonce) == 1 && ssl.open_update(cipher, NULL, &n, header, HEADER) == 1
        && (size == 0 || ssl.open_update(cipher, out, &n, text, size) == 1)
        && ssl.control(cipher, 0x11, TAG, tag) == 1 && ssl.open_final(cipher, out + size, &n) == 1;
}
