"""Each fused operator's kernel computes what torch's own operations do, interpreted where there is no GPU."""

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources
from trt_spec.engines import Bundle, EngineError, blank_cache, blank_step, open_engine
from trt_spec.engines.torch import TorchEngine, engine, kernels
from trt_spec.engines.torch.kernels.declare import launcher
from trt_spec.engines.torch.kernels.narrow_product import widened
from trt_spec.export.passes.quantise import Quantisation

from ...kit.bundles import export_pair
from ...kit.launches import (
    DEVICE,
    DTYPES,
    LAUNCHED,
    START,
    angles,
    caches,
    heads,
    kernel,
    matrix,
    positions,
    product,
    random,
)
from ...kit.squares import in_pairs

ROOT = Path(__file__).resolve().parents[3]
SHARED_BYTES = 99 * 1024  # the least that a program may have on GPUs from 8.0 on
ROUNDINGS = 4  # of numbers near 4, by which a kernel may differ from the same operation in float64


def wide(value: Any) -> Any:
    """The same numbers, or the same type, in float64, on the CPU."""
    if isinstance(value, torch.dtype):
        return torch.float64
    return value.cpu().double() if isinstance(value, Tensor) and value.is_floating_point() else value


def assert_close(found: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    assert found.dtype == dtype
    rounding = torch.finfo(dtype).eps
    torch.testing.assert_close(found.cpu().double(), exact, rtol=ROUNDINGS * rounding, atol=ROUNDINGS * rounding)


def assert_computes(name: str, file: str, dtype: torch.dtype, *arguments: Any) -> None:
    """The kernel gives what torch's operations give in float64, but for a few roundings."""
    found = kernel(name, file)(*arguments)
    exact = getattr(torch.ops.trt_spec, name)(*map(wide, arguments))
    for own, expected in zip(*(x if isinstance(x, tuple) else (x,) for x in (found, exact)), strict=True):
        assert own.shape == expected.shape
        assert_close(own, expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_a_gate(dtype: torch.dtype, activation: str) -> None:
    """Of parts of one product, of a size that fills no block."""
    both = random(2, 3, 2 * 1100, dtype=dtype)
    assert_computes("gate", "gate", dtype, *both.split(1100, -1), activation)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 5])
def test_angles(dtype: torch.dtype, width: int) -> None:
    """Nothing is read before a table or after it."""
    given = positions(dtype, width)
    found, expected = kernel("angles", "angles")(*given), torch.ops.trt_spec.angles(*given)
    for own, theirs in zip(found, expected, strict=True):
        assert torch.equal(own, theirs)


