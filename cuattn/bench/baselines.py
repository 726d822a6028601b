"""What cuattn is compared with: the N x N formula as a user writes it in CuPy, and torch's SDPA.

Arrays have the axes (batch, heads, seqlen, dim), C-contiguous, which suits both best.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import math
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

from cuattn._typing import Array

Passes = dict[str, Callable[[], object]]


class Formula:
    """Attention with every score in memory: matmul, scale, max, exp, sum, divide, matmul."""

    def __init__(self, xp: Any, q: Array, k: Array, v: Array, dout: Array, *, causal: bool) -> None:
        self.xp, self.q, self.k, self.v, self.dout = xp, q, k, v, dout
        self.scale = q.dtype.type(1 / math.sqrt(q.shape[-1]))
        self.hidden = ~xp.tri(q.shape[-2], k.shape[-2], dtype=bool) if causal else None
        self.P, self.out, self.lse = self._attend()

    def _scores(self) -> Array:
        scores = self.xp.matmul(self.q, self.k.swapaxes(-1, -2))
        scores *= self.scale
        if self.hidden is not None:
            scores = self.xp.where(self.hidden, scores.dtype.type(-math.inf), scores)
        return scores

    def _attend(self) -> tuple[Array, Array, Array]:
        scores = self._scores()
        m = scores.max(axis=-1, keepdims=True)
        scores -= m
        P = self.xp.exp(scores, out=scores)
        l = P.sum(axis=-1, keepdims=True)  # noqa: E741 - the field's name
        P /= l
        return P, self.xp.matmul(P, self.v), m + self.xp.log(l)

    def _differentiate(self, P: Array, out: Array) -> tuple[Array, Array, Array]:
        dv = self.xp.matmul(P.swapaxes(-1, -2), self.dout)
        dS = self.xp.matmul(self.dout, self.v.swapaxes(-1, -2))
        dS -= (self.dout * out).sum(axis=-1, keepdims=True)
        dS *= P
        dS *= self.scale
        return self.xp.matmul(dS, self.k), self.xp.matmul(dS.swapaxes(-1, -2), self.q), dv

    def forward(self) -> Array:
        """Out alone."""
        return self._attend()[1]

    def backward_stored(self) -> tuple[Array, Array, Array]:
        """The gradients from the P that the forward kept."""
        return self._differentiate(self.P, self.out)

    def backward_again(self) -> tuple[Array, Array, Array]:
        """The gradients from lse, with P computed again: for who is short of memory."""
        P = self._scores()
        P -= self.lse
        return self._differentiate(self.xp.exp(P, out=P), self.out)

    def both(self) -> tuple[Array, Array, Array]:
        """Forward, then backward from its P."""
        P, out, _ = self._attend()
        return self._differentiate(P, out)

    def passes(self) -> Iterator[tuple[str, Passes]]:
        """Two ways to differentiate, each with every pass that it differs in."""
        yield (
            "formula",
            {"forward": self.forward, "backward": self.backward_stored, "both": self.both},
        )
        yield "formula, P again", {"backward": self.backward_again}


class Autograd:
    """A differentiable function of torch tensors q, k, v, pass by pass."""

    def __init__(
        self, torch: Any, function: Callable[..., Any], q: Any, k: Any, v: Any, dout: Any
    ) -> None:
        self.torch, self.function, self.dout = torch, function, dout
        self.inputs = [each.detach().requires_grad_() for each in (q, k, v)]

    def forward(self) -> Any:
        """Out alone, nothing kept for a backward."""
        with self.torch.no_grad():
            return self.function(*self.inputs)

    @cached_property
    def _kept(self) -> Any:
        return self.function(*self.inputs)

    def backward(self) -> tuple[Any, ...]:
        """The gradients alone, from a forward that was kept."""
        gradients: tuple[Any, ...] = self.torch.autograd.grad(
            self._kept, self.inputs, self.dout, retain_graph=True
        )
        return gradients

    def both(self) -> tuple[Any, ...]:
        """Out and the gradients."""
        out = self.function(*self.inputs)
        return out.detach(), *self.torch.autograd.grad(out, self.inputs, self.dout)


def torch_or_none() -> Any:
    """Torch, where it is importable and finds a device."""
    if importlib.util.find_spec("torch") is None:
        return None
    torch = importlib.import_module("torch")
    return torch if torch.cuda.is_available() else None


def sdpa(torch: Any, backend: str, *, causal: bool) -> Callable[..., Any]:
    """One backend of torch's scaled_dot_product_attention; axes (batch, heads, seqlen, dim)."""
    attention = importlib.import_module("torch.nn.attention")
    chosen = getattr(attention.SDPBackend, backend)

    def function(q: Any, k: Any, v: Any) -> Any:
        with attention.sdpa_kernel(chosen):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

    return function


def torch_passes(
    torch: Any, arrays: tuple[Array, ...], *, causal: bool
) -> Iterator[tuple[str, Passes]]:
    """Every backend of torch's scaled_dot_product_attention that takes these arrays."""
    tensors = [torch.from_dlpack(array) for array in arrays]
    for name in ("EFFICIENT_ATTENTION", "MATH"):
        its = Autograd(torch, sdpa(torch, name, causal=causal), *tensors)
        with contextlib.suppress(RuntimeError):  # this backend lacks the dtype
            its.backward()
            title = f"torch {name.lower().removesuffix('_attention')}"
            yield title, {"forward": its.forward, "backward": its.backward, "both": its.both}
