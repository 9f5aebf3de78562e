"""Row loops in CUDA of few long rows, in the order of torch's kernels that have one block for each.

What each of torch's threads adds, one element after another, takes as long as that many additions. Here several blocks
share a row, and each does the work of some of those threads, which take neighbouring vectors: one of its own adds for
each, and all others compute what is added, a tile ahead, in shared memory.
"""

from __future__ import annotations

from fuser.cuda.ordered_elements import Site, unrolled
from fuser.cuda.rows_ordered import OrderedAlongText
from fuser.kernel_source import indent

__all__ = ["ChainedText"]


class ChainedText(OrderedAlongText):
    """Writes such a kernel, of one pass."""

    def kernel(self) -> list[str]:
        """Write the kernel: a tile is what a block has of R rounds of torch's threads."""
        step, last = self.loop.passes
        assert step.element is not None, "it reduces something"
        kind, pieces = "fuser_pass0::part", self.tuning.piece
        place = "(round + u * (P / C) + p / C) * S + piece * C + p % C"
        site = Site("", "V", "U", f"({place}) * V", "n < length", "k")
        inputs = self._inputs(step.element)
        load = ["{", *indent(self._load_at(inputs, site)), "}"]
        produce = [
            *unrolled(
                [
                    f"{kind} own[V];",
                    "#pragma unroll",
                    "for (int k = 0; k < V; ++k) own[k] = pass0.identity();",
                    *self._compute_one(step, step.element, site, {}),
                    "auto& run = tiles[tile % 2][p % C][u * (P / C) + p / C];",
                    "#pragma unroll",
                    "for (int k = 0; k < V; ++k) run.items[k] = own[k];",
                ],
                site,
            ),
            # Those of the next tile are on their way while others add.
            "round += R;",
            *load,
        ]
        return [
            *self._head(),
            f"  constexpr int C = S / {pieces}, P = T - 32, R = U * P / C;",
            f"  const fuser_index length = {self.length}, at = blockIdx.x / {pieces}, rounds = length / (S * V);",
            f"  const int t = threadIdx.x, p = t - 32, piece = blockIdx.x % {pieces};",
            "  constexpr bool is_row = true;",
            "  const fuser_row row = fuser_find(a, at);",
            *indent([*self._row_variables(), *self._row_part(step, "piece == 0 && t == 0")]),
            "  const fuser_pass0 pass0{a};",
            f"  struct alignas(16) fuser_run {{ {kind} items[V]; }};",
            "  // No two threads that add read the same banks.",
            "  __shared__ fuser_run tiles[2][C][R + 1];",
            f"  {kind} total0 = pass0.identity();",
            "  fuser_index round = 0;",
            *indent([self._declare(item, site) for item in inputs]),
            "  if (p >= 0)",
            *indent(load, 2),
            "  for (fuser_index tile = 0; tile * R < rounds + R; ++tile) {",
            "    if (p >= 0) {",
            *indent(produce, 3),
            "    } else if (t < C && tile > 0) {",
            "      const fuser_run* const runs = tiles[(tile - 1) % 2][t];",
            "      const fuser_index left = rounds - (tile - 1) * R;",
            "      const int count = left < R ? static_cast<int>(left) : R;",
            "#pragma unroll 16",
            "      for (int r = 0; r < count; ++r) {",
            "        const fuser_run run = runs[r];",
            "#pragma unroll",
            "        for (int k = 0; k < V; ++k) total0 = pass0.combine(total0, run.items[k]);",
            "      }",
            "    }",
            "    __syncthreads();",
            "  }",
            f"  const fuser_workspace<{kind}, C> space(a.workspace, at, {pieces}, 1);",
            "  if (t < C) space.piece(1).put(piece * C + t, total0);",
            f"  if (!fuser_is_last(space.head, {pieces}) || t >= 32) return;",
            f"  {kind} warp[X];",
            "#pragma unroll",
            "  for (int i = 0; i < X; ++i) warp[i] = space.piece(1).get(t % Y * X + i);",
            "  total0 = fuser_halve_lanes<Y / 2, 1>(pass0, fuser_halve_own<X>(pass0, warp));",
            *indent(self._row_part(last, "t == 0")),
            "}",
        ]
