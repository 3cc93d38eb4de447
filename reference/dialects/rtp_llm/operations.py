"""Operations: calls of RTP-LLM's allocator as records, in order."""

from __future__ import annotations

from reference.dialects.rtp_llm.allocating import allocate
from reference.dialects.rtp_llm.cache import insert
from reference.dialects.rtp_llm.evicting import evict, tell
from reference.dialects.rtp_llm.forking import fork
from reference.dialects.rtp_llm.peaks import peak
from reference.dialects.rtp_llm.pools import refer, release
from reference.dialects.rtp_llm.records import Cache, Code, Operation, Request, Result, Role, Status, current
from reference.language import Text, clause

TEXT = Text(__name__)


def perform_all(c: Cache, count: int) -> None:
    """The first `count` operations."""
    for n in range(1, count + 1):
        perform_at(c, n, c.operations[n].code)


def perform_at(c: Cache, n: int, code: int) -> None:
    """The operation of a record, whose code may be known."""
    op, result = c.operations[n], c.results[n]
    c.asked += 1
    result.value, result.first, result.count = 0, c.said, 0
    dropped = c.dropped
    status = perform(c, op, result, code)
    result.status = Status.NOT_HELD if status == Status.OK and c.dropped > dropped else status


def perform(c: Cache, op: Operation, result: Result, code: int) -> int:
    """One operation; its `Status`. What is refused changes nothing but what made room for it, and the order of use."""
    slotless = code in (Code.RELEASE, Code.EXPORT, Code.EVICT)
    if code < Code.REQUEST or code > Code.PEAK:
        return Status.UNKNOWN
    if not slotless and (op.slot < 0 or op.slot >= c.config.slots):
        return Status.NO_SUCH_SLOT
    request = c.requests[1 if slotless else op.slot + 1]
    if not slotless and bool(request.live) == (code == Code.REQUEST):
        return Status.NOT_EMPTY if code == Code.REQUEST else Status.NO_SUCH_SLOT
    longest = 0 if slotless or code == Code.REQUEST else current(c, request)
    status = Status.OK if slotless else refusal(c, op, request, code, longest)
    if status != Status.OK:
        return status
    if code == Code.REQUEST:
        arrive(c, op, request)
    if code == Code.APPEND:
        lengthen(c, op, request)
    if code in (Code.REQUEST, Code.FREE) or (code == Code.APPEND and longest == 0):
        clause("forget-keys", "KVCacheManager::free", "no key is in use: a request that comes, or comes again, is new")
        for r in range(request.batch):
            request.rows[r].count, request.rows[r].aligned = 0, 1
    if code in (Code.MALLOC, Code.FREE):
        status = allocate(c, request, op, result, longest == 0, code == Code.FREE)
    if code == Code.INSERT:
        insert(c, request, op.resident)
    if code == Code.FORK:
        status = fork(c, request, op, result)
    if code == Code.DROP:
        for r in range(request.batch):
            request.rows[r].next = c.vacant
            c.vacant = request.rows[r]
        request.live = 0
    if code == Code.HOLD:
        hold(c, op, request, result)
    if code == Code.RELEASE:
        give_back(c, op)
    if code in (Code.EXPORT, Code.EVICT):
        evictions = c.evictions
        evict(c, None, op.least, code == Code.EXPORT)  # type: ignore[arg-type]
        result.value = c.evictions - evictions
        if code == Code.EVICT:
            clause("evict-asked", "SharedBlockCache::evictAndFree", "blocks are evicted as asked for")
        else:
            clause("export", "KVCacheAllocator::popBlocksFromCache", "what leaves is told, and keeps its references")
            result.count = (c.said - result.first) // c.config.groups
    if code == Code.PEAK:
        result.value = peak(c, request, op, longest == 0)
    return status


