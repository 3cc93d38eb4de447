"""Mechanism that every dialect shares: queue, pool, key table, rows, events; it knows no engine's name."""
