"""What a call would do, in words: kernels, tiles, work, bytes, and why other families declined."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

from cuattn import execute
from cuattn._arrays import check_aligned, spec_of
from cuattn._foreign import taken, taken_to_write
from cuattn._typing import Array
from cuattn.attention import prepare, takes_options
from cuattn.cpu.heads import Visible, split
from cuattn.errors import CompileError
from cuattn.planning.device import known_device
from cuattn.planning.options import check_flag, options_of
from cuattn.planning.plan import ITEMSIZE, Launch, Plan
from cuattn.planning.problem import AttentionProblem, Strides
from cuattn.planning.schedule import num_visible
from cuattn.planning.select import plan_for
from cuattn.planning.validate import ForwardCall, backward_call
from cuattn.precompile import Built, build


@takes_options
def explain(
    q: Array,
    k: Array,
    v: Array,
    *,
    out: Array | None = None,
    return_lse: bool = False,
    device: str | None = None,
    **options: Any,
) -> str:
    """Say what ``attention`` would do with these arrays, and then its backward; compute nothing.

    Parameters
    ----------
    q, k, v, out : array
        As in ``attention``: (batch, seqlen, heads, head_dim) or another layout. No element is
        looked at.
    return_lse : bool
        As in ``attention``; counted as written either way, as ``attention_forward`` does.
    device : str, optional
        A CUDA target such as "sm_90a", to plan for its usual device, also with NumPy arrays and
        without a GPU. The arrays' own device by default: NumPy arrays give the CPU engine.
    **options
        As in ``attention``.

    Returns
    -------
    text : str
        For the forward and for a backward of all gradients from dout: the family, why those tried
        before declined, FLOPs, bytes and workspace, and of every kernel its name, tile, grid,
        threads, shared memory and registers.

    Raises
    ------
    ArgumentError, DTypeError
        As in ``attention``, and where ``device`` is no target.
    UnsupportedError
        As in ``attention``: no family takes the problem, and the message says why.
    CompileError
        NVRTC is missing or does not know the arrays' own device.

    Notes
    -----
    FLOPs are counted from the schedule: 2 (head_dim + head_dim_v) for every (row, key) pair that is
    seen, and by convention 2.5 times that for a backward. Bytes count every input read once and
    every output written once; an axis of stride 0 counts as one element.

    Registers are known to the compiler only, so kernels that the cache lacks are compiled into it.
    Where that fails the text says why instead.

    References
    ----------
    Dao et al. 2022, section 2 and appendix B, for the products that each pass counts.

    Examples
    --------
    >>> import numpy as np, cuattn
    >>> q = k = v = np.ones((2, 1024, 8, 64), np.float32)
    >>> print(cuattn.explain(q, k, v, causal=True).splitlines()[0])
    forward on the CPU: float32, NumPy engine
    """
    check_flag("return_lse", return_lse)
    q, k, v = taken("q", q), taken("k", k), taken("v", v)
    if out is not None:
        out = taken_to_write("out", out)
    call = prepare(q, k, v, out, options_of("explain", options))
    problems = both_passes(call)
    if device is not None:
        target = known_device(device)
        for name, spec in (("q", call.q), ("k", call.k), ("v", call.v)):
            check_aligned(name, spec)  # which host arrays need not be
        if out is not None:
            check_aligned("out", spec_of(out))
    elif call.device is not None:
        target = execute.cuda_device(call.device)
    else:
        return _joined(_cpu_text(problem) for problem in problems)
    plans = [plan_for(problem, target) for problem in problems]
    built, trouble = _registers(plans)
    return _joined(_plan_text(plan, built, trouble) for plan in plans)


def both_passes(call: ForwardCall) -> tuple[AttentionProblem, AttentionProblem]:
    """A call's forward, and the backward that ``attention_backward(res, dout)`` asks."""
    return call.problem, backward_call(call, call.like_out, None, None).problem


def _joined(texts: Iterable[Iterable[str]]) -> str:
    return "\n\n".join("\n".join(lines) for lines in texts)


def _registers(plans: list[Plan]) -> tuple[dict[str, Built], str]:
    """What the compiler says of every kernel by name, or why it says nothing."""
    specs = [launch.kernel for plan in plans for launch in plan.launches]
    try:
        return {each.spec.name: each for each in build(specs, plans[0].device.arch)}, ""
    except CompileError as error:
        return {}, str(error)


def _plan_text(plan: Plan, built: dict[str, Built], trouble: str) -> Iterator[str]:
    problem, device = plan.problem, plan.device
    yield f"{problem.op} on {device.arch}: {problem.dtype}, family {plan.family}"
    for name, reason in plan.refusals:
        yield _line("declined", f"{name} {reason}")
    yield _line(
        "device", f"{device.num_sms} SMs, {_bytes(device.smem_per_block)} of shared memory a block"
    )
    yield from _problem_text(problem)
    if plan.num_splits > 1:
        yield _line("splits", f"{plan.num_splits} parts of the keys, merged")
    yield _line("workspace", _bytes(plan.workspace_bytes))
    for launch in plan.launches:
        yield from _launch_text(launch, built)
    if not plan.launches:
        yield _line("kernel", "none: there is nothing to write")
    if trouble:
        yield _line("registers", f"not known: {trouble}")


