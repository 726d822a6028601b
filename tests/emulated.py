"""The engine fixture of the suites that run on emulated kernels."""

import needs
import pytest
from emulator import device
from emulator.engine import EmulatedEngine
from engines import CUDA_ENGINES, family_of


@pytest.fixture(scope="module", params=CUDA_ENGINES)
def engine(request):
    """Every kernel family in turn, emulated."""
    needs.cxx()
    with device.emulated(), family_of(request.param) as family:
        yield EmulatedEngine(family)
