"""The engine fixture of the suites that run on emulated kernels."""

import calls
import compare
import needs
import pytest
from emulator import device
from emulator.engine import EmulatedEngine
from engines import CUDA_ENGINES, family_of


@pytest.fixture(scope="module", params=CUDA_ENGINES)
def engine(request):
    """Every kernel family in turn, emulated."""
    needs.cxx()
    with (
        pytest.MonkeyPatch.context() as patch,
        device.emulated(),
        family_of(request.param) as family,
    ):
        dtypes = family.dtypes
        patch.setattr(calls, "DTYPE", "float32" if "float32" in dtypes else dtypes[-1])
        patch.setattr(compare, "ROUNDS_TO_ZERO", dtypes if family.rounds_to_zero else ())
        yield EmulatedEngine(family)
