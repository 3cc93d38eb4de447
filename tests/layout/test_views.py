"""The same bytes seen by NumPy, JAX and PyTorch."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hkv.errors import LayoutError
from hkv.layout.block_layout import Layout, Order, StridedView
from hkv.layout.content import quantize
from hkv.layout.views import jax as jax_views
from hkv.layout.views import numpy as numpy_views
from hkv.spec import FullAttention
from tests.layout.geometries import COINCIDENCES, DISTINCT, DTYPES, cases, fixed_case

write_in_place = jax.jit(jax_views.write_blocks, static_argnums=1, donate_argnums=0)
read_jitted = jax.jit(jax_views.read_blocks, static_argnums=1)
read_whole = jax.jit(jax_views.read, static_argnums=1)


@functools.partial(jax.jit, static_argnums=1)
def read_and_write(
    raws: list[jax.Array], views: tuple[StridedView, ...], fresh: list[jax.Array]
) -> list[tuple[jax.Array, jax.Array]]:
    """Both for each of several views, in one compilation."""
    given = zip(raws, views, fresh, strict=True)
    return [(jax_views.read(raw, view), jax_views.write(raw, view, new)) for raw, view, new in given]


def check_jax(*cases: tuple[np.ndarray, StridedView]) -> None:
    """JAX reads what NumPy sees there, and writes what NumPy writes there, every other byte unchanged."""
    raws, views = zip(*cases, strict=True)
    seen = [numpy_views.view(raw, strided) for raw, strided in cases]
    fresh = [random_bytes(each.nbytes, 1).view(each.dtype).reshape(each.shape) for each in seen]
    found = jax.tree.map(np.asarray, read_and_write(list(raws), views, fresh))
    for (read, written), raw, strided, shown, new in zip(found, raws, views, seen, fresh, strict=True):
        assert np.array_equal(bits(read), bits(shown)), strided
        shown[...] = new
        assert np.array_equal(written, raw), strided


def random_bytes(size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


def bits(array: np.ndarray) -> np.ndarray:
    """The array's bytes in logical order, so that NaN payloads count."""
    return np.frombuffer(np.ascontiguousarray(array).tobytes(), np.uint8)


def kernel_splits(layout_order: Order, sizes: dict[str, int]) -> list[int | None]:
    dense = layout_order in (Order.LBHNC, Order.LBNHC) or (sizes["num_layers"] == 1 and layout_order.block_compact)
    return [None, *(k for k in (1, 2) if dense and sizes["states"] % k == 0 and k < sizes["states"])]


@pytest.mark.parametrize("order", Order, ids=lambda order: order.value)
def test_jax_reads_and_writes_what_numpy_sees(order):
    sizes = {**DISTINCT, "num_layers": 2}
    splits = kernel_splits(order, sizes)
    layouts = [fixed_case(sizes, order, dtype, kernel_block_size=k).layout() for dtype in DTYPES for k in splits]
    check_jax(*((random_bytes(layout.end), layout.layer_view(1)) for layout in layouts))


@given(cases(), st.data())
@settings(max_examples=20)
def test_jax_moves_any_part_of_any_layout(case, data):
    layout = case.layout()
    part = data.draw(st.sampled_from(layout.content))
    try:
        strided = layout.part_view(part.name, data.draw(st.integers(0, case.num_layers - 1)))
    except LayoutError:
        assume(False)
    check_jax((random_bytes(layout.end + -layout.end % 16), strided))


def test_blocks_that_are_not_there_read_zeros_and_drop_writes():
    layout = fixed_case(DISTINCT, Order.LBHNC).layout()
    strided, raw = layout.layer_view(2), random_bytes(layout.end)
    blocks = np.int32([-1, 3, 7, 2**31 - 1, -(2**31)])
    read = np.asarray(read_jitted(raw, strided, blocks))
    assert np.array_equal(bits(read[1]), bits(numpy_views.view(raw, strided)[3]))
    assert not bits(read[[0, 2, 3, 4]]).any()
    values = np.ones((5, *strided.shape[1:]), np.float16)
    written = np.asarray(write_in_place(raw.copy(), strided, blocks, values))
    numpy_views.view(raw, strided)[3] = 1
    assert np.array_equal(written, raw)


