"""Refuses parameters of a wrong type or out of their ranges. It needs no torch, so that a flag is refused at once."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ...engines import RequestError
from ..grammars.grammar import Grammar
from .checks import LARGEST, real, require, whole
from .parameter_fields import RULES, ParameterFields

MAX_LOGPROBS = 20
REPETITIONS = (1e-3, 1e3)
TEMPERATURES = (1e-5, 1e5)
MOST_BEAMS = 32
STEEPEST = 16.0  # power of a length


def refuse_out_of_range(params: ParameterFields) -> None:
    """Refuse what no bundle and no engine could make sense of, with a `RequestError`."""
    require("max_new_tokens", params.max_new_tokens, whole(params.max_new_tokens, 1), "a whole number >= 1")
    _check_scores(params)
    _check_cuts(params)
    _check_end(params)
    _check_grammar(params)
    for name in ("include_stop", "show_special_tokens", "ignore_eos"):
        value = getattr(params, name)
        require(name, value, isinstance(value, bool), "true or false")
    sound = params.seed is None or whole(params.seed, 0, 2**64 - 1)
    require("seed", params.seed, sound, "a whole number below 2^64")
    for name in ("logprobs", "prompt_logprobs"):
        value = getattr(params, name)
        sound = value is None or whole(value, 0, MAX_LOGPROBS)
        require(name, value, sound, f"a whole number from 0 to {MAX_LOGPROBS}")
    require("rule", params.rule, params.rule in RULES, f"one of {', '.join(RULES)}")
    require("lenience", params.lenience, real(params.lenience, 0, 1) and params.lenience > 0, "a number in (0, 1]")
    if params.lenient and params.rule == "coupled":
        raise RequestError(
            f"lenience {params.lenience} lets the draft change the text, but rule coupled gives one text for any "
            "draft; choose rule rejection, or lenience 1"
        )
    _check_beams(params)


def _check_scores(params: ParameterFields) -> None:
    """Check what is added to scores, or divides them."""
    cold, hot = TEMPERATURES
    for name, absent in (("temperature", False), ("draft_temperature", params.draft_temperature is None)):
        value = getattr(params, name)
        sensible = real(value, 0, hot) and (value == 0 or value >= cold)
        require(name, value, sensible or absent, f"0 or a number from {cold:g} to {hot:g}")
    bias = params.logit_bias
    sound = isinstance(bias, Mapping) and all(
        whole(key, 0) and (real(value, -LARGEST, LARGEST) or value == -math.inf) for key, value in bias.items()
    )
    require("logit_bias", bias, sound, f"a mapping of token ids to -inf or numbers from {-LARGEST:g} to {LARGEST:g}")
    low, high = REPETITIONS
    repetition = params.repetition_penalty
    require("repetition_penalty", repetition, real(repetition, low, high), f"a number from {low:g} to {high:g}")
    for name in ("presence_penalty", "frequency_penalty"):
        value = getattr(params, name)
        require(name, value, real(value, -LARGEST, LARGEST), f"a number from {-LARGEST:g} to {LARGEST:g}")


def _check_cuts(params: ParameterFields) -> None:
    """Check what leaves tokens out."""
    require("top_k", params.top_k, whole(params.top_k, 0), "a whole number >= 0 (0 = off)")
    require("top_p", params.top_p, real(params.top_p, 0, 1) and params.top_p > 0, "a number in (0, 1]")
    require("min_p", params.min_p, real(params.min_p, 0, 1), "a number in [0, 1]")
    require("allowed_token_ids", params.allowed_token_ids, _are_ids(params.allowed_token_ids), "a list of token ids")


def _check_end(params: ParameterFields) -> None:
    """Check what ends an output, and what keeps it from ending."""
    most = params.max_new_tokens
    require("min_tokens", params.min_tokens, whole(params.min_tokens, 0, most), f"a whole number from 0 to {most}")
    stop = params.stop
    strings = isinstance(stop, Sequence) and all(isinstance(text, str) and text for text in stop)
    require("stop", stop, strings, "a list of strings, none empty")
    require("stop_token_ids", params.stop_token_ids, _are_ids(params.stop_token_ids), "a list of token ids")


def _check_grammar(params: ParameterFields) -> None:
    sound = params.grammar is None or isinstance(params.grammar, Grammar)
    require("grammar", params.grammar, sound, "a Grammar")
    if params.grammar is not None and params.ignore_eos:
        raise RequestError(
            "ignore_eos is set, but only the end of the sequence can follow what completes a grammar; leave one out"
        )
    if params.grammar is not None and params.min_tokens:
        raise RequestError(
            f"min_tokens is {params.min_tokens}, but what completes a grammar can only end; leave one out"
        )


def _check_beams(params: ParameterFields) -> None:
    beams = params.num_beams
    require("num_beams", beams, whole(beams, 1, MOST_BEAMS), f"a whole number from 1 to {MOST_BEAMS}")
    power, early, wanted = params.length_penalty, params.early_stopping, params.num_return_sequences
    require("length_penalty", power, real(power, -STEEPEST, STEEPEST), f"a number from {-STEEPEST:g} to {STEEPEST:g}")
    known = isinstance(early, bool) or early == "never"
    require("early_stopping", early, known, "true, false or never")
    require("num_return_sequences", wanted, whole(wanted, 1, beams), f"a whole number from 1 to num_beams, {beams}")
    unknown = {
        "temperature": not params.greedy,
        "lenience": params.lenient,
        "stop": bool(params.stop),
        "logprobs": params.logprobs is not None,
    }
    refuse_beside_beams(params, [name for name, used in unknown.items() if used])


def refuse_beside_beams(params: ParameterFields, used: Sequence[str]) -> None:
    """Refuse parameters that are used and that beam search does not know."""
    if used and params.num_beams > 1:
        raise RequestError(
            f"num_beams is {params.num_beams}, but beam search goes without {used[0]}; leave one out", used[0]
        )


def _are_ids(value: Any) -> bool:
    return isinstance(value, Sequence) and all(whole(one, 0) for one in value)
