"""Repeated calls from elsewhere: another stream, a thread that is new to the device."""

import threading

import numpy as np
import pytest
from calls import draw, same_bits
from engines import CUDA_ENGINES

import cuattn

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.parametrize("engine", CUDA_ENGINES, indirect=True, scope="module"),
]


def warm(engine):
    """Arrays of one small problem, and the results of a forward and a backward of it."""
    arrays = draw((2, 150, 2, 64), *[(2, 100, 2, 64)] * 2, (2, 150, 2, 64))
    arrays = [engine.asarray(each) for each in arrays]
    return arrays, call(*arrays)


def call(q, k, v, dout):
    import cupy

    out, vjp = cuattn.attention_vjp(q, k, v, deterministic=True)
    gradients = vjp(dout)
    return [cupy.asnumpy(each) for each in (out, gradients.dq, gradients.dk, gradients.dv)]


def test_a_thread_that_never_used_the_device_gets_the_same_bits(engine):
    import cupy

    arrays, expected = warm(engine)
    got = []

    def run():
        got.append(call(*arrays))
        with cupy.cuda.Stream(non_blocking=True):
            got.append(call(*arrays))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert len(got) == 2
    assert all(map(same_bits, expected, got[0]))
    assert all(map(same_bits, expected, got[1]))


def test_work_is_enqueued_on_the_current_stream_and_not_waited_for(engine):
    """Calls return while the stream that fills their inputs is held up; then they see them."""
    import cupy

    arrays, expected = warm(engine)
    late = [cupy.full_like(each, np.nan) for each in arrays]
    gate, stream = threading.Event(), cupy.cuda.Stream(non_blocking=True)
    with stream:
        call(*arrays)  # so that this stream has memory: to get some may wait for the device
        cupy.cuda.Device().synchronize()
        stream.launch_host_func(lambda _: gate.wait(60), None)
        for mine, its in zip(late, arrays, strict=True):
            mine[...] = its
        out, vjp = cuattn.attention_vjp(*late[:3], deterministic=True)
        gradients = vjp(late[3])
        was_held_up = not stream.done
    gate.set()
    stream.synchronize()
    results = (out, gradients.dq, gradients.dk, gradients.dv)
    assert all(map(same_bits, expected, map(cupy.asnumpy, results)))
    assert was_held_up
