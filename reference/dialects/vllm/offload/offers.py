"""Chunks of a request that a step offers to the second tier.

Full attention offers every chunk. A window needs few chunks before the lengths that loads can end at: the boundaries of
full attention's chunks, or those that retention leaves, and the end of the prompt. Recurrent states are offered as the
cache hands them over (`stores`). vLLM 0.33 `OffloadingConnectorScheduler._build_store_jobs` and the managers'
`reachable_block_mask`.
"""

from __future__ import annotations

from reference.dialects.vllm.offload.lookup import ceil
from reference.dialects.vllm.offload.records import Group, Offloaded, Tier, Use, key_of
from reference.language import NOTHING, Text, clause

TEXT = Text(__name__)

NOWHERE = -1
"""Chunk at which the last segment of a request ends whose tail does not count."""


def use_of(t: Tier, request: Offloaded, group: int, tokens: int) -> Use:
    """A request's use of a group's part of its prefix of so many tokens."""
    at = (tokens // t.config.unit - 1) * t.config.groups + group
    use = request.uses[at]
    if use is None:
        use = t.vacant
        t.vacant = use.next
        t.unnamed -= 1
        use.key, use.end = key_of(t, request, group, tokens), tokens
        request.uses[at] = use
    return use


def storable_tokens(t: Tier, request: Offloaded, computed: int) -> int:
    """Tokens that may be stored, of so many that are computed."""
    clause("storable-tokens", "OffloadingConnectorScheduler._calc_num_offloadable_tokens")
    tokens = min(computed, request.tokens)
    if request.store_limit != NOTHING:
        tokens = min(tokens, request.store_limit)
    if t.config.prompt_only:
        tokens = min(tokens, request.prompt)
    return tokens


def storable_chunks(t: Tier, request: Offloaded, group: Group, tokens: int) -> int:
    """Chunks that may be stored: whole, allocated, named; not a draft's last one while it may be written again."""
    clause("storable-chunks", "RequestOffloadState.storable_chunks")
    count = tokens // group.chunk
    if group.eagle and tokens > request.prompt and not request.finished:
        count = max(0, count - 1)
    named = request.hashes // (group.chunk // t.config.unit)
    return min(count, request.held[group.index] // t.config.per_chunk, named)


def offer(t: Tier, request: Offloaded, group: Group, chunks: int, prompt: int, offered: int) -> int:
    """Offers chunks of a group behind those `offered` before; how many these are then.

    Args:
      t: the tier.
      request: the request.
      group: the group.
      chunks: chunks that may be stored.
      prompt: chunks of the prompt that may be.
      offered: uses in the payload.
    """
    cursor, per_chunk, groups = request.cursors[group.index], t.config.per_chunk, t.config.groups
    final = boundary_blocks(t, group)
    again = request.finished and chunks != prompt and final > 0
    horizon = prompt if chunks <= prompt else NOWHERE
    if request.finished:
        horizon = chunks
    if t.config.interval != NOTHING or group.eagle:
        horizon = NOWHERE
    resumes = resumes_at(t, request) if t.config.interval != NOTHING else 0
    start = cursor
    if again:
        clause("offer-the-end-again", "OffloadingConnectorScheduler._build_store_jobs", "a request's end is a boundary")
        end = chunks * per_chunk
        start = min(start, (end - end % final) // per_chunk)
    if group.aligned:
        start = chunks
    for place in range(start, chunks):
        kept, whole, known = False, True, False
        for column in range(place * per_chunk, (place + 1) * per_chunk):
            for ends, before in ((horizon, 0), (prompt, 1)):
                wanted = is_kept(t, request, group, column, ends, resumes)
                if before:
                    known = known or (wanted and again and place < cursor)
                else:
                    kept = kept or wanted
                    whole = whole and (request.blocks[column * groups + group.index] > 0 or not wanted)
        last = request.blocks[((place + 1) * per_chunk - 1) * groups + group.index]
        if kept and whole and last > 0 and not known:
            t.payload[offered] = use_of(t, request, group.index, (place + 1) * group.chunk)
            offered += 1
    return offered


def boundary_blocks(t: Tier, group: Group) -> int:
    """Blocks between two boundaries, where the tail of a request's end can be told from them; else 0."""
    if is_whole(t, group) or group.eagle or t.config.interval != NOTHING:
        return 0
    return t.config.alignment // group.size


def is_whole(t: Tier, group: Group) -> bool:
    """True if every chunk of a group may be needed, since it has no tails or no boundaries to have them before."""
    return group.span < 0 or t.config.alignment == 0 or t.config.alignment % group.size > 0


def is_kept(t: Tier, request: Offloaded, group: Group, column: int, horizon: int, resumes: int) -> bool:
    """True for a block that a load may need.

    Args:
      t: the tier.
      request: the request.
      group: the group.
      column: the block's.
      horizon: chunk at which the request's last segment ends, or NOWHERE.
      resumes: tokens at which its prompt can resume, where retention is sparse.
    """
    if is_whole(t, group):
        return True
    clause("tails-of-segments", "SlidingWindowManager.reachable_block_mask", "windows keep tails")
    drops, need = group.eagle, ceil(group.span, group.size) + group.eagle
    segment = t.config.alignment if t.config.interval == NOTHING else t.config.interval
    period = segment // group.size
    kept = False
    if period > 0:
        kept = need >= period or (column >= drops and max(column - drops, 0) % period >= period - need)
        if horizon != NOWHERE:
            last = horizon * t.config.per_chunk
            kept = kept or (max(last - last % period, last - need) <= column and column < last)
    if t.config.interval != NOTHING:
        for boundary, counts in ((resumes, True), (request.shared, request.shared > 0)):
            end = boundary // t.config.alignment * t.config.alignment // group.size + drops
            kept = kept or (counts and end - need <= column and column < end)
    return kept


def resumes_at(t: Tier, request: Offloaded) -> int:
    """Most tokens at which a prompt that comes again can resume, before they are aligned.

    The last token is computed again, and what a draft's group gives up has to be behind them.
    """
    clause("resumes-at", "replay_boundaries")
    tokens = request.prompt - 1
    if not t.defects.draft_drop_misses_window_tail:
        for at in range(t.config.groups):
            if t.groups[at + 1].eagle:
                size = t.groups[at + 1].chunk
                tokens = min(tokens, request.prompt // size * size - size)
    return max(0, tokens)
