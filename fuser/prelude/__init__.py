"""The C++ text that every kernel starts with, as blocks of which a kernel gets those that its functors mention."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

__all__ = ["PreludeBlock", "emit_selected", "load_blocks", "offered_names"]

_IDENTIFIER = re.compile(r"[A-Za-z_]\w*")
_COMMENT = re.compile(r"//[^\n]*")
_EACH = re.compile(r"each (\w+): (.+)")
_HEAD = re.compile(r"(.+?)(?: if ([\w ]+))?")

# Visible globally only: macros, and names that mean something else in std::. Constants, in capitals, are, too.
_NOT_IN_STD = frozenset({"assert", "clamp", "labs", "llabs", "max", "min", "numeric_limits", "printf"})


# A block is itself and no other: there are hundreds, and most are only looked at.
@dataclass(frozen=True, slots=True, eq=False)
class PreludeBlock:
    """C++ text, emitted when all `features` are on and it is `always` there or one of `names` is used."""

    names: tuple[str, ...]
    features: frozenset[str]
    always: bool
    text: str

    @property
    def mentions(self) -> frozenset[str]:
        """What the text itself mentions, comments left out."""
        return _find_identifiers(self.text)


@cache
def load_blocks(file_name: str) -> tuple[PreludeBlock, ...]:
    """Return the blocks of a header of this package, in file order; core.h describes the notation."""
    blocks: list[PreludeBlock] = []
    heads: list[str] = []
    lines: list[str] = []

    def finish() -> None:
        if heads:
            blocks.append(_block(" ".join(heads), "\n".join(lines).strip("\n")))
        heads.clear()
        lines.clear()

    for line in files(__package__).joinpath(file_name).read_text(encoding="utf-8").splitlines():
        if not line.startswith("//@ "):
            lines.append(line)
            continue
        finish()
        head = line.removeprefix("//@ ").strip()
        if match := _EACH.fullmatch(head):
            macro, names = match.groups()
            blocks.extend(_block(f"{name} {name}f", f"{macro}({name})") for name in names.split())
        else:
            heads.append(head)
    finish()
    return tuple(blocks)


@cache
def offered_names() -> frozenset[str]:
    """Return every name that some kernel's prelude declares for functors, but CUDA's vector types: 96 names."""
    headers = [file.name for file in files(__package__).iterdir() if file.name.endswith(".h")]
    blocks = (block for header in headers for block in load_blocks(header) if "FUSER_VECTORS" not in block.text)
    return frozenset(name for block in blocks for name in block.names if not name.lower().startswith("fuser_"))


def _block(head: str, text: str) -> PreludeBlock:
    match = _HEAD.fullmatch(head)
    assert match is not None
    names, features = match.groups()
    always = names == "always"
    return PreludeBlock(
        names=() if always else tuple(names.split()),
        features=frozenset((features or "").split()),
        always=always,
        text=text,
    )


@cache
def _find_identifiers(text: str) -> frozenset[str]:
    return frozenset(_IDENTIFIER.findall(_COMMENT.sub("", text)))


@cache
def _offer(
    blocks: tuple[PreludeBlock, ...], features: frozenset[str]
) -> tuple[tuple[PreludeBlock, ...], Mapping[str, Sequence[PreludeBlock]]]:
    # The blocks whose features are on, and those among them that declare each name.
    candidates = tuple(block for block in blocks if block.features <= features)
    named: dict[str, list[PreludeBlock]] = {}
    for block in candidates:
        for name in block.names:
            named.setdefault(name, []).append(block)
    return candidates, named


def _select_blocks(
    blocks: tuple[PreludeBlock, ...], names: frozenset[str], features: frozenset[str]
) -> tuple[tuple[PreludeBlock, ...], frozenset[str]]:
    """Choose what `names` need, directly or through another block's text.

    Returns:
        The chosen blocks, in their order, and every name that is used, by a functor or by a block.
    """
    candidates, named = _offer(blocks, features)
    chosen: set[PreludeBlock] = set()
    used = set(names)
    more = {block for block in candidates if block.always}.union(*(named[name] for name in names & named.keys()))
    while more:
        chosen |= more
        new = frozenset[str]().union(*(block.mentions for block in more)) - used
        used |= new
        more = {block for name in new for block in named.get(name, ())} - chosen
    return tuple(block for block in candidates if block in chosen), frozenset(used)


def emit_selected(blocks: tuple[PreludeBlock, ...], names: frozenset[str], features: frozenset[str]) -> str:
    """Join the texts that `names` and `features` need, real functions first, then `std::` names, then complex ones.

    The functions that are used become visible in `std::` as well, as by `namespace std { using ::exp; }`.
    """
    if "complex" in names:
        features |= {"complex"}
    chosen, used = _select_blocks(blocks, names, features)
    real = [block for block in chosen if "complex" not in block.features]
    std_names = sorted({name for block in real for name in block.names if name in used and _is_in_std(name)})
    parts = [f"#define FUSER_E4M3FN_OVERFLOW {_e4m3fn_overflow()}"] if "float8" in features else []
    parts += [block.text for block in real]
    parts += ["namespace std {", *(f"using ::{name};" for name in std_names), "}  // namespace std"]
    parts += [block.text for block in chosen if "complex" in block.features]
    return "\n".join(part for part in parts if part) + "\n"


@cache
def _e4m3fn_overflow() -> str:
    """Return e4m3fn's code for a float that is too large, in the installed torch: NaN once, now the largest number."""
    # Only float8 needs torch: the text alone must not cost its import.
    import torch  # noqa: PLC0415
    from torch.utils._python_dispatch import _disable_current_modes  # noqa: PLC0415

    # Kernels are also written while torch.compile traces with fake tensors, which have no values.
    with _disable_current_modes():
        code = torch.tensor([1e6], device="cpu").to(torch.float8_e4m3fn).view(torch.uint8).item()
    return f"0x{code:02x}u"


def _is_in_std(name: str) -> bool:
    return name not in _NOT_IN_STD and not name.isupper() and not name.startswith(("_", "fuser_", "FUSER_"))
