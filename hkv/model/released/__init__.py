"""Configs of released models, by name: `hkv plan gpt-oss-20b`. index.toml says where each has its values from."""

from hkv.model.released.catalogue import Released, find, near, released_models

__all__ = ["Released", "find", "near", "released_models"]
