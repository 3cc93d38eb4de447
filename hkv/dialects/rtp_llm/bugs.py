"""Known defects of RTP-LLM (main, 20 August 2026), by name."""

from __future__ import annotations

from hkv.contract.bugs import Bug, listed

LEAKS_STATES, KEEPS_FREED_LISTS = "leak-of-backfilled-states", "refused-fork-keeps-freed-lists"
FORGETS_ALIGNMENT = "fork-forgets-alignment"

BUGS = listed(
    Bug(
        name=LEAKS_STATES,
        engine="RTP-LLM HybridKVCacheAllocator::rollbackInitMalloc",
        contract="a request that is refused holds nothing",
        behaviour="states that were put into holes of a prefix taken over are forgotten when a later group finds no "
        "block: nobody gives their references back",
    ),
    Bug(
        name=KEEPS_FREED_LISTS,
        engine="RTP-LLM SingleTypeKVCacheAllocator::updateKVBlock",
        contract="every block of a request's lists has a reference of that request",
        behaviour="a fork that finds no block for its copies has given the blocks of dropped sequences back and leaves "
        "them in their lists: when the request ends they are given back again",
    ),
    Bug(
        name=FORGETS_ALIGNMENT,
        engine="RTP-LLM KVCacheAllocator::updateKVBlock",
        contract="every whole block of a request is cached when it ends",
        behaviour="a forked sequence takes over keys, and not that the last is of a whole block: the next insertion "
        "drops the last key of every sequence as though it were of a partly filled one",
    ),
)
"""Defects of its allocators."""
