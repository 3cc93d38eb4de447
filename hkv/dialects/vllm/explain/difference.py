"""A wrong answer under vLLM's rules in one sentence: for differences that break no invariant by themselves."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from hkv.contract.case import Case
from hkv.contract.log import Log, describe
from hkv.dialects.vllm.engines.numpy import identity_of
from hkv.dialects.vllm.explain.explain import Story
from hkv.dialects.vllm.log import structs as oplog
from hkv.dialects.vllm.log.configuration import to_config
from hkv.keys.chained import GIVEN, PLAIN, PrefixIdentity, block_key, digest_by_name, extra_keys
from hkv.spec import retained_sparsely
from reference.hits import hit_alignment

EVENT_WORDS = {
    "block_size": "block size",
    "extra_keys": "extra keys (what its keys cover besides tokens)",
    "lookahead": "lookahead tokens",
    "lora_name": "adapter",
    "medium": "medium",
    "session": "session",
    "spec_kind": "kind of layers",
    "tokens": "tokens",
    "window": "window",
}
"""Fields of events, in words."""

SHOWN = 16
"""Hex digits of a key that logs show."""


def difference(case: Case) -> str:
    """Sentence about the answer at which two engines differ, saying what is wrong; empty where nothing can be said.

    Args:
      case: the operations up to there, and the difference.
    """
    operation, mismatch = case.differing[-1], case.mismatch
    want, got, field = mismatch.want, mismatch.got, mismatch.field
    match operation:
        case oplog.LookupOp() if field == "hit":
            only = "only " if want < got else ""
            drafts = " once drafts give up the unit after a hit" if case.header.eagle else ""
            return f"{operation.id} finds {got} tokens, where {only}{want} can be resumed from{drafts}"
        case oplog.LookupOp() if field == "shared_prefix":
            unit = hit_alignment(to_config(case.header))
            said = f"the shared prefix that the lookup of {operation.id} names is of {got} tokens"
            due = f"the search comes to {want}" if want else "the search comes to no more than the hit"
            return f"{said}{f', no multiple of {unit}' if got % unit else ''}: {due}"
        case oplog.ConnectorLookupOp() if field == "hits":
            group = next(group for group, pair in enumerate(itertools.zip_longest(want, got)) if len(set(pair)) > 1)
            found, due = (each[group] if group < len(each) else "none" for each in (got, want))
            return f"group {group} is said to find {found} tokens of {operation.id} by itself, not {due}"
        case oplog.ConnectorLookupOp() if field == "diverged":
            agree = "do not all have its end" if want else "all have its end"
            return f"the hit of {operation.id} is {'' if got else 'not '}said to diverge, and its groups {agree}"
        case oplog.LookupOp() if field.startswith("blocks[") and isinstance(want, list) and isinstance(got, list):
            return _found(case, int(field[len("blocks[") : -1]), want, got)
        case oplog.AllocateOp() if case.fails:
            return f"{operation.id}{_preempted(case, operation.id)} is to get blocks: {_failure(got)}"
        case _ if case.fails:
            return f"{describe(operation, 60)}: {_failure(got)}"
        case oplog.AllocateOp() if want is None or got is None:
            came = _preempted(case, operation.id)
            return _granted(case) if want is None else f"{operation.id}{came} is refused, though what it needs is free"
        case oplog.AllocateOp() if field.startswith("blocks["):
            group = field[len("blocks[") : -1]
            given = f"new blocks {got}" if got else "no new block"
            return f"{operation.id}{_preempted(case, operation.id)} gets {given} in group {group}, not {want or 'none'}"
        case oplog.StateOp() if field == "free" and set(got) != set(want):
            return _freed(case, set(want), set(got))
        case oplog.StateOp() if field == "free":
            place, due, first = next(
                (at, *pair) for at, pair in enumerate(zip(want, got, strict=False)) if len({*pair}) > 1
            )
            return f"block {first} stands at place {place} of the queue of free blocks, where block {due} is due"
        case oplog.EventsOp() | oplog.StateOp() if field.endswith(".parent") or ".keys" in field or "cached." in field:
            return next(_wrong_key(case), "") or (_cached(case) if field.startswith("cached.") else "")
        case oplog.OffloadsOp():
            due, given = ("none" if each == "absent" else each for each in (want, got))
            return f"{field.partition('.')[2] or field} is offered states {given} as (group, block, tokens), not {due}"
        case oplog.EventsOp() if field == "removed" and [each[:3] for each in want] == [each[:3] for each in got]:
            return f"removed events say medium {_media(got)}, not {_media(want)}"
        case oplog.EventsOp() if field == "removed":
            keys, due = want or got, "were to leave it" if want else "were to stay"
            verb = "stay in" if want else "leave"
            return f"keys of group {keys[0][0]} {verb} the index that {due}"
        case oplog.EventsOp() if field.rpartition(".")[2].partition("[")[0] in EVENT_WORDS:
            name = EVENT_WORDS[field.rpartition(".")[2].partition("[")[0]]
            return f"an event of {field.partition('[')[0]} blocks says {name} {got!r}, not {want!r}"
        case oplog.EventsOp() if field.endswith(".group"):
            return f"blocks of group {want} are not registered: the event in their place stores blocks of group {got}"
        case oplog.EventsOp() if field == "number of stored events" or field.endswith(".num_blocks"):
            return _stored(case)
        case _:
            return ""


def _found(case: Case, group: int, want: list[int], got: list[int]) -> str:
    """Blocks of a group that a hit leaves out, has beyond what is read, or takes in place of others."""
    operation, config = case.differing[-1], to_config(case.header)
    rows = itertools.zip_longest(want, got, fillvalue=0)
    column, (due, found) = next((column, pair) for column, pair in enumerate(rows) if pair[0] != pair[1])
    place = f"at column {column} of group {group}"
    if not found:
        drafts = ", as if drafts gave up more than the unit after a hit" if group in config.eagle_group_ids else ""
        return f"{operation.id} finds no block {place}, where block {due} can be resumed from{drafts}"
    if not due:
        return f"{operation.id} finds block {found} {place}, where its hit has none"
    return f"{operation.id} finds block {found} {place}, not block {due}, which has its key"


def _media(removed: Sequence[Any]) -> str:
    return ", ".join(dict.fromkeys(str(each[3]) if len(each) > 3 else "none" for each in removed))


def _failure(said: str) -> str:
    """An engine's failure, without the frame of the error that the installed engine's adapter raises."""
    _, framed, reason = said.partition("expected vLLM not to raise ")
    return f"vLLM raises {reason}" if framed else said


def _granted(case: Case) -> str:
    """A grant that had to be a refusal, and the reason for that."""
    story = _story(case)
    _, refused, why = story.words(story.answers[-1]).partition(": refused")
    return f"{case.differing[-1].id} is granted blocks and must be refused{why if refused else ''}"


def _cached(case: Case) -> str:
    """A block that has a key and is to have none, or the other way round, and what keeps it; else empty."""
    header, mismatch = case.header, case.mismatch
    missing = mismatch.got == "absent"
    if not missing and mismatch.want != "absent":
        block = mismatch.field.partition(".")[2].partition("[")[0]
        (group, tokens, _), (due, length, _) = mismatch.got, mismatch.want
        return f"block {block} is cached as {tokens} tokens of group {group}, not {length} tokens of group {due}"
    if header.hash == GIVEN:
        return ""
    entry: Any = mismatch.want if missing else mismatch.got
    group, tokens, key = entry
    texts = [text for text in _texts(case) if key in _chain(header, text[2], text[1])]
    whose = f"the first {tokens} tokens of {texts[0][0]}" if texts else f"{tokens} tokens"
    known = f"block {mismatch.field.partition('.')[2]} of group {group}, with {whose}"
    if not missing:
        return f"{known}, is cached, and is not to be"
    if owner := _moved_from(case, int(mismatch.field.partition(".")[2]), group, tokens):
        return f"{known}, is to take over the key of block {owner}, whose owner writes on, and is not cached"
    config = to_config(header)
    spec, size = config.topology.groups[group].spec, config.block_size(group)
    kept = ""
    if texts and retained_sparsely(spec) and header.retention_interval is not None:
        resumed = (len(texts[0][1]) - 1) // hit_alignment(config) * hit_alignment(config)
        read = any(tokens - size <= position < tokens for positions in spec.reads(resumed) for position in positions)
        kept = ", which sparse retention keeps for its prompt's end" if read else ""
    return f"{known}{kept}, is not cached"


def _moved_from(case: Case, block: int, group: int, tokens: int) -> int:
    """The block that lost the key as `block` got it; 0 for none."""
    notes, lost = _story(case).blocks, f"lost its key, of {tokens} tokens in group {group}"
    lines = {line for line, text in notes[block] if text.startswith("cached as")}
    return next((other for other, told in notes.items() if any((line, lost) in told for line in lines)), 0)


def _stored(case: Case) -> str:
    """Blocks that are registered, or are not, against what was to come."""
    mismatch, answer = case.mismatch, _story(case).answers[-1]
    assert isinstance(answer, list)
    stored = [event for event in answer if isinstance(event, oplog.CacheEvent) and event.type == "stored"]
    if mismatch.field == "number of stored events":
        if mismatch.got > mismatch.want:
            return f"{mismatch.got} runs of blocks are registered where {mismatch.want} were to be"
        event, wanted, got = stored[mismatch.got], stored[mismatch.got].num_blocks, 0
    else:
        event = stored[int(mismatch.field.partition("[")[2].partition("]")[0])]
        wanted, got = mismatch.want, mismatch.got
    ids = [id for id, tokens, _ in _texts(case) if event.tokens and _holds(tokens, event.tokens)]
    whose = f" of {ids[0]}{_preempted(case, ids[0])}" if ids else ""
    return (
        f"{got} blocks of group {event.group} are registered, not {wanted}, for {len(event.tokens or ())} tokens{whose}"
    )


def _holds(tokens: list[int], part: list[int]) -> bool:
    return any(tokens[start : start + len(part)] == part for start in range(len(tokens) - len(part) + 1))


def _preempted(case: Case, id: str) -> str:
    """That a request gave its blocks back before, as a phrase; empty if it did not."""
    freed = [
        index
        for index, other in enumerate(case.differing, 1)
        if isinstance(other, oplog.FreeOp | oplog.PopOp) and other.id == id
    ]
    came = (
        any(isinstance(other, oplog.AllocateOp) and other.id == id for other in case.differing[freed[-1] :])
        if freed
        else False
    )
    return f", which was preempted at operation {freed[-1]} and has come back," if came else ""


def _story(case: Case) -> Story:
    story = Story(Log("", case.header, case.differing))
    for index in range(len(case.differing)):
        story.perform(index)
    return story


def _freed(case: Case, want: set[int], got: set[int]) -> str:
    """Blocks that are wrongly in the queue or missing from it, with their holders."""
    story = _story(case)
    for block in sorted(got - want):
        holders = story.state.owners.get(block, ())
        held = "".join(
            f", where {id}{_preempted(case, id)} holds it at column {column} of group {group}{_in_flight(case, id)}"
            for id, group, column in holders
        )
        return f"block {block} is free{held or ', where a copy from it or into it is still to be made'}"
    block = min(want - got)
    line, text = story.blocks[block][-1] if story.blocks[block] else (0, "never handed out")
    return f"block {block} is not free; it was {text}" + (f" at operation {line - 1}" if line else "")


def _in_flight(case: Case, id: str) -> str:
    """That a step of a request in flight may read its blocks, as a phrase; empty if none is."""
    last = [other for other in case.differing if isinstance(other, oplog.AllocateOp) and other.id == id][-1:]
    return " and a step in flight still reads it" if last and last[0].in_flight else ""


def _texts(case: Case) -> list[tuple[str, list[int], PrefixIdentity]]:
    """Requests, their tokens, and what else identifies them."""
    texts: dict[str, tuple[str, list[int], PrefixIdentity]] = {}
    for operation in case.differing:
        if isinstance(operation, oplog.RequestOp):
            identity = PLAIN if operation.extra is None else identity_of(operation.extra)
            texts[operation.id] = operation.id, list(operation.tokens), identity
        elif isinstance(operation, oplog.AppendOp) and operation.id in texts:
            texts[operation.id][1].extend(operation.tokens)
    return list(texts.values())


def _wrong_key(case: Case) -> Iterator[str]:
    """Sentence about a key that leaves something out, if it is the key of a request's tokens without that."""
    header = case.header
    if header.hash == GIVEN:
        return
    unexplained = ""
    pairs = [
        pair for pair in zip(_keys(case.mismatch.want), _keys(case.mismatch.got), strict=False) if len(set(pair)) > 1
    ]
    for id, tokens, identity in _texts(case):
        right = _chain(header, identity, tokens)
        for want, got in pairs:
            if want in right and got in right:
                ends = [(right.index(key) + 1) * header.hash_block_size for key in (want, got)]
                yield f"the key of the first {ends[0]} tokens of {id} is that of its first {ends[1]}"
            for name, less, places in _less(identity) if want in right else ():
                if got in _chain(header, less, tokens, places):
                    yield f"the keys of {id} leave out {name}, so that they are those of other prefixes too"
            if want in right and "absent" not in (want, got) and not unexplained:
                end = (right.index(want) + 1) * header.hash_block_size
                covers = ", ".join(("its tokens", *dict.fromkeys(name for name, _, _ in _less(identity))))
                unexplained = f"the key of the first {end} tokens of {id} is not the hash of what it covers: {covers}"
    if unexplained:
        yield unexplained


