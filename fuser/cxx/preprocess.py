"""The preprocessor: a functor text with its macros expanded, every token at the place the user wrote it.

It knows the user's macros and none of the compilers'. What a compiler would do differently, such as taking the branch
of ``#ifdef __CUDA_ARCH__``, is therefore still in the text that goes to it; everything fuser itself understands of a
text, it understands of the expanded one.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate
from typing import NamedTuple

from fuser.cxx.arithmetic import evaluate

__all__ = [
    "MappedText", "Place", "Preprocessed", "Problem", "Token", "preprocess", "tokenize", "words_of",
]  # fmt: skip

# Line and column, from 1.
Place = tuple[int, int]

# Without one of these there is nothing to do.
_SPECIAL = re.compile(
    r"#|%[:>]|<[%:]|:>|\\\s*\n|\\\s*\Z|\b__\w+__\b|\b_Pragma\b|\bdecltype\b|_bit_cast\b|_builtin_expect\b"
    r"|(?:\breturn|[-(=?:+*/&|])\s*\btypename\b|\b(?:unsigned|signed|short|long)\s*[({/]|\r(?!\n)"
)
# The other patterns are compiled when re first uses them: most texts have none of these.
# A line that goes on in the next one.
_SPLICE = r"\\[^\S\n]*\n"
_BLOCK = r"/\*(?:[^*]|\*(?!/))*\*/"
_TOKEN = (
    rf"(?sm)(?P<directive>^(?:[^\S\n]|{_BLOCK})*(?:\#|%:)(?:[^\n/]|{_BLOCK}|//[^\n]*|/(?![*/]))*)"
    rf"|(?P<comment>//[^\n]*|{_BLOCK})"
    r"|(?P<space>\n|[^\S\n]+)"
    r"|(?P<raw>(?:u8|[uUL])?R\"(?P<mark>[^()\\\s]*)\(.*?\)(?P=mark)\")"
    r"|(?P<name>[A-Za-z_]\w*)"
    r"|(?P<number>\.?\d(?:[eEpP][+-]|[\w.'])*)"
    r"|(?P<string>\"(?:[^\"\\\n]|\\.)*\"|'(?:[^'\\\n]|\\.)*')"
    r"|(?P<other><%|%>|:>|<:(?!:[^:>])|\#\#|<<=|>>=|\.\.\.|->|\+\+|--|<<|>>|&&|\|\||::|[<>=!+\-*/%&|^]=|.)"
)
# A comment, or a string that may look like one.
_COMMENT = rf'("(?:[^"\\]|\\.)*")|//.*|{_BLOCK}'
_DIRECTIVE = r"(?s)\s*(?:#|%:)\s*(\w*)\s*(.*)"
_DEFINE = r"(?s)(\w+)(?:\(([^)]*)\))?(.*)"
_PLAIN_STRING = r'\s*"([^"\\]*)"\s*'
_DEFINED = r"\bdefined\s*(?:\(\s*(\w+)\s*\)|(\w+))"
_ASKS_FOR_FILES = r"\b__has_(?:include|embed)"
# Pragmas that say something of the next statement or function, or of messages alone.
_HARMLESS = (
    r"(?:nv_\w+|diag_\w+|unroll|nounroll|ivdep|once|message|GCC\s+(?:unroll|ivdep|diagnostic)|"
    r"omp(?!\s+(?:declare\s+target|begin|end|requires|assumes|threadprivate)))\b"
)
# What the prelude and the compilers define; everything else that is not the user's is undefined.
_PREDEFINED = {"INFINITY", "NAN", "POS_INFINITY", "NEG_INFINITY", "__cplusplus", "__has_include"}
# CUDA's qualifiers are no C++.
QUALIFIERS = (
    "__device__ __host__ __global__ __constant__ __shared__ __managed__ __forceinline__ __noinline__ __restrict__ "
    "__inline__".split()
)
# What is no function as C++ has them: a call with a type among its arguments, which the parser does not know, as it
# knows it, and one that is worth its first argument.
_BUILTINS = {
    "__builtin_bit_cast": (("To", "from"), "(*reinterpret_cast<const To*>(&(from)))"),
    "__builtin_expect": (("value", "expected"), "int64_t(value)"),
}
# Keywords that convert, as in ``(unsigned(x) > 1)``, which the parser does not know in parentheses: the types by names
# that it knows. Behind another such word they are the end of a type, and what follows is declared.
_CONVERTS = {"unsigned": "uint32_t", "signed": "int32_t", "short": "int16_t", "long": "int64_t"}
_PARTS_OF_TYPES = {*_CONVERTS, "int", "char", "double"}
# Macros that no functor defines or ends: the kernel's own, and those by which compilers say what they are.
_NOT_TO_DEFINE = r"(?i)fuser_\w*|__cplusplus|_OPENMP|__(?:CUDA|NVCC|GNUC|clang|STDC)\w*"
_MAX_TOKENS = 100_000
# Other spellings, which the parser does not know.
_DIGRAPHS = {"<%": "{", "%>": "}", "<:": "[", ":>": "]"}


class Problem(NamedTuple):
    """Something in the user's text that cannot be, or that fuser cannot follow."""

    place: Place
    message: str


