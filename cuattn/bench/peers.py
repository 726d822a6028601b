"""Who is measured beside cuattn in 16 bit: what is installed, and how each is called.

Arrays are C-contiguous in the axes (batch, seqlen, heads, dim). FlashAttention takes them so; cuDNN
and torch's other backends see them transposed, which costs them nothing; the formula gets copies in
its own order, made beforehand. What a peer lacks is an exception of its own, here or at its first
call.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Protocol

import numpy as np

import cuattn
from cuattn._typing import Array
from cuattn.bench.baselines import Autograd, sdpa
from cuattn.bench.half_formula import BYTES_PER_SCORE, HalfFormula
from cuattn.bench.memory import taken_from_cupy, taken_from_torch
from cuattn.bench.workloads import Workload

#: Every peer, in the order of tables and legends.
TITLES = {
    "cuattn": "cuattn",
    "fa4": "FlashAttention-4",
    "fa3": "FlashAttention-3",
    "cudnn": "cuDNN, by torch's SDPA",
    "fa2": "FlashAttention-2, by torch's SDPA",
    "efficient": "memory-efficient, by torch's SDPA",
    "formula": "N x N formula, CuPy and cuBLAS",
}
BACKENDS = {
    "cudnn": "CUDNN_ATTENTION",
    "fa2": "FLASH_ATTENTION",
    "efficient": "EFFICIENT_ATTENTION",
}
#: Modules that may have a peer's ``flash_attn_func``, each with the distribution it comes in.
MODULES = {
    "fa4": (
        ("flash_attn.cute.interface", "flash-attn-4"),
        ("flash_attn.cute", "flash-attn-4"),
    ),
    "fa3": (
        ("flash_attn_interface", "flash-attn-3"),
        ("fa3_fwd_interface", "fa3-fwd"),  # forward only
    ),
}
#: The formula is left out where its matrices need more.
FORMULA_BYTES = 40 * 2**30


class LackError(Exception):
    """A peer that is not here, or a case that it does not take."""


class Runner(Protocol):
    """One way to compute one workload."""

    def forward(self) -> Any:
        """Out alone."""

    def backward(self) -> Any:
        """The gradients alone, from a forward that was kept."""

    def both(self) -> Any:
        """Out and the gradients."""


@dataclass(frozen=True)
class Peer:
    """One way to compute attention.

    Attributes
    ----------
    name, version : str
        A key of ``TITLES``, and what is installed.
    start : callable
        The runner of a workload on its arrays.
    as_cupy : callable
        One result as a CuPy array in the axes (batch, seqlen, heads, dim).
    taken : callable
        Run a function; its result, and the bytes it took at most.
    """

    name: str
    version: str
    start: Callable[[Workload, Sequence[Array]], Runner]
    as_cupy: Callable[[Any], Array]
    taken: Callable[[Callable[[], Any]], tuple[Any, int]]


class Ours:
    """cuattn, as a user calls it."""

    def __init__(self, q: Array, k: Array, v: Array, dout: Array, *, causal: bool) -> None:
        self.inputs, self.dout, self.causal = (q, k, v), dout, causal

    def forward(self) -> Array:
        """Out alone."""
        return cuattn.attention(*self.inputs, causal=self.causal)

    @cached_property
    def _kept(self) -> tuple[Array, cuattn.Residuals]:
        return cuattn.attention_forward(*self.inputs, causal=self.causal)

    def _differentiate(self, residuals: cuattn.Residuals) -> tuple[Array, Array, Array]:
        grads = cuattn.attention_backward(residuals, self.dout)
        return grads.dq, grads.dk, grads.dv

    def backward(self) -> tuple[Array, Array, Array]:
        """The gradients alone, from a forward that was kept."""
        return self._differentiate(self._kept[1])

    def both(self) -> tuple[Array, Array, Array, Array]:
        """Out and the gradients."""
        out, residuals = cuattn.attention_forward(*self.inputs, causal=self.causal)
        return out, *self._differentiate(residuals)


def find(cupy: Any, names: Iterable[str]) -> tuple[list[Peer], dict[str, str]]:
    """Find cuattn and the peers of these names that are here; why each other one is not."""
    found, missing = [_cuattn(cupy)], {}
    wanted = [name for name in TITLES if name in set(names) - {"cuattn"}]
    with warnings.catch_warnings(action="ignore"):  # importing them warns of this and that
        for name in wanted:
            try:
                found.append(_formula(cupy) if name == "formula" else _of_torch(cupy, name))
            except Exception as error:  # noqa: BLE001 - a broken package is a missing one
                missing[name] = reason(error)
    return found, missing


def reason(error: Exception) -> str:
    """An error in one line of a table's note."""
    text = " ".join(str(error).split()) or "no message"
    text = text if len(text) < 500 else text[:500] + " ..."
    return text if isinstance(error, LackError) else f"{type(error).__name__}: {text}"


