"""Runs `hkv` as an installed program: every command's help and smallest example, or every command of the documents.

  python .ci/commands.py smallest VENV/bin/hkv     with the base dependencies only
  python .ci/commands.py documents VENV/bin/hkv    in the environment that README's first command makes

Nothing of the checkout is imported. A command may end with 0, or with 1 where it says that something differs; where it
needs a package that is not installed it has to say so in one line, with 2. Runs of the documents are cut short (fewer
seeds, requests and states): what is checked is that they run.
"""

from __future__ import annotations

import concurrent.futures
import os
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent

SMALLEST = (
    "trace chat -o chat.jsonl --requests 20 --seed 1 --tokens-per-id 16",
    "trace import chat.jsonl --from mooncake --tokens-per-id 16 -o imported.jsonl",
    "replay chat.jsonl --groups full:16,swa:16:1024 --num-blocks 20000",
    "sweep chat.jsonl --groups full:16 --num-blocks 500..2000:3 --engine numpy",
    "compare chat.jsonl --groups full:16 --num-blocks 500;2000 --engine numpy",
    "check tests/data/oplogs/core-0.jsonl",
    "diff --engines numpy,jax --seeds 1 --feature core",
    "diff --engines examples/wrong_engine.py:WrongEngine,numpy --kinds full_attention --max-groups 1 --version 1 "
    "--feature core --save differences",
    "shrink differences/core-0-v1.jsonl --engine examples/wrong_engine.py:WrongEngine",
    "explain differences/core-0-v1.jsonl --line 8",
    "record --engine numpy --feature core --seed 1 -o core.jsonl",
    "explore --num-blocks 3 --max-model-len 1",
    "plan tests/data/models/gemma3_text.json --memory 80GiB",
    "plan gpt-oss-20b llama-3.1-8b --memory 80GiB --tp 1,2 --csv capacity.csv",
    "layout --spec full:16",
    "vectors vectors",
    "check-connector examples/connector.py:block_ranges",
    "watch numpy --seeds 1 --steps 2 --feature core",
    "mutate examples/toy_engine.py --sample 2 --by 'hkv watch examples/toy_engine.py:ToyEngine --kinds full_attention "
    "--max-groups 1 --version 1 --feature core --seeds 1'",
    "check-events events.jsonl",
    "check-kernel hkv.paged:zero_blocks --operation zero --draws 10 --supports reuse=5",
)

WANTING = {
    "replay chat.jsonl --groups full:16 --num-blocks 20000 --engine numpy --plot chat.png": "plots",
    "layout --spec full:16 --image block.svg": "plots",
    "plan gpt-oss-20b llama-3.1-8b --memory 80GiB --plot capacity.png": "plots",
    "check-events --endpoint tcp://127.0.0.1:5557 --seconds 1": "events",
}
"""Commands that want more than the base dependencies, and the extra that they have to name."""

EVENTS = """
import pathlib, msgspec
from hkv.oracle.events import Message, recorded_line
message = Message(0, msgspec.msgpack.encode([0.0, [["AllBlocksCleared"]], 0]))
pathlib.Path("events.jsonl").write_bytes(recorded_line(message))
"""

ENGINE = "from hkv.oracle.engines import engine_factory\nEngine = engine_factory('numpy')\n"
"""An engine that is right, under the rules of whichever dialect it is asked for."""

BLIND = """
from hkv.dialects.vllm.engines.numpy import NumpyEngine
from hkv.dialects.vllm.log.structs import Hit
class Blind(NumpyEngine):
    def lookup(self, id):
        hit = super().lookup(id)
        return Hit(hit=hit.hit, blocks=hit.blocks, shared_prefix=hit.shared_prefix + 1)
"""
"""An engine that is wrong about every lookup."""

C_ENGINE = [f"examples/c_engine/{name}.c" for name in ("engine", "pool", "keys", "json")]
RTP_ENGINE = ["examples/rtp_engine/engine.cc", "-x", "c", "examples/c_engine/json.c"]

FRAGMENTS = {
    "hkv check --fill -",
    "hkv check --html",
    "hkv check-events --record",
    "hkv --compilation-cache",
    "hkv --compilation-cache DIR",
    "hkv --input-limit 2GiB COMMAND",
    "hkv explore --form lanes",
    "hkv explore --form batched",
    "hkv layout --plan FILE --layer 3 --tag csa_kv",
    "hkv plan --bugs NAME",
    "hkv plan --dialect rtp-llm",
    "hkv plan --json",
    "hkv plan --layers FILE",
    "hkv replay --json",
    "hkv sweep --bounds",
    "hkv trace chat --tokens-per-id 16",
    "hkv trace import",
    "hkv watch ENGINE --log LOG",
    "hkv watch ENGINE --serve 127.0.0.1:0",
    "hkv shrink differences/fork-3-v2.jsonl --engine my_engine.py:Engine",
}
"""Parts of command lines that the text mentions and a log that a wrong engine leaves."""

