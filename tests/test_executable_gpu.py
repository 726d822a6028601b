"""Plans on streams and in CUDA graphs: nothing but launches, and the bits of eager calls."""

import threading

import numpy as np
import pytest
from calls import draw, refused, same_bits
from engines import CUDA_ENGINES
from test_executable import OPTIONS, fields, numpy_of, problem

import cuattn

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.parametrize("engine", CUDA_ENGINES, indirect=True, scope="module"),
]

#: Problems whose forward is one kernel, or parts of the keys and their merge.
LONG = (1, 16, 2, 40), (1, 5000, 2, 40), (1, 5000, 2, 24), (1, 16, 2, 24)


def arrays_of(engine, shapes):
    return problem(engine) if shapes is None else [engine.asarray(each) for each in draw(*shapes)]


@pytest.mark.parametrize("shapes", [None, LONG], ids=["square", "long"])
def test_a_graph_of_it_has_the_bits_of_eager_calls(engine, shapes):
    """Captured right after planning, before any other launch; replayed with other elements."""
    import cupy

    q, k, v, dout, *_ = arrays_of(engine, shapes)
    run = cuattn.plan(q, k, v, backward=True, return_lse=True, **OPTIONS)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture()
        run(q, k, v)
        run.backward(dout)
        graph = stream.end_capture()
    for factor in (1, -0.5):
        for array in (q, k, v, dout):
            array *= array.dtype.type(factor)
        (out, lse), vjp = cuattn.attention_vjp(q, k, v, return_lse=True, **OPTIONS)
        expected = numpy_of(engine, [out, lse, *fields(vjp(dout))])
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        got = numpy_of(engine, [run.out, run.lse, *fields(run.gradients)])
        assert all(map(same_bits, got, expected))


def test_a_graph_of_eager_calls_has_their_bits(engine):
    import cupy

    q, k, v, dout, _ = problem(engine)
    call = lambda: cuattn.attention_vjp(q, k, v, **OPTIONS)  # noqa: E731
    expected = call()[1](dout)
    pool = cupy.cuda.MemoryPool()
    with cupy.cuda.using_allocator(pool.malloc), cupy.cuda.Stream(non_blocking=True) as stream:
        call()[1](dout)  # so that the pool has memory
        stream.synchronize()
        stream.begin_capture()
        got = call()[1](dout)
        graph = stream.end_capture()
        graph.launch(stream)
        stream.synchronize()
        assert all(map(same_bits, *[numpy_of(engine, fields(each)) for each in (got, expected)]))
        del got


def test_it_neither_allocates_nor_waits(engine):
    import cupy

    class Refuses(cupy.cuda.MemoryHook):
        name = "refuses"

        def malloc_preprocess(self, device_id, size, mem_size):
            raise AssertionError(f"{size} bytes are allocated")

        alloc_preprocess = malloc_preprocess

    q, k, v, dout, dlse = problem(engine)
    run = cuattn.plan(q, k, v, backward=True, **OPTIONS)
    gate = threading.Event()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        stream.launch_host_func(lambda _: gate.wait(60), None)
        with Refuses():
            for _ in range(40):  # more than it takes for graphs to be made
                run(q, k, v)
                run.backward(dout)
                run.backward(None, dlse)
        was_held_up = not stream.done
        gate.set()
    assert was_held_up
    run.release()


def test_another_stream_is_refused_until_it_is_released(engine):
    import cupy

    q, k, v, dout, _ = problem(engine)
    run = cuattn.plan(q, k, v, backward=True, **OPTIONS)
    expected = numpy_of(engine, [run(q, k, v), *fields(run.backward(dout))])
    with cupy.cuda.Stream(non_blocking=True) as stream:
        refused(cuattn.ArgumentError, "stream", "release()", run=lambda: run(q, k, v))
        refused(cuattn.ArgumentError, "stream", "release()", run=lambda: run.backward(dout))
        run.release()
        got = [run(q, k, v), *fields(run.backward(dout))]
        stream.synchronize()
    assert all(map(same_bits, numpy_of(engine, got), expected))
    refused(cuattn.ArgumentError, "stream", "release()", run=lambda: run(q, k, v))


def test_a_thread_on_its_own_stream_is_another_stream(engine):
    """All threads have it under one handle; who used it first has the plan, and releases it."""
    import cupy

    q, k, v, *_ = problem(engine)
    run = cuattn.plan(q, k, v, **OPTIONS)
    begun, may_end, errors = threading.Barrier(2), threading.Event(), []

    def call():
        with cupy.cuda.Stream.ptds:
            run(q, k, v)
            begun.wait(60)
            may_end.wait(60)
            try:
                run.release()
            except cuattn.ArgumentError as error:
                errors.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    begun.wait(60)
    with cupy.cuda.Stream.ptds as stream:
        refused(cuattn.ArgumentError, "stream", "release()", run=lambda: run(q, k, v))
        refused(cuattn.ArgumentError, "thread", "release() there", run=run.release)
        may_end.set()
        thread.join()
        assert not errors
        out = run(q, k, v)
        stream.synchronize()
        run.release()
    expected = cuattn.attention(q, k, v, **OPTIONS)
    assert same_bits(*numpy_of(engine, [out, expected]))


def test_host_arrays_are_refused_by_a_plan_of_a_device(engine):
    q, k, v, *_ = problem(engine)
    run = cuattn.plan(q, k, v, **OPTIONS)
    host = np.ascontiguousarray(engine.asnumpy(q))
    parts = ("q", "host memory", "CUDA device 0, as planned")
    refused(cuattn.ArgumentError, *parts, run=lambda: run(host, k, v))
