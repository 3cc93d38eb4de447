"""Every command with input it cannot use: exit status, one line, nothing written.

Commands run in this process as `hkv.cli.main` runs them, standard output being a descriptor of its own.
"""

from __future__ import annotations

import gzip
import itertools
import json
import pathlib
from collections.abc import Iterator

import click
import pytest

import hkv.cli
from tests.cli.commands import DIFFERENT, FILES, INPUTS, Inputs, complaint, contents, definition, outputs, perform

pytestmark = pytest.mark.usefixtures("nothing_is_compiled")

OUTPUTS = list(outputs())

HUGE = "9" * 25
LONG = "9" * 5000
"""More digits than Python makes a number of (`sys.set_int_max_str_digits`)."""


def test_all_commands_are_here() -> None:
    assert set(INPUTS) == set(hkv.cli.COMMANDS)
    assert {command for command, _ in OUTPUTS} == set(hkv.cli.COMMANDS)


@pytest.mark.parametrize("command", INPUTS)
def test_the_smallest_use_works(command: str, inputs: Inputs, tmp_path: pathlib.Path, capsys) -> None:
    ended = perform(inputs.arguments(command, tmp_path), tmp_path)
    assert ended.status == DIFFERENT.get(command, 0)
    assert ended.out
    assert capsys.readouterr().err == ""


def unusable(folder: pathlib.Path) -> Iterator[tuple[str, pathlib.Path]]:
    """Files that no command can read, by what is wrong with them."""
    made = {
        "empty": b"",
        "binary": bytes(range(256)) * 8,
        "truncated gzip": gzip.compress(b'{"oplog": 2}\n' * 100)[:40],
        "UTF-16": '{"timestamp": 0}\n'.encode("utf-16"),
        "Latin-1": '{"timestamp": "é"}\n'.encode("latin-1"),
        "NaN": b'{"oplog": NaN, "timestamp": NaN, "seq": NaN, "num_hidden_layers": NaN}\n',
        "negative": b'{"oplog": -1, "timestamp": -1, "seq": -1, "num_hidden_layers": -1}\n',
        "huge": b'{"oplog": %b, "timestamp": %b, "seq": %b, "num_hidden_layers": %b}\n' % ((LONG.encode(),) * 4),
        "deep": b"[" * 100_000,
        "a list": b"[1, 2]\n",
        "a number": b"1\n",
    }
    yield "missing", folder / "missing"
    yield "folder", folder
    yield "below a file", folder / "empty" / "x"
    for name, data in made.items():
        path = folder / name
        path.write_bytes(data)
        yield name, path


@pytest.mark.parametrize("command", FILES)
def test_files_that_cannot_be_read(command: str, inputs: Inputs, tmp_path: pathlib.Path, capsys) -> None:
    for name, path in unusable(tmp_path):
        field = FILES[command].strip("{}")
        before = contents(tmp_path)
        ended = perform(inputs.arguments(command, tmp_path, **{field: path}), tmp_path)
        assert (ended.status, ended.out) == (2, b""), name
        error = complaint(capsys)
        assert path.name in error or (command == "plan" and name in ("NaN", "negative")), name  # the field is named
        assert contents(tmp_path) == before, name


CONFIG_OPTIONS = [("plan", "--draft"), ("plan", "--layers"), ("replay", "--draft"), ("replay", "--model")]


@pytest.mark.parametrize(("command", "option"), CONFIG_OPTIONS)
def test_configs_that_cannot_be_read(command: str, option: str, inputs: Inputs, tmp_path: pathlib.Path, capsys) -> None:
    by_model = [str(inputs.trace), "--memory", "8GiB", *([] if option == "--model" else ["--model", str(inputs.model)])]
    rest = by_model if command == "replay" else [str(inputs.model), "--memory", "8GiB"]
    for name, path in unusable(tmp_path):
        ended = perform([command, *rest, option, str(path)], tmp_path)
        assert (ended.status, ended.out) == (2, b""), name
        complaint(capsys)


