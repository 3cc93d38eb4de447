"""Configs of released models, by name: `hkv plan gpt-oss-20b`. index.toml says where each has its values from."""

from hkv.model.released.names import Released, expected, find, near, released_models, resolve

__all__ = ["Released", "expected", "find", "near", "released_models", "resolve"]
