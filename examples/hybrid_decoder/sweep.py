"""The same requests under many configurations: each logit must be the one of the pass without a cache.

python -m examples.hybrid_decoder.sweep                  # every two values of two factors meet in some configuration
python -m examples.hybrid_decoder.sweep --strength 3     # every three

Every configuration serves prompts A, B, A, one that leaves A's sequence in the middle of a window and of a chunk, then
more rows than its blocks can hold, with NaN in what nobody may read and shadow tags in every slot. It fails if a logit
or a tag is wrong, and also if something that it is there for did not happen.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import click
import numpy as np
from rich.console import Console
from rich.progress import track

from examples.hybrid_decoder.covering import Row, covering
from examples.hybrid_decoder.loop import COUNTS
from examples.hybrid_decoder.model import DELTA, KINDS, Model
from examples.hybrid_decoder.serving import Decoder, Request, forget_programs
from examples.hybrid_decoder.verification import allowed, difference
from hkv.cache.state import StepCounter
from hkv.errors import HKVError
from hkv.layout.orders import Order
from hkv.oracle.atomic import write_atomically

LONGEST, TARGET, ROWS = 48, 46, 3
WINDOW, LOCAL_CHUNK = 7, 12
"""No multiples of any block, so that hits fall inside; sequences are more than three times as long as either."""
VOCABULARY = 32

FACTORS: Mapping[str, Sequence[Any]] = {
    "kinds": (*KINDS, "all"),
    "block": ("2", "4", "8", "4 and 8", "2, 4 and 8"),
    "chunk": ("1", "4 + 3", "7 + 2", "16", "21 + 5"),
    "order": tuple(order.value for order in Order),
    "split": (None, 1, 2, 4),
    "sums": ("exact", "XLA"),
}
"""Kinds of layers; tokens in a block (where several, full attention and MLA have the smallest); tokens of a row in a
turn of prefill, and drafts after its own in one of decode; order of the pages' axes; tokens of the blocks that kernels
see; sums of fixed shape, or XLA's."""

LARGER = {"4 and 8": {"window": 8, "chunked": 8, DELTA: 8}, "2, 4 and 8": {"window": 4, "chunked": 8, DELTA: 4}}
"""Blocks of kinds that have larger ones than the others."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Result of one configuration.

    Attributes:
      compared: logits.
      ulps: largest difference of any, in units in the last place of the largest logit of its request.
      happened: number of times that each thing happened that has to.
      problems: what is wrong, in words; none if all is well.
      seconds: that it took, compiling included.
    """

    compared: int
    ulps: float
    happened: dict[str, int]
    problems: list[str]
    seconds: float


def model_of(row: Row) -> Model:
    """The model of a configuration: two layers of one kind, or one of each kind and one more."""
    layers = (*KINDS, "window") if row["kinds"] == "all" else (row["kinds"],) * 2
    larger = LARGER.get(row["block"], {})
    return Model(
        layers,
        window=WINDOW,
        chunk=LOCAL_CHUNK,
        head=8,
        delta_heads=1,
        vocabulary=VOCABULARY,
        longest=LONGEST,
        block=int(row["block"][0]),
        blocks=tuple(larger.items()),
        exact=row["sums"] == "exact",
    )


def why_not(row: Row) -> str | None:
    """Reason why there is no such configuration; None if there is."""
    if row["block"] in LARGER and row["kinds"] != "all":
        return "one kind has one block size"
    if row["split"] is not None and (row["kinds"] == DELTA or row["split"] >= int(row["block"][0])):
        return "nothing to split"
    try:
        model_of(row).layouts(2, row["order"], row["split"])
    except HKVError as error:
        return str(error)
    return None


def decoder_of(row: Row, blocks: int, room: int) -> Decoder:
    """A decoder of the configuration that watches itself, with `blocks` blocks and pages for `room`."""
    chunk, _, drafts = row["chunk"].partition(" + ")
    sizes = {"chunk": int(chunk), "drafts": int(drafts or 0), "order": row["order"], "kernel_block": row["split"]}
    return Decoder(model_of(row), ROWS, blocks, **sizes, room=room, keep_logits=True, audited=True)


def verify(row: Row) -> Outcome:
    """Serves the requests under one configuration, a value of each of `FACTORS`, and compares."""
    start = time.perf_counter()
    try:
        traffic = serve(row)
    except HKVError as error:
        return Outcome(0, np.inf, {}, [str(error)], time.perf_counter() - start)
    outcome = judged(traffic, dataclasses.replace(model_of(row), block=4, blocks=()))
    return dataclasses.replace(outcome, seconds=time.perf_counter() - start)


class Traffic(NamedTuple):
    """All `requests` that were served, what `happened`, `wrong` reads, and A's tokens the `first` and `last` time."""

    decoder: Decoder
    requests: list[Request]
    happened: dict[str, int]
    wrong: int
    first: list[list[int]]
    last: list[list[int]]


