"""A small decoder with layers of every kind, whose hybrid cache lives inside `jit`: `docs/decoder.md`."""