def _launch_text(launch: Launch, built: dict[str, Built]) -> Iterator[str]:
    spec = launch.kernel
    config = dict(spec.config)
    yield _line("kernel", spec.name)
    threads = f"{launch.grid:,} blocks of {spec.num_threads} threads"
    tile = ""
    if "block_m" in config:
        tile = "{block_m} queries x {block_n} keys x {block_d} dims, ".format(**config)
    yield _line("", tile + threads + (f": {launch.note}" if launch.note else ""))
    uses = f"{_bytes(spec.smem_bytes)} of shared memory a block"
    if spec.name in built:
        compiled = built[spec.name].compiled
        uses += f", {compiled.registers} registers a thread"
        spills = compiled.spill_store_bytes + compiled.spill_load_bytes
        uses += f", {spills} bytes of spills" if spills else ", no spills"
    yield _line("", uses)


def _cpu_text(problem: AttentionProblem) -> Iterator[str]:
    yield f"{problem.op} on the CPU: {problem.dtype}, NumPy engine"
    yield from _problem_text(problem)
    visible = Visible.of(problem)
    if visible.empty or problem.batch * problem.num_heads_q == 0:
        why = "no row sees a key" if visible.empty else "there is no head"
        yield _line("tiles", f"none: {why}")
        return
    batches, batch_bytes = split(problem, visible)
    schedule = visible.schedule
    yield _line(
        "tiles",
        f"{schedule.block_m} queries x {schedule.block_n} keys; "
        f"{schedule.num_m_blocks:,} x {schedule.num_n_blocks:,} a head, absent ones skipped",
    )
    yield _line(
        "batching",
        f"{len(batches):,} batches of up to {len(batches[0]):,} key heads, "
        f"{_bytes(batch_bytes)} of working memory each",
    )


def _problem_text(problem: AttentionProblem) -> Iterator[str]:
    """What does not depend on who computes it: the sizes, the work and the bytes."""
    heads = f"heads {problem.num_heads_q}"
    if problem.group_size != 1:
        heads += f" over {problem.num_heads_kv} key heads"
    yield _line(
        "problem",
        f"batch {problem.batch}, {heads}, seqlen {problem.seqlen_q} x {problem.seqlen_k}, "
        f"head_dim {problem.head_dim}, head_dim_v {problem.head_dim_v}",
    )
    pairs, seen = problem.seqlen_q * problem.seqlen_k, num_visible(problem)
    share = f" ({100 * seen / pairs:.1f} %)" if pairs else ""
    yield _line("schedule", f"{seen:,} of {pairs:,} (row, key) pairs a head{share}")
    flops, reads, writes = counted_flops(problem), bytes_read(problem), bytes_written(problem)
    rule = "2 (head_dim + head_dim_v) a pair"
    if problem.op == "backward":
        rule = "by convention 2.5 x the forward"
    yield _line("work", f"{_scaled(flops, 1000)}FLOP, {rule}")
    density = f", {flops / (reads + writes):,.0f} FLOP a byte" if reads + writes else ""
    yield _line("memory", f"{_bytes(reads)} read, {_bytes(writes)} written, each once{density}")


def counted_flops(problem: AttentionProblem) -> int:
    """FLOPs of a problem, from the pairs that its schedule sees; 2.5 times for a backward."""
    pairs = num_visible(problem) * problem.batch * problem.num_heads_q
    forward = 2 * (problem.head_dim + problem.head_dim_v) * pairs
    return forward if problem.op == "forward" else forward * 5 // 2


def bytes_read(problem: AttentionProblem) -> int:
    """Bytes of every input, once."""
    names = ("q", "k", "v") if problem.op == "forward" else ("q", "k", "v", "out", "dout")
    size = sum(_array_bytes(problem, name) for name in names)
    return size if problem.op == "forward" else size + _lse_bytes(problem)


def bytes_written(problem: AttentionProblem) -> int:
    """Bytes of every output, once."""
    if problem.op == "forward":
        return _array_bytes(problem, "out") + _lse_bytes(problem)
    return sum(_array_bytes(problem, "d" + name) for name in problem.wrt)


def _lse_bytes(problem: AttentionProblem) -> int:
    rows = problem.batch * problem.num_heads_q * problem.seqlen_q
    return rows * ITEMSIZE[problem.accumulator]


def _array_bytes(problem: AttentionProblem, name: str) -> int:
    strides: Strides | None = getattr(problem.layouts, name)
    if strides is None:
        return 0
    of_keys = name in ("k", "v", "dk", "dv")
    shape = (
        problem.batch,
        problem.seqlen_k if of_keys else problem.seqlen_q,
        problem.num_heads_kv if of_keys else problem.num_heads_q,
        problem.head_dim if name in ("q", "k", "dq", "dk") else problem.head_dim_v,
    )
    moved = [
        min(length, 1) if stride == 0 else length
        for length, stride in zip(shape, strides, strict=True)
    ]
    dtype = problem.out_dtype if name in ("out", "dout") else problem.dtype
    return math.prod(moved) * ITEMSIZE[dtype]


def _line(label: str, text: str) -> str:
    return f"  {label:10}{text}"


def _bytes(count: int) -> str:
    return f"{count:,} bytes" if count < 1024 else f"{_scaled(count, 1024)}B"


def _scaled(value: float, step: int) -> str:
    """Three digits and a prefix: "34.4 G", "12.0 Mi"."""
    prefixes = ("", *(letter + "i" * (step == 1024) for letter in "KMGTPE"))
    power = 0
    while value >= step and power < len(prefixes) - 1:
        value, power = value / step, power + 1
    return f"{value:,.1f} {prefixes[power]}"
