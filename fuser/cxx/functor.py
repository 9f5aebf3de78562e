"""Functor texts: the C++ strings users write for torch.cuda.jiterator, parsed into values.

A text is one or more C++ functions; the last function template is the entry. Its first template parameter is ``T``,
the type it computes in. What fuser knows of a text it reads from one tree, that of the text with its macros expanded.
The text itself reaches the compiler unchanged, except that a multi-output entry that is declared to return a value and
never does is made ``void``.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from typing import NamedTuple

import tree_sitter

from fuser.cxx.preprocess import MappedText, Place, Preprocessed, Problem, preprocess, tokenize
from fuser.cxx.tree import field as field_of
from fuser.cxx.tree import find, function_declarator, named, parse_tree, text_of, trailing_type
from fuser.errors import FunctorError, describe_place, suggest

__all__ = [
    "MATH_FUNCTIONS",
    "EntryParameter",
    "Functor",
    "Reading",
    "Role",
    "describe_call",
    "is_steady",
    "parse_functor",
    "read_text",
    "takes_anything",
]

# What is no ASCII and ends no line, unless a comment or a text holds it.
_ODD = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\])*"|([^\x00-\x7f\x85\u2028\u2029])', re.DOTALL)
# C++'s functions of floating-point numbers, for float and double.
MATH_FUNCTIONS = frozenset(
    "acos acosh asin asinh atan atan2 atanh cbrt ceil cos cosh erf erfc exp exp2 expm1 fabs floor fmod hypot lgamma "
    "log log10 log1p log2 nearbyint pow remainder rint round rsqrt sin sinh sqrt tan tanh tgamma trunc".split()
)

# What loops without a bound that is a number, and what others see: an end of more than the functor, and what it says.
_ENDLESS = frozenset({"while", "do", "goto"})
_LOOP = r"\bfor\b[^;]*;([^;]*);"
_BOUNDED = r"\s*\w+\s*[<>!]=?\s*\d+\s*$"
_SEEN = frozenset({"assert", "printf", "__assertfail", "__assert_fail", "__trap", "__builtin_trap", "asm"})


class Role(Enum):
    """What a parameter of an entry is."""

    TENSOR = "tensor"
    SCALAR = "scalar"
    OUTPUT = "output"


class EntryParameter(NamedTuple):
    """One parameter of an entry, in the order of the declaration."""

    name: str
    # Its C++ type as written, without const and &.
    type: str
    role: Role
    # Whether C++ gives it a default value.
    has_default: bool
    # Where it begins in the user's text.
    place: Place


@dataclass(frozen=True, slots=True, eq=False)
class Reading:
    """What there is to know of a text before anything is asked of it."""

    preprocessed: Preprocessed
    # Of the expanded text.
    tree: tree_sitter.Tree

    @property
    def expanded(self) -> MappedText:
        """The text that the tree is of."""
        return self.preprocessed.expanded

    def place(self, node: tree_sitter.Node) -> Place:
        """Return where a node begins in the user's text."""
        return self.expanded.place(node.start_byte)


