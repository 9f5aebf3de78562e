"""Eager torch where no kernel can serve: same values, a recorded reason, a clear error without an eager version."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import fuser
from fuser.config import config
from fuser.errors import CompileError, CompilerNotFoundError, FallbackError, UnsupportedError

AXPY = "template <typename T> T axpy(T x, T y, T alpha) { return alpha * x + y; }"
SPLIT = "template <typename T> void split(T x, T& a, T& b) { a = x + 1; b = x - 1; }"
# goto is what no eager version can be derived from.
GOTO = "template <typename T> T axpy(T x, T y, T alpha) { goto end; end: return alpha * x + y; }"
BROKEN = "template <typename T> T broken(T x) { return undeclared_name(x); }"


def eager_axpy(x: Any, y: Any, *, alpha: Any) -> Any:
    return alpha * x + y


@pytest.fixture(autouse=True)
def counted() -> Iterator[None]:
    fuser.reset_stats()
    yield
    fuser.reset_stats()


@pytest.fixture
def no_cpu_fusion() -> Iterator[None]:
    before = fuser.override_can_fuse_on_cpu(False)
    yield
    fuser.override_can_fuse_on_cpu(before)


@pytest.fixture
def with_fallback() -> fuser.JitFunction:
    return fuser.jit_fn(AXPY, scalars={"alpha": 2.0}, fallback=eager_axpy)


@pytest.fixture
def without_fallback() -> fuser.JitFunction:
    return fuser.jit_fn(GOTO, scalars={"alpha": 2.0})


def fallbacks() -> dict[str, int]:
    found: dict[str, int] = fuser.stats()["fallbacks"]
    return found


def test_switched_off(no_cpu_fusion: None, with_fallback: fuser.JitFunction) -> None:
    assert not fuser.can_fuse_on_cpu()
    x = torch.arange(3.0)
    for count in (1, 2, 3):
        assert with_fallback(x, 1.0, alpha=3.0).tolist() == [1, 4, 7]
        assert fallbacks() == {"fusion on cpu is switched off": count}
    assert fuser.stats()["launches"] == 0


@pytest.mark.cpu
def test_switching_takes_effect_at_once(with_fallback: fuser.JitFunction) -> None:
    x = torch.arange(3.0)
    for is_on in (True, False, True):
        fuser.reset_stats()
        before = fuser.override_can_fuse_on_cpu(is_on)
        try:
            with_fallback(x, x)
        finally:
            fuser.override_can_fuse_on_cpu(before)
        assert (fuser.stats()["launches"], len(fallbacks())) == (int(is_on), int(not is_on))


def test_switched_off_without_an_eager_version(no_cpu_fusion: None, without_fallback: fuser.JitFunction) -> None:
    with pytest.raises(FallbackError) as caught:
        without_fallback(torch.ones(3), 1.0)
    assert str(caught.value).splitlines()[0] == (
        "cannot fuse: fusion on cpu is switched off; and 'axpy' has no eager version to fall back to: "
        "line 1, column 51: goto has no translation to torch"
    )
    assert fallbacks() == {}


def test_no_compiler(with_fallback: fuser.JitFunction, without_fallback: fuser.JitFunction) -> None:
    x = torch.arange(3.0)
    with config.patch(cxx="/nonexistent", disk_cache=False, no_compile=False):
        assert with_fallback(x, 1.0).tolist() == [1, 3, 5]
        assert with_fallback(x.double(), 1.0).dtype == torch.float64
        ((reason, count),) = fallbacks().items()
        assert count == 2
        assert reason == ("CPU kernels need a C++ compiler: CXX='/nonexistent' does not run (install g++ or set CXX)")
        assert f"group 0: eager torch: {reason}" in str(fuser.explain(with_fallback, x, 1.0))
        with pytest.raises(CompilerNotFoundError, match="CXX='/nonexistent' does not run"):
            without_fallback(x, 1.0)
        with pytest.raises(CompilerNotFoundError):
            with_fallback.check(device="cpu")
        assert not fuser.can_fuse_on_cpu()


@pytest.mark.cpu
def test_a_compiler_that_appears_is_used(with_fallback: fuser.JitFunction) -> None:
    x = torch.ones(3)
    with config.patch(cxx="/nonexistent", disk_cache=False):
        with_fallback(x, x)
    assert fuser.stats()["launches"] == 0
    with_fallback(x, x)
    assert fuser.stats()["launches"] == 1


@pytest.mark.cpu
def test_a_functor_that_does_not_compile() -> None:
    saved = fuser.jit_fn(BROKEN, fallback=lambda x: x * 10)
    assert saved(torch.ones(2)).tolist() == [10, 10]
    assert saved(torch.ones(2)).tolist() == [10, 10]
    assert fallbacks() == {"functor 'broken' does not compile (g++)": 2}
    assert fuser.stats()["compiles"] == 1
    with pytest.raises(CompileError):
        saved.check(device="cpu")
    with pytest.raises(CompileError):
        fuser.jit_fn(BROKEN)(torch.ones(2))


UNUSUAL: list[tuple[str, Callable[[], torch.Tensor], str]] = [
    ("sparse", lambda: torch.eye(3).to_sparse(), "a sparse_coo tensor"),
    ("compressed", lambda: torch.eye(3).to_sparse_csr(), "a sparse_csr tensor"),
]


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.parametrize(("what", "make", "reason"), UNUSUAL, ids=[row[0] for row in UNUSUAL])
def test_unusual_tensors(what: str, make: Callable[[], torch.Tensor], reason: str) -> None:
    double = fuser.jit_fn("template <typename T> T twice(T x) { return 2 * x; }", fallback=lambda x: x * 2)
    x = make()
    got = double(x)
    assert got.layout == x.layout
    assert torch.equal(got.detach().to_dense(), (x * 2).detach().to_dense())
    assert fallbacks() == {reason: 1}
    derived = fuser.jit_fn("template <typename T> T twice(T x) { return 2 * x; }")(x)
    assert derived.layout == x.layout
    assert torch.equal(derived.detach().to_dense(), got.detach().to_dense())
    assert fallbacks() == {reason: 2}
    bare = fuser.jit_fn("template <typename T> T twice(T x) { goto end; end: return 2 * x; }")
    if not x.requires_grad:
        with pytest.raises(FallbackError) as caught:
            bare(x)
        first, *_, last = str(caught.value).splitlines()
        assert first == (
            f"cannot fuse ({reason}), and 'twice' has no eager version to fall back to: "
            "line 1, column 38: goto has no translation to torch"
        )
        assert last == "give jit_fn(..., fallback=a function of the same tensors and scalars)"
    assert fallbacks() == {reason: 2}


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning", "ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize(
    ("make", "reason"),
    [
        *((make, reason) for _, make, reason in UNUSUAL),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "a nested tensor"),
    ],
)
def test_explain_says_so_beforehand(make: Callable[[], torch.Tensor], reason: str) -> None:
    double = fuser.jit_fn("template <typename T> T twice(T x) { return 2 * x; }")
    assert str(fuser.explain(double, make())).startswith(f"group 0: eager torch: {reason}\n")
    with pytest.raises(UnsupportedError, match=reason):
        fuser.debug_get_fused_kernel_code(double.spec(1).group, [make()])


@pytest.mark.cpu
def test_lazy_conjugates_and_negatives_are_no_fallback() -> None:
    copy = fuser.jit_fn("template <typename T> T same(T x) { return x; }")
    z = torch.tensor([1 + 2j, 3 - 4j])
    for lazy in (z.conj(), z.conj().imag, torch._neg_view(z)):
        assert torch.equal(copy(lazy), lazy.resolve_conj().resolve_neg())
    assert fallbacks() == {}


@pytest.mark.cpu
def test_gradients_flow_through_the_eager_version(with_fallback: fuser.JitFunction) -> None:
    x = torch.randn(4, dtype=torch.float64, requires_grad=True)
    y = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda a, b: with_fallback(a, b, alpha=3.0), (x, y))
    assert torch.autograd.gradgradcheck(lambda a, b: with_fallback(a * a, b, alpha=3.0), (x, y))
    assert fallbacks() == {}
    jump = fuser.jit_fn("template <typename T> T jump(T x) { goto end; end: return x * x; }", fallback=lambda x: x * x)
    assert torch.autograd.gradcheck(jump, (x,))
    assert torch.autograd.gradgradcheck(jump, (x,))


@pytest.mark.cpu
def test_without_grad_mode_nothing_falls_back(without_fallback: fuser.JitFunction) -> None:
    x = torch.ones(3, requires_grad=True)
    with torch.no_grad():
        assert not without_fallback(x, x).requires_grad
    assert without_fallback(x.detach(), 1.0).tolist() == [3, 3, 3]
    assert fallbacks() == {}


@pytest.mark.cpu
def test_inside_a_torch_func_transform(with_fallback: fuser.JitFunction) -> None:
    x, y = torch.randn(2, 3), torch.randn(2, 3)
    assert torch.equal(torch.func.vmap(with_fallback)(x, y), 2.0 * x + y)
    assert fallbacks() == {}


@pytest.mark.cpu
def test_an_op_on_a_dtype_its_functor_does_not_serve() -> None:
    fused = fuser.fuse(lambda x: torch.tanh(x) * x)
    for x in (torch.randn(3, dtype=torch.complex64), torch.randn(3)):
        torch.testing.assert_close(fused(x), torch.tanh(x) * x)
    assert fallbacks() == {"op 'tanh' on torch.complex64": 1, "op 'mul' on torch.complex64": 1}


def test_dtypes_that_torch_does_not_promote(
    with_fallback: fuser.JitFunction, without_fallback: fuser.JitFunction
) -> None:
    x, y = torch.ones(3, dtype=torch.uint16), torch.ones(3, dtype=torch.int32)
    with pytest.raises(FallbackError, match=r"^cannot fuse: torch does not promote these dtypes: .*; and 'axpy' has"):
        without_fallback(x, y)
    # The eager version has torch's own error.
    with pytest.raises(RuntimeError, match=r"[Pp]romotion for uint16"):
        with_fallback(x, y, alpha=1)
    assert fallbacks() == {}


def test_other_devices(without_fallback: fuser.JitFunction) -> None:
    # Meta tensors need no kernel at all.
    x = torch.ones(3, 4, device="meta").t()
    got = without_fallback(x, x)
    assert (got.shape, got.stride(), got.device.type) == ((4, 3), (1, 4), "meta")
    assert fallbacks() == {}


def test_a_group_runs_application_by_application(no_cpu_fusion: None, with_fallback: fuser.JitFunction) -> None:
    split = fuser.jit_fn(SPLIT, num_outputs=2, fallback=lambda x: (x + 1, x - 1))

    def step(x: Any, y: Any) -> Any:
        a, b = split(with_fallback(x, y, alpha=0.5))
        return torch.relu(a) * b, a

    x, y = torch.randn(5), torch.randn(5)
    middle = 0.5 * x + y
    product, a = fuser.fuse(step)(x, y)
    assert torch.equal(a, middle + 1)
    assert torch.equal(product, torch.relu(middle + 1) * (middle - 1))
    assert fallbacks() == {"fusion on cpu is switched off": 1}


def test_out_is_written_by_the_eager_version(no_cpu_fusion: None, with_fallback: fuser.JitFunction) -> None:
    x, out = torch.arange(3.0), torch.empty(3, dtype=torch.float64)
    assert with_fallback(x, 1.0, out=out) is out
    assert out.tolist() == [1, 3, 5]


def test_results_share_memory_with_nothing(no_cpu_fusion: None) -> None:
    # A kernel writes to new tensors; a translation may end with the input itself, or with one tensor for two outputs.
    x = torch.arange(3.0)
    copies = fuser.create_multi_output_jit_fn("template <typename T> void twice(T x, T& a, T& b) { a = x; b = x; }", 2)
    a, b = copies(x)
    alone = fuser.jit_fn("template <typename T> T same(T x) { return x; }")(x)
    assert len({item.data_ptr() for item in (x, a, b, alone)}) == 4
    assert a.tolist() == b.tolist() == alone.tolist() == x.tolist()


def test_the_first_missing_functor_is_named(no_cpu_fusion: None, with_fallback: fuser.JitFunction) -> None:
    bare = fuser.create_jit_fn("template <typename T> T bare(T x) { goto end; end: return x; }")
    fused = fuser.fuse(lambda x: bare(with_fallback(x, x)))
    with pytest.raises(FallbackError, match="'bare' has no eager version"):
        fused(torch.ones(3))


def test_an_error_of_the_eager_version_is_the_users(no_cpu_fusion: None) -> None:
    def fails(x: Any) -> Any:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fuser.jit_fn("template <typename T> T f(T x) { return x; }", fallback=fails)(torch.ones(2))
    assert fallbacks() == {}


def test_stats_are_a_copy() -> None:
    stats = fuser.stats()
    assert set(stats) == {"launches", "compiles", "cache_hits", "checks", "kept", "fallbacks"}
    stats["fallbacks"]["mine"] = 1
    stats["launches"] = 99
    assert fuser.stats() == dict.fromkeys(("launches", "compiles", "cache_hits", "checks", "kept"), 0) | {
        "fallbacks": {}
    }


@pytest.mark.parametrize("name", ["lambda", "None", "self", "torch", "x_1"])
def test_parameters_may_have_names_that_python_keeps(name: str, no_cpu_fusion: None) -> None:
    x = torch.tensor([1.0, -2.0], requires_grad=True)
    tensor = fuser.create_jit_fn(f"template <typename T> T f(T {name}, T, T x) {{ return {name} * x; }}")
    result = tensor(x, x, x)
    result.sum().backward()
    assert result.tolist() == [1.0, 4.0]
    assert x.grad is not None
    assert x.grad.tolist() == [2.0, -4.0]
    assert "f(v0, v1, v2)" in str(fuser.explain(tensor, x, x, x))
    if name != "self":
        scalar = fuser.create_jit_fn(
            f"template <typename T> T f(T x, T {name}) {{ return x * {name}; }}", **{name: 2.0}
        )
        assert scalar(x, **{name: 3.0}).tolist() == [3.0, -6.0]


@pytest.mark.cpu
def test_a_text_too_deep_for_python_runs_and_says_why_it_has_no_eager_version() -> None:
    nested = "abs(" * 400 + "x" + ")" * 400
    functor = fuser.create_jit_fn(f"template <typename T> T deep(T x) {{ return {nested}; }}")
    x = torch.zeros(3)
    assert functor(x).tolist() == [0.0] * 3
    assert "nested" in str(fuser.explain(functor, x))
    with pytest.raises(fuser.errors.GradientError, match="nested"):
        functor(x.requires_grad_())


@pytest.mark.cpu
def test_equal_results_are_tensors_of_their_own() -> None:
    """Equal applications are merged, also where the group runs in eager torch or is cut around a strict variance."""
    traced = torch.fx.symbolic_trace(lambda x: (torch.sigmoid(x), x.abs().var(-1), torch.sigmoid(x)))
    fuser.fx.FusionPass(device_type="cuda")(traced)
    x = torch.linspace(-1, 1, 12).view(3, 4)
    for can_fuse in (True, False):
        before = fuser.override_can_fuse_on_cpu(can_fuse)
        first, _, second = traced(x)
        fuser.override_can_fuse_on_cpu(before)
        first.zero_()
        torch.testing.assert_close(second, torch.sigmoid(x))


@pytest.mark.parametrize("how", ["a module", "a compiled function", "a backward pass"])
@pytest.mark.usefixtures("no_cpu_fusion")
def test_a_warning_is_of_the_users_line_behind_torchs(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, relu = torch.ones(3, requires_grad=True), fuser.fuse(torch.nn.ReLU())
    calls: dict[str, Callable[[], Any]] = {
        "a module": lambda: relu(x.detach()),
        "a compiled function": lambda: torch.compile(lambda x: torch.relu(x) + 1, backend="fuser")(x.detach()),
        "a backward pass": relu(x).sum().backward,
    }
    # Whatever was warned of by now.
    monkeypatch.setattr("fuser.counters._warned", set())
    with pytest.warns(fuser.errors.FallbackWarning, match="switched off") as caught:
        calls[how]()
    assert caught[0].filename == __file__
