"""The machine code in a runtime of one's own: loaded and launched by the CUDA driver, no CuPy.

The cubins come from `cuattn.kernels`; memory, modules and launches are calls of the driver API, by
ctypes, as a C or C++ program makes them (10_own_runtime.cpp is one).

Needs a GPU to launch; elsewhere it says so:  python examples/09_driver_api.py
"""

import ctypes
import sys

import numpy as np

import cuattn


class Driver:
    """The few driver calls that are needed, on the first device."""

    def __init__(self):
        self.library = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
        count, device, context = ctypes.c_int(), ctypes.c_int(), ctypes.c_void_p()
        self("cuInit", 0)
        self("cuDeviceGetCount", ctypes.byref(count))
        if count.value == 0:
            raise OSError("no CUDA device")
        self("cuDeviceGet", ctypes.byref(device), 0)
        self("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self("cuCtxSetCurrent", context)
        numbers = [ctypes.c_int(), ctypes.c_int()]
        for number, attribute in zip(numbers, (75, 76), strict=True):  # major and minor
            self("cuDeviceGetAttribute", ctypes.byref(number), attribute, device)
        self.arch = f"sm_{numbers[0].value}{numbers[1].value}"

    def __call__(self, name, *arguments):
        """Call a function of the driver, which returns 0 where all is well."""
        status = getattr(self.library, name)(*arguments)
        if status:
            raise OSError(f"{name} returned {status}")

    def new(self, nbytes):
        """Device memory."""
        address = ctypes.c_uint64()
        self("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(nbytes))
        return address.value

    def copy_in(self, array):
        """A NumPy array's elements, in new device memory."""
        address = self.new(array.nbytes)
        source, size = ctypes.c_void_p(array.ctypes.data), ctypes.c_size_t(array.nbytes)
        self("cuMemcpyHtoD_v2", ctypes.c_uint64(address), source, size)
        return address

    def copy_out(self, address, array):
        """Back to NumPy; waits for the launches before."""
        target, size = ctypes.c_void_p(array.ctypes.data), ctypes.c_size_t(array.nbytes)
        self("cuMemcpyDtoH_v2", target, ctypes.c_uint64(address), size)

    def launch(self, kernels, addresses):
        """All kernels of a pass, in order, on the default stream."""
        buffers = {name: self.new(size) for name, size in kernels.workspace.items()}
        params = kernels.params({**addresses, **buffers})
        struct = ctypes.create_string_buffer(params, len(params))
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(struct))
        for kernel in kernels:
            module, function = ctypes.c_void_p(), ctypes.c_void_p()
            self("cuModuleLoadData", ctypes.byref(module), kernel.cubin)
            self("cuModuleGetFunction", ctypes.byref(function), module, kernel.name.encode())
            if kernel.smem_bytes > 48 << 10:  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                self("cuFuncSetAttribute", function, 8, kernel.smem_bytes)
            shape = (*kernel.grid, *kernel.block, kernel.smem_bytes)
            self("cuLaunchKernel", function, *shape, None, arguments, None)


rng = np.random.default_rng(0)
shape = (2, 500, 4, 64)  # batch, seqlen, heads, head_dim
q, k, v, dout = (rng.standard_normal(shape).astype(np.float16) for _ in range(4))
expected, vjp = cuattn.attention_vjp(q, k, v, causal=True)  # the CPU engine
gradients = vjp(dout)

try:
    driver = Driver()
except OSError as error:
    print(f"arrays: numpy; nothing is launched ({error})")
else:
    print("arrays: device memory of the driver")
    forward = cuattn.kernels(q, k, v, causal=True, device=driver.arch)
    backward = cuattn.kernels(q, k, v, causal=True, device=driver.arch, backward=True)
    inputs = {"q": q, "k": k, "v": v, "dout": dout}
    at = {name: driver.copy_in(array) for name, array in inputs.items()}
    at |= {name: driver.new(q.nbytes) for name in ("out", "dq", "dk", "dv")}
    at["lse"] = driver.new(2 * 4 * 500 * 4)
    driver.launch(forward, {name: at[name] for name in forward.pointers if name in at})
    driver.launch(backward, {name: at[name] for name in backward.pointers if name in at})
    results = {"out": expected, "dq": gradients.dq, "dk": gradients.dk, "dv": gradients.dv}
    for name, want in results.items():
        got = np.empty(shape, np.float16)
        driver.copy_out(at[name], got)
        difference = float(np.abs(got.astype(np.float32) - want.astype(np.float32)).max())
        print(f"{name} is off by {difference:.1e}")
        assert difference < 2e-2
