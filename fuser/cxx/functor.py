"""Functor texts: the C++ strings users write for torch.cuda.jiterator, parsed into values.

A text is one or more C++ functions; the last function template is the entry. Its first template parameter is ``T``,
the type it computes in. The text itself reaches the compiler unchanged, except that a multi-output entry that is
declared to return a value and never does is made ``void``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

import tree_sitter
import tree_sitter_cpp

from fuser.errors import FunctorError, count_characters, describe_place

__all__ = ["MATH_FUNCTIONS", "Functor", "Parameter", "Problem", "Role", "parse_functor", "parse_tree"]

# C++'s functions of floating-point numbers, for float and double.
MATH_FUNCTIONS = frozenset(
    "acos acosh asin asinh atan atan2 atanh cbrt ceil cos cosh erf erfc exp exp2 expm1 fabs floor fmod hypot lgamma "
    "log log10 log1p log2 nearbyint pow remainder rint round rsqrt sin sinh sqrt tan tanh tgamma trunc".split()
)

_LANGUAGE = tree_sitter.Language(tree_sitter_cpp.language())

# CUDA's qualifiers are no C++: the parser sees blanks of the same length, so that columns stay.
_QUALIFIERS = (
    "__device__",
    "__host__",
    "__global__",
    "__constant__",
    "__shared__",
    "__forceinline__",
    "__noinline__",
    "__restrict__",
    "__inline__",
)


class Role(Enum):
    """What a parameter of an entry is."""

    TENSOR = "tensor"
    SCALAR = "scalar"
    OUTPUT = "output"


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of an entry, in the order of the declaration."""

    name: str
    # Its C++ type as written, without const and &.
    type: str
    role: Role
    # Whether C++ gives it a default value.
    has_default: bool
    # Place in the text, from 1.
    line: int
    column: int


@dataclass(frozen=True, slots=True)
class Problem:
    """A place (from 1) where the text does not parse."""

    line: int
    column: int
    message: str


