"""Where chunk objects go when they leave the device: host memory and disk. The one impure edge of HKV."""
