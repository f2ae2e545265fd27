"""Any view of any tensor reads back the same, aliases too, in as few bytes as may be.

The views are drawn as users make them: slices, transposes, expansions and casts in any
order.  The rule of which bytes travel is checked against a count done the slow way.
"""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrpc.core.serde import Codec, Encoded, FunctionTable, Policy
from asyncrpc.core.serde.encoded import RAW_BYTES_MAX, Span, clusters, reach, span_of

CODEC = Codec(FunctionTable(Policy.STRICT))
DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8),
    *(torch.uint8, torch.int64, torch.bool, torch.complex64, torch.uint16),
    torch.float8_e4m3fn,
]
pytestmark = pytest.mark.filterwarnings("ignore:Sparse")

shapes = st.lists(st.integers(0, 5), max_size=4)


@st.composite
def views(draw: st.DrawFn, base: torch.Tensor) -> torch.Tensor:
    view = base
    for _ in range(draw(st.integers(0, 4))):
        if not view.dim():
            break
        dim = draw(st.integers(0, view.dim() - 1))
        size = view.shape[dim]
        step = draw(st.sampled_from(["slice", "select", "swap", "expand"]))
        if step == "slice":
            start = draw(st.integers(0, size))
            stride = draw(st.integers(1, 3))
            view = view[(slice(None),) * dim + (slice(start, None, stride),)]
        elif step == "select" and size:
            view = view.select(dim, draw(st.integers(0, size - 1)))
        elif step == "swap":
            view = view.transpose(0, dim)
        elif step == "expand":
            view = view.unsqueeze(dim)
            view = view.expand(
                [*view.shape[:dim], draw(st.integers(1, 3)), *view.shape[dim + 1 :]]
            )
    return view


@st.composite
def bases(draw: st.DrawFn) -> torch.Tensor:
    shape, dtype = draw(shapes), draw(st.sampled_from(DTYPES))
    seed = draw(st.integers(0, 100))
    data = np.random.default_rng(seed).integers(0, 2, (*shape, dtype.itemsize))
    plain = torch.from_numpy(data.astype(np.uint8))
    if not plain.numel():
        return torch.empty(shape, dtype=dtype)
    return plain.view(dtype).squeeze(-1)


def decoded(encoded: Encoded) -> Any:
    buffers = [np.frombuffer(view, np.uint8).copy().data for view in encoded.buffers]
    return CODEC.decode(encoded.control, buffers)


def same(first: torch.Tensor, other: torch.Tensor) -> bool:
    if first.dtype != other.dtype or first.shape != other.shape:
        return False
    if first.dtype.is_complex:
        first, other = torch.view_as_real(first), torch.view_as_real(other)
    return first.double().equal(other.double())


def strides(tensor: torch.Tensor) -> list[int]:
    """Return the strides that mean something."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return [stride for size, stride in pairs if size > 1] if tensor.numel() else []


@given(st.data())
def test_any_view_reads_back_the_same(data: st.DataObject) -> None:
    view = data.draw(bases().flatmap(views))
    encoded = CODEC.encode([view])
    back = decoded(encoded)[0]
    assert same(back, view)
    assert strides(back) == strides(view)  # all spans here are small
    assert encoded.bytes_copied == 0
    assert sum(map(len, encoded.buffers)) <= max(view.untyped_storage().nbytes(), 0)


@given(st.data())
def test_aliases_stay_aliases_and_only_those(data: st.DataObject) -> None:
    base = data.draw(bases())
    count = data.draw(st.integers(1, 4))
    sent = [data.draw(views(base)) for _ in range(count)] + [data.draw(bases())]
    back = decoded(CODEC.encode(sent))
    assert all(map(same, back, sent))
    written = data.draw(st.integers(0, count))
    mine, its = sent[written], back[written]
    if not mine.numel() or 0 in mine.stride() or mine.dtype in _NO_FILL:
        return
    mine.fill_(1)
    its.fill_(1)
    assert all(map(same, back, sent))


_NO_FILL = {torch.float8_e4m3fn}


@settings(max_examples=50)
@given(st.data())
def test_large_views_are_gathered_by_the_rule(data: st.DataObject) -> None:
    """Half a MiB, so that holes count: at most twice the covered bytes travel."""
    base = torch.arange(1 << 17, dtype=torch.float32).reshape(256, 512)
    rows, columns = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 40))
    view = base[data.draw(st.integers(0, 200)) :: rows, ::columns]
    if data.draw(st.booleans()):
        view = view.T
    encoded = CODEC.encode(view)
    sent = sum(map(len, encoded.buffers))
    offsets = {int(element) * 4 + byte for element in view.flatten() for byte in (0, 3)}
    span = max(offsets) + 1 - min(offsets)
    if span <= max(RAW_BYTES_MAX, 2 * view.nbytes):
        assert (sent, encoded.bytes_copied) == (span, 0)
    else:
        assert (sent, encoded.bytes_copied) == (view.nbytes, view.nbytes)
    assert same(decoded(encoded), view)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 7)), max_size=4))
def test_reach_equals_counting(dimensions: list[tuple[int, int]]) -> None:
    shape = [size for size, _ in dimensions]
    steps = [step for _, step in dimensions]
    grid = np.indices(shape).reshape(len(shape), -1) if shape else np.zeros((0, 1))
    offsets = np.array(steps) @ grid if shape else np.zeros(1)
    assert reach(shape, steps) == (int(offsets.max()) + 1 if offsets.size else 0)


spans = st.tuples(st.integers(0, 1 << 20), st.integers(1, 1 << 19)).map(
    lambda pair: Span(pair[0], pair[0] + pair[1], pair[1])
)


@given(st.lists(spans, max_size=8))
def test_clusters_separate_views_and_keep_overlaps_together(
    drawn_spans: list[Span],
) -> None:
    parted = clusters(drawn_spans)
    assert sorted(i for _, members in parted for i in members) == list(
        range(len(drawn_spans))
    )
    previous_stop = -1
    for union, members in parted:
        assert union.start == min(drawn_spans[i].start for i in members)
        assert union.stop == max(drawn_spans[i].stop for i in members)
        assert union.start >= previous_stop  # no overlap across clusters
        previous_stop = union.stop


def test_span_counts_expanded_elements_once() -> None:
    assert span_of((1000, 3), (0, 1), 5, 4) == Span(20, 32, 12)
    assert span_of((1000, 3), (0, 1000), 0, 4) == Span(0, 8004, 12)
