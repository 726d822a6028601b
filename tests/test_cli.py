"""``python -m cuattn``: every command without a GPU, and what it says when something is missing."""

import os
import subprocess
import sys

import needs
import numpy as np
import pytest

import cuattn
from cuattn import check
from cuattn.__main__ import main
from cuattn.bench import report
from cuattn.errors import CompileError
from cuattn.jit.compile import Compiled
from cuattn.planning.device import known_device
from cuattn.planning.families import every_spec
from cuattn.precompile import Built, default_specs, is_default


@pytest.fixture(scope="module")
def cache_folder(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def own_cache(cache_folder, monkeypatch):
    """The user's cache is neither filled nor reported."""
    monkeypatch.setenv("CUATTN_CACHE_DIR", str(cache_folder))


@pytest.fixture
def no_device(monkeypatch):
    for module in ("cuattn.check", "cuattn.__main__"):
        monkeypatch.setattr(f"{module}.cuda_or_why", lambda: "CuPy finds no device (a test)")


def facts(text):
    return {line[:17].strip(): line[18:] for line in text.splitlines()}


# info ------------------------------------------------------------------------------------------


def test_info_says_what_is_here(capsys, cache_folder):
    assert main(["info"]) == 0
    said = facts(capsys.readouterr().out)
    assert said["cuattn"].startswith(cuattn.__version__)
    assert said["NumPy"] == np.__version__
    assert said["kernel cache"].startswith(f"{cache_folder}: ")
    assert said["CUATTN_CACHE_DIR"] == str(cache_folder)
    assert said["CUATTN_DEBUG"] == "not set"
    assert {"Python", "CuPy", "NVRTC", "engine"} <= said.keys()


def test_info_without_a_device_says_so(capsys, no_device):
    assert main(["info"]) == 0
    said = facts(capsys.readouterr().out)
    assert said["devices"] == "none: CuPy finds no device (a test)"
    assert said["engine"] == "NumPy arrays: the CPU engine; CuPy arrays: none"


def test_info_without_cupy_says_what_to_install():
    program = (
        "import sys; sys.modules['cupy'] = sys.modules['cupy_backends'] = None\n"
        "from cuattn.__main__ import main\n"
        "raise SystemExit(main(['info']))"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    said = facts(run.stdout)
    assert said["CuPy"].startswith("missing (")
    assert "cupy-cuda13x[ctk]" in said["CuPy"]
    assert said["NVRTC"].startswith("missing: ")
    assert said["devices"].startswith("none: CuPy is not importable")


def test_info_without_a_home_says_where_kernels_go(capsys, monkeypatch):
    monkeypatch.setattr("cuattn.__main__.default_directory", lambda: None)
    assert main(["info"]) == 0
    assert facts(capsys.readouterr().out)["kernel cache"].startswith("in memory only")


@pytest.mark.gpu
def test_info_names_driver_and_devices(capsys):
    assert main(["info"]) == 0
    said = facts(capsys.readouterr().out)
    assert said["driver"].startswith("CUDA ")
    assert "SMs" in said["device 0"]


# check -----------------------------------------------------------------------------------------


def test_check_finds_the_cpu_engine_right(capsys):
    assert main(["check", "--engine", "numpy"]) == 0
    text = capsys.readouterr().out
    count = sum(1 for _ in check.problems())
    assert 35 <= count <= 50
    assert text.startswith("engine numpy\n")
    assert f"{count} of {count} right in " in text


@pytest.mark.gpu
def test_check_finds_the_cuda_engine_right(capsys):
    assert main(["check"]) == 0
    assert capsys.readouterr().out.startswith("engine cuda: ")


def few(monkeypatch):
    problems = list(check.problems())
    monkeypatch.setattr(check, "problems", lambda: iter([problems[0], problems[16]]))


def test_check_without_a_device_says_which_engine_it_takes(capsys, monkeypatch, no_device):
    few(monkeypatch)
    assert main(["check"]) == 0
    assert capsys.readouterr().out.startswith("engine numpy: CuPy finds no device (a test)\n")


def test_check_of_a_missing_engine_fails(capsys, no_device):
    assert main(["check", "--engine", "cuda"]) == 1
    assert "CuPy finds no device (a test)" in capsys.readouterr().err


def test_check_sees_a_wrong_result(capsys, monkeypatch):
    few(monkeypatch)
    forward = check.attention_forward

    def wrong(*arrays, **options):
        out, res = forward(*arrays, **options)
        out[:, -1] *= 2
        return out, res

    monkeypatch.setattr(check, "attention_forward", wrong)
    assert main(["check", "--engine", "numpy"]) == 1
    text = capsys.readouterr().out
    assert text.count("WRONG") == 2
    assert "0 of 2 right in " in text


def test_check_goes_on_after_an_error(capsys, monkeypatch):
    few(monkeypatch)

    def failing(*_arrays, **_options):
        raise CompileError("no such kernel")

    monkeypatch.setattr(check, "attention_forward", failing)
    assert main(["check", "--engine", "numpy"]) == 1
    assert capsys.readouterr().out.count("CompileError: no such kernel") == 2


@pytest.mark.parametrize("kind", ["contiguous", "transposed", "sliced", "reversed", "broadcast"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_the_strides_of_a_problem_hold_its_values(kind, dtype):
    problem = check.Problem("", dtype, (2, 3, 4, 2, 1, 5, 6), {"layout": "bhsd"}, kind)
    plain = check.Problem("", dtype, problem.sizes, problem.options)
    for array, values in zip(problem.arrays(np), plain.arrays(np), strict=True):
        wanted = np.broadcast_to(values[:1], values.shape) if kind == "broadcast" else values
        assert array.dtype == np.dtype(dtype)
        assert array.tobytes() == wanted.tobytes()
    assert problem.arrays(np)[0].shape == (2, 2, 3, 5)


# bench -----------------------------------------------------------------------------------------


def test_bench_without_a_device_says_so(no_device):
    with pytest.raises(SystemExit, match=r"measures a CUDA device: .* no device \(a test\)"):
        main(["bench", "--workloads", "grid"])


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--peers", "fa9"], "--peers: invalid choice: 'fa9' (choose from fa4,"),
        (["--seqlens", "500"], "--seqlens: invalid choice: 500 (choose from 32,"),
        (["--plot", "a.jpg"], "--plot: got 'a.jpg'; expected a path that ends in .png or .svg"),
        (["--json", "no/a.json"], "--json: got 'no/a.json'; expected a path in a folder that"),
        (["--rounds", "0"], "--rounds: got '0'; expected a number of 1 or more"),
    ],
)
def test_bench_refuses_an_option_before_it_measures(options, why, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        main(["bench", *options])
    assert caught.value.code == 2
    # Python 3.12 quotes the choices otherwise than 3.11.
    assert why.replace("'", "") in capsys.readouterr().err.replace("'", "")


def test_bench_reads_an_earlier_run_without_a_device(capsys, no_device, tmp_path):
    cell = {"workload": "grid", "dtype": "bfloat16", "head_dim": 64, "mask": "full"}
    cell |= {"seqlen_q": 512, "seqlen_k": 512, "pass": "forward"}
    measured = {"kind": "speed", **cell, "tflops": 300}
    rows = [
        measured | {"peer": "cuattn", "ratio_to_cuattn": 1},
        measured | {"peer": "fa4", "ratio_to_cuattn": 0.75, "tflops": 400},
        measured | {"kind": "left out", "of": "speed", "peer": "fa3", "reason": "no device"},
    ]
    path = tmp_path / "a.json"
    report.write(path, rows)
    assert main(["bench", "--from-json", str(path)]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    words = "1 0.75 0.75 at head_dim 64, full, seqlen 512"
    assert lines[1].startswith("cuattn fa4 TFLOP/s")
    assert lines[2:4] == [
        "grid 64 full 512 forward 300.0 400.0",
        "fa3 speed left out 1 x: no device",
    ]
    assert lines[-2:] == [f"forward best {words}", f"forward fa4 {words}"]


@pytest.mark.gpu
def test_bench_measures_a_cell_and_writes_it(capsys, tmp_path):
    path = tmp_path / "a.json"
    chosen = "--workloads grid --head-dims 64 --masks causal --seqlens 512 --rounds 1"
    assert main(["bench", *chosen.split(), "--json", str(path)]) == 0
    data = report.read(path)
    timed = [(row["peer"], row["pass"]) for row in data["rows"] if row["kind"] == "speed"]
    assert {("cuattn", "forward"), ("cuattn", "backward")} <= set(timed)
    assert data["peers"].keys() | data["missing"].keys() >= {name for name, _ in timed}
    assert [row["pass"] for row in data["summary"] if row["peer"] == "best"] == [
        "forward",
        "backward",
    ]
    assert "TFLOP/s" in capsys.readouterr().out


# compile ---------------------------------------------------------------------------------------


def test_compile_fills_the_cache_without_a_gpu(capsys, cache_folder):
    needs.nvrtc()
    command = ["compile", "--arch", "sm_75", "--dtype", "float64"]
    assert main(command) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "sm_75: 4 kernels"
    assert all(line.startswith("cuattn_") for line in lines[2:-1])
    assert len(list(cache_folder.glob("sm_75-*/*/kernel.cubin"))) == 4
    built = cuattn.jit.cache.default_cache().stats.compiles
    assert main(command) == 0
    assert cuattn.jit.cache.default_cache().stats.compiles == built


def test_compile_takes_the_kernels_of_default_calls_unless_told(monkeypatch):
    asked = []

    def build(specs, arch, jobs):
        asked.append(({spec.name for spec in specs}, arch, jobs))
        compiled = Compiled(b"", "", 32, 0, 0, 0, 0)
        return [Built(spec, compiled, 0.0, stored=True) for spec in specs]

    monkeypatch.setattr("cuattn.__main__.build", build)
    assert main(["compile", "--arch", "sm_80", "sm_90a", "sm_80"]) == 0
    assert main(["compile", "--arch", "sm_80", "--all", "--jobs", "3"]) == 0
    some, _, every = (names for names, _, _ in asked)
    assert [(arch, jobs) for _, arch, jobs in asked] == [
        ("sm_80", None),
        ("sm_90a", None),
        ("sm_80", 3),
    ]
    assert some == {spec.name for spec in default_specs(known_device("sm_80"))}
    assert every == {spec.name for spec in every_spec(known_device("sm_80"))}
    assert some < every


def test_compile_fails_where_the_disk_keeps_nothing(monkeypatch, capsys):
    def build(specs, arch, jobs):
        compiled = Compiled(b"", "", 32, 0, 0, 0, 0)
        return [Built(spec, compiled, 0.0, stored=False) for spec in specs]

    monkeypatch.setattr("cuattn.__main__.build", build)
    assert main(["compile", "--arch", "sm_80", "--dtype", "float64"]) == 1
    assert "\n0 of " in capsys.readouterr().out


@pytest.mark.parametrize("jobs", ["0", "-1", "few"])
def test_compile_takes_one_job_or_more(jobs, capsys):
    with pytest.raises(SystemExit):
        main(["compile", "--arch", "sm_80", "--jobs", jobs])
    assert f"--jobs: got {jobs!r}; expected a number of 1 or more" in capsys.readouterr().err


def test_a_target_is_compiled_once_whatever_its_names(capsys, monkeypatch):
    compiled = []
    monkeypatch.setattr("cuattn.__main__._compile", lambda device, *_: compiled.append(device) or 1)
    assert main(["compile", "--arch", "sm_90", "sm_90a", "sm_80"]) == 0
    assert [device.arch for device in compiled] == ["sm_90a", "sm_80"]


def test_info_survives_a_cache_folder_that_cannot_be(capsys, monkeypatch):
    monkeypatch.setenv("CUATTN_CACHE_DIR", "a" * 300)
    assert main(["info"]) == 0
    assert "kernel cache" in capsys.readouterr().out


def test_whoever_reads_the_lines_may_stop():
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "cuattn", "info"]
    run = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert (run.returncode, run.stderr) == (1, "")


def test_default_kernels_keep_the_dtype_and_every_gradient():
    names = [spec.name for spec in every_spec(known_device("sm_90a")) if is_default(spec)]
    assert not [name for name in names if "_of" in name or name.endswith(("_dk", "64_dv"))]
    for part in (
        "fwd_tf32x3_f32",
        "bwd_prepare_bf16",
        "bwd_q_simt_f64",
        "bwd_sm80_f16",
        "fwd_sm80_bf16",
    ):
        assert [name for name in names if part in name]
    # Those of deterministic=True are an option's.
    assert not [name for name in names if "_kv_sm80" in name or "_q_sm80" in name]


def test_compile_without_a_device_asks_for_a_target(capsys, no_device):
    assert main(["compile"]) == 1
    assert "--arch sm_90a" in capsys.readouterr().err


def test_compile_for_an_unknown_target_lists_the_known_ones(capsys):
    with pytest.raises(SystemExit):
        main(["compile", "--arch", "sm_42"])
    assert "--arch: got 'sm_42'; expected one of sm_75" in capsys.readouterr().err


def test_compile_reports_a_kernel_that_does_not_compile(capsys, monkeypatch):
    needs.nvrtc()

    def refuse(_spec):
        raise CompileError("cuattn_fwd: NVRTC refused it")

    monkeypatch.setattr("cuattn.precompile.unit_of", refuse)
    assert main(["compile", "--arch", "sm_80"]) == 1
    assert "cuattn: cuattn_fwd: NVRTC refused it" in capsys.readouterr().err


@pytest.mark.parametrize("command", [[], ["nonsense"], ["compile", "--dtype", "int8"]])
def test_what_is_no_command_is_refused(capsys, command):
    with pytest.raises(SystemExit) as caught:
        main(command)
    assert caught.value.code == 2
    assert "usage: cuattn" in capsys.readouterr().err


def test_the_module_is_the_command():
    run = subprocess.run(
        [sys.executable, "-m", "cuattn", "--help"], check=True, capture_output=True, text=True
    )
    assert all(command in run.stdout for command in ("info", "check", "compile"))
