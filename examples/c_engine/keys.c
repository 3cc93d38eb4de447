#include "keys.h"

#include <stdlib.h>
#include <string.h>

/* SHA-256, FIPS 180-4. */

static const uint32_t K[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

static uint32_t rotate(uint32_t x, int n) { return x >> n | x << (32 - n); }

static void sha256_block(uint32_t h[8], const uint8_t *data) {
    uint32_t w[64], s[8];
    for (int i = 0; i < 16; i++)
        w[i] = (uint32_t)data[4 * i] << 24 | data[4 * i + 1] << 16 | data[4 * i + 2] << 8 | data[4 * i + 3];
    for (int i = 16; i < 64; i++) {
        uint32_t a = w[i - 15], b = w[i - 2];
        w[i] = w[i - 16] + (rotate(a, 7) ^ rotate(a, 18) ^ a >> 3) + w[i - 7] + (rotate(b, 17) ^ rotate(b, 19) ^ b >> 10);
    }
    memcpy(s, h, sizeof s);
    for (int i = 0; i < 64; i++) {
        uint32_t big1 = rotate(s[4], 6) ^ rotate(s[4], 11) ^ rotate(s[4], 25);
        uint32_t big0 = rotate(s[0], 2) ^ rotate(s[0], 13) ^ rotate(s[0], 22);
        uint32_t t1 = s[7] + big1 + ((s[4] & s[5]) ^ (~s[4] & s[6])) + K[i] + w[i];
        uint32_t t2 = big0 + ((s[0] & s[1]) ^ (s[0] & s[2]) ^ (s[1] & s[2]));
        memmove(s + 1, s, 7 * sizeof s[0]);
        s[4] += t1;
        s[0] = t1 + t2;
    }
    for (int i = 0; i < 8; i++) h[i] += s[i];
}

static void sha256(uint8_t out[32], const uint8_t *data, size_t length) {
    uint32_t h[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    uint8_t last[128] = {0};
    size_t whole = length / 64 * 64, left = length - whole, padded = left < 56 ? 64 : 128;
    for (size_t i = 0; i < whole; i += 64) sha256_block(h, data + i);
    memcpy(last, data + whole, left);
    last[left] = 0x80;
    for (int i = 0; i < 8; i++) last[padded - 1 - i] = (uint8_t)((uint64_t)length * 8 >> 8 * i);
    for (size_t i = 0; i < padded; i += 64) sha256_block(h, last + i);
    for (int i = 0; i < 32; i++) out[i] = (uint8_t)(h[i / 4] >> (24 - 8 * (i % 4)));
}

/* Canonical CBOR, RFC 8949: a head of major type and shortest argument, then content. */

static uint8_t *cbor_head(uint8_t *at, int major, uint32_t value) {
    int bytes = value < 24 ? 0 : value < 0x100 ? 1 : value < 0x10000 ? 2 : 4;
    *at++ = (uint8_t)(major << 5 | (bytes == 0 ? value : bytes == 1 ? 24u : bytes == 2 ? 25u : 26u));
    for (int i = bytes - 1; i >= 0; i--) *at++ = (uint8_t)(value >> 8 * i);
    return at;
}

enum { CBOR_INT = 0, CBOR_BYTES = 2, CBOR_TEXT = 3, CBOR_ARRAY = 4, CBOR_NULL = 0xF6 };

void root_key(uint8_t key[KEY_BYTES]) {
    static const char seed[] = "vllm-none-hash";
    uint8_t data[64], *at = cbor_head(data, CBOR_TEXT, sizeof seed - 1);
    memcpy(at, seed, sizeof seed - 1);
    sha256(key, data, (size_t)(at - data) + sizeof seed - 1);
}

void block_key(uint8_t key[KEY_BYTES], const uint8_t parent[KEY_BYTES], const int32_t *tokens, int count) {
    uint8_t *data = malloc(64 + 5 * (size_t)count), *at = cbor_head(data, CBOR_ARRAY, 3);
    at = cbor_head(at, CBOR_BYTES, KEY_BYTES);
    memcpy(at, parent, KEY_BYTES);
    at = cbor_head(at + KEY_BYTES, CBOR_ARRAY, (uint32_t)count);
    for (int i = 0; i < count; i++) at = cbor_head(at, CBOR_INT, (uint32_t)tokens[i]);
    *at++ = CBOR_NULL;
    sha256(key, data, (size_t)(at - data));
    free(data);
}
