import argparse
import json
import shutil

import gguf
import pytest
from trt_spec.engines import Bundle
from trt_spec.export import pipeline
from trt_spec.export.kinds import open_any
from trt_spec.runtime import Decoder
from trt_spec.tools.commands import demo as demo_command
from trt_spec.tools.commands import serve
from trt_spec.tools.ink import GREEN
from trt_spec.tools.making import kept_bundles
from trt_spec.tools.trace_lines import RESET

from ...kit.gguf_model import write_gguf
from ...kit.models import tiny_llama
from ...kit.terminal import Terminal
from ..conftest import assert_refused


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def demo(run, cache, llama, monkeypatch):
    """The demo with an exporter that takes no time and gives a tiny bundle."""

    def export(target, out, draft, max_length, **options):
        assert (target, draft) == (kept_bundles.TARGET, [kept_bundles.DEMO_DRAFTS["model"]])
        shutil.copytree(llama.bundle, out)

    monkeypatch.setattr(pipeline, "export_bundle", export)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    few = ("--prompt", "def main", "--max-new-tokens", 16, "--repeats", 1)
    return lambda *arguments: run("demo", *few, *arguments)


def test_it_makes_its_bundle_once_and_again_when_damaged(demo, cache):
    first = demo()
    assert first.code == 0
    assert "making the bundle " in first.err
    (bundle,) = (cache / "trt-spec").iterdir()
    assert demo().err == ""
    for damaged in ("target/weights.bin", "manifest.json"):
        (bundle / damaged).write_bytes(b"damaged")
        again = demo()
        assert again.code == 0
        assert "making the bundle again: " in again.err
        Bundle.open(bundle)
    assert list((cache / "trt-spec").iterdir()) == [bundle]


def test_both_ways_give_the_same_tokens_and_their_speeds(demo):
    found = json.loads(demo("--json").out)
    assert found["identical"] is True
    assert found["plain"]["token_ids"] == found["speculative"]["token_ids"]
    assert len(found["plain"]["token_ids"]) == 16
    assert found["plain"]["speculation"]["proposed"] == 0
    assert found["speculative"]["speculation"]["proposed"] > 0
    ratio = found["speculative"]["tokens_per_second"] / found["plain"]["tokens_per_second"]
    assert found["speed_up"] == pytest.approx(ratio)


def test_the_text_is_printed_once_and_called_the_same(demo):
    out = demo().out
    assert out.startswith("def main")
    assert "With and without the draft: the same 16 tokens, one by one." in out
    assert "target and draft" in out


