"""A draft with other tokens than its target: which of them mean the same, and what is said of both ways to propose."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer, processors
from trt_spec.engines import Bundle, BundleError, ExportError, PairError
from trt_spec.engines.bundle import FOREIGN, TABLES
from trt_spec.export.checkpoints.agreement import refuse_unequal
from trt_spec.export.checkpoints.checkpoint import open_checkpoint
from trt_spec.export.checkpoints.vocabulary import Vocabulary, read_vocabulary
from trt_spec.export.foreign import common_tokens
from trt_spec.export.foreign.spelling import spelling
from trt_spec.export.pipeline import export_bundle
from trt_spec.runtime import Decoder, SamplingParams

from ..kit.bundles import export_pair, resave
from ..kit.families import tiny_checkpoint
from ..kit.foreign import in_other_tokens, merging_draft, padded
from ..kit.models import tiny_llama
from ..kit.small_tokenizers import byte_level, in_pieces


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("target") / "checkpoint")


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return merging_draft(tmp_path_factory.mktemp("draft") / "checkpoint")


def vocabulary(tokenizer: Tokenizer, bos: int | None, *eos: int) -> Vocabulary:
    tokens = {index: token for token, index in tokenizer.get_vocab().items()}
    return Vocabulary("x", tokenizer, tokens, bos, eos, None)


def test_tokens_of_both_kinds_are_spelled_in_bytes():
    symbols, pieces = byte_level(("<end>",)), in_pieces(("<unk>", "</s>"))
    assert sorted(spelling(symbols).values()) == sorted([*(bytes([byte]) for byte in range(256)), b"<think>"])
    spelled = spelling(pieces)
    assert spelled[pieces.token_to_id("<0x41>")] == b"A"
    assert spelled[pieces.token_to_id("▁")] == b" "
    assert not {pieces.token_to_id("<unk>"), pieces.token_to_id("</s>")} & spelled.keys()


def test_tokens_are_matched_by_what_they_stand_for_and_special_ones_by_what_they_are_for():
    ours, own = byte_level(("<end>", "<begin>")), in_pieces(("<unk>", "<s>", "</s>"))
    end, begin = ours.token_to_id("<end>"), ours.token_to_id("<begin>")
    common = common_tokens(vocabulary(ours, begin, end), vocabulary(own, 1, 2))
    pairs = dict(zip(common.target, common.own, strict=True))
    assert common.roles == {begin: 1, end: 2}
    assert {pairs[begin], pairs[end]} == {1, 2}
    assert pairs[ours.token_to_id("Ġ")] == own.token_to_id("▁")
    assert pairs[ours.encode("A").ids[0]] == own.token_to_id("<0x41>")
    assert len(pairs) == 256 + 2, "all bytes"
    assert common.target == sorted(set(common.target))


def test_of_tokens_with_the_same_bytes_the_one_that_is_written_counts():
    ours, own = byte_level(("<end>",)), in_pieces(("<unk>", "</s>"))
    common = common_tokens(vocabulary(ours, None), vocabulary(own, None))
    pairs = dict(zip(common.target, common.own, strict=True))
    letter = ours.encode("a").ids[0]
    assert own.token_to_id("<0x61>") < own.token_to_id("a"), "both say a"
    assert pairs[letter] == own.token_to_id("a")


def test_special_tokens_of_one_name_are_the_same_in_both():
    ours, own = byte_level(("<end>", "<|user|>")), in_pieces(("<unk>", "<|user|>"))
    common = common_tokens(vocabulary(ours, None), vocabulary(own, None))
    assert common.roles == {ours.token_to_id("<|user|>"): own.token_to_id("<|user|>")}


def test_the_model_under_other_numbers_has_all_tokens_in_common(target: Path, tmp_path: Path):
    other = in_other_tokens(target, tmp_path / "draft")
    common = common_tokens(*(read_vocabulary(open_checkpoint(str(path))) for path in (target, other)))
    assert common.target == list(range(64))
    assert common.own == list(reversed(range(64)))


@pytest.mark.parametrize("dtype", ["float16", pytest.param("float32", marks=pytest.mark.exhaustive)])
def test_export_says_both_ways_and_takes_the_better(target: Path, tmp_path: Path, dtype: str):
    """Of tokenizers that begin each text with a token of their own, which is no text of the other."""
    pair = shutil.copytree(target, tmp_path / "target"), in_other_tokens(target, tmp_path / "draft")
    for path in pair:
        tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
        begin = ("<s>", tokenizer.token_to_id("<s>"))
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[begin])
        tokenizer.save(str(path / "tokenizer.json"))
    report = export_bundle(pair[0], tmp_path / "bundle", draft=pair[1], dtype=dtype)
    [note] = [note for note in report.notes if "tokens of its own" in note]
    assert "has 64 tokens of its own, which can say 64 of the target's 64" in note
    assert "drafter common would be accepted 1.00 at temperature 0, 1.00 at temperature 1" in note
    assert "drafter text would be accepted 1.00 at temperature 0, 0." in note
    assert note.endswith("drafter common is the default")
    entry = Bundle.open(tmp_path / "bundle").models[FOREIGN]
    assert entry.check, "its graph was checked as any other"
    assert entry.tokens.acceptance["common"] == pytest.approx({"0": 1.0, "1": 1.0})
    assert entry.tokens.drafter == "common"
    assert entry.tokens.opening == (63,)


def test_drafts_with_the_targets_tokens_keep_their_names_beside_it(target: Path, draft: Path, tmp_path: Path):
    same = tiny_llama(tmp_path / "same", seed=3)
    bundle = Bundle.open(export_pair(target, tmp_path / "bundle", [draft, same]).bundle)
    assert list(bundle.models) == ["target", "foreign", "draft"]
    assert bundle.models["draft"].name == "same"
    with Decoder.open(bundle) as decoder:
        assert {"model", "common", "text"} <= set(decoder.drafters)
        request = decoder.submit([5], SamplingParams())
        assert request.drafter == "model", "it is asked first"
        decoder.cancel(request)
        for drafter in ("model+common", "common+model", "text+model"):
            [plain] = decoder.generate([[5, 6]], SamplingParams(max_new_tokens=20), draft_length=0)
            [both] = decoder.generate([[5, 6]], SamplingParams(max_new_tokens=20), draft_length=3, drafter=drafter)
            assert both.token_ids == plain.token_ids


def test_a_target_takes_one_draft_with_other_tokens(target: Path, draft: Path, tmp_path: Path):
    with pytest.raises(PairError, match=r"both have other tokens than the target .*; name one of them"):
        export_bundle(target, tmp_path / "bundle", draft=[draft, merging_draft(tmp_path / "other", seed=9)])
    assert not (tmp_path / "bundle").exists()


def test_a_draft_that_cannot_go_back_needs_the_targets_tokens(tmp_path: Path):
    """What a recurrent layer has absorbed stays read, but tokens of a text may change behind its end."""
    target = tiny_checkpoint("qwen3_5_text", tmp_path / "target")
    draft = tiny_checkpoint("qwen3_5_text", tmp_path / "draft")
    fields = json.loads((draft / "tokenizer.json").read_text())
    vocabulary = fields["model"]["vocab"]
    vocabulary["c"], vocabulary["f"] = vocabulary["f"], vocabulary["c"]
    (draft / "tokenizer.json").write_text(json.dumps(fields))
    with pytest.raises(PairError, match=r"the tokenizers of target and draft differ: id .*; choose a draft with"):
        export_bundle(target, tmp_path / "bundle", draft=draft)


def test_padded_embeddings_of_two_sizes_make_no_difference(tmp_path: Path):
    """As those of Qwen2.5: one tokenizer, 151,936 rows in its small models and 152,064 in the large ones."""
    own = tiny_llama(tmp_path / "own")
    params = SamplingParams(max_new_tokens=40, ignore_eos=True, temperature=1.5, rule="coupled", seed=3)
    for ours, theirs in ((96, 80), (80, 96)):
        folder = tmp_path / str(ours)
        target, draft = padded(own, folder / "target", ours), padded(own, folder / "draft", theirs)
        assert refuse_unequal(*(read_vocabulary(open_checkpoint(str(path))) for path in (target, draft))) == []
        bundle = Bundle.open(export_pair(target, folder / "bundle", draft).bundle)
        assert [model.contract.vocab_size for model in bundle.models.values()] == [ours, theirs]
        with Decoder.open(bundle) as decoder:
            assert decoder.vocab_size == 64
            [plain] = decoder.generate([[5, 6, 7]], params, draft_length=0)
            [output] = decoder.generate([[5, 6, 7]], params, draft_length=4)
            assert output.token_ids == plain.token_ids
            assert output.speculation.acceptance == 1.0
            sampled = replace(params, rule="rejection", temperature=5.0)
            [output] = decoder.generate([[5, 6, 7]], sampled, draft_length=4, trace=True)
            assert max(max(one.proposal, default=0) for one in output.trace) < 64
            assert max(output.token_ids) < 64


def test_a_bundle_whose_tables_or_tokens_are_not_its_own_is_refused(target: Path, draft: Path, tmp_path: Path):
    out = tmp_path / "bundle"
    export_pair(target, out, draft)
    (out / FOREIGN / TABLES).rename(tmp_path / TABLES)
    with pytest.raises(BundleError, match=f"lacks {FOREIGN}/{TABLES}"):
        Bundle.open(out)
    (tmp_path / TABLES).rename(out / FOREIGN / TABLES)
    fields = json.loads((out / FOREIGN / "tokenizer.json").read_text())
    (out / FOREIGN / "tokenizer.json").write_text(json.dumps(fields | {"model": {"type": "none"}}))
    resave(out)
    with pytest.raises(BundleError, match=r"tokenizer\.json is not a tokenizer"):
        Decoder.open(out)


def test_a_text_too_short_to_compare_on_is_refused(target: Path, draft: Path, tmp_path: Path):
    with pytest.raises(ExportError, match="expected at least 2"):
        export_bundle(target, tmp_path / "bundle", draft=draft, text="a")
