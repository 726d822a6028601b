"""What the tests of the wrappers for torch and for JAX share."""

import importlib.util
from pathlib import Path

import numpy as np
from calls import draw, same_bits
from strategies import dtype_of

import cuattn

EXAMPLES = Path(__file__).parents[1] / "examples"
SHAPES = (2, 9, 4, 8), (2, 11, 2, 8), (2, 11, 2, 5), (2, 9, 4, 5)
LSE_SHAPE = (2, 4, 9)
#: Every call here that is compared bit by bit.
OPTIONS = {"causal": True, "align": "bottom_right", "deterministic": True}


def path_of(name):
    (path,) = EXAMPLES.glob(f"*_{name}.py")
    return path


def example(name):
    """An example as a module, its main part not run."""
    path = path_of(name)
    spec = importlib.util.spec_from_file_location(path.stem[3:], path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def copied(name):
    """The names that the part of an example gives that is there to be copied."""
    _, part, _ = path_of(name).read_text(encoding="utf-8").split("\n# To copy: ")
    names = {}
    exec(compile("# " + part, name, "exec"), names)
    return names


def record_calls(monkeypatch, name, what):
    """Have a function of cuattn called as ever; what(*args, **kwargs) of each call, in a list."""
    function, seen = getattr(cuattn, name), []

    def recording(*args, **kwargs):
        seen.append(what(*args, **kwargs))
        return function(*args, **kwargs)

    monkeypatch.setattr(cuattn, name, recording)
    return seen


def record_second(monkeypatch, name, what):
    """The same of a function that gives two things: what(second) of each call, in a list."""
    function, seen = getattr(cuattn, name), []

    def recording(*args, **kwargs):
        first, second = function(*args, **kwargs)
        seen.append(what(second))
        return first, second

    monkeypatch.setattr(cuattn, name, recording)
    return seen


def on_host(array):
    """A NumPy array of the same numbers as one of NumPy or CuPy."""
    return array if isinstance(array, np.ndarray) else array.get()


def address(array):
    """Where an array of NumPy or CuPy begins."""
    return array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr


class Place:
    """A device of torch, and the arrays that cuattn computes with there."""

    def __init__(self, torch, device):
        self.torch, self.device = torch, torch.device(device, 0)

    def tensor(self, array):
        """A tensor of the same bits; NumPy's bfloat16 goes as integers."""
        if array.dtype.name == "bfloat16":
            bits = self.torch.from_numpy(array.view(np.int16))
            return bits.view(self.torch.bfloat16).to(self.device)
        return self.torch.from_numpy(array).to(self.device)

    def array(self, array):
        if self.device.type == "cpu":
            return array
        import cupy

        return cupy.asarray(array)

    def inputs(self, *shapes, dtype="float64"):
        return [self.tensor(each).requires_grad_() for each in draw(*shapes, dtype=dtype)]

    def bits(self, tensor):
        """What a tensor holds, as a NumPy array."""
        tensor = tensor.detach().cpu()
        if tensor.dtype == self.torch.bfloat16:
            return tensor.view(self.torch.int16).numpy().view(dtype_of("bfloat16"))
        return tensor.numpy()

    def agrees(self, tensors, arrays):
        pairs = zip(tensors, arrays, strict=True)
        return all(same_bits(self.bits(ours), on_host(theirs)) for ours, theirs in pairs)
