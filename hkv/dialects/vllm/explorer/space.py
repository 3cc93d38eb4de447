"""State space to explore: a small configuration, the requests and their lengths, and the operations they may see."""

from __future__ import annotations

import dataclasses

from hkv.contract.explore_command import MOST
from hkv.dialects.vllm.config import VllmConfig
from hkv.errors import ConfigError
from hkv.state.state import Buckets

MOVES = {
    "cold": "admissions that adopt nothing of what is cached",
    "parts": "allocations for a part of the tokens that are left",
    "delay": "allocations that register nothing, and the commit that does so later",
    "evict": "single blocks that lose their keys",
    "reset": "resets of the prefix cache",
    "drop": "waiting requests that are forgotten, so that others can arrive in their place",
}
"""Operations that can be left out, by name. Arrivals, lookups, admissions, growth and the end of a request cannot."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Space:
    """All that can happen to a small cache. Lengths are in tokens; there are two different tokens, 0 and 1.

    Attributes:
      config: the cache; `max_model_len` is the longest request.
      requests: requests at the same time.
      prompt: longest prompt; every string of that many tokens or fewer arrives.
      without: names of `MOVES` that are left out.

    Raises:
      ConfigError: something is too large, or asks for a rule that no judge here knows.
    """

    config: VllmConfig
    requests: int = 2
    prompt: int = 2
    without: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        config = self.config
        for name, value in (
            ("num_blocks", config.num_blocks),
            ("requests", self.requests),
            ("max_model_len", config.max_model_len),
        ):
            if type(value) is not int or not 1 <= value <= MOST[name]:
                raise ConfigError(name, value, f"1 to {MOST[name]}, so that there is an end")
        if type(self.prompt) is not int or not 1 <= self.prompt <= config.max_model_len:
            raise ConfigError("prompt", self.prompt, f"1 to max_model_len {config.max_model_len} tokens")
        if unknown := sorted(self.without - MOVES.keys()):
            raise ConfigError("without", unknown[0], f"one of {', '.join(MOVES)}")
        for name, plain in {
            "caching": True,
            "hash_lookahead": 0,
            "partial_hits": False,
            "shared_prefix_checkpoint": False,
            "context_parallel": 1,
        }.items():
            if getattr(config, name) != plain:
                raise ConfigError(name, getattr(config, name), f"{plain}: the explorer judges nothing else yet")
        for index, spec in enumerate(config.topology.specs):
            scratch = spec.scratch_blocks or spec.checkpoint_blocks
            if scratch:
                raise ConfigError(f"groups[{index}]", spec, "no speculative and no checkpoint blocks")
            if spec.snapshot and spec.block_size != config.hash_block_size:
                expected = f"hash_block_size {config.hash_block_size}, so that no state is copied"
                raise ConfigError(f"groups[{index}].block_size", spec.block_size, expected)

    @property
    def buckets(self) -> Buckets:
        """The smallest static sizes that hold the space. A prefix key is the token string itself (`code_of`)."""
        config = self.config
        sizes = config.block_sizes
        return Buckets(
            blocks=config.num_blocks,
            requests=self.requests,
            groups=1 << len(sizes).bit_length(),
            row=max(-(-config.max_model_len // size) for size in sizes),
            chain=max(1, config.max_model_len // config.hash_block_size),
            keys=2 << config.max_model_len,
            parts=max(size // config.hash_block_size for size in sizes) - 1,
        )


def code_of(tokens: tuple[int, ...]) -> int:
    """A token string as a number: a leading 1, then a bit a token. The empty string is 1; 0 is no string."""
    code = 1
    for token in tokens:
        code = 2 * code + token
    return code


def tokens_of(code: int) -> list[int]:
    """The tokens of a string's number."""
    return [int(bit) for bit in f"{code:b}"[1:]]
