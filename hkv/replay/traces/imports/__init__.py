"""Request traces in the formats of others, read into HKV's own: `hkv trace import`."""
