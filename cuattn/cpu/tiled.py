"""The CPU engine, and the readable model of every kernel: one schedule, one state, tile by tile.

Forward, per query tile: load Q; for each key tile of the schedule S = Q K^T, scale it, hide what
the element rule hides, push the tile into the state (m, l, o), and finish with out = o / l,
lse = m + ln(l).

Backward, per key tile, over the query tiles of the transposed schedule: P = exp(S - lse) again
from lse, dV += P^T dO, dS = P * (dO V^T - delta), dQ += dS K, dK += dS^T Q.

Two sums are left to the products, which do them almost for nothing: V carries a column of ones,
which gathers l beside o, and adds the last column of dO, -delta, to dP. m and lse are subtracted
from finished scores, as in the kernels: inside a product, one of -1e9 would take every digit of the
scores that follow it.
All arrays are in the axes (batch, seqlen, heads, dim), tiles in (heads, rows, dim).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuattn.cpu.heads import Cores, Heads, Visible, matmul, parts, run
from cuattn.planning.problem import AttentionProblem
from cuattn.planning.schedule import TileKind

Array = NDArray[Any]


def _tile(scratch: Array, rows: Array, keys: Array) -> Array:
    """Room in ``scratch`` for one score per pair of a row and a key."""
    shape = (rows.shape[0], rows.shape[1], keys.shape[1])
    return scratch[: shape[0] * shape[1] * shape[2]].reshape(shape)


class State:
    """What the rows of one query tile have seen of the keys: (m, l, o), identity (-inf, 0, 0).

    l is the last column of o: V has a column of ones, so P V carries the row sums along. m follows
    the scores when some may pass it by more than SLACK, which the algebra allows, l and o being
    relative to the same m: to look for the largest score of all is three times as fast as row by
    row.
    """

    #: exp(8) is far from any overflow.
    SLACK = 8

    def __init__(self, rows: tuple[int, int], columns_v: int, dtype: np.dtype[Any]) -> None:
        self.m = np.full((*rows, 1), -np.inf, dtype)
        self.o = np.zeros((*rows, columns_v), dtype)
        self.l = self.o[:, :, -1:]
        self._o_tile = np.empty_like(self.o)

    def push(self, S: Array, V: Array) -> None:
        """Merge one tile of scores and values; S is overwritten with P."""
        if not S.max() <= self.m.min() + self.SLACK:
            m = np.maximum(self.m, S.max(axis=2, keepdims=True))
            self.o *= np.exp(self.m - _shift(m))
            self.m = m
        S -= _shift(self.m)
        self.o += matmul(np.exp(S, out=S), V, self._o_tile)

    def finish(self) -> tuple[Array, Array]:
        """Out and lse; a row that saw nothing gives 0 and -inf."""
        out = self.o[:, :, :-1] / np.where(self.l == 0, 1, self.l)
        return out, np.log(self.l) + self.m


def _shift(m: Array) -> Array:
    """What to subtract for m: -inf - -inf is no number."""
    return np.where(np.isneginf(m), 0, m)


def forward(
    problem: AttentionProblem, q: Array, k: Array, v: Array, out: Array, lse: Array
) -> None:
    """Write out and lse.

    Parameters
    ----------
    q : array, shape (batch, seqlen_q, heads_q, head_dim), any strides
    k : array, shape (batch, seqlen_k, heads_kv, head_dim), any strides
    v : array, shape (batch, seqlen_k, heads_kv, head_dim_v), any strides
    out : array, shape (batch, seqlen_q, heads_q, head_dim_v), any strides without self-overlap
    lse : array, shape (batch, heads_q, seqlen_q), the accumulator's dtype
    """
    visible = Visible.of(problem)
    schedule, dtype = visible.schedule, problem.accumulator
    for empty_rows in (slice(0, visible.rows.start), slice(visible.rows.stop, None)):
        out[:, empty_rows] = 0
        lse[:, :, empty_rows] = -np.inf
    if visible.empty:
        out[...] = 0
        lse[...] = -np.inf
        return

    scale = np.dtype(dtype).type(problem.softmax_scale)

    def work(heads: Heads, cores: Cores, num_parts: int) -> None:
        K = heads.load(k, visible.keys, dtype)
        V = heads.load_with_column(v, visible.keys, dtype)

        def walk(query_tiles: Sequence[tuple[int, int]]) -> None:
            with np.errstate(all="ignore"):
                scores = np.empty(len(heads) * schedule.block_m * schedule.block_n, dtype)
                for group_idx, m_block in cores.going(query_tiles):
                    rows = visible.row_slice(m_block)
                    Q = heads.load(q, rows, dtype, group_idx)
                    state = _attend(visible, m_block, Q, K, V, scale, scores)
                    out_tile, lse_tile = state.finish()
                    heads.store(out, rows, out_tile, group_idx)
                    heads.store_rows(lse, rows, lse_tile, group_idx)

        query_tiles = [
            (group_idx, m_block)
            for group_idx in range(problem.group_size)
            for m_block in range(schedule.num_m_blocks)
        ]
        for _ in cores.map(walk, parts(query_tiles, num_parts)):
            pass

    run(problem, visible, work)


def _attend(
    visible: Visible, m_block: int, Q: Array, K: Array, V: Array, scale: Any, scores: Array
) -> State:
    """One query tile over its key tiles: the forward's inner loop."""
    schedule = visible.schedule
    state = State(Q.shape[:2], V.shape[2], Q.dtype)
    for n_block, kind in schedule.key_tiles(m_block):
        keys = visible.key_slice(m_block, n_block)
        S = matmul(Q, K[:, keys].swapaxes(1, 2), _tile(scores, Q, K[:, keys]))
        S *= scale
        if kind is TileKind.PARTIAL:
            np.copyto(S, -np.inf, where=visible.hidden(m_block, keys))
        state.push(S, V[:, keys])
    return state


