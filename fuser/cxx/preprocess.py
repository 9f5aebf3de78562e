"""The preprocessor: a functor text with its macros expanded, every token at the place the user wrote it."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

from fuser.cxx.nodes import Place
from fuser.errors import UntranslatableError

__all__ = ["Expanded", "preprocess"]

_TOKEN = re.compile(
    r"(?P<comment>//(?:[^\n\\]|\\.|\\\n)*|/\*.*?\*/)"
    r"|(?P<directive>(?:(?<=\n)|\A)[ \t]*\#(?:[^\n\\/]|\\\n|\\.|/\*.*?\*/|/(?!\*))*)"
    r"|(?P<space>\n|(?:[^\S\n]|\\\n)+)"
    r"|(?P<name>[A-Za-z_]\w*)"
    r"|(?P<number>\.?\d(?:[eEpP][+-]|[\w.'])*)"
    r"|(?P<string>\"(?:[^\"\\\n]|\\.)*\"|'(?:[^'\\\n]|\\.)*')"
    r"|(?P<other>\#\#|<<=|>>=|\.\.\.|->|\+\+|--|<<|>>|&&|\|\||::|[<>=!+\-*/%&|^]=|.)",
    re.DOTALL,
)
_DIRECTIVE = re.compile(r"\s*#\s*(\w*)\s*(.*)", re.DOTALL)
_DEFINE = re.compile(r"(\w+)(?:\(([^)]*)\))?(.*)", re.DOTALL)
_COMMENT = re.compile(r"//.*|/\*.*?\*/", re.DOTALL)
_CONTINUATION = re.compile(r"\\\n")
_ARITHMETIC = re.compile(r"[\d\s()+\-*/%<>=!&|^~]*|and|or|not")
# What the prelude and the compilers define; everything else that is not the user's is undefined.
_PREDEFINED = {"INFINITY", "NAN", "POS_INFINITY", "NEG_INFINITY", "__cplusplus"}
_MAX_TOKENS = 100_000


@dataclass(frozen=True, slots=True)
class Expanded:
    """A text without directives and macros."""

    # The user's text.
    source: str
    text: str
    # Where each piece begins in ``text``; where it came from in ``source``; whether it was copied as it stands.
    starts: tuple[int, ...]
    origins: tuple[int, ...]
    copied: tuple[bool, ...]

    def place(self, offset: int) -> Place:
        """Return line and column in the user's text (from 1, in characters) of a byte of ``text``."""
        if not self.text.isascii():
            offset = len(self.text.encode()[:offset].decode(errors="ignore"))
        piece = max(bisect_right(self.starts, offset) - 1, 0)
        origin = self.origins[piece] + (offset - self.starts[piece] if self.copied[piece] else 0)
        before = self.source[:origin]
        return before.count("\n") + 1, origin - (before.rfind("\n") + 1) + 1


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    text: str
    origin: int
    # Whether it stands in the text as it stands here.
    is_copied: bool = True


@dataclass(frozen=True, slots=True)
class _Macro:
    # None: no parentheses.
    parameters: tuple[str, ...] | None
    body: tuple[_Token, ...]


def preprocess(source: str) -> Expanded:
    """Expand the macros of a functor text and drop the parts that ``#if`` leaves out.

    Raises:
        UntranslatableError: a directive that means nothing here, or a condition that is no integer.
    """
    return _Preprocessor(source).run()


