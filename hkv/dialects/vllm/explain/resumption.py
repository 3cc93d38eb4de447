"""Boundaries at which each group alone could resume a request, by definition, and the entries it lacks for more."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

from hkv.dialects.vllm.explain.story import Story
from hkv.oracle.explain import Lack, Resumption
from reference import hits
from reference.keys.views import Chain


@dataclasses.dataclass(frozen=True)
class Resumptions:
    """Boundaries at which a request could be resumed.

    Attributes:
      alignment: tokens of which every hit is a multiple.
      hit: the largest boundary at which every group can resume, in tokens.
      groups: each group that can be cached, alone.
    """

    alignment: int
    hit: int
    groups: tuple[Resumption, ...]


def resumptions(story: Story, id: str) -> Resumptions:
    """Asks the definition of a hit (`reference.hits`), not how an engine looks for one.

    Args:
      story: state of the cache.
      id: a request in it.
    """
    config, judge = story.config, _Judge(story, id)
    num_tokens = story.engine.manager.requests[id].num_tokens
    alignment = hits.hit_alignment(config)
    hit = hits.longest_hit_by_definition(config, judge.has_entry, num_tokens)
    lengths = range(0, num_tokens, alignment) if config.caching else range(1)
    groups = []
    for group, spec in enumerate(config.topology.specs):
        if not spec.prefix_cacheable:
            continue
        able = [length for length in lengths if not judge.lacks(group, length)]
        largest = max(able, default=0)
        beyond = hit + alignment if hit + alignment in lengths else None
        lacks = () if beyond is None else tuple(judge.lacks(group, beyond))
        groups.append(Resumption(group, spec.kind, config.block_size(group), largest, beyond, lacks))
    return Resumptions(alignment, hit, tuple(groups))


class _Judge:
    """Cache entries of one request's prefixes."""

    def __init__(self, story: Story, id: str) -> None:
        self._story, self._config = story, story.config
        self._keys = story.engine.manager.requests[id].keys

    def has_entry(self, group: int, end: int) -> bool:
        """True if some block of `group` is cached under the key of the request's first `end` tokens."""
        key = self._key(end)
        return key is not None and self._story.engine.manager.pool.find(key, (group,)) is not None

    def lacks(self, group: int, length: int) -> list[Lack]:
        """The entries that a group would need to resume at `length` tokens and does not have."""
        config, has = self._config, self.has_entry
        if hits.can_read(config, has, group, length) and hits.can_draft(config, has, group, length):
            return []
        spec = config.topology.groups[group].spec
        ranges = spec.reads(length)
        if spec.snapshot:
            ends = [position + 1 for position in itertools.chain(*ranges) if not has(group, position + 1)]
            return [Lack(0, end - 1, *self._why(group, (end,))) for end in ends]
        found = [lack for positions in ranges for lack in self._missing(group, positions)]
        if not hits.can_draft(config, has, group, length):
            unit = min(config.block_size(group), hits.hit_alignment(config))
            draft = self._missing(group, range(length, length + unit))
            found += [
                dataclasses.replace(lack, why=f"{lack.why}; proves the draft layer's last value") for lack in draft
            ]
        return found

    def _missing(self, group: int, positions: range) -> Iterator[Lack]:
        size = self._config.block_size(group)
        for block in sorted({position // size for position in positions}):
            last = min((block + 1) * size, positions.stop)
            ends = range(last, (block + 1) * size + 1)
            if not any(self.has_entry(group, end) for end in ends):
                yield Lack(max(block * size, positions.start), last - 1, *self._why(group, tuple(ends)))

    def _key(self, end: int) -> Chain | None:
        size = self._config.hash_block_size
        return self._keys[end // size - 1] if end % size == 0 and 0 < end <= len(self._keys) * size else None

    def _why(self, group: int, ends: tuple[int, ...]) -> tuple[str, int | None]:
        keys = [key for key in map(self._key, ends) if key is not None]
        if not keys:
            return "the request has no key for it, being too short", None
        for key in keys:
            lost = self._story.lost.get((group, key))
            if lost is not None:
                line, block, operation = lost
                return f"lost on line {line}, from block {block} ({operation})", block
        return self._story.engine.manager.absence(group, keys[0]), None
