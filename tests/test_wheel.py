"""The wheel: small, with the kernels, without the tests, and complete where it is unpacked."""

import os
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAX_BYTES = 1_000_000


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Build with the hatchling that is installed: no network, no isolated environment."""
    if find_spec("hatchling") is None:
        if os.environ.get("CI") == "true":
            pytest.fail("CI must have hatchling: pip install '.[test]'")
        pytest.skip("hatchling is not installed")
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (path,) = folder.glob("*.whl")
    return path


def test_is_pure_python_and_small(wheel):
    assert wheel.name.endswith("-py3-none-any.whl")
    assert wheel.stat().st_size < MAX_BYTES


def test_holds_every_kernel_and_module_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    sources = {
        path.relative_to(ROOT).as_posix()
        for folder in ("cuattn", "kernels_cu")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in {".py", ".typed", ".cuh", ".md"}
    }
    assert names == {
        f"cuattn/{name}" if name.startswith("kernels_cu/") else name for name in sources
    }


def test_metadata(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = archive.read(name).decode().partition("\n\n")[0].splitlines()
        (licence,) = (name for name in archive.namelist() if name.endswith("/LICENSE"))
        (entry_points,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
        assert "cuattn = cuattn.__main__:main" in archive.read(entry_points).decode()
    assert licence
    required = [line.partition(": ")[2] for line in metadata if line.startswith("Requires-Dist")]
    core = {line.partition(">")[0] for line in required if "extra ==" not in line}
    assert core == {"numpy", "ml-dtypes"}
    assert not any("cupy" in line for line in required if "extra == 'test'" in line)
    for major in ("12", "13"):
        cupy = f"cupy-cuda{major}x[ctk]>=14; extra == 'cuda{major}'"
        assert cupy in required


def test_runs_where_it_is_unpacked(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    program = (
        "import cuattn, numpy\n"
        "from cuattn.jit.source import kernels_dir\n"
        "assert (kernels_dir() / 'base' / 'abi.cuh').is_file()\n"
        "print(kernels_dir(), cuattn.__file__, cuattn.__version__, sep='\\n')\n"
        "q = numpy.ones((1, 2, 1, 4))\n"
        "assert (cuattn.attention(q, q, q) == q).all()\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        check=True,
        capture_output=True,
        text=True,
    )
    kernels, module, version = run.stdout.splitlines()
    assert kernels == str(tmp_path.resolve() / "cuattn" / "kernels_cu")
    assert Path(module) == tmp_path / "cuattn" / "__init__.py"
    assert f"cuattn-{version}-" in wheel.name
