"""The plain main loops as kernel families: one for each kind of arithmetic unit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from cuattn._typing import ACCUMULATOR
from cuattn.abi.structs import DType, Product, Wrt
from cuattn.planning.device import Device
from cuattn.planning.family import (
    num_rows,
    output_dtypes,
    prepare_launch,
    refusal_of,
    wrt_flags,
)
from cuattn.planning.names import kernel_name
from cuattn.planning.plan import ITEMSIZE, KernelSpec, Launch, Plan
from cuattn.planning.problem import AttentionProblem
from cuattn.planning.schedule import ceil_div
from cuattn.planning.tuning import TILES, Tile


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
        return refusal_of(self, self.max_head_dim, problem, device)

    def plan(self, problem: AttentionProblem, device: Device) -> Plan:
        if problem.op == "forward":
            launch = self._launch("fwd", problem, device, Wrt(0))
            return Plan.of(self.name, problem, device, [launch])
        launches, wrt = [prepare_launch(problem)], wrt_flags(problem.wrt)
        if wrt & Wrt.Dq:
            launches.append(self._launch("bwd_q", problem, device, Wrt.Dq))
        if wrt & (Wrt.Dk | Wrt.Dv):
            launches.append(self._launch("bwd_kv", problem, device, wrt & ~Wrt.Dq))
        workspace = {"delta": num_rows(problem)}
        return Plan.of(self.name, problem, device, launches, workspace)

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
            name=kernel_name(
                f"{kernel}_{self.name}",
                dtype,
                out_dtype,
                (tile.block_m, tile.block_n, tile.block_d),
                wrt,
            ),
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

    def _launch(self, kernel: str, problem: AttentionProblem, device: Device, wrt: Wrt) -> Launch:
        tile = self.choose_tile(kernel, problem, device)
        spec = self.spec(kernel, tile, problem.dtype, problem.out_dtype, wrt)
        return Launch(spec, grid(kernel, tile, problem))


SIMT = Tiled("simt", Product.Fma, tuple(ACCUMULATOR), 75)
# why 64: longer sums of scores, rounded towards zero, leave float32 accuracy.
TF32X3 = Tiled("tf32x3", Product.Mma, ("float32",), 80, max_head_dim=64)
# why: where float64 is slow, the instruction is there, without units behind it.
DMMA = Tiled("dmma", Product.Mma, ("float64",), 80, needs_fast_float64=True)


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