@in_pairs(dtype=DTYPES, scale_dtype=DTYPES, shape=[(2, 3, 100), (1, 1, 1024), (2, 2, 3, 48)])
def test_a_norm(dtype: torch.dtype, scale_dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Of tensors and of heads, with scales of any type."""
    x, scale = random(*shape, dtype=dtype), random(shape[-1], dtype=scale_dtype, seed=1)
    assert_computes("norm", "norm", dtype, x, scale, 1e-6, dtype)


def test_a_norm_of_heads_that_are_parts_of_one_product() -> None:
    heads = random(2, 3, 200)[..., 20:116].reshape(2, 3, 2, 48)
    assert_computes("norm", "norm", torch.float32, heads, random(48), 1e-6, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("first", [None, torch.float32, torch.bfloat16])
def test_a_residual_and_a_norm(dtype: torch.dtype, first: torch.dtype | None) -> None:
    """Before the norm, and after another; the norm is that of the sum as it is stored."""
    residual, x = (random(2, 3, 100, dtype=dtype, seed=seed) for seed in range(2))
    scale = random(100, dtype=dtype, seed=2)
    before = None if first is None else random(100, dtype=first, seed=3)
    arguments = residual, x, scale, before, 1e-6, dtype, 1e-5, dtype if first else None
    assert_computes("add_norm", "norm", dtype, *arguments)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_norm_and_a_residual(dtype: torch.dtype) -> None:
    residual, x = (random(2, 3, 100, dtype=dtype, seed=seed) for seed in range(2))
    scale = random(100, dtype=dtype, seed=2)
    assert_computes("norm_add", "norm", dtype, residual, x, scale, 1e-6, dtype)


@in_pairs(dtype=DTYPES, scaled=[False, True], sizes=[(64, 24, 64), (80, 80, 32), (18, 20, 6)])
def test_rotation_and_a_write(dtype: torch.dtype, scaled: bool, sizes: tuple[int, int, int]) -> None:
    """Of whole heads or of their first numbers, with norms of heads or without; all else in the caches stays."""
    size, value_size, rotated = sizes
    start = torch.tensor(START, device=DEVICE)
    given = *heads(dtype, size, value_size), *angles(dtype, rotated // 2), start
    scales = [random(size, dtype=dtype, seed=7 + place) if scaled else None for place in range(2)]
    past, exact_past = caches(dtype, size, value_size), [wide(x) for x in caches(dtype, size, value_size)]
    found = kernel("rotate_write", "entries")(*given, *past, *scales, 1e-6, 1e-5)
    exact = torch.ops.trt_spec.rotate_write(*map(wide, given), *exact_past, *map(wide, scales), 1e-6, 1e-5)
    for own, expected in zip((found, *past), (exact, *exact_past), strict=True):
        assert_close(own, expected, dtype)
    queries, _, _, cos, sin, _ = given
    assert_computes("rotate", "entries", dtype, queries, cos, sin, scales[0], 1e-6)


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16])
def test_what_is_normed_and_rotated_has_the_type_that_its_norm_gives(scale_dtype: torch.dtype) -> None:
    """Heads of bfloat16 whose norm gives float32, rotated in it and kept in a cache of float32."""
    queries, keys, values = heads(torch.bfloat16, 64, 24)
    given = queries, keys, values.float(), *angles(torch.float32, 32), torch.tensor(START, device=DEVICE)
    scales = [random(64, dtype=scale_dtype, seed=7 + place) for place in range(2)]
    past, exact_past = caches(torch.float32, 64, 24), [wide(x) for x in caches(torch.float32, 64, 24)]
    dtypes = {"query_dtype": torch.float32, "key_dtype": torch.float32}
    found = kernel("rotate_write", "entries")(*given, *past, *scales, 1e-6, 1e-5, **dtypes)
    options = {name: wide(dtype) for name, dtype in dtypes.items()}
    exact = torch.ops.trt_spec.rotate_write(*map(wide, given), *exact_past, *map(wide, scales), 1e-6, 1e-5, **options)
    for own, expected in zip((found, *past), (exact, *exact_past), strict=True):
        assert_close(own, expected, torch.float32)
    assert_computes("rotate", "entries", torch.float32, queries, *given[3:5], scales[0], 1e-6, torch.float32)
    torch.library.opcheck(
        torch.ops.trt_spec.rotate.default,
        (queries.cpu(), *(x.cpu() for x in given[3:5]), scales[0].cpu(), 1e-6, torch.float32),
        test_utils="test_faketensor",
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_write_alone(dtype: torch.dtype) -> None:
    start = torch.tensor(START, device=DEVICE)
    _, *given = heads(dtype, 24, 16)
    past, expected = caches(dtype, 24, 16), [x.cpu() for x in caches(dtype, 24, 16)]
    kernel("write", "entries")(*given, start, *past)
    torch.ops.trt_spec.write(*[x.cpu() for x in (*given, start)], *expected)
    for own, theirs in zip(past, expected, strict=True):
        assert torch.equal(own.cpu(), theirs)


def strided(*shape: int, seed: int = 0) -> Tensor:
    """The same numbers as of `random`, but with those of the last axis apart from each other, as in Gemma 3n."""
    return random(*shape, seed=seed).transpose(1, 2).contiguous().transpose(1, 2)


def test_tensors_whose_last_axis_is_strided_are_read_as_they_mean() -> None:
    x, y, scale = strided(1, 5, 32), strided(1, 5, 32, seed=1), random(32, seed=2)
    assert x.stride(-1) != 1
    assert_computes("gate", "gate", torch.float32, x, y, "silu")
    assert_computes("norm", "norm", torch.float32, x, scale, 1e-6, torch.float32)
    assert_computes("norm_add", "norm", torch.float32, x, y, scale, 1e-6, torch.float32)
    assert_computes("add_norm", "norm", torch.float32, x, y, scale, None, 1e-6, torch.float32, 0.0, None)
    numbers = matrix("int8", 32, 24, 2, torch.float32)
    expected = kernel("narrow_product", "narrow_product")(x.contiguous(), *numbers)
    assert torch.equal(kernel("narrow_product", "narrow_product")(x, *numbers), expected)
    given = product(torch.float32, 5, 32, 24, False, True, True, "")
    tokens, residual = strided(1, 5, 32), strided(1, 5, 24, seed=3)
    assert_multiplies(torch.float32, (tokens, *given[1:3], residual, *given[4:]))
    queries, (cos, sin) = heads(torch.float32, 64, 24)[0], angles(torch.float32, 16)
    apart = [one.transpose(1, 2).contiguous().transpose(1, 2) for one in (cos, sin)]
    expected = kernel("rotate", "entries")(queries, cos, sin)
    assert torch.equal(kernel("rotate", "entries")(queries, *apart), expected)


def test_what_torch_would_repeat_is_left_to_torch() -> None:
    """A kernel reads rows of both tensors side by side."""
    x, row, scale = random(2, 3, 20), random(1, 1, 20, seed=1), random(20, seed=2)
    torch.testing.assert_close(kernels.gate.gate(x, row, "silu"), torch.sigmoid(x) * x * row)
    options = {"epsilon": 1e-6, "dtype": torch.float32}
    total, _ = kernels.norm.add_norm(row, x, scale, None, **options)
    torch.testing.assert_close(total, x + row)
    found = kernels.norm.norm_add(row, x, scale, **options)
    torch.testing.assert_close(found, torch.rms_norm(x, (20,), scale, 1e-6) + row)


def test_nothing_is_written_beside_a_cache() -> None:
    """Torch's operations refuse it; a kernel cannot, and must not reach the next row."""
    _, keys, values = heads(torch.float32, 16, 16)
    past = [random(2, 2, 11, 16, seed=9) for _ in range(2)]
    before = [x.clone() for x in past]
    kernel("write", "entries")(keys, values, torch.tensor([10, 11], device=DEVICE), *past)
    for own, old, new in zip(past, before, (keys, values), strict=True):
        assert torch.equal(own[0, :, 10], new[0, :, 0])
        old[0, :, 10] = own[0, :, 10]
        assert torch.equal(own, old)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["int8", "int4", "zeros", "e4m3"])
