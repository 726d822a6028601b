"""Exact attention, forward and backward, for CuPy and NumPy arrays.

Importing this package touches no GPU and needs no CuPy.
"""

from cuattn.attention import (
    attention,
    attention_backward,
    attention_forward,
    attention_vjp,
)
from cuattn.embed import KernelLaunch, Kernels, kernels
from cuattn.errors import (
    ArgumentError,
    CompileError,
    CuattnError,
    DTypeError,
    UnsupportedError,
)
from cuattn.executable import Executable, plan
from cuattn.explain import explain
from cuattn.residuals import Gradients, Residuals
from cuattn.states import merge_states, merge_states_vjp

__version__ = "0.1.0"

__all__ = [
    "ArgumentError",
    "CompileError",
    "CuattnError",
    "DTypeError",
    "Executable",
    "Gradients",
    "KernelLaunch",
    "Kernels",
    "Residuals",
    "UnsupportedError",
    "__version__",
    "attention",
    "attention_backward",
    "attention_forward",
    "attention_vjp",
    "explain",
    "kernels",
    "merge_states",
    "merge_states_vjp",
    "plan",
]
