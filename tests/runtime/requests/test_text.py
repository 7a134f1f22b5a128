"""What comes out as text: stop rules inside and across rounds, held-back streaming, whole characters, log-probs."""

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from trt_spec.runtime import Decoder, SamplingParams
from trt_spec.runtime.requests.text import TextStream

from ...kit.bundles import Pair
from ...kit.prompts import random_prompts
from ..scripted import EOS, byte_tokenizer, encoded, says, scripted_decoder

PROMPT = encoded("ab")


def decoder_that_says(folder: Path, tokens: list[int], **options) -> Decoder:
    """Target and draft agree, so every round accepts all its proposals."""
    script = says(tokens, len(PROMPT))
    return scripted_decoder(folder, script, script, **options)


def streamed(decoder: Decoder, params: SamplingParams, k: int):
    pieces = list(decoder.stream(PROMPT, params, draft_length=k))
    return "".join(piece.text for piece in pieces), [token for piece in pieces for token in piece.token_ids], pieces


# Stop rules, for K from none to more than the text has tokens.


@pytest.mark.parametrize("k", [0, 1, 2, 3, 5, 16])
def test_the_end_of_text_inside_an_accepted_run_drops_all_after_it(tmp_path: Path, k: int):
    """Pitfall 7: from tokens, text, usage and log-probs alike."""
    said = [*encoded("hello"), EOS, *encoded(" and more")]
    with decoder_that_says(tmp_path, said) as decoder:
        [output] = decoder.generate([PROMPT], SamplingParams(logprobs=0), draft_length=k)
    assert output.text == "hello"
    assert list(output.token_ids) == said[:6]
    assert output.finish_reason == "stop"
    assert output.usage.completion_tokens == 6
    assert [logprob.token_id for logprob in output.logprobs] == said[:6]
    assert output.speculation.tokens == 5
    assert output.speculation.accepted <= 6


@pytest.mark.parametrize("k", [0, 1, 3, 4, 16])
def test_max_new_tokens_inside_an_accepted_run_drops_all_after_it(tmp_path: Path, k: int):
    with decoder_that_says(tmp_path, encoded("abcdefghijkl")) as decoder:
        for limit in (1, 2, 3, 7):
            [output] = decoder.generate([PROMPT], SamplingParams(max_new_tokens=limit, logprobs=1), draft_length=k)
            assert output.text == "abcdefghijkl"[:limit]
            assert output.finish_reason == "length"
            assert len(output.token_ids) == len(output.logprobs) == output.usage.completion_tokens == limit


@pytest.mark.parametrize("k", [0, 1, 2, 5])
def test_ignore_eos_goes_on_behind_the_end_of_text(tmp_path: Path, k: int):
    said = [*encoded("a"), EOS, *encoded("bc")]
    with decoder_that_says(tmp_path, said) as decoder:
        params = SamplingParams(ignore_eos=True, max_new_tokens=4)
        [output] = decoder.generate([PROMPT], params, draft_length=k)
    assert list(output.token_ids) == said
    assert output.text == "abc", "special tokens have no text"
    assert output.finish_reason == "length"


@pytest.mark.parametrize("k", [0, 2, 5])
def test_a_stop_token_ends_the_text_before_it(tmp_path: Path, k: int):
    with decoder_that_says(tmp_path, encoded("hello!")) as decoder:
        params = SamplingParams(stop_token_ids=[ord("!"), ord("l")])
        [output] = decoder.generate([PROMPT], params, draft_length=k)
    assert (output.text, list(output.token_ids), output.finish_reason) == ("he", encoded("hel"), "stop")


def test_every_end_of_text_token_of_the_set_ends_the_text(tmp_path: Path):
    with decoder_that_says(tmp_path, encoded("xy?"), eos_token_ids=(EOS, ord("?"))) as decoder:
        [output] = decoder.generate([PROMPT], SamplingParams())
    assert (output.text, output.finish_reason) == ("xy", "stop")


@pytest.mark.parametrize("k", [0, 1, 2, 3, 4, 8])
def test_a_stop_string_across_token_and_round_borders_ends_the_text_before_it(tmp_path: Path, k: int):
    """Bytes are tokens here, so every stop string spans tokens, and for small K rounds."""
    with decoder_that_says(tmp_path, encoded("one STOP two")) as decoder:
        params = SamplingParams(stop="STOP", logprobs=0)
        [output] = decoder.generate([PROMPT], params, draft_length=k)
        assert output.text == "one "
        assert output.finish_reason == "stop"
        assert bytes(output.token_ids) == b"one STOP", "the token that completes it is the last"
        assert len(output.logprobs) == output.usage.completion_tokens == 8
        text, tokens, pieces = streamed(decoder, params, k)
        assert text == "one "
        assert bytes(tokens) == b"one STOP"
        assert not any("S" in piece.text for piece in pieces), "what may begin a stop string is held back"


