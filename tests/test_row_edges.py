"""Rows that begin anywhere: granules that lie beyond the ends of the operand's memory are not read."""

from __future__ import annotations

import ctypes
import re
from typing import Any

import cuda_emulation
import pytest
import torch
from row_groups import GROUPS

# Every read of a granule, and of an element beside one, is counted where it is not wholly inside.
CHECK = """
extern "C" { const char *fuser_begin, *fuser_limit; int fuser_outside, fuser_inside; }
template <typename G> static inline const G& fuser_seen(const G& at) {
  const auto bytes = reinterpret_cast<const char*>(&at);
  ++(bytes < fuser_begin || bytes + sizeof(G) > fuser_limit ? fuser_outside : fuser_inside);
  return at;
}
"""
READS = re.compile(r"(?<== )granules\[[^\]]*\]|from\[least < left [^\]]*\]")


@pytest.mark.parametrize("offset", [1, 3])
@pytest.mark.parametrize("shape", [(2, 20000), (3, 5000), (9, 1000)])
def test_rows_that_begin_anywhere_read_nothing_beside_them(
    shape: tuple[int, int], offset: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    build, inputs_of = GROUPS["total"]
    base = torch.zeros(offset + shape[0] * shape[1] + 16, dtype=torch.bfloat16)
    x = base[offset : offset + shape[0] * shape[1]].view(shape)
    kernels: list[Any] = []
    own_build = cuda_emulation._build

    def checked(text: str) -> Any:
        if "fuser_entry" not in text:
            return own_build(text)
        head, mark, rest = text.partition("FUSER_INLINE void fuser_load_anywhere(")
        body, end, rest = rest.partition("FUSER_INLINE void fuser_store_anywhere(")
        body = READS.sub(lambda found: f"fuser_seen({found[0]})", body)
        at = head.rindex("template <")
        library = own_build(head[:at] + CHECK + head[at:] + mark + body + end + rest)
        for name, address in (("begin", x.data_ptr()), ("limit", x.data_ptr() + x.nbytes)):
            ctypes.c_void_p.in_dll(library, f"fuser_{name}").value = address
        for name in ("outside", "inside"):
            ctypes.c_int.in_dll(library, f"fuser_{name}").value = 0
        kernels.append(library)
        return library

    monkeypatch.setattr(cuda_emulation, "_build", checked)
    cuda_emulation.run_emulated(build((1,)), inputs_of(x, (1,)))
    assert kernels
    for library in kernels:
        assert ctypes.c_int.in_dll(library, "fuser_outside").value == 0
    assert any(ctypes.c_int.in_dll(library, "fuser_inside").value for library in kernels)