def numbers_replaced(value: object, by: object) -> Iterator[object]:
    """A JSON value with one of its numbers replaced, for each of them."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from ({**value, key: changed} for changed in numbers_replaced(inner, by))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from ([*value[:index], changed, *value[index + 1 :]] for changed in numbers_replaced(inner, by))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield by


@pytest.mark.parametrize("number", [-1, 2**31 - 1, 10**25, 1e300, float("nan")], ids=str)
@pytest.mark.parametrize("command", FILES)
def test_numbers_in_files(command: str, number: float, inputs: Inputs, tmp_path: pathlib.Path, capsys) -> None:
    """Every number of a file in turn, wherever it stands: the command ends, and says in a line what is wrong."""
    field = FILES[command].strip("{}")
    path = tmp_path / "changed"
    lines = getattr(inputs, field).read_text().splitlines()
    objects = [json.loads("\n".join(lines))] if command == "plan" else [json.loads(line) for line in lines]
    for index, value in enumerate(objects):
        for changed in numbers_replaced(value, number):
            whole = [*objects[:index], changed, *objects[index + 1 :]]
            path.write_text("".join(json.dumps(one) + "\n" for one in whole))
            ended = perform(inputs.arguments(command, tmp_path, **{field: path}), tmp_path)
            if ended.status == 2:
                complaint(capsys)
            assert ended.status in (0, 1, 2), changed
            assert capsys.readouterr().err == "", changed


def numeric() -> Iterator[tuple[str, str]]:
    """Every option that is a number by its type."""
    for command in hkv.cli.COMMANDS:
        for parameter in definition(command).params:
            if isinstance(parameter.type, click.types.IntParamType | click.types.FloatParamType):
                yield command, parameter.opts[0]


@pytest.mark.parametrize("command", hkv.cli.COMMANDS)
def test_every_numeric_option_has_bounds(command: str) -> None:
    for parameter in definition(command).params:
        if isinstance(parameter.type, click.types.IntParamType | click.types.FloatParamType):
            assert isinstance(parameter.type, click.IntRange | click.FloatRange), parameter.name
            assert parameter.type.min is not None, parameter.name
            assert parameter.type.max is not None, parameter.name


@pytest.mark.parametrize(("command", "option"), list(numeric()))
def test_numeric_options_refuse_what_is_out_of_bounds(
    command: str, option: str, inputs: Inputs, tmp_path: pathlib.Path, capsys
) -> None:
    for value in (HUGE, f"-{HUGE}", LONG, "nan", "inf", "1e400", "", "x"):
        arguments = [*inputs.arguments(command, tmp_path), f"{option}={value}" if option.startswith("--") else value]
        ended = perform(arguments, tmp_path)
        assert (ended.status, ended.out) == (2, b""), value
        assert option in complaint(capsys), value


TEXTS = [
    *(("plan", "--dialect", value) for value in ("", "nothing", "vllm-0.33,nothing")),
    *(("replay", "--groups", f"{kind}") for kind in (f"full:{HUGE}", f"swa:16:{HUGE}", f"full:{LONG}", "full:nan", "")),
    *(("replay", "--groups", kind) for kind in ("full:2147483647,swa:2147483646:4", "full:-1", "full:0", "mamba:")),
    *(("replay", "--num-blocks", value) for value in ("1000000000000", HUGE, LONG, "-5", "0", "1", "nan", "", "5,")),
    *(("replay", "--max-model-len", value) for value in (HUGE, LONG, "-1", "0", "nan", "", "auto")),
    *(("replay", "--speed", value) for value in (HUGE, LONG, "1e999999999", "-1", "0", "nan", "inf", "1/0", "")),
    *(("replay", "--warmup", value) for value in (HUGE, LONG, "-1", "100%", "1.5%", "nan", "")),
    *(("replay", "--retention", value) for value in (HUGE, LONG, "-1", "nan", "7", "")),
    *(("replay", "--eagle", value) for value in (HUGE, LONG, "-1", "nan", "9", "")),
    *(("replay", "--engine", value) for value in ("", "nothing", "cmd:", "cmd:/nowhere/engine", "nowhere.py:Engine")),
    *(("explore", "--groups", value) for value in (f"full:{HUGE}", "opaque:1", "", "full")),
    *(("explore", "--retention", value) for value in (HUGE, "-1", "x")),
    *(("explore", "--eagle", value) for value in (HUGE, "-1", "x")),
    *(
        ("plan", "--memory", value)
        for value in ("1000000TiB", HUGE, LONG, f"{LONG}GiB", "-1GiB", "0", "nan", "", "1XiB")
    ),
    *(("plan", "--memory", value) for value in ("1e400", "inf", f"0.{LONG}GiB", "1XiB")),
    *(("plan", "--max-model-len", value) for value in (HUGE, LONG, "-2", "0", "nan", "", "1.5K", "9999999m", "1q")),
    *(
        ("plan", name, value)
        for name in ("--gpu-memory", "--activations", "--weights")
        for value in ("", "x", "0", HUGE)
    ),
    *(("plan", "--weights", value) for value in ("nowhere.json", "pyproject.toml")),
    *(("plan", "--device", value) for value in ("", "tpu")),
    *(
        ("plan", "--speculative-config", value)
        for value in ("", "x", "[]", "{}", '{"method": "guess"}', '{"magic": 1}')
    ),
    *(("plan", "--layout", value) for value in ("", "X", "LBHN")),
    *(("plan", name, value) for name in ("--shared", "--target-hit-rate") for value in ("", "x", "-1%", "101%", "nan")),
    *(("plan", "--trace", value) for value in ("", "/nowhere/trace.jsonl", "pyproject.toml")),
    ("plan", "--ignore-field", "sliding_window,num_hidden_layers"),
    *(("plan", name, value) for name in ("--tp", "--pp", "--dcp") for value in (HUGE, LONG, "-1", "0", "nan", "", "x")),
    *(("plan", name, value) for name in ("--dtype", "--kv-dtype", "--state-dtype") for value in ("", "float7")),
    *(("plan", "--bugs", value) for value in ("x", "x,y")),
    *(("plan", "--explicit-blocks", value) for value in ("", "x", "full=-1")),
    *(
        ("layout", "--spec", value)
        for value in (f"full:{HUGE}", f"full:{LONG}", "full:0", "full:-1", "full:nan", "", "x")
    ),
    *(("layout", "--tokens-per-state", value) for value in (HUGE, LONG, "1e999999999", "nan", "-1", "0", "1/0", "")),
    *(("layout", "--state", value) for value in (f"{HUGE}:float32", "4x-1:float32", "4", ":float32", "4:x")),
    *(("layout", "--address", value) for value in (f"{HUGE},0,0,0,0", f"0,0,0,0,{HUGE}", "0,-1,0,0,0", "nan", "")),
    *(("layout", "--plan", value) for value in ("", "nowhere.json", "pyproject.toml")),
    ("layout", "--tag", "full"),
    *(("layout", "--dtype", value) for value in ("", "x")),
    *(("layout", "--layout", value) for value in ("", "x")),
    *(("layout", "--quantization", value) for value in ("", "x")),
    *(("plan", "--explicit-blocks", value) for value in ("", "x", "kv:x")),
    *(
        (command, "--engine", value)
        for command in ("check", "record", "shrink")
        for value in ("", "x", "cmd:/nowhere/e")
    ),
    *((command, "--kinds", value) for command in ("diff", "record") for value in ("x", "full_attention,x")),
    *(("diff", "--engines", value) for value in ("", "numpy", "numpy,x", "cmd:/nowhere/e,numpy")),
    *(("diff", "--definition", value) for value in ("", "x", "jax")),
    *(("check", "--bugs", value) for value in ("x", "x,y")),
    *(("mutate", "--by", value) for value in ("", "'", "false", "true", "/nowhere/judge")),
    *(("mutate", "--state", value) for value in ("", ".", "nowhere/trials", "pyproject.toml")),
    *(("watch", "--kinds", value) for value in ("x", "full_attention,x")),
    *(("check", "--fail-on", value) for value in ("x", "x,y")),
    *(("explain", "--request", value) for value in ("", "no such request")),
    *(("check-kernel", "--supports", value) for value in ("", "speed=9", "reuse=x", "functional=1", "heads=0")),
    *(("watch", "--serve", value) for value in ("", "x", "127.0.0.1:99999999")),
    *(("replay", "--offload", value) for value in ("", "x", "-1", HUGE)),
    *(("replay", "--offload-bandwidth", value) for value in ("", "x", "-1", "0")),
    *(("check-kernel", "--device", value) for value in ("x", "cuda")),
    *(("check-kernel", "--case", value) for value in (".", "nowhere/case", "pyproject.toml")),
    *(("check-events", "--endpoint", value) for value in ("", "x", "tcp://127.0.0.1:99999999")),
]
"""Options that are read as text, and texts that they refuse."""


def test_every_option_is_tried() -> None:
    """Choices, flags and outputs are looked at elsewhere; every other one is a number or stands in `TEXTS`."""
    tried = {(command, option) for command, option, _ in TEXTS} | set(numeric())
    files = {("check-events", "--replay-endpoint"), ("check-events", "--topic"), ("shrink", "--against")}
    files |= set(CONFIG_OPTIONS)
    files |= {("trace import", option) for option in ("--tokenizer", "--answers", "--endpoint", "--topic")}
    files |= {("trace import", "--replay-endpoint"), ("sweep", "--results"), ("sweep", "--ray"), ("diff", "--ray")}
    files |= {
        ("replay", "--memory"),
        ("replay", "--kv-dtype"),
        ("diff", "--bugs"),
        ("diff", "--known"),
        ("watch", "--log"),
    }
    for command in hkv.cli.COMMANDS:
        for parameter in definition(command).params:
            if isinstance(parameter, click.Option) and not parameter.is_flag:
                special = isinstance(parameter.type, click.Choice) or (command, parameter.opts[-1]) in OUTPUTS
                assert special or {(command, option) for option in parameter.opts} & (tried | files), parameter.opts


@pytest.mark.parametrize(("command", "option", "value"), TEXTS, ids=lambda value: str(value)[:30])
def test_texts_that_are_refused(
    command: str, option: str, value: str, inputs: Inputs, tmp_path: pathlib.Path, capsys
) -> None:
    arguments = inputs.arguments(command, tmp_path)
    arguments = [*arguments[:1], *(arguments[2:] if option == "--endpoint" else arguments[1:]), f"{option}={value}"]
    if command == "layout" and option == "--state":
        arguments.append("--spec=mamba:16")
    if option == "--endpoint":
        arguments.append("--seconds=0")
    if option in ("--shared", "--target-hit-rate"):
        arguments.append("--prompt=80")
    ended = perform(arguments, tmp_path)
    assert (ended.status, ended.out) == (2, b"")
    complaint(capsys)
    assert contents(tmp_path) == {}


MESSAGES = {
    "layout --spec full": "group = 'full'",
    "layout --spec full:16 --layout XYZ": "layout = 'XYZ': expected one of LBHNC",
    "layout --spec full:16 --num-blocks 0": "Invalid value for '--num-blocks': 0 is not in the range",
    "layout --spec full:16 --address 1,2,3": "--address = '1,2,3': expected layer,block,head,token",
    "layout --spec full:16 --address 0,0,0,16,0": "token = 16: expected a number from 0 to 15",
    "layout --spec full:16 --address 0,0,0,-1,0": "token = -1",
    "layout --spec full:16 --address 0,0,0,0,256": "channel = 256: expected a number from 0 to 255",
    "layout --spec full:16 --address 0,0,0,0,key:128": "channel = 'key:128'",
    "layout --spec full:16 --address 0,0,0,0,rope:1": "part = 'rope': expected one of key, value",
    "layout --spec full:16 --address 0,0,0,0,x": "--address = 'x'",
    "layout --spec full:16 --byte -1": "Invalid value for '--byte': -1 is not in the range",
    "layout --spec full:16 --tokens-per-state 1/0": "--tokens-per-state = '1/0'",
    "layout --spec mamba:16 --state 4,8": "--state = '4,8'",
    "layout --spec full:16 --image block.pdf": "--image = 'block.pdf'",
    "layout --spec full:16 --quantization fp7": "quantization = 'fp7'",
    "layout --spec full:16 --kernel-block-size 5": "kernel_block_size = 5: expected a divisor",
    "replay {trace} --groups full --num-blocks 9": "full:block_size",
    "replay {trace} --groups full:0 --num-blocks 9": "positive integer",
    "replay {trace} --groups full:16,swa:16 --num-blocks 9": "swa:block_size:window",
    "replay {trace} --groups fall:16 --num-blocks 9": "expected one of",
    "replay {trace} --groups full:16 --num-blocks 1": "num-blocks",
    "replay {trace} --groups full:16": "num-blocks",
    "replay {trace} --groups full:16,swa:16:64 --num-blocks 2000 --eagle 2": "eagle_groups",
    "replay {trace} --groups full:16,swa:16:64 --num-blocks 2000 --eagle one": "eagle",
    "replay {trace} --groups full:16,swa:16:64 --num-blocks 2000 --retention 17": "retention_interval",
    "replay {trace} --groups full:16,swa:16:64 --num-blocks 2000 --retention -1": "retention",
    "replay {trace} --groups full:16,swa:16:64 --num-blocks 2000 --speed 0": "speed",
    "replay {trace} --groups full:16,swa:16:64 --num-blocks 2000 --speed 1/0": "speed",
    "replay {trace} --groups full:16,swa:16:64 --num-blocks 2000 --decode-tokens 9 --step-tokens 8": "decode_tokens",
    "replay {trace} --groups full:16,swa:16:64 --num-blocks 2000 --engine nobody": "nobody",
    "replay {trace} --groups full:16,swa:16:64 --num-blocks 2000 --engine numpy --check": "other than numpy",
    "replay {trace} --groups full:16,swa:16:64 --num-blocks 2000 --plot x.gif": ".png or .svg",
    "replay {trace} --groups full:16,swa:16:64 --num-blocks 2000 --tokens-per-id 10": "tokens_per_id = 16: expected 10",
    "replay {trace} --groups full:16 --num-blocks 90 --offload 40 --engine vllm": "--engine jax or numpy beside it",
    "sweep {trace} --groups full:16 --num-blocks 90 --offload 40,80 --engine sglang": "--engine jax or numpy beside it",
    "trace poems -o x": "poems",
    "trace chat": "output",
    "trace chat -o x --rate 0": "rate",
    "trace chat -o x --turns nan": "turns",
    "trace chat -o x --requests 0": "requests",
    "trace chat -o x --seed -1": "seed",
    "replay {trace}": "one of --groups",
    "replay {trace} --groups full:16 --num-blocks 9 --model x": "one of --groups",
    "replay {trace} --groups full:16 --num-blocks 9 --memory 1GiB": "--memory is not for --groups",
    "replay {trace} --groups full:16 --num-blocks 9 --tp 2": "--tp is not for --groups",
    "replay {trace} --groups full:16 --num-blocks 9 --max-model-len auto": "auto is for --model",
    "replay {trace} --model {model} --num-blocks 9": "wants --memory",
    "replay {trace} --model {model} --memory 1GiB --num-blocks 9": "--num-blocks is not for --model",
    "replay {trace} --model {model} --memory 1": "memory",
    "replay {trace} --model {model} --memory lots": "80GiB",
    "replay {trace} --model {model} --memory 1GiB --kv-dtype int3": "kv_dtype",
    "replay {trace} --model {model} --memory 1GiB --tp 7": "heads",
    "replay {trace} --model {model} --memory 9GiB --eagle 1": "eagle_groups",
    "replay {trace} --model {model} --memory 1GiB --max-model-len 0": "max_model_len",
    "replay {trace} --model absent.json --memory 1GiB": "absent.json",
    "plan {model} --memory 80GiB --layout XYZ": "layout = 'XYZ'",
    "plan {model} --memory 80GiB --memory lots": "memory = 'lots'",
    "plan {model} --memory 80GiB --max-model-len soon": "max_model_len = 'soon'",
    "plan {model} --memory 80GiB --tp 3": "num_attention_heads = 32",
    "plan {model} --memory 80GiB --memory 1MiB": "at least",
    "plan {model} --memory 80GiB --pools independent": "pools = 'independent'",
    "plan {model} --memory 80GiB --kernel-block-size 7": "kernel_block_size = 7",
    "plan {model} --memory 80GiB --dialect rtp-llm --pp 2": "--pp",
    "plan {model} --memory 80GiB --dialect rtp-llm --dcp 2 --tp 2": "--tp",
    "plan {model} --memory 80GiB --dialect rtp-llm --layout LBHNC": "--layout",
    "plan {model} --memory 80GiB --dialect rtp-llm --kv-dtype int4_per_token_head": "kv_dtype = 'int4_per_token_head'",
    "plan {model} --memory 80GiB --dialect rtp-llm --kv-dtype float16": (
        "kv_dtype = 'float16': expected bfloat16, which the model"
    ),
    "plan {model} --memory 80GiB --draft-modules 2": "--draft-modules",
    "plan {model} --memory 80GiB --bugs nothing-known": "nothing-known",
    "plan {model} --memory 80GiB --kv-dtype fp3": "kv_cache_dtype = 'fp3'",
}
"""Command lines that make no sense, and what is said of each."""


@pytest.mark.parametrize("line", MESSAGES)
def test_what_makes_no_sense_is_named(line: str, inputs: Inputs, tmp_path: pathlib.Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    ended = perform(line.format(**vars(inputs)).split(" "), tmp_path)
    assert (ended.status, ended.out) == (2, b"")
    assert MESSAGES[line] in complaint(capsys)
    assert contents(tmp_path) == {}


@pytest.mark.parametrize(
    "arguments",
    [
        ["plan", "{model}", "--memory=8GiB", "--tp=1" + "0" * 30],
        ["plan", "{model}", "--memory=8GiB", "--dialect=rtp-llm", "--tp=1" + "0" * 30],
        ["plan", "{v4}", "--memory=16TiB"],
        ["plan", "{v4}", "--memory=80GiB", "--max-in-flight=1"],
        ["replay", "{trace}", "--model", "{model}", "--memory=16TiB", "--block-size=1"],
        ["replay", "{trace}", "--model", "{model}", "--memory=1000000TiB"],
        ["replay", "{trace}", "--groups=full:16", "--num-blocks=16777217"],
        ["replay", "{trace}", "--groups=full:16", "--num-blocks=16777217", "--dialect=rtp-llm/single"],
        ["layout", "--spec=full:16", "--num-blocks=1" + "0" * 18],
        ["layout", "--spec=full:16", "--kv-heads=2000000000", "--layout=LHBNC"],
    ],
    ids=lambda arguments: " ".join(arguments)[:60],
)
def test_what_would_never_end_is_refused(arguments: list[str], inputs: Inputs, tmp_path: pathlib.Path, capsys) -> None:
    names = {**vars(inputs), "v4": inputs.model.with_name("deepseek_v4.json")}
    ended = perform([text.format(**names) for text in arguments], tmp_path)
    assert (ended.status, ended.out) == (2, b"")
    complaint(capsys)


def test_a_layout_of_a_hundred_billion_blocks_is_drawn(tmp_path: pathlib.Path) -> None:
    ended = perform(["layout", "--spec", "full:16", "--num-blocks", "1" + "0" * 11], tmp_path)
    assert ended.status == 0
    assert b"block 99999999999" in ended.out


def test_a_defect_has_a_status_of_its_own(
    inputs: Inputs, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    """An error that HKV should not have made is shown whole, and does not say "they differ"."""
    monkeypatch.setattr("hkv.oracle.verbs.check_log", lambda *_: itertools.count().foo)  # type: ignore[attr-defined]
    ended = perform(inputs.arguments("check", tmp_path), tmp_path)
    assert ended.status == hkv.cli.DEFECT
    assert "Traceback" in capsys.readouterr().err
