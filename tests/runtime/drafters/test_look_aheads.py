"""PaSS: what the target says after look-aheads in one round is what the next proposes by, and nothing else changes.

The oracle is the target in torch over the tokens up to the last round's root and the look-aheads after them.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers import AutoModelForCausalLM
from trt_spec.engines import Bundle, RequestError
from trt_spec.engines.onnxruntime import OnnxRuntimeEngine
from trt_spec.export.kinds import open_look_aheads
from trt_spec.runtime import Decoder, EntropyRule, SamplingParams
from trt_spec.runtime.acceptance.seat import make_rows
from trt_spec.runtime.drafters import Resources, look_aheads, open_drafters
from trt_spec.runtime.drafters.drafter import Sampler
from trt_spec.runtime.drafters.look_aheads import COUNT, SAID, Pass
from trt_spec.runtime.memory.model import Model
from trt_spec.runtime.round.result import tabulate
from trt_spec.runtime.round.round import run_round
from trt_spec.runtime.state.clock import Clock
from trt_spec.runtime.state.frame import Frame
from trt_spec.runtime.state.indexing import at_nodes
from trt_spec.runtime.state.look_aheads import LookAheads
from trt_spec.runtime.state.plan import Level, Plan

from ...kit import heads
from ...kit.bundles import export_pair
from ...kit.caches import memory_for
from ...kit.costs import LENGTHS, known_costs, table
from ...kit.distributions import CLOSE, ENOUGH, FAR, LINES, VOCAB, compared, kept_bytes, room, worst_distribution
from ...kit.hybrids import SHARED, every_hybrid, expected_texts, greedy_texts, some_prompts, tiny_hybrid
from ...kit.models import tiny_llama
from ..round.kinds import IdleEngine

COUNTED, PADDED = 4, 72  # look-aheads, and tokens of the target's graph
PROMPTS = [[3], [5, 9], [7, 1, 30, 2], [11] * 40]
SAMPLED = SamplingParams(temperature=1.0, max_new_tokens=30, seed=4, ignore_eos=True)
PLAIN = (
    SamplingParams(max_new_tokens=30),
    SamplingParams(temperature=1.0, max_new_tokens=30, seed=4, rule="coupled"),
    SamplingParams(temperature=0.8, max_new_tokens=30, seed=4, rule="coupled", repetition_penalty=1.3, top_k=20),
)


class Subject:
    """A target with look-aheads, in a bundle and in torch."""

    name = "pass"

    def __init__(self, folder: Path, rank: int = 0, target: Path | None = None) -> None:
        target = target or tiny_llama(folder / "target", padded_vocab=PADDED, initializer_range=0.2)
        head = heads.look_aheads(folder / "head", target, COUNTED, rank=rank)
        self.bundle = export_pair(target, folder / "bundle", head).bundle
        self.target: Any = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
        opened = open_look_aheads(head)
        assert opened is not None
        opened.join(self.target, PADDED)

    def features(self, tokens: list[int]) -> torch.Tensor:
        return torch.zeros(0)

    def distributions(
        self, tokens: list[int], features: torch.Tensor, paths: list[list[int]], committed: int
    ) -> list[torch.Tensor]:
        """Return its distribution for each place after the last round's root, whatever was proposed before it."""
        ids = list(range(PADDED, PADDED + COUNTED))
        said = self.target(torch.tensor([[*tokens[: len(tokens) - committed], *ids]])).logits[0, :, :VOCAB].softmax(-1)
        return [said[len(tokens) + len(path) - 1] for path in paths]


