"""Calls and conversions: which function is meant, what its parameters are bound to, what its lanes return.

A call converts its arguments, and a conversion to a struct calls a constructor.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch

from fuser.cxx.builtin_types import AUTO, VOID
from fuser.cxx.nodes import (
    ArrayType,
    Decltype,
    Expression,
    FunctionDefinition,
    InitList,
    Parameter,
    ReferenceType,
    walk,
)
from fuser.cxx.statements import Declarator
from fuser.eager.data import PLACE, Value, constant, needs_values
from fuser.eager.masks import Frame, any_lane, both_of
from fuser.eager.math import functions
from fuser.eager.promotion import convert
from fuser.eager.resolve import deduce, resolve, resolve_argument
from fuser.eager.stack import MAX_DEPTH, deep_stack
from fuser.eager.state import Scope, State
from fuser.eager.storage import (
    Aggregate,
    Closure,
    Fixed,
    Location,
    NoTranslation,
    Pointer,
    SubstitutionError,
    Thing,
    choose,
    make_location,
    zero_of,
)
from fuser.eager.types import ArrayOf, ClassType, CppType, PointerTo, ReferenceTo, argument_key, describe_type
from fuser.eager.walk import class_scope, evaluate, load, locate, number_of, run_block, static_type

__all__ = [
    "bind_parts",
    "call_functions",
    "call_operator",
    "construct",
    "convert_implicitly",
    "copy_closure",
    "copy_of",
    "fill",
    "initialise",
    "member_of",
    "members_of",
    "write",
]


def call_operator(state: State, operator: str, operands: Sequence[Location]) -> Thing | None:
    """Call the functor's own operator; None if it defines none for an object."""
    first = operands[0].type
    if isinstance(first, ClassType) and first.named(f"operator{operator}"):
        scope = members_of(state, operands[0], first)
        return call_functions(state, first.named(f"operator{operator}"), (), operands[1:], scope)
    candidates = state.program.functions.get(f"operator{operator}", ())
    is_ours = any(isinstance(item.type, ClassType) for item in operands)
    return call_functions(state, candidates, (), operands, state.globals) if candidates and is_ours else None


def call_functions(
    state: State,
    candidates: Sequence[FunctionDefinition],
    explicit: Sequence[Any],
    operands: Sequence[Location],
    scope: Scope,
) -> Thing:
    """Call the one of several overloads that fits."""
    plain = [item for item in candidates if item.body is not None and item.special is None]
    fits = [(_fit(state, item, explicit, operands, scope), item) for item in plain]
    found = sorted(((*fit, function) for fit, function in fits if fit is not None), key=operator.itemgetter(0))
    if not found or (len(found) > 1 and found[0][0] == found[1][0]):
        # C++ would order templates that fit alike by how special they are.
        name = candidates[0].name if candidates else "this function"
        raise NoTranslation(f"the call of {name!r} with these arguments")
    _, bindings, function = found[0]
    specials = [item for item in candidates if item.special is not None] if function.template else []
    special = _find_special(state, specials, function, bindings, scope) if specials else function
    return _call_function(state, special, bindings, operands, scope)


def _find_special(
    state: State,
    specials: Sequence[FunctionDefinition],
    function: FunctionDefinition,
    bindings: dict[str, Any],
    scope: Scope,
) -> FunctionDefinition:
    # The specialisation of a function template for these template arguments; the template itself if there is none.
    taken = argument_key([bindings[item.name] for item in function.template])
    with state.within(Scope(scope, bindings)):
        kinds = [resolve(state, item.type) for item in function.parameters]
    for item in specials:
        if len(item.parameters) == len(kinds):
            written = argument_key([resolve_argument(state, argument) for argument in item.special or ()])
            # Those that are not written follow from the parameters.
            if taken[: len(written)] == written and [resolve(state, part.type) for part in item.parameters] == kinds:
                return item
    return function


