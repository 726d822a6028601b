"""Readable kernel names: the symbol, and so what profilers, logs and the cache folder show.

``cuattn_<kernel>_<dtype>[_o<out dtype>]_m<block_m>n<block_n>d<block_d>[_<gradients>]``, defaults
omitted, for example ``cuattn_bwd_kv_simt_bf16_m32n128d64_dkdv`` or
``cuattn_fwd_sm80_f16_m128n64d128``.
"""

from __future__ import annotations

from cuattn.abi.structs import Wrt

_SHORT = {"float16": "f16", "bfloat16": "bf16", "float32": "f32", "float64": "f64"}


def kernel_name(
    kernel: str,
    dtype: str,
    out_dtype: str,
    blocks: tuple[int, int, int] | None = None,
    wrt: Wrt = Wrt(0),
) -> str:
    """The name of one specialisation; two that differ never share one.

    ``blocks`` are queries, keys and head dims of a tile.
    """
    parts = ["cuattn", kernel, _SHORT[dtype]]
    if out_dtype != dtype:
        parts.append("o" + _SHORT[out_dtype])
    if blocks is not None:
        parts.append("m{}n{}d{}".format(*blocks))
    if wrt & (Wrt.Dk | Wrt.Dv):
        parts.append("dk" * bool(wrt & Wrt.Dk) + "dv" * bool(wrt & Wrt.Dv))
    return "_".join(parts)
