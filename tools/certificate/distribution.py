"""The first tokens that leave the real loop are distributed as the target alone distributes them.

Their joint is compared with the exact one by a χ² that stops as soon as it knows (sequential.py); where seeds decide
them, each sample with what its seed says (seeded.py). False alarms of all cases together are at most FALSE_ALARM. Each
drafter, setting, rule and way to choose K is in a case, not each pair of them: that K is chosen as safely for one
drafter as for another is shown by the same text, token by token. Each drafter, rule and shape of combs and trees are in
a case together, because what is tested there depends on all of them. Trees whose tokens seeds decide and the first case
of each rule run in the engine throughout; in the others the target recalls what the engine has said after the same
context (recalled.py). The same statistic at the same threshold must catch faults that are planted in the loop, in
either.
"""

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle, islice

from ...runtime import Decoder, EntropyRule, Output, SamplingParams, Speculation
from ...runtime.acceptance.parameter_fields import RULES
from ...runtime.drafters import DRAFTERS, PREDICTING
from ...runtime.grammars.compiler import Compiler
from ...runtime.state.asked import BESIDE, DraftLength
from ...runtime.state.shapes import comb, regular, tree
from . import seeded
from .arbiter import Arbiter
from .effort import POWER, Effort
from .faults import fault
from .first_tokens import DEPTH, SETTINGS, Case, Logits, cell_of, counted_mass, exact_cells, remembering
from .grammars import usable
from .lanes import side_by_side
from .probe import Probes
from .recalled import RecallingDecoder, recalls
from .sequential import USUAL, SequentialTest
from .subject import Finding, Progress, Subject, combs_and_trees, controllers, several, spelled

FALSE_ALARM = 1e-6
CANDIDATES = 16  # prompts of one token, among which acceptance chooses
TRIED = 192  # requests, of all of them together
SHORT_LIST = 4  # of them, among which the joint does
CASES = (  # of the first drafter; each other one has the first
    ("T 0.5", "rejection", 3),
    ("T 0.7, top-p 0.9", "tokenwise", 2),
    ("T 1, top-k 6, min-p 0.05", "coupled", 2),
    ("T 0.6, penalties, bias", "rejection", 2),
    ("T 0.6, grammar", "rejection", 2),
)
# All siblings at one place, and at several; branches where they are likely, and two of each node.
SHAPES = (comb(1, 3), comb(3, 3), tree(3, 5), regular(2, 2))
TREE_SETTINGS = ("T 1, top-k 6, min-p 0.05", "T 0.5", "T 0.7, top-p 0.9")
OF_RANDOM = "T 0.5"  # it proposes any tokens, but in one setting those of a seed, so that its cases share contexts
READING_AHEAD = "T 0.6, penalties, bias"  # of trees, too: each node counts what its own path says
LINE_LENGTH = 2  # of several lines: after it they differ, or no line was chosen from another
CONTROLS = {
    "wrongly declared q": "T 0.5",
    "filter on one side only": "T 0.7, top-p 0.9",
    "skipped residual": "T 0.5",
}
CONTROL_STEP, CONTROL_MOST = 500, 24_000  # samples: a control ends as soon as its fault is caught
CONTROL_LIKELY = 2_000


class Samples:
    """The cells of the first tokens of requests, each with a seed of its own."""

    def __init__(self, decoder: Decoder, case: Case, test: SequentialTest) -> None:
        self.decoder, self.case, self.test = decoder, case, test
        self.observed: Counter[Hashable] = Counter()
        self.speculation = Speculation()
        decoder.forget_outputs()  # of other cases

    def draw(self, until: int) -> Iterator[int]:
        """Yields how many there are after each batch, whose requests begin together: none waits in a round that is
        longer for another's sake."""
        case = self.case
        while (drawn := self.observed.total()) < until:
            params = [
                replace(case.params, seed=seed) for seed in range(drawn, min(until, drawn + self.decoder.max_batch))
            ]
            predictions: list[tuple[int, ...]] = [()] * len(params)
            if case.predicted:
                said = self.decoder.generate([case.prompt] * len(params), params, draft_length=0)
                predictions = [output.token_ids for output in said]
            for output in self._generate(params, predictions):
                self.observed[cell_of(output.token_ids, self.test.expected)] += 1
                self.speculation.add(output.speculation)
            yield self.observed.total()

    def _generate(self, params: Sequence[SamplingParams], predictions: Sequence[Sequence[int]]) -> list[Output]:
        decoder, case = self.decoder, self.case
        requests = [
            decoder.submit(
                case.prompt, one, draft_length=case.draft_length, drafter=case.drafter, prediction=prediction
            )
            for one, prediction in zip(params, predictions, strict=True)
        ]
        while not all(request.finished for request in requests):
            decoder.step()
        return [request.output() for request in requests]


