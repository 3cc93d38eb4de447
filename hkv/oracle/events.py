"""Batches of KV events in order: from a publisher over ZMQ, gaps replayed, or from a recording."""

from __future__ import annotations

import base64
import dataclasses
import importlib
import math
import os
import time
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Any

import msgspec

from hkv.errors import ConfigError, MissingExtraError
from hkv.files import LINES_IN_LIMIT, decode_json, input_limit, lines_of, opened

END = -1
"""Sequence number of the message that ends a replay (vLLM 0.33 `ZmqEventPublisher.END_SEQ`)."""

REPLAY_PATIENCE = 2.0
"""Seconds that a publisher may be silent during a replay."""


@dataclasses.dataclass(frozen=True)
class Message:
    """A batch as it was sent.

    Attributes:
      replayed: whether it had been missed and was asked for again.
    """

    seq: int
    payload: bytes
    replayed: bool = False


@dataclasses.dataclass(frozen=True)
class Gap:
    """Batches that are lost: `first` to `last`, sequence numbers, both included."""

    first: int
    last: int


@dataclasses.dataclass(frozen=True)
class Restart:
    """The publisher began anew: after the batch `last` came one with the number `seq`."""

    last: int
    seq: int


@dataclasses.dataclass(frozen=True)
class Reconnection:
    """The connection was lost between the batches `last` and `seq`, and what was published in between is unknown.

    If the publisher began anew, batches 0 to `seq - 1` of the new one are lost.
    """

    last: int
    seq: int


@dataclasses.dataclass(frozen=True)
class Malformed:
    """A message that is none of the protocol's, after the batch `last`: the bytes of each of its frames."""

    last: int
    frames: tuple[int, ...]


Item = Message | Gap | Restart | Reconnection | Malformed


class Sequencer:
    """Puts messages into order: finds gaps, asks for what was missed, leaves out what comes twice.

    A publisher that begins anew numbers its batches from 0. It is noticed by a number that was there before; and, as
    its first message that comes may have a higher one, by the last batch that was taken: whenever something is missing
    or the connection was lost, that batch is asked for as well, and a publisher that began anew has another in its
    place.

    `replay` returns the messages from a sequence number on that can still be had; None when nobody can be asked.
    """

    def __init__(self, replay: Any = None) -> None:
        self._replay = replay
        self._doubted = False
        self._begin()

    def _begin(self) -> None:
        self._next = 0
        self._last = b""
        self._replayed: dict[int, bytes] = {}

    @property
    def last(self) -> int:
        """Sequence number of the last batch that was taken, -1 before the first."""
        return self._next - 1

    def reconnected(self) -> None:
        """The connection to the publisher was lost and is there again: the next message may be of another publisher."""
        self._doubted = True

    def take(self, seq: int, payload: bytes) -> Iterator[Item]:
        """Items that follow from a message that came in."""
        if seq < self._next:
            if self._replayed.pop(seq, None) == payload:
                return
            yield Restart(self._next - 1, seq)
            self._begin()
        if seq > self._next or (self._doubted and self._next):
            yield from self._fill(seq)
        self._doubted = False
        self._replayed.pop(seq, None)
        if seq >= self._next:
            self._took(seq, payload)
            yield Message(seq, payload)

    def _took(self, seq: int, payload: bytes) -> None:
        self._next, self._last = seq + 1, payload

    def _fill(self, seq: int) -> Iterator[Item]:
        """Items that were missed before `seq`: replayed where that is possible; a gap where not."""
        last, known = self._next - 1, self._next == 0
        for number, payload in self._replay(max(0, last)) if self._replay is not None else ():
            if number == last and payload != self._last:
                yield from self._restarted(seq)
                return
            known = known or number == last
            if number <= last:
                continue
            yield from self._doubts(seq, known)
            if number > self._next and self._next < seq:
                yield Gap(self._next, min(number, seq) - 1)
            if number >= seq:
                self._replayed[number] = payload
            self._took(number, payload)
            yield Message(number, payload, replayed=True)
        yield from self._doubts(seq, known)
        if self._next < seq:
            yield Gap(self._next, seq - 1)
            self._next = seq

    def _restarted(self, seq: int) -> Iterator[Item]:
        yield Restart(self._next - 1, seq)
        self._begin()
        if seq:
            yield from self._fill(seq)

    def _doubts(self, seq: int, known: bool) -> Iterator[Item]:
        """Says once that another publisher may have sent what comes, unless the last batch is known to be the same."""
        if self._doubted and not known:
            yield Reconnection(self._next - 1, seq)
        self._doubted = False