@dataclass(frozen=True, slots=True, repr=False)
class Functor:
    """A parsed functor text. Compares and hashes by its text and the roles of its parameters."""

    # The user's text.
    source: str
    parameters: tuple[EntryParameter, ...]
    num_outputs: int
    # The C++ type that the entry is declared to return, as written.
    result: str = field(compare=False)
    # Name of the entry.
    entry: str = field(compare=False)
    # Names of the entry's template parameters; the first is the compute type.
    template_parameters: tuple[str, ...] = field(compare=False)
    # The text as it goes to the compiler: the user's, or with ``void`` for a return type that is never used.
    emitted: MappedText = field(compare=False, repr=False)
    # Names that the text makes macros or ends: what they mean before and after it is none of its business.
    macros: tuple[str, ...] = field(compare=False)
    # Every word of the text, as written and expanded: decides which names the prelude declares.
    words: frozenset[str] = field(compare=False, repr=False)
    # Where the text does not parse, in the order of the text.
    problems: tuple[Problem, ...] = field(compare=False)

    # The parameters bound to tensors, those bound to named scalars, both of them, and the ``T&``, each in order; there
    # are none of the last where the entry returns its only result.
    tensors: tuple[EntryParameter, ...] = field(init=False, compare=False, repr=False)
    scalars: tuple[EntryParameter, ...] = field(init=False, compare=False, repr=False)
    inputs: tuple[EntryParameter, ...] = field(init=False, compare=False, repr=False)
    outputs: tuple[EntryParameter, ...] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        """Sort the parameters, which is asked for again and again."""
        bound = (Role.TENSOR, Role.SCALAR)
        kinds = {"tensors": bound[:1], "scalars": bound[1:], "inputs": bound, "outputs": (Role.OUTPUT,)}
        for name, roles in kinds.items():
            object.__setattr__(self, name, tuple(item for item in self.parameters if item.role in roles))

    @property
    def shadows(self) -> bool:
        """Whether the entry has the name of a math function: for the types that has, calls mean that one, as in C++."""
        return self.entry in MATH_FUNCTIONS

    @property
    def text(self) -> str:
        """The text as it goes to the compiler."""
        return self.emitted.text

    def place_in_source(self, line: int, column: int) -> Place:
        """Return the place in the user's text of a line and a column (from 1, in bytes) of ``text``."""
        return self.emitted.place(self.emitted.offset(line, column))

    @property
    def ends_in_returns(self) -> bool:
        """Whether it is functions whose last statement is a ``return``, and nothing else: each path has a result."""
        return not self.outputs and _end_in_returns(self.source)

    def signature(self) -> str:
        """Return how the functor is called, for messages: ``axpy(x, y, *, alpha)``."""
        return describe_call(self.entry, self.tensors, self.scalars)

    def __repr__(self) -> str:
        # Texts are long.
        return f"<fuser.cxx.Functor {self.signature()}>"

    def raise_problems(self) -> None:
        """Raise FunctorError for the first place that does not parse; do nothing when there is none."""
        if self.problems:
            raise self.error(self.problems[0])

    def error(self, problem: Problem) -> FunctorError:
        """Return the error that shows a problem in the user's text."""
        return _error(self.source, problem)


@lru_cache(maxsize=1024)
def is_steady(functor: Functor) -> bool:
    """Whether a functor takes the same time whatever the data, as far as its text shows: no loop without a bound."""
    loops = re.findall(_LOOP, functor.source)
    return functor.words.isdisjoint(_ENDLESS) and all(re.match(_BOUNDED, loop) for loop in loops)


def takes_anything(functor: Functor) -> bool:
    """Whether a functor comes to something, as far as its text shows, also of numbers that it was not written for."""
    # No place in an array is one beyond it.
    return is_steady(functor) and "[" not in functor.source and functor.words.isdisjoint(_SEEN)


def describe_call(
    name: str, tensors: Sequence[EntryParameter], scalars: Sequence[EntryParameter], index: str | None = None
) -> str:
    """Return a signature for messages: ``axpy(x, y, *, alpha)``; ``i=index`` for the parameter ``index``."""
    names = [f"{item.name}=index" if item.name == index else item.name for item in tensors]
    names += ["*", *(item.name for item in scalars)] if scalars else []
    return f"{name}({', '.join(names)})"


@lru_cache(maxsize=4096)
def parse_functor(source: str, scalars: tuple[str, ...] = (), num_outputs: int = 1) -> Functor:
    """Parse a functor text.

    Args:
        source: the C++ text.
        scalars: names of the entry's parameters that are scalars; ``T&`` parameters are outputs, the rest tensors.
        num_outputs: how many results the functor has.

    Returns:
        The functor. A syntax error inside a body is kept in ``problems`` and raised when the functor is first used,
        as with torch.cuda.jiterator, which builds such a function and fails when it is called.

    Raises:
        FunctorError: no entry can be read, a scalar names no parameter, or the outputs do not match.
    """
    _check_characters(source)
    try:
        # A file may begin with a mark of its encoding.
        return _parse(source.removeprefix("\ufeff"), scalars, num_outputs)
    except RecursionError:
        raise FunctorError("the text, or the calling program, is nested too deeply for it to be read") from None


