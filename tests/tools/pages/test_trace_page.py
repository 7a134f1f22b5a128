"""The trace page: the output's own text, each token under the name of who wrote it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from trt_spec.runtime import Decoder, Request, SamplingParams, TracedRound, TracedSibling
from trt_spec.runtime.lengths.drafting import DraftingRules
from trt_spec.runtime.requests.metrics import Outcome
from trt_spec.runtime.requests.text import TextStream
from trt_spec.runtime.state.asked import MIXED, NONE
from trt_spec.tools.making.kept_bundles import TARGET
from trt_spec.tools.pages.trace_page import Written, trace_page, written

from ...kit.bundles import DRAFTERS_OF_A_PAIR
from ...kit.costs import known_costs
from ..conftest import assert_refused
from ..reading_pages import assert_self_contained

TOKENIZER = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
PROMPT = "<script>alert('&')</script>\r\n\n  é"
END = 0  # of text, in the demo's vocabulary


def ended_request(tokens, stop=()):
    """A request that got these tokens in rounds of one to four, of which the last is the target's own."""
    prompt = TOKENIZER.encode("def f").ids
    params = SamplingParams(max_new_tokens=len(tokens), stop=stop)
    text = TextStream(TOKENIZER, prompt, stop)
    rules = DraftingRules({}, 16, 64, None, {}, {})
    drafting = rules.check(3, "none", params)
    request = Request(prompt, params, frozenset({END}), text, drafting, rules.check, trace=True)
    while not request.finished:
        done = len(request.token_ids)
        group = tokens[done : done + 1 + done % 4]
        kept, accepted = request.commit(group, len(group) - 1, []), len(group) - 1
        early = kept <= accepted
        chances = (0.5,) * accepted
        traced = TracedRound(
            tuple(group[:-1]), min(kept, accepted), None if early else group[-1], chances, chances, 0.5
        )
        request.trace.append(traced)
        request.speculation.add_round(Outcome(accepted, accepted, kept))
    return request


CHARACTERS = TOKENIZER.encode("é漢字🙂\r\n <b>&amp;</b>\t\u202e end").ids


@given(
    st.lists(st.sampled_from([*CHARACTERS, *range(300)]), min_size=1, max_size=40), st.sampled_from([(), ("b>", " ")])
)
@settings(deadline=None)
def test_the_texts_of_the_tokens_add_up_to_the_outputs_text(tokens, stop):
    request = ended_request(tokens, stop)
    output = request.output()
    pieces = list(written(request.prompt, output, TOKENIZER))
    assert "".join(one.text for one in pieces) == output.text
    assert tuple(one.token for one in pieces) == output.token_ids


def test_a_character_of_several_tokens_belongs_to_the_last_of_them():
    tokens = TOKENIZER.encode("漢x").ids
    assert len(tokens) > 2
    pieces = list(written((), ended_request(tokens).output(), TOKENIZER))
    assert [one.text for one in pieces] == [*[""] * (len(tokens) - 2), "漢", "x"]


@pytest.fixture
def generate(run, llama):
    return lambda *arguments: run("generate", "--bundle", llama.bundle, "--max-new-tokens", 24, *arguments)


def test_a_browser_shows_prompt_and_output_as_they_are(generate, llama, tmp_path):
    out = tmp_path / "trace.html"
    result = generate("--prompt", PROMPT, "--ignore-eos", "--trace-html", out)
    with Decoder.open(llama.bundle, max_batch=1) as decoder:
        params = SamplingParams(max_new_tokens=24, ignore_eos=True)
        [output] = decoder.generate(PROMPT, params, trace=True)
    assert result.out == output.text + "\n"
    page = assert_self_contained(out.read_bytes().decode())
    assert page.find("div", "text") == [PROMPT + output.text]
    from_draft = sum(traced.accepted for traced in output.trace)
    accepted, own = (
        [e for e in page.elements if e[1].get("tabindex") and e[1]["class"] == w] for w in ("draft", "target")
    )
    assert (len(accepted), len(own)) == (from_draft, 24 - from_draft)
    assert f"{from_draft} proposed by the draft, accepted" in page.find("span", "draft")
    assert [path.name for path in tmp_path.iterdir()] == ["trace.html"]


