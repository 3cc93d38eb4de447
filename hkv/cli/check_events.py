"""`hkv check-events`: what routers are told about a cache, checked as it comes."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import click

from hkv.cli.options import command_of, refuse_given
from hkv.cli.output_option import STANDARD_OUTPUT, OutputPath, Reported, console, table, talks, write_json, write_output
from hkv.cli.progress import interruption
from hkv.contract.events import EventError, KeyIndex, Problem, decode_batch
from hkv.contract.options import COUNT, Number, argument, option
from hkv.errors import ConfigError
from hkv.files import OutputFile
from hkv.limits import MAX_SECONDS, counted
from hkv.oracle.events import (
    Gap,
    Item,
    Malformed,
    Message,
    Reconnection,
    Restart,
    Subscription,
    read_recording,
    recorded_line,
)

SHOWN = 20
"""Problems that are printed; `--json` has all."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _CheckEventsOptions(Reported):
    recording: str | None = argument(required=False, metavar="[FILE]", type=click.Path())
    endpoint: str | None = option(metavar="URL", help="Follow this publisher, such as tcp://127.0.0.1:5557.")
    replay_endpoint: str | None = option(metavar="URL", help="Where batches that were missed can be asked for.")
    topic: str = option("", help="Only messages whose topic begins so.")
    seconds: float | None = option(type=Number(0, MAX_SECONDS), help="Follow for so long. [default: until Ctrl-C]")
    batches: int | None = option(type=COUNT, help="Stop after so many batches.")
    record: str | None = option(
        metavar="FILE", type=OutputPath(), help="Write what comes to this file; - for standard output."
    )


@command_of("check-events", _CheckEventsOptions)
def command(given: _CheckEventsOptions) -> int | None:
    """Check KV events as vLLM publishes them, from a publisher or from a FILE that --record wrote.

    Rebuilds for each group and medium the index of keys that a router would have, and reports what breaks a promise:
    keys removed that are not there, parents that nobody was told of, a key for two prefixes, tokens missing, batches
    lost for good. Batches that were missed are asked for again, where --replay-endpoint says whom to ask.

    Exit status: 0 nothing wrong, 1 something is, 2 unusable input.

    Example: hkv check-events --endpoint tcp://127.0.0.1:5557 --replay-endpoint tcp://127.0.0.1:5558 --seconds 60
    """
    recording, endpoint = given.recording, given.endpoint
    if (recording is None) == (endpoint is None):
        raise ConfigError("endpoint", endpoint, "either --endpoint or a recorded FILE")
    if endpoint is None:
        refuse_given(["replay_endpoint", "topic", "seconds"], "--endpoint, not a recorded FILE")
    checked = _Checked()
    with contextlib.ExitStack() as stack:
        keep = stack.enter_context(_recorder(given.record))
        items: Iterable[Item]
        if endpoint is not None:
            items = stack.enter_context(Subscription(endpoint, given.replay_endpoint, given.topic, given.seconds))
        else:
            items = read_recording(recording or "")
        try:
            for item in items:
                checked.take(item)
                if isinstance(item, Message):
                    keep(recorded_line(item))
                if checked.batches == given.batches:
                    break
        except KeyboardInterrupt:
            if endpoint is None:
                raise
            interruption().accept()  # the usual end of following a publisher
    if not checked.batches and not checked.problems:
        raise ConfigError("events", recording or endpoint, "a batch at least; none came")
    if talks(given.json_path, given.record):
        checked.print()
    write_json(given.json_path, checked.result())
    return bool(checked.problems)


@contextlib.contextmanager
def _recorder(path: str | None) -> Iterator[Callable[[bytes], object]]:
    """A function that keeps a line of the recording. A file is there, whole, once the last one has come."""
    if path is None:
        yield lambda line: None
    elif path == STANDARD_OUTPUT:
        yield lambda line: write_output(STANDARD_OUTPUT, line)
    else:
        with OutputFile(path) as output:
            yield output.file.write


class _Checked:
    """Progress of a check: the index of keys, the problems found and the counts so far."""

    def __init__(self) -> None:
        self.index = KeyIndex()
        self.problems: list[Problem] = []
        self.batches = self.events = self.replayed = self.restarts = 0

    def take(self, item: Item) -> None:
        """Takes note of a batch, a gap or a restart."""
        match item:
            case Gap():
                lost = item.last - item.first + 1
                text = f"batches {item.first} to {item.last} are lost ({lost})"
                self.problems.append(Problem(item.last, "gap", text))
                self.index.forget()
            case Reconnection():
                text = f"connected anew after batch {item.last}: if the publisher began anew, batches before are lost"
                self.problems.append(Problem(item.seq, "reconnection", text))
                self.index.forget()
            case Malformed():
                frames = ", ".join(map(str, item.frames))
                text = f"frames of {frames} bytes, not a topic, 8 bytes of sequence number and a batch"
                self.problems.append(Problem(item.last, "message", text))
            case Restart():
                self.restarts += 1
                self.index = KeyIndex()
            case Message():
                self.batches += 1
                self.replayed += item.replayed
                try:
                    batch = decode_batch(item.payload)
                except EventError as error:
                    self.problems.append(Problem(item.seq, "no batch", str(error)))
                    self.index.forget()
                    return
                self.events += len(batch.events)
                self.problems += self.index.apply(item.seq, batch)

    def print(self) -> None:
        """The index and the problems."""
        rows = (("-" if value is None else value for value in [*row.values()][:7]) for row in self._rows())
        shown = table(">group|medium|>keys|>blocks|>stored|>removed|>stored twice", rows, box=None, pad_edge=False)
        console().print(shown)
        if bare := sum(self.index.bare.values()):
            click.echo(f"{counted(bare, 'key')} came without tokens: two prefixes under one are not seen")
        for place, sizes in self.index.sizes.items():
            if len(sizes) > 1:
                click.echo(f"{place} has blocks of {' and '.join(map(str, sorted(sizes)))} tokens")
        for problem in self.problems[:SHOWN]:
            click.echo(f"batch {problem.seq}: {problem.name}: {problem.text}")
        if len(self.problems) > SHOWN:
            click.echo(f"and {counted(len(self.problems) - SHOWN, 'more problem')}")
        extras = f", {self.replayed} of them replayed" if self.replayed else ""
        extras += f", publisher restarted {counted(self.restarts, 'time')}" if self.restarts else ""
        count = len(self.problems)
        click.echo(
            f"{self.batches:,} batch{'es' * (self.batches != 1)}{extras}, {counted(self.events, 'event')}: "
            f"{counted(count, 'problem') if count else 'no problems'}"
        )

    def _rows(self) -> list[dict[str, Any]]:
        index = self.index
        places = {*index.places, *index.stored, *index.removed}
        return [
            {
                "group": place.group,
                "medium": place.medium,
                "keys": len(index.places.get(place, ())),
                "blocks": sum(entry.count for entry in index.places.get(place, {}).values()),
                "stored": index.stored[place],
                "removed": index.removed[place],
                "duplicates": index.duplicates[place],
                "bare": index.bare[place],
                "sizes": sorted(index.sizes.get(place, ())),
            }
            for place in sorted(
                places, key=lambda place: (place.medium or "", -1 if place.group is None else place.group)
            )
        ]

    def result(self) -> dict[str, Any]:
        """Result for `--json`."""
        return {
            "batches": self.batches,
            "events": self.events,
            "replayed": self.replayed,
            "restarts": self.restarts,
            "places": self._rows(),
            "problems": [dataclasses.asdict(problem) for problem in self.problems],
        }