def _fit(
    state: State, function: FunctionDefinition, explicit: Sequence[Any], operands: Sequence[Location], scope: Scope
) -> tuple[int, dict[str, Any]] | None:
    # How badly arguments fit a function (0: exactly), and its template arguments; None if not at all.
    parameters = function.parameters
    needed = sum(parameter.default is None for parameter in parameters)
    if not needed <= len(operands) <= len(parameters) or len(explicit) > len(function.template):
        return None
    names = {item.name for item in function.template}
    bindings: dict[str, Any] = dict(zip((item.name for item in function.template), explicit, strict=False))
    for parameter, operand in zip(parameters, operands, strict=False):
        if not deduce(parameter.type, operand.type, names - set(list(bindings)[: len(explicit)]), bindings):
            return None
    try:
        with state.within(Scope(scope, bindings)):
            if not _complete(state, function, bindings):
                return None
            _resolve_result(state, function, operands)
            cost = int(bool(function.template))
            for parameter, operand in zip(parameters, operands, strict=False):
                rating = _rate(state, parameter, operand)
                if rating is None:
                    return None
                cost += 2 * rating
    except (SubstitutionError, NoTranslation):
        if len(state.program.functions.get(function.name, ())) > 1:
            return None
        raise
    return cost, bindings


def _complete(state: State, function: FunctionDefinition, bindings: dict[str, Any]) -> bool:
    # Adds the defaults of template parameters that nothing is bound to; whether there were enough of them.
    for item in function.template:
        if item.type is not None:
            resolve(state, item.type)
        if item.name not in bindings:
            if item.default is None:
                return False
            bindings[item.name] = resolve_argument(state, item.default)
    return True


def _rate(state: State, parameter: Parameter, operand: Location) -> int | None:
    # 0: the same type; 1: a conversion; None: impossible.
    spelled = parameter.type
    kind = _parameter_type(state, parameter, operand)
    have = operand.type
    if kind is AUTO or kind == have:
        is_bound = isinstance(spelled, ReferenceType) and not spelled.is_const and kind is not AUTO
        return None if is_bound and isinstance(operand, Fixed) and not isinstance(kind, ClassType) else 0
    if isinstance(kind, PointerTo) and isinstance(have, ArrayOf | PointerTo):
        return 0 if kind.element in (have.element, VOID) else None
    if isinstance(kind, torch.dtype) and isinstance(have, torch.dtype):
        if isinstance(spelled, ReferenceType) and not spelled.is_const:
            return None
        is_promotion = (have, kind) == (torch.float32, torch.float64) or (
            kind is torch.int32 and not have.is_floating_point and have.itemsize < 4
        )
        return 1 if is_promotion else 2
    return None


def _parameter_type(state: State, parameter: Parameter, operand: Location) -> CppType:
    spelled = parameter.type
    if isinstance(spelled, ArrayType):
        # An array parameter is a pointer.
        return PointerTo(resolve(state, spelled.element))
    if isinstance(spelled, ReferenceType) and isinstance(spelled.target, ArrayType) and spelled.target.size is None:
        return operand.type
    return resolve(state, spelled)


def _call_function(
    state: State, function: FunctionDefinition, bindings: dict[str, Any], operands: Sequence[Location], scope: Scope
) -> Thing:
    # Runs a function's body for the lanes that are there.
    with state.within(Scope(scope, bindings)):
        result = _resolve_result(state, function, operands)
        nothing = constant(0, torch.int32) if result in (AUTO, VOID) else zero_of(result)
        running = [frame.function for frame in state.frames if frame.function is not None]
        is_recursion = function in running
        is_idle = state.is_dry and result is not AUTO
        # A recursion ends where no lane is left.
        if is_idle or (is_recursion and state.graph is None and not any_lane(state.mask.data)):
            return nothing
        if is_recursion:
            _check_depth(state, function, len(running))
            state.resources.enter_context(deep_stack)
        with state.inside("function") as frame:
            frame.function, frame.result = function, result
            _bind(state, function, operands)
            assert function.body is not None, "candidates have one"
            run_block(state, function.body.statements)
    return _result_of(frame)


def _resolve_result(state: State, function: FunctionDefinition, operands: Sequence[Location]) -> CppType:
    # What stands behind an arrow may ask for the types of the parameters.
    if not any(isinstance(item, Decltype) for item in walk(function.result)):
        return resolve(state, function.result)
    with state.dry(), state.within(Scope(state.scope)):
        _bind(state, function, operands)
        return resolve(state, function.result)


