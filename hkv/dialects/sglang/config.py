"""Configuration of a cache under SGLang's rules: its pools, its window, and the options that decide which stays.

SGLang has one `UnifiedRadixCache` for every model; what its layers cache are the tree's *components*. A model with full
attention alone has FULL; layers with a sliding window add SWA, with a pool of slots of its own and a mapping from the
one to the other. Sizes are in tokens: a slot holds one token, and a page is `page_size` slots that are handed out
together.
"""

from __future__ import annotations

import dataclasses

from hkv.errors import ConfigError

FULL, SWA = COMPONENTS = ("FULL", "SWA")
"""SGLang's `ComponentType`, in the order in which components are asked."""

POLICIES = ("lru", "lfu", "fifo", "filo", "mru", "slru", "priority")
"""`--radix-eviction-policy`: the order in which leaves leave."""

SPLIT_TOUCHES_SUFFIX, DECODE_LOSES_PAGE = BUGS = ("split-touches-suffix", "decode-loses-page")
"""Defects of SGLang 0.5.23 that a cache may reproduce (`hkv.dialects.sglang.log.BUGS` says what they are)."""


@dataclasses.dataclass(frozen=True)
class SGLangConfig:
    """Configuration of one cache.

    Attributes:
      page_size: tokens of a page (`--page-size`).
      num_slots: tokens of the full pool, and of the window's where there is one; whole pages.
      window: tokens that a sliding window reads, None where no layer has one.
      policy: one of `POLICIES`.
      eagle: whether keys are bigrams, as EAGLE's draft reads them.
      need_sort: whether freed pages wait and are sorted before they are handed out, as under disaggregation.
      bugs: names of defects that are reproduced.
    """

    page_size: int
    num_slots: tuple[int, ...]
    window: int | None = None
    policy: str = "lru"
    eagle: bool = False
    need_sort: bool = False
    bugs: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if self.page_size < 1:
            raise ConfigError("page_size", self.page_size, "at least 1 token")
        pools = 1 if self.window is None else 2
        if len(self.num_slots) != pools:
            raise ConfigError("num_slots", list(self.num_slots), f"{pools} sizes, one a pool")
        for size in self.num_slots:
            if size < self.page_size or size % self.page_size:
                raise ConfigError("num_slots", size, f"whole pages of {self.page_size} tokens, one at least")
        if self.window is not None and self.window < 1:
            raise ConfigError("window", self.window, "at least 1 token")
        if self.policy not in POLICIES:
            raise ConfigError("policy", self.policy, f"one of {', '.join(POLICIES)}")
        if unknown := sorted(self.bugs - set(BUGS)):
            raise ConfigError("bugs", unknown[0], f"some of {', '.join(BUGS)}")

    @property
    def components(self) -> tuple[str, ...]:
        """The tree's components."""
        return COMPONENTS[: len(self.num_slots)]
