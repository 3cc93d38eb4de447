"""`hkv replay --model`: the cache is the one that `hkv plan` makes of the model and the memory."""

import json
import pathlib

import pytest

MODELS = pathlib.Path(__file__).parents[1] / "data" / "models"


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    """Twelve requests that share 1,200 tokens and then go ways of their own, as token lists."""
    path = tmp_path_factory.mktemp("traces") / "chat.jsonl"
    shared = list(range(1200))
    lines = [
        {"timestamp": 400 * i, "tokens": [*shared, *range(10_000 * (i + 1), 10_000 * (i + 1) + 90)], "output_length": 7}
        for i in range(12)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def config(name):
    return str(MODELS / f"{name}.json")


def document(shell, *arguments):
    code, out, err = shell(*arguments, "--json", "-")
    assert (code, err) == (0, "")
    return json.loads(out)


@pytest.mark.parametrize("name", sorted(path.stem for path in MODELS.glob("*.json")))
def test_groups_and_blocks_are_those_of_the_plan(shell, chat, name):
    asked = ("--memory", "30GiB", "--max-model-len", "2048")
    planned = document(shell, "plan", config(name), *asked)
    arguments = ("--model", config(name), *asked, "--engine", "numpy", "--limit", "4", "--retention", "dense")
    replayed = document(shell, "replay", chat, *arguments)
    assert replayed["totals"]["blocks"] == planned["num_blocks"] - 1
    assert [group["layers"] for group in replayed["groups"]] == [group["layers"] for group in planned["groups"]]
    assert [int(group["group"].split(":")[1]) for group in replayed["groups"]] == [
        group["block_size"] for group in planned["groups"]
    ]
    unit = planned["scheduler_block_size"]
    recurrent = any(group["kind"] == "mamba" for group in planned["groups"])
    shared = 1200 // unit * unit
    second = shared if not recurrent or 1289 // unit == 1200 // unit else 0
    later = second if recurrent and len(planned["groups"]) == 1 else shared
    hits = [0, second, later, later]
    assert replayed["requests"]["hit"] == hits, "states are kept at a prompt's last block and where prompts part"


def test_blocks_that_divide_no_id_are_compiled_and_checked(shell, chat):
    """80-token blocks: a state is kept where the first two prompts part, by the compiled cache and by the plain one."""
    arguments = ("--model", config("jamba"), "--memory", "1GiB", "--max-model-len", "2048", "--retention", "dense")
    replayed = document(shell, "replay", chat, *arguments, "--check")
    assert replayed["requests"]["hit"] == [0, 0] + [1200] * 10
    assert {group["group"] for group in replayed["groups"]} == {"mamba:80", "full:80"}


@pytest.mark.parametrize(
    ("tokens", "ids", "hit"),
    [(1064, [1, 2, 4], 576), (1536, [1, 2, 3], 1152), (1536, [1, 2, 4], 576)],
    ids=["in the second id", "in the third id", "past what is shared"],
)
def test_hash_ids_of_512_tokens_and_blocks_of_576(shell, tmp_path, tokens, ids, hit):
    """A state is kept at the last block that the first prompt fills, wherever in an id that is."""
    path = tmp_path / "ids.jsonl"
    line = {"input_length": tokens, "output_length": 1}
    lines = [line | {"timestamp": 0, "hash_ids": [1, 2, 3]}, line | {"timestamp": 9000, "hash_ids": ids}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    arguments = ("--model", config("qwen3_next"), "--memory", "8GiB", "--engine", "numpy", "--retention", "dense")
    assert document(shell, "replay", str(path), *arguments)["requests"]["hit"] == [0, hit]


def test_longest_requests(shell, chat):
    arguments = ("--model", config("gemma3_text"), "--engine", "numpy", "--limit", "2", "--memory", "600MiB")
    _, out, _ = shell("replay", chat, *arguments, "--max-model-len", "auto")
    assert out.startswith("gemma3_text: 7 groups, 2,400 blocks of 256 KiB, hits at multiples of 16 tokens")
    longest = int(" ".join(out.split()).partition("requests of up to ")[2].split()[0].replace(",", ""))
    assert 4096 < longest < 131072
    code, out, err = shell("replay", chat, *arguments)
    assert (code, out) == (2, "")
    assert f"requests of {longest} tokens would fit" in err
    refused = document(shell, "replay", chat, *arguments, "--max-model-len", "1200")
    assert refused["totals"]["too_long"] == 2


def test_a_draft_and_the_drop_rule(shell, chat):
    arguments = ("--model", config("llama"), "--memory", "8GiB", "--engine", "numpy", "--draft", config("llama"))
    drafted = document(shell, "replay", chat, *arguments)
    assert any(group["eagle"] for group in drafted["groups"])
    assert drafted["requests"]["hit"][1] == 1200 - 16
    every = document(
        shell, "replay", chat, "--model", config("gpt_oss"), "--memory", "8GiB", "--engine", "numpy",
        "--eagle", "1", "--retention", "0", "--limit", "3",
    )  # fmt: skip
    assert [group["eagle"] for group in every["groups"]] == [False, True]


def test_without_caching_a_state_has_one_block(shell, chat):
    arguments = ("--model", config("qwen3_next"), "--memory", "8GiB", "--engine", "numpy", "--no-caching")
    replayed = document(shell, "replay", chat, *arguments, "--limit", "2")
    assert replayed["totals"]["hit_tokens"] == 0
    assert replayed["groups"][0]["group"] == "mamba:32768"
