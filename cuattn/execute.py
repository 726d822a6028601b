"""Plans meet arrays: NumPy goes to the tiled CPU engine, CuPy to compiled kernels on its stream.

With ``precompile`` the only file that knows both planning and jit. Arrays arrive in the caller's
layout, outputs allocated. The CPU engine gets views in the canonical axes; a kernel needs none of
an array but its address, the strides are in the problem.
"""

from __future__ import annotations

import sys
import threading
from array import array
from functools import cache
from typing import Any

import numpy as np

from cuattn._arrays import Layout, side_by_side
from cuattn._typing import Array
from cuattn.abi import structs
from cuattn.abi.template import Template
from cuattn.cpu import tiled
from cuattn.jit.cache import build
from cuattn.jit.compile import CompileOptions, arch_for_device, debugging
from cuattn.jit.launch import current_stream, load
from cuattn.jit.replay import Replay
from cuattn.jit.source import Unit, make_unit
from cuattn.planning.device import Device
from cuattn.planning.plan import ITEMSIZE, KernelSpec, Plan, parameters
from cuattn.planning.problem import AttentionProblem
from cuattn.planning.select import plan_for


def unit_of(spec: KernelSpec) -> Unit:
    """The translation unit of a specialisation."""
    return make_unit(
        spec.name,
        header=spec.header,
        entry=spec.entry,
        config=(getattr(structs, spec.config_struct), dict(spec.config)),
        params=spec.params_struct,
        num_threads=spec.num_threads,
        min_blocks_per_sm=spec.min_blocks,
    )


@cache
def cuda_device(device_id: int) -> Device:
    """What a plan needs to know of a CUDA device of this process."""
    device = sys.modules["cupy"].cuda.Device(device_id)
    attributes = device.attributes
    capability = device.compute_capability  # "90" for 9.0: the minor version is one digit
    return Device(
        arch_for_device(int(capability[:-1]), int(capability[-1])),
        attributes["MultiProcessorCount"],
        attributes["MaxSharedMemoryPerBlockOptin"],
    )


class LoadedPlan:
    """A plan with its kernels loaded on one device; calling it only allocates and launches."""

    def __init__(self, plan: Plan, device_id: int) -> None:
        self.plan = plan
        self.device_id = device_id
        struct = structs.FwdParams if plan.problem.op == "forward" else structs.BwdParams
        self._template = Template(struct, parameters(plan))
        self._workspace, self.workspace_bytes = _places(plan)
        units = [unit_of(launch.kernel) for launch in plan.launches]
        for _ in build(units, CompileOptions(plan.device.arch, lineinfo=debugging())):
            pass  # all of a plan side by side, before `load` asks for each
        # Held, for a launcher knows no more of its function than the address.
        self._kernels = [
            (load(unit, plan.device.arch, launch.kernel.smem_bytes), launch.grid)
            for unit, launch in zip(units, plan.launches, strict=True)
        ]
        self._launches = [kernel.launcher(grid) for kernel, grid in self._kernels]
        # Nothing to save with one launch, and debugging waits for each.
        several = len(self._kernels) > 1 and not debugging()
        self._replay = Replay(self._kernels) if several else None

    def __call__(self, addresses: dict[str, int], workspace: int = 0) -> None:
        """Launch on CuPy's current stream; the device must be current.

        ``addresses`` are those of all arrays by their names in the parameter struct, in the same
        order at every call, for a graph is found by them; those of the workspace are added, which
        has ``workspace_bytes`` at its address, or is made where that is 0.
        """
        if self.workspace_bytes and not workspace:
            # Freed when this returns: what is on the stream by then still finds it as it is.
            memory = sys.modules["cupy"].cuda.alloc(self.workspace_bytes)
            workspace = memory.ptr
        stream = current_stream(self.device_id)
        if self._replay is not None:
            its = (*addresses.values(), workspace)  # all that differs from call to call
            if self._replay.launch(stream, its, lambda: self._arguments(addresses, workspace)):
                return
        arguments = self._arguments(addresses, workspace)
        at = arguments.buffer_info()[0]
        for launch in self._launches:
            launch(stream, at, 0)

    def _arguments(self, addresses: dict[str, int], workspace: int) -> array[int]:
        """What the kernels take: these arrays, and the workspace that begins there."""
        for name, offset in self._workspace:
            addresses[name] = workspace + offset
        return self._template.arguments(addresses)


