/* Chained prefix keys: SHA-256 of the canonical CBOR of (key before, tokens, null), as vLLM's sha256_cbor makes them. */
#ifndef KEYS_H
#define KEYS_H

#include <stdint.h>

#define KEY_BYTES 32

/* What stands before the first block's key. */
void root_key(uint8_t key[KEY_BYTES]);
/* The key of a block of tokens after the key `parent`. */
void block_key(uint8_t key[KEY_BYTES], const uint8_t parent[KEY_BYTES], const int32_t *tokens, int count);

#endif
