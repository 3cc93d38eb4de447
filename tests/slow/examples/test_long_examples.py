"""Examples that take long: RTP-LLM's cache of every recorded model, judged on another server, and the notebook."""

from __future__ import annotations

import json
import pathlib
import re

import pytest
from matplotlib import pyplot

from tests.face.test_examples import EXAMPLES, ROOT, RTP_LLM
from tests.scripts import load_script

MODELS = re.findall(r"^\| (\w+) \| \w+ \| \d+ \|", RTP_LLM.read_text(), re.MULTILINE)
SHAPES = ((), ("--prefill", "4", "--decode", "2"), ("--prefill", "1", "--decode", "2"))


@pytest.mark.parametrize("shape", SHAPES, ids=" ".join)
@pytest.mark.parametrize("model", MODELS)
def test_every_judge_finds_what_the_definition_says(model, shape):
    assert load_script(EXAMPLES / "rtp_llm_cache.py").main([str(ROOT / f"tests/data/models/{model}.json"), *shape]) == 0


@pytest.mark.parametrize("model", ["llama", "deepseek_v3", "deepseek_v4"])
def test_so_it_is_behind_ranks_that_deal_blocks_out(model):
    given = [str(ROOT / f"tests/data/models/{model}.json"), "--context", "--decode", "2"]
    assert load_script(EXAMPLES / "rtp_llm_cache.py").main(given) == 0


# The notebook of `examples/` runs from its first cell to its last, and draws what it says.


NOTEBOOK = pathlib.Path(__file__).resolve().parents[3] / "examples" / "size_a_cache.ipynb"


@pytest.mark.filterwarnings("ignore::UserWarning:matplotlib")
def test_the_notebook_draws_its_three_plots(monkeypatch, capsys):
    pyplot.switch_backend("Agg")
    pyplot.close("all")
    monkeypatch.chdir(NOTEBOOK.parent.parent)
    notebook = json.loads(NOTEBOOK.read_text())
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    names: dict[str, object] = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert (cell["outputs"], cell["execution_count"]) == ([], None), "outputs are not kept"
            exec(compile("".join(cell["source"]), cell["id"], "exec"), names)
    panels = [pyplot.figure(number).axes[0] for number in pyplot.get_fignums()]
    assert len(panels) == 3
    assert all(panel.lines or panel.patches for panel in panels)
    shown = capsys.readouterr().out
    assert "requests hit" in shown
    points = names["points"]
    assert len(set(points["hit_tokens"].tolist())) > 4  # type: ignore[index]
    assert (points["optimal_tokens"] >= points["hit_tokens"]).all()  # type: ignore[index]
    pyplot.close("all")
