"""Kernels for runtimes of their own: source, machine code, launch and parameters of one call.

What ``execute`` gives to CuPy is here as plain data: a program that can load a cubin and launch it
needs neither CuPy nor Python when it runs.
"""

from __future__ import annotations

import numbers
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, overload

from cuattn._arrays import ALIGNMENT, check_aligned, spec_of
from cuattn._foreign import taken, taken_to_write
from cuattn._typing import Array
from cuattn.abi import structs
from cuattn.abi.emit import host_header, is_cpp_name, pass_header
from cuattn.abi.template import pointer_offsets
from cuattn.abi.types import Struct
from cuattn.attention import prepare, takes_options
from cuattn.errors import ArgumentError, DTypeError, explain_argument
from cuattn.execute import cuda_device, unit_of
from cuattn.jit.compile import CompileOptions
from cuattn.jit.source import flattened
from cuattn.planning.device import known_device
from cuattn.planning.options import check_flag, options_of
from cuattn.planning.plan import ITEMSIZE, Plan, parameters
from cuattn.planning.select import plan_for
from cuattn.planning.validate import backward_call, names_in
from cuattn.precompile import build

#: Pointers to what a call is given or gives; the others are its workspace.
_ARRAYS = frozenset({"q", "k", "v", "out", "lse", "dout", "dlse", "dq", "dk", "dv"})


@dataclass(frozen=True, slots=True)
class KernelLaunch:
    """One kernel of a pass, and how it is launched.

    Attributes
    ----------
    name : str
        The function in the module (``extern "C"``).
    source : str
        CUDA C++ in one text, which includes nothing.
    options : tuple of str
        For NVRTC, or ``cupy.RawModule(code=source, options=options)``; the target is left out.
    cubin : bytes
        The module, compiled for the target.
    grid, block : (int, int, int)
        Blocks, and threads of a block.
    smem_bytes : int
        Dynamic shared memory of a block; above 48 KB the function has to be told.
    """

    name: str
    source: str
    options: tuple[str, ...]
    cubin: bytes
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    smem_bytes: int