def check(subject: Subject, probes: Probes, effort: Effort, progress: Progress) -> Iterator[Finding]:
    progress("distribution: choosing prompts", 0, 1)
    logits = remembering(probes["target"])
    judge = Arbiter(probes["target"], subject.rounding)
    seeds = seeded.samples_needed(effort.total_variation, POWER)
    with subject.open(capture=False) as decoder:
        listed = list_cases(subject, decoder, logits, effort.each_tree)
    by_seed = [case for case in listed if seeded.decided_by_seeds(case)]
    cases = [case for case in listed if not seeded.decided_by_seeds(case)]
    compiler = Compiler(subject.bundle)
    exact = [exact_cells(logits, case, compiler) for case in cases]
    alarm = FALSE_ALARM / len(cases)
    tests = [SequentialTest(each.cells, alarm, effort.total_variation, POWER, each.divergence) for each in exact]
    likely = sum(test.looks[USUAL] for test in tests)  # as much as they take, and each control
    total = likely + CONTROL_LIKELY * len(CONTROLS)
    drawn = Counter(dict.fromkeys(cases, 0))  # with all its keys, as lanes count side by side

    def sample(decoder: Decoder, both: tuple[Case, SequentialTest | None]) -> Finding:
        case, test = both
        if test is None:
            return seeded.compare(decoder, case, seeds, logits, judge)
        samples = Samples(decoder, case, test)
        for look, number in enumerate(test.looks):
            for count in samples.draw(number):
                drawn[case] = min(count, test.looks[USUAL])
                progress("distribution: sampling", drawn.total(), total)
            if (passed := test.passes(samples.observed, look)) is not None:
                break
        drawn[case] = test.looks[USUAL]
        assert passed is not None, "the last look decides"
        return finding(samples, passed)

    sampled = list(zip(cases, tests, strict=True))
    first_of_rule = {case.rule: (case, test) for case, test in reversed(sampled)}.values()
    in_engine = [*((case, None) for case in by_seed), *(both for both in sampled if both in first_of_rule)]
    recalled = [both for both in sampled if both not in first_of_rule]
    recalling = replace(subject, decoder=RecallingDecoder)
    for own, each in ((subject, in_engine), (recalling, recalled)):
        yield from side_by_side(own, partial(own.open, capture=False), sample, each)
    for number, ((name, settings), own) in enumerate(zip(CONTROLS.items(), cycle((subject, recalling)), strict=False)):
        progress(f"distribution: planted fault, {name}", likely + CONTROL_LIKELY * number, total)
        yield control(own, name, tries([both for both in sampled if both[0].settings == settings]))


def finding(samples: Samples, passed: bool) -> Finding:
    test, acceptance = samples.test, samples.speculation.acceptance
    numbers = test.numbers(samples.observed)
    seen = {None: "nothing proposed", 0.0: "all rejected", 1.0: "all accepted"}.get(
        acceptance, f"{acceptance or 0:.0%} accepted"
    )
    detail = (
        f"p = {numbers['p_value']:.2g} (fails below {numbers['rejects_below']:.0e}), {numbers['samples']:,} samples "
        f"in {numbers['cells']} cells, {seen}{', recalled' if recalls(samples.decoder) else ''}"
    )
    numbers |= {"power": test.power, "total_variation": test.total_variation, "acceptance": acceptance}
    return Finding("distribution", str(samples.case), passed, detail, numbers)


def tries(cases: Sequence[tuple[Case, SequentialTest]]) -> list[tuple[Case, SequentialTest]]:
    """Return the cases in which a fault is planted until it is caught: the first, and the first that samples.

    Copies are seldom proposed after a short prompt, so that a fault may hardly move what they give.
    """
    drawn = [both for both in cases if both[0].drafter in DRAFTERS and DRAFTERS[both[0].drafter].samples]
    return [cases[0], *(both for both in drawn[:1] if both is not cases[0])]


def control(subject: Subject, name: str, cases: Sequence[tuple[Case, SequentialTest]]) -> Finding:
    """Fails where the planted fault is seen in none of these cases."""
    for case, test in cases:
        found = plant(subject, name, case, test)
        if found.passed is not False:
            break
    return found


def plant(subject: Subject, name: str, case: Case, test: SequentialTest) -> Finding:
    """Fails where the planted fault is not seen; one that cannot do harm, as no proposal is rejected, is not judged."""
    with fault(name), subject.open(capture=False) as decoder:
        samples = Samples(decoder, case, test)
        for number in range(CONTROL_STEP, CONTROL_MOST + 1, CONTROL_STEP):
            for _ in samples.draw(number):
                pass
            numbers = test.numbers(samples.observed)
            if caught := numbers["p_value"] < numbers["rejects_below"]:
                break
    detail = (
        f"p = {numbers['p_value']:.2g} of {numbers['samples']:,} samples, "
        f"total variation {numbers['total_variation_seen']:.2f}"
    )
    harmless = not caught and samples.speculation.accepted == samples.speculation.examined
    if harmless:
        detail = "no proposal was ever rejected, so that it changes nothing"
    passed = None if harmless else caught
    return Finding("distribution", f"planted: {name}", passed, detail, numbers | {"caught": caught})


