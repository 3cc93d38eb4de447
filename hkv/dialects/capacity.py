"""Capacity of a planned cache: one row of the table that `hkv plan` makes of several models or options."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Capacity:
    """Requests and tokens that fit into a planned cache. Sizes in bytes, on one GPU.

    Attributes:
      max_model_len: tokens of the longest request that the plan is for.
      token_bytes: bytes that one more token of a sequence adds for good, all layers together.
      sequence_bytes: bytes that a sequence of the longest length holds beside, for windows, chunks and states.
      num_blocks: blocks in the pool, those that the engine keeps for itself included.
      tokens: tokens that the engine says its cache holds.
      concurrency: requests of the longest length that the engine says fit; None for a model that caches nothing.
      requests: requests of the longest length that fit when they run through the pool.
      limiting: kind of layers that hold most of a request's blocks; empty for a model that caches nothing.
      limiting_share: their share of the request's blocks.
      limited_by: what keeps the next request out, in words.
      weights: bytes of weights on a GPU, or None where the memory for the cache was given itself.
      memory: bytes for the cache on a GPU, or None where the engine's plan does not say.
      waste: share of a longest request's blocks that holds no layer's bytes: padding, and room up to the widest group.
    """

    max_model_len: int
    token_bytes: float
    sequence_bytes: int
    num_blocks: int
    tokens: int
    concurrency: float | None
    requests: int
    limiting: str
    limiting_share: float
    limited_by: str
    waste: float
    weights: int | None = None
    memory: int | None = None
