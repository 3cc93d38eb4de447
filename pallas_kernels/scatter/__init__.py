"""Scattering runs into a pool, in place: the inverse of gathering them."""
