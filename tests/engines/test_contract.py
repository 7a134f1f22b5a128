"""A graph that is not what its contract promises is refused before its first run, by the name of the tensor."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import onnx
import pytest
from trt_spec.engines import (
    RECURRENT,
    ROW,
    SLOTS,
    SOURCE,
    WINDOW,
    Bundle,
    Contract,
    ContractError,
    EngineError,
    State,
    TensorSpec,
    keys_and_values,
    open_engine,
)
from trt_spec.runtime import Decoder

from ..kit.bundles import Pair, resave, save_graph

CONTRACT = Contract(2, 4, keys_and_values(2, 2, 16, "float32"), vocab_size=64, max_length=256, dtype="float32")


def test_a_contract_spells_out_every_tensor():
    assert [str(spec) for spec in CONTRACT.inputs[:6]] == [
        "input_ids int64[batch, width]",
        "start int64[batch]",
        "depths int64[batch, width]",
        "ancestors bool[batch, width, width]",
        "logit_rows int64[batch, rows]",
        "past_key_0 float32[batch, 2, capacity, 16]",
    ]
    assert str(CONTRACT.outputs[0]) == "logits float32[batch, rows, 64]"
    assert len(CONTRACT.inputs) == 5 + 4
    assert len(CONTRACT.outputs) == 1 + 4
    assert CONTRACT.aliases["present_value_1"] == "past_value_1"
    assert CONTRACT.cache_bytes_per_token == 2 * 2 * 2 * 16 * 4
    assert CONTRACT.in_dtype("bfloat16").cache_bytes_per_token == 2 * 2 * 2 * 16 * 2


def test_states_of_any_shape_dtype_and_kind_have_inputs_outputs_and_bytes():
    states = (
        State("key_0", (2, 16), "float16"),
        State("value_0", (2, 8), "float16"),
        State("features", (1, 32), "float16"),
        State("summary", (3, 5), "float32", ROW),
        State("seen", (2, 16), "float16", SOURCE),
    )
    contract = Contract(1, 4, states, vocab_size=64, max_length=256, dtype="float16")
    assert [str(spec) for spec in contract.inputs[5:]] == [
        "past_key_0 float16[batch, 2, capacity, 16]",
        "past_value_0 float16[batch, 2, capacity, 8]",
        "past_features float16[batch, 1, capacity, 32]",
        "past_summary float32[batch, 3, 5]",
        "past_seen float16[batch, 2, source, 16]",
    ]
    assert [spec.name for spec in contract.outputs[1:]] == [
        "present_key_0",
        "present_value_0",
        "present_features",
        "present_summary",
    ]
    assert list(contract.aliases) == ["present_key_0", "present_value_0", "present_features"]
    assert contract.cache_bytes_per_token == 2 * (2 * 16 + 2 * 8 + 32)
    assert contract.cache_bytes_per_row == 4 * 3 * 5
    assert contract.cache_bytes(rows=3, tokens=100) == 3 * (100 * contract.cache_bytes_per_token + 60)
    in_blocks = {spec.name: str(spec) for spec in contract.with_blocks().inputs}
    assert in_blocks["past_key_0"] == "past_key_0 float16[pool, 2, 32, 16]"
    assert in_blocks["past_seen"] == "past_seen float16[batch, 2, source, 16]"
    assert [state.dtype for state in contract.in_dtype("bfloat16").states] == [*["bfloat16"] * 3, "float32", "bfloat16"]
    assert Contract.from_json(json.loads(json.dumps(contract.to_json()))) == contract


def test_a_manifest_has_a_line_of_text_for_each_state(llama: Pair):
    text = (llama.bundle / "manifest.json").read_text()
    for state in CONTRACT.states:
        assert f'"{state.name} float32[2, 16] per token"' in text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (["key_0"], r"lists \['key_0'\], expected a state such as key_0 float16\[2, 64\] per token; export it again"),
        ("key_0 float32[2, -1] per token", r"lists 'key_0 float32\[2, -1\] per token', expected a state such as"),
        ("key_0 float32[2, 0] per token", r"lists key_0 float32\[2, 0\] per token, expected heads and a size, both"),
        ("key_0 float32[2, 3, 4] per token", "expected heads and a size, both positive; export it again"),
        ("summary float32[0] per row", "expected positive sizes; export it again"),
        (
            "key_0 int4[2, 16] per token",
            "expected a dtype of float32, float16, bfloat16, int8, float8_e4m3fn; export it again",
        ),
        ("x float32[2, 16] per ring", "per ring, a kind of state that this version does not know; update it"),
    ],
)
def test_a_state_that_cannot_be_is_refused(text: object, message: str):
    with pytest.raises(ContractError, match=message):
        Contract.from_json(CONTRACT.to_json() | {"states": [text]})


def test_a_state_that_is_listed_twice_is_refused():
    with pytest.raises(ContractError, match="lists the state 'key_0' twice, expected each once; export it again"):
        replace(CONTRACT, states=CONTRACT.states + CONTRACT.states[:1])


@pytest.mark.parametrize(("engine", "kind"), [("openvino", ROW), ("openvino", SOURCE), ("openvino-bfloat16", WINDOW)])
def test_an_engine_refuses_states_of_a_kind_that_it_does_not_take(llama: Pair, engine: str, kind: str):
    message = "use engine onnxruntime or torch or torch-compiled or tensorrt"
    bundle = Bundle.open(llama.bundle)
    odd = State("odd", (2, 16), "float32", kind)
    contract = replace(bundle.target.contract, states=(*bundle.target.contract.states, odd))
    expected = rf"engine {engine} takes no state of the kind '{kind}', .*model.onnx has odd float32\[2, 16\] per {kind}"
    with pytest.raises(EngineError, match=f"{expected}; {message}"):
        open_engine(engine, bundle.graph("target"), contract)


@pytest.mark.parametrize(("field", "value"), [("layers", 0), ("heads", -1), ("vocab_size", 1.5), ("max_length", True)])
def test_a_contract_of_impossible_numbers_is_refused(field: str, value):
    with pytest.raises(ContractError, match=f"contract field {field} is .*, expected a positive integer"):
        replace(CONTRACT, **{field: value})


def test_of_recurrent_layers_alone_none_attends_and_no_token_takes_memory():
    states = (State("tail_0", (3, 8), "float32", ROW), State("inputs_0", (1, 8), "float32", WINDOW))
    contract = replace(CONTRACT, layers=0, heads=0, states=states, capabilities=(RECURRENT,))
    assert Contract.from_json(json.loads(json.dumps(contract.to_json()))) == contract
    assert contract.cache_bytes(rows=2, tokens=1000) == 2 * 4 * (3 * 8 + SLOTS * 8)
    assert not any("capacity" in spec.shape for spec in (*contract.inputs, *contract.outputs))
    with pytest.raises(ContractError, match="contract field layers is -1"):
        replace(contract, layers=-1)


def test_a_contract_of_another_dtype_is_refused():
    with pytest.raises(ContractError, match="contract dtype is 'int8', expected float32, float16 or bfloat16"):
        replace(CONTRACT, dtype="int8")


def test_a_contract_with_other_fields_is_refused():
    with pytest.raises(ContractError, match="contract has the fields"):
        Contract.from_json({"layers": 1})
    with pytest.raises(ContractError, match="contract has the fields"):
        Contract.from_json([])


def test_a_graph_that_keeps_its_contract_passes():
    CONTRACT.check("graph", CONTRACT.inputs, CONTRACT.outputs)
    CONTRACT.check("graph", CONTRACT.inputs[::-1], CONTRACT.outputs[::-1])


def test_a_tensor_too_few_too_many_or_of_another_form_is_refused_by_name():
    inputs, outputs = CONTRACT.inputs, CONTRACT.outputs
    with pytest.raises(ContractError, match=r"g has no input 'start', its contract promises start int64\[batch\]"):
        CONTRACT.check("g", [spec for spec in inputs if spec.name != "start"], outputs)
    with pytest.raises(ContractError, match="g has no output 'logits'"):
        CONTRACT.check("g", inputs, outputs[1:])
    with pytest.raises(ContractError, match="g has the input 'attention_mask', which its contract does not know"):
        CONTRACT.check("g", [*inputs, TensorSpec("attention_mask", "int64", ("batch",))], outputs)
    other = [replace(outputs[0], dtype="float16"), *outputs[1:]]
    with pytest.raises(
        ContractError, match=r"g has the output logits float16\[.*\], its contract promises logits float32"
    ):
        CONTRACT.check("g", inputs, other)


@pytest.fixture
def bundle(llama: Pair, tmp_path: Path) -> Path:
    return Path(shutil.copytree(llama.bundle, tmp_path / "bundle"))


def change_graph(bundle: Path, change: Callable[[onnx.GraphProto], object]) -> None:
    model = onnx.load(bundle / "target/model.onnx")
    change(model.graph)
    save_graph(model, bundle, "target")
    resave(bundle)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"states": keys_and_values(2, 4, 16, "float32")},
            r"past_key_0 float32\[batch, 2, capacity, 16\], its contract promises past_key_0 float32\[batch, 4,",
        ),
        (
            {"states": keys_and_values(1, 2, 16, "float32")},
            "has the input 'past_key_1', which its contract does not know",
        ),
    ],
)
def test_a_bundle_whose_contract_promises_another_shape_is_refused(bundle: Path, fields: dict, message: str):
    opened = Bundle.open(bundle)
    contract = replace(opened.target.contract, **fields)
    replace(opened, models=opened.models | {"target": replace(opened.target, contract=contract)}).save()
    with pytest.raises(ContractError, match=message) as error:
        Decoder.open(bundle)
    assert "target/model.onnx" in str(error.value)


def test_a_graph_with_an_input_of_another_dtype_is_refused(bundle: Path):
    def widen(graph: onnx.GraphProto) -> None:
        [start] = [value for value in graph.input if value.name == "start"]
        start.type.tensor_type.elem_type = onnx.TensorProto.INT32
        cast = onnx.helper.make_node("Cast", ["start"], ["start_64"], to=onnx.TensorProto.INT64)
        for node in graph.node:
            node.input[:] = ["start_64" if name == "start" else name for name in node.input]
        graph.node.insert(0, cast)

    change_graph(bundle, widen)
    with pytest.raises(
        ContractError, match=r"has the input start int32\[batch\], its contract promises start int64\[batch\]"
    ):
        Decoder.open(bundle)


def test_a_graph_with_an_output_too_many_is_refused(bundle: Path):
    def expose(graph: onnx.GraphProto) -> None:
        graph.output.append(onnx.helper.make_empty_tensor_value_info("input_ids_again"))
        graph.output[-1].type.tensor_type.elem_type = onnx.TensorProto.INT64
        graph.node.append(onnx.helper.make_node("Identity", ["input_ids"], ["input_ids_again"]))

    change_graph(bundle, expose)
    with pytest.raises(ContractError, match="has the output 'input_ids_again', which its contract does not know"):
        Decoder.open(bundle)


def test_a_graph_that_onnx_runtime_cannot_read_is_refused(bundle: Path):
    (bundle / "target/model.onnx").write_bytes(b"no graph")
    resave(bundle)
    with pytest.raises(EngineError, match=r"ONNX Runtime cannot open .*target/model.onnx") as error:
        Decoder.open(bundle)
    assert "\n" not in str(error.value)


def test_weights_outside_the_bundle_are_refused(bundle: Path):
    """The graph itself may name files: ONNX Runtime must not follow them out of its folder."""
    shutil.copy(bundle / "target/weights.bin", bundle.parent / "weights.bin")
    model = onnx.load(bundle / "target/model.onnx", load_external_data=False)
    for weight in model.graph.initializer:
        for entry in weight.external_data:
            if entry.key == "location":
                entry.value = "../../weights.bin"
    (bundle / "target/model.onnx").write_bytes(model.SerializeToString())
    resave(bundle)
    with pytest.raises(EngineError, match="ONNX Runtime cannot open"):
        Decoder.open(bundle)


def test_a_half_precision_bundle_says_how_to_get_one_that_runs_here(bundle: Path):
    opened = Bundle.open(bundle)
    contract = opened.target.contract.in_dtype("float16")
    with pytest.raises(EngineError, match="is float16, for which ONNX Runtime has no CPU kernels; export with --dtype"):
        open_engine("onnxruntime", opened.graph("target"), contract)


def test_an_unknown_engine_or_device_is_refused(bundle: Path):
    with pytest.raises(
        EngineError, match=r"engine .magic.; this version has: onnxruntime, openvino, openvino-bfloat16, torch"
    ):
        Decoder.open(bundle, engine="magic")
    with pytest.raises(EngineError, match="engine onnxruntime runs on the device cpu or cuda, not on 'mps'"):
        Decoder.open(bundle, device="mps")
