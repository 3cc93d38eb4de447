"""Recorded checkpoints, engines that serve them, and what is checked of every request."""

from __future__ import annotations

import functools
import pathlib

import numpy as np

from examples.serve.engine import Engine, Request

CHECKPOINTS = pathlib.Path(__file__).resolve().parents[2] / "data" / "serve"
NEW = 20


@functools.cache
def expected(family):
    """Prompts, and for each the whole text and its logits, as `python -m examples.serve.record` wrote them."""
    with np.load(CHECKPOINTS / family / "expected.npz") as found:
        texts = [row[: length + NEW].tolist() for row, length in zip(found["tokens"], found["prompts"], strict=True)]
        return found["prompts"].tolist(), texts, found["logits"]


def engine(family, blocks=400, devices=1, **options):
    """An engine whose cache has so many blocks, of four tokens or as recurrent layers ask for."""
    memory = blocks * block_bytes(family, devices)
    return Engine(CHECKPOINTS / family, memory, longest=64, block_size=4, devices=devices, **options)


@functools.cache
def block_bytes(family, devices):
    made = Engine(CHECKPOINTS / family, 1 << 22, longest=64, block_size=4, devices=devices)
    return made.plan.served.plan.workers[0].bytes_per_block


def served(made, family, prompts):
    """The requests, served, whose tokens and logits are as expected."""
    lengths, texts, logits = expected(family)
    requests = [Request(texts[prompt][: lengths[prompt]], NEW) for prompt in prompts]
    made.serve(requests)
    for prompt, request in zip(prompts, requests, strict=True):
        assert request.tokens == texts[prompt], prompt
        computed = sorted(request.logits)
        assert computed[-1] == len(texts[prompt]) - 2
        assert set(range(request.hits[-1], computed[-1] + 1)) <= set(computed)
        for position in computed:
            # float32 sums differ by the machine's vectors, in proportion to the largest: by 1.2e-4 of 5.6 on one CPU.
            right = logits[prompt, position]
            np.testing.assert_allclose(request.logits[position], right, rtol=0, atol=1e-4 * np.abs(right).max())
    return requests