PLACEHOLDERS = (
    (r"^trace import SOURCE", "trace import conversation_trace.jsonl"),
    (r"--from FORMAT\b", "--from mooncake"),
    (r"--line N\b", "--line 12"),
    (r"--engines numpy,NAME\b", "--engines numpy,jax"),
    (r"^mutate MODULE --by COMMAND$", "mutate hkv.limits --by \"python -c 'import hkv.limits'\" --sample 1"),
    (r"^watch ENGINE$", "watch numpy --feature core --seeds 1"),
    (r"--engine NAME LOGS", "--engine numpy LOG"),
    (r"\bNAME\b", "window-one-never-hits"),
    (r"\bCONFIG --memory SIZE", "config.json --memory 80GiB"),
    (r"chat\|shared-prefix\|agentic -o FILE --seed N", "agentic -o agents.jsonl --seed 1 --requests 20"),
    (r"(shrink LOG)$", r"\1 --engine blind.py:Blind"),
)

SHORTER = (
    (r"--seeds \d+", "--seeds 1"),
    (r"--requests \d+", "--requests 20"),
    (r"--limit \d+", "--limit 5"),
    (r"^(replay (?!.*--limit).*)$", r"\1 --limit 5"),
    (r"^(replay (?!.*--(?:engine|plot)).*)$", r"\1 --engine numpy"),  # the compiled one is among the smallest
    (r"^((?:sweep|compare \S+ --)(?!.*--engine).*)$", r"\1 --limit 5 --engine numpy"),
    (r"^(explore (?!.*--plant).*)$", r"\1 --num-blocks 3 --max-model-len 1 --requests 2"),
    (r"--seconds \d+", "--seconds 1"),
    (r"--follow \d+", "--follow 1"),
    (r"^(diff .*numpy,jax.*|diff .*cmd:.*)$", r"\1 --steps 4"),
)

RECORDED = ("TRACE", "conversation_trace.jsonl")
"""Names that pages give Mooncake's trace, whose ids stand for 512 tokens: hybrid models' replays warn of it alone."""

APART = r"(diff .*numpy,jax|diff --dialect rtp-llm|explore )(?!.*--(save|plant))"
"""Commands that compile for long and leave no file: they run beside the others, which are in the order of the pages."""


