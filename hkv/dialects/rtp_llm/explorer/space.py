"""State space to explore: a small configuration, the requests and their lengths, and the operations they may see."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Set

from hkv.dialects.explore_command import MOST
from hkv.dialects.rtp_llm.config import RtpConfig
from hkv.dialects.rtp_llm.log import structs
from hkv.dialects.rtp_llm.log.structs import RtpOp
from hkv.errors import ConfigError

TOKENS = (0, 1)
"""The different tokens that there are."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RtpSpace:
    """All that can happen to a small cache. Lengths are in tokens.

    Attributes:
      config: the cache.
      requests: requests at the same time, of one sequence each.
      prompt: longest prompt; every string of that many tokens or fewer arrives.
      max_model_len: longest request.

    Raises:
      ConfigError: something is too large.
    """

    config: RtpConfig
    requests: int = 2
    prompt: int = 2
    max_model_len: int = 2

    def __post_init__(self) -> None:
        sizes = {"requests": self.requests, "max_model_len": self.max_model_len}
        pools = [("num_blocks", count) for count in self.config.num_blocks]
        for name, value in (*pools, *sizes.items()):
            if type(value) is not int or not 1 <= value <= MOST[name]:
                raise ConfigError(name, value, f"1 to {MOST[name]}, so that there is an end")
        if type(self.prompt) is not int or not 1 <= self.prompt <= self.max_model_len:
            raise ConfigError("prompt", self.prompt, f"1 to max_model_len {self.max_model_len} tokens")

    def operations(
        self, lengths: dict[str, int], running: frozenset[str], grown: Set[str], *, cached: bool
    ) -> Iterator[RtpOp]:
        """The operations that may come next; a free name is a new request's, so that names recur.

        Args:
          lengths: tokens of each request that arrived and was not dropped.
          running: those of them that have blocks.
          grown: those whose new tokens no `malloc` has seen; their keys are old, and they are not entered.
          cached: whether anything is.
        """
        names = (f"r{number}" for number in range(1, self.requests + 1))
        free = next((name for name in names if name not in lengths), None)
        if free is not None:
            for length in range(1, self.prompt + 1):
                for tokens in itertools.product(TOKENS, repeat=length):
                    yield structs.RequestOp(id=free, tokens=list(tokens))
        for id, length in lengths.items():
            yield structs.MallocOp(id=id)
            if id not in running:
                yield structs.MallocOp(id=id, device_cache=False)
                yield structs.DropOp(id=id)
                continue
            if length < self.max_model_len:
                yield from (structs.AppendOp(id=id, tokens=[[token]]) for token in TOKENS)
            if id not in grown:
                yield structs.InsertOp(id=id)
            yield structs.FreeOp(id=id)
        if cached:
            yield structs.EvictOp(least=1)