class MappedText(NamedTuple):
    """A text made of pieces of the user's, with the place where each came from."""

    # The user's text.
    source: str
    text: str
    # Where each piece begins in ``text``; where it came from in ``source``; whether it was copied as it stands.
    starts: tuple[int, ...] = (0,)
    origins: tuple[int, ...] = (0,)
    copied: tuple[bool, ...] = (True,)

    def place(self, offset: int) -> Place:
        """Return line and column in the user's text (from 1, in characters) of a byte of ``text``."""
        return self.place_of(self.origin(self.character(offset)))

    def place_of(self, origin: int) -> Place:
        """Return line and column of a character of the user's text."""
        before = self.source[:origin]
        return before.count("\n") + 1, origin - (before.rfind("\n") + 1) + 1

    def character(self, offset: int) -> int:
        """Return which character of ``text`` begins at a byte of it."""
        return offset if self.text.isascii() else len(self.text.encode()[:offset].decode(errors="ignore"))

    def origin(self, character: int) -> int:
        """Return which character of the user's text one of ``text`` came from."""
        piece = self._piece(character)
        return self.origins[piece] + (character - self.starts[piece] if self.copied[piece] else 0)

    def is_verbatim(self, character: int) -> bool:
        """Whether a character of ``text`` stands in the user's text, and came from there once."""
        piece = self._piece(character)
        return self.copied[piece] and self.origins.count(self.origins[piece]) == 1

    def _piece(self, character: int) -> int:
        return max(bisect_right(self.starts, character) - 1, 0)

    def replace(self, start: int, end: int, words: str) -> MappedText:
        """Return the text with other words in place of the characters from ``start`` to ``end``."""
        pieces = list(zip(self.starts, self.origins, self.copied, strict=True))
        shift = len(words) - (end - start)
        changed = [piece for piece in pieces if piece[0] < start]
        changed += [(start, self.origin(start), False), (end + shift, self.origin(end), self.copied[self._piece(end)])]
        changed += [(begin + shift, origin, copied) for begin, origin, copied in pieces if begin > end]
        starts, origins, copies = zip(*changed, strict=True)
        return MappedText(self.source, self.text[:start] + words + self.text[end:], starts, origins, copies)

    def offset(self, line: int, column: int) -> int:
        """Return the byte of ``text`` at a line and a column (from 1, in bytes), as compilers and parsers count."""
        before = self.text.encode().split(b"\n")[: line - 1]
        return sum(map(len, before)) + len(before) + column - 1


class Preprocessed(NamedTuple):
    """A text without directives and macros, and what its directives say."""

    expanded: MappedText
    # The user's text, as the compiler gets it: without #line, which would have it point elsewhere.
    verbatim: MappedText
    # Every name that some directive defines or undefines, in the order of the text.
    macros: tuple[str, ...] = ()
    # Directives that no kernel can hold.
    problems: tuple[Problem, ...] = ()
    # The first directive that only a compiler understands; what is expanded may then not be what it compiles.
    obstacle: Problem | None = None


class Token(NamedTuple):
    """A word of C++, a blank, a comment or a whole directive."""

    kind: str
    text: str
    # Character of the user's text.
    origin: int
    # Whether it stands in the text as it stands here.
    is_copied: bool = True


class _Macro(NamedTuple):
    # None: no parentheses.
    parameters: tuple[str, ...] | None = None
    body: tuple[Token, ...] = ()


# Leaves nothing of what stands in its parentheses.
_WHATEVER_ARGUMENTS = _Macro(("...",))


