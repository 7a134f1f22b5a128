"""One request, one text: greedy and coupled outputs equal those of plain decoding, whatever proposes how much, whoever
is in the batch, and in every engine that is here. The arbiter rules on each difference.

Alone, each drafter meets each prompt, rule and draft length; together, so does each drafter with each draft length.
All prompts with all rules take part, but not with all drafters and lengths. A comb is a draft length, several lines are
a drafter; where all are mixed, a request that can have only a line takes the first, beside the trees of others.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, cycle, islice

from ...engines import BLOCK_TOKENS, ENGINES, EngineError, engines_of
from ...runtime import Decoder, Output, SamplingParams
from ...runtime.memory.snapshots import EVERY
from ...runtime.scheduling.prefill import NARROWEST
from ...runtime.state.asked import BESIDE
from ...runtime.state.shapes import Shape
from .arbiter import Arbiter, Difference, log_probabilities_agree
from .effort import Effort
from .lanes import side_by_side
from .probe import Probe, Probes
from .subject import (
    Choice,
    Finding,
    Progress,
    Subject,
    controllers,
    is_tree,
    kinds,
    several,
    shapes,
    spelled,
    takes_trees,
    width,
)

MANY_CASES = 4  # times the work of one case with all prompts and rules
PREFIX_BYTES = 2**28
TOGETHER = 4  # rows that a request shares its rounds with, of which some leave and others join
RULES = (
    SamplingParams(),
    SamplingParams(temperature=1.0, rule="coupled"),
    SamplingParams(temperature=0.8, top_p=0.95, top_k=50, repetition_penalty=1.1, rule="coupled"),
)


@dataclass(frozen=True)
class PlainAnswer:
    """A request and what plain decoding answers: K = 0, one token wide."""

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
        self, one: PlainAnswer, tokens: Sequence[int], judge: Arbiter, by: str, width: int = 1, batch: int = 1
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

    def add_output(self, one: PlainAnswer, found: Output, judge: Arbiter, by: str, width: int, batch: int) -> None:
        """Text, finish reason, usage and log-probabilities, too; nothing that follows a near tie."""
        if not self.add_tokens(one, found.token_ids, judge, by, width, batch):
            return
        found = replace(found, usage=replace(found.usage, cached_tokens=0))  # which saves work and changes nothing
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


def ask_plain(
    subject: Subject, requests: Sequence[tuple[tuple[int, ...], SamplingParams]], batch: int = 1
) -> list[PlainAnswer]:
    prompts, params = zip(*requests, strict=True)
    with subject.open(batch) as decoder:
        outputs = decoder.generate(prompts, params, draft_length=0)
    return [PlainAnswer(*each) for each in zip(prompts, params, outputs, strict=True)]


def compare(decoder: Decoder, asked: Sequence[PlainAnswer], choices: Sequence[Choice], judge: Arbiter) -> Tally:
    """Ask all again together, each with its drafter and draft length."""
    own = [as_asked(choice, one.params) for one, choice in zip(asked, choices, strict=True)]
    requests = [
        decoder.submit(one.prompt, one.params, drafter=drafter, draft_length=k)
        for one, (drafter, k) in zip(asked, own, strict=True)
    ]
    while decoder.step():
        pass
    tally = Tally()
    for one, (drafter, k), request in zip(asked, own, requests, strict=True):
        widest = width(drafter, k, decoder.longest_draft + 1 + request.drafting.beyond)
        tally.add_output(one, request.output(), judge, f"{drafter}, {spelled(k)}", widest, decoder.max_batch)
    return tally


def as_asked(choice: Choice, params: SamplingParams) -> Choice:
    """The choice, or its first line where a request can have no more."""
    drafter, k = choice
    if takes_trees(params):
        return choice
    return drafter.split(BESIDE)[0], k.length if isinstance(k, Shape) else k


def check(subject: Subject, probes: Probes, effort: Effort, progress: Progress) -> Iterator[Finding]:
    own, slow = engines_of(subject.engine)[0], "torch-compiled"  # which compiles for minutes
    others = [name for name, kind in ENGINES.items() if name not in (own, slow) and not kind.computes_in]
    if ENGINES[own].computes_in:
        others = []  # it is another model than theirs
    batches = sorted({1, min(TOGETHER, subject.batch)})
    parts = [f"batch {batch}" for batch in batches] + ["mixed", "prefixes"] + (others if effort.engines else [])
    *begins, total = accumulate((MANY_CASES if part.startswith("batch") else 1 for part in parts), initial=0)

    def report(case: str, part: str, done: float = 0.0) -> None:
        progress(f"same text: {case}", begins[parts.index(part)] + MANY_CASES * done, total)

    def run(part: str, count: int, decoder: Decoder, numbered: tuple[int, tuple[str, list[Choice]]]) -> Finding:
        number, (case, choices) = numbered
        report(f"{case}, {part}", part, number / count)
        some, chosen = in_turn(asked, choices, number, decoder.max_batch)
        return compare(decoder, some, chosen, judge).finding("same text", f"{case}, {part}")

    report("plain decoding", parts[0])
    asked = ask_all(subject, effort)
    judge = Arbiter(probes["target"], subject.rounding)
    for batch, part in zip(batches, parts, strict=False):
        with subject.open(batch) as decoder:
            cases = list_cases(decoder, apart=batch > 1 and effort.each_length)
        yield from side_by_side(
            subject, partial(subject.open, batch), partial(run, part, len(cases)), [*enumerate(cases)]
        )
    with subject.open() as decoder:
        case = f"drafters and K mixed, batch {subject.batch}"
        report(case, "mixed")
        yield compare(decoder, asked, mixed(decoder, len(asked)), judge).finding("same text", case)
    report("prefixes kept", "prefixes")
    yield with_prefixes(subject, each_prompt(asked, 0), judge)
    for engine in others if effort.engines else ():
        report(f"in {engine}", engine)
        yield in_another_engine(subject.in_engine(engine), each_prompt(asked, 0), probes["target"])


def ask_all(subject: Subject, effort: Effort) -> list[PlainAnswer]:
    """Each prompt with each rule, alone."""
    prompts = subject.prompts(effort.prompts)
    return ask_plain(
        subject,
        [
            (prompt, replace(params, seed=seed, max_new_tokens=subject.room(effort.new_tokens - 7 * (seed % 3))))
            for params in RULES
            for seed, prompt in enumerate(prompts)
        ],
    )


def each_prompt(asked: Sequence[PlainAnswer], number: int, rules: int = len(RULES)) -> list[PlainAnswer]:
    """Each prompt once, the rules in turn, from another on for each number."""
    prompts = len(asked) // rules
    return [asked[(prompt + number) % rules * prompts + prompt] for prompt in range(prompts)]


def in_turn(
    asked: Sequence[PlainAnswer], choices: Sequence[Choice], number: int, batch: int
) -> tuple[list[PlainAnswer], list[Choice]]:
    """Each prompt once, and what it takes; of trees only requests that can have them."""
    if any(is_tree(*choice) for choice in choices):
        able = [one for one in asked if takes_trees(one.params)]
        some = each_prompt(able, number, sum(map(takes_trees, RULES)))
    else:
        some = each_prompt(asked, number)
    # Shifted, so that a drafter whose few requests miss a length alone meets it together.
    return some, [choices[(2 * (number + batch) + i) % len(choices)] for i in range(len(some))]


def list_cases(decoder: Decoder, apart: bool) -> list[tuple[str, list[Choice]]]:
    """Return what the requests of a case take in turn; the draft lengths `apart`, each in its own case, or together."""
    fixed: list[tuple[str, list[Choice]]] = [
        (f"{drafter}, K {','.join(map(str, each))}", [(drafter, k) for k in each])
        for drafter in decoder.drafters
        for kind in kinds(decoder, drafter)
        for each in ([[k] for k in kind] if apart else [kind] if kind else [])
    ]
    lines: list[Choice] = [*several(decoder)]
    if lines:
        fixed += [(f"{one[0]}, K {one[1]}", [one]) for one in lines] if apart else [("several lines", lines)]
    return fixed + [(f"{drafter}, {spelled(rule)}", [(drafter, rule)]) for drafter, rule in controllers(decoder)]


def mixed(decoder: Decoder, count: int) -> list[Choice]:
    """The next drafter and the next of its shapes for each request, moved against each other."""
    each = [shapes(decoder, drafter) for drafter in decoder.drafters]
    turns = [divmod(i, len(each)) for i in range(count)]
    return [each[place][(4 * turn + place) % len(each[place])] for turn, place in turns]


def with_prefixes(subject: Subject, asked: Sequence[PlainAnswer], judge: Arbiter) -> Finding:
    """Let what was said go on, again and again, and do so twice: the second time hardly any of it is read."""
    least = EVERY if subject.bundle.target.contract.recurrent else BLOCK_TOKENS  # that may be found
    room = min(subject.bundle.max_length // 2, least + 3 * BLOCK_TOKENS)
    chats = [(tuple(islice(cycle((*one.prompt, *one.expected.token_ids)), room)), one.params) for one in asked]
    again = ask_plain(subject, chats)
    with subject.open(prefix_bytes=PREFIX_BYTES) as decoder:
        decoder.generate(*map(list, zip(*chats, strict=True)))
        tally = compare(decoder, again, mixed(decoder, len(again)), judge)
        found = decoder.prefixes.found_tokens
    finding = tally.finding("same text", f"prefixes kept, batch {subject.batch}")
    passed = finding.passed and (found > 0 or room < NARROWEST + least)
    return replace(finding, passed=passed, detail=f"{finding.detail}; {found:,} tokens of prompts found")


def in_another_engine(other: Subject, asked: Sequence[PlainAnswer], probe: Probe) -> Finding:
    """Its difference from the subject's engine is measured by running the context in both."""
    case = f"in {other.engine}"
    try:
        own = Probe(other)
        decoder = other.open(min(TOGETHER, other.batch))
    except EngineError as error:
        return Finding("same text", case, None, f"not here: {error}")
    try:
        with decoder:
            judge = Arbiter(probe, other.rounding, [own.distribution])
            return compare(decoder, asked, mixed(decoder, len(asked)), judge).finding("same text", case)
    finally:
        own.close()