def _cuattn(cupy: Any) -> Peer:
    def start(workload: Workload, arrays: Sequence[Array]) -> Runner:
        return Ours(*arrays, causal=workload.causal)

    return Peer("cuattn", cuattn.__version__, start, _same, partial(taken_from_cupy, cupy))


def _same(array: Array) -> Array:
    return array


def _formula(cupy: Any) -> Peer:
    def start(workload: Workload, arrays: Sequence[Array]) -> Runner:
        needed = BYTES_PER_SCORE * workload.num_scores
        if needed > FORMULA_BYTES:
            raise LackError(f"its matrices need {needed:,} bytes, more than {FORMULA_BYTES:,}")
        own = [cupy.ascontiguousarray(array.swapaxes(1, 2)) for array in arrays]
        return HalfFormula(cupy, *own, causal=workload.causal)

    def as_cupy(array: Array) -> Array:
        return array.swapaxes(1, 2)

    version = f"CuPy {cupy.__version__}"
    return Peer("formula", version, start, as_cupy, partial(taken_from_cupy, cupy))


def _of_torch(cupy: Any, name: str) -> Peer:
    """A peer that takes torch tensors, on the memory of CuPy's arrays."""
    torch = importlib.import_module("torch")
    if not torch.cuda.is_available():
        raise LackError(f"torch {torch.__version__} finds no CUDA device")
    version = f"torch {torch.__version__}"
    if name in BACKENDS:
        if name == "cudnn":
            version = f"cuDNN {torch.backends.cudnn.version()}, {version}"
        start = partial(_start_sdpa, torch, BACKENDS[name])
    else:
        function, own = _flash_attn_func(name)
        version = f"{own}, {version}"
        start = partial(_start_flash, torch, function)

    def as_cupy(tensor: Any) -> Array:
        return from_torch(cupy, tensor.transpose(1, 2) if name in BACKENDS else tensor)

    return Peer(name, version, start, as_cupy, partial(taken_from_torch, torch))


def _start_sdpa(torch: Any, backend: str, workload: Workload, arrays: Sequence[Array]) -> Autograd:
    tensors = [to_torch(torch, array).transpose(1, 2) for array in arrays]
    return Autograd(torch, sdpa(torch, backend, causal=workload.causal), *tensors)


def _start_flash(
    torch: Any, flash_attn_func: Callable[..., Any], workload: Workload, arrays: Sequence[Array]
) -> Autograd:
    tensors = [to_torch(torch, array) for array in arrays]

    def with_splits(q: Any, k: Any, v: Any, **splits: int) -> Any:
        result = flash_attn_func(q, k, v, causal=workload.causal, **splits)
        return result[0] if isinstance(result, tuple) else result  # FA4: with lse

    if workload.seqlen_q < workload.seqlen_k:
        # Its own choice of splits (0) is not the default and not on every device.
        chosen = Autograd(torch, partial(with_splits, num_splits=0), *tensors)
        try:
            chosen.forward()
        except Exception:  # noqa: BLE001 - then as it is by default
            pass
        else:
            return chosen
    return Autograd(torch, with_splits, *tensors)


def _flash_attn_func(name: str) -> tuple[Callable[..., Any], str]:
    """The function of the first module that has it, and the version of that."""
    troubles = []
    for module, distribution in MODULES[name]:
        try:
            function = importlib.import_module(module).flash_attn_func
        except Exception as error:  # noqa: BLE001 - a library that does not load has any of many
            troubles.append(f"{module}: {reason(error)}")
        else:
            return function, f"{distribution} {_version(distribution)}"
    raise LackError("; ".join(troubles))


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"


def to_torch(torch: Any, array: Array) -> Any:
    """The same memory as a tensor; as integers over DLPack, which every version takes."""
    bits = torch.from_dlpack(array.view(np.dtype(f"i{array.itemsize}")))
    return bits.view(getattr(torch, array.dtype.name))


def from_torch(cupy: Any, tensor: Any) -> Array:
    """The same memory as an array."""
    name = str(tensor.dtype).removeprefix("torch.")
    bits = tensor.detach().view(importlib.import_module("torch").int16)
    return cupy.from_dlpack(bits).view(np.dtype(name))
