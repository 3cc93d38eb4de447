/* A connector's function in C, for `hkv check-connector ./connector.so:block_ranges`.
 *
 *   cc -shared -fPIC -I "$(dirname "$(python -m hkv.connectors --header)")" -o connector.so examples/connector.c
 */
#include "connector.h"

#include <string.h>

/* Writes the bytes of `axes` axes from `first` on, the widest stride outermost, adjoining elements as one range. */
static int64_t walk(const hkv_tensor *tensor, const uint64_t *shape, unsigned done, uint64_t first, hkv_range *ranges,
                    int64_t count, int64_t room) {
  int widest = -1;
  for (int axis = 0; axis < tensor->rank; axis++)
    if (!(done >> axis & 1) && (widest < 0 || tensor->strides[axis] > tensor->strides[widest])) widest = axis;
  if (widest >= 0) {
    for (uint64_t index = 0; index < shape[widest]; index++)
      count = walk(tensor, shape, done | 1u << widest, first + index * tensor->strides[widest], ranges, count, room);
    return count;
  }
  hkv_range *last = count ? &ranges[count - 1] : NULL;
  if (last && last->buffer == tensor->buffer && last->first + last->bytes == first) {
    last->bytes += (uint64_t)tensor->item_bytes;
    return count;
  }
  if (count < room) ranges[count] = (hkv_range){tensor->buffer, first, (uint64_t)tensor->item_bytes};
  return count + 1;
}

int64_t block_ranges(const hkv_memory *memory, int32_t layer, uint64_t block, hkv_range *ranges, int64_t room) {
  const hkv_layer *asked = &memory->layers[layer];
  int64_t count = 0;
  for (int32_t at = 0; at < asked->num_tensors; at++) {
    const hkv_tensor *tensor = &asked->tensors[at];
    uint64_t shape[8];
    memcpy(shape, tensor->shape, sizeof(uint64_t) * (size_t)tensor->rank);
    int axis = (int)(strchr(tensor->axes, 'B') - tensor->axes);
    shape[axis] = tensor->rows_per_block;
    uint64_t first = tensor->offset + block * tensor->row_step * tensor->strides[axis];
    count = walk(tensor, shape, 0, first, ranges, count, room);
  }
  return count;
}

/* The same, with the address in 32 bits: right for small pools, and named by the check in its first line. */
int64_t narrow_ranges(const hkv_memory *memory, int32_t layer, uint64_t block, hkv_range *ranges, int64_t room) {
  int64_t count = block_ranges(memory, layer, block, ranges, room);
  for (int64_t at = 0; at < count; at++) ranges[at].first = (uint32_t)ranges[at].first;
  return count;
}
