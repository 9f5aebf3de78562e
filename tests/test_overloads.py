"""Which of ATen's pointwise overloads groups take in: all that are tagged so, but those that have a reason here."""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch

from fuser.ops.binding import _functions

# Patterns of names, and why torch's kernel serves.
REASONS = {
    r"special_(\w+_polynomial_\w+|airy_ai|\w*bessel_\w+)\..*": "a series or a recurrence of ATen's own",
    r"special_(erfcx|i0e|i1|i1e|log_ndtr|ndtri|entr|zeta)\..*": "likewise",
    r"(digamma|polygamma|mvlgamma|lgamma|erfinv|i0|igamma|igammac|sinc)\.default": "likewise",
    r"(xlogy\.Scalar_|special_xlog1py\.).*": "on the CPU, libmvec's logarithm times a number is farther from float64",
    r"(logit|logaddexp2)\.default": "likewise",
    r"(gcd|lcm)\.default": "a loop as long as its numbers ask for",
    r"nextafter\.default": "steps of the dtype, not of the type that kernels compute in",
    r"round\.decimals": "likewise, for the powers of ten",
    r"ldexp\.Tensor": "by integers a kernel of its own since torch 2.13, a product with a power before",
    r"frexp\.Tensor": "two results of different dtypes",
    r"angle\.default": "CUDA has none for half and bfloat16",
    r"equal\.default": "returns no tensor",
    r"(conj_physical|positive|rrelu|float_power)\..*": "no ATen graph has them: torch writes them in other ops",
    r"_conj_physical\.default": "complex numbers alone",
}


def pointwise() -> Iterator[torch._ops.OpOverload]:
    """Yield the functional overloads that ATen tags as pointwise."""
    names = (name.split("::")[1].split(".")[0] for name in torch._C._dispatch_get_all_op_names() if "aten::" in name)
    for packet in sorted(set(names)):
        found = getattr(torch.ops.aten, packet, None)
        for overload in (getattr(found, name) for name in (found.overloads() if found else ())):
            if torch.Tag.pointwise in overload.tags and not overload._schema.is_mutable:
                yield overload


def test_all_pointwise_overloads_are_bound_or_have_a_reason() -> None:
    found = {str(overload).removeprefix("aten."): overload in _functions() for overload in pointwise()}
    # So many in torch 2.11, 241 in 2.13.
    assert len(found) >= 239
    reasons = {name for name in found for pattern in REASONS if re.fullmatch(pattern, name)}
    assert {name for name, is_bound in found.items() if not is_bound} == reasons