class _Preprocessor:
    def __init__(self, source: str) -> None:
        self.source = source
        self.macros: dict[str, _Macro] = {}
        # One entry per open #if: whether its present part counts, and whether some part of it did.
        self.conditions: list[tuple[bool, bool]] = []
        self.made = 0

    def run(self) -> Expanded:
        out: list[_Token] = []
        pending: list[_Token] = []
        for token in _tokenize(self.source):
            if token.kind == "directive":
                out += self.expand(pending, frozenset())
                pending = []
                self.direct(token)
            elif all(counts for counts, _ in self.conditions):
                pending.append(token)
        out += self.expand(pending, frozenset())
        starts, length = [], 0
        for token in out:
            starts.append(length)
            length += len(token.text)
        text = "".join(token.text for token in out)
        origins = tuple(token.origin for token in out)
        return Expanded(self.source, text, tuple(starts), origins, tuple(token.is_copied for token in out))

    def direct(self, token: _Token) -> None:
        match = _DIRECTIVE.fullmatch(_COMMENT.sub(" ", _CONTINUATION.sub("  ", token.text)))
        assert match is not None, "the token's own pattern"
        word, rest = match[1], match[2].strip()
        is_on = all(counts for counts, _ in self.conditions)
        if word in {"if", "ifdef", "ifndef"}:
            holds = is_on and self.test(word, rest, token)
            self.conditions.append((holds, holds))
        elif word in {"elif", "else", "endif"} and self.conditions:
            _, done = self.conditions.pop()
            if word != "endif":
                is_on = all(counts for counts, _ in self.conditions)
                holds = is_on and not done and (word == "else" or self.test("if", rest, token))
                self.conditions.append((holds, done or holds))
        elif is_on and word == "define":
            self.define(rest, token)
        elif is_on and word == "undef":
            self.macros.pop(rest, None)
        elif is_on and word not in {"", "pragma", "line"}:
            raise self.error(token, f"#{word}")

    def define(self, rest: str, token: _Token) -> None:
        match = _DEFINE.fullmatch(rest)
        if match is None:
            raise self.error(token, "#define without a name")
        name, parameters, body = match.groups()
        names = None if parameters is None else tuple(item.strip() for item in parameters.split(",") if item.strip())
        tokens = tuple(
            _Token(item.kind, item.text, token.origin, is_copied=False)
            for item in _tokenize(body.strip())
            if item.kind != "comment"
        )
        self.macros[name] = _Macro(names, tokens)

    def test(self, word: str, rest: str, token: _Token) -> bool:
        if word != "if":
            return (rest in self.macros or rest in _PREDEFINED) == (word == "ifdef")
        known = re.sub(
            r"\bdefined\s*(?:\(\s*(\w+)\s*\)|(\w+))",
            lambda found: str(int((found[1] or found[2]) in {*self.macros, *_PREDEFINED})),
            rest,
        )
        expanded = "".join(item.text for item in self.expand(list(_tokenize(known)), frozenset()))
        text = re.sub(r"(\d)[uUlL]+\b", r"\1", expanded)
        text = re.sub(r"\b(?!true\b)[A-Za-z_]\w*", "0", text).replace("true", "1")
        text = re.sub(r"!(?!=)", " not ", text.replace("&&", " and ").replace("||", " or ")).replace("/", "//")
        if not all(_ARITHMETIC.fullmatch(part) for part in re.split(r"(and|or|not)", text)):
            raise self.error(token, f"#if {rest}")
        try:
            # Digits and operators only, as the pattern says.
            return bool(eval(f"({text})", {"__builtins__": {}}))
        except (SyntaxError, ArithmeticError):
            raise self.error(token, f"#if {rest}") from None

    def expand(self, tokens: list[_Token], hidden: frozenset[str]) -> list[_Token]:
        out: list[_Token] = []
        at = 0
        while at < len(tokens):
            token = tokens[at]
            at += 1
            macro = self.macros.get(token.text) if token.kind == "name" and token.text not in hidden else None
            if macro is None:
                out.append(token)
                continue
            arguments: list[list[_Token]] = []
            if macro.parameters is not None:
                following = next((i for i in range(at, len(tokens)) if tokens[i].kind not in {"space", "comment"}), -1)
                if following < 0 or tokens[following].text != "(":
                    out.append(token)
                    continue
                arguments, at = _split_arguments(tokens, following)
            body = self.substitute(macro, arguments, token, hidden)
            out += self.expand(body, hidden | {token.text})
            self.made += len(body)
            if self.made > _MAX_TOKENS:
                raise self.error(token, f"the macro {token.text!r}, which grows without end,")
        return out

    def substitute(
        self, macro: _Macro, arguments: list[list[_Token]], use: _Token, hidden: frozenset[str]
    ) -> list[_Token]:
        names = macro.parameters or ()
        given = dict(zip(names, arguments, strict=False))
        if "..." in names:
            rest = arguments[names.index("...") :]
            given["__VA_ARGS__"] = [token for item in rest for token in (*item, _Token("other", ",", use.origin))][:-1]
        out: list[_Token] = [_Token("space", " ", use.origin, is_copied=False)]
        body = [token for token in macro.body if token.kind != "space"]
        for index, token in enumerate(body):
            if token.text == "##" and out:
                continue
            is_pasted = index > 0 and body[index - 1].text == "##"
            is_text = index > 0 and body[index - 1].text == "#" and names
            if token.text == "#" and names:
                continue
            argument = given.get(token.text) if token.kind == "name" else None
            made = [_Token(token.kind, token.text, use.origin, is_copied=False)] if argument is None else argument
            if is_text:
                text = "".join(item.text for item in made).strip().replace('"', '\\"')
                made = [_Token("string", f'"{text}"', use.origin, is_copied=False)]
            next_pastes = index + 1 < len(body) and body[index + 1].text == "##"
            if argument is not None and not is_pasted and not next_pastes and not is_text:
                made = self.expand(argument, hidden)
            if is_pasted and made:
                last = next((i for i in reversed(range(len(out))) if out[i].kind != "space"), 0)
                made = [item for item in made if item.kind != "space"] or made
                joined = out[last].text + made[0].text
                out[last:] = [_Token(next(_tokenize(joined)).kind, joined, use.origin, is_copied=False)]
                made = made[1:]
            out += [*made, _Token("space", " ", use.origin, is_copied=False)]
        return out

    def error(self, token: _Token, construct: str) -> UntranslatableError:
        offset = token.origin + len(token.text) - len(token.text.lstrip())
        place = Expanded(self.source, self.source, (0,), (0,), (True,)).place(len(self.source[:offset].encode()))
        return UntranslatableError(self.source, *place, construct)


def _tokenize(text: str) -> Iterator[_Token]:
    return (_Token(str(match.lastgroup), match[0], match.start()) for match in _TOKEN.finditer(text))


def _split_arguments(tokens: list[_Token], opening: int) -> tuple[list[list[_Token]], int]:
    # The arguments of a macro, and the place after its closing parenthesis.
    arguments: list[list[_Token]] = [[]]
    depth = 0
    for at in range(opening, len(tokens)):
        token = tokens[at]
        if token.text in {"(", "[", "{"} and token.kind == "other":
            depth += 1
            if depth == 1:
                continue
        elif token.text in {")", "]", "}"} and token.kind == "other":
            depth -= 1
            if depth == 0:
                return arguments, at + 1
        if token.text == "," and depth == 1:
            arguments.append([])
        elif token.kind != "comment":
            arguments[-1].append(token)
    return arguments, len(tokens)
