"""A dialect in a package of its own: a radix cache of whole blocks, whose least recently used leaves are evicted."""
