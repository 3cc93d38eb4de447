"""HKV: the executable reference for hybrid KV caches.

Say what you cache, and what happened; HKV says what every block id, hit length, eviction, address and byte must be.
Importing this package imports neither JAX nor NumPy; each subpackage imports what it needs.
"""

__version__ = "0.1.0"
