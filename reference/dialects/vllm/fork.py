"""Forking: a request is started from a running one, in the middle of its life, and shares what both will only read.

No engine's rule, but what block tables are for. The new request has the tokens, prefix keys and computed tokens of the
other. It shares every block that is full, and gets its own copy of the last one if that is still being written. Copies
are for the caller to make, before either request writes.
"""

from __future__ import annotations

import copy

from hkv.errors import OperationError
from reference.dialects.vllm.kinds.kind import Kind
from reference.dialects.vllm.manager import Manager
from reference.dialects.vllm.request import Grant
from reference.state.pool import NULL


def fork(manager: Manager, parent: str, child: str) -> list[list[tuple[int, int]]] | None:
    """Starts `child` from `parent`.

    Args:
      manager: the cache.
      parent: a running request.
      child: a name that no request has.

    Returns:
      For each group the copies to make, (source, target); None when it is refused, because a block that would be shared
      or copied is not there, or too few are free for the copies. Then nothing has changed.

    Raises:
      OperationError: `parent` does not run, or `child` exists.
    """
    request = manager.requests.get(parent)
    if request is None or not request.running:
        raise OperationError("parent", parent, "a running request")
    if child in manager.requests:
        raise OperationError("child", child, "a name that no request has")
    computed = request.num_computed
    kinds = manager.cache.kinds
    if any(_missing(kind, parent, computed) for kind in kinds):
        return None
    if sum(_spans(kind, parent, computed)[1] for kind in kinds) > len(manager.pool.free):
        return None
    copies = [_share(kind, parent, child, computed) for kind in kinds]
    started = copy.deepcopy(request)
    started.id = child
    started.num_granted = computed
    started.grant = None
    manager.note_grant(started, Grant(computed, joined=True))
    manager.requests[child] = started
    return copies


def _spans(kind: Kind, parent: str, computed: int) -> tuple[int, int]:
    """Numbers of columns of a row that are shared, and that are copied after them: none or one."""
    if kind.spec.encoder_tokens:
        return len(kind.row(parent).blocks), 0
    if kind.spec.one_block:
        return 0, 1
    return computed // kind.block_size, int(computed % kind.block_size > 0)


def _missing(kind: Kind, parent: str, computed: int) -> bool:
    """True if a block is not there that the next token reads."""
    row = kind.rows.get(parent)
    blocks = [] if row is None else row.blocks
    needed = sum(_spans(kind, parent, computed))
    skipped = range(needed - 1) if kind.spec.keeps_states else kind.skipped(computed)
    return len(blocks) < needed or any(blocks[column] == NULL for column in range(needed) if column not in skipped)


def _share(kind: Kind, parent: str, child: str, computed: int) -> list[tuple[int, int]]:
    shared, copied = _spans(kind, parent, computed)
    blocks = kind.row(parent).blocks
    row = kind.row(child)
    fresh = kind.pool.take(copied, kind.group)
    row.blocks = blocks[:shared] + fresh
    kind.pool.touch(blocks[:shared])
    row.registered = shared
    return list(zip(blocks[shared : shared + copied], fresh, strict=True))
