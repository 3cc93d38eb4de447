"""Named cases of lookups and allocations that no branch of a rule tells apart, for whoever asks what was exercised."""

from __future__ import annotations

from reference.dialects.vllm.pool import entry_of
from reference.dialects.vllm.records import Cache, Fate, Kind, Operation, Request, ceil
from reference.language import Text, clause

TEXT = Text(__name__)


def of_lookup(c: Cache, request: Request, hit: int, longest: int) -> None:
    """Names what a lookup is of, and what it found."""
    if request.returned:
        clause("request/preempted", "Scheduler._preempt_request", "a request is preempted and comes back")
    if not c.config.caching:
        clause("caching/off", "KVCacheManager.get_computed_blocks", "nothing is looked up or registered")
    elif hit == 0:
        clause("hit/none", "KVCacheManager.get_computed_blocks", "a lookup finds nothing")
        if c.config.eagle and longest > 0:
            clause(
                "hit/drops-nothing-left",
                "HybridKVCacheCoordinator.find_longest_cache_hit",
                "a lookup under the EAGLE drop rule finds nothing, though a group alone finds a prefix",
            )
    if c.resets > 0 and request.keys > 0:
        for g in range(1, c.config.width + 1):
            entry = entry_of(c, request, c.groups[g], 0)
            if entry.noted == Fate.REGISTERED and entry.first is None and entry.lost == 0:
                clause(
                    "lookup/after-reset",
                    "BlockPool.reset_prefix_cache",
                    "a prompt is looked up again that was cached before the cache was reset",
                )
    if hit > 0:
        of_hit(c, request, hit)


def of_hit(c: Cache, request: Request, hit: int) -> None:
    """Names what a hit is, and of which groups it has blocks."""
    if c.config.eagle:
        clause("hit/eagle", "HybridKVCacheCoordinator.find_longest_cache_hit", "a hit under the EAGLE drop rule")
    if c.config.lookahead > 0:
        clause("hit/lookahead-hash", "hash_request_tokens", "a hit on hashes that look ahead")
    if request.named:
        clause("hit/extra-keys", "generate_block_hash_extra_keys", "a hit of a request with extra keys")
    if request.returned:
        clause("hit/after-preemption", "Scheduler._preempt_request", "a request that ran before hits again")
    size = 0
    for g in range(1, c.config.width + 1):
        group, row = c.groups[g], request.rows[g]
        if row.found > 0:
            if hit % group.size > 0:
                clause("hit/inside-block", "BlockPool.cache_partial_block", "a hit ends inside a block")
            if size > 0 and size != group.size:
                clause(
                    "hit/unequal-blocks", "BlockHashListWithBlockSize", "groups with different blocks agree on a hit"
                )
            size = group.size
            if group.size != group.spec_size:
                clause("hit/context-parallel", "resolve_kv_cache_block_sizes", "a hit on blocks split over ranks")
            if group.kind == Kind.FULL:
                clause(
                    "hit/full",
                    "FullAttentionManager.find_longest_cache_hit",
                    "a full-attention or MLA group contributes blocks to a hit",
                )
            elif group.kind == Kind.STATE:
                clause("hit/mamba", "MambaManager.find_longest_cache_hit", "a recurrent state is found")
            elif group.kind == Kind.CHUNK:
                if row.first_found > 0:
                    clause(
                        "hit/chunk",
                        "ChunkedLocalAttentionManager.find_longest_cache_hit",
                        "earlier chunks count as hit without being looked up",
                    )
            elif row.first_found > 0:
                clause(
                    "hit/sliding-window-run",
                    "SlidingWindowManager.find_longest_cache_hit",
                    "a run of blocks as long as the window is found, nothing needed before it",
                )
            else:
                clause(
                    "hit/sliding-window-prefix",
                    "SlidingWindowManager.find_longest_cache_hit",
                    "a run anchored at the first block is a hit though shorter than the window",
                )


def copies(c: Cache, request: Request, hit: int) -> bool:
    """True if a hit ends inside a block of attention, which is to be copied."""
    found = False
    for g in range(1, c.config.width + 1):
        found = found or (c.groups[g].kind == Kind.FULL and hit % c.groups[g].size > 0)
    return found


def of_refusal(c: Cache, op: Operation, request: Request, hit: int) -> None:
    """Names who is refused, and what was asked for."""
    if request.running:
        clause("refuse/running", "KVCacheManager.allocate_slots", "a running request is refused")
    if op.must_fit:
        clause("refuse/gate", "KVCacheManager.allocate_slots", "a request is refused with the full-sequence gate on")
    else:
        clause("refuse/need", "KVCacheManager.allocate_slots", "a request is refused by what its next tokens need")
    if op.reserved > 0:
        clause("refuse/reserved", "KVCacheManager.allocate_slots", "a request is refused while blocks are reserved")
    if c.config.watermark > 0 and not request.running:
        clause("refuse/watermark", "KVCacheManager.allocate_slots", "a request is refused under a watermark")
    if hit > 0 and copies(c, request, hit):
        clause(
            "refuse/copy",
            "KVCacheManager.allocate_slots",
            "a request is refused whose hit ends inside a block of attention, which is to be copied",
        )


def of_grant(c: Cache, op: Operation, request: Request, hit: int, main: int) -> None:
    """Names who gets blocks, and for what."""
    if not request.running:
        if c.refused is request and c.reserved == op.reserved + 1:
            clause(
                "admit/edge",
                "KVCacheManager.allocate_slots",
                "a request is admitted that was refused when one block more was set aside",
            )
        if hit > 0 and copies(c, request, hit):
            clause(
                "admit/copy",
                "KVCacheManager.allocate_slots",
                "a request is admitted whose hit ends inside a block of attention, which is to be copied",
            )
    if op.must_fit:
        clause("admit/gate", "KVCacheManager.allocate_slots", "a request is admitted through the full-sequence gate")
    if op.ahead > 0:
        clause("allocate/look-ahead", "KVCacheManager.allocate_slots", "slots are kept for tokens to come")
    if main > request.tokens:
        clause("allocate/drafts", "KVCacheManager.allocate_slots", "unverified draft tokens get slots")
    if op.external > 0:
        clause("allocate/external", "KVCacheManager.allocate_slots", "external tokens are admitted")
        if hit > 0:
            clause(
                "allocate/external-two-phase",
                "allocate_external_computed_blocks",
                "external tokens follow a local hit: hits are touched first",
            )
    if op.delay:
        clause(
            "allocate/delayed", "KVCacheManager.allocate_slots", "registration waits until external tokens have arrived"
        )
    if main + op.ahead > c.config.longest:
        clause("allocate/length-limit", "KVCacheManager.allocate_slots", "max_model_len cuts the slots")
    for g in range(1, c.config.width + 1):
        group, row = c.groups[g], request.rows[g]
        if group.kind == Kind.RING and row.length == 0:
            clause("allocate/opaque", "CircularBufferManager", "a request owns an opaque region")
        if group.kind == Kind.ENCODER and ceil(op.encoder, group.size) > row.length:
            clause("allocate/encoder", "CrossAttentionManager", "a request gets blocks for an encoder's output")
        if group.scratch > 0 and not row.grown:
            clause("mamba/draft-states", "MambaManager.allocate_new_blocks", "scratch states of drafts are taken")
