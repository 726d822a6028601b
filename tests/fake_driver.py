"""A CUDA driver made of C functions: its graphs, what their nodes hold, and what was launched."""

import collections
import ctypes
import threading
import time
from ctypes import CFUNCTYPE, POINTER, c_int, c_size_t, c_uint, c_ulonglong, c_void_p

STRICT, RELAXED = 0, 2


class CudaKernelNodeParams(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2, field by field as in the driver's header."""

    _fields_ = (
        ("func", c_void_p),
        *((f"{of}Dim{axis}", c_uint) for of in ("grid", "block") for axis in "XYZ"),
        ("sharedMemBytes", c_uint),
        ("kernelParams", POINTER(POINTER(c_ulonglong))),
        ("extra", c_void_p),
        ("kern", c_void_p),
        ("ctx", c_void_p),
    )

    def read(self):
        """The launch, and the second word of what its one argument holds."""
        assert (self.extra, self.kern, self.ctx) == (None, None, None)
        grid = self.gridDimX, self.gridDimY, self.gridDimZ
        block = self.blockDimX, self.blockDimY, self.blockDimZ
        word = self.kernelParams[0][1]
        return (self.func, grid, block, self.sharedMemBytes), word


class FakeDriver:
    """The calls that a graph needs, as C functions; each gives what ``status`` has for it."""

    def __init__(self):
        self.status = collections.Counter()
        self.modes = collections.defaultdict(lambda: STRICT)
        self.fresh = iter(range(1 << 40, 1 << 50, 1 << 36))
        self.alive, self.nodes, self.launched, self.filled = {}, {}, [], 0
        self.meanwhile = lambda: time.sleep(0)  # another thread may come between
        handles, params = POINTER(c_void_p), POINTER(CudaKernelNodeParams)
        self.functions = {}
        for function, types in (
            (self.cuGraphCreate, (handles, c_uint)),
            (self.cuGraphAddKernelNode_v2, (handles, c_void_p, handles, c_size_t, params)),
            (self.cuGraphInstantiateWithFlags, (handles, c_void_p, c_ulonglong)),
            (self.cuGraphExecKernelNodeSetParams_v2, (c_void_p, c_void_p, params)),
            (self.cuGraphLaunch, (c_void_p, c_void_p)),
            (self.cuGraphExecDestroy, (c_void_p,)),
            (self.cuGraphDestroy, (c_void_p,)),
            (self.cuThreadExchangeStreamCaptureMode, (POINTER(c_int),)),
        ):
            name = function.__name__
            self.functions[name] = CFUNCTYPE(c_int, *types)(self._with_status(name, function))

    def _with_status(self, name, function):
        def call(*arguments):
            return self.status[name] or function(*arguments) or 0

        return call

    def cuGraphCreate(self, graph, flags):
        assert flags == 0
        graph[0] = next(self.fresh)
        self.alive[graph[0]] = []

    def cuGraphAddKernelNode_v2(self, node, graph, before, count, params):
        node[0] = next(self.fresh)
        nodes = self.alive[graph]
        assert [before[i] for i in range(count)] == [each for each, _ in nodes[-1:]]
        nodes.append((node[0], params[0].read()))

    def cuGraphInstantiateWithFlags(self, executable, graph, flags):
        assert flags == 0
        assert self.modes[threading.get_ident()] == RELAXED
        executable[0] = next(self.fresh)
        self.alive[executable[0]] = graph
        self.nodes[executable[0]] = dict(self.alive[graph])

    def cuGraphExecKernelNodeSetParams_v2(self, executable, node, params):
        assert self.nodes[executable][node][0] == params[0].read()[0]
        self.nodes[executable][node] = params[0].read()
        self.filled += 1
        self.meanwhile()

    def cuGraphLaunch(self, executable, stream):
        self.launched.append((executable, stream, list(self.nodes[executable].values())))

    def cuGraphExecDestroy(self, executable):
        assert self.modes[threading.get_ident()] == RELAXED
        del self.alive[executable]

    def cuGraphDestroy(self, graph):
        assert self.modes[threading.get_ident()] == RELAXED
        del self.alive[graph]

    def cuThreadExchangeStreamCaptureMode(self, mode):
        thread = threading.get_ident()
        self.modes[thread], mode[0] = mode[0], self.modes[thread]