def test_a_token_says_its_round_p_and_q_and_what_it_replaced(llama):
    with Decoder.open(llama.bundle, max_batch=1) as decoder:
        request = decoder.submit("ab", SamplingParams(max_new_tokens=2), draft_length=3, trace=True)
        a, b, c = (decoder.tokenizer.encode(text).ids[0] for text in "abc")
        request.trace.append(TracedRound((a, b, c), 1, c, (0.5, 0.25, 0.1), (0.75, 1.0, 0.2), 0.625))
        request.commit([a, c], 1, [])
        page = assert_self_contained(trace_page("ab", request, decoder))
    tips = [attributes["data-tip"] for _, attributes, _ in page.elements if "data-tip" in attributes]
    assert tips == [
        f"'a', token {a}, in round 1: proposal 1 of 3, accepted\np = 0.5000 by the target, q = 0.7500 by the draft",
        f"'c', token {c}, in round 1: the target's own\np = 0.6250 by the target\n"
        "in place of 'b', proposal 2, rejected: p = 0.2500 by the target, q = 1.0000 by the draft",
    ]
    assert [at["data-rejected"] for _, at, _ in page.elements if "data-rejected" in at] == ["'b'"]


def test_a_token_may_come_from_another_line_beyond_the_end_of_the_first(llama):
    with Decoder.open(llama.bundle, max_batch=1) as decoder:
        request = decoder.submit("ab", SamplingParams(max_new_tokens=3), draft_length=3, trace=True)
        a, b, c = (decoder.tokenizer.encode(text).ids[0] for text in "abc")
        beyond = TracedSibling(1, b, 0.5, 1.0, True)
        request.trace.append(TracedRound((a,), 2, c, (0.5,), (0.75,), 0.625, siblings=(beyond,)))
        request.commit([a, b, c], 2, [])
        page = trace_page("ab", request, decoder)
    assert page.count("level 2 of a branch beside the line, accepted") == 1
    assert "data-rejected" not in page.split("<body>")[-1].split("</label>")[-1]


def test_a_request_that_fails_leaves_no_page(generate, tmp_path):
    assert_refused(generate("--prompt", "", "--trace-html", tmp_path / "out.html"), "the prompt is empty")
    assert not list(tmp_path.iterdir())
    message = f"output {tmp_path / 'no' / 'out.html'} cannot be written"
    assert_refused(generate("--prompt", "a", "--trace-html", tmp_path / "no" / "out.html"), message)


DRAFTERS_SHOWN = {
    "model": ("draft checkpoint", 4),
    "lookup": ("proposals by lookup", 4),
    "suffix": ("proposals by suffix", 4),
    "ngram": ("proposals by ngram", 4),
    "random": ("proposals by random", 4),
    "cascade": ("lookup and draft checkpoint in cascade", 4),
    "none": ("no draft", 4),
    "mixed": ("proposals by mixed", "auto"),
}


@pytest.mark.parametrize("drafter", [*DRAFTERS_OF_A_PAIR, NONE, MIXED])
def test_the_page_of_every_drafter_says_where_proposals_came_from(generate, llama, tmp_path, drafter):
    source, length = DRAFTERS_SHOWN[drafter]
    out = tmp_path / "trace.html"
    with known_costs():
        asked = ("--drafter", drafter, "--draft-length", length, "--seed", 3, "--trace-html", out)
        assert generate("--prompt", "def f(", *asked).code == 0
    page = assert_self_contained(out.read_text())
    [about] = page.find("p", "muted")
    assert about.startswith(f"checkpoint with {source}, K = {length}, seed 3: ")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--draft-length", 0), "K = 0"),
        (("--draft-length", "auto"), "K = auto"),
        (("--controller", "entropy", "--longest", 6), "K from 1 to 6 by the draft's entropy"),
    ],
)
def test_the_page_says_how_the_draft_length_was_chosen(generate, tmp_path, flags, said):
    with known_costs():
        assert generate("--prompt", "def f(", *flags, "--trace-html", tmp_path / "trace.html").code == 0
    [about] = assert_self_contained((tmp_path / "trace.html").read_text()).find("p", "muted")
    assert f", {said}, seed " in about


def test_behind_a_sibling_nothing_was_rejected():
    """What followed the token that it replaced was proposed after another text."""
    siblings = (TracedSibling(0, 8, 0.25, 0.125, True),)
    chances = (0.5, 0.5)
    traced = TracedRound((5, 6), 1, 7, chances, chances, 0.5, siblings=siblings)
    sibling, own = Written("a", 8, 1, traced, 0), Written("b", 7, 1, traced, 1)
    assert (sibling.from_draft, sibling.sibling, sibling.rejected) == (True, siblings[0], 5)
    assert (own.from_draft, own.sibling, own.rejected) == (False, None, None)


def test_a_branch_behind_a_sibling_replaces_nothing():
    siblings = (TracedSibling(0, 8, 0.25, 0.125, True), TracedSibling(1, 9, 0.5, 0.75, True, after=0))
    traced = TracedRound((5, 6), 2, 7, (0.5, 0.5), (0.5, 0.5), 0.5, siblings=siblings)
    branch = Written("b", 9, 1, traced, 1)
    assert (branch.from_draft, branch.sibling, branch.rejected) == (True, siblings[1], None)
