"""The kernels themselves: their source in one text, compiled and launched by CuPy alone.

`cuattn.kernels` gives what a call would launch, as plain data. Here `cupy.RawModule` compiles the
source, and `cupy.RawKernel` launches it with the parameter struct; cuattn has no part in that.

Needs a GPU to launch; elsewhere it shows what would be:  python examples/08_raw_module.py
"""

import numpy as np

import cuattn

try:
    import cupy as xp

    xp.cuda.runtime.getDeviceCount()
except Exception:
    xp = np
print(f"arrays: {xp.__name__}")

rng = np.random.default_rng(0)
draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
host = {
    "q": draw(2, 200, 4, 64),  # batch, seqlen, heads, head_dim
    "k": draw(2, 300, 2, 64),
    "v": draw(2, 300, 2, 64),
    "dout": draw(2, 200, 4, 64),
}
options = {"causal": True, "align": "bottom_right"}

# The CPU engine computes the same, to compare with.
out, vjp = cuattn.attention_vjp(host["q"], host["k"], host["v"], **options)
gradients = vjp(host["dout"])
expected = {"out": out, "dq": gradients.dq, "dk": gradients.dk, "dv": gradients.dv}


def launch(kernels, arrays):
    """Compile the kernels of a pass from their source, and launch them one after another."""
    buffers = {name: xp.empty(size, np.uint8) for name, size in kernels.workspace.items()}
    everything = arrays | buffers
    addresses = {name: everything[name].data.ptr for name in kernels.pointers if name in everything}
    params = kernels.params(addresses)
    argument = np.frombuffer(params, f"V{len(params)}")  # the struct, by value
    for kernel in kernels:
        module = xp.RawModule(code=kernel.source, options=kernel.options)
        function = module.get_function(kernel.name)
        if kernel.smem_bytes > 48 << 10:
            function.max_dynamic_shared_size_bytes = kernel.smem_bytes
        function(kernel.grid, kernel.block, (argument,), shared_mem=kernel.smem_bytes)


def show(kernels):
    """What a launch needs, in words."""
    print(f"{kernels.op} on {kernels.arch}: {kernels.struct}, pointers at {kernels.pointers}")
    for kernel in kernels:
        print(
            f"  {kernel.name}: {kernel.grid[0]} blocks of {kernel.block[0]} threads, "
            f"{kernel.smem_bytes} bytes of shared memory, {len(kernel.source)} characters of CUDA"
        )


arrays = {name: xp.asarray(array) for name, array in host.items()}
arrays |= {name: xp.empty(array.shape, array.dtype) for name, array in expected.items()}
arrays["lse"] = xp.empty((2, 4, 200), np.float32)
qkv = [arrays[name] for name in "qkv"]
device = "sm_90a" if xp is np else None  # without a GPU: for this one
try:
    forward = cuattn.kernels(*qkv, device=device, **options)
    backward = cuattn.kernels(*qkv, device=device, backward=True, **options)
except cuattn.CompileError as error:
    print(f"nothing to show without a compiler: {error}")
else:
    show(forward)
    show(backward)
    if xp is not np:
        launch(forward, arrays)
        launch(backward, arrays)
        for name, array in expected.items():
            difference = float(np.abs(xp.asnumpy(arrays[name]) - array).max())
            print(f"{name} is off by {difference:.1e}")
            assert difference < 2e-5
