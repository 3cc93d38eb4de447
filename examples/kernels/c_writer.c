/* Writers of new keys and values in C, over the tensors of dlpack.h:

     cc -O2 -shared -fPIC -o c_writer.so c_writer.c
     hkv check-kernel ./c_writer.so:write --operation write
     hkv check-kernel ./c_writer.so:write_narrow --operation write

   `write` is right. `write_narrow` computes addresses in 32 bits. */

#include <stdint.h>
#include <string.h>

typedef struct { int32_t device_type, device_id; } DLDevice;
typedef struct { uint8_t code, bits; uint16_t lanes; } DLDataType;
typedef struct {
  void *data; DLDevice device; int32_t ndim; DLDataType dtype;
  int64_t *shape, *strides; /* strides count elements */
  uint64_t byte_offset;
} DLTensor; /* as in dlpack.h, which a kernel of yours includes */

static void put(DLTensor *cache, DLTensor *fresh, int64_t token, int64_t slot, int narrow) {
  int64_t item = cache->dtype.bits / 8, *to = cache->strides, *from = fresh->strides, size = cache->shape[1];
  for (int64_t head = 0; head < fresh->shape[1]; head++)
    for (int64_t element = 0; element < fresh->shape[2]; element++) {
      int64_t where = slot / size * to[0] + slot % size * to[1] + head * to[2] + element * to[3];
      if (narrow) where = (int32_t)where;
      memcpy((char *)cache->data + where * item,
             (char *)fresh->data + (token * from[0] + head * from[1] + element * from[2]) * item, item);
    }
}

static int both(DLTensor *key, DLTensor *value, DLTensor *keys, DLTensor *values, DLTensor *slots, int narrow) {
  for (int64_t token = 0; token < slots->shape[0]; token++) {
    int64_t slot = ((int64_t *)slots->data)[token];
    if (slot < 0) continue; /* padding */
    put(keys, key, token, slot, narrow);
    put(values, value, token, slot, narrow);
  }
  return 0; /* anything else: this case is not supported */
}

int write(DLTensor *key, DLTensor *value, DLTensor *key_cache, DLTensor *value_cache, DLTensor *slot_mapping) {
  return both(key, value, key_cache, value_cache, slot_mapping, 0);
}

int write_narrow(DLTensor *key, DLTensor *value, DLTensor *key_cache, DLTensor *value_cache, DLTensor *slot_mapping) {
  return both(key, value, key_cache, value_cache, slot_mapping, 1);
}
