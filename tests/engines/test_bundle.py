"""A bundle that is missing, damaged, foreign, newer or reaches outside itself is refused by name."""

import json
import random
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from trt_spec.engines import Bundle, BundleError, TrtSpecError
from trt_spec.engines.bundle.manifest import FORMAT, content_hash
from trt_spec.runtime import Decoder

from ..kit.bundles import Pair, resave

FILES = ["target/model.onnx", "target/weights.bin", "draft/model.onnx", "draft/weights.bin", "tokenizer.json"]


@pytest.fixture
def bundle(llama: Pair, tmp_path: Path) -> Path:
    return Path(shutil.copytree(llama.bundle, tmp_path / "bundle"))


def edit(bundle: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    manifest = bundle / "manifest.json"
    fields = json.loads(manifest.read_text())
    change(fields)
    manifest.write_text(json.dumps(fields | {"sha256": content_hash(fields)}))


def refused(bundle: Path, message: str) -> str:
    with pytest.raises(BundleError, match=message) as error:
        Bundle.open(bundle)
    text = str(error.value)
    assert "\n" not in text
    return text


def test_a_whole_bundle_opens_and_says_what_is_in_it(bundle: Path):
    opened = Bundle.open(str(bundle))
    assert {name for name in opened.files if not name.startswith("ngram/")} == set(FILES)
    assert opened.target.contract.layers == 2
    assert opened.draft is not None
    assert opened.tokenizer.eos_token_ids == (1,)
    assert opened.max_length == 256
    assert opened.weight_bytes("target") == (bundle / "target/weights.bin").stat().st_size


def test_a_bundle_may_be_moved(bundle: Path):
    moved = bundle.rename(bundle.with_name("elsewhere"))
    assert Bundle.open(moved).path == moved


def test_a_missing_bundle_is_refused(tmp_path: Path):
    assert "export-models" in refused(tmp_path / "none", "is not a directory")
    (tmp_path / "file").write_text("x")
    refused(tmp_path / "file", "is not a directory")


def test_a_directory_without_a_manifest_is_refused(tmp_path: Path):
    refused(tmp_path, "has no manifest.json, so it is not a bundle; make one with export-models")


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_refused_by_name(bundle: Path, name: str):
    (bundle / name).unlink()
    refused(bundle, f"lacks {re.escape(name)}; export it again or copy it whole")


@pytest.mark.parametrize("name", FILES)
def test_one_flipped_bit_in_any_file_is_refused_by_name(bundle: Path, name: str):
    data = bytearray((bundle / name).read_bytes())
    data[len(data) // 2] ^= 1
    (bundle / name).write_bytes(data)
    refused(bundle, f"{re.escape(name)} is damaged: its sha256 is not the manifest's")


@pytest.mark.parametrize("name", FILES)
def test_a_truncated_file_is_refused_with_its_size(bundle: Path, name: str):
    data = (bundle / name).read_bytes()
    (bundle / name).write_bytes(data[:-1])
    refused(bundle, f"{re.escape(name)} has {len(data) - 1} bytes, its manifest says {len(data)}")


@pytest.mark.parametrize("text", ["", "{", '{"format": 1', "\ufeff{}", "[1]", '"x"', "null", '{"format": "1"}', "{}"])
def test_a_manifest_that_is_none_is_refused(bundle: Path, text: str):
    (bundle / "manifest.json").write_text(text, encoding="utf-8")
    refused(bundle, "manifest.json (is not JSON|has no format number)")


def test_a_manifest_that_is_no_text_is_refused(bundle: Path):
    (bundle / "manifest.json").write_bytes(b"\xff\xfe\x00")
    refused(bundle, "manifest.json is not JSON")


def test_a_newer_bundle_is_refused_with_both_versions_and_what_to_do(bundle: Path):
    edit(bundle, lambda fields: fields.update(format=FORMAT + 1, made_by={"trt-spec": "9.9"}))
    message = refused(bundle, rf"has format {FORMAT + 1} .made by trt-spec 9.9., this version reads format {FORMAT}\b")
    assert message.endswith("update trt-spec")


def test_an_older_bundle_is_to_be_exported_again(bundle: Path):
    edit(bundle, lambda fields: fields.update(format=FORMAT - 1))
    assert refused(bundle, f"has format {FORMAT - 1}").endswith("export the bundle again")


@pytest.mark.parametrize(
    "change",
    [
        lambda fields: fields.pop("models"),
        lambda fields: fields["models"].pop("target"),
        lambda fields: fields["models"]["draft"].update(kind="target"),
        lambda fields: fields["models"]["draft"].update(kind="spare"),
        lambda fields: fields.pop("files"),
        lambda fields: fields.update(files=[]),
        lambda fields: fields.update(files={"a": {}}),
        lambda fields: fields["models"].update(target=None),
        lambda fields: fields["models"]["target"].update(surprise=1),
        lambda fields: fields["models"]["target"].pop("contract"),
        lambda fields: fields["models"]["target"]["contract"].pop("layers"),
        lambda fields: fields["models"]["target"]["contract"].update(layers=0),
        lambda fields: fields["models"]["target"]["contract"].update(layers="2"),
        lambda fields: fields["models"]["target"]["contract"].update(dtype="int8"),
        lambda fields: fields["models"]["draft"]["contract"].update(more=1),
        lambda fields: fields["models"]["draft"]["contract"].update(capabilities=["clairvoyance"]),
        lambda fields: fields["models"]["draft"]["contract"].update(capabilities=None),
        lambda fields: fields["tokenizer"].pop("vocab_size"),
        lambda fields: fields["tokenizer"].update(eos_token_ids=None),
        lambda fields: fields["tokenizer"].update(eos_token_ids="1"),
        lambda fields: fields["tokenizer"].update(eos_token_ids=[-1]),
        lambda fields: fields["tokenizer"].update(vocab_size="64"),
        lambda fields: fields["tokenizer"].update(vocab_size=-5),
        lambda fields: fields["tokenizer"].update(vocab_size=65),  # more than the graph has logits for
        lambda fields: fields["files"]["tokenizer.json"].update(bytes="many"),
        lambda fields: fields.update(made_by=None),
    ],
)
def test_a_manifest_that_breaks_its_form_is_refused(bundle: Path, change: Callable[[dict[str, Any]], Any]):
    edit(bundle, change)
    refused(bundle, "manifest.json (is damaged|does not list|lists models of the kinds)")


@pytest.mark.parametrize("name", FILES)
def test_a_manifest_that_leaves_out_a_file_every_bundle_has_is_refused(bundle: Path, name: str):
    edit(bundle, lambda fields: fields["files"].pop(name))
    refused(bundle, f"does not list {re.escape(name)}, which every bundle has")


def test_a_graph_that_onnx_runtime_would_run_and_nobody_vouches_for_is_refused(bundle: Path):
    shutil.copy(bundle / "target/model.onnx", bundle / "target/onnxruntime.onnx")
    refused(bundle, "does not list target/onnxruntime.onnx, which is there; remove that file")


@pytest.mark.parametrize(
    "name", ["../outside", "target/../../outside", "/etc/passwd", "draft/../../bundle-2/x", "a/\x00b", "\ud800"]
)
def test_a_path_that_leaves_the_bundle_is_refused(bundle: Path, name: str):
    (bundle.parent / "outside").write_text("secret")
    edit(bundle, lambda fields: fields["files"].update({name: {"bytes": 6, "sha256": "0" * 64}}))
    refused(bundle, "(lies outside the bundle; it is refused|is damaged)")


def test_a_link_out_of_the_bundle_is_refused(bundle: Path):
    outside = bundle.parent / "outside.bin"
    (bundle / "target/weights.bin").rename(outside)
    (bundle / "target/weights.bin").symlink_to(outside)
    refused(bundle, "lists 'target/weights.bin', which lies outside the bundle; it is refused")


def test_a_linked_folder_out_of_the_bundle_is_refused(bundle: Path):
    (bundle / "draft").rename(bundle.parent / "draft")
    (bundle / "draft").symlink_to(bundle.parent / "draft")
    refused(bundle, "which lies outside the bundle; it is refused")


def test_a_link_to_itself_is_refused(bundle: Path):
    (bundle / "target/weights.bin").unlink()
    (bundle / "target/weights.bin").symlink_to("weights.bin")
    refused(bundle, "target/weights.bin")


def test_a_bundle_that_is_itself_a_link_opens(bundle: Path):
    link = bundle.parent / "link"
    link.symlink_to(bundle)
    assert Bundle.open(link).draft is not None


def test_a_folder_in_a_files_place_is_refused(bundle: Path):
    (bundle / "tokenizer.json").unlink()
    (bundle / "tokenizer.json").mkdir()
    refused(bundle, "lacks tokenizer.json")
    shutil.rmtree(bundle)
    (bundle / "manifest.json").mkdir(parents=True)
    refused(bundle, "manifest.json")


def damaged_manifests(bundle: Path) -> Iterator[None]:
    """300 times one bit flipped, 100 times cut short."""
    manifest = bundle / "manifest.json"
    data, choose = manifest.read_bytes(), random.Random(0)
    for number in range(400):
        damaged = bytearray(data)
        at = choose.randrange(len(data))
        if number < 300:
            damaged[at] ^= 1 << choose.randrange(8)
        else:
            del damaged[at:]
        manifest.write_bytes(damaged)
        yield


def test_no_damage_to_a_manifest_raises_anything_but_typed_errors(bundle: Path):
    for _ in damaged_manifests(bundle):
        with suppress(TrtSpecError):
            Bundle.open(bundle)


def test_no_damage_to_a_manifest_is_believed(bundle: Path):
    """A flipped digit of an end-of-text id or of the longest sequence is a damaged bundle too."""
    whole = Bundle.open(bundle)
    for _ in damaged_manifests(bundle):
        try:
            opened = Bundle.open(bundle)
        except TrtSpecError:
            continue
        assert opened == whole, "only a change that means nothing may pass"


def test_a_tokenizer_file_that_is_none_is_refused(bundle: Path):
    (bundle / "tokenizer.json").write_text("{}")
    resave(bundle)
    with pytest.raises(BundleError, match=r"tokenizer\.json"):
        Decoder.open(bundle)


def test_a_saved_bundle_reads_back_as_it_was(bundle: Path):
    opened = Bundle.open(bundle)
    replace(opened, made_by={"trt-spec": "0.1"}).save()
    assert replace(Bundle.open(bundle), made_by=opened.made_by) == opened


def test_a_bundle_without_a_draft_opens(bundle: Path):
    shutil.rmtree(bundle / "draft")
    edit(
        bundle, lambda fields: (fields["models"].pop("draft"), [fields["files"].pop(n) for n in FILES if "draft" in n])
    )
    assert Bundle.open(bundle).draft is None