@dataclass(frozen=True)
class QueryHead:
    """What the backward reads of one query head (of every group in the batch), in its rows."""

    Q: Array
    lse: Array  # (heads, rows, 1); of a blind row +inf, from which every weight is 0
    dO: Array  # the last column is -delta = dlse - rowsum(dO * out)
    blind: Array  # (heads, rows): every score is -inf; nothing of such a row is used

    @staticmethod
    def load(
        problem: AttentionProblem,
        visible: Visible,
        heads: Heads,
        group_idx: int,
        q: Array,
        out: Array,
        lse: Array,
        dout: Array | None,
        dlse: Array | None,
    ) -> QueryHead:
        rows, dtype = visible.rows, problem.accumulator
        Q = heads.load(q, rows, dtype, group_idx)
        L = heads.load_rows(lse, rows, dtype, group_idx)
        if dout is None:
            dO = np.zeros((len(heads), Q.shape[1], problem.head_dim_v + 1), dtype)
        else:
            dO = heads.load_with_column(dout, rows, dtype, group_idx)
            O = heads.load(out, rows, dtype, group_idx)  # noqa: E741
            dO[:, :, -1] = -np.einsum("hid,hid->hi", dO[:, :, :-1], O)
        if dlse is not None:
            dO[:, :, -1:] += heads.load_rows(dlse, rows, dtype, group_idx)
        blind = np.isneginf(L[:, :, 0])
        if blind.any():
            Q[blind], L[blind], dO[blind] = 0, np.inf, 0
        return QueryHead(Q, L, dO, blind)


