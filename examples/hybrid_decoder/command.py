"""The command: serves random prompts, and others that begin alike, then says what the cache did."""

from __future__ import annotations

import dataclasses
import json
import time

import click
import numpy as np

from examples.hybrid_decoder.model import KINDS, Model
from examples.hybrid_decoder.report import draw, figures, lines
from examples.hybrid_decoder.serving import Decoder, Request
from examples.hybrid_decoder.verification import allowed, difference
from hkv.errors import HKVError
from hkv.oracle.atomic import write_atomically


def prompts_of(model: Model, count: int, length: int, draw: np.random.Generator) -> list[list[int]]:
    """Prompts of which every second one begins like the one before it."""
    found: list[list[int]] = []
    for index in range(count):
        prompt = draw.integers(0, model.vocabulary, length).tolist()
        if index % 2:
            shared = int(draw.integers(length // 2, length))
            prompt[:shared] = found[-1][:shared]
        found.append(prompt)
    return found


@click.command()
@click.option("--rows", default=4, show_default=True, help="Requests at the same time.")
@click.option("--requests", "count", default=12, show_default=True, help="Requests in all; they come twice.")
@click.option("--prompt", default=40, show_default=True, help="Tokens of a prompt.")
@click.option("--new", default=56, show_default=True, help="Tokens to generate for each.")
@click.option("--blocks", default=400, show_default=True, help="Blocks in the pool.")
@click.option("--block", default=4, show_default=True, help="Tokens in a block.")
@click.option("--window", default=8, show_default=True, help="Tokens of a sliding window.")
@click.option("--local-chunk", default=8, show_default=True, help="Tokens of a chunk of local attention.")
@click.option("--layers", default=",".join(Model().layers), show_default=True, help=f"Kinds: {', '.join(KINDS)}.")
@click.option("--chunk", default=16, show_default=True, help="Tokens of a row in a turn of prefill.")
@click.option("--drafts", default=3, show_default=True, help="Tokens guessed in a turn of decode.")
@click.option("--order", default="LBNHC", show_default=True, help="Order of the pages' axes.")
@click.option("--kernel-block", type=int, help="Tokens of the blocks that kernels see.")
@click.option("--exact", is_flag=True, help="Sums whose order does not depend on chunks: logits are equal to the bit.")
@click.option("--audit", is_flag=True, help="Shadow tags, and NaN in what is freed, inside the loop.")
@click.option(
    "--verify", is_flag=True, help="Compare every logit with the pass without a cache; exit with 1 if one is wrong."
)
@click.option("--seed", default=0, show_default=True, help="Of weights and prompts.")
@click.option("--json", "json_path", help="Write the figures there.")
@click.option("--plot", help="Draw them there, as .png or .svg.")
def main(
    rows: int,
    count: int,
    prompt: int,
    new: int,
    blocks: int,
    block: int,
    window: int,
    local_chunk: int,
    layers: str,
    chunk: int,
    drafts: int,
    order: str,
    kernel_block: int | None,
    exact: bool,
    audit: bool,
    verify: bool,
    seed: int,
    json_path: str | None,
    plot: str | None,
) -> None:
    """Serves prompts with a hybrid cache that lives inside `jit`, and says how fast, what was found, what was held.

    All requests come twice, in the same order: the second time they find what is left of the first.
    """
    numbers = {"rows": rows, "requests": count, "prompt": prompt, "new": new, "window": window, "chunk": chunk}
    for name, value in {**numbers, "blocks": blocks, "block": block, "local-chunk": local_chunk}.items():
        if value < 1:
            raise click.UsageError(f"--{name} {value}: a positive number was expected")
    unknown = set(layers.split(",")) - set(KINDS)
    if unknown:
        raise click.UsageError(f"--layers {','.join(sorted(unknown))}: {', '.join(KINDS)} were expected")
    if plot and not plot.endswith((".png", ".svg")):
        raise click.UsageError(f"--plot {plot}: a name ending in .png or .svg was expected")
    kinds = tuple(layers.split(","))
    model = Model(kinds, window=window, chunk=local_chunk, block=block, longest=prompt + new, exact=exact)
    try:
        sizes = {"chunk": chunk, "drafts": drafts, "order": order, "kernel_block": kernel_block}
        decoder = Decoder(model, rows, blocks, **sizes, keep_logits=verify, audited=audit, seed=seed)
        found = served(decoder, prompts_of(model, count, prompt, np.random.default_rng(seed)), verify)
        for line in lines(found, audit):
            click.echo(line)
        if json_path:
            write_atomically(json_path, json.dumps({"model": dataclasses.asdict(model), **found}, indent=2).encode())
        if plot:
            draw(found, plot)
    except HKVError as error:
        raise click.UsageError(str(error)) from error
    if found["wrong"] or found.get("largest_difference_ulps", 0) > allowed(model):
        raise click.ClickException("the cache is wrong: see above")


def served(decoder: Decoder, prompts: list[list[int]], verify: bool) -> dict:
    """Serves the prompts twice, after compiling. Returns the figures."""
    start = time.perf_counter()
    for decoding in (False, True):
        decoder.program(decoding)
    decoder.arrive({})
    decoder.finish([])
    compiling, start = time.perf_counter() - start, time.perf_counter()
    requests = [Request(list(prompt), decoder.model.longest) for _ in range(2) for prompt in prompts]
    preempted = decoder.serve(requests)
    found = figures(decoder, time.perf_counter() - start, compiling) | {"preempted": preempted}
    if verify:
        found["largest_difference_ulps"] = max(difference(decoder.model, decoder.weights, one) for one in requests)
    return found
