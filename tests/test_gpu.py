"""What only a GPU shows: torch's streams, devices and graphs, and code kept across processes."""

import numpy as np
import torch

import dwtir
from dwtir import Shape, reference
from dwtir.search_limits import Limit, SlowCompileError, for_search
from marks import dtypes, gpu, layouts, raises
from processes import python, run
from streams import captured, on_another_stream

pytestmark = gpu

SHAPE = Shape.parse("2x24x19x23_k3_psame")


def tensors(shape=SHAPE, device="cuda"):
    rng = np.random.default_rng(0)
    data, weight = (rng.integers(-3, 4, extents) for extents in (shape.data_shape, shape.weight_shape))
    arrays = data, weight, reference.depthwise_conv2d(shape, data, weight)
    return [torch.from_numpy(array).to(device, getattr(torch, shape.dtype)) for array in arrays]


@layouts
@dtypes
def test_torch_tensors_in_and_out(dtype, layout):
    shape = Shape.parse(f"{SHAPE}".replace("float32_nchw", f"{dtype}_{layout}"))
    kernel = dwtir.build(shape)
    data, weight, expected = tensors(shape)
    assert kernel.target.kind == "cuda"
    made = kernel(data, weight)
    assert made.device == data.device
    assert torch.equal(made, expected)
    out = torch.full_like(expected, float("nan"))
    assert kernel(data, weight, out=out) is out
    assert torch.equal(out, expected)


@layouts
@dtypes
def test_silu_is_right_for_all_numbers(dtype, layout):
    shape, kind = Shape.parse(f"1x64x32x64_k1_{dtype}_{layout}"), getattr(torch, dtype)
    powers = torch.logspace(-38, 4.8 if dtype == "float16" else 38, 2**15)
    values = torch.cat([torch.linspace(-110, 110, 2**16), powers, -powers]).to(kind)
    data, weight = values.reshape(shape.data_shape), torch.ones(shape.weight_shape, dtype=kind)
    out = dwtir.build(shape, epilogue="silu")(data.cuda(), weight.cuda()).cpu()
    given = data.double().numpy(), weight.double().numpy()
    error = out.double().numpy() - reference.depthwise_conv2d(shape, *given, epilogue="silu")
    assert (abs(error) <= reference.error_bound(shape, *given, epilogue="silu")).all()


def test_runs_on_torchs_current_stream():
    kernel = dwtir.build(SHAPE)
    data, weight, expected = tensors()
    kernel(data, weight)  # loads the module, which synchronises
    out = torch.full_like(expected, float("nan"))
    on_another_stream(lambda late: kernel(late, weight, out=out), data)
    assert torch.equal(out, expected)


def test_replays_in_a_cuda_graph():
    kernel = dwtir.build(SHAPE, epilogue="bias+relu")
    data, weight, expected = tensors()
    bias = torch.arange(24, device="cuda", dtype=torch.float32) - 12
    kernel(data, weight, bias)
    graph, out = captured(lambda: kernel(data, weight, bias))
    for factor in (1, 2, -1):
        weight.copy_(tensors()[1] * factor)
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, torch.relu(expected * factor + bias.view(1, -1, 1, 1)))


def test_other_libraries_arrays():
    import cupy
    import jax

    data, weight, expected = tensors()
    kernel = dwtir.build(SHAPE)
    from_cupy = kernel(cupy.from_dlpack(data), cupy.from_dlpack(weight))
    assert isinstance(from_cupy, cupy.ndarray)
    assert torch.equal(torch.from_dlpack(from_cupy), expected)
    from_jax = kernel(jax.dlpack.from_dlpack(data), jax.dlpack.from_dlpack(weight))
    assert isinstance(from_jax, jax.Array)
    assert np.array_equal(np.asarray(from_jax), expected.cpu().numpy())


def test_last_device_is_not_the_current():
    last = torch.device("cuda", torch.cuda.device_count() - 1)
    data, weight, expected = tensors(device=str(last))
    out = dwtir.build(SHAPE)(data, weight)
    assert out.device == last
    assert torch.equal(out, expected)
    assert torch.cuda.current_device() == 0


def test_resources_and_time():
    kernel = dwtir.build("8x64x56x56_k3_p1")
    use = kernel.resources()
    assert 0 < use.registers <= 255
    assert use.spill_bytes == 0
    timing = kernel.time(repeats=5)
    assert 0 < timing.p20 <= timing.median <= timing.p80 < 1


_CALL = """
data = torch.ones(2, 24, 19, 23, device="cuda")
print(kernel(data, torch.ones(24, 1, 3, 3, device="cuda")).sum().item())
"""
_BUILD_AGAIN = f"""
import sys, torch, dwtir
kernel = dwtir.build("2x24x19x23_k3_psame")
{_CALL}
print(kernel.resources().registers, "dwtir.compiler" in sys.modules)
"""
_RUN_SAVED = f"""
import sys, torch, dwtir
kernel = dwtir.load(sys.argv[1])
{_CALL}
assert "libtvm_compiler" not in open("/proc/self/maps").read()
"""


def test_compiler_errors_come_through_tvm(tmp_path, monkeypatch):
    monkeypatch.setenv("DWTIR_CACHE_DIR", str(tmp_path))
    # NVRTC is stopped at once. What the search itself says of that is not asked here.
    with for_search(Limit(0.0)), raises(SlowCompileError, match="stopped, after 0 s"):
        dwtir.build("2x24x64x64_k7_p3")


def test_second_process_finds_the_code(tmp_path):
    outputs = [python(_BUILD_AGAIN, DWTIR_CACHE_DIR=str(tmp_path)).split() for _ in range(2)]
    assert outputs[0][:2] == outputs[1][:2]
    assert [output[2] for output in outputs] == ["True", "False"]
    assert len(list(tmp_path.glob("*.so"))) == 1


def test_export_runs_without_the_compiler(tmp_path):
    kernel = dwtir.build(SHAPE)
    kernel.export(tmp_path / "kernel.so")
    data, weight = (torch.ones(extents, device="cuda") for extents in (SHAPE.data_shape, SHAPE.weight_shape))
    child = run("-c", _RUN_SAVED, tmp_path / "kernel.so", TVM_USE_RUNTIME_LIB="1")
    assert float(child.stdout) == kernel(data, weight).sum().item()
