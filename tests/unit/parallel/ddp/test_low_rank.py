"""PowerSGD's arithmetic on one rank, with halves, as torch's hooks do it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

from asyncrpc.parallel.ddp.hooks.low_rank import (
    Layers,
    Square,
    orthogonalize,
    plan_for,
    q_shapes,
    side_of,
)
from asyncrpc.parallel.ddp.hooks.plain import narrow, widen

SIDES = st.integers(0, 40)
SHAPES = st.lists(st.lists(SIDES, max_size=4).map(torch.Size), max_size=6)


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype | None = None) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=draw).to(dtype or torch.float32)


class TestPlan:
    @given(
        shapes=SHAPES,
        rank=st.integers(1, 5),
        rate=st.floats(0.3, 9.0),
        batch=st.booleans(),
    )
    def test_plan_sends_every_element_once(
        self, shapes: list[torch.Size], rank: int, rate: float, *, batch: bool
    ) -> None:
        plan = plan_for(shapes, rank, rate, batch=batch)
        ranges = [
            *plan.plain,
            *((matrix.start, matrix.end) for matrix in plan.matrices),
        ]
        ends = [0]
        for start, end in sorted(ranges):
            assert start == ends[-1]
            assert end > start
            ends.append(end)
        assert ends[-1] == plan.numel == sum(shape.numel() for shape in shapes)

    @given(SHAPES, st.integers(1, 5), st.floats(0.3, 9.0))
    def test_plan_compresses_the_same_gradients_as_torch(
        self, shapes: list[torch.Size], rank: int, rate: float
    ) -> None:
        plan = plan_for(shapes, rank, rate, batch=False)
        compressed = {matrix.place: matrix for matrix in plan.matrices}
        after = 0
        for place, shape in enumerate(shapes):
            if not shape.numel():
                assert place not in compressed
                continue
            rows = shape[0] if shape else 1
            columns = shape.numel() // rows
            least = min(rows, columns, rank)
            torch_would, whole, less = powerSGD_hook._should_compress(  # type: ignore[no-untyped-call]  # noqa: SLF001  torch's
                rows, columns, least, rate
            )
            assert (place in compressed) == torch_would
            after += less if torch_would else whole
        assert plan.sent_numel == after

    def test_matrices_of_one_shape_are_batched_on_request(self) -> None:
        shapes = [torch.Size(size) for size in ((8, 9), (30,), (9, 8), (8, 3, 3))]
        alone = plan_for(shapes, 1, 1, batch=False)
        assert [[item.place for item in each] for each in alone.batches] == [
            [0],
            [3],
            [2],
        ]
        together = plan_for(shapes, 1, 1, batch=True)
        assert [[item.place for item in each] for each in together.batches] == [
            [0, 3],
            [2],
        ]
        assert q_shapes(together) == [(2, 9, 1), (1, 8, 1)]
        assert together.plain == ((72, 102),)

    def test_uncompressed_neighbours_are_sent_in_one_piece(self) -> None:
        shapes = [torch.Size(size) for size in ((3,), (4,), (50, 50), (), (2,))]
        assert plan_for(shapes, 1, 2, batch=False).plain == ((0, 7), (2507, 2510))


def one_step(
    buffer: torch.Tensor, shapes: list[torch.Size], rank: int, *, batch: bool
) -> torch.Tensor:
    """Make a step of one rank, alone; return the errors."""
    plan = plan_for(shapes, rank, 1.0, batch=batch)
    error = torch.full_like(buffer, torch.nan)
    step = Layers(plan, buffer, drawn(plan.q_numel, seed=9), error, 0.0)
    step.first()
    step.second()
    step.finish(1)
    return error


class TestLayers:
    @pytest.mark.parametrize("batch", [False, True])
    def test_error_is_the_unsent_part_of_the_layers(self, *, batch: bool) -> None:
        shapes = [torch.Size(size) for size in ((20, 30), (7,), (20, 30), (9, 40))]
        given_ = drawn(sum(shape.numel() for shape in shapes))
        buffer = given_.clone()
        error = one_step(buffer, shapes, 2, batch=batch)
        assert torch.equal(error, given_ - buffer)
        assert (error[600:607] == 0).all()
        assert error.abs().max() > 0.1

    @pytest.mark.parametrize("batch", [False, True])
    @pytest.mark.parametrize("rank", [1, 2, 3])
    def test_matrix_of_the_given_rank_is_sent_exactly(
        self, rank: int, *, batch: bool
    ) -> None:
        first = drawn(20, rank) @ drawn(rank, 30, seed=1)
        other = drawn(20, rank, seed=2) @ drawn(rank, 30, seed=3)
        given_ = torch.cat([first.view(-1), other.view(-1)])
        buffer = given_.clone()
        one_step(buffer, [torch.Size((20, 30))] * 2, rank, batch=batch)
        torch.testing.assert_close(buffer, given_, rtol=1e-4, atol=1e-4)

    def test_result_is_the_best_for_its_columns(self) -> None:
        """It is M projected on the span of P: P P^T M."""
        given_ = drawn(20, 30)
        buffer = given_.clone().view(-1)
        qs = drawn(60, seed=9)
        plan = plan_for([given_.shape], 2, 1.0, batch=False)
        step = Layers(plan, buffer, qs, None, 0.0)
        first = torch.linalg.qr(given_ @ torch.linalg.qr(qs.view(30, 2)).Q).Q
        step.first()
        step.second()
        step.finish(1)
        torch.testing.assert_close(buffer.view(20, 30), first @ first.t() @ given_)

    def test_gradients_of_zero_stay_zero(self) -> None:
        buffer = torch.zeros(600)
        error = one_step(buffer, [torch.Size((20, 30))], 2, batch=False)
        assert (buffer == 0).all()
        assert (error == 0).all()


class TestSquare:
    @pytest.mark.parametrize("numel", [1, 2, 4, 5, 99, 100, 101, 70_000])
    def test_error_is_the_unsent_part_of_the_square(self, numel: int) -> None:
        side = side_of(numel)
        assert (side - 1) ** 2 < numel <= side**2
        buffer = drawn(numel)
        padded = torch.cat([buffer, torch.zeros(side * side - numel)])
        given_ = padded.clone()
        step = Square(buffer, padded, drawn(side, 1, seed=5))
        step.first()
        step.second()
        step.finish(1)
        wanted = step.sent @ step.qs.t()
        torch.testing.assert_close(buffer, wanted.view(-1)[:numel])
        torch.testing.assert_close(padded, given_ - wanted.view(-1))

    def test_unpadded_buffer_is_its_own_square(self) -> None:
        buffer = drawn(400)
        apart, padded = buffer.clone(), buffer.clone()
        for target, square in ((buffer, buffer), (apart, padded)):
            step = Square(target, square, drawn(20, 2, seed=5))
            step.first()
            step.second()
            step.finish(1)
        assert torch.equal(buffer, apart)

    def test_empty_buffer_has_side_0(self) -> None:
        assert side_of(0) == 0


HALVES = [torch.float16, torch.bfloat16]
BUFFERS = [torch.float32, torch.float64, *HALVES]
STEP = 1 << 18  # of a conversion
NUMELS = [0, 1, 3, STEP - 1, STEP, STEP + 1, 3 * STEP + 1]


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("dtype", BUFFERS)
@pytest.mark.parametrize("numel", NUMELS)
def test_buffer_is_converted_in_place_and_back(
    numel: int, dtype: torch.dtype, half: torch.dtype
) -> None:
    memory = drawn(numel + 2, dtype=dtype)
    edges = memory[0].item(), memory[-1].item()
    buffer = memory[1:-1]
    wanted = buffer.clone().to(half, copy=True).div_(3)
    narrowed = narrow(buffer, half, 3)
    assert narrowed.dtype is half
    assert torch.equal(narrowed, wanted)
    assert narrowed.data_ptr() == buffer.data_ptr()
    assert widen(narrowed, buffer) is buffer
    assert torch.equal(buffer, wanted.to(dtype))
    assert (memory[0].item(), memory[-1].item()) == edges


@pytest.mark.parametrize("dtype", BUFFERS)
def test_half_elsewhere_is_copied_into_the_buffer(dtype: torch.dtype) -> None:
    buffer, half = drawn(1000, dtype=dtype), drawn(1000, dtype=torch.float16)
    assert widen(half.view(10, 100), buffer) is buffer
    assert torch.equal(buffer, half.to(dtype))


def test_missing_divisor_divides_nothing() -> None:
    assert narrow(torch.tensor([1.0, 3.0]), torch.float16).tolist() == [1.0, 3.0]


DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [1, 2, 3, 8])
def test_columns_become_orthonormal(columns: int, dtype: torch.dtype) -> None:
    matrices = drawn(3, 40, columns, dtype=dtype)
    assert orthogonalize(matrices) == 0
    products = (matrices.transpose(1, 2).double() @ matrices.double()).abs()
    wanted = torch.eye(columns, dtype=torch.float64).expand(3, -1, -1)
    # A half has rounded each of forty products, and each column as often as it is put
    # right for another.
    allowed = 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(products, wanted, rtol=0.0, atol=allowed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [1, 2, 3, 8])
@pytest.mark.parametrize("epsilon", [0.0, 1e-3])
def test_orthogonal_columns_equal_those_of_torch_bit_by_bit(
    columns: int, epsilon: float, dtype: torch.dtype
) -> None:
    ours = drawn(2, 17, columns, dtype=dtype)
    theirs = ours.clone()
    orthogonalize(ours, epsilon)
    powerSGD_hook._orthogonalize(theirs, epsilon)  # type: ignore[no-untyped-call]  # noqa: SLF001  torch's
    assert torch.equal(ours, theirs)


def test_orthogonalize_writes_to_views() -> None:
    memory = drawn(1, 30, 1).view(-1)
    orthogonalize(memory[10:].view(1, 10, 2))
    assert memory[10::2].norm() == pytest.approx(1.0)


@pytest.mark.parametrize("columns", [1, 2])
def test_zero_columns_stay_zero_and_are_counted(columns: int) -> None:
    matrices = drawn(3, 10, columns)
    matrices[1] = 0
    assert orthogonalize(matrices) == columns
    assert (matrices[1] == 0).all()
    assert torch.isfinite(matrices).all()


def test_epsilon_keeps_zero_columns_from_being_counted() -> None:
    matrices = torch.zeros(2, 10, 1)
    assert orthogonalize(matrices, 1e-8) == 0
    assert (matrices == 0).all()
