"""Prefixes made up for requests of which only lengths are known, by a model that is asked for by name."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

from hkv.replay.traces.imports.imported import Imported

MODELS = ("shared-prefix",)
"""`shared-prefix`: every prompt begins with one of so many system prompts, the k-th 1/k as popular as the first."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SharedPrefix:
    """The model `shared-prefix`."""

    prefixes: int = 8
    tokens: int = 1024
    seed: int = 0

    def give_ids(self, requests: Sequence[Imported], tokens_per_id: int) -> None:
        """Gives every request ids: those of its system prompt's whole parts, then ids that no other request has."""
        source = random.Random(self.seed)
        weights = [1 / (rank + 1) for rank in range(self.prefixes)]
        shared = self.tokens // tokens_per_id
        fresh = self.prefixes * shared
        for request, prefix in zip(
            requests, source.choices(range(self.prefixes), weights, k=len(requests)), strict=True
        ):
            count = -(-request.input_length // tokens_per_id)
            common = min(shared, request.input_length // tokens_per_id)
            request.ids = [*range(prefix * shared, prefix * shared + common), *range(fresh, fresh + count - common)]
            fresh += count - common
