"""A generated page of any size: requests that come, hold blocks, leave them cached, and evict those of others."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from hkv.oracle.side import CACHED, FREE, HELD


def generated(operations: int, blocks: int, held: int = 24) -> dict[str, Any]:
    """Data of one case: each operation takes two new blocks of a ring, and gives back the two taken `held` before."""
    rows = []
    for at in range(1, operations + 1):
        for place in (0, 1):
            new = (2 * at + place) % blocks
            rows.append((at, new, HELD | CACHED, at % 4, 16 * (at % 7 + 1), 1 + at % 5000, 1, 1 + (at // 9) % 4000))
            old = (2 * (at - held) + place) % blocks
            if at > held:
                key = 1 + (at - held) % 5000
                rows.append((at, old, FREE | CACHED, (at - held) % 4, 16 * ((at - held) % 7 + 1), key, 0, 0))
    table = np.array(rows, np.int32)
    table = table[np.lexsort((table[:, 1], table[:, 0]))]
    fields = ("at", "block", "status", "group", "tokens", "key", "references", "holders")
    names = [f"request-{number}" for number in range(4000)]
    subjects = [f"request-{(at // 9) % 4000}" for at in range(1, operations + 1)]
    side = {
        "name": "numpy",
        "problem": "",
        "answers": "\n".join(
            json.dumps({"blocks": [[2 * at % blocks, (2 * at + 1) % blocks]]}) for at in range(operations)
        ),
        "changes": {field: table[:, column].copy() for column, field in enumerate(fields)},
        "holders": {
            "start": np.arange(-1, 4000, dtype=np.int32).clip(0),
            "request": np.arange(4000, dtype=np.int32),
            "group": np.arange(4000, dtype=np.int32) % 4,
            "column": np.zeros(4000, np.int32),
        },
        "requests": names,
        "keys": ["", *(f"{number * 2654435761 % 2**32:08x}" for number in range(5000))],
        "looks": np.arange(operations + 1, dtype=np.int32),
        "queue": {"whole": False, **{name: np.zeros(0, np.int32) for name in ("at", "lengths", "blocks")}},
    }
    return {
        "name": "generated",
        "headline": "",
        "path": "",
        "first": 0,
        "dialect": "generated",
        "summary": f"{blocks} blocks",
        "header": {"num_blocks": blocks},
        "groups": [{"kind": "full_attention", "size": 16}] * 4,
        "pools": [{"name": "blocks", "first": 1, "size": blocks}],
        "every": 1,
        "operations": "\n".join(json.dumps({"op": "allocate", "id": id, "new": 32}) for id in subjects),
        "subjects": subjects,
        "sides": [side],
        "differing": np.zeros(0, np.int32),
        "marks": [],
        "explanations": {},
        "commands": [],
        "text": "",
    }
