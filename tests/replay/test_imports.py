"""Every format that `hkv trace import` reads, in files as small as the format allows, and what is made of them."""

import gzip
import io
import itertools
import json
import sys

import pytest
import tokenizers
import zstandard
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from hkv.cli import cli
from hkv.contract.events import BlockRemoved, BlockStored, EventBatch, encode_batch
from hkv.dialects.vllm.engines.numpy import NumpyEngine
from hkv.errors import ConfigError, FileError, HKVError, MissingExtraError
from hkv.oracle.events import Message, recorded_line
from hkv.oracle.log_file import write_log
from hkv.oracle.record import record
from hkv.replay.traces.formats import requests_of
from hkv.replay.traces.imported import ImportOptions, Remarks, give_ids, in_order
from hkv.replay.traces.reader import NewRequest, granularity, own_lines, read_trace


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """A tokenizer that knows characters only: token n is the n-th of them."""
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    letters = {letter: index for index, letter in enumerate("?abcdefghijklmnopqrstuvwxyz<|_>\n ")}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=letters, merges=[], unk_token="?"))
    made.save(str(path))
    return str(path)


@pytest.fixture
def importing(tmp_path, monkeypatch):
    """A function that imports bytes or text, and returns the lines of the trace and what the command says as JSON."""
    monkeypatch.chdir(tmp_path)

    def run(format, content, *options, name="source"):
        source = tmp_path / name
        source.write_bytes(content if isinstance(content, bytes) else content.encode())
        arguments = ["trace", "import", str(source), "--from", format, "-o", "out.jsonl", "--json", "said.json"]
        done = CliRunner().invoke(cli, [*arguments, *options])
        if done.exception is not None and isinstance(done.exception, HKVError):
            raise done.exception
        assert done.exit_code == 0, done.output
        assert done.output == "" or "out.jsonl" in done.output
        lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
        assert len(list(read_trace("out.jsonl"))) == len(lines), "not what a replay reads"
        return lines, json.loads((tmp_path / "said.json").read_text())

    return run


def lines_of(*values):
    return "".join(json.dumps(value) + "\n" for value in values)


MOONCAKE = lines_of(
    {"timestamp": 27482, "input_length": 1030, "output_length": 52, "hash_ids": [46, 47, 48]},
    {"timestamp": 30535, "input_length": 1100, "output_length": 26, "hash_ids": [46, 47, 2367]},
)


def test_mooncake(importing):
    lines, said = importing("mooncake", MOONCAKE)
    assert lines == [
        {"timestamp": 0, "input_length": 1030, "output_length": 52, "hash_ids": [0, 1, 2], "tokens_per_id": 512},
        {"timestamp": 3053, "input_length": 1100, "output_length": 26, "hash_ids": [0, 1, 3], "tokens_per_id": 512},
    ]
    assert said["totals"]["tokens_per_id"] == 512
    assert said["remarks"] == {}


def bailian(**changes):
    line = {"chat_id": 159, "parent_chat_id": -1, "timestamp": 61.114, "input_length": 33, "output_length": 132,
            "type": "text", "turn": 1, "hash_ids": [1089, 1090, 1091]}  # fmt: skip
    return line | changes


def test_bailian(importing):
    later = bailian(chat_id=160, parent_chat_id=159, timestamp=62.5, turn=2, input_length=48)
    lines, _ = importing("bailian", lines_of(bailian(), later))
    assert [line["timestamp"] for line in lines] == [0, 1386]
    assert [line["hash_ids"] for line in lines] == [[0, 1, 2], [0, 1, 2]]
    assert {line["tokens_per_id"] for line in lines} == {16}


def test_ids_of_blocks_become_ids_of_prefixes(importing):
    """An id that stands at two places would be refused in a trace: by what stands before, it is two."""
    lines, _ = importing("timed-trace", lines_of(bailian(hash_ids=[7, 7, 8]), bailian(hash_ids=[8, 7, 8])))
    assert [line["hash_ids"] for line in lines] == [[0, 1, 2], [3, 4, 5]]


