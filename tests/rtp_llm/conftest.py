"""Fixtures that several tests of RTP-LLM's rules use."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest


@pytest.fixture
def trace(tmp_path: pathlib.Path) -> Any:
    """Writes requests of `(step, hash_ids, tokens, output)`; an id stands for 4 tokens."""

    def write(*requests: tuple[int, list[int], int, int]) -> str:
        lines = [
            {"timestamp": 50 * step, "input_length": tokens, "output_length": output, "hash_ids": ids}
            for step, ids, tokens, output in requests
        ]
        path = tmp_path / "trace.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return str(path)

    return write
