"""TODO hkv/oracle/events."""
