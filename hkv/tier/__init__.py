"""Storage of chunk objects off the device: host memory and disk. The one impure edge of HKV."""
