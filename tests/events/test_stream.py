"""Order, gaps, replays and restarts; over ZMQ, from a file, and on the command line."""

from __future__ import annotations

import json
import pathlib
import threading
import time
from collections.abc import Container

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from hkv.cli.check_events import command
from hkv.contract.events import BlockRemoved, BlockStored, EventBatch, encode_batch
from hkv.errors import FileError
from hkv.oracle.events import (
    Gap,
    Message,
    Reconnection,
    Restart,
    Sequencer,
    Subscription,
    read_recording,
    recorded_line,
)

zmq = pytest.importorskip("zmq", reason="pyzmq is not installed: pip install 'hkv[events]'")

from tests.events.publisher import Publisher  # noqa: E402

DATA = pathlib.Path(__file__).resolve().parents[1] / "data" / "events"


def payload(number: int) -> bytes:
    if number % 3 == 2:
        return encode_batch(EventBatch(float(number), (BlockRemoved([number - 1], "GPU", group_idx=0),)))
    stored = BlockStored([number], None, [number, 1], 2, None, "GPU", None, group_idx=0)
    return encode_batch(EventBatch(float(number), (stored,)))


PAYLOADS = [payload(number) for number in range(12)]


@given(sent=st.sets(st.integers(0, 11)), kept=st.sets(st.integers(0, 11)), can_ask=st.booleans())
def test_everything_that_can_be_had_comes_once_and_in_order(sent: set[int], kept: set[int], can_ask: bool) -> None:
    latest = 0

    def replay(start: int):
        return [(number, PAYLOADS[number]) for number in range(start, latest + 1) if number in kept | sent]

    sequencer = Sequencer(replay if can_ask else None)
    items = []
    for latest in sorted(sent):
        items += sequencer.take(latest, PAYLOADS[latest])
    last = max(sent, default=-1)
    expected = {number for number in range(last + 1) if number in sent or (can_ask and number in kept)}
    assert [item.seq for item in items if isinstance(item, Message)] == sorted(expected)
    lost = {number for item in items if isinstance(item, Gap) for number in range(item.first, item.last + 1)}
    assert lost == set(range(last + 1)) - expected
    assert all(item.payload == PAYLOADS[item.seq] for item in items if isinstance(item, Message))


def test_a_replay_that_runs_ahead_is_not_taken_twice() -> None:
    sequencer = Sequencer(lambda start: [(number, PAYLOADS[number]) for number in range(start, 6)])
    items = [*sequencer.take(2, PAYLOADS[2])]
    for number in range(3, 8):
        items += sequencer.take(number, PAYLOADS[number])
    assert [item.seq for item in items] == list(range(8))


def test_a_restart_is_noticed() -> None:
    sequencer = Sequencer()
    items = [item for seq in (0, 1, 2, 0, 1) for item in sequencer.take(seq, PAYLOADS[seq])]
    assert items[3] == Restart(2, 0)
    assert [item.seq for item in items if isinstance(item, Message)] == [0, 1, 2, 0, 1]