def list_cases(subject: Subject, decoder: Decoder, logits: Logits, each_tree: bool) -> list[Case]:
    """Each drafter, setting, rule and way to choose K once, as far as they can share a case."""
    frequent = Counter(token for prompt in subject.prompts() for token in prompt)
    candidates = [token for token, _ in frequent.most_common(CANDIDATES)]
    (first, *others), longest = decoder.drafters, decoder.longest_draft
    prompts = {drafter: choose_prompt(decoder, logits, drafter, candidates) for drafter in decoder.drafters}
    known = usable(subject.bundle)
    cases = [
        Case(settings, rule, first, min(k, longest), prompts[first])
        for settings, rule, k in CASES
        if SETTINGS[settings].grammar in (None, *known)
    ]
    settings, rule, most = CASES[0]
    choices: dict[str, DraftLength] = {  # copies are certain: a second proposal is like the first
        drafter: min(1 if DRAFTERS[drafter].has_copies else most, longest) for drafter in others
    }
    choices |= ways_to_choose(decoder)
    cases += [Case(settings, rule, drafter, k, prompts.get(drafter, prompts[first])) for drafter, k in choices.items()]
    cases.append(Case(settings, rule, PREDICTING, min(2, longest), prompts[PREDICTING], predicted=True))
    kinds = shape_cases(decoder, each_tree), line_cases(decoder, each_tree)
    trees = [case for kind in kinds for case in kind]
    if each_tree:
        trees += [(READING_AHEAD, *case[1:]) for kind in kinds for case in kind[:1]]
    return cases + [Case(*one, prompts[one[2].split(BESIDE)[0]]) for one in trees]


def shape_cases(decoder: Decoder, each: bool) -> list[tuple[str, str, str, DraftLength]]:
    """Settings, rule, drafter and shape: each of the last three with each other, or each rule once with each kind."""
    able = {drafter: combs_and_trees(decoder, drafter) for drafter in decoder.drafters}
    pairs = [(one, drafter) for one in SHAPES for drafter in able if one in able[drafter]]
    found = [
        (rule, drafter, shape)
        for leaves in (True, False)
        if (own := [pair for pair in pairs if pair[0].leaves == leaves])
        for number, rule in enumerate(RULES)
        for shape, drafter in (own if each else [own[(2 + number) % len(own)]])
    ]
    turns = len(TREE_SETTINGS)  # moved on after each turn, so that a drafter meets another with each rule
    return [
        (OF_RANDOM if DRAFTERS[one[1]].always_unsure else TREE_SETTINGS[(i + i // turns) % turns], *one)
        for i, one in enumerate(found)
    ]


def line_cases(decoder: Decoder, each: bool) -> list[tuple[str, str, str, DraftLength]]:
    """Settings, rule, drafters and K: all drafters with a rule in turn, or each rule once."""
    some = several(decoder) if each else several(decoder)[: len(RULES)]
    return [
        (TREE_SETTINGS[i // len(RULES) % len(TREE_SETTINGS)], RULES[i % len(RULES)], drafter, min(k, LINE_LENGTH))
        for i, (drafter, k) in enumerate(some)
    ]


def ways_to_choose(decoder: Decoder) -> dict[str, DraftLength]:
    """Each rule that chooses K, by a drafter for which it does: the last, so that the first keeps its fixed ones."""
    found: dict[str, tuple[str, DraftLength]] = {}
    for drafter, k in controllers(decoder):
        if isinstance(k, EntropyRule):
            k = replace(k, longest=min(DEPTH, k.longest))  # a proposal after the tokens that count shows nothing
        found[spelled(k)] = drafter, k
    return dict(found.values())


def choose_prompt(decoder: Decoder, logits: Logits, drafter: str, candidates: Sequence[int]) -> tuple[int, ...]:
    """One token, so that nothing is prefilled: after it proposals are rejected as often as accepted, and few tokens
    are likely."""
    tried = list(islice(cycle(candidates), TRIED))
    settings = [
        replace(SETTINGS["T 0.5"], max_new_tokens=DEPTH, ignore_eos=True, seed=seed) for seed in range(len(tried))
    ]
    outputs = decoder.generate([[token] for token in tried], settings, draft_length=1, drafter=drafter)
    seen = {token: Speculation() for token in candidates}
    for token, output in zip(tried, outputs, strict=True):
        seen[token].add(output.speculation)

    def balance(token: int) -> float:
        acceptance = seen[token].acceptance or 0.0
        return acceptance * (1 - acceptance)

    short_list = sorted(candidates, key=balance, reverse=True)[:SHORT_LIST]
    return (max(short_list, key=lambda token: balance(token) * counted_mass(logits, token)),)