@pytest.mark.parametrize("k", [0, 3, 9])
def test_the_earliest_of_several_stop_strings_wins(tmp_path: Path, k: int):
    with decoder_that_says(tmp_path, encoded("a<end>b</s>c")) as decoder:
        for stop in (["</s>", "<end>"], ["<end>", "</s>"], ["end>", "<end>"]):
            [output] = decoder.generate([PROMPT], SamplingParams(stop=stop), draft_length=k)
            assert output.text == "a"


def test_a_stop_string_inside_one_token_ends_the_text_in_the_middle_of_it(tmp_path: Path):
    with decoder_that_says(tmp_path, [*encoded("a"), 257, *encoded("z")], extra=["bc. de"]) as decoder:
        for stop in (". ", [". ", "c"]):
            [output] = decoder.generate([PROMPT], SamplingParams(stop=stop), draft_length=4)
            assert output.text == ("abc" if stop == ". " else "ab")
            assert list(output.token_ids) == [ord("a"), 257]


@pytest.mark.parametrize("k", [0, 2, 7])
def test_text_held_back_for_a_stop_string_that_never_comes_is_given_at_the_end(tmp_path: Path, k: int):
    with decoder_that_says(tmp_path, encoded("one STO")) as decoder:
        text, _, _ = streamed(decoder, SamplingParams(stop="STOP"), k)
        assert text == "one STO"
    with decoder_that_says(tmp_path, encoded("STSTSTOP!")) as decoder:
        text, _, _ = streamed(decoder, SamplingParams(stop="STOP"), k)
        assert text == "STST"


def test_a_piece_is_settled_when_no_stop_string_and_no_letter_is_half_way(tmp_path: Path):
    """What another worker goes on from has lost no text, and no beginning of a stop string."""
    with decoder_that_says(tmp_path, encoded("aSTx€bS")) as decoder:
        _, tokens, pieces = streamed(decoder, SamplingParams(stop=["STOP"], max_new_tokens=9), k=0)
    assert bytes(tokens).decode() == "aSTx€bS"
    assert [piece.settled for piece in pieces] == [True, False, False, True, False, False, True, True, True]
    assert [piece.text for piece in pieces] == ["a", "", "", "STx", "", "", "€", "b", "S"], "the end holds nothing back"


def test_nothing_that_could_not_begin_a_stop_string_is_held_back(tmp_path: Path):
    with decoder_that_says(tmp_path, encoded("abcdef")) as decoder:
        _, _, pieces = streamed(decoder, SamplingParams(stop="STOP"), 0)
    assert [piece.text for piece in pieces] == ["a", "b", "c", "d", "e", "f", ""]


def test_pieces_say_which_tokens_the_draft_proposed(tmp_path: Path):
    text = encoded("abcdefgh")
    wrong_at_the_fifth = says([*text[:4], ord("?"), *text[5:]], len(PROMPT))
    with scripted_decoder(tmp_path, says(text, len(PROMPT)), wrong_at_the_fifth) as decoder:
        _, tokens, pieces = streamed(decoder, SamplingParams(max_new_tokens=8), 4)
    assert tokens == text
    from_draft = [flag for piece in pieces for flag in piece.from_draft]
    assert from_draft == [False, True, True, True, False, True, True, True], "the first comes with the prompt"


def test_the_pieces_of_a_cancelled_request_add_up_to_its_text(tmp_path: Path):
    with decoder_that_says(tmp_path, encoded("one STOxx")) as decoder:
        request = decoder.submit(PROMPT, SamplingParams(stop="STOP"), draft_length=0)
        for _ in range(6):  # the first step gives two tokens, one of them with the prompt
            decoder.step()
        decoder.cancel(request)
        decoder.step()
        assert request.output().text == "one STO"
        assert "".join(piece.text for piece in request.take()) == "one STO"


def test_a_stream_whose_request_another_client_finished_still_gives_every_piece(tmp_path: Path):
    with decoder_that_says(tmp_path, encoded("abcdef")) as decoder:
        stream = decoder.stream(PROMPT, SamplingParams(), draft_length=0)
        pieces = [next(stream)]
        while decoder.step():  # another client of the same decoder
            pass
        pieces += stream
    assert "".join(piece.text for piece in pieces) == "abcdef"


def test_leaving_a_stream_cancels_its_request(tmp_path: Path):
    with decoder_that_says(tmp_path, encoded("abcdef" * 9)) as decoder:
        for _ in decoder.stream(PROMPT):
            break
        decoder.step()
        assert not decoder.step()


# UTF-8.

TEXT = "aé€😀ß\u0301 \ufffd\n漢"


def push_all(tokenizer: Tokenizer, tokens: list[int], prompt=(97, 98), stop=()) -> tuple[list[str], TextStream]:
    stream, pieces = TextStream(tokenizer, list(prompt), stop), []
    for token in tokens:
        ended = stream.push(token)
        pieces.append(stream.take(ended))
        if ended:
            break
    stream.finish()
    pieces.append(stream.take(True))
    return pieces, stream


