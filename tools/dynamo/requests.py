"""Requests and answers in the terms of NVIDIA Dynamo: what is not supported is refused by its name.

When a worker dies, Dynamo sends the request to another one with the generated tokens after its prompt, and fewer left
to make. It does not say where the prompt ended. All that depends on it is refused: penalties that count the output.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer

from ...engines import Bundle, RequestError
from ...runtime import Piece, SamplingParams, Usage
from ...runtime.images.picture import Picture, more_tokens
from ..serving.tickets import Submission
from ..serving.tokens import Spelling
from .images import counted_by_router

DEFAULT_TEMPERATURE = 1.0

TAKEN = {  # fields that SamplingParams has, too, by Dynamo's names
    "sampling_options": ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed"),
    "stop_conditions": ("max_tokens", "min_tokens", "stop", "ignore_eos"),
    "output_options": ("logprobs",),
}
STOP_IDS = ("stop_token_ids", "stop_token_ids_visible", "stop_token_ids_hidden")
FRONTENDS_OWN = ("skip_special_tokens", "formatted_prompt", "return_tokens_as_token_ids", "include_stop_str_in_output")
MOVED = "a request that moves to another worker does not say where its prompt ended"
REFUSED: dict[str, tuple[object, str]] = {  # what asks for nothing, and why anything else is refused
    "n": (1, "send a request for each completion"),
    "best_of": (1, "send a request for each completion"),
    "presence_penalty": (0, MOVED),
    "frequency_penalty": (0, MOVED),
    "use_beam_search": (False, "each text is written token by token"),
    "length_penalty": (1, "each text is written token by token"),
    "guided_decoding": (None, "Dynamo does not move such a request when its worker dies"),
    "max_thinking_tokens": (None, "thinking is not separated from answering"),
    "prompt_logprobs": (None, "only trt-spec serve has log-probs of prompts"),
    "prompt_embeds": (None, "the model reads tokens"),
    "mm_processor_kwargs": ({}, "images are read as the bundle says"),
    "prefill_result": (None, "one worker reads the prompt and writes the answer"),
    "encoder_result": (None, "one worker reads the images and writes the answer"),
}


def submission_of(
    request: Mapping[str, Any], request_id: str, rule: str, max_length: int, pictures: Sequence[Picture] = ()
) -> Submission:
    """Turn a request into ours; the same request on another worker has the same seed."""
    prompt = list(request["token_ids"])
    fields: dict[str, Any] = {"temperature": DEFAULT_TEMPERATURE, "rule": rule, "seed": seed_of(request_id)}
    for name in REFUSED.keys() & request.keys():
        _refuse(name, request[name])
    for group, taken in TAKEN.items():
        for name, value in (request.get(group) or {}).items():
            if value is None or name in FRONTENDS_OWN or name in STOP_IDS:
                continue
            if name in taken:
                fields[name] = value
            else:
                _refuse(name, value)
    stops = request.get("stop_conditions") or {}
    fields["stop_token_ids"] = sorted({token for name in STOP_IDS for token in stops.get(name) or ()})
    fields["max_new_tokens"] = fields.pop("max_tokens", max_length - len(prompt) - more_tokens(pictures))
    fields["seed"] %= 2**64
    fields["top_k"] = max(fields.get("top_k", 0), 0)  # other servers say -1 for off
    salt = (request.get("routing") or {}).get("cache_salt") or ""
    return Submission(prompt, SamplingParams(**fields), cache_salt=salt, pictures=pictures)


def _refuse(name: str, value: object) -> None:
    nothing, reason = REFUSED.get(name, (None, "it is not known here"))
    if value is not None and value != nothing:
        raise RequestError(f"{name} is refused: {reason}; leave it out", name)


def seed_of(request_id: str) -> int:
    """Derive a seed from what a request keeps when it moves."""
    return int.from_bytes(hashlib.sha256(request_id.encode()).digest()[:8], "big")


def chunk_of(pieces: Sequence[Piece], spelling: Spelling) -> dict[str, Any]:
    chunk: dict[str, Any] = {"token_ids": [token for piece in pieces for token in piece.token_ids], "index": 0}
    logprobs = [one for piece in pieces for one in piece.logprobs]
    if logprobs:
        chunk["log_probs"] = [one.logprob for one in logprobs]
        chunk["top_logprobs"] = [
            [_ranked(rank, token, logprob, spelling) for rank, (token, logprob) in enumerate(one.top, 1)]
            for one in logprobs
        ]
    return chunk


def usage_of(usage: Usage, said: int) -> dict[str, Any]:
    """Count the tokens of a request with images, of which the frontend counts placeholders; some it had said before."""
    prompt, completion = usage.prompt_tokens - said, usage.completion_tokens + said
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def _ranked(rank: int, token: int, logprob: float, spelling: Spelling) -> dict[str, Any]:
    text, spelt = spelling.to_text(token), list(spelling.to_bytes(token))
    return {"rank": rank, "token_id": token, "token": text, "logprob": logprob, "bytes": spelt}


def card_of(bundle: Bundle, tokenizer: Tokenizer, rule: str) -> dict[str, str]:
    """Return the files of a checkpoint that Dynamo's frontend reads: it encodes, decodes and fills templates.

    It lets no worker in whose files are others, so a text never goes on in another bundle or by another rule.
    """
    own = bundle.tokenizer
    begin, ends = own.bos_token_id, list(own.eos_token_ids)
    _, seen, images = counted_by_router(bundle)
    config = {
        "architectures": [bundle.target.architecture],
        "model_type": bundle.target.architecture,
        "max_position_embeddings": bundle.max_length,
        "vocab_size": own.vocab_size,
        "bos_token_id": begin,
        "eos_token_id": ends,
        "trt_spec": {"bundle": hashlib.sha256(bundle.manifest().encode()).hexdigest(), "rule": rule},
    } | seen
    spelling = {
        "model_max_length": bundle.max_length,
        "bos_token": None if begin is None else tokenizer.id_to_token(begin),
        "eos_token": tokenizer.id_to_token(ends[0]) if ends else None,
        "chat_template": own.chat_template,
    }
    return {
        "config.json": json.dumps(config),
        "generation_config.json": json.dumps({"bos_token_id": begin, "eos_token_id": ends}),
        "tokenizer_config.json": json.dumps(spelling),
        **({"preprocessor_config.json": json.dumps(images)} if images else {}),
        "tokenizer.json": bundle.tokenizer_file.read_text(encoding="utf-8"),
    }