def _parse(source: str, scalars: tuple[str, ...], num_outputs: int) -> Functor:
    reading = read_text(source)
    root = reading.tree.root_node
    found = [*_find_syntax_errors(reading, root), *_find_leaks(reading, root)]
    problems = sorted([*reading.preprocessed.problems, *(found and _find_odd_characters(source)), *found])
    template = _find_entry(root)
    if root.has_error:
        # What is wrong in a body has no say in where the entry begins and ends.
        template = _find_entry(parse_tree(_without_bodies(reading.expanded.text)).root_node) or template
    if template is None:
        # Where no template is meant, it is no help to know what does not parse.
        if problems and "template" in source:
            raise _error(source, problems[0])
        raise FunctorError("a functor needs a function template, such as: template <typename T> T f(T x) { return x; }")
    definition, declarator, name = _read_entry(reading, template)
    parameters = tuple(_parse_parameters(reading, declarator, frozenset(scalars)))
    _check_parameters(source, name, parameters, scalars, num_outputs)
    kind = definition.child_by_field_name("type")
    if kind is not None and text_of(kind) == "void" and not any(item.role is Role.OUTPUT for item in parameters):
        message = f"{name!r} has no result: it returns nothing, and no parameter is an output (T&)"
        raise _error(source, Problem(reading.place(kind), message))
    outer = definition.child_by_field_name("declarator")
    if outer is not None and outer.type == "pointer_declarator":
        raise _error(source, Problem(reading.place(outer), f"{name!r} returns a pointer, and a result is one element"))
    has_outputs = any(parameter.role is Role.OUTPUT for parameter in parameters)
    return Functor(
        source=source,
        parameters=parameters,
        num_outputs=num_outputs,
        result=text_of(_result_type(definition)),
        entry=name,
        template_parameters=tuple(_template_parameters(template)),
        emitted=_without_unused_type(reading, definition) if has_outputs else reading.preprocessed.verbatim,
        macros=reading.preprocessed.macros,
        words=frozenset(re.findall(r"\w+", f"{source}\n{reading.expanded.text}")),
        problems=tuple(problems),
    )


@lru_cache(maxsize=1024)
def read_text(source: str) -> Reading:
    """Preprocess and parse a text; whoever wants to know something of it begins here."""
    preprocessed = preprocess(source)
    tree = parse_tree(preprocessed.expanded.text)
    if tree.root_node.has_error:
        expanded = _put_in_parentheses(preprocessed.expanded)
        if expanded is not preprocessed.expanded:
            return Reading(preprocessed._replace(expanded=expanded), parse_tree(expanded.text))
    return Reading(preprocessed, tree)


# Words that parentheses around an expression may follow.
_BEFORE_EXPRESSIONS = frozenset({"return", "case", "else", "do", "and", "or", "not"})


def _put_in_parentheses(text: MappedText) -> MappedText:
    # The assignments before and after commas: ``(i = 1, x)``, which the parser does not know, is ``((i = 1), x)``.
    inserted: list[tuple[int, str]] = []
    # Of each bracket that is open: whether it may hold a comma operator, whether it holds a comma; where its last item
    # begins and whether that assigns; the items before it that do.
    opened: list[tuple[bool, bool, int, bool, list[tuple[int, int]]]] = []
    before, at = "", 0
    for token in tokenize(text.text):
        start, at = at, at + len(token.text)
        if token.kind in {"space", "comment"}:
            continue
        if token.text in {"(", "[", "{"}:
            is_call = before in {")", "]", ">"} or (before.isidentifier() and before not in _BEFORE_EXPRESSIONS)
            opened.append((token.text == "(" and not is_call, False, at, False, []))
        elif opened and token.text in {",", ")", "]", "}"}:
            may, has_comma, begin, assigns, items = opened.pop()
            items = [*items, (begin, start)] if assigns else items
            if token.text == ",":
                opened.append((may, True, at, False, items))
            elif may and has_comma:
                inserted += [place for begin, end in items for place in ((begin, "("), (end, ")"))]
        elif opened and token.text.endswith("=") and token.text not in {"==", "!=", "<=", ">="}:
            opened[-1] = (*opened[-1][:3], True, opened[-1][4])
        before = token.text
    for place, bracket in sorted(inserted, reverse=True):
        text = text.replace(place, place, bracket)
    return text


@lru_cache(maxsize=4096)
def _end_in_returns(source: str) -> bool:
    for node in named(read_text(source).tree.root_node):
        inner = _templated(node) if node.type == "template_declaration" else node
        statements = list(named(inner.child_by_field_name("body"))) if inner.type == "function_definition" else []
        if not statements or statements[-1].type != "return_statement":
            return False
    return True


def _check_characters(source: str) -> None:
    # Those that no compiler takes, and what half a surrogate pair is to UTF-8.
    found = re.search("[\0\ud800-\udfff]", source)
    if found is not None:
        line, column = MappedText(source, source).place_of(found.start())
        shown = source.encode(errors="backslashreplace").decode()
        message = "NUL is no character" if found[0] == "\0" else "half of a surrogate pair is no character"
        raise FunctorError(describe_place(shown, line, column, message), line, column)


def _find_odd_characters(source: str) -> list[Problem]:
    # Those that look like C++'s own, outside of comments and texts.
    places = MappedText(source, source)
    odd = [match for match in _ODD.finditer(source) if match[1] and not match[1].isidentifier()]
    names = [unicodedata.name(match[1], f"U+{ord(match[1]):04X}") for match in odd]
    return [
        Problem(places.place_of(match.start()), f"{match[1]!r} ({name}) is no character of C++")
        for match, name in zip(odd, names, strict=True)
    ]


