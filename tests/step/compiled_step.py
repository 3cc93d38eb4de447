"""A step of a pool of some size, and the copies in what it is compiled to."""

from __future__ import annotations

import re

import numpy as np

from hkv.cache import step as serving
from hkv.cache.state import StepBatch
from tests.reference.build import config as build

ROWS, WIDTH, BLOCKS = 8, 96, 5000
LARGE = {"5000", "8192", "32768", f"{ROWS},3,{WIDTH}", f"{ROWS},192"}
"""Beginnings of the shapes of the pool's arrays, the queue, the index, the rows and the chains."""


def batch(tokens: int) -> StepBatch:
    """`tokens` places for each row, of which each takes one."""
    zeros, up = np.zeros(ROWS, np.int32), np.arange(ROWS + 1, dtype=np.int32)
    return StepBatch(np.ones(ROWS * tokens, np.int32), up, up[:-1], zeros, zeros)


def made(groups: str = "full:16,swa:16:64,mamba:32"):
    config = build(groups, num_blocks=BLOCKS, max_model_len=4096)
    return config, *serving.init(config, rows=ROWS, row=WIDTH)


def copies(text: str) -> list[str]:
    found = re.findall(r"= \w+\[([\d,]+)\]\S* copy\((.*)\)", text)
    return [f"{shape}: {what}" for shape, what in found if any(shape.startswith(large) for large in LARGE)]