BYTE_TOKENIZER = byte_tokenizer(["lo", " é", "é€"])


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 259), max_size=40), st.lists(st.integers(0, 259), min_size=1, max_size=12))
def test_pieces_of_any_tokens_after_any_prompt_add_up_to_the_decoded_text(tokens: list[int], prompt: list[int]):
    """Valid or not, the streamed text is the decoder's own text of the output, unless the prompt ends in the middle
    of a character, which then belongs to neither."""
    pieces, stream = push_all(BYTE_TOKENIZER, tokens, prompt)
    assert "".join(pieces) == stream.text
    whole = BYTE_TOKENIZER.decode(tokens, skip_special_tokens=True)
    if not BYTE_TOKENIZER.decode(prompt, skip_special_tokens=True).endswith("\ufffd"):
        assert stream.text == whole


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=12))
def test_valid_utf_8_is_never_split(text: str):
    """Byte by byte, a piece is either empty or whole characters, and no replacement character is invented."""
    pieces, stream = push_all(BYTE_TOKENIZER, encoded(text))
    assert stream.text == text
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece or "\ufffd" in text for piece in pieces)


@settings(max_examples=200, deadline=None)
@given(st.text("abc", max_size=30), st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3))
def test_a_stop_string_is_never_shown_and_ends_the_text_where_it_first_completes(text: str, stop: list[str]):
    pieces, stream = push_all(BYTE_TOKENIZER, encoded(text), stop=stop)
    shortest = next((text[:end] for end in range(len(text) + 1) if any(text[:end].endswith(one) for one in stop)), None)
    if shortest is None:
        assert stream.text == text
    else:
        assert stream.text == shortest[: min(shortest.index(one) for one in stop if one in shortest)]
    assert "".join(pieces) == stream.text
    assert not any(one in stream.text for one in stop)


def fallback_tokenizer() -> Tokenizer:
    """As of Llama 2, Mistral and Gemma: words with a mark for the space, bytes as a fallback."""
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁a", "b", "▁é"]
    tokenizer = Tokenizer(
        models.BPE({name: i for i, name in enumerate(names)}, [], byte_fallback=True, unk_token="<unk>")
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def test_bytes_of_a_fallback_tokenizer_that_are_no_character_do_not_stop_the_stream():
    """Its decoder turns a whole run of bytes into U+FFFD once one byte is wrong, also those that came out before."""
    tokenizer, random_ = fallback_tokenizer(), random.Random(0)
    euro = [1 + byte for byte in "€".encode()]
    for tokens in (
        [257, *euro, 258],
        [257, *euro, 1 + 0xFF, 258, 257],
        [1 + 0xC3, 1 + 0xA9, 1 + 0xC3, 258],
        *([random_.randrange(1, 260) for _ in range(20)] for _ in range(50)),
    ):
        pieces, stream = push_all(tokenizer, tokens, prompt=[257])
        assert "".join(pieces) == stream.text
    assert push_all(tokenizer, [257, *euro, 258], prompt=[257])[1].text == " a€b"


# Log-probabilities.


@pytest.mark.parametrize("rule", ["rejection", "tokenwise", "coupled"])
def test_logprobs_are_of_the_raw_distribution_and_equal_plain_decodings(llama: Pair, rule: str):
    """Within 1e-4: plain and speculative steps round differently in float32. Raw: before bias, penalty, filters and
    temperature, so they are those of the checkpoint (pitfall 16)."""
    import torch

    [prompt] = random_prompts(64, [9], seed=1)
    params = SamplingParams(
        temperature=0.7,
        top_k=9,
        repetition_penalty=1.3,
        logit_bias={5: 2.0},
        logprobs=3,
        seed=5,
        rule=rule,
        max_new_tokens=30,
        ignore_eos=True,
    )
    with Decoder.open(llama.bundle) as decoder:
        neighbour = decoder.submit([4, 5, 6, 7], SamplingParams(logprobs=7, max_new_tokens=50), draft_length=2)
        [output] = decoder.generate([prompt], params, draft_length=4)
        assert output.speculation.accepted > 0
        assert all(len(entry.top) == 7 for entry in neighbour.output().logprobs)
    with torch.inference_mode():
        logits = llama.reference(torch.tensor([[*prompt, *output.token_ids]])).logits[0, len(prompt) - 1 : -1]
    expected = logits.log_softmax(-1)
    assert len(output.logprobs) == len(output.token_ids)
    for position, entry in enumerate(output.logprobs):
        assert entry.token_id == output.token_ids[position]
        assert entry.logprob == pytest.approx(expected[position, entry.token_id].item(), abs=1e-4)
        assert len(entry.top) == 3
        best = expected[position].topk(3)
        assert [value for _, value in entry.top] == pytest.approx(best.values.tolist(), abs=1e-4)
        assert [token for token, _ in entry.top] == best.indices.tolist()


def test_no_logprobs_are_reported_unless_asked_for(llama: Pair):
    with Decoder.open(llama.bundle) as decoder:
        outputs = decoder.generate(
            [[5, 6], [5, 6]], [SamplingParams(max_new_tokens=4), SamplingParams(max_new_tokens=4, logprobs=0)]
        )
    assert outputs[0].logprobs is None
    assert [entry.top for entry in outputs[1].logprobs] == [()] * 4
