"""The doctor, mostly from outside."""

import json
import os

from dwtir import cache, checks, cuda, doctor
from dwtir.checks import Finding
from marks import gpu, parametrize, raises
from processes import run


def run_doctor(*argv, status, path="", **environment):
    """Run the doctor in a child process; modules in `path` come before the installed ones."""
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(path), os.environ.get("PYTHONPATH")]))
    return json.loads(run("-m", "dwtir.doctor", "--json", *argv, status=status, **environment).stdout)


def finding(report, name):
    (found,) = [entry for entry in report["findings"] if entry["name"] == name]
    return Finding(**found)


def test_healthy_machine():
    healthy = run_doctor("--target", "opencl", status=0, CUDA_VISIBLE_DEVICES="")
    assert (healthy["target"], healthy["works"]) == ("opencl", True)
    required = ("Python", "platform", "apache-tvm", "apache-tvm-ffi", "numpy", "CPU", "OpenCL")
    for name in (*required, "CUDA runtime", "NVRTC", "CUDA headers"):
        found = finding(healthy, name)
        assert (found.status, found.required) == ("ok", name in required), healthy
    assert "LLVM" in finding(healthy, "CPU").detail
    assert "ran a kernel" in finding(healthy, "OpenCL").detail
    assert finding(healthy, "GPU").status != "ok"
    for entry in healthy["findings"]:
        # What is missing has a remedy, and what works has none.
        assert bool(entry["remedy"]) == (entry["status"] != "ok"), entry


def test_without_a_gpu_cuda_does_not_work(tmp_path):
    # Hides the driver of a machine that has one.
    (tmp_path / "libcuda.so.1").touch()
    report = run_doctor("--target", "cuda", status=1, LD_LIBRARY_PATH=str(tmp_path))
    assert not report["works"]
    gpu = finding(report, "GPU")
    assert (gpu.status, gpu.required, gpu.remedy) == ("missing", True, cuda.INSTALL_DRIVER)
    assert "libcuda.so.1" in gpu.detail


def test_without_a_gpu_the_cpu_has_to_work(tmp_path):
    # Stands for a TVM that takes the process down, as by an illegal instruction.
    (tmp_path / "tvm.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGILL)\n")
    (tmp_path / "libcuda.so.1").touch()
    report = run_doctor(status=1, path=tmp_path, LD_LIBRARY_PATH=str(tmp_path))
    assert report["target"] == "cpu"
    cpu = finding(report, "CPU")
    assert (cpu.status, cpu.detail) == ("broken", "crashed with SIGILL")
    assert "--force-reinstall" in cpu.remedy


def test_exception_of_a_probe_is_a_finding(tmp_path):
    (tmp_path / "tvm.py").write_text("raise OSError('libLLVM.so: cannot open\\n  and more')\n")
    report = run_doctor("--target", "cpu", status=1, path=tmp_path)
    assert finding(report, "CPU").detail == "OSError: libLLVM.so: cannot open\n  and more"


@parametrize(("package", "version"), [("apache-tvm", "0.26.0"), ("apache-tvm-ffi", "0.1.15.post1")])
def test_wrong_tvm_is_never_imported(tmp_path, package, version):
    folder, imported = tmp_path / f"{package.replace('-', '_')}-{version}.dist-info", tmp_path / "imported"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    (tmp_path / "tvm.py").write_text(f"open({str(imported)!r}, 'w')\n")
    report = run_doctor("--target", "cpu", status=1, path=tmp_path)
    assert not imported.exists()
    found = finding(report, package)
    remedy = "pip install apache-tvm==0.27.0.post1 apache-tvm-ffi==0.1.14.post1"
    assert (found.status, found.remedy) == ("broken", remedy)
    assert version in found.detail
    assert ("crashes" in found.detail) == (package == "apache-tvm-ffi")
    for name in ("CPU", "OpenCL", "CUDA kernel"):
        assert finding(report, name).status != "ok"


def test_linker_that_does_not_work_is_optional(monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv("CC", raising=False)
    assert checks._check_compiler("cpu").status == "ok"
    for compiler, status in (("no-such-compiler", "missing"), ("false", "broken")):
        monkeypatch.setenv("CXX", compiler)
        found = checks._check_compiler("cpu")
        assert (found.status, found.required) == (status, False)
        assert compiler in found.detail
        assert "set CXX" in found.remedy


def test_cache_folder_is_where_the_cache_is(tmp_path, monkeypatch):
    # It is made on first use: one that can be made is as good as one that is there.
    folder = tmp_path / "parent/kernels"
    monkeypatch.setenv("DWTIR_CACHE_DIR", str(folder))
    assert checks._check_cache("cpu") == Finding("cache folder", "ok", str(folder))
    assert cache.cache_dir() == folder
    assert not folder.parent.exists()
    folder.mkdir(parents=True, mode=0o700)
    assert checks._check_cache("cpu").status == "ok"


def test_unusable_cache_folder_is_broken(tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.touch()
    tmp_path.chmod(0o770)
    for folder, detail in ((file / "kernels", str(file)), (tmp_path, "writable by nobody else")):
        monkeypatch.setenv("DWTIR_CACHE_DIR", str(folder))
        found = checks._check_cache("cpu")
        assert (found.status, found.required) == ("broken", False)
        assert detail in found.detail
        assert "DWTIR_CACHE_DIR" in found.remedy


def test_table_says_what_is_needed(capsys):
    here = Finding("here", "ok", "1.0")
    wanted = Finding("wanted", "missing", "not installed", "pip install wanted", True)
    spare = Finding("spare", "broken", "line one\nline two", "pip install spare")
    doctor._print_table([here, wanted, spare])
    expected = """\
here    ok       1.0
wanted  missing  not installed
                 needed: pip install wanted
spare   broken   line one
                 line two
                 optional: pip install spare
"""
    assert capsys.readouterr().out == expected


def test_unknown_target_is_a_usage_error():
    with raises(SystemExit) as error:
        doctor.main(["--target", "tpu"])
    assert error.value.code == 2


@gpu
def test_with_a_gpu_cuda_is_chosen_and_works():
    report = run_doctor(status=0)
    assert report["target"] == "cuda"
    assert "ran a kernel for sm_" in finding(report, "CUDA kernel").detail
