import json
import shutil

import pytest
from trt_spec.engines import Bundle
from trt_spec.engines.bundle import added_files as additions
from trt_spec.runtime import Decoder, SamplingParams

from ..conftest import assert_refused


@pytest.fixture
def bundle(llama, tmp_path):
    """One that was given no n-grams, with a plan that its manifest does not list."""
    shutil.copytree(llama.bundle, tmp_path / "bundle")
    shutil.rmtree(tmp_path / "bundle" / "ngram")
    manifest = Bundle.open(llama.bundle)
    plain = {name: entry for name, entry in manifest.files.items() if not name.startswith("ngram")}
    bare = Bundle(tmp_path / "bundle", manifest.models, manifest.tokenizer, manifest.made_by, plain)
    (bare.path / "manifest.json").write_text(bare.manifest())
    (bare.path / "plans").mkdir()
    (bare.path / "plans" / "timing.cache").write_text("changes")
    return bare.path


@pytest.fixture
def text(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("def main\nimport os\nclass stack\n" * 40)
    return file


def test_a_bundle_without_a_draft_model_drafts_from_what_was_counted(run, bundle, text):
    result = run("ngram", "--bundle", bundle, "--text", text, "--json")
    found = json.loads(result.out)
    assert (result.code, found["order"]) == (0, 3)
    assert found["contexts"] > 20
    params = SamplingParams(max_new_tokens=30, ignore_eos=True, logit_bias={})
    with Decoder.open(bundle) as decoder:
        drafted, plain = (decoder.generate("def ", params, drafter=drafter)[0] for drafter in ("ngram", "none"))
        first, *following = decoder.tokenizer.encode("f mai").ids  # nothing is read before round one
        traced = decoder.generate([first], params, drafter="ngram", draft_length=4, trace=True)[0].trace[0]
    assert drafted.token_ids == plain.token_ids
    assert drafted.speculation.proposed > 0
    assert traced.proposal == tuple(following), "the commonest continuation of the text"


def test_counting_again_replaces_what_was_counted(run, bundle, text):
    names = []
    for order in (3, 1, 1):
        assert run("ngram", "--bundle", bundle, "--text", text, "--order", order).code == 0
        listed = [name for name in Bundle.open(bundle).files if name.startswith("ngram/")]
        assert listed == [f"ngram/{file.name}" for file in (bundle / "ngram").iterdir()]
        names += listed
    assert names[0] != names[1] == names[2]
    assert "plans/timing.cache" not in Bundle.open(bundle).files, "what changes is not listed"


@pytest.mark.parametrize("writes", [0, 1])
def test_counting_that_is_interrupted_leaves_the_bundle_as_it_was(run, bundle, text, monkeypatch, writes):
    run("ngram", "--bundle", bundle, "--text", text)
    before, left, write = Bundle.open(bundle).files, [None] * writes, additions.write_whole

    def interrupted(file, content):
        if not left:
            raise KeyboardInterrupt
        left.pop()
        write(file, content)

    monkeypatch.setattr(additions, "write_whole", interrupted)
    assert run("ngram", "--bundle", bundle, "--text", text, "--order", 2).code == 130
    assert Bundle.open(bundle).files == before


def test_what_a_killed_count_left_goes_with_the_next_one(run, bundle, text):
    run("ngram", "--bundle", bundle, "--text", text)
    (bundle / "ngram" / ".0123.npz.partial-0123abcd").touch()
    assert run("ngram", "--bundle", bundle, "--text", text, "--order", 2).code == 0
    assert [file.suffix for file in (bundle / "ngram").iterdir()] == [".npz"]


def test_what_is_counted_may_be_bounded(run, bundle, text):
    found = json.loads(run("ngram", "--bundle", bundle, "--text", text, "--most", 12, "--json").out)
    assert 0 < found["entries"] <= 12


def test_texts_that_cannot_be_counted_are_refused(run, bundle, tmp_path):
    file = tmp_path / "bad.txt"
    command = ("ngram", "--bundle", bundle, "--text", file)
    assert_refused(run(*command), f"text {file} cannot be read (No such file or directory); give another")
    file.write_bytes(b"ab\xff")
    assert_refused(run(*command), f"text {file} is not UTF-8: byte 2 is 0xff; convert it first")
    file.write_text("a")
    message = f"text {file} has 1 tokens, expected at least 3 for n-grams of 3; give a longer one"
    assert_refused(run(*command), message)
    assert_refused(run(*command, "--order", 9), "--order is 9, expected a whole number from 1 to 8")
    assert_refused(run(*command, "--order", 0), "argument --order: '0', expected a whole number >= 1")
    file.write_text("abcdef")
    assert_refused(run("ngram", "--bundle", tmp_path, "--text", file), "so it is not a bundle")


def test_a_bundle_that_cannot_be_written_is_refused(run, bundle, text):
    (bundle / "ngram").write_text("in the way")
    result = run("ngram", "--bundle", bundle, "--text", text)
    assert_refused(result, "(File exists); it is unchanged, make room and try again")
    Bundle.open(bundle)
