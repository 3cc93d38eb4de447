/* A connector's function, as `hkv check-connector LIBRARY.so:FUNCTION` calls it, and the memory it is told of.
 *
 * The function lists the bytes of one block of one layer:
 *
 *     int64_t FUNCTION(const hkv_memory *memory, int32_t layer, uint64_t block, hkv_range *ranges, int64_t room);
 *
 * It writes at most `room` ranges and returns how many, keys before values and the bytes of every block of a layer in
 * one order; a negative number says that it does not have this form of memory. Every byte of the block that carries
 * data has to be in one range, and no byte outside of its page in any. The memory stays alive for the call alone.
 *
 * Axes are letters, outermost first. B counts rows of blocks: block b is the rows from b * row_step on,
 * rows_per_block of them. K counts keys and values, H heads, N tokens, C elements of one of these.
 */
#ifndef HKV_CONNECTOR_H
#define HKV_CONNECTOR_H

#include <stdint.h>

typedef struct hkv_tensor {
  const char *name;  /* "kv", or "scale" for scales that lie apart */
  const char *dtype; /* "bfloat16", "float8_e4m3fn", ... */
  const char *axes;
  int32_t buffer; /* index of the buffer it lies in */
  int32_t item_bytes;
  int32_t rank;
  uint64_t offset;         /* byte of element (0, ..., 0) in the buffer */
  const uint64_t *shape;   /* elements along each of `rank` axes */
  const uint64_t *strides; /* bytes between neighbours along each */
  uint64_t rows_per_block;
  uint64_t row_step;
} hkv_tensor;

typedef struct hkv_layer {
  const char *name;
  int32_t group;
  int32_t num_tensors;
  uint64_t page_bytes; /* of one block of this layer, padding included */
  const hkv_tensor *tensors;
} hkv_layer;

typedef struct hkv_group {
  uint64_t block_tokens;
  uint64_t num_blocks;
} hkv_group;

typedef struct hkv_memory {
  const char *engine; /* "vllm", "rtp-llm" or "lmcache" */
  int32_t num_buffers;
  int32_t num_groups;
  int32_t num_layers;
  const uint64_t *buffer_bytes;
  const hkv_group *groups;
  const hkv_layer *layers;
} hkv_memory;

typedef struct hkv_range {
  int32_t buffer;
  uint64_t first;
  uint64_t bytes;
} hkv_range;

#endif
