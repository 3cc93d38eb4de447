"""Block tables of an installed vLLM beside ours; without JAX, so that any environment with vLLM can run it."""

import importlib
import random
from types import SimpleNamespace

import numpy as np
import pytest

from hkv.dialects.vllm.kinds import layer
from hkv.spec import ChunkedLocal, FullAttention, Mamba, OpaqueState, SlidingWindow
from hkv.spec.layer import RequestLimits
from reference import slots
from reference.state.rows import BlockRows

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


def specs(rng):
    """A layer of a kind, ours and vLLM's."""
    torch = importlib.import_module("torch")
    vllm = importlib.import_module("vllm.v1.kv_cache_interface")
    size = rng.choice([1, 3, 4, 16, 48, 100, 128, 528, 1152])
    heads = {"num_kv_heads": 1, "head_size": 8, "dtype": torch.bfloat16}
    sharded = rng.random() < 0.5
    scratch = rng.randrange(3)
    return rng.choice(
        [
            (
                FullAttention(block_size=size, cp_sharded=sharded),
                vllm.FullAttentionSpec(block_size=size, dcp_sharded=sharded, **heads),
            ),
            (
                SlidingWindow(block_size=size, window=64),
                vllm.SlidingWindowSpec(block_size=size, dcp_sharded=False, sliding_window=64, **heads),
            ),
            (
                ChunkedLocal(block_size=size, chunk=64),
                vllm.ChunkedLocalAttentionSpec(block_size=size, dcp_sharded=False, attention_chunk_size=64, **heads),
            ),
            (
                Mamba(block_size=size, num_speculative_blocks=scratch),
                vllm.MambaSpec(
                    block_size=size, shapes=((4,),), dtypes=(torch.float32,), num_speculative_blocks=scratch
                ),
            ),
            (OpaqueState(block_size=size), vllm.CircularBufferSpec(block_size=size, dcp_sharded=False, **heads)),
        ]
    )


def test_table_widths():
    tables = importlib.import_module("vllm.v1.worker.block_table")
    rng = random.Random(1)
    for _ in range(500):
        ours, theirs = specs(rng)
        length, ranks, mode = rng.randint(1, 200_000), rng.choice([1, 2, 4]), rng.choice(["align", "none"])
        config = SimpleNamespace(
            parallel_config=SimpleNamespace(decode_context_parallel_size=ranks),
            cache_config=SimpleNamespace(mamba_cache_mode=mode),
        )
        wanted = tables.get_block_table_width(
            theirs.max_num_blocks_per_req(config, length),
            theirs.block_size,
            token_alignment=theirs.block_table_token_alignment,
        )
        limits = RequestLimits(max_model_len=length, context_parallel=ranks, mamba_mode=mode)
        assert layer(ours).table_width(limits) == wanted, (ours, limits)
        assert ours.one_block != theirs.uses_slot_mapping


def test_tokens_held_by_a_rank():
    torch = importlib.import_module("torch")
    backends = importlib.import_module("vllm.v1.attention.backends.utils")
    rng = random.Random(2)
    for _ in range(300):
        interleave, ranks = rng.randint(1, 8), rng.randint(1, 5)
        rank = rng.randrange(ranks)
        geometry = slots.Geometry(interleave * rng.randint(1, 4), ranks, rank, interleave)
        lengths = [rng.randint(0, 200) for _ in range(4)]
        wanted = backends.get_dcp_local_seq_lens(torch.tensor(lengths), ranks, rank, interleave)
        assert [slots.held_tokens(geometry, length) for length in lengths] == wanted.tolist()


def test_rows_of_the_workers_table():
    torch = importlib.import_module("torch")
    tables = importlib.import_module("vllm.v1.worker.block_table")
    theirs = tables.BlockTable(16, 3, 8, 64, False, torch.device("cpu"), 1)
    ours, rng = BlockRows(3, 8), random.Random(3)
    for _ in range(500):
        row, target = rng.randrange(3), rng.randrange(3)
        ids = [rng.randint(1, 999) for _ in range(rng.randint(1, 3))]
        match rng.choice(["append", "add", "clear", "move"]):
            case "append" if len(ours.rows[row]) + len(ids) <= 8:
                theirs.append_row(ids, row)
                ours.append(row, ids, len(ids))
            case "add":
                theirs.add_row(ids, row)
                ours.assign(row, ids, len(ids))
            case "clear":
                theirs.clear_row(row)
                ours.resize(row, 0, 0)
            case "move" if row != target:
                theirs.move_row(row, target)
                theirs.clear_row(row)
                ours.move(row, target)
        wanted = np.array(theirs.get_numpy_array())
        for index, length in enumerate(theirs.num_blocks_per_row):
            assert ours.rows[index] == wanted[index, :length].tolist()