@pytest.mark.parametrize("first", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("reconnected", [True, False])
@pytest.mark.parametrize("kept", [range(12), range(5, 12), ()])
def test_a_restart_first_seen_later_is_replayed_or_reported(first: int, reconnected: bool, kept: Container) -> None:
    """Batches 0 to 3 of one publisher, then those of another from `first` on, of which some can be had again."""
    anew = [encode_batch(EventBatch(100.0 + number, ())) for number in range(12)]

    def replay(start: int):
        return [(number, anew[number]) for number in range(start, first + 1) if number in kept]

    sequencer = Sequencer(replay)
    items = [item for seq in range(4) for item in sequencer.take(seq, PAYLOADS[seq])]
    if reconnected:
        sequencer.reconnected()
    items = list(sequencer.take(first, anew[first]))
    had = {item.seq for item in items if isinstance(item, Message)}
    lost = {number for item in items if isinstance(item, Gap) for number in range(item.first, item.last + 1)}
    if first < 4 or (3 in kept and (reconnected or first > 4)):
        assert items[0] == Restart(3, first)
        assert had | lost == set(range(first + 1))
        assert had == {first} | {number for number in range(first) if number in kept}
    elif reconnected:
        assert items[0] == Reconnection(3, first)
    else:
        assert had | lost == set(range(4, first + 1))


def test_a_connection_that_was_lost_and_a_publisher_that_stayed() -> None:
    sequencer = Sequencer(lambda start: [(number, PAYLOADS[number]) for number in range(start, 5)])
    items = [*sequencer.take(0, PAYLOADS[0]), *sequencer.take(1, PAYLOADS[1])]
    sequencer.reconnected()
    items += [item for seq in (2, 3, 4, 5) for item in sequencer.take(seq, PAYLOADS[seq])]
    assert [(type(item), item.seq) for item in items] == [(Message, seq) for seq in range(6)]


def follow(publisher: Publisher, count: int, replay: bool = True) -> list:
    """Items that a follower gets of the payloads; the publisher starts when it is there."""
    found = []
    with Subscription(publisher.endpoint, publisher.replay_endpoint if replay else None, "kv", seconds=20) as items:
        sender = threading.Thread(target=lambda: (publisher.wait_for_follower(), [publisher.send(p) for p in PAYLOADS]))
        sender.start()
        for item in items:
            found.append(item)
            if isinstance(item, Message) and item.seq == count - 1:
                break
        sender.join()
    publisher.close()
    return found


def test_over_zmq() -> None:
    assert follow(Publisher(), 12) == [Message(number, data) for number, data in enumerate(PAYLOADS)]


def test_missed_batches_are_asked_for() -> None:
    found = follow(Publisher(lost={0, 1, 5}), 12)
    assert [item.seq for item in found] == list(range(12))
    assert {item.seq for item in found if item.replayed} >= {0, 1, 5}


def test_what_cannot_be_had_again_is_a_gap() -> None:
    found = follow(Publisher(lost={4, 5, 6}, forgotten={5}), 12)
    assert Gap(5, 5) in found
    assert [item.seq for item in found if isinstance(item, Message)] == [n for n in range(12) if n != 5]
    assert Gap(4, 6) in follow(Publisher(lost={4, 5, 6}), 12, replay=False)


def follow_two(can_ask: bool) -> list:
    """Items up to the fifth batch of a publisher that began anew after another had sent four and was closed."""
    first = Publisher()
    publishers, found = [first], []

    def send() -> None:
        first.wait_for_follower()
        for data in PAYLOADS[:4]:
            first.send(data)

    def send_anew() -> None:
        first.close()
        publishers.append(Publisher(lost=range(4), like=first))
        publishers[1].wait_for_follower()
        for number in range(5):
            publishers[1].send(encode_batch(EventBatch(100.0 + number, ())))

    senders = [threading.Thread(target=send), threading.Thread(target=send_anew)]
    with Subscription(first.endpoint, first.replay_endpoint if can_ask else None, "kv", seconds=20) as items:
        senders[0].start()
        for item in items:
            found.append(item)
            if len(found) == 4:
                senders[1].start()
            if isinstance(item, Message) and item.seq == 4:
                break
    for sender in senders:
        sender.join()
    publishers[1].close()
    return found[4:]


def test_another_publisher_is_noticed_though_its_numbers_go_on() -> None:
    items = follow_two(can_ask=True)
    assert items[0] == Restart(3, 4)
    assert [item.seq for item in items if isinstance(item, Message)] == [0, 1, 2, 3, 4]
    items = follow_two(can_ask=False)
    assert items[0] == Reconnection(3, 4)
    assert [item.seq for item in items[1:]] == [4]


class Hostile:
    """A publisher that sends whatever it likes, and answers a replay without end."""

    def __init__(self, *messages: list[bytes]) -> None:
        self._messages, self._ended = messages, threading.Event()
        self._context = zmq.Context()
        self._out, self._answers = self._context.socket(zmq.XPUB), self._context.socket(zmq.ROUTER)
        self.endpoint, self.replay_endpoint = (
            f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}" for socket in (self._out, self._answers)
        )
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Hostile:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()
        self._context.destroy(linger=0)

    def _run(self) -> None:
        while not self._out.poll(50):
            if self._ended.is_set():
                return
        for message in self._messages:
            self._out.send_multipart(message)
        while not self._ended.is_set():
            if self._answers.poll(50):
                sender = self._answers.recv_multipart()[0]
                while not self._ended.is_set() and not self._answers.poll(1):
                    self._answers.send_multipart([sender, b"", (0).to_bytes(8, "big"), PAYLOADS[0]])


def test_a_replay_without_end_ends_with_the_time() -> None:
    with (
        Hostile([b"", (5).to_bytes(8, "big"), PAYLOADS[5]]) as publisher,
        Subscription(publisher.endpoint, publisher.replay_endpoint, seconds=0.5) as subscription,
    ):
        started = time.monotonic()
        items = list(subscription)
        assert time.monotonic() - started < 5
    assert items[-2:] == [Gap(1, 4), Message(5, PAYLOADS[5])]


