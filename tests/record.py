"""The GPU record: what the sources launch, as a digest, and how the tests marked gpu went.

A machine without a GPU cannot run the kernels, but it can see that the record is of these sources:
the digest covers everything that reaches the device for a fixed list of problems (generated unit,
headers, compiler options, grid, shared memory, parameter bytes), and the unit and headers of every
kernel that a plan can choose.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from pathlib import Path

from cuattn.abi import structs
from cuattn.execute import unit_of
from cuattn.jit.compile import CompileOptions
from cuattn.planning.device import known_device
from cuattn.planning.families import every_spec
from cuattn.planning.plan import parameters
from cuattn.planning.problem import AttentionProblem, Band, Layouts
from cuattn.planning.select import plan_for

RECORD = Path(__file__).with_name("gpu_record.json")
ARCH = "sm_90a"


def _contiguous(batch, seqlen, heads, dim):
    return (seqlen * heads * dim, heads * dim, dim, 1)


def problem(op, dtype, *, out_dtype=None, wrt=("q", "k", "v"), shape=(2, 512, 768, 8, 4, 64, 64)):
    """A problem of the fixed list: (batch, seqlen_q, seqlen_k, heads_q, heads_kv, dim, dim_v)."""
    batch, seqlen_q, seqlen_k, heads_q, heads_kv, dim, dim_v = shape
    q = _contiguous(batch, seqlen_q, heads_q, dim)
    k = _contiguous(batch, seqlen_k, heads_kv, dim)
    v = _contiguous(batch, seqlen_k, heads_kv, dim_v)
    out = _contiguous(batch, seqlen_q, heads_q, dim_v)
    gradients = {"dout": out} | {"d" + name: {"q": q, "k": k, "v": v}[name] for name in wrt}
    backward = op == "backward"
    return AttentionProblem(
        op=op,
        dtype=dtype,
        out_dtype=out_dtype or dtype,
        batch=batch,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        num_heads_q=heads_q,
        num_heads_kv=heads_kv,
        head_dim=dim,
        head_dim_v=dim_v,
        band=Band.clamped(None, seqlen_k - seqlen_q, seqlen_q, seqlen_k),
        softmax_scale=dim**-0.5,
        deterministic=None,
        layouts=Layouts(q, k, v, out, **(gradients if backward else {})),
        wrt=wrt if backward else (),
    )


def problems():
    """Every dtype, output dtype and gradient set, at five sizes."""
    outs = {"float16": "float32", "bfloat16": "float32"}
    # A large grid, a small one, long heads, single rows, few rows of many keys.
    shapes = (
        (2, 4096, 4096, 16, 8, 64, 64),
        (1, 100, 130, 2, 2, 64, 64),
        (2, 512, 768, 8, 4, 200, 96),
        (70000, 1, 4, 1, 1, 8, 8),
        (1, 64, 16384, 8, 4, 128, 128),
    )
    for dtype, shape in itertools.product(("float16", "bfloat16", "float32", "float64"), shapes):
        for out_dtype in {dtype, outs.get(dtype, dtype)}:
            yield problem("forward", dtype, out_dtype=out_dtype, shape=shape)
            for wrt in (("q", "k", "v"), ("k",), ("v",), ("q",)):
                yield problem("backward", dtype, out_dtype=out_dtype, shape=shape, wrt=wrt)


def _digest_of(parts):
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def digest():
    """The digest of everything that is launched for ``problems()`` on one target."""
    seen = set()
    for asked in problems():
        plan = plan_for(asked, known_device(ARCH))
        struct = structs.FwdParams if asked.op == "forward" else structs.BwdParams
        packed = struct.pack(parameters(plan)).tobytes()
        for launch in plan.launches:
            unit = unit_of(launch.kernel)
            parts = [unit.text, *unit.headers, *unit.headers.values()]
            parts += CompileOptions(ARCH).flags()
            parts += [str(launch.grid), str(launch.kernel.smem_bytes), packed.hex()]
            seen.add(_digest_of(parts))
    for spec in every_spec(known_device(ARCH)):
        unit = unit_of(spec)
        seen.add(_digest_of([unit.text, *unit.headers, *unit.headers.values()]))
    return hashlib.sha256("".join(sorted(seen)).encode()).hexdigest()


def write(path, outcomes):
    """Write the record of a run on this machine's GPU."""
    import cupy

    from cuattn.jit.compile import nvrtc_version

    device = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)
    driver = cupy.cuda.runtime.driverGetVersion()
    data = {
        "device": device["name"].decode(),
        "cuda_driver": f"{driver // 1000}.{driver % 1000 // 10}",
        "nvrtc": ".".join(map(str, nvrtc_version())),
        "cupy": cupy.__version__,
        "digest": digest(),
        "outcomes": dict(sorted(outcomes.items())),
    }
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
