"""GPU kernels by operation and implementation. They know arrays, tables and strides, and nothing of `hkv`."""
