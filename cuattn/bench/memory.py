"""Bytes of a call by the count of the allocator that it uses, CuPy's or torch's."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def taken_from_cupy(cupy: Any, function: Callable[[], T]) -> tuple[T, int]:
    """A result, and what a new pool grew to: freed blocks stay in it, so no less than the peak."""
    pool = cupy.cuda.MemoryPool()
    with cupy.cuda.using_allocator(pool.malloc):
        result = function()
    return result, pool.total_bytes()


def taken_from_torch(torch: Any, function: Callable[[], T]) -> tuple[T, int]:
    """A result, and the peak of what torch's allocator gave out beyond what it had before."""
    gc.collect()  # what an earlier call has left in cycles is not to be freed during this one
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = function()
    return result, torch.cuda.max_memory_allocated() - before


def release(cupy: Any) -> None:
    """Give back what both allocators keep for later: each shall find the memory that it needs."""
    gc.collect()  # an error's traceback may hold arrays
    cupy.get_default_memory_pool().free_all_blocks()
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.cuda.empty_cache()