@pytest.mark.parametrize("sizes", [(1, 160, 40, 5), (16, 256, 24, 1), (100, 96, 24, 6)])
def test_a_product_with_small_numbers(dtype: torch.dtype, kind: str, sizes: tuple[int, int, int, int]) -> None:
    """Those of the matrix that was widened in memory; sums of so many numbers may differ by their roundings."""
    rows, size, columns, blocks = sizes
    x, (numbers, scales, zeros) = random(1, rows, size, dtype=dtype), matrix(kind, size, columns, blocks, dtype)
    found = kernel("narrow_product", "narrow_product")(x, numbers, scales, zeros)
    wide_matrix = widened(*[part if part is None else part.cpu() for part in (numbers, scales, zeros)])
    exact = x.cpu().double() @ wide_matrix.double().t()
    most = float((x.cpu().double().abs() @ wide_matrix.double().abs().t()).max())
    assert found.dtype == dtype
    assert float((found.cpu().double() - exact).abs().max()) < 2 * torch.finfo(dtype).eps * most


@pytest.mark.parametrize(("rows", "widens"), [(1, False), (17, False), (128, False), (129, True)])
def test_a_matrix_is_widened_in_memory_for_many_rows_alone(
    rows: int, widens: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recorded round of a wide batch would do it in each of its steps; it counts as a kernel more."""
    on_gpu, calls = import_module("trt_spec.engines.torch.kernels.on_gpu.narrow_product"), list[int]()
    inner = on_gpu._matrix

    class Counting:
        def __getitem__(self, grid: Any) -> Any:
            calls.append(1)
            return inner[grid]

    monkeypatch.setattr(on_gpu, "_matrix", Counting())
    x, (numbers, scales, zeros) = random(1, rows, 96), matrix("int4", 96, 24, 6, torch.float32)
    found = kernel("narrow_product", "narrow_product")(x, numbers, scales, zeros)
    torch.testing.assert_close(found, torch.ops.trt_spec.narrow_product(x, numbers, scales, zeros))
    assert bool(calls) == widens
    count = kernels.LAUNCHES["narrow_product"]
    assert callable(count)
    assert count(x, numbers, scales, zeros) == 1 + widens


def assert_multiplies(dtype: torch.dtype, given: tuple[Any, ...]) -> None:
    """But for the roundings of what is added up: of a norm's tokens, of a gate's halves, and of the answer."""
    x, stored, bias, residual, scale, epsilon, _, activation = map(wide, given)
    found = kernel("product", "product")(*given)
    exact = torch.ops.trt_spec.product(*map(wide, given))
    tokens = x if scale is None else torch.rms_norm(x, scale.shape, scale, epsilon)
    most = tokens.abs() @ stored.abs().t() + (0 if bias is None else bias.abs())
    if activation:
        most = (most[..., : exact.shape[-1]] + 1) * (most[..., exact.shape[-1] :] + 1)
    most = most + (0 if residual is None else residual.abs())
    assert found.dtype == dtype
    assert found.shape == exact.shape
    excess = (found.cpu().double() - exact).abs() - ROUNDINGS * torch.finfo(dtype).eps * most
    assert float(excess.max()) < 0


@pytest.mark.parametrize("dtype", DTYPES)  # each: what a narrow type may round away would hide a fault
@in_pairs(activation=["", "silu", "gelu", "gelu_tanh"], biased=[False, True], added=[False, True], normed=[False, True])
def test_a_product_with_what_stands_around_it(
    dtype: torch.dtype, biased: bool, added: bool, normed: bool, activation: str
) -> None:
    """Of sizes that fill no block."""
    assert_multiplies(dtype, product(dtype, 3, 300, 21, biased, added, normed, activation))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size", "columns"), [(1, 1, 1), (16, 64, 16), (7, 130, 70), (2, 40, 140)])
def test_a_product_of_any_size(
    dtype: torch.dtype, rows: int, size: int, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the tile that is read at a time, which is wider where a matrix has many columns."""
    from trt_spec.engines.torch.kernels.on_gpu import product as on_gpu

    monkeypatch.setattr(on_gpu, "PROGRAMS", 2)
    assert_multiplies(dtype, product(dtype, rows, size, columns, False, False, True, ""))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["", "silu"])