def _check_depth(state: State, function: FunctionDefinition, depth: int) -> None:
    if depth >= MAX_DEPTH:
        if state.graph is not None:
            raise needs_values(f"{function.name!r} calls itself as long as data says")
        raise RecursionError(f"{function.name!r} calls itself more than {MAX_DEPTH} times")


def _bind(state: State, function: FunctionDefinition, operands: Sequence[Location]) -> None:
    for number, parameter in enumerate(function.parameters):
        if number < len(operands):
            location = _bind_parameter(state, parameter, operands[number])
        else:
            assert parameter.default is not None, "fit() counted"
            kind = resolve(state, parameter.type)
            location = make_location(kind, state.frames[-1])
            location.store(state, initialise(state, kind, parameter.default))
        if parameter.name:
            state.scope.names[parameter.name] = location


def _bind_parameter(state: State, parameter: Parameter, operand: Location) -> Location:
    spelled = parameter.type
    kind = _parameter_type(state, parameter, operand)
    if isinstance(spelled, ReferenceType) and (kind is AUTO or kind == operand.type):
        return operand
    thing = load(state, operand)
    if isinstance(thing, Closure):
        return Fixed(copy_closure(state, thing))
    location = make_location(thing.type if kind is AUTO else kind, state.frames[-1])
    write(state, location, thing)
    return location


def _result_of(frame: Frame) -> Thing:
    # What a function's lanes returned, put together.
    kind: CppType = frame.result
    if kind is VOID or not frame.results:
        return constant(0, torch.int32) if kind in (VOID, AUTO) else zero_of(kind)
    cases: list[tuple[Any, Thing]] = []
    known = frame.entry
    for mask, thing in frame.results:
        literals = known.beyond(mask)
        cases.append((both_of(literals), thing))
        if len(literals) == 1:
            # Who comes to a later return has not left by this one.
            known = known.extend(literals[0][0], not literals[0][1])
    found = cases[-1][1]
    for condition, thing in reversed(cases[:-1]):
        if isinstance(thing, Value) and isinstance(found, Value) and thing.dtype is not found.dtype:
            raise NoTranslation("a function with results of two types")
        found = choose(condition, thing, found)
    return found


def convert_implicitly(state: State, thing: Thing, kind: CppType) -> Thing:
    """Return a thing as an implicit conversion to a type gives it."""
    if isinstance(thing, Value) and isinstance(kind, torch.dtype):
        return convert(thing, kind)
    if isinstance(thing, Pointer) and isinstance(kind, PointerTo):
        if kind.element in (thing.view or thing.element, VOID):
            return thing
        if isinstance(kind.element, torch.dtype):
            view = None if kind.element == thing.element else kind.element
            return Pointer(thing.targets, thing.offset, thing.element, view)
    if isinstance(kind, ClassType) and kind.struct.constructors and thing.type != kind:
        return construct(state, kind, (Fixed(thing, state.mask),))
    if kind is AUTO or (not isinstance(thing, Value | Pointer) and thing.type == kind):
        return thing
    raise NoTranslation(f"a conversion of {describe_type(thing.type)} to {describe_type(kind)}")


def construct(state: State, kind: ClassType, operands: Sequence[Location]) -> Thing:
    """Return an object as its constructor makes it."""
    made = make_location(kind, state.frames[-1])
    made.store(state, fill(state, kind, []))
    call_functions(state, kind.struct.constructors, (), operands, members_of(state, made, kind))
    return made.load(state)


def members_of(state: State, base: Location, kind: ClassType) -> Scope:
    """Return what the functions of an object see."""
    fields = {name: member_of(state, base, number) for number, name in enumerate(kind.fields)}
    fields["this"] = Fixed(Pointer((base,), constant(0, torch.int64), kind))
    return Scope(class_scope(state, kind.struct, dict(kind.bindings)), fields)


def member_of(state: State, base: Location, number: int) -> Location:
    """Return an element, or a field: of one that is a reference what it is bound to."""
    part = base.part(number)
    fields = list(base.type.fields.values()) if isinstance(base.type, ClassType) else []
    if not fields or not isinstance(fields[number], ReferenceTo):
        return part
    bound = part.load(state)
    assert isinstance(bound, Pointer), "fill() made one"
    return bound.targets[0]


