"""Forks: the sequences of a request, beams or samples, become copies of one another.

The last use of a sequence keeps its blocks, the earlier ones share them, but for the last block, of which each gets a
copy of its own. Sequences that are not continued give their blocks back.
"""

from __future__ import annotations

from reference.dialects.rtp_llm.evicting import tell
from reference.dialects.rtp_llm.lists import Sweep, append, extend, sweep
from reference.dialects.rtp_llm.pools import release
from reference.dialects.rtp_llm.records import Cache, Operation, Request, Result, Role, Sequence, Status
from reference.language import Text, clause

TEXT = Text(__name__)


def fork(c: Cache, request: Request, op: Operation, result: Result) -> int:
    """The sequences of a request become those that an operation's numbers name; what to copy is told, group, source and
    target in turn; a status.

    Of several groups it is all or nothing. One full group frees what is not continued first: if it then finds no
    blocks, those sequences stay empty.
    """
    clause("fork", "KVCacheAllocator::updateKVBlock")
    if op.count == 0:
        return Status.OK
    for r in range(request.batch):
        request.rows[r].uses = 0
    for n in range(op.count):
        request.rows[c.numbers[op.start + n]].uses += 1
    for turn in range(2):
        if (turn == 0) == bool(c.config.single):
            drop_unused(c, request)
        elif op.copy and not take_targets(c, request):
            clause("fork-refused", "KVCacheAllocator::updateKVBlock", "a fork finds no blocks for its copies")
            return Status.NO_BLOCKS
    for r in range(request.batch):
        request.rows[r].left = request.rows[r].uses
    for n in range(op.count):
        original = request.rows[c.numbers[op.start + n]]
        original.left -= 1
        row = original
        if original.left > 0:
            row = c.vacant
            c.vacant = row.next
            copy(c, request, op, result, original, row)
        request.made[n] = row
    for r in range(request.batch):
        row = request.rows[r]
        if row.uses == 0:
            row.next = c.vacant
            c.vacant = row
    for n in range(op.count):
        request.rows[n] = request.made[n]
    request.batch = op.count
    return Status.OK


def drop_unused(c: Cache, request: Request) -> None:
    """Sequences that are not continued give their blocks back, but for those that go to others."""
    for n in range(request.batch * c.config.groups):
        row, g = request.rows[n // c.config.groups], n % c.config.groups
        if row.uses == 0:
            sweep(c, c.groups[g + 1], row.groups[g], Sweep.DROP, 0, 0, 0)


def take_targets(c: Cache, request: Request) -> bool:
    """Blocks for copies of last ones, or none: those of sequences that are not continued first, then fresh ones."""
    for g in range(c.config.groups):
        group, targets, wanted = c.groups[g + 1], c.targets.groups[g], 0
        targets.length = 0
        for r in range(request.batch):
            if request.rows[r].groups[g].length > 0:
                wanted += max(request.rows[r].uses - 1, 0)
        for r in range(request.batch):
            row = request.rows[r]
            ids = row.groups[g]
            if not c.config.single and row.uses == 0 and ids.length > 0 and targets.length < wanted:
                last = ids.blocks[ids.length - 1]
                if last > 0 and count_of(request, g, last) == 1:
                    clause("recycle", "HybridTypeKVCacheAllocator::updateKVBlock", "a copy goes into a dropped block")
                    ids.given, targets.blocks[targets.length] = c.asked, last
                    targets.length += 1
        targets.given = targets.length
        while targets.length < wanted:
            end = wanted if c.config.single else targets.length + 1
            if extend(c, group, targets, 0, end, 1, 0) != Status.OK:
                for each in range(g + 1):
                    taken = c.targets.groups[each]
                    for at in range(taken.given, taken.length):
                        release(c, c.groups[each + 1].pool, taken.blocks[at], Role.REQUEST)
                return False
        targets.before = 0
    return True


def count_of(request: Request, g: int, block: int) -> int:
    """Number of times that a request's sequences have a block in a group."""
    count = 0
    for r in range(request.batch):
        ids = request.rows[r].groups[g]
        for at in range(ids.length):
            count += ids.blocks[at] == block
    return count


def copy(c: Cache, request: Request, op: Operation, result: Result, original: Sequence, row: Sequence) -> None:
    """Makes a sequence that has another's keys and shares its blocks, but for copies of the last ones."""
    row.count, row.aligned, row.uses = original.count, original.aligned, 1
    if c.defects.fork_forgets_alignment:
        clause("fork-forgets-alignment", "KVCacheAllocator::updateKVBlock", "defect: a fork takes whole keys for parts")
        row.aligned = 0
    for at in range(request.whole):
        row.keys[at] = original.keys[at]
    for g in range(c.config.groups):
        group, ids, targets, source = c.groups[g + 1], row.groups[g], c.targets.groups[g], original.groups[g]
        copies = op.copy and source.length > 0
        ids.length = 0
        append(c, group, ids, source, source.length - 1 if copies else source.length)
        if copies:
            old, new = source.blocks[source.length - 1], targets.blocks[targets.before]
            targets.before += 1
            ids.blocks[ids.length] = new
            ids.length += 1
            if old > 0:
                clause("copy-last", "KVCacheAllocator::updateKVBlock", "a sequence gets a copy of the last block")
                result.count += 1
                for number in (g, old, new):
                    tell(c, number)
