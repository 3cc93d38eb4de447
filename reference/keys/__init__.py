"""How the reference reads a request's chained keys; the hashes themselves need one form only, `hkv.keys.chained`."""