def test_ids_must_be_as_many_as_the_tokens_want(importing):
    with pytest.raises(FileError, match=r"source:2: hash_ids = '2 ids': expected 3 .*--tokens-per-id") as caught:
        importing("bailian", lines_of(bailian(input_length=48), bailian(input_length=48, hash_ids=[1, 2])))
    assert caught.value.line == 2
    lines, _ = importing("bailian", lines_of(bailian(hash_ids=[1, 2])), "--tokens-per-id", "24")
    assert lines[0]["tokens_per_id"] == 24


def test_dynamo_sessions_with_delays(importing):
    rows = [
        {"session_id": "a", "timestamp": 1000, "input_length": 512, "output_length": 10, "hash_ids": [1]},
        {"session_id": "a", "delay": 500, "input_length": 1024, "output_length": 4, "hash_ids": [1, 2]},
        {"session_id": "a", "delay_ms": 1, "input_tokens": 1024, "output_tokens": 4, "hash_ids": [1, 3]},
        {"session_id": "b", "created_time": 1400, "input_length": 9, "output_length": 1},
    ]
    lines, said = importing("dynamo", lines_of(*rows), "--ms-per-token", "10")
    assert [(line["timestamp"], line["hash_ids"]) for line in lines] == [
        (0, [0]), (400, None), (600, [0, 1]), (641, [0, 2]),
    ]  # fmt: skip
    assert any("made up" in remark and count == 2 for remark, count in said["remarks"].items())
    assert any("put in order" in remark for remark in said["remarks"])
    assert said["totals"]["without_content"] == 1


AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,3180,8
"""
AZURE_2024 = """TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 00:00:00.009930+00:00,2162,5
2024-05-10 00:00:00.017335+00:00,2399,6
"""


@pytest.mark.parametrize(("content", "times"), [(AZURE, [0, 52]), (AZURE_2024, [0, 7.405])])
def test_azure_knows_lengths_and_times_only(importing, content, times):
    lines, said = importing("azure", content)
    assert [line["timestamp"] for line in lines] == times
    assert all(line["hash_ids"] is None for line in lines)
    assert granularity(list(read_trace("out.jsonl"))) == 0
    assert said["totals"]["without_content"] == 2
    assert said["totals"]["tokens_per_id"] is None


BURST = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
1106,ChatGPT,0,0,0,Conversation log
1129,GPT-4,1305,477,1782,API log
"""
BURST_2 = """Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type
5.5,2,1.25,ChatGPT,472,18,490,Conversation log
"""


def test_burst_gpt(importing):
    lines, said = importing("burstgpt", BURST)
    assert [(line["timestamp"], line["input_length"], line["output_length"]) for line in lines] == [
        (0, 472, 18), (1_124_000, 1305, 477),
    ]  # fmt: skip
    assert list(said["remarks"].values()) == [1]
    assert len(importing("burstgpt", BURST_2)[0]) == 1


VIDUR = """arrived_at,num_prefill_tokens,num_decode_tokens
0.0,374,44
4.314579,396,109
"""
SPLITWISE = """request_id,request_type,application_id,arrival_timestamp,batch_size,prompt_size,token_size
0,2,0,0.5,1,374,44
1,2,0,4.814579,1,396,109
"""


@pytest.mark.parametrize(("format", "content"), [("vidur", VIDUR), ("splitwise", SPLITWISE)])
def test_simulators_traces(importing, format, content):
    lines, said = importing(format, content)
    assert [(line["timestamp"], line["input_length"], line["output_length"]) for line in lines] == [
        (0, 374, 44), (pytest.approx(4314.579), 396, 109),
    ]  # fmt: skip
    assert said["totals"]["without_content"] == 2


def test_vidurs_lengths_without_times_come_at_a_rate(importing):
    lengths = "num_prefill_tokens,num_decode_tokens,num_total_tokens\n2048,12,2060\n77,5,82\n"
    with pytest.raises(ConfigError, match="--rate"):
        importing("vidur", lengths)
    lines, said = importing("vidur", lengths, "--rate", "2")
    assert [line["input_length"] for line in lines] == [2048, 77]
    assert any("made up" in remark for remark in said["remarks"])
    with pytest.raises(FileError, match="'Timestamp'"):
        importing("burstgpt", "Request tokens,Response tokens\n1,2\n")


