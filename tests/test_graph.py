"""The IR: lint rules, canonical form and keys, JSON, the networkx view, and what separates kernels of one group."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import networkx
import numpy as np
import pytest
import torch
from hypothesis import given

import fuser
from fuser import planner
from fuser.access import Access, Tuning
from fuser.application import Application, Input
from fuser.combining import Reduction
from fuser.compiler import register
from fuser.config import SETTINGS, config
from fuser.cxx.functor import parse_functor
from fuser.dtypes import Rank
from fuser.errors import ArgumentError, FuserError, GroupError
from fuser.function import Function, HandWritten, Isolation, Promotion
from fuser.graph import FusionGroup, GroupBuilder
from fuser.kernel_cache import KernelStore
from fuser.kernel_spec import ArgSpec, InputSpec, RowSpec
from fuser.ops import index_function

AXPY = Function(parse_functor("template <typename T> T axpy(T x, T y, T alpha) { return alpha * x + y; }", ("alpha",)))
MUL = Function(parse_functor("template <typename T> T mul(T x, T y) { return x * y; }"))
NEG = Function(parse_functor("template <typename T> T neg(T x) { return -x; }"))
SPLIT = Function(parse_functor("template <typename T> void split(T x, T& a, T& b) { a = x + 1; b = x - 1; }", (), 2))

TWO = (Input("x"), Input("y"))
SCALED = (*TWO, Input("alpha", is_scalar=True))
BAD_OUT_DTYPES = replace(SPLIT, out_dtypes=(torch.float32,))

# What is wrong, the group's parts, the message.
BAD_GROUPS: list[tuple[str, tuple[Input, ...], tuple[Application, ...], tuple[int, ...], str]] = [
    ("no output", TWO, (Application(MUL, (0, 1)),), (), "a group needs an output"),
    ("no tensor", TWO, (Application(NEG, ()),), (2,), r"application 0 \(neg\): needs a tensor"),
    ("too many tensors", TWO, (Application(NEG, (0, 1)),), (2,), r"neg\(x\) got 2 tensors"),
    ("too few tensors", TWO, (Application(MUL, (0,)),), (2,), r"mul\(x, y\) got 1 tensors"),
    ("no scalar", SCALED, (Application(AXPY, (0, 1)),), (3,), r"axpy\(x, y, \*, alpha\) got 0 scalars"),
    ("too many scalars", SCALED, (Application(MUL, (0, 1), (2,)),), (3,), r"mul\(x, y\) got 1 scalars"),
    ("out_dtypes", TWO, (Application(BAD_OUT_DTYPES, (0,)),), (2,), "1 out_dtypes for 2 outputs"),
    ("itself", TWO, (Application(MUL, (0, 2)),), (2,), "value 2 is used before it is made"),
    ("later", TWO, (Application(NEG, (3,)), Application(NEG, (0,))), (2,), "value 3 is used before it is made"),
    ("negative", TWO, (Application(NEG, (-1,)),), (2,), "value -1 is used before it is made"),
    ("scalar as tensor", SCALED, (Application(NEG, (2,)),), (3,), "scalar input 'alpha' is used as a tensor"),
    ("tensor as scalar", SCALED, (Application(AXPY, (0, 1), (0,)),), (3,), "value 0 is used as a scalar"),
    (
        "result as scalar",
        SCALED,
        (Application(NEG, (0,)), Application(AXPY, (0, 1), (3,))),
        (4,),
        "value 3 is used as a scalar",
    ),
    ("output is an input", TWO, (Application(MUL, (0, 1)),), (1,), "output value 1 is made by no application"),
    ("output does not exist", TWO, (Application(MUL, (0, 1)),), (3,), "output value 3 is made by no application"),
]


@pytest.mark.parametrize(
    ("what", "inputs", "applications", "outputs", "message"), BAD_GROUPS, ids=[bad[0] for bad in BAD_GROUPS]
)
def test_lint(
    what: str, inputs: tuple[Input, ...], applications: tuple[Application, ...], outputs: tuple[int, ...], message: str
) -> None:
    group = FusionGroup(inputs, applications, outputs)
    for check in (group.lint, lambda: fuser.register_fusion(group), lambda: FusionGroup.from_json(group.to_json())):
        with pytest.raises(GroupError, match=message):
            check()


WRONG_KINDS: list[tuple[Any, Any, Any, str]] = [
    (TWO, (Application(MUL, (0, 1)),), ("2",), r"outputs=\('2',\) is no tuple\[int, ...\]"),
    (TWO, (Application(MUL, (0, 1)),), (2.0,), r"outputs=\(2.0,\) is no tuple"),
    (TWO, (Application(MUL, (0, None)),), (2,), r"application 0: Application: tensors=\(0, None\) is no tuple"),  # type: ignore[arg-type]
    (TWO, (Application(MUL, 0),), (2,), "tensors=0 is no tuple"),  # type: ignore[arg-type]
    (TWO, (Application(fuser.jit_fn(NEG.functor.source), (0,)),), (2,), "is no Function$"),  # type: ignore[arg-type]
    (("x", "y"), (Application(MUL, (0, 1)),), (2,), r"inputs=\('x', 'y'\) is no tuple\[Input, ...\]"),
    ((Input("x"), Input("y", False, ...)), (Application(MUL, (0, 1)),), (2,), "Input: default=Ellipsis is no bool"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("inputs", "applications", "outputs", "message"), WRONG_KINDS)
def test_lint_of_parts_of_a_wrong_kind(inputs: Any, applications: Any, outputs: Any, message: str) -> None:
    group = FusionGroup(inputs, applications, outputs)
    for check in (group.lint, lambda: fuser.register_fusion(group)):
        with pytest.raises(GroupError, match=message):
            check()


def build(
    names: str = "xya",
    *,
    functions: tuple[Function, Function, Function] = (AXPY, MUL, NEG),
    is_swapped: bool = False,
    is_late: bool = False,
    has_dead_code: bool = False,
    has_duplicate: bool = False,
    outputs: tuple[str, ...] = ("product", "negated"),
) -> FusionGroup:
    """Return axpy(x, y, alpha) * (-x) with two outputs, written in one of many ways."""
    axpy, mul, neg = functions
    builder = GroupBuilder()
    x, y = builder.add_input(names[0]), builder.add_input(names[1])
    alpha = builder.add_input(names[2], is_scalar=True)
    values: dict[str, int] = {}

    def apply_neg() -> None:
        (values["negated"],) = builder.apply(neg, [x], name=names)

    if not is_late:
        apply_neg()
    if has_dead_code:
        builder.apply(SPLIT, [y])
    (sum_,) = builder.apply(axpy, [y, x] if is_swapped else [x, y], [alpha], name=names)
    if is_late:
        apply_neg()
    second = values["negated"]
    if has_duplicate:
        (second,) = builder.apply(neg, [x])
    (values["product"],) = builder.apply(mul, [sum_, second])
    return builder.build([values[name] for name in outputs])


OTHER_AXPY = Function(parse_functor(AXPY.functor.source + " ", ("alpha",)))
SAME = {
    "names": {"names": "pqr"},
    "order": {"is_late": True},
    "dead code": {"has_dead_code": True},
    "duplicate": {"has_duplicate": True},
    "all": {"names": "pqr", "is_late": True, "has_dead_code": True, "has_duplicate": True},
}
DIFFERENT = {
    "text": {"functions": (OTHER_AXPY, MUL, NEG)},
    "out_dtypes": {"functions": (AXPY, replace(MUL, out_dtypes=(torch.float64,)), NEG)},
    "promotion": {"functions": (AXPY, MUL, replace(NEG, promotion=Promotion.INT_TO_FLOAT))},
    "unpromoted": {"functions": (AXPY, replace(MUL, unpromoted=("y",)), NEG)},
    "op": {"functions": (AXPY, MUL, replace(NEG, op="neg"))},
    "layout of numbers": {"functions": (AXPY, MUL, replace(NEG, numbers_have_layout=False))},
    "fallback": {"functions": (AXPY, MUL, replace(NEG, fallback=torch.neg))},
    "argument order": {"is_swapped": True},
    "output order": {"outputs": ("negated", "product")},
    "fewer outputs": {"outputs": ("product",)},
    "repeated output": {"outputs": ("product", "negated", "negated")},
}


@pytest.mark.parametrize("change", SAME.values(), ids=SAME)
def test_key_stays(change: dict[str, Any]) -> None:
    one, other = build(), build(**change)
    assert one != other
    assert one.key == other.key
    assert one.canonical() == other.canonical()
    assert fuser.register_fusion(one) == fuser.register_fusion(other)
    assert register(one) is register(other)


@pytest.mark.parametrize("change", DIFFERENT.values(), ids=DIFFERENT)
def test_key_changes(change: dict[str, Any]) -> None:
    assert build().key != build(**change).key


def test_key_is_a_hash_of_the_structure_alone() -> None:
    group = build()
    again = FusionGroup.from_json(group.to_json())
    assert again.applications[0] is not group.applications[0]
    assert 0 <= group.key == again.key < 2**63


def test_constants_are_part_of_the_key_and_not_of_the_spec() -> None:
    def scaled(default: Any) -> FusionGroup:
        builder = GroupBuilder()
        x = builder.add_input("x")
        number = builder.add_input("c", default=default)
        return builder.build(builder.apply(MUL, [x, number]))

    keys = {scaled(default).key for default in (None, 1.0, 2.0)}
    assert len(keys) == 3
    assert register(scaled(1.0)) is register(scaled(2.0))
    # NumPy's numbers are Python's.
    assert {scaled(np.float32(1.0)).key, scaled(np.float64(2.0)).key} < keys
    with pytest.raises(ArgumentError, match=r"takes 2 inputs \(x, c\), got 1"):
        scaled(None).fill_inputs([1.0])
    assert scaled(2.0).fill_inputs([1.0]) == [1.0, 2.0]
    assert scaled(2.0).fill_inputs([1.0, 5.0]) == [1.0, 5.0]
    with pytest.raises(ArgumentError, match="got 3"):
        scaled(2.0).fill_inputs([1.0, 5.0, 6.0])


@st.composite
def groups(draw: st.DrawFn) -> FusionGroup:
    """Draw a DAG of one to eight applications."""
    builder = GroupBuilder()
    values = [builder.add_input(f"x{index}") for index in range(draw(st.integers(1, 3)))]
    scalar = builder.add_input("s", is_scalar=True)
    made: list[int] = []
    for _ in range(draw(st.integers(1, 8))):
        function = draw(st.sampled_from((AXPY, MUL, NEG, SPLIT)))
        tensors = [draw(st.sampled_from(values + made)) for _ in function.functor.tensors]
        made += builder.apply(function, tensors, [scalar] if function is AXPY else [])
    return builder.build(draw(st.lists(st.sampled_from(made), min_size=1, max_size=3)))


def shuffle(group: FusionGroup, seed: int) -> FusionGroup:
    """Write the applications in another order that is possible."""
    rng, builder = random.Random(seed), GroupBuilder()
    inputs = enumerate(group.inputs)
    values = {value: builder.add_input(f"r{value}", is_scalar=item.is_scalar) for value, item in inputs}
    left = list(enumerate(group.applications))
    while left:
        ready = [entry for entry in left if all(value in values for value in entry[1].tensors)]
        index, item = rng.choice(ready)
        left.remove((index, item))
        made = builder.apply(item.function, [values[v] for v in item.tensors], [values[v] for v in item.scalars])
        values |= {group.value_offsets()[index] + place: value for place, value in enumerate(made)}
    return builder.build([values[value] for value in group.outputs])


@given(groups(), st.integers(0, 99))
def test_random_groups(group: FusionGroup, seed: int) -> None:
    group.lint()
    canonical = group.canonical()
    canonical.lint()
    assert canonical.canonical() == canonical
    assert canonical.key == group.key == register(group).key
    assert shuffle(group, seed).canonical() == canonical
    assert FusionGroup.from_json(group.to_json()) == group
    assert networkx.is_directed_acyclic_graph(group.to_networkx())


def test_canonical_is_small_and_keeps_inputs_and_outputs() -> None:
    group = build(has_dead_code=True, has_duplicate=True)
    canonical = group.canonical()
    assert sorted(item.function.name for item in canonical.applications) == ["axpy", "mul", "neg"]
    assert [item.is_scalar for item in canonical.inputs] == [False, False, True]
    made_by = [canonical.applications[canonical.producers()[value]].function.name for value in canonical.outputs]
    assert made_by == ["mul", "neg"]
    assert str(build()).splitlines()[-3:] == [
        "  v4 = axpy(v0, v1, alpha=v2)", "  v5 = mul(v4, v3)", "  return v5, v3",
    ]  # fmt: skip


def test_a_deep_group_needs_no_recursion() -> None:
    builder = GroupBuilder()
    value = builder.add_input("x")
    for _ in range(3000):
        (value,) = builder.apply(NEG, [value])
    assert len(builder.build([value]).canonical().applications) == 3000


def test_select_outputs() -> None:
    group = build()
    negated = group.select_outputs([1])
    assert [item.function.name for item in negated.applications] == ["neg"]
    assert len(negated.inputs) == len(group.inputs)
    assert negated.used_inputs() == (0,)
    assert group.select_outputs([0, 1]) == group.canonical()
    assert negated.key == build(outputs=("negated",)).key != group.key


def test_json_keeps_everything() -> None:
    builder = GroupBuilder()
    x = builder.add_input("x")
    c = builder.add_input("c", default=1 - 2j)
    function = replace(MUL, out_dtypes=(torch.complex128,), fallback=torch.mul, unpromoted=("y",), op="mul")
    group = builder.build(builder.apply(function, [x, c], name="product"))
    again = FusionGroup.from_json(group.to_json())
    assert again == group
    assert again.key == group.key
    assert again.inputs[1].default == 1 - 2j
    name = json.loads(group.to_json())["functions"][0]["fallback"]
    with pytest.raises(GroupError, match="mul has a fallback that is a Python function"):
        FusionGroup.from_json(group.to_json().replace(name, "another process's"))
    data = json.loads(group.to_json()) | {"version": 99}
    with pytest.raises(GroupError, match="version 99"):
        FusionGroup.from_json(json.dumps(data))


@pytest.mark.parametrize("text", ["abc", "[]", "{}", "null"])
def test_other_texts_are_no_groups(text: str) -> None:
    with pytest.raises(GroupError, match="no JSON of a fusion group"):
        FusionGroup.from_json(text)


def test_what_a_group_names_must_be_there() -> None:
    with pytest.raises(GroupError, match="no handle 99"):
        GroupBuilder().build([99])
    builder = GroupBuilder()
    (value,) = builder.apply(NEG, [99])
    with pytest.raises(GroupError, match="no handle 99"):
        builder.build([value])
    group = build(functions=(AXPY, replace(MUL, op="bogus"), NEG))
    with pytest.raises(GroupError, match="no op 'bogus'"):
        fuser.register_fusion(group)


def test_networkx_view() -> None:
    view = build().to_networkx()
    assert networkx.is_directed_acyclic_graph(view)
    assert set(view.nodes) == {
        *(("input", i) for i in range(3)), *(("application", i) for i in range(3)), ("output", 0), ("output", 1),
    }  # fmt: skip
    edges = {(source, target, data["value"], data.get("parameter")) for source, target, data in view.edges(data=True)}
    assert edges == {
        (("input", 0), ("application", 0), 0, "x"),
        (("input", 0), ("application", 1), 0, "x"),
        (("input", 1), ("application", 1), 1, "y"),
        (("input", 2), ("application", 1), 2, "alpha"),
        (("application", 1), ("application", 2), 4, "x"),
        (("application", 0), ("application", 2), 3, "y"),
        (("application", 2), ("output", 0), 5, None),
        (("application", 0), ("output", 1), 3, None),
    }
    assert view.nodes["application", 1]["label"] == "axpy"
    assert view.nodes["input", 2]["is_scalar"] is True


INPUT_CHANGES: dict[str, Any] = {
    "dtype": torch.float64,
    "rank": Rank.ZERO_DIM,
    "number": float,
    "inner": 0,
    "ndim": 2,
    "is_counter": True,
}
CHANGES: dict[str, Callable[[ArgSpec], Any]] = {
    "device_type": lambda args: "cuda",
    "inputs": lambda args: (args.inputs[1], None),
    "outputs": lambda args: (2,),
    "counters": lambda args: (1,),
    "rank": lambda args: 2,
    "vector": lambda args: 4,
    "wide_index": lambda args: True,
    "tuning": lambda args: Tuning(block=128),
    "accesses": lambda args: (Access(width=2),),
    "default_dtype": lambda args: torch.float64,
    "settings": lambda args: (("numerics", "fast"), *args.settings[1:]),
    "rows": lambda _: RowSpec(1, (False, False, True), is_across=False),
    "positions": lambda _: 5,
    "has_offsets": lambda _: True,
}


def test_each_field_of_a_call_separates_kernels() -> None:
    group = GroupBuilder()
    spec = register(group.build(group.apply(MUL, [group.add_input("x"), group.add_input("y")])))
    ((_, args),) = planner.plan_texts(spec, [torch.empty(3, 2), torch.empty(3, 2)], torch.device("cpu"))
    assert set(ArgSpec._fields) == set(CHANGES)
    assert set(InputSpec._fields) == set(INPUT_CHANGES)
    changed = [args._replace(**{name: change(args)}) for name, change in CHANGES.items()]
    for name, value in INPUT_CHANGES.items():
        changed.append(args._replace(inputs=(args.inputs[0]._replace(**{name: value}), args.inputs[1])))
    store, made = KernelStore(), []
    for key in [args, *changed, *changed, args]:
        store.get_or_compile((key, "host"), lambda key=key: made.append(key) or object())  # type: ignore[misc, func-returns-value]
    assert made == [args, *changed]


def test_settings_that_change_code_are_in_the_key() -> None:
    others = {"numerics": "fast", "cpu_math": "precise", "cxx": "clang++"}
    assert {setting.name for setting in SETTINGS if setting.changes_code} == set(others)
    before = config.code_key()
    for name, value in others.items():
        with config.patch(**{name: value}):
            assert config.code_key() != before
    assert config.code_key() == before


def make_with_all_fields() -> FusionGroup:
    """Return a group with functions of all kinds."""
    backward = parse_functor("template <typename T> T back(T a, T y, T g) { return a * g * y; }")
    double = Function(
        parse_functor("template <typename T> T scale(T x, T a) { return a * x; }"),
        promotion=Promotion.INT_TO_FLOAT,
        unpromoted=("a",),
        numbers_have_layout=False,
        backward=HandWritten(backward, (0,), (0,), ("a",)),
    )
    split = replace(SPLIT, out_dtypes=(None, torch.int32), isolation=Isolation.RESULT)
    builder = GroupBuilder()
    (v,) = builder.apply(double, [builder.add_input("x"), builder.add_input("a")])
    add = parse_functor("template <typename T> T add(T a, T b) { return a + b; }")
    half = parse_functor("template <typename T> T half(T x, T by) { return x / by; }", ("by",))
    finish = parse_functor("template <typename T> T done(T x, T by) { return x * by; }", ("by",))
    by = builder.add_input("by", is_scalar=True)
    kept = Reduction(add, (0.5,), None, (0, -1), keepdim=True)
    for kind in (kept, Reduction(add, (complex(1, -2),), finish), Reduction(add, (True,), dims=())):
        (v,) = builder.apply(Function(half, reduction=kind), [v], [by])
    (i,) = builder.apply(index_function(1, (0, -1)), [v])
    return builder.build([*builder.apply(split, [v]), i])


def test_json_keeps_every_field() -> None:
    group = make_with_all_fields()
    assert FusionGroup.from_json(group.to_json()) == group


def places_in(data: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield where values are in a JSON text, as the keys and indices that lead there."""
    yield place
    inside = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, item in inside:
        yield from places_in(item, (*place, key))


