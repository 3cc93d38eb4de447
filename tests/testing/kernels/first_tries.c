/* First tries in C, written from docs/check-kernel.md alone, each with one mistake that it invites. */

#include <stdint.h>
#include <string.h>

typedef struct { int32_t device_type, device_id; } DLDevice;
typedef struct { uint8_t code, bits; uint16_t lanes; } DLDataType;
typedef struct {
  void *data; DLDevice device; int32_t ndim; DLDataType dtype;
  int64_t *shape, *strides; uint64_t byte_offset;
} DLTensor;

static void store(DLTensor *fresh, DLTensor *cache, DLTensor *slots) {
  int64_t item = fresh->dtype.bits / 8, *to = cache->strides;
  for (int64_t token = 0; token < slots->shape[0]; token++) {
    int64_t slot = ((int64_t *)slots->data)[token], size = cache->shape[1];
    if (slot < 0) continue;
    for (int64_t head = 0; head < fresh->shape[1]; head++) /* rows are not always so close */
      memcpy((char *)cache->data + item * (slot / size * to[0] + slot % size * to[1] + head * to[2]),
             (char *)fresh->data + item * (token * fresh->shape[1] + head) * fresh->shape[2],
             item * fresh->shape[2]);
  }
}

int write(DLTensor *key, DLTensor *value, DLTensor *key_cache, DLTensor *value_cache, DLTensor *slot_mapping) {
  store(key, key_cache, slot_mapping);
  store(value, value_cache, slot_mapping);
  return 0;
}

static void clear(DLTensor *cache, int64_t layer, int64_t row) {
  int64_t item = cache->dtype.bits / 8, *at = cache->strides;
  for (int64_t slot = 0; slot < cache->shape[2]; slot++)
    for (int64_t head = 0; head < cache->shape[3]; head++)
      memset((char *)cache->data + item * (layer * at[0] + row * at[1] + slot * at[2] + head * at[3]), 0,
             item * cache->shape[4]);
}

int zero(DLTensor *keys, DLTensor *values, DLTensor *block_ids, int64_t kernel_blocks) {
  (void)kernel_blocks; /* each block is so many rows */
  for (int64_t index = 0; index < block_ids->shape[0]; index++) {
    int64_t block = ((int32_t *)block_ids->data)[index];
    for (int64_t layer = 0; block >= 0 && layer < keys->shape[0]; layer++) {
      clear(keys, layer, block);
      clear(values, layer, block);
    }
  }
  return 0;
}
