"""Replays a request trace through an engine, as a serving engine's scheduler would drive it."""