def conversation(name, *requests, **changes):
    whole = {"id": name, "models": ["m"], "block_size": 64, "hash_id_scope": "local", "tool_tokens": 128}
    return {**whole, "system_tokens": 64, "requests": list(requests), **changes}


def turn(t, ids, **changes):
    return {
        "t": t,
        "type": "n",
        "model": "m",
        "in": 64 * len(ids),
        "out": 20,
        "hash_ids": ids,
        "api_time": 1.0,
    } | changes


def test_conversations_of_agents(importing):
    """Ids are a conversation's own, shared with its subagents, whose requests stand among its own."""
    inner = {"t": 3.0, "type": "subagent", "agent_id": "a", "requests": [turn(3.5, [1, 9]), turn(4.0, [1, 9, 10])]}
    one = conversation("c1", turn(0.0, [1, 2]), inner, turn(5.0, [1, 2, 3], type="s", out=30))
    lines, said = importing("agentic", json.dumps(one, indent=1))
    assert [(line["timestamp"], line["output_length"], line["hash_ids"]) for line in lines] == [
        (0, 20, [0, 1]), (3500, 20, [0, 2]), (4000, 20, [0, 2, 3]), (5000, 30, [0, 1, 4]),
    ]  # fmt: skip
    assert {line["tokens_per_id"] for line in lines} == {64}
    assert said["remarks"] == {}
    two = (one, conversation("c2", turn(0.0, [1, 2])))
    with pytest.raises(ConfigError, match="--rate"):
        importing("agentic", lines_of(*two))
    lines, said = importing("agentic", lines_of(*two), "--rate", "1")
    assert len(lines) == 5
    assert len({line["hash_ids"][0] for line in lines}) == 2, "the same number in two conversations is two blocks"
    assert any("beginning is made up" in remark for remark in said["remarks"])
    lines, _ = importing("agentic", json.dumps([{**each, "hash_id_scope": "global"} for each in two]), "--rate", "1")
    assert len({line["hash_ids"][0] for line in lines}) == 1


@pytest.mark.parametrize(
    ("changes", "field"),
    [({"block_size": 16}, "--tokens-per-id 16"), ({"hash_id_scope": "session"}, "local or global"),
     ({"requests": None}, "requests"), ({"requests": [{"t": 0, "in": 64, "out": 1}]}, "hash_ids"),
     ({"requests": [turn(-1, [1])]}, "t = -1"), ({"requests": [3]}, "a JSON object")],
)  # fmt: skip
def test_conversations_of_agents_that_cannot_be_read(importing, changes, field):
    with pytest.raises(FileError, match=field):
        importing("agentic", json.dumps(conversation("c1", turn(0.0, [1, 2]), **changes)))


def test_a_csv_is_never_taken_for_prompts(tmp_path, importing):
    for name, content in (("vidur", VIDUR), ("splitwise", SPLITWISE), ("azure", AZURE), ("burstgpt", BURST)):
        (tmp_path / "trace.csv").write_text(content)
        with pytest.raises(FileError, match=f"--from {name}"):
            list(read_trace(str(tmp_path / "trace.csv")))
        for options in ((), ("--tokenizer", "bytes", "--rate", "1", "--output-tokens", "1")):
            with pytest.raises(FileError, match=f"--from {name}$"):
                importing("text", content, *options)
    with pytest.raises(FileError, match=r"--from azure or burstgpt or vidur or splitwise$"):
        importing("text", "time,prompt len,output len\n1,2,3\n")
    for heading in ("time,prompt len,output len", "arrival;input;output", '"a","b"', "a\tb", "0.1,20,3"):
        (tmp_path / "trace.csv").write_text(heading + "\n1,2,3\n")
        with pytest.raises(FileError, match="a CSV with the columns of azure, burstgpt, vidur, splitwise"):
            list(read_trace(str(tmp_path / "trace.csv")))
    (tmp_path / "prompts.txt").write_text("Tell me, briefly, why\n")
    with pytest.raises(FileError, match="--from text"):
        list(read_trace(str(tmp_path / "prompts.txt")))