@pytest.fixture(scope="module")
def ahead(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return Subject(tmp_path_factory.mktemp("ahead"))


@pytest.mark.parametrize("memory", ["prefixes", "short"])
def test_each_proposal_is_drawn_from_what_the_target_said_behind_the_look_aheads_of_the_round_before(
    ahead: Subject, memory: str
) -> None:
    """In lines and combs, beside copies, after rounds without it, after a prefix was found and places were given up."""
    options: dict[str, Any] = {
        "prefixes": {"prefix_bytes": kept_bytes(ahead, 512)},
        "short": {"cache_bytes": kept_bytes(ahead, 320), "prefix_bytes": kept_bytes(ahead, 128)},
    }[memory]
    worst, drawn = compared(ahead, LINES, **options)
    assert drawn > ENOUGH
    assert worst < CLOSE


@every_hybrid("lfm2")
def test_a_target_with_recurrent_layers_looks_ahead_like_any(tmp_path: Path, kind: str) -> None:
    """What it makes of look-aheads is never absorbed."""
    rank = 2 if kind == "qwen3_5_text" else 0
    ahead = Subject(tmp_path, rank, tiny_hybrid(kind, tmp_path / "target", vocab_size=PADDED))
    kept = {"prefix_bytes": room(ahead, 3000)}
    worst, drawn = compared(ahead, LINES, SHARED, **kept)
    assert drawn > ENOUGH
    assert worst < CLOSE
    choices = [(drafter.replace("head", "pass"), length) for drafter, length in [*LINES, ("pass", 9)]]
    assert greedy_texts(ahead.bundle, some_prompts(), choices, **kept) == expected_texts(ahead.target)


@pytest.fixture(scope="module")
def with_lora(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return Subject(tmp_path_factory.mktemp("lora"), rank=2)


@pytest.mark.parametrize("which", ["ahead", "with_lora"])
def test_the_torch_engine_runs_it(request: pytest.FixtureRequest, which: str) -> None:
    ahead: Subject = request.getfixturevalue(which)
    with Decoder.open(ahead.bundle, engine="torch") as decoder:
        [output] = decoder.generate([[7, 1, 30]], SAMPLED, draft_length=3, drafter="pass", trace=True)
    worst, drawn = worst_distribution(ahead, [7, 1, 30], output)
    assert drawn
    assert worst < CLOSE


def test_a_lora_where_look_aheads_are_read_changes_their_distributions_and_no_text(
    ahead: Subject, with_lora: Subject
) -> None:
    worst, drawn = compared(with_lora, LINES)
    assert drawn > ENOUGH
    assert worst < CLOSE
    texts = []
    for one in (ahead, with_lora):
        with Decoder.open(one.bundle, max_batch=4) as decoder:
            texts.append([decoder.generate(PROMPTS, params, draft_length=4, drafter="pass") for params in PLAIN])
    said, proposed = (
        [[read(output) for outputs in each for output in outputs] for each in texts]
        for read in (lambda output: output.token_ids, lambda output: output.speculation.accepted)
    )
    assert said[0] == said[1]
    assert proposed[0] != proposed[1]


def test_greedy_and_coupled_texts_are_those_without_a_draft(ahead: Subject) -> None:
    asked = [("pass", length) for length in (1, 2, 4, 9, "3+3")]
    asked += [("pass+suffix", 1), ("pass+suffix", 9), ("lookup+pass", 2), ("lookup+pass", 4)]
    with Decoder.open(ahead.bundle, max_batch=4) as decoder:
        for params in PLAIN:
            alone = decoder.generate(PROMPTS, params, draft_length=0)
            for drafter, length in asked:
                found = decoder.generate(PROMPTS, params, draft_length=length, drafter=drafter)
                assert [one.token_ids for one in found] == [one.token_ids for one in alone], (drafter, length)
                assert sum(one.speculation.proposed for one in found) > 30


def test_a_round_proposes_as_many_as_the_places_that_are_left(ahead: Subject) -> None:
    """One look-ahead more than proposals is read, of which each that stands uses one up; the first round has none."""
    with Decoder.open(ahead.bundle) as decoder:
        for length in (1, 2, 4, 9):
            [output] = decoder.generate([[7, 1, 30]], SAMPLED, draft_length=length, drafter="pass", trace=True)
            rounds, read = list(output.trace or ())[1:], min(length + 1, COUNTED)  # the first reads the prompt
            assert not rounds[0].proposal
            for before, one in pairwise(rounds[:-length]):
                assert len(one.proposal) == min(length, COUNTED, read - before.accepted)


def test_a_text_that_depends_on_its_draft_depends_on_no_neighbour(ahead: Subject) -> None:
    """Not on longer lines or combs beside its own, nor on its row, nor on the memory, for want of which it waits."""
    with Decoder.open(ahead.bundle) as decoder:
        alone = [decoder.generate([prompt], SAMPLED, draft_length=2, drafter="pass")[0] for prompt in PROMPTS]
    neighbours = [("pass", 4), ("suffix", 12), ("random", "3+5"), ("none", 0)]
    for memory in (nullcontext(), memory_for(600)):
        with memory, Decoder.open(ahead.bundle, max_batch=5) as decoder, noting_losses() as lost:
            others = [
                decoder.submit([40 + place], SamplingParams(max_new_tokens=12 + 9 * place), draft_length=k, drafter=one)
                for place, (one, k) in enumerate(neighbours)
            ]
            asked = [decoder.submit(prompt, SAMPLED, draft_length=2, drafter="pass") for prompt in PROMPTS]
            while decoder.step():
                pass
        assert all(one.finished for one in others)
        assert [tuple(one.token_ids) for one in asked] == [one.token_ids for one in alone]
        assert bool(set(lost) & set(asked)) == (not isinstance(memory, nullcontext)), "some have given up their places"


@contextmanager
def noting_losses() -> Iterator[list[Any]]:
    """The requests that give up a place."""
    lost, gave_up = list[Any](), Pass.gave_up

    def noted(self: Pass, request: Any, *where: Any) -> None:
        lost.append(request)
        gave_up(self, request, *where)

    with patch.object(Pass, "gave_up", noted):
        yield lost


def test_what_a_row_knew_is_not_what_its_next_request_knows(ahead: Subject) -> None:
    with Decoder.open(ahead.bundle, max_batch=1) as decoder:
        first = decoder.generate([[7, 1, 30]], SAMPLED, draft_length=4, drafter="pass")
        decoder.generate([[7, 1, 31]], SAMPLED, draft_length=4, drafter="pass")
        again = decoder.generate([[7, 1, 30]], SAMPLED, draft_length=4, drafter="pass")
    assert first[0].token_ids == again[0].token_ids
    assert first[0].speculation.proposed == again[0].speculation.proposed


def of_the_place_before(self: Pass, rows: Any, frame: Any) -> None:
    """The places that are taken stay among those to come."""
    keep(self, rows, frame)
    count = frame.said_ahead.shape[1]
    rows.columns[SAID][:, :count].copy_(frame.said_ahead)


def of_the_root_that_was(self: Pass, rows: Any, frame: Any) -> None:
    """What an earlier round has said is kept."""
    before = rows.columns[SAID].clone()
    keep(self, rows, frame)
    rows.columns[SAID].copy_(before)


def of_another_row(tensor: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return at_nodes(tensor.roll(1, 0), index)


keep, filled = Pass.keep, LookAheads.fill


@pytest.mark.parametrize(
    "swap",
    [
        (Pass, "keep", of_the_place_before),
        (Pass, "keep", of_the_root_that_was),
        (look_aheads, "at_nodes", of_another_row),
    ],
)
def test_a_distribution_of_another_place_or_round_or_row_would_show_and_changes_no_text(
    ahead: Subject, swap: tuple[Any, str, Any]
) -> None:
    with patch.object(*swap):
        assert compared(ahead, LINES, far=FAR)[0] > FAR
        with Decoder.open(ahead.bundle, max_batch=4) as decoder:
            for params in PLAIN:
                alone = decoder.generate(PROMPTS, params, draft_length=0)
                found = decoder.generate(PROMPTS, params, draft_length=4, drafter="pass")
                assert [one.token_ids for one in found] == [one.token_ids for one in alone]


def seen_by_all(self: LookAheads) -> None:
    """Proposals see the look-aheads."""
    filled(self)
    self.ancestors[:, :, self._tokens.shape[1] :] = True


def test_proposals_that_see_look_aheads_would_show(ahead: Subject) -> None:
    with patch.object(LookAheads, "fill", seen_by_all), Decoder.open(ahead.bundle, max_batch=4) as decoder:
        alone = decoder.generate(PROMPTS, PLAIN[0], draft_length=0)
        found = decoder.generate(PROMPTS, PLAIN[0], draft_length=4, drafter="pass")
    assert [one.token_ids for one in found] != [one.token_ids for one in alone]


def after_a_round_without_it(ahead: Subject) -> tuple[list[int], float]:
    """How many a request proposes in each round (the second is plain), and how far from the oracle's."""
    with Decoder.open(ahead.bundle) as decoder:
        request = decoder.submit([7], SAMPLED, draft_length=3, drafter="pass", trace=True)
        for drafter, length in (("none", 0), ("pass", 3)):
            decoder.step()
            request.draft(length, drafter)
        while decoder.step():
            pass
        output = request.output()
    worst, _ = worst_distribution(ahead, [7], output)
    return [len(one.proposal) for one in output.trace or ()], worst


def test_a_place_that_is_not_known_any_more_is_not_proposed_for(ahead: Subject) -> None:
    proposed, worst = after_a_round_without_it(ahead)
    assert proposed[:3] == [0, 0, 0]
    assert proposed[3] == 3
    assert worst < CLOSE

    def whatever_the_length(self: Pass, line: int, rows: Any) -> torch.Tensor:
        return torch.minimum(Sampler.asked(self, line, rows), rows.columns[COUNT])

    with patch.object(Pass, "asked", whatever_the_length):
        proposed, worst = after_a_round_without_it(ahead)
    assert proposed[2] == 3
    assert worst > FAR


@pytest.mark.parametrize("beside", [0, 2])
def test_its_rounds_stay_on_the_device(ahead: Subject, monkeypatch: pytest.MonkeyPatch, beside: int) -> None:
    """What asks for a number of one on the meta device fails; so a round with look-aheads can be recorded."""
    monkeypatch.setattr(IdleEngine, "verify_width", 65)
    bundle = Bundle.open(ahead.bundle)
    target = Model(IdleEngine(bundle.target.contract, "meta"), VOCAB, 4, bundle.capacity)
    drafters, _ = open_drafters(Resources(bundle, target, {}, 4))
    plan = Plan(
        2,
        draft_length=3,
        lines=((drafters["pass"], drafters["lookup"]),),
        branches=beside,
        leaves=Level(beside, 3) if beside else Level(),
        look_aheads=COUNTED,
        rejection=True,
        coupled=True,
        gumbel=True,
        ragged=True,
    )
    rows = make_rows(4, bundle.capacity, VOCAB, len(drafters), "meta")
    rows.columns.update(drafters["pass"].columns(4))
    with torch.inference_mode():
        frame = Frame(plan, target)
        done = run_round(rows.view(2), plan, frame, bundle.capacity, Clock(rows.length.device))
        assert tabulate(done, plan).device.type == "meta"
    assert frame.verify.input_ids.shape == (2, 4 + beside + COUNTED)


def test_it_ends_a_line_by_entropy_as_any_drafter(ahead: Subject) -> None:
    rule = EntropyRule(shortest=1, longest=4, stop_above=0.9)
    with Decoder.open(ahead.bundle) as decoder:
        [output] = decoder.generate([[7, 1, 30]], SAMPLED, draft_length=rule, drafter="pass", trace=True)
    assert worst_distribution(ahead, [7, 1, 30], output)[0] < CLOSE
    assert output.speculation.proposed


def test_it_grows_no_trees_searches_no_beams_and_needs_look_aheads(ahead: Subject, llama: Any) -> None:
    with Decoder.open(ahead.bundle) as decoder:
        assert "pass" in decoder.drafters
        assert "pass" not in decoder.growing
        assert decoder.largest_comb == 64 - COUNTED, "look-aheads have their places in a step"
        with pytest.raises(RequestError, match="pass can grow no tree, since it may know fewer places than that has"):
            decoder.submit([3, 4], drafter="pass", draft_length="4/8")
        with pytest.raises(RequestError, match="drafter model or none, not pass"):
            decoder.submit([3, 4], SamplingParams(num_beams=2), drafter="pass")
    with Decoder.open(llama.bundle) as decoder, pytest.raises(RequestError, match="has no look-aheads of PaSS; export"):
        decoder.submit([3, 4], drafter="pass")


@pytest.mark.parametrize(("name", "value"), [("verify_width", 20), ("takes_trees", False)])
def test_an_engine_whose_steps_are_too_narrow_or_cannot_branch_refuses_it(
    ahead: Subject, monkeypatch: pytest.MonkeyPatch, name: str, value: object
) -> None:
    monkeypatch.setattr(OnnxRuntimeEngine, name, value)
    with Decoder.open(ahead.bundle) as decoder:
        with pytest.raises(RequestError, match="pass needs steps whose tokens branch, as wide as a long line"):
            decoder.submit([3, 4], drafter="pass")
        assert decoder.generate([[3, 4]], SAMPLED, drafter="lookup")
        assert decoder.submit([3, 4]).drafter == "lookup", "who names none gets one that runs here"


def test_openvino_refuses_it_by_name(ahead: Subject) -> None:
    pytest.importorskip("openvino")
    with Decoder.open(ahead.bundle, engine="openvino") as decoder:
        with pytest.raises(RequestError, match="pass needs steps whose tokens branch"):
            decoder.submit([3, 4], drafter="pass")
        assert decoder.generate([[3, 4]], SAMPLED, drafter="lookup")


def test_auto_chooses_its_length_and_mixed_leaves_it_out(ahead: Subject) -> None:
    params = SamplingParams(max_new_tokens=40, ignore_eos=True)
    steps = {"pass": 0.01, "lookup": 2.0, "suffix": 2.0}  # copies never pay
    costs = table(acceptance=0.9, **{name: [[1.0 + step * k for k in LENGTHS]] * 2 for name, step in steps.items()})
    for drafter, able in (("pass", {"pass"}), ("mixed", set[str]())):
        with known_costs(costs), Decoder.open(ahead.bundle, max_batch=2) as decoder:
            requests = [decoder.submit(prompt, params, drafter=drafter) for prompt in PROMPTS[:2]]
            chosen = set()
            while decoder.step():
                chosen |= {row.chooser.wanted.drafter for row in decoder.live if row.chooser.wanted.length}
            alone = decoder.generate(PROMPTS[:2], params, draft_length=0)
        assert [tuple(request.token_ids) for request in requests] == [one.token_ids for one in alone]
        assert chosen == able


def test_it_is_what_requests_draft_with_where_a_bundle_has_nothing_else(ahead: Subject) -> None:
    with Decoder.open(ahead.bundle) as decoder:
        assert decoder.submit([3, 4]).drafting.drafter == "pass"


def test_the_bundle_says_how_many_there_are(ahead: Subject) -> None:
    bundle = Bundle.open(ahead.bundle)
    assert bundle.target.look_aheads == COUNTED
    assert bundle.heads == ()
    assert bundle.target.contract.vocab_size == PADDED, "they are read, and never said"
