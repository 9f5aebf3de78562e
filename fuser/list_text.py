"""The part of a kernel over lists of tensors that devices have in common: how a block finds its tensors.

Such a kernel is one for dense operands whose struct, ``fuser_args``, is made by the kernel itself: from tables of
addresses and sizes, for the position of the lists and the chunk of its elements that a block takes.
"""

from __future__ import annotations

from fuser.kernel_source import Loop

__all__ = ["emit_lists", "most_positions"]


def most_positions(operands: int, numbers: int, argument_bytes: int) -> int:
    """Return how many positions of lists one launch takes.

    Args:
        operands: tensors of one position.
        numbers: what the kernel takes by value, or computes from where a block begins.
        argument_bytes: the largest argument struct of a launch.
    """
    # Numbers have two fields at most; the struct's own are the count, the zero and the number of blocks.
    head = 8 * (operands + 2 * numbers + 3)
    # Addresses, size and first block; an even number, so that all of the struct is whole fields of 8 bytes.
    return max((argument_bytes - head) // (8 * operands + 12) // 2 * 2, 0)


def emit_lists(loop: Loop) -> str:
    """Write the argument struct, and what makes of it the one of a block.

    ::

        struct fuser_lists {
          // What all positions have in common; numel is the number of blocks.
          fuser_args each;
          int64_t count;
          int64_t numel[448];
          float* out0[448];
          const float* in0[448];
          unsigned int first[448];
        };

        // The elements that a block takes: a chunk of the last position whose first block is not beyond it.
        FUSER_INLINE fuser_args fuser_find_part(const fuser_lists& lists, unsigned int block) {
          int at = 0;
          for (int step = 256; step; step /= 2)
            if (at + step < lists.count && lists.first[at + step] <= block) at += step;
          const int64_t begin = static_cast<int64_t>(block - lists.first[at]) * 2048;
          fuser_args a = lists.each;
          a.numel = lists.numel[at] - begin < 2048 ? lists.numel[at] - begin : 2048;
          a.out0 = lists.out0[at] + begin;
          a.in0 = lists.in0[at] + begin;
          return a;
        }
    """
    most, chunk = loop.positions, loop.chunk
    in_memory = [operand for operand in loop.operands if not operand.is_counter]
    tables = "\n".join(f"  {operand.pointer} {operand.name}[{most}];" for operand in in_memory)
    parts = [f"a.{item.name} = lists.{item.name}[at]{' + begin' if item.inner else ''};" for item in in_memory]
    parts += ["a.begin = begin;"] * ("begin" in loop.geometry)
    moves = "\n".join(f"  {part}" for part in parts)
    return f"""
struct fuser_lists {{
  // What all positions have in common; numel is the number of blocks.
  fuser_args each;
  int64_t count;
  int64_t numel[{most}];
{tables}
  unsigned int first[{most}];
}};

// The elements that a block takes: a chunk of the last position whose first block is not beyond it.
FUSER_INLINE fuser_args fuser_find_part(const fuser_lists& lists, unsigned int block) {{
  int at = 0;
  for (int step = {1 << (most - 1).bit_length() - 1}; step; step /= 2)
    if (at + step < lists.count && lists.first[at + step] <= block) at += step;
  const int64_t begin = static_cast<int64_t>(block - lists.first[at]) * {chunk};
  fuser_args a = lists.each;
  a.numel = lists.numel[at] - begin < {chunk} ? lists.numel[at] - begin : {chunk};
{moves}
  return a;
}}
"""