def test_prefixes_are_made_up_only_by_a_model_that_is_named(importing):
    options = ("--synthetic", "shared-prefix", "--prefixes", "1", "--prefix-tokens", "40", "--tokens-per-id", "16")
    lines, said = importing("azure", AZURE, *options)
    first, second = (line["hash_ids"] for line in lines)
    assert first[:2] == second[:2]
    assert not set(first[2:]) & set(second[2:])
    assert {line["synthetic"] for line in lines} == {"shared-prefix"}
    assert said["synthetic"] == "shared-prefix"
    assert {request.synthetic for request in read_trace("out.jsonl")} == {"shared-prefix"}
    with pytest.raises(ConfigError, match="--synthetic"):
        importing("azure", AZURE, "--prefixes", "1")


def test_the_first_system_prompt_is_the_most_popular():
    requests = [NewRequest(line=i, timestamp=0, input_length=64, output_length=0) for i in range(2000)]
    give_ids(requests, ImportOptions(prefixes=4, prefix_tokens=32, seed=3), 16)
    counts = [sum(request.ids[0] == 2 * prefix for request in requests) for prefix in range(4)]
    assert counts == sorted(counts, reverse=True)
    assert sum(counts) == 2000
    assert counts[0] / counts[3] == pytest.approx(4, rel=0.3)


CHATS = json.dumps(
    [
        {"id": "x", "conversations": [
            {"from": "human", "value": "abc"}, {"from": "gpt", "value": "de"},
            {"from": "human", "value": "f"}, {"from": "gpt", "value": "gh"},
        ]},
        {"id": "y", "conversations": [{"from": "human", "value": "abc"}]},
    ]
)  # fmt: skip


def test_lmsys_and_wildchat(importing, tokenizer):
    """The same conversation: LMSYS says nothing of times; WildChat when each answer came."""
    turns = [("user", "abc"), ("assistant", "de"), ("user", "f"), ("assistant", "gh")]
    said = [{"role": role, "content": text} for role, text in turns]
    lmsys = {"conversation_id": "x", "model": "m", "conversation": said, "turn": 2, "language": "English"}
    lines, _ = importing("lmsys", lines_of(lmsys), "--tokenizer", tokenizer, "--rate", "1", "--pause", "2")
    wanted = [([1, 2, 3], [4, 5]), ([1, 2, 3, 4, 5, 6], [7, 8])]
    assert [(line["tokens"], line["output_tokens"]) for line in lines] == wanted
    assert [line["timestamp"] for line in lines] == [0, 2050]
    for times in (("2023-04-09T00:02:53+00:00", "2023-04-09T00:03:03"), (1680998573000, 1680998583000)):
        timed = [{**each, "timestamp": None} for each in said]
        timed[1]["timestamp"], timed[3]["timestamp"] = times
        wild = {"conversation_hash": "x", "timestamp": times[1], "conversation": timed, "redacted": False}
        lines, remarks = importing("wildchat", lines_of(wild), "--tokenizer", tokenizer)
        assert [(line["tokens"], line["output_tokens"]) for line in lines] == wanted
        assert [line["timestamp"] for line in lines] == [0, 10_000]
        assert list(remarks["remarks"].values()) == [2]
    timed[1]["timestamp"] = "then"
    with pytest.raises(FileError, match=r"conversation\[1\].timestamp = 'then'"):
        importing("wildchat", lines_of({**wild, "conversation": timed}), "--tokenizer", tokenizer)


def test_sharegpt(importing, tokenizer):
    """A prompt goes on from the one before and its answer, token for token."""
    chats = ("--tokenizer", tokenizer, "--rate", "1", "--ms-per-token", "10", "--pause", "1")
    lines, said = importing("sharegpt", CHATS, *chats)
    assert [(line["timestamp"], line["tokens"], line["output_tokens"]) for line in lines] == [
        (0, [1, 2, 3], [4, 5]), (1020, [1, 2, 3, 4, 5, 6], [7, 8]),
    ]  # fmt: skip
    assert any("left out" in remark and count == 1 for remark, count in said["remarks"].items())
    first, second = importing("sharegpt", CHATS, *chats, "--template", "chatml")[0]
    said_so_far = first["tokens"] + first["output_tokens"]
    assert second["tokens"][: len(said_so_far)] == said_so_far
    ids, said = importing("sharegpt", CHATS, *chats, "--tokens-per-id", "4")
    assert [line["hash_ids"] for line in ids] == [[0], [1, 2]]
    assert said["totals"]["tokens_per_id"] == 4
    with pytest.raises(ConfigError, match="--rate"):
        importing("sharegpt", CHATS, "--tokenizer", tokenizer)
    with pytest.raises(ConfigError, match="--tokenizer"):
        importing("sharegpt", CHATS, "--rate", "1")