@pytest.mark.parametrize("word", [jnp.uint8, jnp.uint16])
@pytest.mark.parametrize("order", Order, ids=lambda order: order.value)
def test_no_pool_is_copied(order, word):
    """The compiled program touches the pool through bitcasts and one gather or scatter, and updates it in place."""
    spec = FullAttention(block_size=8, num_kv_heads=3, head_size=10, dtype="bfloat16")
    layout = Layout.of_spec(spec, order, num_blocks=512, num_layers=4)
    strided = layout.layer_view(2)
    size = layout.end // np.dtype(word).itemsize
    pool = jax.ShapeDtypeStruct((size,), word)
    blocks = jax.ShapeDtypeStruct((3,), jnp.int32)
    values = jax.ShapeDtypeStruct((3, *strided.shape[1:]), jnp.bfloat16)
    reading = read_jitted.lower(pool, strided, blocks).compile()
    writing = write_in_place.lower(pool, strided, blocks, values).compile()
    for compiled in (reading, writing):
        assert compiled.memory_analysis().temp_size_in_bytes < layout.end // 16
        assert pool_sized(compiled.as_text(), size) <= {"parameter", "bitcast", "scatter", "fusion", "gather"}
    assert writing.memory_analysis().alias_size_in_bytes == layout.end
    if order is not Order.LBHNC:
        assert bytes_of_a_transposed_write(layout, 3) >= layout.end, "the check above can fail"


