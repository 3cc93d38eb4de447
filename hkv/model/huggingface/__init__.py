"""A model's `config.json` in; what each of its layers caches out. Host-only, without JAX or NumPy."""

from hkv.model.huggingface.loading import load_config
from hkv.model.huggingface.model import KV_DTYPES, CacheLayer, Model, ReadOptions
from hkv.model.huggingface.reading import check_layer_list
from hkv.model.huggingface.reading import read_config as read_model

__all__ = ["KV_DTYPES", "CacheLayer", "Model", "ReadOptions", "check_layer_list", "load_config", "read_model"]
