"""Telling which of two implementations is right: logs, the engine protocol, engines, check and diff."""
