"""KV events as routers read them: wire format, streams, and the events of an engine."""