def _keys(value: Any) -> list[str]:
    """The keys in an answer's field: one, a list of them, or the entry of a block."""
    if isinstance(value, str):
        return [value]
    return [item for item in value if isinstance(item, str)] if isinstance(value, list | tuple) else []


def _chain(header: oplog.Header, identity: PrefixIdentity, tokens: list[int], places: bool = True) -> list[str]:
    """The keys of tokens as logs show them; without the places of multimodal items, if so wanted."""
    digest, size, ahead = digest_by_name(header.hash), header.hash_block_size, header.hash_lookahead
    keys: list[bytes] = []
    for start in range(0, len(tokens) - ahead - size + 1, size):
        end = start + size
        extra = extra_keys(identity, start, end + ahead)
        if not places and extra is not None:
            extra = tuple((*part[:2], 0) if part[0] == "mm" else part for part in extra)
        extra = (extra, *tokens[end : end + ahead]) if ahead else extra
        keys.append(block_key(digest, keys[-1] if keys else None, tokens[start:end], extra))
    return [key.hex()[:SHOWN] for key in keys]


def _less(identity: PrefixIdentity) -> Iterator[tuple[str, PrefixIdentity, bool]]:
    """Identities with one part left out each, by its name, and whether keys tell the places of multimodal items."""
    change = dataclasses.replace
    if identity.lora is not None:
        yield "its adapter's path", change(identity, lora=(identity.lora[0], "")), True
        yield "its adapter", change(identity, lora=None), True
    if identity.salt:
        yield "its cache salt", change(identity, salt=None), True
    if identity.multimodal:
        yield "where in a block its multimodal items begin", identity, False
        yield "its multimodal items", change(identity, multimodal=()), True
    if identity.embeds is not None:
        yield "its prompt embeddings", change(identity, embeds=None), True