ASKED = {"model": "m", "messages": [{"role": "user", "content": "abc"}], "max_tokens": 7}
ANSWER = {"id": "c", "object": "chat.completion", "created": 1700000002, "choices": [
    {"index": 0, "message": {"role": "assistant", "content": "xyz"}, "finish_reason": "stop"}]}  # fmt: skip


def test_openai_chat_logs(importing, tokenizer):
    parts = [{"type": "text", "text": "ab"}, {"type": "text", "text": "c"}]
    logged = [
        {"request": ASKED, "response": ANSWER},
        {**ASKED, **ANSWER},
        {"timestamp": 1700000003.5, "messages": [{"role": "user", "content": parts}], "max_tokens": 9},
        {"created": 1700000004, "messages": [*ASKED["messages"], {"role": "assistant", "content": "y"}]},
        {"created": 1700000005, **ASKED, "usage": {}, "response": {"usage": {"completion_tokens": 3}}},
    ]
    lines, _ = importing("openai-chat", lines_of(*logged), "--tokenizer", tokenizer)
    assert [line["timestamp"] for line in lines] == [0, 0, 1500, 2000, 3000]
    assert all(line["tokens"] == [1, 2, 3] for line in lines)
    assert [line.get("output_tokens", line.get("output_length")) for line in lines] == [
        [24, 25, 26], [24, 25, 26], 9, [25], 3,
    ]  # fmt: skip


def test_what_openai_logs_may_not_hold_is_named(importing, tokenizer):
    image = {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}
    with pytest.raises(FileError, match=r"messages\[0\].content"):
        importing("openai-chat", lines_of(image), "--tokenizer", tokenizer)
    with pytest.raises(FileError, match="unknown length"):
        importing("openai-chat", lines_of({"messages": ASKED["messages"]}), "--tokenizer", tokenizer)
    lines, _ = importing(
        "openai-chat", lines_of({"messages": ASKED["messages"], "created": 1}), "--tokenizer", tokenizer,
        "--output-tokens", "5",
    )  # fmt: skip
    assert lines[0]["output_length"] == 5


def test_openai_batches(importing, tokenizer, tmp_path):
    batch = {"custom_id": "one", "method": "POST", "url": "/v1/chat/completions", "body": ASKED}
    out = {"id": "r", "custom_id": "one", "response": {"status_code": 200, "request_id": "q", "body": ANSWER}}
    (tmp_path / "answers").write_text(lines_of(out))
    asked = lines_of(batch, {**batch, "custom_id": "two"})
    options = ("--tokenizer", tokenizer, "--rate", "5", "--seed", "1")
    lines, _ = importing("openai-batch", asked, *options, "--answers", str(tmp_path / "answers"))
    assert lines[0]["output_tokens"] == [24, 25, 26]
    assert lines[1]["output_length"] == 7
    assert lines[0]["timestamp"] == 0 < lines[1]["timestamp"]


def test_prompt_lines(importing, tokenizer):
    lines, _ = importing(
        "prompts", lines_of({"prompt": "ab", "output_tokens": 4}, {"prompt": "c"}),
        "--tokenizer", tokenizer, "--rate", "1", "--output-tokens", "2",
    )  # fmt: skip
    assert [(line["tokens"], line["output_length"]) for line in lines] == [([1, 2], 4), ([3], 2)]


