"""Chained keys of a request as the reference reads them; the hashes need one form only, `hkv.keys.chained`."""
