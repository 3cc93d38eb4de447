"""Writes docs/tables/released-models.md: `python benchmarks/released_tables.py`.

Every number comes from the same code as `hkv plan`; origins from hkv/model/released/index.toml.
"""

from __future__ import annotations

import argparse
import collections
import pathlib

from benchmarks.third_calculator import compared
from hkv.errors import HKVError
from hkv.model.huggingface import read_model
from hkv.model.released import Released, released_models

TARGET = pathlib.Path(__file__).resolve().parent.parent / "docs" / "tables" / "released-models.md"

HEAD = """# Released models, by name

Wherever a command or `read_model` takes a model's `config.json`, it also takes the name of one of these
(`hkv plan gpt-oss-20b --memory 80GiB`), or the repository on Hugging Face, with or without the organisation. A file or
a folder of that name goes before it, and so does the repository in a Hugging Face cache on the machine (`HF_HUB_CACHE`,
`HF_HOME`), which is read without a network. An unknown name is answered with names that are close, by family and size.

Variants are found too: base and instruction-tuned versions, distils and finetunes, which `variants.toml` beside it
lists, and quantized weights of any of them by the marks at the end of their names (`Qwen/Qwen3-32B-AWQ`), by the
model's own organisation or one that publishes copies. The plan then says whose config was taken.

Each config is in `hkv/model/released/configs`, and `index.toml` beside it says where its values are from: a **copy** of
the published `config.json` that a public repository keeps; an **excerpt** of one, with the decoder's fields; or single
**values** that a source lists, and no others. What no source gives is not there, and the family's default stands for
it, as it does in a published file that leaves a field out. No file was compared with the one that Hugging Face serves;
{compared} of {models} were compared with a second public source, in what it has of the fields that decide what is
cached.

## A capacity table

`hkv plan` of several models, or with several values of an option, makes one table: a row for each combination.

```
hkv plan gpt-oss-20b gemma-3-27b --memory 80GiB --tp 1,2 --max-model-len 8192,131072 --csv F.csv --plot F.png
```

`--tp`, `--pp`, `--dcp`, `--kv-cache-dtype` and `--max-model-len` take several values. The columns, in CSV and JSON
under the names in brackets:

- longest request (`max_model_len`): its tokens; every request that is counted has as many.
- a token (`token_bytes`): bytes that one more token of a sequence adds for good, on one GPU.
- a sequence (`sequence_bytes`): bytes that it holds beside, for windows, chunks and states.
- blocks (`num_blocks`), tokens (`tokens`), concurrency (`concurrency`): what vLLM says at start-up.
- simulated (`requests`): requests that fit when they run through the pool, as `hkv plan` of one model finds it.
- limited by (`limiting`, `limiting_share`, `limited_by`): kind of the layers that hold most of a request's blocks.
- waste (`waste`): share of a request's blocks that holds no layer's bytes, padding and room up to the widest group.

A refused combination is a row with its reason (`refused`); if all are refused for one reason, that is the command's
error. The plot draws concurrency against length, a line for each model and choice of the other options, through
every power of two between the lengths that were asked for.

## The models

Bytes of one token, and of windows and states of a long sequence, on one GPU in the model's own element type. The last
column is another calculator's answer, `kvcache-simulator` 0.1.3 (`python benchmarks/record_catalogue.py` records it):
{said} models are in both, {equal} equal; where its catalogue is what was read, that says nothing of the values. A
letter is a reason below.

| name | repository | read from | second sources | a token | a sequence | longest request | other calculator |
|---|---|---|--:|--:|--:|--:|---|
"""


def document() -> str:
    models, answers = released_models(), compared()
    reasons = {reason: chr(ord("a") + i) for i, reason in enumerate(sorted({r for r in answers.values() if r}))}
    refused: dict[str, list[str]] = collections.defaultdict(list)
    rows = []
    for model in models:
        try:
            rows.append(row(model, answers, reasons))
        except HKVError as error:
            refused[" ".join(str(error).split())].append(model.name)
    head = HEAD.format(
        compared=sum(bool(model.compared) for model in models),
        models=len(models),
        said=len(answers),
        equal=sum(reason == "" for reason in answers.values()),
    )
    lines = [head + "\n".join(rows), "", "Reasons:", ""]
    lines += [f"- {letter}: {reason}." for reason, letter in reasons.items()]
    lines += ["", "Shipped and refused:", ""]
    lines += [f"- {', '.join(names)}: `{reason}`" for reason, names in refused.items()]
    return "\n".join([*lines, "", "Written by `python benchmarks/released_tables.py`.", ""])


def row(released: Released, answers: dict[str, str | None], reasons: dict[str, str]) -> str:
    model = read_model(released.config())
    answer = answers.get(released.name, "-")
    assert answer is not None, f"{released.name}: a difference without a reason"
    other = "equal" if answer == "" else reasons.get(answer, answer)
    source = f"[{origin(released.source)}]({released.source})"
    cells = (
        released.name,
        ", ".join(released.ids),
        f"{released.form}, {source}",
        str(len(released.compared) or "-"),
        show(model.token_bytes),
        f"{model.resident_bytes:,}" if model.resident_bytes else "-",
        f"{model.max_model_len:,}",
        other,
    )
    return f"| {' | '.join(cells)} |"


def origin(address: str) -> str:
    """The repository, or the package, that an address is of."""
    parts = address.removeprefix("https://").split("/")
    return parts[2]


def show(number: object) -> str:
    value = float(number)  # type: ignore[arg-type]
    return f"{value:,.0f}" if value == int(value) else f"{value:,.4f}"


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    TARGET.write_text(document(), encoding="utf-8")


if __name__ == "__main__":
    main()
