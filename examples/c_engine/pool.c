#include "pool.h"

#include <stdlib.h>
#include <string.h>

static void insert_between(Pool *pool, int block, int previous, int next) {
    Block *blocks = pool->blocks;
    blocks[block].previous = previous;
    blocks[block].next = next;
    blocks[previous].next = blocks[next].previous = block;
    pool->num_free++;
}

static void leave_queue(Pool *pool, int block) {
    Block *blocks = pool->blocks;
    blocks[blocks[block].previous].next = blocks[block].next;
    blocks[blocks[block].next].previous = blocks[block].previous;
    pool->num_free--;
}

void pool_init(Pool *pool, int num_blocks) {
    free(pool->blocks);
    memset(pool, 0, sizeof *pool);
    pool->num_blocks = num_blocks;
    pool->blocks = calloc((size_t)num_blocks, sizeof(Block));
    for (int block = 1; block < num_blocks; block++) insert_between(pool, block, block - 1, 0);
}

int pool_find(const Pool *pool, const uint8_t key[KEY_BYTES]) {
    int found = 0;
    for (int block = 1; block < pool->num_blocks; block++) {
        const Block *candidate = &pool->blocks[block];
        if (candidate->cached && memcmp(candidate->key, key, KEY_BYTES) == 0)
            if (found == 0 || candidate->order < pool->blocks[found].order) found = block;
    }
    return found;
}

void pool_take(Pool *pool, int count, int *blocks) {
    for (int i = 0; i < count; i++) {
        int block = pool->blocks[0].next;
        leave_queue(pool, block);
        pool_drop_key(pool, block);
        pool->blocks[block].refs = 1;
        blocks[i] = block;
    }
}

void pool_touch(Pool *pool, int block) {
    if (pool->blocks[block].refs++ == 0) leave_queue(pool, block);
}

void pool_release_row(Pool *pool, const int *row, int count) {
    int front = 0; /* blocks without a key go to the front of the queue, behind one another; others to the back */
    for (int i = count - 1; i >= 0; i--) {
        int block = row[i];
        if (--pool->blocks[block].refs > 0) continue;
        if (pool->blocks[block].cached) {
            insert_between(pool, block, pool->blocks[0].previous, 0);
        } else {
            insert_between(pool, block, front, pool->blocks[front].next);
            front = block;
        }
    }
}

void pool_register(Pool *pool, int block, const uint8_t key[KEY_BYTES], int tokens) {
    Block *entry = &pool->blocks[block];
    entry->cached = 1;
    entry->tokens = tokens;
    entry->order = pool->registered++;
    memcpy(entry->key, key, KEY_BYTES);
}

void pool_drop_key(Pool *pool, int block) {
    if (!pool->blocks[block].cached) return;
    pool->blocks[block].cached = 0;
    pool->removed++;
}
