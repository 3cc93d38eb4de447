"""The configuration of vLLM's prefix cache, and the known defects of it that are reproduced: rules read them alone."""

from __future__ import annotations

from reference.language import Settings


class Config(Settings):
    """The configuration.

    Attributes:
      width: groups. finders: groups that are asked for a hit. parts: most hash blocks in a block that hits may end
      inside. hash: tokens in a hash block. grid: in a scheduler block. alignment: tokens of which hits are multiples.
      pool: blocks, without the null block. longest: tokens of a request. watermark: blocks that admission leaves free.
      caching, partial, alone: prefix caching is on; hits may end inside blocks; there is one group.
      once: one round of a lookup will do. completed: a connector may complete a hit of full attention.
      eagle: hits give up a block. lookahead: tokens after a hash block that its key covers. prefill: tokens that a
      draft prefills again. interval: tokens between lengths that can be resumed at, 0 for none, -1 where nothing is
      left out. branches: states are kept where others branch off; below: also a block before. again: a tail that has
      its key is registered again.
      states, runs, exporting, twins, sinks: some group has states, needs a run that depends on the length or a chunk,
      leaves states inside a chunk, has the spec of another, has sinks.
      events, zeroing, offering: whether these are told. tells: blocks of rows, too. explains: what became of entries is
      noted.
    """

    width: int
    finders: int
    parts: int
    hash: int
    grid: int
    alignment: int
    pool: int
    longest: int
    watermark: int
    caching: int
    partial: int
    alone: int
    once: int
    completed: int
    eagle: int
    lookahead: int
    prefill: int
    interval: int
    branches: int
    below: int
    again: int
    states: int
    runs: int
    exporting: int
    twins: int
    sinks: int
    events: int
    zeroing: int
    offering: int
    tells: int
    explains: int


class Defects(Settings):
    """Known defects that are reproduced, by the names of `hkv.dialects.vllm.bugs`."""

    finder_index_error: int
    external_state_not_counted: int
    negative_estimate: int
    checkpoint_beyond_keys: int
    plan_outlives_refusal: int
    checkpoint_under_later_key: int
    begun_state_under_later_key: int
    tail_key_outlives_state: int
    copied_before_written: int
    window_one_never_hits: int
    hit_reported_by_columns: int
    offer_outlives_state: int
