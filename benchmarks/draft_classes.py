"""Records what vLLM's own draft classes cache beside a target: MTP layers of its own config, and drafts in files.

Each case of `draft_cases.json` names a target (a released model, a config of `library.jsonl`, or its whole content),
fields that are changed in it, the `--speculative-config`, and the draft's config where it has one of its own. vLLM
0.33.0 builds the draft on the meta device, as on a node of H100 (`judges/simulated_gpu.py`). Run it with the Python of
an environment that has vLLM.

Example:
  build/vllm/bin/python benchmarks/draft_classes.py --output tests/data/model_classes/drafts.jsonl
"""

from __future__ import annotations

import argparse
import functools
import json
import pathlib
import sys
import tempfile
from collections.abc import Mapping
from typing import Any

from benchmarks.judges import simulated_gpu
from benchmarks.judges.children import answers
from benchmarks.judges.records import message, spec_record
from benchmarks.judges.vllm_classes import ModelClasses, silence
from benchmarks.model_classes import published_case
from hkv.model.released import find

DATA = pathlib.Path(__file__).parents[1] / "tests" / "data" / "model_classes"


def draft_cases() -> dict[str, dict[str, Any]]:
    """The cases by name, each with its target's whole config."""
    lines = (DATA / "library.jsonl").read_text(encoding="utf-8").splitlines()
    library = {each["name"]: each["config"] for each in map(json.loads, lines)}
    cases = json.loads((DATA / "draft_cases.json").read_text(encoding="utf-8"))
    return {name: {**case, "config": changed(target_of(case, library), case)} for name, case in cases.items()}


def target_of(case: Mapping[str, Any], library: Mapping[str, Any]) -> dict[str, Any]:
    """The target's config as it is released, with the library's default values, or in the case itself."""
    if isinstance(case["target"], Mapping):
        return dict(case["target"])
    model = find(case["target"])
    return model.config() if model is not None else library[case["target"]]


def changed(config: dict[str, Any], case: Mapping[str, Any]) -> dict[str, Any]:
    """The config with the case's fields around its decoder and in it."""
    config = {**config, **case.get("around", {})}
    inner = case.get("fields", {})
    if isinstance(config.get("text_config"), Mapping):
        return {**config, "text_config": {**config["text_config"], **inner}}
    return {**config, **inner}


def ask(classes: ModelClasses, name: str, case: Mapping[str, Any]) -> dict[str, Any]:
    """The method, the class and the caching layers of a draft; or the reason for which vLLM refuses it."""
    simulated_gpu.set_groups(1)
    with tempfile.TemporaryDirectory() as folder:
        config = published_case(str(case["target"]), case["config"], name).config
        pathlib.Path(folder, "config.json").write_text(json.dumps(config), encoding="utf-8")
        asked = dict(case["speculative_config"])
        if "draft" in case:
            pathlib.Path(folder, "draft").mkdir()
            pathlib.Path(folder, "draft", "config.json").write_text(json.dumps(case["draft"]), encoding="utf-8")
            asked["model"] = f"{folder}/draft"
        try:
            return _answer(classes, folder, asked)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # model files raise whatever they like
            return {"refused": f"{type(error).__name__}: {message(error, folder)}"}


def _answer(classes: ModelClasses, folder: str, asked: Mapping[str, Any]) -> dict[str, Any]:
    engine = classes._engine_config(folder, 1, speculative_config=asked)
    speculation = engine.speculative_config
    dtype = classes.torch_utils.set_default_torch_dtype(engine.model_config.dtype)
    with classes.config.set_current_vllm_config(engine), classes.torch.device("meta"), dtype:
        classes.loader.initialize_model(engine, model_config=speculation.draft_model_config)
    specs, _ = classes._specs(engine)
    return {
        "method": speculation.method,
        "architecture": speculation.draft_model_config.architectures[0],
        "drops_block": speculation.use_eagle_block_drop(),
        "prefill_lookahead": engine.num_prefill_lookahead_tokens,
        "v2_runner": engine.use_v2_model_runner,
        "layers": [spec_record(spec) for _, spec in sorted(specs.items())],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="these cases alone; repeatable")
    parser.add_argument("--output", type=pathlib.Path, help="write the answers here, one case a line")
    arguments = parser.parse_args()
    silence()
    classes = ModelClasses()
    classes.torch.accelerator.current_device_index = lambda: 0  # some draft classes ask for it when they are made
    chosen = {name: case for name, case in draft_cases().items() if not arguments.only or name in arguments.only}
    questions = ((name, functools.partial(ask, classes, name, case)) for name, case in chosen.items())
    lines = []
    for name, found in answers(questions, jobs=1, seconds=120.0):
        lines.append(json.dumps({"name": name, "answer": found}, separators=(",", ":")))
        print(name, found.get("refused") or found["architecture"], file=sys.stderr, flush=True)
    text = "".join(line + "\n" for line in lines)
    if arguments.output:
        arguments.output.write_text(text, encoding="utf-8")
    else:
        print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
