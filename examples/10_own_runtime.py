"""A C++ program with cuattn's kernels: export them, build the program, check its gradients.

`cuattn.kernels(...).save(folder)` writes cubins and headers; 10_own_runtime.cpp beside this file
includes the headers and calls the CUDA driver. What is exported here runs on machines with that GPU
that have neither Python nor CUDA's toolkit.

Needs a GPU to launch, and a C++20 compiler:  python examples/10_own_runtime.py
"""

import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np

import cuattn

arch, has_gpu = "sm_90a", False  # without a GPU: for this one
try:
    import cupy

    arch, has_gpu = f"sm_{cupy.cuda.Device().compute_capability}", True
except Exception:
    print("arrays: numpy; nothing is launched without a GPU")
else:
    print("arrays: device memory of the driver")

rng = np.random.default_rng(0)
shapes = {"q": (2, 500, 4, 64), "k": (2, 700, 2, 64), "v": (2, 700, 2, 64), "dout": (2, 500, 4, 64)}
arrays = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
q, k, v, dout = arrays.values()
out, vjp = cuattn.attention_vjp(q, k, v)  # the CPU engine
gradients = vjp(dout)
expected = {"out": out, "dq": gradients.dq, "dk": gradients.dk, "dv": gradients.dv}


def export(folder):
    """Cubins, headers, and the arrays as plain files."""
    for backward in (False, True):
        kernels = cuattn.kernels(q, k, v, device=arch, backward=backward)
        print(f"{kernels.save(folder).name}: {[kernel.name for kernel in kernels]}")
        for name, nbytes in kernels.workspace.items():
            print(f"  workspace {name}: {nbytes} bytes")
    for name, array in arrays.items():
        array.tofile(folder / f"{name}.bin")


with tempfile.TemporaryDirectory() as place:
    folder = Path(place)
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    try:
        export(folder)
    except cuattn.CompileError as error:
        print(f"nothing is exported without NVRTC: {error}")
    else:
        if compiler is None:
            print("no C++ compiler: the program is not built")
        else:
            source, program = Path(__file__).with_suffix(".cpp"), folder / "own_runtime"
            build = [compiler, "-std=c++20", "-Wall", "-I", folder, source, "-o", program, "-ldl"]
            subprocess.run(build, check=True)
            print("built")
        if compiler is not None and has_gpu:
            subprocess.run([program, folder], check=True)
            for name, want in expected.items():
                got = np.fromfile(folder / f"{name}.bin", np.float32).reshape(want.shape)
                difference = float(np.abs(got - want).max())
                print(f"{name} is off by {difference:.1e}")
                assert difference < 2e-5