def put(data: Any, place: tuple[Any, ...], value: Any) -> Any:
    """Return JSON with another value at a place."""
    if not place:
        return value
    changed = copy.copy(data)
    changed[place[0]] = put(data[place[0]], place[1:], value)
    return changed


@pytest.mark.parametrize("value", [None, "x", "", -1, 10**30, 1.5, [], [None], ["x"], {}], ids=repr)
def test_json_with_a_wrong_value_anywhere(value: Any) -> None:
    data = json.loads(make_with_all_fields().to_json())
    for place in places_in(data):
        try:
            group = FusionGroup.from_json(json.dumps(put(data, place, value)))
            str(group)
            fuser.register_fusion(group)
        except FuserError:
            pass


def test_json_that_is_nested_too_deeply_is_no_group() -> None:
    with pytest.raises(GroupError, match="no JSON of a fusion group: RecursionError"):
        FusionGroup.from_json("[" * 100_000)


@pytest.mark.parametrize(
    "text",
    [
        '{"version": 1}',
        '{"version": 1, "functions": 3, "inputs": [], "applications": [], "outputs": []}',
        '{"version": 1, "functions": [], "inputs": [3], "applications": [], "outputs": []}',
        '{"version": 1, "functions": [], "inputs": [], "applications": [{"function": 0}], "outputs": []}',
    ],
)
def test_other_json_is_no_group(text: str) -> None:
    with pytest.raises(GroupError, match="no JSON of a fusion group"):
        FusionGroup.from_json(text)
