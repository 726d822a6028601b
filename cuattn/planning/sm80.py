"""16-bit inputs on the tensor cores of sm_80 and later (kernels_cu/mainloop/*_sm80.cuh)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from cuattn.abi.structs import DType, Wrt
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
from cuattn.planning.schedule import RangeSchedule, ceil_div
from cuattn.planning.tuning import BUCKETS, SM80_TILES, Sm80Tile

_MERGE_THREADS = 128
_WARP = 32
#: A split of the keys has at least so many tiles, or merging costs more than it gains.
_MIN_TILES_OF_SPLIT = 4
_ALL = Wrt.Dq | Wrt.Dk | Wrt.Dv


@dataclass(frozen=True, slots=True)
class Sm80:
    """mma.sync, ldmatrix and cp.async: head dims to 256 in buckets, any stride and alignment.

    Where few query tiles would leave the device idle, the forward splits the keys and merges the
    parts. A backward whose keys one tile holds is one kernel. Any other adds dq in memory, in any
    order; ``deterministic=True`` gets two kernels that add nothing there.
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
        splits = _num_splits(tile, problem, device)
        spec = self.spec("fwd", bucket(problem), tile, problem.dtype, problem.out_dtype)
        launches = [Launch(spec, _grid("fwd", tile, problem) * splits)]
        workspace: dict[str, int] = {}
        if splits > 1:
            rows = num_rows(problem)
            launches.append(
                Launch(
                    merge_spec(problem.dtype, problem.out_dtype),
                    ceil_div(rows * _WARP, _MERGE_THREADS),
                )
            )
            workspace = {"part_out": splits * rows * problem.head_dim_v, "part_lse": splits * rows}
        return Plan.of(self.name, problem, device, launches, workspace, num_splits=splits)

    def _backward(self, problem: AttentionProblem, device: Device) -> Plan:
        casts_dout = problem.out_dtype != problem.dtype
        dims, wrt = bucket(problem), wrt_flags(problem.wrt)
        one = self.one_tile(problem, device)
        if one is not None:
            spec = self.spec("bwd_one", dims, one, problem.dtype, problem.dtype)
            return Plan.of(
                self.name, problem, device, [Launch(spec, _grid("bwd_one", one, problem))]
            )
        launches = [prepare_launch(problem, casts_dout=casts_dout)]
        workspace = {"delta": num_rows(problem)}
        if casts_dout:
            # In units of the accumulator, of which two elements fill one.
            workspace["dout_cast"] = ceil_div(num_rows(problem) * problem.head_dim_v, 2)

        def launch(kernel: str, tile: Sm80Tile) -> Launch:
            spec = self.spec(kernel, dims, tile, problem.dtype, problem.dtype)
            return Launch(spec, _grid(kernel, tile, problem))

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
        """The largest tile that fits, is not mostly empty and gives every SM a block."""
        tiles = self.fitting_tiles(kernel, bucket(problem), device)
        own = problem.seqlen_k if kernel in ("bwd", "bwd_kv") else problem.seqlen_q
        for tile in tiles:
            blocks = _grid(kernel, tile, problem)
            if kernel == "fwd":
                blocks *= _most_splits(tile, problem)
            if blocks >= device.num_sms and own > tile.own(kernel) // 2:
                return tile
        return tiles[-1]

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
        """One specialisation of fwd, bwd, bwd_one, bwd_finish, bwd_q or bwd_kv."""
        wrt = {"fwd": Wrt(0), "bwd_q": Wrt.Dq, "bwd_kv": Wrt.Dk | Wrt.Dv}
        num_threads = tile.own(kernel) // tile.warp_rows * _WARP
        if kernel not in ("fwd", "bwd_q"):
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
            yield merge_spec(dtype, out_dtype)
            kernels: tuple[str, ...] = ("fwd", "bwd", "bwd_one", "bwd_finish", "bwd_q", "bwd_kv")
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
    weights = 2 * tile.block_m * tile.block_n
    gradients = {"bwd_kv": 0, "bwd_one": 1}.get(kernel, 2) * weights
    outputs = queries if kernel == "bwd_one" else 0
    return 2 * keys + 4 * queries + weights + gradients + 16 * tile.block_m + outputs


def merge_spec(dtype: str, out_dtype: str) -> KernelSpec:
    """The kernel that merges splits of the keys."""
    return KernelSpec(
        name=kernel_name("fwd_merge", dtype, out_dtype),
        header="kernel/fwd_merge.cuh",
        entry="kernel::fwd_merge",
        config_struct="MergeConfig",
        config=(
            ("dtype", DType.of(dtype)),
            ("out_dtype", DType.of(out_dtype)),
            ("block_d", BUCKETS[-1]),
            ("num_threads", _MERGE_THREADS),
        ),
        params_struct="FwdParams",
        num_threads=_MERGE_THREADS,
        min_blocks=1,
        smem_bytes=0,
    )


def _grid(kernel: str, tile: Sm80Tile, problem: AttentionProblem) -> int:
    """Blocks: owned tiles x heads x batch."""
    if kernel in ("bwd", "bwd_one", "bwd_kv"):
        return ceil_div(problem.seqlen_k, tile.block_n) * problem.num_heads_kv * problem.batch
    return ceil_div(problem.seqlen_q, tile.block_m) * problem.num_heads_q * problem.batch


def _most_splits(tile: Sm80Tile, problem: AttentionProblem) -> int:
    """Parts that the keys of the longest query tile can have."""
    schedule = RangeSchedule.of(problem, tile.block_m, tile.block_n)
    last = max(0, schedule.num_m_blocks - 1)
    most = max(map(_length, (schedule.key_range(0), schedule.key_range(last))))
    return max(1, ceil_div(most, tile.block_n) // _MIN_TILES_OF_SPLIT)


def _length(span: tuple[int, int]) -> int:
    return span[1] - span[0]


def _num_splits(tile: Sm80Tile, problem: AttentionProblem, device: Device) -> int:
    """Parts of the keys: as many as fill the device once, where half of it would be idle."""
    blocks = max(1, _grid("fwd", tile, problem))
    slots = device.num_sms * tile.min_blocks
    return max(1, min(slots // blocks, _most_splits(tile, problem)))
