"""The output of a request as JSON."""

from dataclasses import asdict
from typing import Any

from ..runtime import Output, TokenLogprob, TracedRound


def output_json(output: Output) -> dict[str, Any]:
    """The object that `generate --json` prints; it has logprobs and trace only if they were asked for."""
    speculation = output.speculation
    fields: dict[str, Any] = {
        "text": output.text,
        "token_ids": list(output.token_ids),
        "finish_reason": output.finish_reason,
        "seed": output.seed,
        "usage": {
            "prompt_tokens": output.usage.prompt_tokens,
            "completion_tokens": output.usage.completion_tokens,
        },
        "lossless": output.lossless,
        "speculation": speculation.to_json(),
        "timing": {
            "seconds": output.seconds,
            "seconds_to_first_token": output.seconds_to_first_token,
            "tokens_per_second": len(output.token_ids) / output.seconds,
            "draft_ms": speculation.draft_ms,
            "verify_ms": speculation.verify_ms,
            "accept_ms": speculation.accept_ms,
            "host_ms": speculation.host_ms,
        },
    }
    if output.logprobs is not None:
        fields["logprobs"] = [_logprob_json(logprob) for logprob in output.logprobs]
    if output.prompt_logprobs is not None:
        fields["prompt_logprobs"] = [one and _logprob_json(one) for one in output.prompt_logprobs]
    if output.beams:
        fields["beams"] = [asdict(beam) | {"token_ids": list(beam.token_ids)} for beam in output.beams]
    if output.trace:
        fields["trace"] = [_round_json(traced) for traced in output.trace]
    return fields


def _logprob_json(logprob: TokenLogprob) -> dict[str, Any]:
    top = [{"token_id": token, "logprob": value} for token, value in logprob.top]
    return {"token_id": logprob.token_id, "logprob": logprob.logprob, "top": top}


def _round_json(traced: TracedRound) -> dict[str, Any]:
    return {
        "proposal": list(traced.proposal),
        "accepted": traced.accepted,
        "next_token": traced.next_token,
        "p": list(traced.p),
        "q": list(traced.q),
        "next_p": traced.next_p,
        "entropies": list(traced.entropies),
        "siblings": [asdict(one) for one in traced.siblings],
    }