def backward(
    problem: AttentionProblem,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    dout: Array | None,
    dlse: Array | None,
    *,
    dq: Array | None,
    dk: Array | None,
    dv: Array | None,
) -> None:
    """Write the gradients that are asked for; P is computed again from lse, tile by tile.

    Parameters
    ----------
    q, k, v, out, lse
        As ``forward`` read and wrote them.
    dout : array, shape of out, any strides, or None for 0
    dlse : array, shape of lse, any strides, or None for 0
    dq, dk, dv : arrays, shapes of q, k, v, any strides without self-overlap, or None
        Written; None where not in ``problem.wrt``.
    """
    visible = Visible.of(problem)
    schedule, dtype = visible.schedule, problem.accumulator
    for gradient, seen in ((dq, visible.rows), (dk, visible.keys), (dv, visible.keys)):
        if gradient is not None:
            gradient[:, : seen.start] = 0
            gradient[:, seen.stop :] = 0
            if visible.empty:
                gradient[...] = 0
    if visible.empty:
        return

    scale = np.dtype(dtype).type(problem.softmax_scale)

    def work(heads: Heads, cores: Cores, num_parts: int) -> None:
        K = heads.load(k, visible.keys, dtype)
        V = heads.load_with_column(v, visible.keys, dtype)
        dK = None if dk is None else np.zeros_like(K)
        dV = None if dv is None else np.zeros_like(V[:, :, :-1])

        def query_head(group_idx: int) -> None:
            """Adds to the key head's dK and dV, which its whole group shares; writes dq."""
            head = QueryHead.load(problem, visible, heads, group_idx, q, out, lse, dout, dlse)

            def walk(n_blocks: Sequence[int]) -> Array | None:
                """Some key tiles: their dK and dV, and what they give to dQ."""
                with np.errstate(all="ignore"):
                    dQ = None if dq is None else np.zeros_like(head.Q)
                    size = len(heads) * schedule.block_m * schedule.block_n
                    scratch = np.empty(size, dtype), np.empty(size, dtype)
                    for n_block in cores.going(n_blocks):
                        _differentiate(visible, n_block, head, K, V, scale, dQ, dK, dV, scratch)
                    return dQ

            dQ_parts = cores.map(walk, parts(range(schedule.num_n_blocks), num_parts))
            dQ: Array | None = None
            for part in dQ_parts:
                dQ = part if dQ is None else np.add(dQ, part, out=dQ)
            if dq is not None and dQ is not None:
                dQ *= scale
                dQ[head.blind] = 0
                heads.store(dq, visible.rows, dQ, group_idx)

        with np.errstate(all="ignore"):
            for group_idx in range(problem.group_size):
                query_head(group_idx)
            if dk is not None and dK is not None:
                dK *= scale
                heads.store(dk, visible.keys, dK)
            if dv is not None and dV is not None:
                heads.store(dv, visible.keys, dV)

    run(problem, visible, work)


def _differentiate(
    visible: Visible,
    n_block: int,
    head: QueryHead,
    K: Array,
    V: Array,
    scale: Any,
    dQ: Array | None,
    dK: Array | None,
    dV: Array | None,
    scratch: tuple[Array, Array],
) -> None:
    """One key tile over the query tiles that see it: the backward's inner loop."""
    schedule = visible.schedule
    for m_block, kind in schedule.query_tiles(n_block):
        rows, keys = slice(*schedule.rows(m_block)), visible.key_slice(m_block, n_block)
        Q_tile, dO_tile, K_tile, V_tile = head.Q[:, rows], head.dO[:, rows], K[:, keys], V[:, keys]
        P = matmul(Q_tile, K_tile.swapaxes(1, 2), _tile(scratch[0], Q_tile, K_tile))
        P *= scale
        P -= head.lse[:, rows]
        np.exp(P, out=P)
        if kind is TileKind.PARTIAL:
            np.copyto(P, 0, where=visible.hidden(m_block, keys))
        if dV is not None:
            dV[:, keys] += matmul(P.swapaxes(1, 2), dO_tile[:, :, :-1])
        if dQ is None and dK is None:
            continue
        dS = matmul(dO_tile, V_tile.swapaxes(1, 2), _tile(scratch[1], Q_tile, K_tile))
        dS *= P
        if dQ is not None:
            dQ[:, rows] += matmul(dS, K_tile)
        if dK is not None:
            dK[:, keys] += matmul(dS.swapaxes(1, 2), Q_tile)
