"""Acceptance is accepted ÷ examined, yield is accepted ÷ proposed, and a round that proposes nothing counts nothing."""

from pathlib import Path

import pytest
from trt_spec.runtime import Decoder, SamplingParams, Speculation
from trt_spec.runtime.requests.metrics import Outcome

from ...kit.bundles import Pair
from ...kit.prompts import random_prompts
from ..scripted import EOS, encoded, says, scripted_decoder


def test_examined_proposals_end_with_the_first_rejected_one():
    """Pitfall 15: K = 4 with 0, 2 and 4 accepted."""
    speculation = Speculation()
    for accepted in (0, 2, 4):
        speculation.add_round(Outcome(proposed=4, accepted=accepted, kept=accepted + 1))
    assert (speculation.rounds, speculation.tokens) == (3, 9)
    assert (speculation.proposed, speculation.examined, speculation.accepted) == (12, 1 + 3 + 4, 6)
    assert speculation.acceptance == 6 / 8
    assert speculation.yield_ == 6 / 12
    assert speculation.tokens_per_round == 3
    assert speculation.histogram == [1, 0, 1, 0, 1]
    assert speculation.examined_at == [3, 2, 2, 1]
    assert speculation.accepted_at == [2, 2, 1, 1]
    assert speculation.acceptance_by_position == [2 / 3, 1, 1 / 2, 1]


def test_a_round_that_proposes_nothing_counts_only_itself_and_its_token():
    speculation = Speculation()
    speculation.add_round(Outcome(proposed=0, accepted=0, kept=1))
    assert (speculation.rounds, speculation.tokens) == (1, 1)
    assert (speculation.proposed, speculation.examined, speculation.accepted) == (0, 0, 0)
    assert speculation.acceptance is None
    assert speculation.yield_ is None
    assert speculation.histogram == []


def test_nothing_counts_nothing():
    speculation = Speculation()
    assert (speculation.acceptance, speculation.yield_, speculation.tokens_per_round) == (None, None, None)
    assert speculation.acceptance_by_position == []
    assert speculation.to_json()["rounds"] == 0


def test_proposals_beyond_an_end_of_text_were_never_examined():
    """Of 4 accepted proposals the second ended the text."""
    speculation = Speculation()
    speculation.add_round(Outcome(proposed=4, accepted=4, kept=2))
    assert (speculation.tokens, speculation.examined, speculation.accepted) == (2, 2, 2)
    assert speculation.histogram == [0, 0, 1, 0, 0]


def test_draft_lengths_may_differ_between_rounds():
    speculation = Speculation()
    for proposed, accepted in ((2, 2), (5, 1), (1, 0)):
        speculation.add_round(Outcome(proposed, accepted, accepted + 1))
    assert sum(speculation.histogram) == 3
    assert speculation.examined_at == [3, 2, 0, 0, 0]
    assert speculation.acceptance_by_position == [2 / 3, 1 / 2, None, None, None]


def require_consistent(speculation: Speculation, rounds_with_proposals: int | None = None) -> None:
    assert speculation.accepted <= speculation.examined <= speculation.proposed
    assert speculation.accepted == sum(count * index for index, count in enumerate(speculation.histogram))
    assert speculation.accepted == sum(speculation.accepted_at)
    assert speculation.examined == sum(speculation.examined_at)
    assert speculation.rounds <= speculation.tokens <= speculation.rounds + speculation.accepted
    if rounds_with_proposals is not None:
        assert sum(speculation.histogram) == rounds_with_proposals
    assert min(speculation.draft_ms, speculation.verify_ms, speculation.accept_ms, speculation.host_ms) >= 0


def test_the_numbers_of_all_requests_add_up_to_the_decoders(llama: Pair):
    with Decoder.open(llama.bundle) as decoder:
        outputs = [
            output
            for drafter, k in (("model", 4), ("lookup", 3), ("none", 5), ("model", 0))
            for output in decoder.generate(
                random_prompts(64, [7, 5, 1, 30], seed=1),
                SamplingParams(temperature=1.0, max_new_tokens=20, seed=2, ignore_eos=True),
                draft_length=k,
                drafter=drafter,
            )
            if len(output.token_ids) == 20 or pytest.fail("every output is as long as asked")
        ]
        total = decoder.speculation
        for name in ("rounds", "tokens", "proposed", "examined", "accepted"):
            assert sum(getattr(output.speculation, name) for output in outputs) == getattr(total, name)
        for output in outputs:
            require_consistent(output.speculation)
            with_the_prompt = output.usage.prompt_tokens > 1
            assert with_the_prompt + output.speculation.tokens == output.usage.completion_tokens
        require_consistent(total)
        for output in outputs[-8:]:
            assert output.speculation.proposed == 0
            assert output.speculation.rounds == output.speculation.tokens
            assert output.speculation.histogram == []


def test_a_lookup_that_finds_nothing_proposes_nothing(tmp_path: Path):
    with scripted_decoder(tmp_path, says(encoded("defgh"), 4)) as decoder:
        [output] = decoder.generate([encoded("abcX")], SamplingParams(), draft_length=4, drafter="lookup")
    assert output.text == "defgh"
    assert output.speculation.proposed == 0
    assert output.speculation.rounds == 5


def test_a_scripted_run_counts_exactly(tmp_path: Path):
    """K = 3, the draft wrong at every fourth token: every round accepts three but the last, which meets the end.

    The first token comes with the prompt.
    """
    text = encoded("_abcdefghijkl")
    wrong = [ord("?") if index and index % 4 == 0 else token for index, token in enumerate(text)]
    with scripted_decoder(tmp_path, says(text, 2), says(wrong, 2)) as decoder:
        [output] = decoder.generate([encoded("xy")], SamplingParams(), draft_length=3, trace=True)
    speculation = output.speculation
    assert output.text == "_abcdefghijkl"
    # Rounds: _, abc+d, efg+h, ijk+l, then the end of text, which the draft proposes rightly.
    assert (speculation.rounds, speculation.tokens) == (4, 13)
    assert (speculation.proposed, speculation.examined, speculation.accepted) == (12, 10, 10)
    assert speculation.histogram == [0, 1, 0, 3]
    assert [len(entry.proposal) for entry in output.trace] == [0, 3, 3, 3, 3]
    assert [entry.accepted for entry in output.trace] == [0, 3, 3, 3, 1]
    assert [entry.next_token for entry in output.trace] == [*encoded("_dhl"), None]
    assert output.trace[-1].proposal[0] == EOS


def test_a_trace_tells_p_and_q_of_what_was_proposed(llama: Pair):
    params = SamplingParams(temperature=1.0, max_new_tokens=20, seed=3, ignore_eos=True)
    with Decoder.open(llama.bundle) as decoder:
        [output] = decoder.generate([[5, 6, 7]], params, draft_length=3, trace=True)
        [plain] = decoder.generate([[5, 6, 7]], params, draft_length=3)
    assert output.token_ids == plain.token_ids, "being watched changes nothing"
    assert plain.trace == ()
    tokens = [
        token
        for entry in output.trace
        for token in (*entry.proposal[: entry.accepted], *([] if entry.next_token is None else [entry.next_token]))
    ]
    assert tuple(tokens) == output.token_ids
    for entry in output.trace:
        assert len(entry.p) == len(entry.q) == len(entry.proposal)
        assert all(0 <= probability <= 1 for probability in (*entry.p, *entry.q, entry.next_p))
        assert all(q > 0 for q in entry.q), "what was sampled was possible"
