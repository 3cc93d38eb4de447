"""The rules of vLLM 0.33. `config` is host-only; the other modules are the jitted form."""