def preprocess(source: str) -> Preprocessed:
    """Expand the macros of a functor text and drop the parts that ``#if`` leaves out.

    Lines that end in a backslash are joined first, as in C++, so that a directive is seen however it is written.
    """
    if not _SPECIAL.search(source):
        return Preprocessed(MappedText(source, source), MappedText(source, source))
    return _Preprocessor(source).run()


class _Preprocessor:
    def __init__(self, source: str) -> None:
        self.source = source
        self.macros = dict.fromkeys(QUALIFIERS, _Macro()) | {"__launch_bounds__": _WHATEVER_ARGUMENTS}
        for name, (parameters, body) in _BUILTINS.items():
            self.macros[name] = _Macro(parameters, tuple(_made_of(body, 0)))
        self.verbatim = MappedText(source, source)
        self.named: dict[str, None] = {}
        self.problems: list[Problem] = []
        self.obstacle: Problem | None = None
        # One entry per open #if: whether its present part counts, whether some part of it did, and the directive.
        self.conditions: list[tuple[bool, bool, Token]] = []
        self.made = 0

    def run(self) -> Preprocessed:
        out: list[Token] = []
        pending: list[Token] = []
        for token in self.tokens():
            if token.kind != "directive":
                pending.append(token)
                continue
            # Also what is left out is expanded: a compiler may take another branch, with a _Pragma in it.
            made = self.expand(pending, frozenset())
            out += made if self.is_on() else []
            pending = []
            self.direct(token)
        out += self.expand(pending, frozenset())
        out = [*_name_conversions(out)]
        for _, _, token in self.conditions:
            self.report(token, "#if without #endif")
        starts = tuple(accumulate((len(token.text) for token in out), initial=0))[:-1]
        expanded = MappedText(
            self.source,
            "".join(token.text for token in out),
            starts or (0,),
            tuple(token.origin for token in out) or (0,),
            tuple(token.is_copied for token in out) or (True,),
        )
        return Preprocessed(expanded, self.verbatim, tuple(self.named), tuple(self.problems), self.obstacle)

    def tokens(self) -> Iterator[Token]:
        # The tokens of the text; its lines joined, each token where it begins in the user's text.
        splices = list(re.finditer(_SPLICE, self.source))
        ends = list(accumulate((match.end() - match.start() for match in splices), initial=0))
        joints = [match.start() - removed for match, removed in zip(splices, ends, strict=False)]
        for token in tokenize(re.sub(_SPLICE, "", self.source)):
            first = bisect_right(joints, token.origin)
            is_whole = bisect_right(joints, token.origin + len(token.text) - 1) == first
            yield Token(token.kind, token.text, token.origin + ends[first], is_whole)
        if self.source.rstrip().endswith("\\"):
            end = self.place(len(self.source.rstrip()) - 1)
            self.problems.append(Problem(end, "the last line goes on in a line that is not there"))
        for match in re.finditer(r"\r(?!\n)", self.source):
            message = "a carriage return without a line feed: some compilers end the line there, others do not"
            self.problems.append(Problem(self.place(match.start()), message))

    def is_on(self) -> bool:
        return all(counts for counts, _, _ in self.conditions)

    def direct(self, token: Token) -> None:
        match = re.fullmatch(_DIRECTIVE, re.sub(_COMMENT, lambda found: found[1] or " ", token.text))
        assert match is not None, "the token's own pattern"
        word, rest = match[1], match[2].strip()
        is_on = self.is_on()
        # Whether there is a way to ask is no question for a file.
        if word not in {"", "ifdef", "ifndef"} and re.search(_ASKS_FOR_FILES, re.sub(_DEFINED, "", rest)):
            self.report(token, "a functor cannot ask for files: there is no header")
        elif word in {"if", "ifdef", "ifndef"}:
            holds = is_on and self.test(word, rest, token)
            self.conditions.append((holds, holds, token))
        elif word in {"elif", "else", "endif"}:
            self.next_part(word, rest, token)
        elif word in {"include", "include_next", "import", "embed"}:
            # Also where it is left out: a compiler may take another branch.
            self.report(token, "a functor cannot #include: there is no header")
        elif word == "pragma":
            self.pragma(rest, self.start(token))
        elif word in {"define", "undef"}:
            name = rest.split("(")[0].split(maxsplit=1)
            if not name or not name[0].isidentifier():
                self.report(token, f"#{word} without a name")
            elif re.fullmatch(_NOT_TO_DEFINE, name[0]):
                self.report(token, f"{name[0]} is not for functors to {word}: the kernel around them needs it")
            else:
                self.named[name[0]] = None
                if is_on and word == "define":
                    self.define(rest, token)
                elif is_on:
                    self.macros.pop(name[0], None)
                else:
                    self.expand(_made_of(rest, token.origin), frozenset())
        elif word in {"assert", "unassert", "ident", "sccs"}:
            self.report(token, f"#{word} would reach the rest of the kernel")
        elif word == "line" or word.isdigit():
            end = token.origin + len(token.text)
            self.verbatim = self.verbatim.replace(token.origin, end, re.sub(r"[^\n]", " ", token.text))
            if not token.is_copied:
                self.report(token, "#line goes on in another line")
        elif is_on and word:
            self.give_up(token, f"#{word}")

    def next_part(self, word: str, rest: str, token: Token) -> None:
        if not self.conditions:
            self.report(token, f"#{word} without #if")
            return
        _, done, start = self.conditions.pop()
        if word != "endif":
            holds = self.is_on() and not done and (word == "else" or self.test("if", rest, token))
            self.conditions.append((holds, done or holds, start))

    def pragma(self, text: str, place: Place) -> None:
        # Compilers expand macros in some.
        text = " ".join("".join(item.text for item in self.expand(_made_of(text, 0), frozenset())).split())
        if text and not re.match(_HARMLESS, text):
            self.problems.append(Problem(place, f"#pragma {text} would reach the rest of the kernel"))

    def define(self, rest: str, token: Token) -> None:
        match = re.fullmatch(_DEFINE, rest)
        assert match is not None, "a name was found"
        name, parameters, body = match.groups()
        names = None if parameters is None else tuple(item.strip() for item in parameters.split(",") if item.strip())
        self.macros[name] = _Macro(names, tuple(_made_of(body, token.origin)))

    def test(self, word: str, rest: str, token: Token) -> bool:
        if word != "if":
            return (rest in self.macros or rest in _PREDEFINED) == (word == "ifdef")
        known = re.sub(_DEFINED, lambda found: str(int((found[1] or found[2]) in {*self.macros, *_PREDEFINED})), rest)
        words = [item.text for item in self.expand(list(tokenize(known)), frozenset()) if _is_word(item)]
        try:
            # All compilers say the same of it: kernels are C++17.
            return bool(evaluate(["201703" if word == "__cplusplus" else word for word in words]))
        except ValueError:
            self.give_up(token, f"#if {rest}")
            return False

    def expand(self, tokens: list[Token], hidden: frozenset[str]) -> list[Token]:
        out: list[Token] = []
        at = 0
        while at < len(tokens):
            token = tokens[at]
            at += 1
            if token.text == "decltype" and (end := _end_of_cast(tokens, at, out)):
                # The parser knows no decltype(x)(1) and decltype(x){1}; of a template's name it does.
                before, after = (_made_of(text, token.origin) for text in ("std::remove_cv_t<", ">"))
                out += [*before, token, *self.expand(tokens[at:end], hidden), *after]
                at = end
                continue
            if token.text == "typename" and _is_operand(out):
                # Nor typename A::type(x), which is a call without that word.
                continue
            macro = self.macros.get(token.text) if token.kind == "name" and token.text not in hidden else None
            if token.text == "_Pragma":
                macro = _WHATEVER_ARGUMENTS
            if macro is None or self.made > _MAX_TOKENS:
                out.append(token)
                continue
            arguments: list[list[Token]] = []
            if macro.parameters is not None:
                following = _next_word(tokens, at)
                if following < 0 or tokens[following].text != "(":
                    out.append(token)
                    continue
                arguments, at = _split_arguments(tokens, following)
            if token.text == "_Pragma":
                given = "".join(item.text for part in arguments for item in self.expand(part, hidden))
                plain = re.fullmatch(_PLAIN_STRING, given)
                self.pragma(plain[1] if plain else given.strip(), self.place(token.origin))
            body = self.substitute(macro, arguments, token, hidden)
            out += self.expand(body, hidden | {token.text})
            self.made += len(body)
            if self.made > _MAX_TOKENS:
                self.give_up(token, f"the macro {token.text!r}, which grows without end,")
        return out

    def substitute(
        self, macro: _Macro, arguments: list[list[Token]], use: Token, hidden: frozenset[str]
    ) -> list[Token]:
        names = macro.parameters or ()
        given = dict(zip(names, arguments, strict=False))
        if "..." in names:
            rest = arguments[names.index("...") :]
            given["__VA_ARGS__"] = [token for item in rest for token in (*item, Token("other", ",", use.origin))][:-1]
        out: list[Token] = [Token("space", " ", use.origin, is_copied=False)]
        body = [token for token in macro.body if token.kind != "space"]
        for index, token in enumerate(body):
            if token.text == "##" and out:
                continue
            is_pasted = index > 0 and body[index - 1].text == "##"
            is_text = index > 0 and body[index - 1].text == "#" and names
            if token.text == "#" and names:
                continue
            argument = given.get(token.text) if token.kind == "name" else None
            made = [Token(token.kind, token.text, use.origin, is_copied=False)] if argument is None else argument
            if is_text:
                text = "".join(item.text for item in made).strip().replace('"', '\\"')
                made = [Token("string", f'"{text}"', use.origin, is_copied=False)]
            next_pastes = index + 1 < len(body) and body[index + 1].text == "##"
            if argument is not None and not is_pasted and not next_pastes and not is_text:
                made = self.expand(argument, hidden)
            if is_pasted and made:
                last = next((i for i in reversed(range(len(out))) if out[i].kind != "space"), 0)
                made = [item for item in made if item.kind != "space"] or made
                joined = out[last].text + made[0].text
                out[last:] = [Token(next(tokenize(joined)).kind, joined, use.origin, is_copied=False)]
                made = made[1:]
            out += [*made, Token("space", " ", use.origin, is_copied=False)]
        return out

    def report(self, token: Token, message: str) -> None:
        self.problems.append(Problem(self.start(token), message))

    def give_up(self, token: Token, construct: str) -> None:
        self.obstacle = self.obstacle or Problem(self.start(token), construct)

    def start(self, token: Token) -> Place:
        return self.place(token.origin + len(token.text) - len(token.text.lstrip()))

    def place(self, origin: int) -> Place:
        return MappedText(self.source, self.source).place_of(origin)


