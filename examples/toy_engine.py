"""A complete engine of one full-attention group with prefix caching: what `hkv check` and `hkv diff` need, no more.

Example: hkv diff --engines examples/toy_engine.py:ToyEngine,numpy --kinds full_attention --max-groups 1 --version 1
"""

from hkv.dialects.vllm import Allocation, CacheEvent, CacheState, Hit
from hkv.errors import UnsupportedConfigError
from hkv.keys.chained import KeyChain, sha256_cbor


class Request:
    """Tokens, their keys (one a full block), and the blocks that hold them; no blocks: it waits."""

    def __init__(self, tokens, block_size):
        self.tokens, self.chain = [], KeyChain(sha256_cbor, block_size)
        self.blocks, self.registered, self.computed = [], None, 0
        self.append(tokens)

    def append(self, tokens):
        """More tokens, and the keys that become possible."""
        self.tokens += tokens
        self.chain.extend(self.tokens)


class ToyEngine:
    """Implements `hkv.dialects.vllm.Engine` under the rules of vLLM 0.33."""

    def __init__(self, header):
        kinds = [group["kind"] for group in header.groups]
        if kinds != ["full_attention"] or header.eagle or header.hash_lookahead or header.oplog != 1:
            raise UnsupportedConfigError("groups", kinds, "one full-attention group, no EAGLE, version 1")
        self.size, self.limit, self.caching = header.hash_block_size, header.max_model_len, header.caching
        self.free_queue = list(range(1, header.num_blocks))  # block 0 is the null block
        self.num_blocks, self.refs, self.keys, self.log = header.num_blocks, {}, {}, []
        self.requests = {}

    def step(self):
        """Nothing depends on steps here."""

    def request(self, id, tokens, extra):
        self.requests[id] = Request(tokens, self.size)

    def append(self, id, tokens):
        self.requests[id].append(tokens)

    def advance(self, id, tokens):
        self.requests[id].computed += tokens

    def drop(self, id):
        del self.requests[id]

    def find(self, key):
        """The block that was registered first under a key; `keys` is in that order."""
        return next((block for block, known in self.keys.items() if known[0] == key), None)

    def hit_blocks(self, request):
        """The longest known prefix. The last token is always computed again."""
        blocks = []
        for key in request.chain.keys[: (len(request.tokens) - 1) // self.size]:
            if (block := self.find(key)) is None:
                break
            blocks.append(block)
        return blocks

    def lookup(self, id):
        blocks = self.hit_blocks(self.requests[id])
        return Hit(len(blocks) * self.size, [blocks], 0)

    def cost(self, request, tokens, hit):
        """Blocks that leave the free queue when a request gets room for `tokens` tokens."""
        new = -(-tokens // self.size) - len(request.blocks) - len(hit)
        return max(new, 0) + sum(block not in self.refs for block in hit)

    def allocate(self, op):
        request = self.requests[op.id]
        hit = self.hit_blocks(request) if op.hit else []
        end = request.computed + op.hit + op.external + op.new
        slots = min(end + op.lookahead, self.limit)
        too_long = op.must_fit and self.cost(request, len(request.tokens), hit) > len(self.free_queue)
        if too_long or self.cost(request, slots, hit) > len(self.free_queue) - op.reserved:
            return Allocation(None)
        for block in hit:
            if block not in self.refs:
                self.free_queue.remove(block)
            self.refs[block] = self.refs.get(block, 0) + 1
        if hit or op.external:
            request.blocks, request.registered = list(hit), len(hit)
            self.grow(request, end - op.new)
        new = self.grow(request, slots)
        if not op.delay:
            self.register(request, min(end, len(request.tokens)))
        return Allocation([new])

    def grow(self, request, tokens):
        """Takes blocks from the front of the queue; a block that is handed out loses its key."""
        new = [self.free_queue.pop(0) for _ in range(-(-tokens // self.size) - len(request.blocks))]
        self.evict(new)
        self.refs.update(dict.fromkeys(new, 1))
        request.blocks += new
        return new

    def register(self, request, tokens):
        done, full = request.registered or 0, min(tokens // self.size, len(request.chain.keys))
        if self.caching and done < full:
            for column in range(done, full):
                self.keys[request.blocks[column]] = request.chain.keys[column], (column + 1) * self.size
            request.registered = full
            tokens = request.tokens[done * self.size : full * self.size]
            self.log.append(
                CacheEvent(type="stored", group=0, num_blocks=full - done, block_size=self.size, tokens=tokens)
            )

    def commit(self, id, tokens):
        self.register(self.requests[id], tokens)

    def free(self, id):
        request = self.requests[id]
        released = []
        for block in reversed(request.blocks):
            self.refs[block] -= 1
            if self.refs[block] == 0:
                del self.refs[block]
                released.append(block)
        front = [block for block in released if block not in self.keys]  # no lookup can find them: first to be reused
        self.free_queue = [*front, *self.free_queue, *(block for block in released if block in self.keys)]
        request.blocks, request.registered, request.computed = [], None, 0

    def evict(self, blocks):
        for block in blocks:
            if self.keys.pop(block, None):
                self.log.append(CacheEvent(type="removed", group=0, num_blocks=1))

    def copies(self):
        return []

    def reset(self):
        if not self.refs:
            self.keys.clear()
        return not self.refs

    def events(self):
        log, self.log = self.log, []
        return log

    def state(self):
        return CacheState(
            free=list(self.free_queue),
            refs={str(block): count for block, count in self.refs.items()},
            rows={id: [request.blocks] for id, request in self.requests.items() if request.blocks},
            cached={str(block): (0, tokens, key[:8].hex()) for block, (key, tokens) in self.keys.items()},
        )