def _error(source: str, problem: Problem) -> FunctorError:
    line, column = problem.place
    return FunctorError(describe_place(source, line, column, problem.message), line, column)


def _find_entry(parent: tree_sitter.Node) -> tree_sitter.Node | None:
    # The last template that defines a function; a template whose body does not parse still counts, so that a
    # functor with a syntax error is reported as such.
    found = None
    for node in parent.named_children:
        if node.type == "template_declaration":
            inner = _templated(node)
            if inner.type == "function_definition" or (node.has_error and function_declarator(inner) is not None):
                found = node
        elif node.type in {"namespace_definition", "linkage_specification", "declaration_list", "ERROR"}:
            is_named = node.child_by_field_name("name") is not None
            found = (None if is_named else _find_entry(node)) or found
    return found


def _without_bodies(text: str) -> str:
    # Blanks between the outermost braces; every byte stays where it is.
    depth, made = 0, bytearray(text, "utf-8")
    for index, char in enumerate(made):
        depth -= char == ord("}")
        if depth > 0:
            made[index] = ord(" ")
        depth += char == ord("{")
    return made.decode() if depth == 0 else text


def _templated(template: tree_sitter.Node) -> tree_sitter.Node:
    # What stands after the template parameters.
    children = template.named_children
    return next((child for child in children if child.type == "function_definition"), children[-1])


def _read_entry(reading: Reading, template: tree_sitter.Node) -> tuple[tree_sitter.Node, tree_sitter.Node, str]:
    # Its definition, its declarator and its name. Nothing before its body may be wrong.
    definition = _templated(template)
    declarator, body = function_declarator(definition), definition.child_by_field_name("body")
    head = [child for child in template.children if child.id != definition.id]
    head += [child for child in definition.children if body is None or child.id != body.id]
    wrong = [problem for node in head for problem in _find_syntax_errors(reading, node)]
    if not wrong:
        name = declarator.child_by_field_name("declarator") if declarator is not None else None
        first = next(named(template.child_by_field_name("parameters")), None)
        if name is None or declarator is None or name.type != "identifier":
            wrong = [Problem(reading.place(definition), "this is no function with a name of its own")]
        elif definition.child_by_field_name("type") is None:
            wrong = [Problem(reading.place(definition), f"{text_of(name)!r} has no result type")]
        elif first is None or "type_parameter" not in first.type:
            wrong = [Problem(reading.place(template), f"the first template parameter of {text_of(name)!r} is no type")]
        elif body is None or body.type != "compound_statement":
            wrong = [Problem(reading.place(definition), f"{text_of(name)!r} has no body")]
        else:
            return definition, declarator, text_of(name)
    raise _error(reading.expanded.source, min(wrong))


def _template_parameters(template: tree_sitter.Node) -> Iterator[str]:
    for child in named(template.child_by_field_name("parameters")):
        names = [node for node in child.named_children if node.type in {"type_identifier", "identifier"}]
        if names:
            yield text_of(names[0])


def _parse_parameters(
    reading: Reading, declarator: tree_sitter.Node, scalars: frozenset[str]
) -> Iterator[EntryParameter]:
    for node in named(declarator.child_by_field_name("parameters")):
        if "variadic" in node.type:
            raise _error(reading.expanded.source, Problem(reading.place(node), "a functor takes no parameter pack"))
        if node.type not in {"parameter_declaration", "optional_parameter_declaration"} or text_of(node) == "void":
            continue
        inner = node.child_by_field_name("declarator")
        name = next(find(inner, "identifier"), None) if inner is not None else None
        _check_declarator(reading, node, inner, text_of(name) if name is not None else "x")
        kind = node.child_by_field_name("type")
        is_reference = inner is not None and inner.type in {"reference_declarator", "abstract_reference_declarator"}
        is_const = any(text_of(child) == "const" for child in node.children if child.type == "type_qualifier")
        text = text_of(name) if name is not None else ""
        role = Role.OUTPUT if is_reference and not is_const else Role.SCALAR if text in scalars else Role.TENSOR
        yield EntryParameter(
            name=text,
            type=text_of(kind) if kind is not None else "",
            role=role,
            has_default=node.type == "optional_parameter_declaration",
            place=reading.place(node),
        )


