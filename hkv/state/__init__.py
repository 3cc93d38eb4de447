"""Mechanism, jitted, knows no engine: the structures that dialects build their rules on."""