class Installed:
    """The program, run in a folder that has the checkout's data beside what commands write."""

    def __init__(self, hkv: pathlib.Path, folder: pathlib.Path) -> None:
        self.hkv, self.folder, self.failures = hkv, folder, 0
        # One folder for both uses of this script, and for the tests, of which some compile the same programs.
        self._environment = {**os.environ, "HKV_COMPILATION_CACHE": str(ROOT / ".jax_cache")}
        for name in ("docs", "examples", "tests"):
            (folder / name).symlink_to(ROOT / name)

    def python(self, text: str) -> str:
        """Output of a Python program in the same environment."""
        command = [str(self.hkv.parent / "python"), "-c", text]
        return subprocess.run(command, cwd=self.folder, check=True, capture_output=True, text=True).stdout

    def run(self, line: str, extra: str | None = None) -> None:
        """Runs a command line without its `hkv`; one that names an `extra` must be refused for want of it."""
        started = time.monotonic()
        command = [str(self.hkv), *shlex.split(line)]
        done = subprocess.run(
            command, cwd=self.folder, env=self._environment, capture_output=True, text=True, check=False
        )
        refused = done.returncode == 2 and len(done.stderr.splitlines()) == 1
        if extra is None:
            warned = "hkv: warning: ids of" in done.stderr and not any(name in line for name in RECORDED)
            good = done.returncode in (0, 1) and "Traceback" not in done.stderr and not warned
        else:
            good = refused and extra in done.stderr
        print(f"{'ok    ' if good else 'FAILED'} {time.monotonic() - started:5.1f} s  hkv {line}", flush=True)
        if not good:
            print(f"status {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
            self.failures += 1


def smallest(installed: Installed) -> None:
    """Help and smallest example of every command, with nothing but the base dependencies."""
    commands = installed.python("from hkv.cli import COMMANDS; print(*COMMANDS, sep='\\n')").splitlines()
    missing = {name for name in commands if not any(line.startswith(f"{name} ") for line in SMALLEST)}
    if missing:
        sys.exit(f"no smallest example of {', '.join(sorted(missing))}")
    for command in ("", *commands):
        installed.run(f"{command} --help".strip())
    installed.python(EVENTS)
    for line in SMALLEST:
        installed.run(line)
    for line, extra in WANTING.items():
        installed.run(line, f"hkv[{extra}]")


def documents(installed: Installed) -> None:
    """Every command line of README and docs."""
    folder = installed.folder
    for path, source in {
        "config.json": "gemma3_text", "gemma-3-1b/config.json": "gemma3_text", "deepseek_v3/config.json": "deepseek_v3",
        "qwen3-next/config.json": "qwen3_next",
    }.items():  # fmt: skip
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_bytes((ROOT / "tests" / "data" / "models" / f"{source}.json").read_bytes())
    (folder / "my_engine.py").write_text(ENGINE)
    (folder / "blind.py").write_text(BLIND)
    page = (ROOT / "docs" / "versions.md").read_text()
    (folder / "vllm_next.py").write_text(re.findall(r"```python\n# vllm_next.py\n(.*?)```", page, re.DOTALL)[0])
    subprocess.run(["cc", "-std=c11", "-O2", "-o", "my-engine", *C_ENGINE], cwd=folder, check=True)
    subprocess.run(["c++", "-O2", "-o", "rtp-engine", *RTP_ENGINE], cwd=folder, check=True)
    first = (ROOT / "docs" / "my-engine.md").read_text()
    installed.python("\n".join(re.findall(r"```python\n(.*?)```", first, re.DOTALL)))  # writes the logs of its commands
    library = ["-shared", "-fPIC", "-o", "c_writer.so", "examples/kernels/c_writer.c"]
    subprocess.run(["cc", "-O2", *library], cwd=folder, check=True)
    (folder / "logs").mkdir()
    for path in ("LOG", "logs/core-0.jsonl"):
        (folder / path).write_bytes((ROOT / "tests" / "data" / "oplogs" / "core-0.jsonl").read_bytes())
    for name, size in (*dict.fromkeys(RECORDED, 512).items(), ("chat.jsonl", 16)):
        installed.run(f"trace chat -o {name} --requests 20 --seed 1 --tokens-per-id {size}")
    lines = found_in([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))])
    commands = [prepared(line.removeprefix("hkv ")) for line in lines if line not in FRAGMENTS]
    with concurrent.futures.ThreadPoolExecutor(1) as beside:
        apart = [beside.submit(installed.run, *command) for command in commands if re.match(APART, command[0])]
        for command in commands:
            if not re.match(APART, command[0]):
                installed.run(*command)
    for done in apart:
        done.result()


def found_in(pages: list[pathlib.Path]) -> list[str]:
    """Command lines in blocks and in the text, each once, in order."""
    lines: dict[str, None] = {}
    for page in pages:
        for block, inline in re.findall(r"```[^\n]*\n(.*?)```|`(hkv [^`\n]+)`", page.read_text(), re.DOTALL):
            for line in [inline] if inline else block.splitlines():
                command = re.sub(r"\s+#.*", "", line.strip()).removeprefix("$ ")
                if command.startswith("hkv "):
                    lines[command] = None
    return list(lines)


def prepared(text: str) -> tuple[str, str | None]:
    """A command line of the documents that can be run, and what it is refused for, if it is."""
    if " " not in text:
        return f"{text} --help", None  # a mention of the command as such
    for pattern, replacement in (*PLACEHOLDERS, *SHORTER):
        text = re.sub(pattern, replacement, text)
    if "torch_writer.py" in text:
        return text, "No module named 'torch'"
    if re.search(r"[, ]vllm(-offload)?\b(?![_-])", text):
        return text, "vLLM 0.33 to be installed"
    if re.search(r"[, ]sglang\b(?![_-])", text):
        return text, "SGLang 0.5.23 to be installed"
    return text, "hkv[events]" if "--endpoint" in text else None


def main() -> int:
    """0 if every command did what it should, else 1."""
    if len(sys.argv) != 3 or sys.argv[1] not in ("smallest", "documents"):
        sys.exit(__doc__)
    with tempfile.TemporaryDirectory() as folder:
        installed = Installed(pathlib.Path(sys.argv[2]).absolute(), pathlib.Path(folder))
        (smallest if sys.argv[1] == "smallest" else documents)(installed)
        return int(installed.failures > 0)


if __name__ == "__main__":
    sys.exit(main())
