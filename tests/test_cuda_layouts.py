"""On a GPU: every way in which a kernel reads and writes its operands, bit for bit, and the search for the fastest."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from functors import poison, same_bits, unpoison

import fuser
from fuser import arg_spec, disk_cache
from fuser.config import config
from fuser.tuning import table as tunings

pytestmark = pytest.mark.cuda

DTYPES = (
    torch.bool, torch.int8, torch.int16, torch.bfloat16, torch.float32, torch.int64, torch.complex64, torch.complex128,
)  # fmt: skip
SHAPES = ((64, 64), (33, 32), (65, 130), (200, 77), (128, 1024), (1, 500), (3, 40000))

add = fuser.create_jit_fn("template <typename T> T add(T x, T y) { return x + y; }")
add3 = fuser.create_jit_fn("template <typename T> T add3(T x, T y, T z) { return x + y + z; }")


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    poison()
    yield
    unpoison()


@pytest.fixture(params=["narrow", "wide"])
def index(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run with 32-bit indices, and with 64-bit ones, which otherwise only huge tensors get."""
    if request.param == "wide":
        monkeypatch.setattr(arg_spec, "MAX_NARROW_OFFSET", 0)
    config.touch()
    return str(request.param)


def test_wide_indices_are_64_bits(index: str) -> None:
    x = draw((64, 33), torch.float32, 1)
    with tunings.record() as seen:
        add(x, x[:1])
    assert [candidate.args.wide_index for candidate in seen] == [index == "wide"]


@pytest.fixture(autouse=True)
def forgotten_plans() -> Iterator[None]:
    yield
    config.touch()


def draw(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    if dtype.is_floating_point or dtype.is_complex:
        real = torch.float32 if dtype.itemsize < 4 else dtype
        return torch.randn(shape, device="cuda", generator=generator, dtype=real).to(dtype)
    return torch.randint(-100, 100, shape, device="cuda", generator=generator).to(dtype)


def bits(x: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(x) if x.is_complex() else x


def check(function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> None:
    # In the order of the functor.
    wanted = inputs[0]
    for other in inputs[1:]:
        wanted = wanted + other
    if len(inputs) > 2 and inputs[0].dtype.itemsize < 4 and inputs[0].is_floating_point():
        wanted = sum((item.float() for item in inputs[1:]), inputs[0].float()).to(inputs[0].dtype)
    got = function(*inputs)
    assert got.dtype == wanted.dtype
    assert got.shape == wanted.shape
    assert same_bits(bits(got), bits(wanted))


LAYOUTS: dict[str, Callable[[tuple[int, int], torch.dtype, int], torch.Tensor]] = {
    "dense": lambda shape, dtype, seed: draw(shape, dtype, seed),
    "transposed": lambda shape, dtype, seed: draw(shape[::-1], dtype, seed).t(),
    "transposed, padded": lambda shape, dtype, seed: draw((shape[1], shape[0] + 3), dtype, seed)[:, 1:-2].t(),
    "every second": lambda shape, dtype, seed: draw((shape[0], 2 * shape[1]), dtype, seed)[:, ::2],
    "misaligned": lambda shape, dtype, seed: draw((shape[0], shape[1] + 1), dtype, seed)[:, 1:],
    "row": lambda shape, dtype, seed: draw((1, shape[1]), dtype, seed),
    "column": lambda shape, dtype, seed: draw((shape[0], 1), dtype, seed),
    "one": lambda shape, dtype, seed: draw((), dtype, seed),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_pairs_of_layouts(dtype: torch.dtype, index: str) -> None:
    for shape, (one, two) in itertools.product(SHAPES, itertools.combinations(LAYOUTS, 2)):
        check(add, LAYOUTS[one](shape, dtype, 1), LAYOUTS[two](shape, dtype, 2))


@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16, torch.float32, torch.complex128], ids=str)
def test_three_layouts(dtype: torch.dtype, index: str) -> None:
    for shape in ((65, 130), (128, 256)):
        for names in itertools.combinations(LAYOUTS, 3):
            check(add3, *(LAYOUTS[name](shape, dtype, seed) for seed, name in enumerate(names)))


def test_mixed_dtypes_through_tiles(index: str) -> None:
    for one, two in itertools.permutations((torch.int8, torch.bfloat16, torch.float32, torch.float64), 2):
        check(add, draw((130, 65), one, 1), draw((65, 130), two, 2).t())
        check(add, draw((65, 130), one, 1).t(), draw((130, 65), two, 2))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float32], ids=str)
def test_more_than_two_dimensions(dtype: torch.dtype, index: str) -> None:
    x = draw((3, 40, 33, 36), dtype, 1)
    for order in itertools.permutations(range(4)):
        y = draw(tuple(x.shape[dim] for dim in order), dtype, 2).permute([order.index(dim) for dim in range(4)])
        check(add, x, y)
        check(add3, x, y, draw((40, 1, 36), dtype, 3))
    channels_last = x.contiguous(memory_format=torch.channels_last)
    check(add, channels_last, x)
    check(add, x, channels_last)
    check(add, x[:, ::2], channels_last[:, 1::2])