def test_a_token_has_the_same_bits_beside_any_others(dtype: torch.dtype, activation: str) -> None:
    x, *others = product(dtype, 16, 300, 24, True, False, True, activation)
    together = kernel("product", "product")(x, *others)
    for first, rows in ((0, 1), (5, 1), (3, 5), (0, 15)):
        alone = kernel("product", "product")(x[:, first : first + rows].contiguous(), *others)
        assert torch.equal(alone, together[:, first : first + rows])


@pytest.mark.skipif(DEVICE != "cpu", reason="Triton's interpreter sees addresses, a GPU does not tell")
@pytest.mark.parametrize("rows", [1, 16])
def test_each_number_of_a_matrix_is_read_once_for_all_tokens(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.interpreter import InterpreterBuilder

    x, stored, *others = product(torch.float32, rows, 300, 21, False, False, True, "silu")
    load, read = InterpreterBuilder.create_masked_load, []

    def seen(builder: Any, pointers: Any, mask: Any, *options: Any) -> Any:
        read.append(torch.from_numpy(pointers.data[mask.data].astype("int64")) - stored.data_ptr())
        return load(builder, pointers, mask, *options)

    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", seen)
    kernel("product", "product")(x, stored, *others)
    places = torch.cat(read)
    places = places[(places >= 0) & (places < stored.nbytes)].sort().values
    assert torch.equal(places, torch.arange(0, stored.nbytes, stored.element_size()))


@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")
def test_numbers_that_a_norm_has_yet_to_make_smaller_do_not_overflow() -> None:
    """The root of a token is known when its product is done, and float16 ends at 65,504."""
    x, stored, *_ = product(torch.float16, 2, 100, 24, False, False, False, "")
    x = (x.sign() * 60_000).contiguous()
    scale = torch.full((100,), 7.0, dtype=torch.float16, device=DEVICE)
    given = x, stored, None, None, scale, 1e-6, 8.0, ""
    assert_multiplies(torch.float16, given)
    assert not kernel("product", "product")(*given[:6], 1.0, "").isfinite().all(), "they did without the bound"


def run_by_kernels(engine: TorchEngine) -> TorchEngine:
    """Let each fused operator of a CPU be its kernel, which runs in the interpreter."""

    def converted(shape: Any) -> Any:
        module = engine._convert(shape)
        swapped = [node for node in module.graph.nodes if str(node.target).startswith("trt_spec.")]
        for node in swapped:
            name = str(node.target).removeprefix("trt_spec.")
            node.target = kernel(name, LAUNCHED[name][0])
        assert len(swapped) > 4
        module.recompile()
        return module

    engine._module = converted  # type: ignore[assignment]
    return engine


@pytest.mark.skipif(DEVICE == "cuda", reason="there kernels run without an interpreter, as `-m gpu` shows")
@pytest.mark.parametrize(
    "kind", ["int4", *(pytest.param(kind, marks=pytest.mark.exhaustive) for kind in ("llama", "gemma2"))]
)
def test_steps_by_kernels_have_the_logits_and_caches_of_steps_by_torch(
    pairs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Of a whole graph: a prompt, single tokens and several of two rows, one of them taken back."""
    made = Quantisation("int4" if kind == "int4" else "none")
    checkpoint = pairs("gemma2" if kind == "gemma2" else "llama").checkpoint
    bundle = Bundle.open(export_pair(checkpoint, tmp_path / "bundle", weights=made).bundle)
    logits, caches = [], []
    for devices in ((), ("cpu",)):
        monkeypatch.setattr(engine, "WITH_KERNELS", devices)
        opened = open_engine("torch", bundle.graph("target"), bundle.target.contract)
        assert isinstance(opened, TorchEngine)
        cache = blank_cache(opened.contract, 2, 16)
        found = []
        for start, width in (((0, 0), 3), ((3, 2), 1), ((4, 2), 3)):
            step = blank_step(run_by_kernels(opened) if devices else opened, cache, 0, 2, width, width)
            step.input_ids.copy_(torch.arange(2 * width).view(2, width) + 7)
            step.start.copy_(torch.tensor(start))
            step.run()
            found.append(step.logits)
        logits.append(torch.cat(found, 1))
        caches.append(torch.cat([x.flatten() for x in cache.values()]))
    assert logits[0].abs().max() > 1
    torch.testing.assert_close(*logits, atol=1e-4, rtol=0)
    torch.testing.assert_close(*caches, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("capability", "dtype"),
    [
        ("80", "bfloat16"),
        *(
            pytest.param(capability, dtype, marks=pytest.mark.exhaustive)
            for capability, dtype in (("90", "float16"), ("90", "float32"), ("90", "bfloat16"), ("120", "bfloat16"))
        ),
    ],
)
def test_triton_compiles_every_kernel_for_a_gpu_that_is_not_here(tmp_path: Path, capability: str, dtype: str) -> None:
    """Its interpreter takes more than its compiler. What does not fit into registers is spilt to slow memory."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kit.compiled_kernels", capability, dtype]
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert list(dict.fromkeys(one["operator"] for one in found)) == list(LAUNCHED) == sorted(kernels.LAUNCHES)
    assert not [one for one in found if one["shared_bytes"] > SHARED_BYTES or one["spilled_bytes"]]


@pytest.mark.parametrize("error", [OutOfResources(131072, 101376, "shared memory"), CompilationError("x = 1", None)])
def test_what_triton_cannot_run_is_said_in_a_sentence(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> None:
        raise error

    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(import_module("trt_spec.engines.torch.kernels.on_gpu.norm"), "norm_add", fail)
    with pytest.raises(EngineError, match=r"Triton cannot run the kernel 'norm_add' of engine torch .*another engine"):
        launcher("norm_add", "norm")(random(2))


def test_each_operator_says_how_many_kernels_it_launches() -> None:
    declared = {name for name in dir(torch.ops.trt_spec) if not name.startswith("_") and name != "name"}
    assert set(kernels.LAUNCHES) == declared