def _check_declarator(reading: Reading, node: tree_sitter.Node, inner: tree_sitter.Node | None, name: str) -> None:
    kind = "" if inner is None else inner.type.removeprefix("abstract_")
    wrong = {"pointer_declarator": "a pointer", "array_declarator": "an array", "function_declarator": "a function"}
    if inner is not None and kind == "reference_declarator" and text_of(inner).startswith("&&"):
        wrong[kind] = "an rvalue reference"
    if kind in wrong:
        type_ = text_of(field_of(node, "type"))
        ways = f"write {type_} {name}, or {type_}& {name} for an output"
        message = f"{name} is {wrong[kind]}, and a functor gets one element at a time: {ways}"
        raise _error(reading.expanded.source, Problem(reading.place(node), message))


def _check_parameters(
    source: str, entry: str, parameters: tuple[EntryParameter, ...], scalars: tuple[str, ...], num_outputs: int
) -> None:
    names = [parameter.name for parameter in parameters]
    for scalar in scalars:
        if scalar not in names:
            known = f"(its parameters are {', '.join(names) or 'none'})"
            raise FunctorError(f"{entry} has no parameter {scalar!r} {known}{suggest(scalar, names)}")
    outputs = [parameter for parameter in parameters if parameter.role is Role.OUTPUT]
    if num_outputs < 1:
        raise FunctorError(f"{entry}: num_outputs must be 1 or more, got {num_outputs}")
    for output in outputs:
        if output.name in scalars:
            message = f"{output.name!r} is an output of {entry}, not a scalar"
            raise _error(source, Problem(output.place, message))
    if len(outputs) != (num_outputs if outputs or num_outputs > 1 else 0):
        raise FunctorError(
            f"{entry} has {len(outputs)} output parameters (T&) for num_outputs={num_outputs}; "
            "one output is returned or written to a T& parameter, several are written to one T& parameter each"
        )


def _result_type(definition: tree_sitter.Node) -> tree_sitter.Node:
    # What stands behind an arrow is the type, and ``auto`` before it is none.
    kind = trailing_type(function_declarator(definition)) or definition.child_by_field_name("type")
    assert kind is not None, "the entry was read"
    return kind


def _without_unused_type(reading: Reading, definition: tree_sitter.Node) -> MappedText:
    # Flowing off the end of a function that returns a value is undefined, and g++ -O2 makes use of it.
    expanded = reading.expanded
    verbatim = reading.preprocessed.verbatim
    kind = _result_type(definition)
    body = definition.child_by_field_name("body")
    assert body is not None, "the entry was read"
    returns = find(body, "return_statement", skip="lambda_expression")
    if text_of(kind) == "void":
        return verbatim
    if not any(node.named_child_count for node in returns):
        node, words = kind, "void"
    elif kind.type == "placeholder_type_specifier" or body.named_children[-1].type == "return_statement":
        return verbatim
    else:
        # Some paths return a value, which nobody uses, and others need not.
        node, words = body.children[-1], "return {}; }"
    start, end = expanded.character(node.start_byte), expanded.character(node.end_byte)
    if expanded.is_verbatim(start) and expanded.is_verbatim(end - 1):
        return verbatim.replace(expanded.origin(start), expanded.origin(end - 1) + 1, words)
    # A macro writes the type, and maybe more: the text is compiled as it is expanded.
    return expanded.replace(start, end, words)


def _find_leaks(reading: Reading, parent: tree_sitter.Node) -> Iterator[Problem]:
    # What would not stay in the functor's namespace.
    for node in parent.named_children:
        is_c = node.type == "linkage_specification"
        if node.type == "expression_statement" and next(find(node, "gnu_asm_expression"), None) is not None:
            yield Problem(reading.place(node), "asm outside of functions would reach the rest of the kernel")
        elif is_c and any(_defines(item) for body in node.named_children[1:] for item in (body, *body.named_children)):
            yield Problem(reading.place(node), 'what is extern "C" has one name in the whole kernel: leave that out')
        elif node.type in {"namespace_definition", "declaration_list"}:
            yield from _find_leaks(reading, node)


def _defines(node: tree_sitter.Node) -> bool:
    is_variable = node.type == "declaration" and function_declarator(node) is None
    return node.type == "function_definition" or is_variable


def _find_syntax_errors(reading: Reading, node: tree_sitter.Node) -> Iterator[Problem]:
    if not node.has_error:
        return
    if node.is_missing:
        yield Problem(reading.place(node), f"expected {node.type!r}")
        return
    inner = [problem for child in node.children for problem in _find_syntax_errors(reading, child)]
    if node.type == "ERROR" and not inner:
        leaf = node
        while leaf.children:
            leaf = leaf.children[-1]
        found = text_of(leaf).splitlines() or [""]
        inner = [Problem(reading.place(leaf), f"does not parse at {found[0]!r}")]
    yield from inner