def refusal(c: Cache, op: Operation, request: Request, code: int, longest: int) -> int:
    """The status that refuses an operation on a request before anything happens, or OK."""
    if code == Code.REQUEST:
        if op.tokens < 1 or op.reserve < 0:
            return Status.BAD_LENGTH
        if op.sequences < 1 or op.sequences > c.config.batch:
            return Status.NO_SUCH_SEQUENCE
        if op.count != op.tokens // c.config.block:
            return Status.BAD_COUNT
    if code == Code.APPEND:
        if op.tokens < 0:
            return Status.BAD_LENGTH
        if op.count != request.batch * ((request.tokens + op.tokens) // c.config.block - request.whole):
            return Status.BAD_COUNT
    if code == Code.MALLOC and op.length < 0:
        return Status.BAD_LENGTH
    if code == Code.INSERT and longest == 0:
        return Status.HAS_NONE
    if code == Code.DROP and longest > 0:
        return Status.HAS_BLOCKS
    if code == Code.HOLD and (op.sequence < 0 or op.sequence >= request.batch):
        return Status.NO_SUCH_SEQUENCE
    if code == Code.FORK:
        if op.count > c.config.batch:
            return Status.BAD_COUNT
        for n in range(op.count):
            source = c.numbers[op.start + n]
            if source < 0 or source >= request.batch:
                return Status.NO_SUCH_SEQUENCE
    return Status.OK


def arrive(c: Cache, op: Operation, request: Request) -> None:
    """A request comes, of several equal sequences."""
    clause("arrive", "BatchKVCacheResource::resetBatchSize")
    request.live, request.batch, request.tokens, request.reserve = 1, op.sequences, op.tokens, op.reserve
    request.whole, request.common = op.count, op.tokens
    if op.sequences > 1:
        request.common = op.tokens // c.config.block * c.config.block
    for r in range(op.sequences):
        row = c.vacant
        c.vacant = row.next
        request.rows[r] = row
        for g in range(c.config.groups):
            row.groups[g].length = 0
        for n in range(op.count):
            row.keys[n] = c.payload[op.start + n]


def lengthen(c: Cache, op: Operation, request: Request) -> None:
    """Each sequence gets more tokens; the keys of blocks that they fill, sequence after sequence."""
    clause("append", "CompleteTokenIds::update")
    request.tokens += op.tokens
    if request.batch == 1:
        request.common = request.tokens
    more = request.tokens // c.config.block - request.whole
    for r in range(request.batch):
        for n in range(more):
            request.rows[r].keys[request.whole + n] = c.payload[op.start + r * more + n]
    request.whole += more


def hold(c: Cache, op: Operation, request: Request, result: Result) -> None:
    """References to the blocks of a sequence that have keys, for as long as somebody copies them; the keys' places are
    told, and nothing if there is no block. A connector gets the key of a partly filled block as a mark."""
    row = request.rows[op.sequence]
    if op.role == Role.CONNECTOR:
        clause("hold-for-connector", "KVCacheAllocator::incrKVCacheRef", "a connector holds blocks")
    else:
        clause("hold-for-request", "KVCacheAllocator::incrKVCacheRef", "blocks are held a second time for requests")
    marks = op.role == Role.CONNECTOR and not row.aligned
    for at in range(row.count):
        found = 0
        for g in range(c.config.groups):
            block = row.groups[g].blocks[at] if at < row.groups[g].length else 0
            found += block > 0
            refer(c, c.groups[g + 1].pool, block, op.role)
        tail = at >= row.groups[0].length if c.config.single else result.count > 0 and at == row.count - 1
        if found > 0 or (marks and tail):
            result.count += 1
            tell(c, at)
        result.value += found


def give_back(c: Cache, op: Operation) -> None:
    """Blocks, as group and block in turn, give a reference of a role back; of exported ones each but once, however
    often it is named."""
    clause("give-back", "KVCacheAllocator::decrKVCacheRef")
    for n in range(op.count // 2):
        pool, block = c.groups[c.numbers[op.start + 2 * n] + 1].pool, c.numbers[op.start + 2 * n + 1]
        held = c.blocks[pool.first + block]
        again = op.role == Role.CACHE and held.settled == c.asked
        held.settled = c.asked
        release(c, pool, 0 if again else block, op.role)
