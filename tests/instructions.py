"""Runs a few lines of a kernel, emulated or on a GPU, for tests of single instructions."""

import re
from array import array

import needs
import numpy as np
from emulator.build import build
from emulator.device import asarray as emulated_array
from emulator.launch import Array, emulate, settings

from cuattn.jit.source import Unit, kernels_dir, reachable_headers

_TYPES = {"float64": "f64", "float32": "f32", "uint32": "u32", "uint16": "u16", "int32": "i32"}

_TEXT = """\
{includes}
namespace cuattn {{
struct Arrays {{ {fields} }};

namespace kernel {{
CUATTN_DEVICE void body(const Arrays& its) {{
  extern __shared__ __align__(128) unsigned char shared[];
  [[maybe_unused]] const int thread = threadIdx.x;
  {body}
}}
}}  // namespace kernel
}}  // namespace cuattn

extern "C" __global__ void __launch_bounds__({threads}, 1)
{name}(const __grid_constant__ cuattn::Arrays its) {{ cuattn::kernel::body(its); }}
"""


def unit_of(name, body, arrays, threads, includes=()):
    """A kernel whose one parameter holds the arrays, ``its.<name>``."""
    fields = " ".join(f"{_TYPES[str(each.dtype)]}* {key};" for key, each in arrays.items())
    headers = [f"ptx/{path.name}" for path in sorted((kernels_dir() / "ptx").glob("*.cuh"))]
    includes = "\n".join(f'#include "{path}"' for path in (*headers, *includes))
    text = _TEXT.format(includes=includes, fields=fields, body=body, threads=threads, name=name)
    return Unit(name, text, reachable_headers(text, kernels_dir()), threads)


class Emulated:
    """Runs on this machine; an input may be read only."""

    def __init__(self):
        needs.cxx()

    def __call__(self, body, out, *, threads=32, grid=1, smem=0, name, includes=(), **inputs):
        """The arrays of ``out`` as the lines leave them, in their order; they begin as given."""
        arrays = {key: emulated_array(each) for key, each in {**inputs, **out}.items()}
        unit = unit_of(name, body, arrays, threads, includes)
        params = array("Q", [each.data.ptr for each in arrays.values()])
        extents = [
            Array(key.encode(), each.data.ptr, each.nbytes, key in out)
            for key, each in arrays.items()
        ]
        path = build(unit, settings.mode, settings.root)
        emulate(path, params.buffer_info()[0], grid, threads, smem, extents)
        return [arrays[key].numpy().copy() for key in out]


class OnGpu:
    """Runs on the current device, compiled as the kernels are."""

    def __call__(self, body, out, *, threads=32, grid=1, smem=0, name, **inputs):
        import cupy

        from cuattn.execute import cuda_device
        from cuattn.jit.launch import current_stream, load

        arrays = {key: cupy.asarray(each) for key, each in {**inputs, **out}.items()}
        kernel = load(unit_of(name, body, arrays, threads), cuda_device(0).arch, smem)
        params = array("Q", [0, *(each.data.ptr for each in arrays.values())])
        params[0] = params.buffer_info()[0] + 8
        kernel.launcher(grid)(current_stream(0), params.buffer_info()[0], 0)
        return [cupy.asnumpy(arrays[key]) for key in out]


def declared(text):
    """The functions that a header of ptx defines, by name and the number of their parameters."""
    code = re.sub(r"//[^\n]*", "", text)
    found = re.findall(r"(?:CUATTN_DEVICE|inline)\s+[\w:<>]+&?\s+(\w+)\(([^{;]*?)\)\s*[{;]", code)
    return {(name, counted(params)) for name, params in found}


def counted(params):
    """How many parameters there are, without the place of the caller that an emulated one takes."""
    params = re.sub(r",?\s*Where where(?: = Where::current\(\))?", "", params).strip()
    return len(re.sub(r"\([^()]*\)|<[^<>]*>", "", params).split(",")) if params else 0


def bits_of_every_kind(count, seed=0):
    """float32 numbers of all exponents, the edges of each, and NaN and infinities."""
    rng = np.random.default_rng(seed)
    bits = rng.integers(0, 2**32, count, np.uint32)
    edges = (np.arange(256, dtype=np.uint32)[:, None] << 23) + np.array(
        [0, 1, 2**23 - 1], np.uint32
    )
    signs = np.array([[0], [2**31]], np.uint32)
    return np.concatenate([bits, (edges.ravel() | signs).ravel()]).view(np.float32)


def mapped(run, expression, values, dtype, name):
    """An expression of ``x`` for every number, by 32 threads."""
    body = f"""
      for (int i = thread; i < {len(values)}; i += 32) {{
        const auto x = its.values[i];
        {expression}
      }}
    """
    (got,) = run(body, {"out": np.zeros(len(values), dtype)}, name=name, values=values)
    return got


def ulps(got, want, dtype):
    """How far off, in units of the last place of the right result."""
    with np.errstate(all="ignore"):
        unit = np.spacing(np.abs(want).astype(dtype)).astype(np.float64)
        return np.where(got == want.astype(dtype), 0, np.abs(got.astype(np.float64) - want) / unit)
