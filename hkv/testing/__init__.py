"""Random configurations, traffic, strategies and invariants for testing hybrid caches."""
