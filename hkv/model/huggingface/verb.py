"""Reading a model by its path: what `hkv plan` begins with."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from hkv.model.huggingface.loading import load_config
from hkv.model.huggingface.model import GDN_PREFILLS, Model, ReadOptions
from hkv.model.huggingface.reading import read_model as read_config


def read_model(
    config: str | os.PathLike[str] | Mapping[str, Any],
    *,
    block_size: int | None = None,
    tensor_parallel: int = 1,
    context_parallel: int = 1,
    dtype: str | None = None,
    kv_dtype: str = "auto",
    state_dtype: str | None = None,
    speculative_tokens: int = 0,
    gdn_prefill: str = GDN_PREFILLS[0],
    draft: bool = False,
    ignore_fields: Sequence[str] = (),
    strict: bool = False,
) -> Model:
    """Reads from a model's config what each of its layers caches on one tensor-parallel rank.

    Args:
      config: the model's `config.json`, the folder it is in, a released model's name (`gpt-oss-20b`), or its content.
      block_size: tokens per block; None for what the model's kernels want.
      tensor_parallel: ranks that split the heads.
      context_parallel: ranks that split the tokens of full-attention layers.
      dtype: the model's element type; None for its config's.
      kv_dtype: element type or packing of the cache; `auto` stores what the model computes with.
      state_dtype: element type of recurrent states; None for the model's.
      speculative_tokens: draft tokens verified in one step.
      gdn_prefill: kernel for prompts of gated delta nets, one of `GDN_PREFILLS`; `triton` keeps no state inside chunks.
      draft: whether the layers belong to a draft module.
      ignore_fields: names of fields that HKV does not know, to be read over whatever they say.
      strict: refuse every field that HKV does not know, also those on which no byte depends.

    Raises:
      FileError: the file cannot be read.
      ConfigError: an unknown architecture, or an impossible value.
      SpecError: an impossible size.
    """
    fields = config if isinstance(config, Mapping) else load_config(os.fspath(config))
    options = ReadOptions(
        block_size=block_size,
        tensor_parallel=tensor_parallel,
        context_parallel=context_parallel,
        dtype=dtype,
        kv_dtype=kv_dtype,
        state_dtype=state_dtype,
        speculative_tokens=speculative_tokens,
        gdn_prefill=gdn_prefill,
        draft=draft,
        ignore_fields=tuple(ignore_fields),
        strict=strict,
    )
    return read_config(fields, options)
