"""One request, one text: greedy and coupled outputs equal those of plain decoding, whatever proposes how much, whoever
is in the batch, and in every engine that is here. The arbiter rules on each difference."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle

from ...engines import ENGINES, EngineError
from ...runtime import Decoder, Output, SamplingParams
from ...runtime.lengths.drafting import DraftLength
from .arbiter import Arbiter, Difference, log_probabilities_agree
from .probe import Probe
from .subject import Finding, Progress, Subject, controllers, draft_lengths, spelled

NEW_TOKENS = 40
TOGETHER = 4  # rows that a request shares its rounds with, of which some leave and others join
RULES = (
    SamplingParams(),
    SamplingParams(temperature=1.0, rule="coupled"),
    SamplingParams(temperature=0.8, top_p=0.95, top_k=50, repetition_penalty=1.1, rule="coupled"),
)


@dataclass(frozen=True)
class Asked:
    """A request and what plain decoding answers: K = 0, one token wide, alone."""

    prompt: tuple[int, ...]
    params: SamplingParams
    expected: Output


@dataclass
class Tally:
    """Outputs compared with what was expected."""

    outputs: int = 0
    tokens: int = 0
    near_ties: list[Difference] = field(default_factory=list)
    bugs: list[str] = field(default_factory=list)

    def add_tokens(
        self, one: Asked, tokens: Sequence[int], judge: Arbiter, by: str, width: int = 1, batch: int = 1
    ) -> bool:
        """True where they are those expected."""
        self.outputs += 1
        self.tokens += len(tokens)
        difference = judge.judge(one.prompt, one.params, tokens, one.expected.token_ids, width, batch)
        if difference is not None and difference.near_tie:
            self.near_ties.append(difference)
        elif difference is not None:
            self.bugs.append(f"{by}: {difference}")
        return difference is None

    def add_output(self, one: Asked, found: Output, judge: Arbiter, by: str, width: int, batch: int) -> None:
        """Text, finish reason, usage and log-probabilities, too; nothing that follows a near tie."""
        if not self.add_tokens(one, found.token_ids, judge, by, width, batch):
            return
        for name in ("text", "finish_reason", "usage"):
            if getattr(found, name) != getattr(one.expected, name):
                self.bugs.append(f"{by}: {name} {getattr(found, name)!r} for {getattr(one.expected, name)!r}")
        if not log_probabilities_agree(found.logprobs, one.expected.logprobs, judge.rounding):
            self.bugs.append(f"{by}: log-probabilities differ by more than {judge.rounding:g}")

    def finding(self, check: str, case: str) -> Finding:
        ties = ""
        if self.near_ties:
            widest = max(self.near_ties, key=lambda tie: tie.gap)
            ties = f", {len(self.near_ties)} near ties, the widest a {widest}"
        bugs = f", {len(self.bugs)} bugs: {self.bugs[0]}" if self.bugs else ""
        numbers = {
            "outputs": self.outputs,
            "tokens": self.tokens,
            "near_ties": [str(tie) for tie in self.near_ties],
            "bugs": self.bugs,
        }
        detail = f"{self.outputs} outputs, {self.tokens:,} tokens{ties}{bugs}"
        return Finding(check, case, not self.bugs, detail, numbers)


def ask_alone(subject: Subject, requests: Sequence[tuple[tuple[int, ...], SamplingParams]]) -> list[Asked]:
    prompts, params = zip(*requests, strict=True)
    with subject.open(max_batch=1) as decoder:
        outputs = decoder.generate(prompts, params, draft_length=0)
    return [Asked(*each) for each in zip(prompts, params, outputs, strict=True)]


def compare(
    decoder: Decoder, asked: Sequence[Asked], drafters: Sequence[str], lengths: Sequence[DraftLength], judge: Arbiter
) -> Tally:
    """Ask all again together, each with the next drafter and draft length of the lists."""
    choices = list(zip(asked, cycle(drafters), cycle(lengths), strict=False))
    requests = [decoder.submit(one.prompt, one.params, drafter=d, draft_length=k) for one, d, k in choices]
    while decoder.step():
        pass
    tally = Tally()
    for (one, drafter, k), request in zip(choices, requests, strict=True):
        width = k + 1 if isinstance(k, int) else decoder.longest_draft + 1
        tally.add_output(one, request.output(), judge, f"{drafter}, {spelled(k)}", width, decoder.max_batch)
    return tally


def check(subject: Subject, progress: Progress) -> Iterator[Finding]:
    progress("same text: plain decoding")
    asked = ask_alone(
        subject,
        [
            (prompt, replace(params, seed=seed, max_new_tokens=subject.room(NEW_TOKENS - 7 * (seed % 3))))
            for params in RULES
            for seed, prompt in enumerate(subject.prompts())
        ],
    )
    probe = Probe(subject)
    judge = Arbiter(probe, subject.rounding)
    try:
        for batch in sorted({1, min(TOGETHER, subject.batch)}):
            with subject.open(batch) as decoder:
                drafters, lengths = decoder.drafters, draft_lengths(decoder)
                for drafter in drafters:
                    # Alone, the lengths take turns from request to request; together, each has its own run.
                    runs = [lengths] if batch == 1 else [[k] for k in lengths]
                    for each in runs:
                        case = f"{drafter}, K {','.join(map(str, each))}, batch {batch}"
                        progress(f"same text: {case}")
                        yield compare(decoder, asked, [drafter], each, judge).finding("same text", case)
                for drafter, rule in controllers(decoder):
                    case = f"{drafter}, {spelled(rule)}, batch {batch}"
                    progress(f"same text: {case}")
                    yield compare(decoder, asked, [drafter], [rule], judge).finding("same text", case)
        with subject.open() as decoder:
            case = f"drafters and K mixed, batch {subject.batch}"
            progress(f"same text: {case}")
            yield compare(decoder, asked, drafters, lengths, judge).finding("same text", case)
        for engine in ENGINES:
            if engine not in (subject.engine, "torch-compiled"):  # which compiles for minutes: ask for it by name
                progress(f"same text: in {engine}")
                yield in_another_engine(subject.in_engine(engine), asked, probe)
    finally:
        probe.close()


def in_another_engine(other: Subject, asked: Sequence[Asked], probe: Probe) -> Finding:
    """Its difference from the subject's engine is measured by running the context in both."""
    case = f"in {other.engine}"
    try:
        own = Probe(other)
        decoder = other.open(min(TOGETHER, other.batch))
    except EngineError as error:
        return Finding("same text", case, None, f"not here: {error}")
    try:
        with decoder:
            judge = Arbiter(probe, other.rounding, [own.logits])
            tally = compare(decoder, asked, decoder.drafters, draft_lengths(decoder), judge)
            return tally.finding("same text", case)
    finally:
        own.close()