def test_many_tiles_in_one_launch() -> None:
    x = draw((70, 90), torch.float64, 0)
    chain = fuser.fuse(lambda x, a, b, c, d, e: x + a + b + c + d + e)
    others = [draw((90, 70), torch.float64, seed).t() for seed in range(1, 6)]
    assert torch.equal(chain(x, *others), sum(others, x))


def test_in_place_with_a_transposed_operand() -> None:
    for shape in ((64, 64), (65, 130)):
        x, y = draw(shape, torch.float32, 1), draw(shape[::-1], torch.float32, 2).t()
        wanted = x + y
        assert add(x, y, out=x) is x
        assert torch.equal(x, wanted)


# A row, a column or one element for all is no whole output.
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name not in ("row", "column", "one")])
def test_out_of_any_layout(layout: str) -> None:
    x, y = draw((65, 130), torch.float32, 1), draw((130, 65), torch.float32, 2).t()
    out = LAYOUTS[layout]((65, 130), torch.float32, 3)
    add(x, y, out=out)
    assert torch.equal(out, x + y)


@pytest.mark.parametrize("shape", [(4099, 1032), (1 << 13, 1000), (5001, 1001), (1 << 21, 4), (64, 1 << 17)])
def test_rows_of_a_large_matrix_share_what_they_have_in_common(shape: tuple[int, ...], index: str) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        x, y, z = draw(shape, dtype, 1), draw(shape[1:], torch.float32, 2), draw((shape[0], 1), dtype, 3)
        with tunings.record() as seen:
            made = fuser.fuse(lambda x, y, z: x * y + z)(x, y, z)
        assert seen[0].args.tuning.is_stacked
        assert same_bits(made, x * y + z)


@pytest.mark.parametrize("numerics", ["strict", "fast"])
def test_no_tuning_changes_a_bit(numerics: str) -> None:
    silu = fuser.fuse(lambda x, y: torch.sigmoid(x * y + 0.3) * x - y)
    for dtype in (torch.bfloat16, torch.float32):
        x = draw((131, 260), dtype, 1)
        for y in (draw((131, 260), dtype, 2), draw((260,), dtype, 2), draw((260, 131), dtype, 2).t(), x[:, :1]):
            with config.patch(numerics=numerics), tunings.record() as seen:
                wanted = silu(x, y)
                # Once for the sizes of the call, and once for any.
                (candidate,) = dict.fromkeys(seen)
                for tuning in tunings.candidates(candidate.args):
                    with tunings.use(candidate, tuning):
                        config.touch()
                        assert torch.equal(silu(x, y), wanted), tuning


# --- the search -----------------------------------------------------------------------------------------------------
@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(tunings, "_known", {})
    with config.patch(cache_dir=str(tmp_path), disk_cache=True):
        yield tmp_path


def tunings_on_disk() -> int:
    return sum(disk_cache.read(candidate.cache_key) is not None for candidate in tunings._known)


def test_autotune(fresh: Path) -> None:
    chain = fuser.fuse(lambda x, y: torch.tanh(x + y) * x)
    x, y = draw((512, 768), torch.float32, 1), draw((768, 512), torch.float32, 2).t()
    wanted = chain(x, y)
    report = fuser.autotune(chain, x, y)
    (kernel,) = report.kernels
    assert not report.reason
    assert len(kernel.trials) > 3
    assert all(trial.time_us > 0 for trial in kernel.trials)
    assert kernel.chosen in [trial.tuning for trial in kernel.trials]
    assert "chosen" in str(report)
    assert tunings_on_disk() == 1
    assert torch.equal(chain(x, y), wanted)
    # The same layout class: nothing is compiled for another size.
    compiles = fuser.stats()["compiles"]
    assert torch.equal(chain(x[:256], y[:256]), wanted[:256])
    assert fuser.stats()["compiles"] == compiles


def test_the_setting_tunes_each_layout_class_once(fresh: Path) -> None:
    double = fuser.create_jit_fn("template <typename T> T double_it(T x) { return x + x; }")
    with config.patch(autotune=True):
        for size in (1000, 2000, 1000):
            x = draw((size,), torch.float32, 1)
            assert torch.equal(double(x), x + x)
        assert tunings_on_disk() == 1
        launches = fuser.stats()["launches"]
        double(x)
        assert fuser.stats()["launches"] == launches + 1
        x = draw((64, 64), torch.float32, 1)[:, ::2]
        assert torch.equal(double(x), x + x)
    assert tunings_on_disk() == 2


def test_nothing_to_tune_on_the_cpu() -> None:
    report = fuser.autotune(add, torch.ones(3), torch.ones(3))
    assert report.kernels == ()
    assert report.reason == "the call launched no CUDA kernel of fuser's"