class Kernels:
    """The kernels of a pass, launched in order on one stream with the same parameters.

    A sequence of ``KernelLaunch``; empty where there is nothing to compute.

    Attributes
    ----------
    op : {"forward", "backward"}
    arch : str
        The target of the cubins, as "sm_90a".
    struct : str
        The parameter struct that every kernel takes by value: "FwdParams" or "BwdParams", declared
        in ``kernels_cu/base/abi.cuh`` and, for host programs, in what ``save`` writes.
    pointers : mapping of str to int
        The byte in the struct at which each address lies, by name: the arrays, and the workspace.
    workspace : mapping of str to int
        Bytes of device memory that each buffer takes beyond the arrays, aligned to 256.
    """

    def __init__(self, plan: Plan, launches: Iterable[KernelLaunch]) -> None:
        problem = plan.problem
        self._launches = tuple(launches)
        self._struct: Struct = structs.FwdParams if problem.op == "forward" else structs.BwdParams
        self._values = parameters(plan)
        self.op, self.arch, self.struct = problem.op, plan.device.arch, self._struct.name
        size = ITEMSIZE[problem.accumulator]
        sizes = {name: elements * size for name, elements in plan.workspace if elements}
        self.workspace: Mapping[str, int] = MappingProxyType(sizes)
        arrays = ["q", "k", "v", "out", "lse"]
        if self.op == "backward":
            arrays += ["dout", "dlse", *("d" + name for name in problem.wrt)]
        used = {*arrays, *self.workspace}
        places = pointer_offsets(self._struct).items()
        its = {name: offset for name, offset in places if name in used}
        self.pointers: Mapping[str, int] = MappingProxyType(its)
        of_out = dict.fromkeys(("out", "dout"), ITEMSIZE[problem.out_dtype])
        of_rows = dict.fromkeys(("lse", "dlse"), size)
        #: Pointers that may be null: what they would hold is not wanted, is 0, or has no elements.
        self._optional = {"lse", "dlse"} if self.op == "forward" else {"dlse"}
        if problem.batch * problem.seqlen_q * problem.num_heads_q == 0:
            self._optional |= {"q", "out", "lse", "dout", "dq"}
        if problem.batch * problem.seqlen_k * problem.num_heads_kv == 0:
            self._optional |= {"k", "v", "dk", "dv"}
        self._itemsizes = dict.fromkeys(arrays, ITEMSIZE[problem.dtype]) | of_out | of_rows

    def __repr__(self) -> str:
        names = ", ".join(each.name for each in self)
        return f"<cuattn.Kernels: {self.op} on {self.arch}: {names or 'nothing to launch'}>"

    def __len__(self) -> int:
        return len(self._launches)

    def __iter__(self) -> Iterator[KernelLaunch]:
        return iter(self._launches)

    @overload
    def __getitem__(self, index: int) -> KernelLaunch: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[KernelLaunch, ...]: ...
    def __getitem__(self, index: int | slice) -> KernelLaunch | tuple[KernelLaunch, ...]:
        return self._launches[index]

    def params(self, addresses: Mapping[str, int] | None = None, **more: int) -> bytes:
        """The parameter struct with these device addresses.

        Parameters
        ----------
        addresses, **more : int
            By the names of ``pointers``; lse of a forward and dlse may be left out, None or 0 (lse
            is not written, dlse is 0). Aligned to an element, those of the workspace to 256 bytes.

        Returns
        -------
        params : bytes
            What each kernel takes by value.

        Raises
        ------
        ArgumentError
            A name is unknown or missing, or an address is none that a kernel can use.
        DTypeError
            An address is no integer.
        """
        if addresses is not None and not isinstance(addresses, Mapping):
            got, remedy = type(addresses).__name__, "pass a dict of names and addresses"
            raise DTypeError(explain_argument("addresses", got, "a mapping", remedy))
        given = {**(addresses or {}), **more}
        unknown = sorted(given.keys() - self.pointers.keys(), key=str)
        checked = {
            name: self._address(name, address)
            for name, address in given.items()
            if name in self.pointers
        }
        needed = [name for name in self.pointers if self and name not in self._optional]
        missing = [name for name in needed if not checked.get(name)]
        if unknown or missing:
            got = f"unknown {unknown}" if unknown else f"no {missing}"
            remedy = "pass a device address for each of them"
            expected = f"addresses of {list(self.pointers)}"
            raise ArgumentError(explain_argument("addresses", got, expected, remedy))
        packed = bytearray(self._struct.pack(self._values).tobytes())
        for name, address in checked.items():
            at = self.pointers[name]
            packed[at : at + 8] = address.to_bytes(8, "little")
        return bytes(packed)

    def _address(self, name: str, given: object) -> int:
        is_integer = isinstance(given, numbers.Integral) and not isinstance(given, bool)
        if not is_integer and given is not None:
            got, remedy = f"{given!r} of type {type(given).__name__}", "pass an int"
            raise DTypeError(explain_argument(name, got, "a device address", remedy))
        address: int = int(given or 0)  # type: ignore[call-overload]
        alignment = ALIGNMENT if name in self.workspace else self._itemsizes[name]
        if not 0 <= address < 1 << 64 or address % alignment:
            got, expected = f"{address:#x}", f"a device address, a multiple of {alignment}"
            raise ArgumentError(explain_argument(name, got, expected, "allocate it anew"))
        return address

    def save(self, folder: str | Path, name: str | None = None) -> Path:
        """Write all that a C++ program needs into a folder, which is made if need be.

        Parameters
        ----------
        folder : path
            Gets ``<kernel>.<arch>.cubin`` and ``.cu`` of every kernel, ``cuattn_abi.h`` with the
            structs, and ``cuattn_<name>.h`` (C++20) with the namespace ``cuattn::<name>``: the
            launches, the sizes of the workspace, and the parameters without addresses. Files of
            those names are replaced.
        name : str, optional
            Tells several exports apart; "forward" or "backward" by default.

        Returns
        -------
        header : Path
            The header of this pass.

        Raises
        ------
        ArgumentError
            ``name`` is no C++ name in lower case, or ``folder`` is a file.
        DTypeError
            ``name`` is no string.
        """
        name = self.op if name is None else name
        expected = "lower-case letters, digits and _, a letter first, and no word of C++"
        if not isinstance(name, str):
            got = f"{name!r} of type {type(name).__name__}"
            raise DTypeError(explain_argument("name", got, expected, "pass a str"))
        if not is_cpp_name(name):
            raise ArgumentError(explain_argument("name", repr(name), expected, "rename it"))
        folder = Path(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except FileExistsError as error:
            remedy = "name another place"
            raise ArgumentError(explain_argument("folder", folder, "a folder", remedy)) from error
        for launch in self:
            stem = f"{launch.name}.{self.arch}"
            _write(folder / f"{stem}.cubin", launch.cubin)
            _write(folder / f"{stem}.cu", launch.source.encode())
        _write(folder / "cuattn_abi.h", host_header().encode())
        header = folder / f"cuattn_{name}.h"
        _write(header, self._header(name).encode())
        return header

    def _header(self, name: str) -> str:
        buffers = [each for each in pointer_offsets(self._struct) if each not in _ARRAYS]
        return pass_header(
            name,
            f"the {self.op} of one call",
            self.arch,
            (self._struct, self._values),
            [
                (
                    each.name,
                    f"{each.name}.{self.arch}.cubin",
                    each.grid[0],
                    each.block[0],
                    each.smem_bytes,
                )
                for each in self
            ],
            {each: self.workspace.get(each, 0) for each in buffers},
            {each: self._itemsizes[each] for each in ("q", "out", "lse")},
            list(self.pointers),
        )


def _write(path: Path, data: bytes) -> None:
    """In one step, for who reads it meanwhile."""
    handle, name = tempfile.mkstemp(prefix=".writing-", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        Path(name).chmod(0o644)  # why: mkstemp makes it private
        Path(name).replace(path)
    finally:
        Path(name).unlink(missing_ok=True)


@takes_options
def kernels(
    q: Array,
    k: Array,
    v: Array,
    *,
    out: Array | None = None,
    backward: bool = False,
    wrt: Iterable[str] | None = None,
    device: str | None = None,
    **options: Any,
) -> Kernels:
    """Give the kernels of a call of ``attention``, or of its backward, to be launched elsewhere.

    Parameters
    ----------
    q, k, v, out : array
        As in ``attention``: (batch, seqlen, heads, head_dim) or another layout. Shapes, dtypes and
        strides count, no element is looked at: ``numpy.empty`` will do.
    backward : bool
        The kernels of the backward instead: out as the forward's, dout like out but C-contiguous,
        lse and dlse (batch, heads_q, seqlen_q), C-contiguous too, as are the gradients.
    wrt : collection of {"q", "k", "v"}, optional
        The inputs that the backward differentiates; all of them by default.
    device : str, optional
        A CUDA target such as "sm_90a": its usual device is planned for, and needs not be there;
        its number of SMs and shared memory decide on tiles and splits. By default the arrays' own.
    **options
        As in ``attention``.

    Returns
    -------
    kernels : Kernels
        In the order of their launches, with workspace and parameters.

    Raises
    ------
    ArgumentError, DTypeError, UnsupportedError
        As in ``attention``, and where ``device`` is no target or the arrays are in host memory and
        none is named.
    CompileError
        NVRTC is missing or refuses a kernel.

    Notes
    -----
    Shapes and gradients decide on kernels, grids and workspace together: for others, ask again. Of
    the parameters the addresses, softmax_scale and the strides of q, k, v, out, dout and dlse may
    be changed. No output may overlap an input, another output or the workspace. The workspace needs
    no initialisation; calls one after another on a stream may share it.

    ``cupy.RawModule`` compiles with ``-ftz=true`` whatever the options are: float32 numbers below
    1.2e-38 become 0 there, as they do not in the cubin.

    References
    ----------
    CUDA driver API, Execution Control: ``cuLaunchKernel``.

    Examples
    --------
    >>> import numpy as np, cuattn
    >>> q = k = v = np.empty((2, 1024, 8, 64), np.float16)
    >>> forward = cuattn.kernels(q, k, v, causal=True, device="sm_90a")
    >>> len(forward), forward.struct, list(forward.pointers)
    (1, 'FwdParams', ['q', 'k', 'v', 'out', 'lse'])
    >>> len(forward.params(q=1 << 32, k=2 << 32, v=3 << 32, out=4 << 32))
    232
    """
    check_flag("backward", backward)
    q, k, v = taken("q", q), taken("k", k), taken("v", v)
    if out is not None:
        out = taken_to_write("out", out)
    call = prepare(q, k, v, out, options_of("kernels", options))
    if device is not None:
        target = known_device(device)
        for name, array in (("q", q), ("k", k), ("v", v), ("out", out)):
            if array is not None:
                check_aligned(name, spec_of(array))
    elif call.device is None:
        got, remedy = "None with arrays in host memory", 'pass for example "sm_90a"'
        raise ArgumentError(explain_argument("device", got, "a CUDA target", remedy))
    else:
        target = cuda_device(call.device)
    problem = call.problem
    if backward:
        problem = backward_call(call, call.like_out, call.like_lse, names_in(wrt)).problem
    elif wrt is not None:
        expected, remedy = "None for a forward", "pass backward=True too, or drop wrt"
        raise ArgumentError(explain_argument("wrt", repr(wrt), expected, remedy))
    return _kernels(plan_for(problem, target))


def _kernels(plan: Plan) -> Kernels:
    flags = CompileOptions(plan.device.arch).flags()
    own = ("-arch=", "--ptxas-options=", "-ftz=")  # CuPy's, for reports, and overruled by CuPy
    options = tuple(flag for flag in flags if not flag.startswith(own))
    specs = (launch.kernel for launch in plan.launches)
    cubins = {each.spec.name: each.compiled.cubin for each in build(specs, plan.device.arch)}
    return Kernels(
        plan,
        (
            KernelLaunch(
                launch.kernel.name,
                f"// {launch.kernel.name} of cuattn (MIT licence); {' '.join(options)}\n"
                + flattened(unit_of(launch.kernel)),
                options,
                cubins[launch.kernel.name],
                (launch.grid, 1, 1),
                (launch.kernel.num_threads, 1, 1),
                launch.kernel.smem_bytes,
            )
            for launch in plan.launches
        ),
    )