def test_texts_want_the_extra(importing, tokenizer, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(MissingExtraError, match=r"hkv\[traces\]"):
        importing("prompts", lines_of({"prompt": "ab"}), "--tokenizer", tokenizer)


def stored(keys, parent, tokens, group=0):
    return BlockStored(keys, parent, tokens, 2, None, "GPU", None, group_idx=group)


def messages(*batches):
    return [Message(number, encode_batch(EventBatch(time, events))) for number, (time, events) in enumerate(batches)]


def test_kv_events(importing, tmp_path):
    """A chain that goes on at once is one request; one that branches, or goes on later, is another."""
    batches = messages(
        (100.0, (stored([1, 2], None, [5, 6, 7, 8]), stored([9], None, [1, 1], group=1))),
        (100.5, (stored([3], 2, [9, 9]),)),
        (101.0, (BlockRemoved([3], "GPU", group_idx=0), stored([4], 1, [0, 0]))),
        (120.0, (stored([6], 3, [2, 2]), stored([8], 77, [2, 2]))),
    )
    content = b"".join(map(recorded_line, batches))
    lines, said = importing("kv-events", content)
    assert [(line["timestamp"], line["tokens"], line["output_length"]) for line in lines] == [
        (0, [5, 6, 7, 8, 9, 9], 0), (1000, [5, 6, 0, 0], 0), (20_000, [5, 6, 7, 8, 9, 9, 2, 2], 0),
    ]  # fmt: skip
    assert any("no event named" in remark and count == 1 for remark, count in said["remarks"].items())
    assert [line["tokens"] for line in importing("kv-events", content, "--group", "1")[0]] == [[1, 1]]


def test_events_of_a_group_that_leaves_blocks_out_are_refused():
    windowed = messages((1.0, (BlockStored([2], None, [1, 2, 3, 4], 2, None, "GPU", None, group_idx=0),)))
    with pytest.raises(ConfigError, match="stores every block"):
        list(requests_of(windowed, ImportOptions(), Remarks()))


def test_operation_logs(importing, tmp_path):
    recording = record(NumpyEngine, "core", 2, 2, 12)
    path = tmp_path / "log.jsonl"
    write_log(path, recording.header, recording.operations, recording.answers)
    lines, _ = importing("operation-log", path.read_bytes(), "--step-ms", "7")
    asked = [json.loads(line) for line in path.read_text().splitlines()]
    requests = [operation for operation in asked if operation.get("op") == "request" and not operation.get("extra")]
    assert requests
    assert [line["tokens"] for line in lines] == [request["tokens"] for request in requests]
    appended = sum(len(operation["tokens"]) for operation in asked if operation.get("op") == "append")
    assert sum(len(line["output_tokens"]) for line in lines) <= appended
    assert all(line["timestamp"] % 7 == 0 for line in lines)


@pytest.mark.parametrize("compress", [gzip.compress, zstandard.ZstdCompressor().compress, bytes])
def test_compressed_sources_are_the_same(importing, compress, tmp_path, monkeypatch):
    wanted, _ = importing("mooncake", MOONCAKE)
    assert importing("mooncake", compress(MOONCAKE.encode()))[0] == wanted
    (tmp_path / "trace").write_bytes(compress((tmp_path / "out.jsonl").read_bytes()))
    assert list(read_trace(str(tmp_path / "trace"))) == list(read_trace(str(tmp_path / "out.jsonl")))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO((tmp_path / "trace").read_bytes())))
    assert list(read_trace("-")) == list(read_trace(str(tmp_path / "out.jsonl")))


