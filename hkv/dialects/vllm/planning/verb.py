"""The plan of a model's cache, for programs: all that `hkv plan` says, and a start for what follows."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

from hkv.bugs import bugs_of_part
from hkv.byte_size import parse_bytes
from hkv.dialects.vllm.planning.cache_plan import CachePlan
from hkv.dialects.vllm.planning.engine_options import EngineOptions
from hkv.dialects.vllm.planning.engine_plan import plan_config, plan_model
from hkv.errors import ConfigError
from hkv.model.huggingface import Model


def plan(
    model: Model | Mapping[str, Any] | str | os.PathLike[str],
    memory: int | str | None = None,
    *,
    draft: Model | Mapping[str, Any] | str | os.PathLike[str] | None = None,
    pipeline_parallel: int = 1,
    context_parallel: int = 1,
    kernel_block_size: int = 0,
    layout: str | None = None,
    max_model_len: int | None = None,
    max_in_flight_tokens: int | None = None,
    caching: bool | None = None,
    hybrid: bool | None = None,
    bugs: Sequence[str] = (),
    options: EngineOptions | None = None,
) -> CachePlan:
    """Groups, pages, block counts and tensors of a model, and vLLM 0.33's own numbers for it (`hkv plan`).

    Args:
      model: the model, from `read_model`; or its `config.json`, the folder it is in, a released model's name
        (`gpt-oss-20b`), or its content, which is read as vLLM serves it with these options.
      memory: for the cache on each GPU, in bytes or as text such as `80GiB`; None for that of `options`.
      draft: a draft module, read with `draft=True`; or its config, where the model is given so.
      pipeline_parallel: stages.
      context_parallel: of the tensor-parallel ranks, how many split the tokens of full-attention layers.
      kernel_block_size: tokens of a kernel block, 0 for the whole block.
      layout: name of the physical order, or None for the first that can express the model.
      max_model_len: tokens of the longest request; None for the model's, 0 for the longest that fits.
      max_in_flight_tokens: tokens scheduled and not yet settled; None for those of all steps that vLLM runs at once.
      caching: True to reuse prefixes; None for vLLM's default.
      hybrid: False caches every layer like full attention; None for vLLM's default.
      bugs: names of upstream defects to reproduce.
      options: everything else that `vllm serve` is given; what is given above goes before it.

    Raises:
      PlanError: the model does not fit, or cannot be laid out so.
      ConfigError: no such size or defect, options that contradict each other, or a config that cannot be read.
      FileError: there is neither a file nor a released model of that name.
    """
    given = options or EngineOptions()
    size = parse_bytes(memory) if isinstance(memory, str) else memory
    above = {
        "kv_cache_memory_bytes": size,
        "pipeline_parallel_size": None if pipeline_parallel == 1 else pipeline_parallel,
        "decode_context_parallel_size": None if context_parallel == 1 else context_parallel,
        "kernel_block_size": kernel_block_size or None,
        "kv_cache_layout": layout,
        "max_model_len": -1 if max_model_len == 0 else max_model_len,
        "max_in_flight_tokens": max_in_flight_tokens,
        "enable_prefix_caching": caching,
        "disable_hybrid_kv_cache_manager": None if hybrid is None else not hybrid,
    }
    changed = {name: value for name, value in above.items() if value is not None}
    if isinstance(model, Model):
        if given.tensor_parallel_size not in (1, model.tensor_parallel):
            expected = f"the model's, {model.tensor_parallel}"
            raise ConfigError("tensor_parallel_size", given.tensor_parallel_size, expected)
        changed["tensor_parallel_size"] = model.tensor_parallel
    asked, defects = dataclasses.replace(given, **changed), frozenset(bugs_of_part(bugs, "planning"))
    if not isinstance(model, Model):
        if isinstance(draft, Model):
            raise ConfigError("draft", draft.model_type, "a config, as the model's is: it is read for the same options")
        return plan_config(model, asked, draft=draft, bugs=defects)
    if draft is not None and not isinstance(draft, Model):
        raise ConfigError("draft", draft, "a model, from `read_model` with `draft=True`")
    return plan_model(model, asked, draft=draft, bugs=defects)
