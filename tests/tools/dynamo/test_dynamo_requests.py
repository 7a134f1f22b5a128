"""Requests of NVIDIA Dynamo in our terms; the worker itself is tested in the tier `replicas`."""

import sys
from typing import Any

import pytest
from trt_spec.engines import Bundle, RequestError
from trt_spec.runtime import Decoder, Piece, SamplingParams, TokenLogprob
from trt_spec.tools.dynamo import worker as dynamo_worker
from trt_spec.tools.dynamo.requests import card_of, chunk_of, seed_of, submission_of
from trt_spec.tools.serving.tokens import Spelling

from ...kit.bundles import Pair
from ..serving.manifests import commands_of

EMPTY: dict[str, dict[str, Any]] = {  # as version 1.6.1 sends a request that asks for nothing
    "stop_conditions": dict.fromkeys(
        ("max_tokens", "stop", "stop_token_ids", "stop_token_ids_visible", "min_tokens", "max_thinking_tokens")
    ),
    "sampling_options": dict.fromkeys(("n", "best_of", "presence_penalty", "temperature", "seed", "guided_decoding")),
    "output_options": dict.fromkeys(("logprobs", "prompt_logprobs", "skip_special_tokens", "formatted_prompt")),
    "routing": {"dp_rank": 0},
}


def wanted(**fields: dict[str, Any]):
    request = {group: EMPTY[group] | fields.get(group, {}) for group in EMPTY}
    return submission_of({"token_ids": [5, 6, 7], **fields, **request}, "a-b-c", "coupled", 100)


def test_what_is_left_out_has_the_defaults_of_the_server_and_all_room_there_is():
    found = wanted()
    assert found.params == SamplingParams(max_new_tokens=97, temperature=1.0, rule="coupled", seed=seed_of("a-b-c"))
    assert (found.prompt, found.cache_salt) == ([5, 6, 7], "")


def test_every_field_that_is_taken_has_its_meaning():
    found = wanted(
        stop_conditions={
            "max_tokens": 9,
            "min_tokens": 2,
            "stop": ["a", "b"],
            "ignore_eos": True,
            "stop_token_ids": [4],
            "stop_token_ids_visible": [3],
            "stop_token_ids_hidden": [0, 4],
        },
        sampling_options={
            "temperature": 0.5,
            "top_p": 0.75,
            "top_k": -1,
            "min_p": 0.25,
            "repetition_penalty": 1.5,
            "seed": -1,
            "n": 1,
            "presence_penalty": 0.0,
        },
        output_options={"logprobs": 3, "skip_special_tokens": True},
        routing={"cache_salt": "mine"},
    )
    assert found.params == SamplingParams(
        max_new_tokens=9,
        min_tokens=2,
        stop=["a", "b"],
        ignore_eos=True,
        stop_token_ids=[0, 3, 4],
        temperature=0.5,
        top_p=0.75,
        min_p=0.25,
        repetition_penalty=1.5,
        seed=2**64 - 1,
        logprobs=3,
        rule="coupled",
    )
    assert found.cache_salt == "mine"


@pytest.mark.parametrize(
    ("group", "name", "value", "reason"),
    [
        ("sampling_options", "n", 2, "send a request for each completion"),
        ("sampling_options", "presence_penalty", 0.5, "does not say where its prompt ended"),
        ("sampling_options", "frequency_penalty", -1.0, "does not say where its prompt ended"),
        ("sampling_options", "guided_decoding", {"json": {}}, "Dynamo does not move such a request"),
        ("sampling_options", "length_penalty", 0.5, "each text is written token by token"),
        ("sampling_options", "typical_p", 0.5, "it is not known here"),
        ("stop_conditions", "max_thinking_tokens", 5, "thinking is not separated from answering"),
        ("output_options", "prompt_logprobs", 1, "only trt-spec serve has log-probs of prompts"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(group: str, name: str, value: object, reason: str):
    with pytest.raises(RequestError, match=f"^{name} is refused: .*{reason}.*; leave it out$"):
        wanted(**{group: {name: value}})


def test_what_is_no_token_is_refused():
    with pytest.raises(RequestError, match="prompt_embeds is refused: the model reads tokens; leave it out"):
        wanted(prompt_embeds="AAAA")
    with pytest.raises(RequestError, match="mm_processor_kwargs is refused: images are read as the bundle says"):
        wanted(mm_processor_kwargs={"a": 1})
    assert wanted(mm_processor_kwargs={}) == wanted()


def test_a_request_that_moves_keeps_its_seed_and_no_two_requests_share_one():
    assert seed_of("a-b-c") == seed_of("a-b-c") != seed_of("a-b-d")
    assert 0 <= seed_of("a-b-c") < 2**64


def test_a_chunk_holds_all_tokens_and_log_probs_of_its_pieces(llama: Pair):
    with Decoder.open(llama.bundle, max_batch=1) as decoder:
        spelling = Spelling(decoder.tokenizer, decoder.bundle.tokenizer_file)
    plain = [Piece("", (5, 6), (True, False)), Piece("x", (7,), (False,))]
    assert chunk_of(plain, spelling) == {"token_ids": [5, 6, 7], "index": 0}
    told = TokenLogprob(5, -0.5, ((6, -0.25), (5, -0.5)))
    found = chunk_of([Piece("", (5,), (True,), (told,))], spelling)
    assert found["log_probs"] == [-0.5]
    [ranked] = found["top_logprobs"]
    assert [(one["rank"], one["token_id"], one["logprob"]) for one in ranked] == [(1, 6, -0.25), (2, 5, -0.5)]
    assert ranked[1]["token"] == spelling.to_text(5)
    assert bytes(ranked[1]["bytes"]) == spelling.to_bytes(5)


def test_the_card_tells_bundles_and_rules_apart(llama: Pair, eight: Pair):
    """Dynamo lets no worker in whose card is another."""
    with Decoder.open(llama.bundle, max_batch=1) as decoder:
        tokenizer = decoder.tokenizer
    first, again, other = (
        card_of(Bundle.open(llama.bundle), tokenizer, rule) for rule in ("coupled",) * 2 + ("rejection",)
    )
    assert first == again != other
    assert card_of(Bundle.open(eight.bundle), tokenizer, "coupled")["config.json"] != first["config.json"]


def test_without_dynamo_the_worker_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setitem(sys.modules, "dynamo", None)
    assert dynamo_worker.main(["--bundle", "b"]) == 2
    said = capsys.readouterr().err
    assert said == (
        "trt_spec.tools.dynamo.worker: error: a worker of Dynamo needs dynamo, which is not installed; "
        "pip install 'trt-spec[dynamo]'\n"
    )


def test_the_manifests_start_workers_with_flags_that_there_are():
    """The files themselves were only read: no cluster has run them."""
    given = commands_of("trt_spec.tools.dynamo.worker")
    assert len(given) == 2
    for words in given:
        arguments = dynamo_worker.parser().parse_args(words)
        assert (str(arguments.bundle), arguments.rule) == ("/bundle", "coupled")