@pytest.mark.parametrize("compress", [gzip.compress, zstandard.ZstdCompressor().compress])
def test_half_a_compressed_file_is_refused(importing, compress):
    data = compress(bytes(json.dumps(list(range(40000))), "ascii") + b"\n")
    with pytest.raises(FileError):
        importing("mooncake", data[: len(data) // 2])


def test_zstandard_wants_the_extra(importing, monkeypatch):
    data = zstandard.ZstdCompressor().compress(MOONCAKE.encode())
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(MissingExtraError, match=r"hkv\[traces\]"):
        importing("mooncake", data)


@pytest.mark.parametrize(
    ("format", "content", "told"),
    [
        ("azure", "a,b\n1,2\n", "TIMESTAMP"),
        ("azure", AZURE.replace("4808", "many"), "ContextTokens"),
        ("azure", AZURE.replace("2023-11-16 18", "noon"), "TIMESTAMP"),
        ("azure", AZURE + AZURE_2024.splitlines()[1] + "\n", "zone"),
        ("burstgpt", BURST.replace("1129", "nan"), "Timestamp"),
        ("mooncake", "[1]\n", "a JSON object"),
        ("mooncake", lines_of({"timestamp": 0, "input_length": 0}), "input_length"),
        ("dynamo", lines_of({"input_length": 3, "output_length": 1}), "--rate"),
        ("burstgpt", b"Timestamp,Request tokens,Response tokens\n\xff\n", "UTF-8"),
        ("mooncake", "", "at least one request"),
    ],
)
def test_what_cannot_be_read_is_named(importing, format, content, told):
    with pytest.raises(HKVError, match=told):
        importing(format, content)


def test_options_that_say_nothing_to_a_format_are_refused(importing):
    for options in (("--rate", "1"), ("--tokenizer", __file__), ("--synthetic", "shared-prefix"), ("--group", "1")):
        with pytest.raises(ConfigError, match=options[0]):
            importing("mooncake", MOONCAKE, *options)


@given(blocks=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5), max_size=12))
def test_own_ids_are_equal_exactly_where_prefixes_are(blocks):
    requests = [
        NewRequest(line=i, timestamp=0, input_length=len(ids), output_length=0, ids=ids) for i, ids in enumerate(blocks)
    ]
    lines = [line["hash_ids"] for line in own_lines(requests, 1)]
    for mine, my_ids in zip(blocks, lines, strict=True):
        for other, other_ids in zip(blocks, lines, strict=True):
            for place in range(min(len(mine), len(other))):
                assert (my_ids[place] == other_ids[place]) == (mine[: place + 1] == other[: place + 1])


@given(delays=st.lists(st.none() | st.integers(0, 1000), min_size=1, max_size=6))
def test_turns_never_come_before_the_answer_they_follow(delays):
    turns = [
        NewRequest(line=i, timestamp=0.0 if not i else None, input_length=1, output_length=3, session="s", delay=delay)
        for i, delay in enumerate(delays)
    ]
    ordered = in_order(turns, ImportOptions(ms_per_token=2, pause=0.005), Remarks())
    assert [turn.line for turn in ordered] == list(range(len(delays)))
    for before, turn in itertools.pairwise(ordered):
        assert turn.timestamp == before.timestamp + 6 + (5 if turn.delay is None else turn.delay)


def test_plain_text_is_a_prompt_a_line(importing, tokenizer):
    lines, said = importing("text", "ab\n\nabc\r\n", "--tokenizer", "bytes", "--output-tokens", "3", "--rate", "1")
    assert [(line["tokens"], line["output_length"]) for line in lines] == [([97, 98], 3), ([97, 98, 99], 3)]
    assert said["remarks"]["source whose bytes stand for tokens: several times as many as a model's"] == 1
    lines, said = importing("text", "ab\n", "--tokenizer", tokenizer, "--output-tokens", "0", "--rate", "1")
    assert lines[0]["tokens"] == [1, 2]
    assert not any("bytes" in remark for remark in said["remarks"])
    with pytest.raises(ConfigError, match=r"json, or bytes, each of which is a token then, for --from text"):
        importing("text", "ab\n", "--output-tokens", "0", "--rate", "1")


@pytest.mark.parametrize(
    ("first", "name"),
    [
        ("TIMESTAMP,ContextTokens,GeneratedTokens", "azure"),
        ("Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type", "burstgpt"),
        ('[{"id": "a", "conversations": []}]', "sharegpt"),
        ('{"custom_id": "a", "body": {"messages": []}}', "openai-batch"),
        ('{"messages": [{"role": "user", "content": "a"}]}', "openai-chat"),
        ('{"prompt": "a"}', "prompts"),
        ('{"oplog":2,"dialect":"vllm-0.33"}', "operation-log"),
        ("Tell me a story.", "text"),
    ],
)
def test_a_trace_in_another_format_is_refused_by_what_reads_it(tmp_path, first, name):
    path = tmp_path / "given"
    path.write_text(first + "\n")
    with pytest.raises(FileError, match=f"`hkv trace import {path} --from {name} -o FILE` makes one"):
        list(read_trace(str(path)))
    path.write_text(json.dumps({"timestamp": 0, "input_length": 3}) + "\n" + first + "\n")
    with pytest.raises(FileError, match="hash_ids"):
        list(read_trace(str(path)))
