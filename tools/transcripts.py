"""Write a transcript as plain text, as subtitles (SRT, WebVTT) or as JSON."""

import json
from collections.abc import Callable
from typing import Any

from ..runtime.transcribing.transcript import Segment, Transcript


def as_text(transcript: Transcript) -> str:
    return transcript.text + "\n"


def as_srt(transcript: Transcript) -> str:
    lines = [
        f"{number}\n{clock(one.start, ',')} --> {clock(one.end, ',')}\n{one.text.strip()}\n"
        for number, one in enumerate(transcript.segments, 1)
    ]
    return "\n".join(lines)


def as_vtt(transcript: Transcript) -> str:
    lines = [f"{clock(one.start)} --> {clock(one.end)}\n{_in_vtt(one.text)}\n" for one in transcript.segments]
    return "\n".join(["WEBVTT\n", *lines])


def as_json(transcript: Transcript) -> str:
    return json.dumps(fields_of(transcript), ensure_ascii=False) + "\n"


FORMATS: dict[str, Callable[[Transcript], str]] = {"txt": as_text, "srt": as_srt, "vtt": as_vtt, "json": as_json}


def fields_of(transcript: Transcript) -> dict[str, Any]:
    """Return all that is known of a transcript, by the names of OpenAI's API where it has one."""
    return {
        "text": transcript.text,
        "language": transcript.language,
        "duration": transcript.seconds,
        "segments": [segment_fields(number, one) for number, one in enumerate(transcript.segments)],
    }


def segment_fields(number: int, one: Segment) -> dict[str, Any]:
    return {"id": number, "start": one.start, "end": one.end, "text": one.text, "tokens": list(one.token_ids)}


def clock(seconds: float, point: str = ".") -> str:
    whole = round(1000 * seconds)
    return f"{whole // 3_600_000:02}:{whole // 60_000 % 60:02}:{whole // 1000 % 60:02}{point}{whole % 1000:03}"


def _in_vtt(text: str) -> str:
    """An arrow would be taken for a line of times, and < for a tag."""
    return text.strip().replace("&", "&amp;").replace("<", "&lt;").replace("-->", "--&gt;")