@functools.cache
def bytes_of_a_transposed_write(layout: Layout, count: int) -> int:
    """Memory that writing some blocks through a transposed pool takes."""
    pool = jax.ShapeDtypeStruct((layout.end // 2,), jnp.uint16)
    values = jax.ShapeDtypeStruct((count, *layout.layer_view(2).shape[1:]), jnp.uint16)
    blocks = jax.ShapeDtypeStruct((count,), jnp.int32)
    writing = jax.jit(functools.partial(naive_write, layout=layout), donate_argnums=0).lower(pool, blocks, values)
    return writing.compile().memory_analysis().temp_size_in_bytes


def naive_write(pool: jax.Array, blocks: jax.Array, values: jax.Array, layout: Layout) -> jax.Array:
    """Write into a transposed pool, for comparison of its cost."""
    shape = (*layout.shape[:4], layout.shape[4] // 2)
    physical = pool.reshape([shape[axis] for axis in layout.order.axes])
    logical = physical.transpose([layout.order.axes.index(axis) for axis in range(5)])
    return logical.at[2, blocks].set(values).transpose(layout.order.axes).reshape(-1)


def pool_sized(text: str, size: int) -> set[str]:
    """Names of the operations whose result has as many elements as the pool."""
    found = re.findall(r"^\s*(?:ROOT )?%\S+ = \w+\[([\d,]+)\]\S* ([\w-]+)\(", text, re.MULTILINE)
    return {name for shape, name in found if functools.reduce(lambda a, b: a * int(b), shape.split(","), 1) >= size}


def test_a_pool_of_more_than_two_gigabytes_is_addressed_in_rows():
    """Tracing needs no memory, so that the row arithmetic of a 64 GiB pool is checked as it is."""
    spec = FullAttention(block_size=16, num_kv_heads=8, head_size=128, dtype="bfloat16")
    layout = Layout.of_spec(spec, "BLNHC", num_blocks=16384, num_layers=64)
    assert layout.end == 2**36
    runs, _ = jax_views._runs(jax.ShapeDtypeStruct((2**36,), jnp.uint8), layout.layer_view(63))  # type: ignore[arg-type]
    first = runs.first + runs.starts[0] + (16384 - 1) * runs.steps[0]
    assert first * runs.row == layout.address(63, 16383, 0, 0)
    assert max(runs.num_rows, first) < 2**31
    odd = Layout.of_spec(FullAttention(block_size=1, dtype="uint8"), "LBNHC", num_blocks=2**31)
    with pytest.raises(LayoutError, match="or a size of whole blocks"):
        jax_views._runs(jax.ShapeDtypeStruct((2**32 + 1,), jnp.uint8), odd.layer_view(0))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("buffer", "message"),
    [
        (np.zeros(40, np.int8), "unsigned words"),
        (np.zeros((4, 10), np.uint8), "one axis"),
        (np.zeros(12, np.uint32), "at most 2 bytes"),
        (np.zeros(8, np.uint8), "at least 40 bytes"),
    ],
)
def test_buffers_that_jax_cannot_use_are_refused(buffer, message):
    with pytest.raises(LayoutError, match=message):
        jax_views.read(buffer, StridedView((4, 5), (10, 2), 0, "float16"))


def test_values_of_another_dtype_are_refused():
    strided = StridedView((4, 5), (10, 2), 0, "float16")
    with pytest.raises(LayoutError, match=r"values = 'float32\[4, 5\]': expected float16\[4, 5\]"):
        jax_views.write(np.zeros(40, np.uint8), strided, np.zeros((4, 5), np.float32))
    with pytest.raises(LayoutError, match="32 bits"):
        jax_views.read(np.zeros(64, np.uint8), StridedView((4, 2), (16, 8), 0, "float64"))


def test_numpy_refuses_what_is_no_byte_buffer():
    strided = StridedView((4, 5), (10, 2), 0, "float16")
    for buffer in (np.zeros(40, np.uint16), np.zeros((4, 10), np.uint8), np.zeros(80, np.uint8)[::2]):
        with pytest.raises(LayoutError, match="one contiguous axis of bytes"):
            numpy_views.view(buffer, strided)
    with pytest.raises(LayoutError, match="at least 40 bytes"):
        numpy_views.view(np.zeros(39, np.uint8), strided)


def test_an_indexer_page_is_keys_then_scales():
    spec = quantize(FullAttention(block_size=4, head_size=128, head_size_v=0, dtype="bfloat16"), "fp8_indexer")
    assert (spec.content_bytes, spec.page_size_bytes) == (132, 528)
    layout = Layout.of_spec(spec, "BLHNC", num_blocks=3, num_layers=2)
    assert layout.element_address("key", 1, 2, 0, 3, 0) - layout.address(1, 2, 0, 0) == 3 * 128
    assert layout.element_address("key_scale", 1, 2, 0, 3, 0) - layout.address(1, 2, 0, 0) == 4 * 128 + 3 * 4


@pytest.mark.torch
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", Order, ids=lambda order: order.value)
def test_torch_sees_what_numpy_and_jax_see(order, dtype):
    import torch

    from hkv.layout.views import torch as torch_views

    for sizes in ({**DISTINCT, "num_layers": 2}, COINCIDENCES[1], COINCIDENCES[4]):
        for kernel in kernel_splits(order, sizes):
            layout = fixed_case(sizes, order, dtype, kernel_block_size=kernel).layout()
            strided = layout.layer_view(layout.num_layers - 1)
            raw = random_bytes(layout.end)
            tensor = torch_views.view(torch_views.from_buffer(raw), strided)
            seen = numpy_views.view(raw, strided)
            assert tuple(tensor.stride()) == tuple(s // strided.itemsize for s in strided.strides)
            assert np.array_equal(tensor.contiguous().view(torch.uint8).numpy().ravel(), bits(seen))
            read = read_whole(raw, strided)
            assert np.array_equal(tensor.contiguous().view(torch.uint8).numpy().ravel(), bits(np.asarray(read)))
            tensor.zero_()
            assert not bits(seen).any(), "the tensor and the array share memory"


@pytest.mark.torch
def test_torch_shares_a_jax_buffer():
    import torch

    from hkv.layout.views import torch as torch_views

    layout = fixed_case(DISTINCT, Order.BLNHC, "bfloat16").layout()
    strided, pool = layout.layer_view(3), jnp.asarray(random_bytes(layout.end))
    tensor = torch_views.from_buffer(pool)
    assert tensor.data_ptr() == pool.unsafe_buffer_pointer()
    seen = torch_views.view(tensor, strided)
    assert np.array_equal(
        seen.contiguous().view(torch.uint8).numpy().ravel(), bits(np.asarray(jax_views.read(pool, strided)))
    )


@pytest.mark.torch
def test_torch_refuses_what_is_no_byte_buffer():
    import torch

    from hkv.layout.views import torch as torch_views

    strided = StridedView((4, 5), (10, 2), 0, "float16")
    with pytest.raises(LayoutError, match="one contiguous axis of bytes"):
        torch_views.view(torch.zeros(40, dtype=torch.int16), strided)
    with pytest.raises(LayoutError, match="at least 40 bytes"):
        torch_views.view(torch.zeros(39, dtype=torch.uint8), strided)
    with pytest.raises(LayoutError, match="a storage offset that is a multiple of 2"):
        torch_views.view(torch.zeros(64, dtype=torch.uint8)[1:], strided)


def test_without_torch_the_missing_extra_is_named(monkeypatch):
    from hkv.errors import MissingExtraError
    from hkv.layout.views import torch as torch_views

    monkeypatch.setitem(__import__("sys").modules, "torch", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'hkv\[torch\]'"):
        torch_views.from_buffer(bytearray(8))
