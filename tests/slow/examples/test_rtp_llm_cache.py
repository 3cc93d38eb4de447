"""RTP-LLM's cache of every recorded model, followed from its config to another server's pools and judged."""

from __future__ import annotations

import re

import pytest

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
