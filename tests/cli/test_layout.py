"""`hkv layout`: answers, drawings and refusals."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hkv.cli.layout_drawing import terminal
from hkv.layout.picture import levels, shown
from tests.layout.geometries import cases

FULL = ["layout", "--spec", "full:16", "--kv-heads", "8", "--layout", "BLHNC", "--num-layers", "32"]


@pytest.fixture(autouse=True)
def no_layout_is_asked_for(monkeypatch):
    monkeypatch.delenv("VLLM_KV_CACHE_LAYOUT", raising=False)


def test_addresses_and_their_inverse(shell):
    status, out, _ = shell(*FULL, "--address", "1,3,2,5,130", "--byte", "6376197", "--byte", "99999999", "--json", "-")
    assert status == 0
    answer = json.loads(out)
    element = answer["addresses"][0]
    assert element["byte"] == 3 * 2_097_152 + 65_536 + 2 * 8_192 + 5 * 512 + 2 * 130 == 6_376_196
    assert (element["part"], element["index"], element["byte_of_element"]) == ("value", [2], 0)
    assert (element["layer"], element["block"], element["head"], element["token"]) == (1, 3, 2, 5)
    assert answer["bytes"][0] == {**element, "byte": 6_376_197, "byte_of_element": 1}
    assert answer["bytes"][1] == {"byte": 99_999_999, "part": None}
    assert answer["layout"]["strides"] == [65_536, 2_097_152, 8_192, 512, 1]
    assert answer["layout"]["copy_width"] == 16
    assert [part["strides"] for part in answer["layout"]["parts"]] == [[2_097_152, 8_192, 512, 2]] * 2


def test_the_environment_decides_unless_the_option_does(shell, monkeypatch):
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", "HND")
    _, out, _ = shell("layout", "--spec", "full:16", "--json", "-")
    assert json.loads(out)["layout"]["order"] == "LBHNC"
    _, out, _ = shell("layout", "--spec", "full:16", "--layout", "BLNHC", "--json", "-")
    assert json.loads(out)["layout"]["order"] == "BLNHC"


def test_the_drawing_in_the_terminal(shell):
    status, out, _ = shell(*FULL, "--address", "1,3,2,5,130")
    assert status == 0
    assert "32 layers, 65,536 bytes apart" in out
    assert "▶ block 3" in out
    assert "▶ token 5" in out
    assert "value[2] bfloat16" in out
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize(("ending", "start"), [("svg", b"<?xml"), ("png", b"\x89PNG")])
def test_the_drawing_in_a_file(shell, tmp_path, ending, start):
    path = tmp_path / f"block.{ending}"
    status, _, err = shell(*FULL, "--image", str(path))
    assert (status, err) == (0, "")
    assert path.read_bytes().startswith(start)
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


@given(cases(), st.data())
@settings(max_examples=60)
def test_each_level_is_the_inside_of_the_chosen_piece_above(case, data):
    layout = case.layout()
    places = [layout.locate(byte) for byte in range(layout.end)]
    place = data.draw(st.sampled_from([place for place in places if place is not None]))
    zoom = levels(layout, place)
    for above, below in itertools.pairwise(zoom):
        (chosen,) = [piece for piece in above.pieces if piece.chosen]
        assert chosen.start == below.start
        assert below.pieces[0].start == below.start
        assert all(
            piece.start + piece.length <= chosen.start + chosen.length
            for piece in below.pieces
            if piece.kind != "padding"
        )
    for level in zoom:
        ends = [piece.start + piece.length for piece in level.pieces]
        assert all(end <= piece.start for end, piece in zip(ends, level.pieces[1:], strict=False))
        assert ends[-1] == level.start + level.length
    if not any(part.strides for part in layout.content):
        assert zoom[-1].start == layout.address(place.layer, place.block, place.head, place.state)
    names = [part.name for part in layout.content]
    terminal(zoom, names, 80)
    kept = shown(zoom[0], 6)
    assert [piece for piece in zoom[0].pieces if piece.chosen] == [piece for piece in kept if piece and piece.chosen]


def test_a_plan_says_which_element_a_byte_is(shell, tmp_path):
    """Every first byte of a view that the plan lists is that view's first element."""
    path, model = str(tmp_path / "plan.json"), "tests/data/models/deepseek_v4.json"
    line = ("plan", model, "--memory", "60GiB", "--dialect", "rtp-llm", "--pools", "independent")
    assert shell(*line, "--json", path)[0] == 0
    status, out, _ = shell("layout", "--plan", path, "--layer", "3", "--tag", "csa_kv", "--json", "-")
    (view,) = json.loads(out)["views"]
    assert (status, view["part"], view["shape"][1:]) == (0, "entry", [1, 64, 584])
    byte = str(view["offset"] + 5 * view["strides"][0] + 2 * view["strides"][2] + 7)
    _, out, _ = shell("layout", "--plan", path, "--pool", str(view["pool"]), "--byte", byte, "--json", "-")
    (answer,) = json.loads(out)["bytes"]
    assert (answer["layer"], answer["tag"], answer["block"]) == (3, "csa_kv", 5)
    assert (answer["state"], answer["index"], answer["dtype"]) == (2, [7], "uint8")
    status, out, _ = shell("layout", "--plan", path, "--layer", "0")
    assert status == 0
    assert "hca_state" in out
    status, _, err = shell("layout", "--plan", path, "--pool", "9")
    assert (status, err) == (2, "hkv: --pool = 9: expected a pool of the plan, from 0 to 6\n")
    status, out, _ = shell("layout", "--plan", path, "--pool", "6", "--json", "-")
    assert {view["pool"] for view in json.loads(out)["views"]} == {6}
    status, _, err = shell("layout", "--plan", path, "--pool", "0", "--byte", "1000000000000")
    assert status == 2
    assert "expected less than" in err
    padding = shell("layout", "--plan", path, "--pool", "0", "--byte", "1200")
    assert padding == (0, "byte 1200 of pool 0: padding, or no element of a chosen layer\n", "")


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"layer_caches": 3}', '{"layer_caches": {"0": [{}]}}'])
def test_what_is_no_plan_of_pools_is_refused(shell, tmp_path, content):
    path = tmp_path / "plan.json"
    path.write_text(content)
    status, _, err = shell("layout", "--plan", str(path))
    assert (status, len(err.splitlines())) == (2, 1)
    assert "a plan that lays its pools out" in err
    assert shell("layout", "--plan", str(tmp_path / "none.json"))[0] == 2
    assert shell("layout")[0] == 2
