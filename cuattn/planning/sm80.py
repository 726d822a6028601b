"""16-bit inputs on the tensor cores of sm_80 and later (kernels_cu/mainloop/*_sm80.cuh)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from cuattn.abi.structs import DType, Wrt
from cuattn.planning.cost import Loop, blocks, blocks_of_sm, merge_microseconds
from cuattn.planning.device import Device
from cuattn.planning.family import (
    num_rows,
    output_dtypes,
    prepare_launch,
    prepare_spec,
    refusal_of,
    wrt_flags,
)
from cuattn.planning.names import kernel_name
from cuattn.planning.plan import KernelSpec, Launch, Plan
from cuattn.planning.problem import AttentionProblem
from cuattn.planning.schedule import ceil_div
from cuattn.planning.tuning import BUCKETS, OWNS_QUERIES, SM80_TILES, Sm80Tile

_MERGE_THREADS = 128
_MERGE_DIMS = 128, BUCKETS[-1]
_WARP = 32
#: Keys times queries that meet in a block of bwd_both which owns keys and has the SM to itself;
#: twice so many in one that owns queries.
_MOST_PAIRS = 64 * 1024
#: Estimates that differ by less are equal.
_TIE = 1.02
_ALL = Wrt.Dq | Wrt.Dk | Wrt.Dv


@dataclass(frozen=True, slots=True)
class Sm80:
    """mma.sync, ldmatrix and cp.async: head dims to 256 in buckets, any stride and alignment.

    Where few query tiles would leave the device idle, the forward splits the keys and merges the
    parts. A backward whose keys one tile holds is one kernel, and so is one whose two loops fit the
    device side by side. Any other adds dq in memory, in any order; ``deterministic=True`` gets two
    kernels that add nothing there.
    """

    name: str = "sm80"
    dtypes: tuple[str, ...] = ("float16", "bfloat16")
    min_capability: int = 80
    rounds_to_zero: bool = True

    def lacking(self, device: Device) -> str | None:
        """What the family needs that the device has not, or None."""
        if device.capability < self.min_capability:
            return f"sm_{self.min_capability} or later"
        return None

    def refusal(self, problem: AttentionProblem, device: Device) -> str | None:
        return refusal_of(self, BUCKETS[-1], problem, device)

    def plan(self, problem: AttentionProblem, device: Device) -> Plan:
        if problem.op == "forward":
            return self._forward(problem, device)
        return self._backward(problem, device)

    def _forward(self, problem: AttentionProblem, device: Device) -> Plan:
        tile = self.choose_tile("fwd", problem, device)
        _, splits = best_splits(tile, problem, device)
        spec = self.spec("fwd", bucket(problem), tile, problem.dtype, problem.out_dtype)
        launches = [Launch(spec, grid("fwd", tile, problem) * splits)]
        workspace: dict[str, int] = {}
        if splits > 1:
            rows = num_rows(problem)
            launches.append(
                Launch(
                    merge_spec(problem.dtype, problem.out_dtype, problem.head_dim_v),
                    ceil_div(rows * _WARP, _MERGE_THREADS),
                )
            )
            workspace = {"part_out": splits * rows * problem.head_dim_v, "part_lse": splits * rows}
        return Plan.of(self.name, problem, device, launches, workspace, num_splits=splits)

    def _backward(self, problem: AttentionProblem, device: Device) -> Plan:
        casts_dout = problem.out_dtype != problem.dtype
        dims, wrt = bucket(problem), wrt_flags(problem.wrt)

        def launch(kernel: str, tile: Sm80Tile) -> Launch:
            spec = self.spec(kernel, dims, tile, problem.dtype, problem.dtype)
            note = _note(tile, problem) if kernel == "bwd_both" else ""
            return Launch(spec, grid(kernel, tile, problem), note)

        for kernel, tile_for in (("bwd_one", self.one_tile), ("bwd_both", self.both_tile)):
            tile = tile_for(problem, device)
            if tile is not None:
                return Plan.of(self.name, problem, device, [launch(kernel, tile)])
        launches = [prepare_launch(problem, casts_dout=casts_dout)]
        workspace = {"delta": num_rows(problem)}
        if casts_dout:
            # In units of the accumulator, of which two elements fill one.
            workspace["dout_cast"] = ceil_div(num_rows(problem) * problem.head_dim_v, 2)

        others = wrt & (Wrt.Dk | Wrt.Dv)
        if wrt & Wrt.Dq and others and not problem.deterministic:
            tile = self.choose_tile("bwd", problem, device)
            tiles = ceil_div(problem.seqlen_q, tile.block_m) * problem.num_heads_q * problem.batch
            workspace["dq_sum"] = tiles * tile.block_m * dims
            spec = self.spec("bwd_finish", dims, tile, problem.dtype, problem.dtype)
            finish = Launch(spec, tiles * (tile.block_m * dims // 4) // spec.num_threads)
            launches += [launch("bwd", tile), finish]
        else:
            for kernel, is_wanted in (("bwd_q", wrt & Wrt.Dq), ("bwd_kv", others)):
                if is_wanted:
                    launches.append(launch(kernel, self.choose_tile(kernel, problem, device)))
        return Plan.of(self.name, problem, device, launches, workspace)

    def choose_tile(self, kernel: str, problem: AttentionProblem, device: Device) -> Sm80Tile:
        """The tile that should take least time, the largest of those that should take as long."""

        def microseconds(tile: Sm80Tile) -> float:
            if kernel == "fwd":
                return best_splits(tile, problem, device)[0]
            return loop(kernel, tile, problem, device).microseconds()

        tiles = self.fitting_tiles(kernel, bucket(problem), device)
        times = [microseconds(tile) for tile in tiles]
        most = _TIE * min(times)
        return next(tile for tile, time in zip(tiles, times, strict=True) if time <= most)

    def one_tile(self, problem: AttentionProblem, device: Device) -> Sm80Tile | None:
        """The smallest tile that holds all keys, where there is one."""
        holding = self.holding_tiles(problem, device)
        return holding[-1] if holding else None

    def holding_tiles(self, problem: AttentionProblem, device: Device) -> list[Sm80Tile]:
        """The tiles of bwd_one that hold all keys; none where there is no key, or dout is cast."""
        if problem.seqlen_k == 0 or problem.out_dtype != problem.dtype:
            return []
        tiles = self.fitting_tiles("bwd_one", bucket(problem), device)
        return [tile for tile in tiles if tile.block_n >= problem.seqlen_k]

    def both_tile(self, problem: AttentionProblem, device: Device) -> Sm80Tile | None:
        """The first tile in which both loops fit the device side by side, where there is one.

        None where a block would work so long that three kernels take less time, which do five
        products instead of seven.
        """
        dims, wrt = bucket(problem), wrt_flags(problem.wrt)
        rows = problem.seqlen_q * problem.group_size
        for tile in self.side_by_side_tiles(problem, device):
            together = blocks_of_sm(tile, smem_bytes("bwd_both", dims, tile), device)
            own_keys = tile.block_n * rows if wrt & (Wrt.Dk | Wrt.Dv) else 0
            own_queries = _own_queries(tile) * problem.seqlen_k if wrt & Wrt.Dq else 0
            fits = grid("bwd_both", tile, problem) <= device.num_sms * together
            if fits and max(own_keys, own_queries // 2) * together <= _MOST_PAIRS:
                return tile
        return None

    def side_by_side_tiles(self, problem: AttentionProblem, device: Device) -> list[Sm80Tile]:
        """The tiles of bwd_both for a problem, whether they pay or not; none where dout is cast."""
        if problem.out_dtype != problem.dtype:
            return []
        return self.fitting_tiles("bwd_both", bucket(problem), device)

    def fitting_tiles(self, kernel: str, block_d: int, device: Device) -> list[Sm80Tile]:
        """The tiles whose shared memory a block of the device can have."""
        return [
            tile
            for tile in SM80_TILES[_table(kernel), block_d]
            if smem_bytes(kernel, block_d, tile) <= device.smem_per_block
        ]

    def spec(
        self, kernel: str, block_d: int, tile: Sm80Tile, dtype: str, out_dtype: str
    ) -> KernelSpec:
        """One specialisation of fwd, bwd, bwd_one, bwd_both, bwd_finish, bwd_q or bwd_kv."""
        wrt = {"fwd": Wrt(0), "bwd_q": Wrt.Dq, "bwd_kv": Wrt.Dk | Wrt.Dv}
        num_threads = tile.own(kernel) // tile.warp_rows * _WARP
        if kernel not in OWNS_QUERIES:
            num_threads *= 2  # one warp for each role
        smem = smem_bytes(kernel, block_d, tile)
        finishes = kernel == "bwd_finish"
        return KernelSpec(
            name=kernel_name(
                f"{kernel}_{self.name}", dtype, out_dtype, (tile.block_m, tile.block_n, block_d)
            ),
            header="kernel/bwd_finish.cuh" if finishes else "kernel/sm80.cuh",
            entry="kernel::bwd_finish" if finishes else f"kernel::{kernel}_{self.name}",
            config_struct="Sm80Config",
            config=(
                ("dtype", DType.of(dtype)),
                ("out_dtype", DType.of(out_dtype)),
                ("block_m", tile.block_m),
                ("block_n", tile.block_n),
                ("block_d", block_d),
                ("warp_rows", tile.warp_rows),
                ("num_stages", tile.num_stages),
                ("held_steps", tile.held_steps),
                ("rolled_copies", int(tile.rolled_copies)),
                ("num_threads", num_threads),
                ("smem_bytes", smem),
                ("wrt", wrt.get(kernel, _ALL)),
            ),
            params_struct="FwdParams" if kernel == "fwd" else "BwdParams",
            num_threads=num_threads,
            min_blocks=1 if finishes else tile.min_blocks,
            smem_bytes=0 if finishes else smem,
            max_spill_bytes=0 if finishes else tile.max_spill_bytes,
        )

    def every_spec(self, device: Device) -> Iterator[KernelSpec]:
        """Every specialisation that a plan can choose on a device."""
        if self.lacking(device) is not None:
            return
        for dtype, out_dtype in output_dtypes():
            if dtype not in self.dtypes:
                continue
            for head_dim_v in _MERGE_DIMS:
                yield merge_spec(dtype, out_dtype, head_dim_v)
            kernels: tuple[str, ...] = (
                "fwd",
                "bwd",
                "bwd_one",
                "bwd_both",
                "bwd_finish",
                "bwd_q",
                "bwd_kv",
            )
            if out_dtype != dtype:
                yield prepare_spec(dtype, out_dtype, casts_dout=True)
                kernels = ("fwd",)
            for kernel in kernels:
                for block_d in BUCKETS:
                    for tile in self.fitting_tiles(kernel, block_d, device):
                        yield self.spec(kernel, block_d, tile, dtype, out_dtype)


SM80 = Sm80()


def bucket(problem: AttentionProblem) -> int:
    """Head dims that a kernel computes for those of a problem."""
    dims = max(problem.head_dim, problem.head_dim_v)
    return next(size for size in BUCKETS if size >= dims)


def _table(kernel: str) -> str:
    return "bwd" if kernel in ("bwd_finish", "bwd_kv") else kernel


def smem_bytes(kernel: str, block_d: int, tile: Sm80Tile) -> int:
    """Dynamic shared memory; the kernel asserts the same sum (``kSharedBytes``)."""
    queries, keys = 2 * tile.block_m * block_d, 2 * tile.block_n * block_d
    if kernel == "fwd":
        return queries + 2 * tile.num_stages * keys
    if kernel == "bwd_q":
        return 2 * queries + 4 * keys
    if kernel == "bwd_both":
        own_keys = smem_bytes("bwd_kv", block_d, tile) + queries
        return max(own_keys, 4 * block_d * (_own_queries(tile) + 2 * tile.block_m))
    weights = 2 * tile.block_m * tile.block_n
    gradients = {"bwd_kv": 0, "bwd_one": 1}.get(kernel, 2) * weights
    outputs = queries if kernel == "bwd_one" else 0
    return 2 * keys + 4 * queries + weights + gradients + 16 * tile.block_m + outputs


def _own_queries(tile: Sm80Tile) -> int:
    """Queries that a block of bwd_both owns: 16 for each of its warps."""
    return 16 * 2 * tile.block_n // tile.warp_rows


def merge_spec(dtype: str, out_dtype: str, head_dim_v: int) -> KernelSpec:
    """The kernel that merges splits of the keys."""
    block_d = next(dims for dims in _MERGE_DIMS if dims >= head_dim_v)
    return KernelSpec(
        name=f"{kernel_name('fwd_merge', dtype, out_dtype)}_d{block_d}",
        header="kernel/fwd_merge.cuh",
        entry="kernel::fwd_merge",
        config_struct="MergeConfig",
        config=(
            ("dtype", DType.of(dtype)),
            ("out_dtype", DType.of(out_dtype)),
            ("block_d", block_d),
            ("num_threads", _MERGE_THREADS),
        ),
        params_struct="FwdParams",
        num_threads=_MERGE_THREADS,
        min_blocks=1,
        smem_bytes=0,
    )


def grid(kernel: str, tile: Sm80Tile, problem: AttentionProblem) -> int:
    """Blocks of a launch, but for splits of the keys."""
    if kernel != "bwd_both":
        return blocks(kernel, tile, problem)
    return sum(_both_blocks(tile, problem))


def _both_blocks(tile: Sm80Tile, problem: AttentionProblem) -> tuple[int, int]:
    """Blocks of bwd_both that own keys, and those that own queries."""
    wanted = wrt_flags(problem.wrt)
    owners = replace(tile, block_m=_own_queries(tile))
    keys = blocks("bwd_kv", tile, problem) if wanted & (Wrt.Dk | Wrt.Dv) else 0
    return keys, blocks("bwd_q", owners, problem) if wanted & Wrt.Dq else 0


def _note(tile: Sm80Tile, problem: AttentionProblem) -> str:
    keys, queries = _both_blocks(tile, problem)
    return f"{keys} own {tile.block_n} keys each, {queries} own {_own_queries(tile)} queries each"


def loop(kernel: str, tile: Sm80Tile, problem: AttentionProblem, device: Device) -> Loop:
    """What a kernel's time in a tile is estimated from."""
    dims = bucket(problem)
    return Loop.of(kernel, dims, tile, smem_bytes(kernel, dims, tile), problem, device)


def best_splits(tile: Sm80Tile, problem: AttentionProblem, device: Device) -> tuple[float, int]:
    """The least estimate of a forward, and for how many parts of the keys.

    As many as fill the device twice at most, that number or a whole part of it.
    """
    its = loop("fwd", tile, problem, device)
    slots = 2 * its.num_sms * its.blocks_of_sm // max(1, its.blocks)
    most = max(1, min(slots, max(its.passes)))
    return min(
        (its.microseconds(splits) + merge_microseconds(problem, splits), splits)
        for splits in {most // fewer for fewer in range(1, most + 1)}
    )