def test_messages_of_another_protocol_are_told_and_passed_over() -> None:
    wrong = [[b"alone"], [b"", b"short", PAYLOADS[0]], [b"", (0).to_bytes(8, "big"), PAYLOADS[0], b"more"]]
    with Hostile(*wrong, [b"", bytes(8), PAYLOADS[0]]) as publisher:
        runner = CliRunner()
        result = runner.invoke(command, ["--endpoint", publisher.endpoint, "--batches", "1", "--seconds", "10"])
    assert result.exit_code == 1
    assert "batch -1: message: frames of 5 bytes, not a topic, 8 bytes of sequence number" in result.output
    assert "1 batch, 1 event: 3 problems" in result.output


def test_a_recording_checks(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b"".join(recorded_line(Message(*each)) for each in enumerate(PAYLOADS)))
    assert [item.seq for item in read_recording(path)] == list(range(12))
    done = CliRunner().invoke(command, [str(path)])
    assert done.exit_code == 0, done.output
    assert "12 batches, 12 events: no problems" in done.output
    done = CliRunner().invoke(command, [str(path), "--json", "-"])
    place = {"group": 0, "medium": "GPU", "keys": 4, "blocks": 4, "stored": 8, "removed": 4, "duplicates": 0}
    assert json.loads(done.stdout)["places"] == [place | {"bare": 0, "sizes": [2]}]


def test_events_of_vllm_s_tier_of_host_memory_are_keys() -> None:
    """Recorded of vLLM 0.33: two keys without tokens or a block size are stored, one of them leaves."""
    done = CliRunner().invoke(command, [str(DATA / "tier_placeholders.jsonl")])
    assert done.exit_code == 0, done.output
    assert "2 keys came without tokens" in done.output
    assert "2 batches, 3 events: no problems" in done.output
    done = CliRunner().invoke(command, [str(DATA / "tier_placeholders.jsonl"), "--json", "-"])
    (place,) = json.loads(done.stdout)["places"]
    assert (place["medium"], place["keys"], place["bare"], place["sizes"]) == ("CPU", 1, 2, [])


def test_a_group_with_blocks_of_two_sizes_is_told(tmp_path: pathlib.Path) -> None:
    def batch(number: int, size: int) -> bytes:
        tokens = list(range(size))
        event = BlockStored([number], None, tokens, size, None, "GPU", None, group_idx=0)
        return encode_batch(EventBatch(float(number), (event,)))

    path = tmp_path / "events.jsonl"
    path.write_bytes(b"".join(recorded_line(Message(each, batch(each, 2 + 2 * (each % 2)))) for each in range(4)))
    done = CliRunner().invoke(command, [str(path)])
    assert done.output.count("group 0 on GPU has blocks of 2 and 4 tokens") == 1
    assert "no problems" in done.output


def test_problems_are_printed_and_counted(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "events.jsonl"
    broken = (Message(0, PAYLOADS[2]), Message(1, b"\xc1"), Message(4, PAYLOADS[0]))
    path.write_bytes(b"".join(map(recorded_line, broken)))
    done = CliRunner().invoke(command, [str(path)])
    assert done.exit_code == 1
    assert (
        "batch 0: removed unknown: key 0000000000000001 leaves group 0 on GPU, where it was never stored" in done.output
    )
    assert "batch 1: no batch" in done.output
    assert "batch 3: gap: batches 2 to 3 are lost (2)" in done.output
    assert "3 batches, 2 events: 3 problems" in done.output
    path.write_text("")
    assert "none came" in str(CliRunner().invoke(command, [str(path)]).exception)
    path.write_text("{}\n")
    assert isinstance(CliRunner().invoke(command, [str(path)]).exception, FileError)


def test_live_with_a_recording_made(tmp_path: pathlib.Path) -> None:
    publisher = Publisher(lost={3})

    def send() -> None:
        publisher.wait_for_follower()
        for data in PAYLOADS:
            publisher.send(data)

    sender = threading.Thread(target=send)
    sender.start()
    path = tmp_path / "events.jsonl"
    arguments = ["--endpoint", publisher.endpoint, "--replay-endpoint", publisher.replay_endpoint, "--topic", "kv"]
    done = CliRunner().invoke(command, [*arguments, "--batches", "12", "--seconds", "20", "--record", str(path)])
    sender.join()
    publisher.close()
    assert done.exit_code == 0, done.output
    assert "12 batches, " in done.output
    assert "replayed, 12 events: no problems" in done.output
    assert [item.payload for item in read_recording(path)] == PAYLOADS
