/* Blocks: who references them, what they are known by, and in which order free ones are handed out. */
#ifndef POOL_H
#define POOL_H

#include "keys.h"

typedef struct {
    int refs;
    int cached;             /* whether it has a key */
    int tokens;             /* that its key covers, from the start of the request */
    long order;             /* when it got the key: of two blocks with one key the older one is found */
    uint8_t key[KEY_BYTES];
    int previous, next;     /* in the free queue, which is a ring through block 0, the null block */
} Block;

typedef struct {
    int num_blocks, num_free;
    long registered, removed; /* keys given so far; keys taken away since `events` */
    Block *blocks;
} Pool;

/* An empty pool in place of the one before; the first is all zeros. */
void pool_init(Pool *pool, int num_blocks);
/* The block that is known by `key`, or 0. */
int pool_find(const Pool *pool, const uint8_t key[KEY_BYTES]);
/* Takes `count` blocks from the front of the free queue; there are that many. */
void pool_take(Pool *pool, int count, int *blocks);
/* Adds a reference; a free block leaves the queue. */
void pool_touch(Pool *pool, int block);
/* Takes a reference from each, last block first. */
void pool_release_row(Pool *pool, const int *row, int count);
void pool_register(Pool *pool, int block, const uint8_t key[KEY_BYTES], int tokens);
void pool_drop_key(Pool *pool, int block);

#endif
