"""Rules of lookup: a hit is all that can be resumed from, no more, and always the same."""

from __future__ import annotations

from collections.abc import Iterator

from hkv.dialects.vllm import kinds
from hkv.dialects.vllm.invariants.moment import Moment, invariant
from hkv.dialects.vllm.log import structs as oplog
from hkv.dialects.vllm.log.structs import (
    AllocateOp,
    Allocation,
    CommitOp,
    ConnectorHit,
    ConnectorLookupOp,
    Hit,
    LookupOp,
    Truncated,
    TruncateOp,
)
from hkv.dialects.vllm.traffic.hit_comparison import Cause, causes
from reference.hits import HasEntry, connector_hit_by_definition, hit_alignment, longest_hit_by_definition

# What a connector is told comes first: its invariants say more of a wrong row than those of any hit.


@invariant("connector hits", "B-I8", after=(ConnectorLookupOp,), needs=("keys",))
def connector_hits(moment: Moment) -> Iterator[str]:
    """Of a hit that a connector is told, every block holds the request's own prefix up to its column, in its group.

    Holds after `connector_lookup`. Rows reach no further than the hit or the group's own, and the hit is `diverged`
    only where some group's own is shorter. Each group's own is the longest by definition, unless a cause of
    `hkv.dialects.vllm.traffic.hit_comparison` applies. Exception: with hits inside blocks, keys besides a block's
    primary one are not seen, so that a block may be cached as another part of itself; its group still has to be the
    one, and lengths are not judged.
    """
    config, answer, operation = moment.config, moment.answer, moment.operation
    assert isinstance(answer, ConnectorHit)
    assert isinstance(operation, ConnectorLookupOp)
    if answer.diverged and min(answer.hits) >= answer.hit:
        yield f"a hit of {answer.hit} tokens, which groups find by themselves, too, is said to diverge: {answer.hits}"
    for group, row in enumerate(answer.blocks):
        size = config.block_size(group)
        if len(row) > -(-max(answer.hits[group], answer.hit) // size):
            yield f"group {group} is told {len(row)} blocks, and finds {answer.hits[group]} tokens by itself"
        for column, block in enumerate(row):
            if block and (problem := _wrongly_told(moment, operation.id, group, block, (column + 1) * size)):
                yield f"block {block} is told as column {column} of group {group}, and {problem}"
    num_tokens = _searched(moment, operation)
    if config.partial_hits or (operation.limit is not None and config.eagle_group_ids) or causes(config, num_tokens):
        return
    own = connector_hit_by_definition(config, _has_entry(moment, operation.id), num_tokens).own
    for group, (told, best) in enumerate(zip(answer.hits, own, strict=True)):
        if told != best:
            yield f"group {group} alone can resume at {best} tokens, and is said to find {told}"


def _wrongly_told(moment: Moment, id: str, group: int, block: int, end: int) -> str:
    entry = moment.after.cached.get(block)
    if entry is None:
        return "is not cached"
    holder, tokens, key = entry
    if holder != group:
        return f"is cached as {tokens} tokens of group {holder}"
    if moment.config.partial_hits:
        return ""
    if tokens != end:
        return f"is cached as {tokens} tokens"
    prefix = moment.ledger.prefix(id, end)
    return "" if prefix is not None and key in moment.book.keys.get(prefix, ()) else "holds another prefix"


@invariant("supplied", "B-I8", "B-I17", after=(AllocateOp,))
def supplied(moment: Moment) -> Iterator[str]:
    """Of a hit that is adopted, every group has what the first computed token reads, or a load brings it.

    Holds after an `allocate` that admits a request, at hit and external tokens together. Positions of the hit lie in
    blocks that the row adopts, under the key of this very prefix, those beyond in new ones; a recurrent state, which
    ends exactly there, is adopted only if nothing is loaded. Exceptions: chunks that do not start at blocks
    (`CHUNK_OFF_GRID`); with hits inside blocks a state's block may be copied, and only its presence is judged.
    """
    config, operation, answer = moment.config, moment.operation, moment.answer
    assert isinstance(operation, AllocateOp)
    assert isinstance(answer, Allocation)
    if answer.blocks is None or not operation.hit:
        return
    rows, whole = moment.after.rows[operation.id], operation.hit + operation.external
    for group, spec in enumerate(config.topology.specs):
        if not spec.prefix_cacheable or kinds.layer(spec).off_grid:
            continue
        size = config.block_size(group)
        for column in sorted({position // size for positions in spec.reads(whole) for position in positions}):
            block = rows[group][column] if column < len(rows[group]) else 0
            end = min(whole, (column + 1) * size)
            adopted = column * size < operation.hit and not (spec.snapshot and operation.external)
            if not block:
                yield f"{operation.id} goes on at {whole} tokens, and column {column} of group {group} holds no block"
            elif adopted and not config.partial_hits and moment.before.cached.get(block, (group, 0, ""))[1] < end:
                yield f"{operation.id} adopts {operation.hit} tokens, and group {group} lacks column {column}"


@invariant("truncation", "B-I10", after=(TruncateOp,))
def truncation(moment: Moment) -> Iterator[str]:
    """A hit that is cut keeps the first blocks of each group, as many as cover its tokens, or all of a shorter row.

    Holds after `truncate`. Exceptions: none.
    """
    operation, answer = moment.operation, moment.answer
    assert isinstance(operation, TruncateOp)
    assert isinstance(answer, Truncated)
    for group, row in enumerate(operation.rows):
        left = row[: operation.tokens // moment.config.block_size(group)]
        if answer.blocks[group] != left:
            yield f"group {group} keeps {answer.blocks[group]}, not {left}, of {operation.tokens} tokens"


@invariant("soundness", "B-I8", after=(LookupOp, ConnectorLookupOp), needs=("keys",))
def soundness(moment: Moment) -> Iterator[str]:
    """At a hit of h tokens every group can resume: what the query at h reads is in blocks that hold this very prefix.

    Holds after `lookup`. Full attention: every block before h. Sliding window: those that meet the window. Chunked:
    those that meet the chunk. Recurrent: one state, after exactly h tokens. Exception: chunks that do not start at
    blocks (`CHUNK_OFF_GRID`): with chunks of 5 in blocks of 2, a request of 16 tokens asks up to token 15, where a
    chunk starts; the last block before it ends at 14, in another chunk, and vLLM 0.33 reports 14 without a look.
    Of a diverged hit that a connector is told, only the group of full attention is asked: a load brings the rest.
    """
    config, answer = moment.config, moment.answer
    assert isinstance(answer, Hit)
    diverged = isinstance(answer, ConnectorHit) and answer.diverged
    for group, spec in enumerate(config.topology.specs):
        size = config.block_size(group)
        if not spec.prefix_cacheable or kinds.layer(spec).off_grid or (diverged and group != config.completed_group):
            continue
        for column in sorted({position // size for positions in spec.reads(answer.hit) for position in positions}):
            end = min(answer.hit, (column + 1) * size)
            problem = _wrong(moment, group, column, end, spec.snapshot)
            if problem:
                said = ", which is not said to diverge," if isinstance(answer, ConnectorHit) and not diverged else ""
                yield f"a hit of {answer.hit} tokens{said} needs column {column} of group {group}, and {problem}"


def _wrong(moment: Moment, group: int, column: int, end: int, exactly: bool) -> str:
    assert isinstance(moment.answer, Hit)
    assert isinstance(moment.operation, LookupOp | ConnectorLookupOp)
    row = moment.answer.blocks[group]
    block = row[column] if column < len(row) else 0
    entry = moment.after.cached.get(block)
    if entry is None:
        return f"block {block} there is not cached"
    holder, tokens, key = entry
    if holder != group or tokens < end or (exactly and tokens != end):
        return f"block {block} there is cached as {tokens} tokens of group {holder}"
    wanted = moment.ledger.prefix(moment.operation.id, end)
    if wanted not in {moment.ledger.cut(name, end) for name in moment.book.prefixes.get(key, ())}:
        return f"block {block} there holds another prefix"
    return ""


@invariant("maximality", "B-I9", after=(LookupOp,), needs=("keys",))
def maximality(moment: Moment) -> Iterator[str]:
    """No longer hit exists: the definition of a hit, tried at every length, finds none.

    Holds after `lookup`. Exceptions: what a draft would prove a hit by may lie beyond the limit of a lookup that was
    given one; and the causes of direction `less` in `hkv.dialects.vllm.traffic.hit_comparison`. With
    groups `full:4` and `swa:4:8`, both cached up to 16 tokens, a request of 17 hits 16; had the full group an EAGLE
    twin `full:4`, it would have to drop like its twin and hit 12 (`SHARED_DROP`).
    """
    operation, answer, config = moment.operation, moment.answer, moment.config
    assert isinstance(operation, LookupOp)
    assert isinstance(answer, Hit)
    num_tokens = _searched(moment, operation)
    if operation.limit is not None and config.eagle_group_ids:
        return
    if any(cause.direction == "less" for cause in causes(moment.config, num_tokens)):
        return
    best = _definition(moment, operation.id, num_tokens)
    if best > answer.hit:
        yield f"{best} tokens can be resumed from, {answer.hit} were found"


@invariant("draft margin", "B-I12", after=(LookupOp,), needs=("keys",))
def draft_margin(moment: Moment) -> Iterator[str]:
    """An EAGLE group at a hit of h tokens also holds the unit after h, which the hit gives up; others need not.

    Holds after `lookup`. Without an EAGLE group there is no margin, and a hit that leaves no token to compute, or lies
    between the lengths that hits may have, has no unit after it: `consistency` judges that. Exceptions:
    causes of direction `more` in `hkv.dialects.vllm.traffic.hit_comparison` (two EAGLE windows with different holes,
    `DROP_NOT_REPEATED`); and with hits inside blocks, keys besides a block's primary one are not seen.
    """
    operation, answer, config = moment.operation, moment.answer, moment.config
    assert isinstance(operation, LookupOp)
    assert isinstance(answer, Hit)
    num_tokens = _searched(moment, operation)
    named = causes(config, num_tokens)
    if config.partial_hits or named & {Cause.DROP_NOT_REPEATED, Cause.CHUNK_OFF_GRID}:
        return
    if not config.eagle_group_ids or not _may_be_hit(moment, answer.hit):
        return
    best = _definition(moment, operation.id, num_tokens)
    if answer.hit > best:
        yield f"{answer.hit} tokens were found; with the unit after them, which drafts give up, {best} are proven"


def _searched(moment: Moment, operation: LookupOp | ConnectorLookupOp) -> int:
    """One more than the most tokens of the hit: those of the request, or as the lookup says."""
    tokens = len(moment.ledger.requests[operation.id].tokens)
    return tokens if operation.limit is None else operation.limit + 1


def _definition(moment: Moment, id: str, num_tokens: int) -> int:
    return longest_hit_by_definition(moment.config, _has_entry(moment, id), num_tokens)


def _has_entry(moment: Moment, id: str) -> HasEntry:
    return lambda group, end: moment.has_entry(id, group, end)


def _may_be_hit(moment: Moment, hit: int) -> bool:
    """True if a hit of so many tokens is aligned, and leaves the request's last token to compute."""
    assert isinstance(moment.operation, LookupOp)
    num_tokens = len(moment.ledger.requests[moment.operation.id].tokens)
    return 0 <= hit < num_tokens and hit % hit_alignment(moment.config) == 0


@invariant("consistency", "B-I10", after=(LookupOp,))
def consistency(moment: Moment) -> Iterator[str]:
    """A hit is aligned, leaves a token to compute, and comes with exactly the columns it covers in every group.

    Holds after `lookup`, which changes nothing and answers the same when asked again. Exceptions: groups that are never
    cached (`opaque`) come with no column; so does every group when the hit is 0.
    """
    operation, answer, config = moment.operation, moment.answer, moment.config
    assert isinstance(operation, LookupOp)
    assert isinstance(answer, Hit)
    if moment.before != moment.after:
        yield "the lookup changed the cache"
    if moment.again not in (None, answer):
        yield f"the same lookup answered {answer} and then {moment.again}"
    if not _may_be_hit(moment, answer.hit):
        yield f"a hit of {answer.hit} tokens is not below the request's length or not aligned"
    if answer.shared_prefix and answer.shared_prefix <= answer.hit:
        expected = f"0, or more than the hit of {answer.hit}: the longest prefix that the search came to"
        yield f"shared_prefix is {answer.shared_prefix}: expected {expected}"
    for group, row in enumerate(answer.blocks):
        cached = config.topology.groups[group].spec.prefix_cacheable
        columns = -(-answer.hit // config.block_size(group)) if cached else 0
        if len(row) != columns:
            yield f"a hit of {answer.hit} tokens comes with {len(row)} columns of group {group}, not {columns}"


@invariant("monotonicity", "B-I11", after=(AllocateOp, CommitOp))
def monotonicity(moment: Moment) -> Iterator[str]:
    """Filling the cache lowers nobody's hit, as long as nothing loses a key.

    Holds after `allocate` and `commit`, for requests that wait. Exceptions: keys that were lost on the way (a block
    handed out, a partly filled block that is now known by more tokens); and `DROP_NOT_REPEATED`, where a hit that was
    longer than proven may shrink to the proven one when the cache fills.
    """
    if any(moment.after.cached.get(block) != entry for block, entry in moment.before.cached.items()):
        return
    for id, (before, after) in moment.hits.items():
        exempt = Cause.DROP_NOT_REPEATED in causes(moment.config, len(moment.ledger.requests[id].tokens))
        if after < before and not exempt:
            yield f"the hit of {id} went from {before} to {after} tokens"


# States that a connector is offered are there.


@invariant("offers", "B-I15", "B-I17", after=(oplog.OffloadsOp, oplog.FinalizeOp), needs=("keys",))
def offers(moment: Moment) -> Iterator[str]:
    """A state that is offered lies in a block that is in use, under the key of exactly the tokens that are said.

    Holds after `offloads` and `finalize`. Exceptions: none, but for what `offer-outlives-state` is named for.
    """
    for id, group, block, tokens in _offered(moment):
        if moment.config.offers(group):
            yield from _judged(moment, id, group, block, tokens)
        else:
            yield f"{id} is offered block {block} of group {group}, which has no states"


def _offered(moment: Moment) -> list[tuple[str, int, int, int]]:
    operation, answer = moment.operation, moment.answer
    if isinstance(operation, oplog.FinalizeOp):
        assert isinstance(answer, list)
        return [(operation.id, *offer) for offer in answer]  # type: ignore[misc]
    assert isinstance(answer, dict)
    return [(id, *offer) for id, offers in answer.items() for offer in offers]


def _judged(moment: Moment, id: str, group: int, block: int, tokens: int) -> Iterator[str]:
    stale, state = "offer-outlives-state" in moment.config.bugs, moment.after
    record = moment.ledger.requests.get(id)
    if record is None or not record.running:
        yield f"{id} is offered block {block}, and has ended"
        return
    if stale:
        return
    known = state.cached.get(block)
    if block not in state.refs:
        yield f"{id} is offered block {block} of group {group}, which is free"
    elif known is None or known[:2] != (group, tokens):
        yield f"{id} is offered block {block} as the state of {tokens} tokens, and it is cached as {known}"
    else:
        prefix = moment.ledger.prefix(id, tokens)
        if prefix is None or known[2] not in moment.book.keys.get(prefix, ()):
            yield f"{id} is offered block {block} of group {group}, which others' {tokens} tokens are cached as"
