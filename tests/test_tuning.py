"""How CUDA kernels divide their work: accesses, tiles, launch geometry, and the search for the fastest (no GPU)."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cubins import compile_twin
from functors import functor

import fuser
from fuser import compiler, disk_cache, planner
from fuser.access import STATIC_SHARED_BYTES, Access, Tuning, plan_walk
from fuser.config import config
from fuser.cxx.functor import parse_functor
from fuser.errors import CompileError
from fuser.function import Function
from fuser.geometry import divider, launch_shape, pack_geometry
from fuser.graph import FusionGroup, GroupBuilder
from fuser.kernel_source import KernelSource
from fuser.kernel_spec import ArgSpec, KernelSpec
from fuser.layout import IterationSpace
from fuser.tuning import search as tuner
from fuser.tuning import table as tunings
from fuser.tuning.search import KernelTrials, Trial, TuningReport

MUL = "template <typename T> T mul(T x, T y) { return x * y; }"
SQUARE = (256, 256)
ROWS = (1, 256)
COLUMNS = (256, 1)


def walk(sizes: tuple[int, ...], *strides: tuple[int, ...], size: int = 4, aligned: bool = True, **options: Any) -> Any:
    count = len(strides)
    return plan_walk(IterationSpace(sizes, strides), [size] * count, [aligned] * count, 1, **options)


# --- accesses and tiles ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("size", "vector"), [(1, 16), (2, 8), (4, 4), (8, 2), (16, 1)])
def test_dense_operands_move_sixteen_bytes(size: int, vector: int) -> None:
    found = walk((1000,), (1,), (1,), size=size)
    assert found.vector == vector
    assert found.accesses == (Access(vector), Access(vector))


def test_a_misaligned_input_leaves_the_others_their_vectors() -> None:
    found = plan_walk(IterationSpace((1000,), ((1,), (1,), (1,))), [4, 4, 4], [True, False, True], 1)
    assert found.vector == 4
    assert [access.width for access in found.accesses] == [4, 1, 4]


def test_outputs_decide_the_vector() -> None:
    rows = walk((254, 256), (1, 254), (1, 256))
    assert (rows.vector, [access.width for access in rows.accesses]) == (2, [2, 2])
    assert walk((255, 256), (1, 255), (1, 256)).vector == 1
    assert walk((255, 256), (1, 255), (1, 256)).tuning.unroll == 4


def test_broadcast_operands_do_not_count() -> None:
    found = walk(SQUARE, ROWS, (1, 0), (0, 1))
    assert (found.vector, found.tuning.tile) == (4, 0)


def test_rows_of_a_large_matrix_share_what_they_have_in_common() -> None:
    large, one = (1 << 12, 1 << 12), (1, 1 << 12)
    found = plan_walk(IterationSpace(large, (one, one, (1, 0), (0, 1))), [2, 2, 4, 4], [True] * 4, 1)
    assert (found.vector, found.tuning) == (8, Tuning(block=128, unroll=4, is_stacked=True))
    assert found.accesses == (Access(8), Access(8), Access(4, is_shared=True), Access(1))
    # Few rows, other operands whose elements lie apart, and a third dimension.
    assert not walk(SQUARE, ROWS, ROWS, (1, 0)).tuning.is_stacked
    assert not walk(large, one, (2, 1 << 13), (1, 0)).tuning.is_stacked
    assert not walk((*large, 2), (*one, 1 << 24), (1, 0, 1 << 12)).tuning.is_stacked


def test_what_repeats_is_read_once_for_all_vectors_of_a_thread() -> None:
    """In blocks that take whole periods: three colours in 192 x 4 elements."""

    def tuned(period: int, size: int = 3 << 21) -> tuple[Tuning, bool]:
        space = IterationSpace((size,), ((1,), (1,), (1,)), period=period)
        found = plan_walk(space, [4, 1, 4], [True, True, False], 1, {2})
        return found.tuning, found.accesses[2].is_shared

    assert tuned(3) == (Tuning(block=192, unroll=4), True)
    assert tuned(64) == (Tuning(block=256, unroll=4), True)
    assert tuned(11) == (Tuning(), False), "no block has a multiple"
    assert tuned(3, 3 << 10) == (Tuning(), False), "few elements"


def test_transposed_inputs_go_through_a_tile() -> None:
    found = walk(SQUARE, ROWS, ROWS, COLUMNS)
    assert [access.is_transposed for access in found.accesses] == [False, False, True]
    assert found.tuning.tile == 64
    assert not walk((8, 256), (1, 8), (256, 1)).tuning.tile, "too narrow"
    assert not walk(SQUARE, COLUMNS, ROWS, size=4).accesses[0].is_transposed, "outputs are not"


def test_the_tiles_other_dimension_comes_second() -> None:
    # Contiguous with channels_last: pixels, channels, images.
    found = walk((3136, 64, 8), (1, 3136, 3136 * 64), (64, 1, 3136 * 64))
    assert found.accesses[1].is_transposed
    moved = walk((64, 8, 3136), (1, 64, 512), (3136, 3136 * 64, 1))
    assert moved.space.sizes == (64, 3136, 8)
    assert moved.space.strides[1] == (3136, 1, 3136 * 64)
    assert moved.accesses[1].is_transposed


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("count", [1, 2, 5, 12])
def test_tiles_fit_shared_memory(size: int, count: int) -> None:
    found = walk(SQUARE, ROWS, *[COLUMNS] * count, size=size)
    tiled = sum(access.is_transposed for access in found.accesses)
    side = found.tuning.tile
    assert tiled >= min(count, 2)
    assert tiled * side * (side * size + max(size, 4)) <= STATIC_SHARED_BYTES
    assert found.tuning.share >= found.vector
    assert all(found.tuning.share >= access.width for access in found.accesses)


def test_without_rounding_there_are_registers_for_more_vectors() -> None:
    assert walk((1000,), (1,), (1,), size=2).tuning.unroll == 1
    assert walk((1000,), (1,), (1,), size=2, rounds=False).tuning.unroll == 2


# --- geometry -------------------------------------------------------------------------------------------------------
def test_dividers_divide() -> None:
    drawn = random.Random(0)
    divisors = [1, 2, 3, 5, 7, 641, 2**30, 2**30 + 1, 2**31 - 1, *(drawn.randrange(1, 2**31) for _ in range(500))]
    for divisor in divisors:
        field = divider(divisor)
        assert 0 <= field < 2**63
        multiplier, shift = field & 0xFFFFFFFF, field >> 32
        for number in (0, 1, divisor - 1, divisor, 2**31 - 1, *(drawn.randrange(2**31) for _ in range(20))):
            sum_ = number + (number * multiplier >> 32)
            assert number >= 2**31 or (sum_ < 2**32 and sum_ >> shift == number // divisor)
    assert divider(2**31) == 0


def source_of(*inputs: torch.Tensor, numerics: str = "strict") -> tuple[KernelSpec, ArgSpec, Any]:
    spec = compiler.register(group(len(inputs)))
    with config.patch(numerics=numerics):
        ((part, args),) = planner.plan_texts(spec, inputs, torch.device("cuda"))
    return part, args, compiler.build_kernel_source(part, args)


def group(count: int) -> FusionGroup:
    builder = GroupBuilder()
    total, *others = (builder.add_input(f"x{index}") for index in range(count))
    for other in others:
        (total,) = builder.apply(Function(parse_functor(MUL)), [total, other])
    return builder.build([total])


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def test_launch_shape() -> None:
    _, _, linear = source_of(meta(1000), meta(1000))
    assert linear.geometry == ()
    assert (grid_of(linear, 1000), grid_of(linear, 1025)) == (1, 2)
    _, _, rows = source_of(meta(100, 32), meta(32))
    assert grid_of(rows, 32, 100) == -(-8 * 100 // (rows.tuning.block * rows.tuning.unroll))
    _, _, tiles = source_of(meta(100, 65), meta(65, 100).t())
    assert grid_of(tiles, 65, 100) == 2 * 2
    assert launch_shape(tiles, IterationSpace((65, 100), ())).block == tiles.tuning.block


def grid_of(source: KernelSource, *sizes: int) -> int:
    return launch_shape(source, IterationSpace(sizes, ())).grid


@pytest.mark.parametrize(("numerics", "functors", "unroll"), [("strict", 1, 2), ("strict", 2, 1), ("fast", 2, 2)])
def test_one_functor_and_fast_chains_do_not_round_in_between(numerics: str, functors: int, unroll: int) -> None:
    _, args, _ = source_of(*[meta(1000, dtype=torch.bfloat16)] * (functors + 1), numerics=numerics)
    assert args.tuning.unroll == unroll


def test_geometry_is_as_long_as_its_fields() -> None:
    stacked, steps = meta(4, 65, 100).transpose(1, 2), meta(9, 9)[:, ::2]
    for inputs in ((meta(100, 32), meta(32)), (meta(4, 100, 65), stacked), (steps, steps)):
        _, args, source = source_of(*inputs)
        operands = len(source.operands)
        space = IterationSpace((50,) * args.rank, ((1,) * args.rank,) * operands)
        fields = {"size": args.rank, "count": args.rank, "divide": args.rank - 1, "stride": args.rank * operands}
        assert len(pack_geometry(source, space)) == sum(fields[name] for name in source.geometry)


# --- the search -----------------------------------------------------------------------------------------------------
CALLS = {
    "linear": lambda dtype: (meta(1000, dtype=dtype), meta(1000, dtype=dtype)),
    "rows": lambda dtype: (meta(64, 64, dtype=dtype), meta(64, dtype=dtype)),
    "steps": lambda dtype: (meta(64, 64, dtype=dtype)[:, ::2], meta(64, 32, dtype=dtype)),
    "tiles": lambda dtype: (meta(64, 64, dtype=dtype), meta(64, 64, dtype=dtype).t()),
}


@pytest.mark.one_in(2)
@pytest.mark.nvrtc
@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16, torch.float32, torch.complex128], ids=str)
@pytest.mark.parametrize("layout", CALLS)
def test_every_candidate_compiles(layout: str, dtype: torch.dtype) -> None:
    spec, args, _ = source_of(*CALLS[layout](dtype))
    found = tunings.candidates(args)
    assert found[0] == args.tuning
    assert len(found) == len(set(found)) >= 2
    for tuning in found:
        compile_twin(spec.group, args._replace(tuning=tuning))


@pytest.mark.parametrize("period", [3, 5, 6, 7, 8, 14])
def test_no_candidate_reads_what_repeats_once_for_different_places(period: int) -> None:
    """Also of other calls with the same text, which has no number of the period."""
    found: dict[ArgSpec, list[int]] = {}
    for columns in (period, 2 * period, 3 * period):
        _, args, _ = source_of(meta(1 << 22, columns), meta(columns))
        if any(access.is_shared for access in args.accesses):
            found.setdefault(args, []).append(columns)
    assert found
    for args, periods in found.items():
        for tuning in tunings.candidates(args):
            assert tuning.unroll == 1 or not any(tuning.block * args.vector % own for own in periods), tuning


def test_a_winner_is_used_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, args, _ = source_of(meta(1000), meta(1000))
    monkeypatch.setattr(tunings, "_known", {})
    with config.patch(cache_dir=str(tmp_path), disk_cache=True):
        with tunings.record() as seen:
            assert tunings.tuned(spec, args, "GPU") == args
        (candidate,) = seen
        assert not tunings.is_known(candidate)
        winner = Tuning(block=512, unroll=2)
        with tunings.use(candidate, winner):
            assert tunings.tuned(spec, args, "GPU").tuning == winner
        assert tunings.tuned(spec, args, "GPU") == args
        before = tunings.latest()
        tunings.keep(candidate, winner)
        assert tunings.latest() not in {before, ""}, "graphs that are kept have plans without it"
        assert tunings.is_known(candidate)
        assert tunings.tuned(spec, args, "GPU").tuning == winner
        assert tunings.tuned(spec, args, "another GPU") == args
        # Another process finds it on disk; what another state of the code kept does not count.
        monkeypatch.setattr(tunings, "_known", {})
        assert tunings.tuned(spec, args, "GPU").tuning == winner
        for text in (b"", b"{}x", b'{"block": 7}', b'{"other": 1}'):
            monkeypatch.setattr(tunings, "_known", {})
            disk_cache.write(candidate.cache_key, text)
            assert tunings.tuned(spec, args, "GPU") == args


def test_without_a_gpu_the_report_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    report = fuser.autotune(functor("axpy"), torch.ones(4), torch.ones(4))
    assert report == TuningReport(reason="no CUDA device is available")
    assert str(report) == "nothing tuned: no CUDA device is available"


def test_the_report_prints_what_was_tried() -> None:
    trials = (Trial(Tuning(), 12.5), Trial(Tuning(block=128, unroll=2), 10.0), Trial(Tuning(tile=64), 30.25))
    report = TuningReport((KernelTrials("axpy, relu", trials, trials[1].tuning),))
    assert str(report).splitlines() == [
        "kernel of axpy, relu",
        "  blocks of 256, 1 in flight                    12.50 us default",
        "  blocks of 128, 2 in flight                    10.00 us chosen",
        "  blocks of 256, tiles of 64 x 64               30.25 us",
    ]


def test_a_search_keeps_what_is_faster_by_more_than_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    from fuser.tuning import search as tuner

    spec, args, _ = source_of(meta(1000), meta(1000))
    kept: list[Tuning] = []
    monkeypatch.setattr(tunings, "keep", lambda _, tuning: kept.append(tuning))
    candidate = tunings.Candidate("mul", spec.key, args, "GPU")
    times: dict[Tuning, float] = {}
    monkeypatch.setattr(tuner, "_time_us", lambda run: run())
    monkeypatch.setattr(tuner, "tunings", SimpleNamespace(**vars(tunings)))

    def run() -> float:
        tuning = tunings.tuned(spec, args, "GPU").tuning
        if tuning == too_large:
            # As where the rows of a block wait with more than there is shared memory for.
            raise CompileError("too much shared data")
        return times.get(tuning, 100.0)

    too_large = Tuning(block=512, unroll=4)
    times[Tuning(block=512)] = 99.5
    assert tuner._tune(candidate, run).chosen == args.tuning
    times[Tuning(block=128)] = 90.0
    report = tuner._tune(candidate, run)
    assert report.chosen == Tuning(block=128)
    assert [trial.time_us for trial in report.trials if trial.tuning == report.chosen] == [90.0]
    assert {trial.tuning for trial in report.trials} == {*tunings.candidates(args)} - {too_large}
    assert kept == [args.tuning, Tuning(block=128)]


def test_the_setting_searches_for_unknown_kernels_only(monkeypatch: pytest.MonkeyPatch) -> None:
    from fuser.tuning import search as tuner

    spec, args, _ = source_of(meta(1000), meta(1000))
    monkeypatch.setattr(tunings, "_known", {})
    searched: list[tunings.Candidate] = []

    def search(found: tuple[tunings.Candidate, ...], run: Any) -> None:
        searched.extend(found)
        # Plans made by the search itself start no search.
        with tuner._searching():
            assert tuner.make_tuned(make, run) == args
        tunings._known.update(dict.fromkeys(found, Tuning(block=512)))

    def make() -> ArgSpec:
        return tunings.tuned(spec, args, "GPU")

    monkeypatch.setattr(tuner, "_search", search)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert tuner.make_tuned(make, lambda: None) == args
    assert searched == []
    with config.patch(autotune=True, no_compile=False):
        with config.patch(no_compile=True):
            assert tuner.make_tuned(make, lambda: None) == args
        with ThreadPoolExecutor(1) as another:
            lock = tuner._search_lock()
            assert another.submit(lock.acquire).result()
            assert tuner.make_tuned(make, lambda: None) == args
            another.submit(lock.release).result()
        assert searched == []
        for _ in range(2):
            assert tuner.make_tuned(make, lambda: None).tuning == Tuning(block=512)
    assert len(searched) == 1


@pytest.mark.nvrtc
@pytest.mark.parametrize("option", ["--prec-div=false", "--prec-sqrt=false"])
def test_only_fast_kernels_divide_and_take_roots_roughly(option: str) -> None:
    from fuser.cuda.backend import _options

    rough = [option in _options("sm_90", numerics) for numerics in ("strict", "fast")]
    assert rough == [False, True]


def test_a_winner_belongs_to_one_layout_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tunings, "_known", {})
    with config.patch(cache_dir=str(tmp_path), disk_cache=True):
        with tunings.record() as seen:
            for dtype in (torch.float32, torch.bfloat16):
                spec, args, _ = source_of(meta(1000, dtype=dtype), meta(1000, dtype=dtype))
                tunings.tuned(spec, args, "GPU")
        first, second = seen
        tunings.keep(first, Tuning(block=512, unroll=2))
        tunings._known.clear()
        assert tunings.tuned(spec, second.args, "GPU") == second.args


def test_nothing_is_searched_inside_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, args, _ = source_of(meta(1000), meta(1000))
    monkeypatch.setattr(tunings, "_known", {})
    monkeypatch.setattr(tuner, "_search", lambda *_: pytest.fail("searched"))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with config.patch(autotune=True):
        assert tuner.make_tuned(lambda: tunings.tuned(spec, args, "GPU"), lambda: None) == args
    assert tunings._records == []


def test_a_search_plans_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, args, _ = source_of(meta(1000), meta(1000))
    monkeypatch.setattr(tunings, "_known", {})
    monkeypatch.setattr(tunings, "keep", lambda *_: None)
    generations: list[int] = [config.generation]
    monkeypatch.setattr(tuner, "_time_us", lambda _: generations.append(config.generation) or 1.0)
    report = tuner._search([tunings.Candidate("mul", spec.key, args, "GPU")], lambda: None)
    generations.append(config.generation)
    assert len(set(generations)) == len(generations) == len(report.kernels[0].trials) + 2
