"""Kernel families: each says yes or why not, and lays out its launches.

A family is tried when every one before it declined; ``explain`` shows the reasons.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from cuattn._typing import ACCUMULATOR
from cuattn.abi.structs import DType, Product, Wrt
from cuattn.planning.device import Device
from cuattn.planning.names import kernel_name
from cuattn.planning.plan import ITEMSIZE, KernelSpec, Launch
from cuattn.planning.problem import AttentionProblem
from cuattn.planning.schedule import ceil_div
from cuattn.planning.tuning import TILES, Tile

MAX_GRID = 2**31 - 1
_DELTA_THREADS = 128
_WARP = 32
_WRT = {"q": Wrt.Dq, "k": Wrt.Dk, "v": Wrt.Dv}


class Family(Protocol):
    """What the selection asks of a family."""

    @property
    def name(self) -> str:
        """As kernel names and ``explain`` spell it."""

    @property
    def rounds_to_zero(self) -> bool:
        """Whether sums over head dims and positions are rounded towards zero."""

    def refusal(self, problem: AttentionProblem, device: Device) -> str | None:
        """Why the family cannot take the problem on the device, or None."""

    def launches(self, problem: AttentionProblem, device: Device) -> tuple[Launch, ...]:
        """The launches of an accepted problem; empty where there is nothing to write."""

    def every_spec(self, device: Device) -> Iterator[KernelSpec]:
        """Every specialisation that a plan can choose on a device."""


@dataclass(frozen=True, slots=True)
class Tiled:
    """The plain main loops (kernels_cu/mainloop/*_simt.cuh) on one kind of arithmetic unit.

    Any head size, stride, alignment, group and length; the backward adds nothing in memory, so the
    same inputs always give the same bits.
    """

    name: str
    product: Product
    dtypes: tuple[str, ...]
    min_capability: int
    max_head_dim: int | None = None
    needs_fast_float64: bool = False

    @property
    def rounds_to_zero(self) -> bool:
        """Whether sums over head dims and positions are rounded towards zero."""
        return self.product == Product.Mma and "float32" in self.dtypes

    def lacking(self, device: Device) -> str | None:
        """What the family needs that the device has not, or None."""
        if device.capability < self.min_capability:
            return f"sm_{self.min_capability} or later"
        if self.needs_fast_float64 and not device.fast_float64:
            return "float64 at half the rate of float32"
        return None

    def refusal(self, problem: AttentionProblem, device: Device) -> str | None:
        if problem.dtype not in self.dtypes:
            return f"needs {' or '.join(self.dtypes)}, got {problem.dtype}"
        lacking = self.lacking(device)
        if lacking is not None:
            return f"needs {lacking}, got {device.arch}"
        dims = max(problem.head_dim, problem.head_dim_v)
        if self.max_head_dim is not None and dims > self.max_head_dim:
            return f"needs head dims of at most {self.max_head_dim}, got {dims}"
        for launch in self.launches(problem, device):
            if launch.grid > MAX_GRID:
                return f"needs at most {MAX_GRID} blocks, got {launch.grid} in {launch.kernel.name}"
        return None

    def launches(self, problem: AttentionProblem, device: Device) -> tuple[Launch, ...]:
        if problem.op == "forward":
            launches = [self._launch("fwd", problem, device)]
        else:
            launches = [_delta_launch(problem)]
            if "q" in problem.wrt:
                launches.append(self._launch("bwd_q", problem, device))
            if {"k", "v"} & set(problem.wrt):
                launches.append(self._launch("bwd_kv", problem, device))
        return tuple(launch for launch in launches if launch.grid > 0)

    def smem_bytes(self, kernel: str, tile: Tile, accumulator: str) -> int:
        """Dynamic shared memory; the kernel asserts the same sum (``kSharedBytes``)."""
        itemsize = ITEMSIZE[accumulator]
        own, stream = tile.block_m, tile.block_n
        if kernel == "bwd_kv":
            own, stream = stream, own
        padding, weight_padding = (16, 8) if self.product == Product.Fma else (32, 4)
        row = tile.block_d + padding // itemsize
        own_tiles = 1 if kernel == "fwd" else 2
        elements = own_tiles * own * row + 2 * stream * row + own * (stream + weight_padding)
        if kernel == "bwd_kv":
            elements += 2 * stream  # lse and delta of the streamed rows
        return elements * itemsize

    def choose_tile(self, kernel: str, problem: AttentionProblem, device: Device) -> Tile:
        """The largest tile that fits and still gives every SM a block, else the smallest."""
        accumulator = problem.accumulator
        tiles = self.fitting_tiles(kernel, accumulator, device)
        filling = (tile for tile in tiles if grid(kernel, tile, problem) >= device.num_sms)
        return next(filling, tiles[-1])

    def fitting_tiles(self, kernel: str, accumulator: str, device: Device) -> list[Tile]:
        """The tiles whose shared memory a block of the device can have."""
        return [
            tile
            for tile in TILES[self.name, kernel, accumulator]
            if self.smem_bytes(kernel, tile, accumulator) <= device.smem_per_block
        ]

    def spec(self, kernel: str, tile: Tile, dtype: str, out_dtype: str, wrt: Wrt) -> KernelSpec:
        """One specialisation."""
        own = tile.block_n if kernel == "bwd_kv" else tile.block_m
        num_threads = own // tile.rows_per_thread * tile.num_lanes
        smem_bytes = self.smem_bytes(kernel, tile, ACCUMULATOR[dtype])
        return KernelSpec(
            name=kernel_name(f"{kernel}_{self.name}", dtype, out_dtype, tile, wrt),
            header="kernel/simt.cuh",
            entry=f"kernel::{kernel}_simt",
            config_struct="SimtConfig",
            config=(
                ("dtype", DType.of(dtype)),
                ("out_dtype", DType.of(out_dtype)),
                ("product", self.product),
                ("block_m", tile.block_m),
                ("block_n", tile.block_n),
                ("block_d", tile.block_d),
                ("rows_per_thread", tile.rows_per_thread),
                ("num_lanes", tile.num_lanes),
                ("num_threads", num_threads),
                ("smem_bytes", smem_bytes),
                ("wrt", wrt),
            ),
            params_struct="FwdParams" if kernel == "fwd" else "BwdParams",
            num_threads=num_threads,
            min_blocks=tile.min_blocks,
            smem_bytes=smem_bytes,
        )

    def every_spec(self, device: Device) -> Iterator[KernelSpec]:
        """Every specialisation that a plan can choose on a device."""
        if self.lacking(device) is not None:
            return
        wrts = {
            "fwd": (Wrt(0),),
            "bwd_q": (Wrt.Dq,),
            "bwd_kv": (Wrt.Dk | Wrt.Dv, Wrt.Dk, Wrt.Dv),
        }
        for dtype, out_dtype in output_dtypes():
            if dtype in self.dtypes:
                for kernel, wanted in wrts.items():
                    for tile in self.fitting_tiles(kernel, ACCUMULATOR[dtype], device):
                        for wrt in wanted:
                            yield self.spec(kernel, tile, dtype, out_dtype, wrt)

    def _launch(self, kernel: str, problem: AttentionProblem, device: Device) -> Launch:
        tile = self.choose_tile(kernel, problem, device)
        wrt = Wrt(0)
        for name in problem.wrt:
            if name in {"fwd": "", "bwd_q": "q", "bwd_kv": "kv"}[kernel]:
                wrt |= _WRT[name]
        spec = self.spec(kernel, tile, problem.dtype, problem.out_dtype, wrt)
        return Launch(spec, grid(kernel, tile, problem))


SIMT = Tiled("simt", Product.Fma, tuple(ACCUMULATOR), 75)
# why 64: longer sums of scores, rounded towards zero, leave float32 accuracy.
TF32X3 = Tiled("tf32x3", Product.Mma, ("float32",), 80, max_head_dim=64)
# why: where float64 is slow, the instruction is there, without units behind it.
DMMA = Tiled("dmma", Product.Mma, ("float64",), 80, needs_fast_float64=True)

FAMILIES: tuple[Family, ...] = (TF32X3, DMMA, SIMT)


def grid(kernel: str, tile: Tile, problem: AttentionProblem) -> int:
    """Blocks: owned tiles x slices of the result's head dims x heads x batch."""
    if kernel == "bwd_kv":
        dims = max(
            problem.head_dim if "k" in problem.wrt else 0,
            problem.head_dim_v if "v" in problem.wrt else 0,
        )
        tiles, heads = ceil_div(problem.seqlen_k, tile.block_n), problem.num_heads_kv
    else:
        dims = problem.head_dim_v if kernel == "fwd" else problem.head_dim
        tiles, heads = ceil_div(problem.seqlen_q, tile.block_m), problem.num_heads_q
    return tiles * ceil_div(dims, tile.block_d) * heads * problem.batch


def output_dtypes() -> Iterator[tuple[str, str]]:
    """Every pair of a dtype and a dtype that out may have."""
    for dtype, accumulator in ACCUMULATOR.items():
        yield from sorted({(dtype, dtype), (dtype, accumulator)})


def delta_spec(dtype: str, out_dtype: str) -> KernelSpec:
    """The kernel that computes delta, which every backward reads."""
    return KernelSpec(
        name=kernel_name("bwd_delta", dtype, out_dtype),
        header="kernel/bwd_delta.cuh",
        entry="kernel::bwd_delta",
        config_struct="DeltaConfig",
        config=(
            ("dtype", DType.of(dtype)),
            ("out_dtype", DType.of(out_dtype)),
            ("num_threads", _DELTA_THREADS),
        ),
        params_struct="BwdParams",
        num_threads=_DELTA_THREADS,
        min_blocks=1,
        smem_bytes=0,
    )


def _delta_launch(problem: AttentionProblem) -> Launch:
    rows = problem.batch * problem.num_heads_q * problem.seqlen_q
    spec = delta_spec(problem.dtype, problem.out_dtype)
    return Launch(spec, ceil_div(rows, _DELTA_THREADS // _WARP))


def every_spec(device: Device) -> Iterator[KernelSpec]:
    """Every specialisation of every family on a device: what the tests compile."""
    for dtype, out_dtype in output_dtypes():
        yield delta_spec(dtype, out_dtype)
    for family in FAMILIES:
        yield from family.every_spec(device)
