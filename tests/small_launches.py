"""A few small launches of every family, to be run under compute-sanitizer.

    for tool in memcheck racecheck synccheck initcheck; do
      PYTHONPATH=.:tests compute-sanitizer --tool $tool --error-exitcode 1 \
        python tests/small_launches.py
    done

Without CuPy's pool and every array in an allocation of its own, so that an access past an array's
end meets memory that is not there.
"""

from __future__ import annotations

import itertools

import cupy
import numpy as np
from engines import CUDA_ENGINES, family_of
from small_problems import PROBLEMS
from strategies import Problem
from tiles import RANKS, tile_of_rank

import cuattn
from cuattn import _arrays
from cuattn.attention import prepare
from cuattn.execute import cuda_device
from cuattn.explain import both_passes
from cuattn.planning.options import Options
from cuattn.planning.select import plan_for


def main() -> None:
    """Run every problem in every tile of every family that takes its dtype."""
    cupy.cuda.set_allocator(None)
    _arrays.TOGETHER_BYTES = 0
    done: set[object] = set()
    for name in CUDA_ENGINES:
        with family_of(name) as family:
            mine = [problem for problem in PROBLEMS if problem.dtype in family.dtypes]
            for rank, problem in itertools.product(RANKS, mine):
                with tile_of_rank(rank):
                    run(problem, done)
                print(name, problem.dtype, "in tile", rank, "is done", flush=True)


def run(problem: Problem, done: set[object]) -> None:
    """One forward, and a backward in both ways that it may add; not what is ``done`` already."""
    arrays = [cupy.asarray(np.ascontiguousarray(array)) for array in problem.arrays()]
    for deterministic in (None, True):
        options = problem.options | {"deterministic": deterministic}
        passes = both_passes(prepare(*arrays, None, Options(**options)))
        launches = tuple(plan_for(asked, cuda_device(0)).launches for asked in passes)
        if (problem, launches) in done:
            continue
        done.add((problem, launches))
        out, residuals = cuattn.attention_forward(*arrays, **options)
        dlse = cupy.ones_like(residuals.lse)
        cuattn.attention_backward(residuals, cupy.ones_like(out), dlse)
    cupy.cuda.get_current_stream().synchronize()


if __name__ == "__main__":
    main()