def test_on_a_terminal_what_the_draft_proposed_is_green(demo, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    plain = demo().out
    screen = Terminal()
    monkeypatch.setattr(demo_command.sys, "stdout", screen)
    demo()
    shown = screen.getvalue()
    assert f"{GREEN}Green{RESET} is what the draft proposed and the target accepted." in shown
    text = plain.partition("\nWith and without")[0]
    assert shown.replace(GREEN, "").replace(RESET, "").startswith(text)
    assert shown.index(GREEN) < len(text)


def test_texts_that_differ_are_both_shown_and_fail(demo, monkeypatch):
    generate = Decoder.generate

    def other_text_with_a_draft(self, prompt, params, **options):
        return generate(self, prompt if options.get("drafter") == "none" else "other", params, **options)

    monkeypatch.setattr(Decoder, "generate", other_text_with_a_draft)
    result = demo()
    assert result.code == 1
    assert "With the draft, and DIFFERENT:" in result.out
    assert json.loads(demo("--json").out)["identical"] is False


def test_a_missing_extra_is_named_before_the_work(demo, cache, monkeypatch):
    monkeypatch.setattr(kept_bundles, "installed", lambda name: None if name == "onnxscript" else "1.0")
    result = demo()
    assert result.code == 2
    expected = "a bundle is made on first use, which lacks onnxscript; pip install 'trt-spec[export]'"
    assert result.err.splitlines()[-1] == f"trt-spec: error: {expected}"
    assert not cache.exists()


def test_a_cache_folder_that_cannot_be_made_is_refused(demo, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    result = demo()
    assert result.code == 2
    assert "cannot be made (Not a directory); set XDG_CACHE_HOME to another" in result.err.splitlines()[-1]


def test_a_relative_cache_folder_counts_as_none(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert kept_bundles.cache_folder() == tmp_path / ".cache" / "trt-spec"


def test_a_checkpoint_is_exported_once_and_again_when_it_has_changed(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    target, said = tiny_llama(tmp_path / "my model"), []
    first = kept_bundles.bundle_of(str(target), [], said.append, 64, "int8")
    assert (first.max_length, list(first.models), first.models["target"].weights) == (64, ["target"], "int8")
    assert said[0] == f"making the bundle {first.path}, once"
    assert first.path.name.startswith("my-model-")
    count = len(said)
    assert kept_bundles.bundle_of(str(target), [], said.append, 64, "int8").path == first.path
    assert len(said) == count
    monkeypatch.setattr(pipeline, "export_bundle", lambda target, out, *_, **__: shutil.copytree(first.path, out))
    paths = {first.path, kept_bundles.bundle_of(str(target), [str(target)], said.append, 64, "int8").path}
    tiny_llama(target, seed=1)
    paths.add(kept_bundles.bundle_of(str(target), [], said.append, 64, "int8").path)
    assert len(paths) == 3


def test_a_gguf_file_that_is_served_keeps_its_blocks(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    file = write_gguf(tmp_path / "tiny.gguf", gguf.GGMLQuantizationType.Q8_0)
    bundle = serve._bundle(parser.parse_args([str(file), "--max-length", "64"]))
    assert bundle.models["target"].weights == "int8"


@pytest.mark.parametrize("drafter", kept_bundles.DEMO_DRAFTS)
def test_the_draft_that_is_asked_for_is_exported(run, cache, llama, monkeypatch, drafter):
    asked = []

    def export(target, out, draft, *_, **__):
        asked.append((target, draft))
        shutil.copytree(llama.bundle, out)

    monkeypatch.setattr(pipeline, "export_bundle", export)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    assert run("demo", "--drafter", drafter, "--max-new-tokens", 2, "--repeats", 1).code == 0
    assert asked == [(kept_bundles.TARGET, [kept_bundles.DEMO_DRAFTS[drafter]])]


@pytest.mark.parametrize("command", ["demo", "serve"])
def test_a_head_that_only_a_clone_has_is_refused_elsewhere(run, tmp_path, monkeypatch, command):
    monkeypatch.setitem(kept_bundles.DEMO_DRAFTS, "medusa", tmp_path / "pycode-14m-medusa")
    assert_refused(
        run(command, "--drafter", "medusa"),
        "--drafter medusa needs pycode-14m-medusa, which is in a clone of the repository and in no wheel; run this in "
        "a clone, or say --drafter model or eagle3 or blockwise or pass",
    )


def test_the_shipped_pair_is_there_and_heads_of_several_kinds():
    pair, heads = (kept_bundles.TARGET, kept_bundles.DEMO_DRAFTS["model"]), set(kept_bundles.DEMO_DRAFTS) - {"model"}
    for checkpoint in pair:
        assert {"config.json", "tokenizer.json"} <= {file.name for file in checkpoint.iterdir()}
    assert {open_any(kept_bundles.DEMO_DRAFTS[head])[0] for head in heads} == heads >= {"eagle3"}


def test_an_empty_prompt_is_refused(demo):
    demo()
    assert_refused(demo("--prompt", ""), "the prompt is empty")


@pytest.mark.exhaustive
def test_the_shipped_pair_is_exported_and_demonstrated(run, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    result = run("demo", "--json", "--repeats", 1)
    found = json.loads(result.out)
    assert (result.code, found["identical"]) == (0, True)
    assert found["speculative"]["speculation"]["tokens_per_round"] > 1.5
