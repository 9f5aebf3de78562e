"""Write docs/api.md: the public names with their signatures and docstrings. ``python docs/api.py`` writes it anew."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fuser

PAGE = Path(__file__).with_name("api.md")
HEAD = """# API

What `import fuser` gives, from its docstrings. `docs/api.py` writes this page, and a test keeps it equal to the code.
"""
# Section -> names; public names that stand in none of them go last.
SECTIONS = {
    "Functors": ("create_jit_fn", "create_multi_output_jit_fn", "jit_fn", "JitFunction", "foreach", "differentiable"),
    "Reductions": ("create_reduction_fn", "ReductionFunction"),
    "Fusing": ("fuse", "FusedFunction", "FusedModule", "fx.FusionPass", "fx.FusionModule", "fx.fuse_graph"),
    "Looking inside": ("explain", "debug_get_fused_kernel_code", "stats", "reset_stats", "n_compiled_kernels"),
    "Switches": (
        "can_fuse_on_cpu",
        "can_fuse_on_gpu",
        "override_can_fuse_on_cpu",
        "override_can_fuse_on_gpu",
        "clear_failures",
        "autotune",
    ),
    "Warm-up and the cache": ("Dim", "warmup", "save_cache", "load_cache"),
    "Groups": (
        "FusionGroup",
        "GroupBuilder",
        "Application",
        "Function",
        "Input",
        "register_fusion",
        "run_fusion",
        "debug_launch_graph",
    ),
}
# What users call of a class; its other methods serve the package itself.
MEMBERS = {
    "JitFunction": ("__call__", "check", "warmup", "signature"),
    "ReductionFunction": ("__call__", "check", "warmup"),
    "FusedFunction": ("__call__", "warmup", "groups", "graph_module"),
    "FusedModule": ("warmup", "groups", "graph_module"),
    "FusionGroup": ("key", "lint", "to_json", "from_json", "to_networkx"),
    "GroupBuilder": ("add_input", "apply", "build"),
}
# Described on pages of their own, or no part of what is called.
ELSEWHERE = {"__version__", "config", "errors", "fx", "library"}
HEADING = re.compile(r"(Args|Returns|Raises|Attributes):")
ENTRY = re.compile(r"(\*{0,2}[\w, ]+): (.*)")


def write_page() -> str:
    """Return the page's text."""
    listed = {name for names in SECTIONS.values() for name in names}
    rest = tuple(name for name in fuser.__all__ if name not in listed | ELSEWHERE)
    parts = [HEAD]
    for title, names in {**SECTIONS, **({"More": rest} if rest else {})}.items():
        parts += [f"## {title}\n", *(part for name in names for part in describe(name))]
    parts += [
        "## Errors\n",
        "All are in `fuser.errors`, under `fuser.errors.FuserError` or, for warnings, `UserWarning`.\n",
    ]
    parts.append("| class | under | when |\n| --- | --- | --- |")
    parts += [
        f"| `{name}` | {', '.join(f'`{base.__name__}`' for base in kind.__bases__)} | {to_markdown(summary_of(kind))} |"
        for name, kind in sorted(vars(fuser.errors).items())
        if name in fuser.errors.__all__
    ]
    return "\n".join(parts) + "\n"


def describe(name: str) -> Iterator[str]:
    """Yield the parts of one name: heading, signature, docstring, and its members."""
    found: Any = fuser
    for part in name.split("."):
        found = getattr(found, part)
    yield f"### {name}\n"
    if not inspect.isclass(found):
        yield f"```text\n{name}{signature_of(found)}\n```\n"
    yield format_docstring(inspect.getdoc(found) or "")
    for member in MEMBERS.get(name, ()):
        item = inspect.getattr_static(found, member)
        function = getattr(item, "__func__", getattr(item, "fget", item))
        is_property = isinstance(item, property) or not callable(function)
        shown = member if is_property else signature_of(function, member.replace("__call__", "(call)"))
        text = inspect.getdoc(item) or inspect.getdoc(function) or ""
        yield f"**`{name.rpartition('.')[2]}.{shown}`**\n".replace(".(call)", "")
        yield format_docstring(text)


def signature_of(function: Any, name: str = "") -> str:
    """Return a signature as it is written, without types."""
    signature = inspect.signature(function)
    # A default that is a mark of its own stands for none.
    plain = [
        item.replace(annotation=item.empty, default=item.empty if type(item.default) is object else item.default)
        for item in signature.parameters.values()
        if item.name != "self"
    ]
    return name + str(signature.replace(parameters=plain, return_annotation=signature.empty))


def format_docstring(text: str) -> str:
    """Return a docstring in Google's style as Markdown: its sections become lists."""
    lines: list[str] = []
    section = ""
    for line in to_markdown(text).splitlines():
        heading, inside = HEADING.fullmatch(line), line.startswith("    ")
        if heading:
            section = heading[1]
            lines += [f"*{section}*\n"]
        elif section and inside:
            entry = ENTRY.fullmatch(line.strip()) if not line.startswith("     ") else None
            is_named = entry is not None and section != "Returns"
            lines.append(f"- `{entry[1]}`: {entry[2]}" if is_named and entry else f"  {line.strip()}")
        else:
            section = section if not line else ""
            lines.append(line)
    return "\n".join(lines).rstrip() + "\n"


def summary_of(kind: type) -> str:
    """Return the first paragraph of a class's docstring, on one line."""
    return " ".join((inspect.getdoc(kind) or "").partition("\n\n")[0].split())


def to_markdown(text: str) -> str:
    """Return a text with its code in single backticks."""
    return text.replace("``", "`")


if __name__ == "__main__":
    PAGE.write_text(write_page(), encoding="utf-8")
