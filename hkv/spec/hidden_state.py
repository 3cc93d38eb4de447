"""Hidden states kept beside the cache, so that a connector can hand them out."""

from __future__ import annotations

import dataclasses

from hkv.spec.mla import MLAAttention


@dataclasses.dataclass(frozen=True, kw_only=True)
class HiddenState(MLAAttention):
    """A layer that stores one hidden state a token (vLLM 0.33 `HiddenStateCacheSpec`).

    Managed like a latent layer, hence of the same `kind`; grouping keeps it in a group of its own.
    """