def tokenize(text: str) -> Iterator[Token]:
    """Split a text into tokens, comments and blanks among them; a directive is one."""
    found = re.finditer(_TOKEN, text)
    return (Token(str(match.lastgroup), _DIGRAPHS.get(match[0], match[0]), match.start()) for match in found)


def words_of(text: str) -> list[Token]:
    """Return the tokens of a text that are no comments and no blanks."""
    return list(filter(_is_word, tokenize(text)))


def _is_word(token: Token) -> bool:
    return token.kind not in {"space", "comment"}


def _made_of(text: str, origin: int) -> list[Token]:
    # The tokens of a directive's text, which all come from where the directive does; a # at its start is no directive.
    found = (item for item in tokenize(f";{text.strip()}") if item.origin and item.kind != "comment")
    return [Token(item.kind, item.text, origin, is_copied=False) for item in found]


def _next_word(tokens: list[Token], at: int) -> int:
    # The index of the first token from there on that is no blank and no comment; -1: there is none.
    return next((index for index in range(at, len(tokens)) if _is_word(tokens[index])), -1)


def _last_word(tokens: list[Token]) -> str:
    return next((token.text for token in filter(_is_word, reversed(tokens))), "")


def _is_operand(before: list[Token]) -> bool:
    # Whether what follows is part of an expression, and begins no declaration.
    return _last_word(before) in {"return", *"(=?:+-*/&|", "&&", "||"}


def _end_of_cast(tokens: list[Token], at: int, before: list[Token]) -> int:
    # Where the parentheses of a decltype end, if what follows them is converted to its type; else 0.
    opening = _next_word(tokens, at)
    if opening < 0 or tokens[opening].text != "(" or _last_word(before) == "->":
        return 0
    _, end = _split_arguments(tokens, opening)
    following = _next_word(tokens, end)
    return end if following >= 0 and tokens[following].text in {"(", "{"} else 0


def _name_conversions(tokens: list[Token]) -> Iterator[Token]:
    before = ""
    for at, token in enumerate(tokens, 1):
        name = None if before in _PARTS_OF_TYPES else _CONVERTS.get(token.text)
        if name and (following := _next_word(tokens, at)) >= 0 and tokens[following].text in {"(", "{"}:
            yield Token("name", name, token.origin, is_copied=False)
        else:
            yield token
        before = token.text if _is_word(token) else before


def _split_arguments(tokens: list[Token], opening: int) -> tuple[list[list[Token]], int]:
    # The arguments of a macro, and the index after its closing parenthesis.
    arguments: list[list[Token]] = [[]]
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
