"""ATen's order of sums in eager torch, straight from the schedule's words: what kernels and torch are compared with."""

from __future__ import annotations

import torch

from fuser.orders import Schedule


def sum_rows(rows: torch.Tensor, schedule: Schedule, shifts: torch.Tensor | None = None) -> torch.Tensor:
    """Add the elements of each row, [rows, length], in the dtype of ``rows``.

    Args:
        rows: the elements, in the order in which ATen numbers them.
        schedule: the order.
        shifts: for each row by how many elements its beginning is past an aligned one; None: by none.
    """
    count, length = rows.shape
    slots, own, vector = schedule.slots, schedule.accumulators, schedule.vector
    number = torch.arange(length, device=rows.device).expand(count, length)
    if vector > 1:
        shift = torch.zeros(count, 1, dtype=torch.int64, device=rows.device) if shifts is None else shifts[:, None]
        granule, whole = (slots, vector * slots) if schedule.is_even else (vector, vector)
        head = torch.where(shift > 0, granule - shift, 0)
        at = number - head
        end = length - head
        tail = end - end % whole
        slot = torch.where(at < 0, shift + number, torch.where(at >= tail, (at - tail) % slots, at // vector % slots))
        accumulator = torch.where((at < 0) | (at >= tail), 0, at % vector % own)
        # The head's turn is the first one. Where one accumulator takes a vector, its elements have turns of their own.
        each = 1 if own == vector else vector
        last = each * (length // (slots * vector) + 2)
        inside = at // (vector * slots) * each + (at % vector if each > 1 else 0) + 1
        turn = torch.where(at < 0, 0, torch.where(at >= tail, last + (at - tail) // slots, inside))
        last += vector
    else:
        slot, accumulator, turn = number % slots, number // slots % own, number // (slots * own)
        last = max(length - 1, 0) // (slots * own)
    values = torch.zeros(count, slots * own, dtype=rows.dtype, device=rows.device)
    place = slot * own + accumulator
    row = torch.arange(count, device=rows.device)[:, None].expand(count, length)
    for step in range(last + 1):
        chosen = turn == step
        values[row[chosen], place[chosen]] += rows[chosen]
    lanes = values.view(count, slots, own)
    total = lanes[..., 0].clone()
    for index in range(1, own):
        total = total + lanes[..., index]
    total = total.view(count, schedule.blocks, schedule.y, schedule.x)
    if schedule.is_serial:
        return _in_order(_in_order(total)).reshape(count)
    total = _halves(_halves(total, 3), 2).reshape(count, schedule.blocks)
    if schedule.blocks == 1:
        return total[:, 0]
    threads = schedule.x * schedule.y
    parts = torch.zeros(count, threads, dtype=rows.dtype, device=rows.device)
    for begin in range(0, schedule.blocks, threads):
        part = total[:, begin : begin + threads]
        parts[:, : part.shape[1]] += part
    return _halves(_halves(parts.view(count, schedule.y, schedule.x), 1), 2).reshape(count)


def _halves(values: torch.Tensor, dim: int) -> torch.Tensor:
    while values.shape[dim] > 1:
        half = values.shape[dim] // 2
        values = values.narrow(dim, 0, half) + values.narrow(dim, half, half)
    return values


def _in_order(values: torch.Tensor) -> torch.Tensor:
    total = values[..., 0]
    for index in range(1, values.shape[-1]):
        total = total + values[..., index]
    return total