class Subscription:
    """Follows a publisher. A context manager; iterating waits for messages, `seconds` long at most.

    Missed batches are asked for at `replay_endpoint`; only messages whose topic begins with `topic` come.
    """

    def __init__(
        self, endpoint: str, replay_endpoint: str | None = None, topic: str = "", seconds: float | None = None
    ) -> None:
        try:
            self._zmq: Any = importlib.import_module("zmq")
        except ImportError:
            raise MissingExtraError("zmq", "events", "to follow a publisher of KV events") from None
        self._context = self._zmq.Context()
        self._seconds, self._deadline = seconds, math.inf
        self._sequencer = Sequencer(None if replay_endpoint is None else self._ask)
        self._replay_endpoint = replay_endpoint
        self._socket = self._context.socket(self._zmq.SUB)
        self._connections = 0
        self._monitor = self._socket.get_monitor_socket(self._zmq.EVENT_CONNECTED)
        try:
            self._socket.setsockopt_string(self._zmq.SUBSCRIBE, topic)
            self._connect(self._socket, "endpoint", endpoint)
        except ConfigError:
            self.close()
            raise

    def __enter__(self) -> Subscription:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the subscription."""
        if not self._socket.closed:
            self._socket.disable_monitor()
        self._context.destroy(linger=0)

    def __iter__(self) -> Iterator[Item]:
        self._deadline = math.inf if self._seconds is None else time.monotonic() + self._seconds
        while self._arrives(self._socket, math.inf):
            frames = self._socket.recv_multipart()
            self._note_connections()
            if len(frames) != 3 or len(frames[1]) != 8:
                yield Malformed(self._sequencer.last, tuple(map(len, frames)))
                continue
            yield from self._sequencer.take(int.from_bytes(frames[1], "big"), frames[2])

    def _arrives(self, socket: Any, patience: float) -> bool:
        """Waits for a message, no longer than so many seconds, and never beyond the time that was given in all."""
        left = min(self._deadline - time.monotonic(), patience)
        return left > 0 and bool(socket.poll(None if left == math.inf else math.ceil(left * 1000)))

    def _note_connections(self) -> None:
        """Tells the sequencer when the publisher was connected to again."""
        receive = importlib.import_module("zmq.utils.monitor").recv_monitor_message
        while self._monitor.poll(0):
            receive(self._monitor)
            self._connections += 1
            if self._connections > 1:
                self._sequencer.reconnected()

    def _ask(self, start: int) -> Iterator[tuple[int, bytes]]:
        """The publisher's answer to a request for everything from `start` on.

        It ends with the publisher's word, with silence, with the time, with what is no answer, or with more bytes than
        an input may have: what was asked for and did not come is then a gap.
        """
        socket = self._context.socket(self._zmq.DEALER)
        left = input_limit() // 4
        try:
            self._connect(socket, "replay_endpoint", self._replay_endpoint)
            socket.send_multipart((b"", start.to_bytes(8, "big")))
            while left > 0 and self._arrives(socket, REPLAY_PATIENCE):
                frames = socket.recv_multipart()
                if len(frames) < 2 or len(frames[-2]) != 8:
                    return
                seq = int.from_bytes(frames[-2], "big", signed=True)
                if seq == END:
                    return
                left -= sum(map(len, frames))
                yield seq, frames[-1]
        finally:
            socket.close(linger=0)

    def _connect(self, socket: Any, name: str, endpoint: str | None) -> None:
        socket.setsockopt(self._zmq.MAXMSGSIZE, input_limit() // LINES_IN_LIMIT)
        try:
            socket.connect(endpoint)
        except self._zmq.ZMQError as error:
            raise ConfigError(name, endpoint, f"an endpoint such as tcp://127.0.0.1:5557 ({error})") from None


def read_recording(path: str | os.PathLike[str]) -> Iterator[Item]:
    """The messages of a recording: JSON lines of `seq` and `payload`, the batch in base64."""
    with opened(str(path)) as file:
        yield from read_recording_lines(lines_of(file, str(path)), str(path))


def read_recording_lines(recorded: Iterable[bytes], path: str) -> Iterator[Item]:
    """The messages of a recording's lines; `path` is for messages only."""
    sequencer = Sequencer()
    for number, line in enumerate(recorded, 1):
        found = decode_json(line, path, number, "a line with seq and payload", _Line)
        yield from sequencer.take(found.seq, found.payload)


class _Line(msgspec.Struct):
    seq: int
    payload: bytes


def recorded_line(message: Message) -> bytes:
    """A message as a line of a recording, newline included."""
    payload = base64.b64encode(message.payload).decode()
    return msgspec.json.encode({"seq": message.seq, "payload": payload}) + b"\n"