def bind_parts(state: State, item: Declarator, whole: Location) -> None:
    """Declare the names of ``auto [a, b]``, or ``auto& [a, b]``, for the parts of a struct or an array."""
    if whole.length != len(item.bindings):
        raise NoTranslation(f"{len(item.bindings)} names for {whole.length} parts")
    is_copy = not isinstance(item.type, ReferenceType)
    for number, name in enumerate(item.bindings):
        part = member_of(state, whole, number)
        state.scope.names[name] = copy_of(state, part) if is_copy else part


def initialise(state: State, kind: CppType, node: Expression) -> Thing:
    """Return what an initialiser makes of a type."""
    if not isinstance(node, InitList):
        return convert_implicitly(state, evaluate(state, node), kind)
    values = list(node.values)
    if isinstance(kind, ArrayOf | ClassType):
        if len(values) == 1 and isinstance(kind, ClassType) and static_type(state, values[0]) == kind:
            return evaluate(state, values[0])
        if isinstance(kind, ClassType) and kind.struct.constructors:
            return construct(state, kind, [locate(state, item) for item in values])
        return fill(state, kind, values)
    if not isinstance(kind, torch.dtype):
        raise NoTranslation(f"this initialiser of {describe_type(kind)}")
    if kind.is_complex and len(values) == 2:
        part = kind.to_real()
        real, imaginary = (convert(number_of(state, item), part) for item in values)
        PLACE.set(node.place)
        found = functions.call("complex", [real, imaginary])
        return convert(found, kind)
    if len(values) > 1:
        raise NoTranslation(f"{len(values)} values for one {describe_type(kind)}")
    return initialise(state, kind, values[0]) if values else zero_of(kind)


def fill(state: State, kind: ArrayOf | ClassType, values: list[Expression]) -> Aggregate:
    """Return an array or struct of the first values, which are taken off the list; the rest is zero."""
    defaults: list[Expression | None] = []
    if isinstance(kind, ArrayOf):
        kinds = [kind.element] * kind.length
    else:
        kinds, defaults = list(kind.fields.values()), [field.value for field in kind.struct.fields]
    parts: list[Thing] = []
    for number, part in enumerate(kinds):
        default = defaults[number] if defaults else None
        if isinstance(part, ReferenceTo):
            parts.append(_refer(state, part, values.pop(0) if values else default))
        elif not values and default is None:
            parts.append(zero_of(part))
        elif values and isinstance(part, ArrayOf | ClassType) and not isinstance(values[0], InitList):
            # The inner braces may be left out.
            is_whole = isinstance(part, ClassType) and static_type(state, values[0]) == part
            parts.append(evaluate(state, values.pop(0)) if is_whole else fill(state, part, values))
        else:
            item = values.pop(0) if values else default
            assert item is not None, "one of the two is there"
            parts.append(initialise(state, part, item))
    return Aggregate(kind, tuple(parts))


def _refer(state: State, kind: ReferenceTo, node: Expression | None) -> Pointer:
    # What a member that is a reference holds.
    if node is None:
        raise NoTranslation("a member that is a reference, which a constructor binds")
    target = locate(state, node)
    if (isinstance(target, Fixed) and not kind.is_const) or target.type != kind.element:
        raise NoTranslation(f"a member that is a reference to {describe_type(kind.element)}, bound to this")
    return Pointer((target,), constant(0, torch.int64), kind.element)


def write(state: State, location: Location, thing: Thing) -> None:
    """Store a thing, converted to the location's type."""
    location.store(state, convert_implicitly(state, thing, location.type))


def copy_closure(state: State, closure: Closure) -> Closure:
    """Return a closure with copies of its own of what it captured by value, which a mutable one changes."""
    names = {name: copy_of(state, item) for name, item in closure.scope.names.items()}
    return Closure(closure.syntax, Scope(closure.scope.parent, names))


def copy_of(state: State, location: Location) -> Location:
    """Return a new place with the same value."""
    made = make_location(location.type, state.frames[-1])
    made.store(state, location.load(state))
    return made