def serve(row: Row) -> Traffic:
    """Prompts A, B, A with what it generated, with room for all; then all at once, and A again, with room for fewer."""
    draw = np.random.default_rng(1)
    first, second = ([draw.integers(0, VOCABULARY, size).tolist() for size in sizes] for sizes in ((9, 15), (11,)))
    model = model_of(row)
    room = 1 + 5 * len(model.kinds) * -(-LONGEST // model.block)
    roomy = decoder_of(row, room, room)
    whole = _served(roomy, [[*first[0][:3], *first[1]]], TARGET)
    peak = int(roomy.carry.most[0])
    once, other = (_served(roomy, prompts, 24) for prompts in (first, second))
    again = _served(roomy, [request.tokens[:20] for request in once], 24)
    inside = _served(roomy, [[*once[1].tokens[:22], 1, 2]], 30)

    tight = decoder_of(row, 1 + peak + peak // 2, room)
    waiting = [Request(list(request.tokens), TARGET) for request in (*once, *other)]
    preempted = tight.serve(waiting)
    late = _served(tight, first, 24)

    counts = dict(zip(COUNTS, np.sum([roomy.carry.counts, tight.carry.counts], axis=0).tolist(), strict=True))
    [[hit]] = [request.hits for request in inside]
    happened = {
        "A found after B": min(request.hits[0] for request in again),
        "hit inside a window and a chunk": hit if hit > WINDOW and hit % WINDOW and hit % LOCAL_CHUNK else 0,
        "evictions": int(tight.carry.cache.counters[StepCounter.EVICTIONS]),
        "refusals": counts["refused"],
        "preemptions": preempted,
        "returns": sum(len(request.hits) > 1 for request in waiting),
    }
    if roomy.plan.drafts:
        happened |= {"drafts kept": counts["accepted"], "drafts rejected": counts["drafted"] - counts["accepted"]}
    requests = [*whole, *once, *other, *again, *inside, *waiting, *late]
    tokens = ([request.tokens for request in of] for of in (once, late))
    return Traffic(roomy, requests, happened, counts["wrong"], *tokens)


def judged(traffic: Traffic, judge: Model) -> Outcome:
    """Judgement of what was served by a model's pass without a cache, which knows no blocks."""
    weights, exact = traffic.decoder.weights, traffic.decoder.model.exact
    ulps = max(difference(judge, weights, request) for request in traffic.requests)
    problems = [f"no {name}" for name, times in traffic.happened.items() if times <= 0]
    if ulps > allowed(traffic.decoder.model):
        problems.append(f"a logit differs by {ulps:.3g} ulps")
    if traffic.wrong:
        problems.append(f"{traffic.wrong} reads of a wrong slot")
    if exact and traffic.first != traffic.last:
        problems.append("the same prompts gave other tokens")
    compared = VOCABULARY * sum(len(request.tokens) - 1 - min(request.hits) for request in traffic.requests)
    return Outcome(compared, ulps, traffic.happened, problems, 0.0)


def _served(decoder: Decoder, prompts: list[list[int]], target: int) -> list[Request]:
    requests = [Request(list(prompt), target) for prompt in prompts]
    decoder.serve(requests)
    return requests


def parsed(only: Sequence[str]) -> Mapping[str, Sequence[Any]]:
    """The factors, with those that `NAME=VALUE` names cut down to that value."""
    factors = dict(FACTORS)
    for text in only:
        name, _, value = text.partition("=")
        if name not in factors:
            raise click.UsageError(f"--only {text}: a factor of {', '.join(factors)} was expected before '='")
        by_text = {str(one): one for one in FACTORS[name]}
        if value not in by_text:
            raise click.UsageError(f"--only {text}: one of {'; '.join(by_text)} was expected")
        factors[name] = (by_text[value],)
    return factors


@click.command()
@click.option(
    "--strength", default=2, show_default=True, type=click.IntRange(1, len(FACTORS)), help="Factors that meet."
)
@click.option("--only", multiple=True, help="FACTOR=VALUE; may be given for several factors.")
@click.option("--json", "json_path", help="Write what came of every configuration there.")
def main(strength: int, only: tuple[str, ...], json_path: str | None) -> None:
    """Compares the decoder with its pass without a cache, under configurations that cover every pairing.

    Says at once which configuration failed and how to run it alone; exits with 1 if any did.
    """
    factors = parsed(only)
    rows = covering(factors, strength, lambda row: why_not(row) is None)
    if not rows:
        raise click.UsageError(f"--only {' '.join(only)}: there is no such configuration")
    outcomes = []
    for row in track(rows, "configurations", console=Console(stderr=True)):
        outcomes.append(verify(row))
        forget_programs()
        if outcomes[-1].problems:
            alone = " ".join(f"--only {shlex.quote(f'{name}={value}')}" for name, value in row.items())
            click.echo(f"{alone}: {'; '.join(outcomes[-1].problems)}")
    found = summary(rows, outcomes, strength)
    click.echo(
        f"{len(rows)} configurations, in which every {strength} factors take every values they can together; "
        f"{found['compared']:,} logits compared; {found['failed']} failed"
    )
    for sums, ulps in found["ulps"].items():
        click.echo(f"largest difference, {sums} sums: {ulps:.3g} ulps")
    if json_path:
        try:
            write_atomically(json_path, json.dumps({"factors": dict(factors), **found}, indent=2).encode())
        except HKVError as error:
            raise click.UsageError(str(error)) from error
    sys.exit(1 if found["failed"] else 0)


def summary(rows: Sequence[Row], outcomes: Sequence[Outcome], strength: int) -> dict[str, Any]:
    """Results of all configurations, as data."""
    worst: dict[str, float] = {}
    for row, outcome in zip(rows, outcomes, strict=True):
        worst[row["sums"]] = max(worst.get(row["sums"], 0.0), outcome.ulps)
    return {
        "strength": strength,
        "compared": sum(outcome.compared for outcome in outcomes),
        "failed": sum(bool(outcome.problems) for outcome in outcomes),
        "ulps": worst,
        "configurations": [{**row, **dataclasses.asdict(outcome)} for row, outcome in zip(rows, outcomes, strict=True)],
    }


if __name__ == "__main__":
    main()