def _places(plan: Plan) -> tuple[list[tuple[str, int]], int]:
    """The byte at which each buffer of the workspace begins in one allocation, and its size."""
    itemsize = ITEMSIZE[plan.problem.accumulator]
    begins, end = side_by_side(size * itemsize for _, size in plan.workspace)
    names = (name for name, _ in plan.workspace)
    return list(zip(names, begins, strict=True)), end


# By the identity of a problem, which its plan keeps alive, and the device: hashing a
# problem costs as much as all else that is looked up. Equal problems that are two objects have two.
_loaded: dict[tuple[int, int], LoadedPlan] = {}
_lock = threading.RLock()  # the garbage collector may call in
_MAX_LOADED = 4096


def loaded_plan(problem: AttentionProblem, device_id: int) -> LoadedPlan:
    """The plan of a problem on the current device, kept for the next call like this one."""
    key = id(problem), device_id
    found = _loaded.get(key)
    if found is None:
        made = LoadedPlan(plan_for(problem, cuda_device(device_id)), device_id)
        with _lock:
            found = _loaded.setdefault(key, made)  # unless another thread was first
            if len(_loaded) > _MAX_LOADED:
                # why the oldest: a dict keeps the order of insertion; kernels stay loaded in jit
                del _loaded[next(iter(_loaded))]
    return found


def forget() -> None:
    """Drop every loaded plan: for tests that choose among the families."""
    with _lock:
        _loaded.clear()


def forward(
    problem: AttentionProblem,
    layout: Layout,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array | None,
    workspace: int = 0,
) -> None:
    """Write out, and lse unless it is None; workspace as ``LoadedPlan`` takes it."""
    if isinstance(q, np.ndarray):
        if lse is None:
            shape = (problem.batch, problem.num_heads_q, problem.seqlen_q)
            lse = np.empty(shape, problem.accumulator)
        else:
            lse = layout.lse_view(lse)
        view = layout.view
        tiled.forward(problem, view(q), view(k), view(v), view(out), lse)
        return
    addresses = {
        "q": q.data.ptr,
        "k": k.data.ptr,
        "v": v.data.ptr,
        "out": out.data.ptr,
        "lse": 0 if lse is None else lse.data.ptr,
    }
    loaded_plan(problem, q.data.device_id)(addresses, workspace)


def backward(
    problem: AttentionProblem,
    layout: Layout,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    dout: Array | None,
    dlse: Array | None,
    dq: Array | None,
    dk: Array | None,
    dv: Array | None,
    workspace: int = 0,
) -> None:
    """Write dq, dk and dv; each may be None, then it is not asked for. dout and dlse None are 0.

    On a device a problem without strides of dout (``Layouts.dout`` is None) may be given a dout
    that holds a single zero.
    """
    if isinstance(q, np.ndarray):
        view = layout.view
        tiled.backward(
            problem,
            view(q),
            view(k),
            view(v),
            view(out),
            layout.lse_view(lse),
            None if dout is None else view(dout),
            None if dlse is None else layout.lse_view(dlse),
            dq=None if dq is None else view(dq),
            dk=None if dk is None else view(dk),
            dv=None if dv is None else view(dv),
        )
        return
    if dout is None:
        dout = zero_dout(out.dtype)
    addresses = {
        "q": q.data.ptr,
        "k": k.data.ptr,
        "v": v.data.ptr,
        "out": out.data.ptr,
        "lse": lse.data.ptr,
        "dout": dout.data.ptr,
        "dlse": 0 if dlse is None else dlse.data.ptr,
        "dq": 0 if dq is None else dq.data.ptr,
        "dk": 0 if dk is None else dk.data.ptr,
        "dv": 0 if dv is None else dv.data.ptr,
    }
    loaded_plan(problem, q.data.device_id)(addresses, workspace)


def zero_dout(dtype: np.dtype[Any]) -> Array:
    """One zero on the current device; strides of 0 make a whole array of it."""
    return sys.modules["cupy"].zeros(1, dtype)