@dataclass(frozen=True, slots=True)
class Functor:
    """A parsed functor text. Compares and hashes by its text and the roles of its parameters."""

    # The user's text.
    source: str
    # Name of the entry.
    entry: str
    # Names of the entry's template parameters; the first is the compute type.
    template_parameters: tuple[str, ...]
    parameters: tuple[Parameter, ...]
    num_outputs: int
    # Byte range of the declared return type when it must be emitted as ``void``, else None.
    void_span: tuple[int, int] | None
    # Macros the text defines: they end with the functor.
    macros: tuple[str, ...]
    # Every word of the text: decides which names the prelude declares.
    words: frozenset[str]
    problems: tuple[Problem, ...]

    @property
    def tensors(self) -> tuple[Parameter, ...]:
        """The parameters bound to tensors, in order."""
        return tuple(parameter for parameter in self.parameters if parameter.role is Role.TENSOR)

    @property
    def scalars(self) -> tuple[Parameter, ...]:
        """The parameters bound to named scalars, in order."""
        return tuple(parameter for parameter in self.parameters if parameter.role is Role.SCALAR)

    @property
    def outputs(self) -> tuple[Parameter, ...]:
        """The ``T&`` parameters; empty when the entry returns its only result."""
        return tuple(parameter for parameter in self.parameters if parameter.role is Role.OUTPUT)

    @property
    def shadows(self) -> bool:
        """Whether the entry has the name of a math function: for the types that has, calls mean that one, as in C++."""
        return self.entry in MATH_FUNCTIONS

    @property
    def text(self) -> str:
        """The text as it goes to the compiler: the user's, or with ``void`` for a return type that is never used."""
        if self.void_span is None:
            return self.source
        start, end = self.void_span
        encoded = self.source.encode()
        return (encoded[:start] + b"void" + encoded[end:]).decode()

    def column_in_source(self, line: int, column: int) -> int:
        """Map a column of ``text`` to the user's text (both from 1, in bytes)."""
        if self.void_span is None:
            return column
        start, end = self.void_span
        before = self.source.encode()[:start]
        if line != before.count(b"\n") + 1 or column <= start - (before.rfind(b"\n") + 1):
            return column
        # Columns inside the word "void" all mean the type it stands for.
        first = start - (before.rfind(b"\n") + 1) + 1
        return max(column - len(b"void") + (end - start), first)

    def signature(self) -> str:
        """Return how the functor is called, for messages: ``axpy(x, y, *, alpha)``."""
        names = [parameter.name for parameter in self.tensors]
        if self.scalars:
            names += ["*", *(parameter.name for parameter in self.scalars)]
        return f"{self.entry}({', '.join(names)})"

    def raise_problems(self) -> None:
        """Raise FunctorError for the first place that does not parse; do nothing when there is none."""
        if self.problems:
            problem = self.problems[0]
            raise _error(self.source, problem.message, problem.line, problem.column)


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
        FunctorError: no entry can be found, a scalar names no parameter, or the outputs do not match.
    """
    tree = parse_tree(source)
    problems = tuple(_find_problems(tree.root_node))
    template = _find_entry(tree.root_node)
    declarator = template and _first(template, "function_declarator")
    if template is None or declarator is None:
        if problems:
            raise _error(source, problems[0].message, problems[0].line, problems[0].column)
        raise FunctorError("a functor needs a function template, such as: template <typename T> T f(T x) { return x; }")
    name = declarator.child_by_field_name("declarator")
    if name is None:  # pragma: no cover - the grammar always names a declarator
        raise FunctorError("the entry of the functor has no name")
    entry = _text(name)
    parameters = tuple(_parse_parameters(declarator, frozenset(scalars)))
    _check_parameters(source, entry, parameters, scalars, num_outputs)
    outputs = [parameter for parameter in parameters if parameter.role is Role.OUTPUT]
    return Functor(
        source=source,
        entry=entry,
        template_parameters=tuple(_template_parameters(template)),
        parameters=parameters,
        num_outputs=num_outputs,
        void_span=_unused_return_type(template) if outputs else None,
        macros=tuple(_find_macros(tree.root_node)),
        words=frozenset(_words(source)),
        problems=problems,
    )


def parse_tree(source: str) -> tree_sitter.Tree:
    """Return tree-sitter's tree of a C++ text; its places are bytes of UTF-8. CUDA's qualifiers are blanks to it."""
    encoded = source.encode()
    for qualifier in _QUALIFIERS:
        encoded = encoded.replace(qualifier.encode(), b" " * len(qualifier))
    # A parser keeps state while it parses and so is not shared between threads.
    return tree_sitter.Parser(_LANGUAGE).parse(encoded)


def _error(source: str, message: str, line: int, column: int) -> FunctorError:
    column = count_characters(source, line, column)
    return FunctorError(describe_place(source, line, column, message), line, column)


def _find_entry(root: tree_sitter.Node) -> tree_sitter.Node | None:
    # The last template that defines a function; a template whose body does not parse still counts, so that a
    # functor with a syntax error is reported as such.
    found = None
    for node in _walk(root, "template_declaration"):
        definition = _first(node, "function_definition")
        if definition is not None or (node.has_error and _first(node, "function_declarator") is not None):
            found = node
    return found


def _template_parameters(template: tree_sitter.Node) -> Iterator[str]:
    declared = template.child_by_field_name("parameters")
    for child in declared.named_children if declared is not None else ():
        names = [node for node in child.named_children if node.type in {"type_identifier", "identifier"}]
        if names:
            yield _text(names[0])


def _parse_parameters(declarator: tree_sitter.Node, scalars: frozenset[str]) -> Iterator[Parameter]:
    declared = declarator.child_by_field_name("parameters")
    for node in declared.named_children if declared is not None else ():
        if node.type not in {"parameter_declaration", "optional_parameter_declaration"}:
            continue
        inner = node.child_by_field_name("declarator")
        name = _first(inner, "identifier") if inner is not None else None
        kind = node.child_by_field_name("type")
        is_reference = inner is not None and inner.type in {"reference_declarator", "abstract_reference_declarator"}
        is_const = any(_text(child) == "const" for child in node.children if child.type == "type_qualifier")
        text = _text(name) if name is not None else ""
        role = Role.OUTPUT if is_reference and not is_const else Role.SCALAR if text in scalars else Role.TENSOR
        yield Parameter(
            name=text,
            type=_text(kind) if kind is not None else "",
            role=role,
            has_default=node.type == "optional_parameter_declaration",
            line=node.start_point.row + 1,
            column=node.start_point.column + 1,
        )


def _check_parameters(
    source: str, entry: str, parameters: tuple[Parameter, ...], scalars: tuple[str, ...], num_outputs: int
) -> None:
    names = [parameter.name for parameter in parameters]
    for scalar in scalars:
        if scalar not in names:
            raise FunctorError(f"{entry} has no parameter {scalar!r}; its parameters are {', '.join(names) or 'none'}")
    outputs = [parameter for parameter in parameters if parameter.role is Role.OUTPUT]
    if num_outputs < 1:
        raise FunctorError(f"{entry}: num_outputs must be 1 or more, got {num_outputs}")
    for output in outputs:
        if output.name in scalars:
            raise _error(source, f"{output.name!r} is an output of {entry}, not a scalar", output.line, output.column)
    if len(outputs) != (num_outputs if outputs or num_outputs > 1 else 0):
        raise FunctorError(
            f"{entry} has {len(outputs)} output parameters (T&) for num_outputs={num_outputs}; "
            "one output is returned or written to a T& parameter, several are written to one T& parameter each"
        )


def _unused_return_type(template: tree_sitter.Node) -> tuple[int, int] | None:
    # Flowing off the end of a function that returns a value is undefined, and g++ -O2 makes use of it.
    definition = _first(template, "function_definition")
    kind = definition.child_by_field_name("type") if definition is not None else None
    body = definition.child_by_field_name("body") if definition is not None else None
    if kind is None or body is None or _text(kind) == "void":
        return None
    returns = [node for node in _walk(body, "return_statement", skip="lambda_expression") if node.named_child_count]
    return None if returns else (kind.start_byte, kind.end_byte)


def _find_macros(root: tree_sitter.Node) -> Iterator[str]:
    for node in _walk(root, "preproc_def", "preproc_function_def", field="name"):
        yield _text(node)


def _find_problems(root: tree_sitter.Node) -> Iterator[Problem]:
    for node in _walk(root, "preproc_include"):
        yield Problem(
            node.start_point.row + 1, node.start_point.column + 1, "a functor cannot #include: there is no header"
        )
    yield from _find_syntax_errors(root)


def _find_syntax_errors(node: tree_sitter.Node) -> Iterator[Problem]:
    if not node.has_error:
        return
    if node.is_missing:
        yield Problem(node.start_point.row + 1, node.start_point.column + 1, f"expected {node.type!r}")
        return
    inner = [problem for child in node.children for problem in _find_syntax_errors(child)]
    if node.type == "ERROR" and not inner:
        leaf = node
        while leaf.children:
            leaf = leaf.children[-1]
        found = _text(leaf).splitlines() or [""]
        inner = [Problem(leaf.start_point.row + 1, leaf.start_point.column + 1, f"does not parse at {found[0]!r}")]
    yield from inner


def _walk(
    node: tree_sitter.Node, *types: str, field: str | None = None, skip: str | None = None
) -> Iterator[tree_sitter.Node]:
    # Depth first, in the order of the text; ``field`` yields that child of each match, ``skip`` prunes a type.
    if node.type in types:
        found = node if field is None else node.child_by_field_name(field)
        if found is not None:
            yield found
    for child in node.children:
        if child.type != skip:
            yield from _walk(child, *types, field=field, skip=skip)


def _first(node: tree_sitter.Node, kind: str) -> tree_sitter.Node | None:
    return next(_walk(node, kind), None)


def _text(node: tree_sitter.Node) -> str:
    return (node.text or b"").decode()


def _words(source: str) -> list[str]:
    return "".join(char if char.isalnum() or char == "_" else " " for char in source).split()
