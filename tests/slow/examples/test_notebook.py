"""The notebook of `examples/` runs from its first cell to its last, and draws what it says."""

import json
import pathlib

import pytest
from matplotlib import pyplot

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
