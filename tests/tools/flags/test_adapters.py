"""Flags bring adapters to a bundle that has room for them; what cannot be is refused before a library is loaded."""

from contextlib import suppress
from pathlib import Path

import pytest
from trt_spec.tools.cli import main

from ...kit.adapters import Adapted
from ...kit.bundles import Pair

ASKED = ["--max-new-tokens", "12", "--temperature", "0", "--ignore-eos"]


def test_generate_answers_with_an_adapter(adapted: Adapted, capsys: pytest.CaptureFixture[str]) -> None:
    bundle, texts = str(adapted.pair.bundle), []
    for more in ([], ["--adapter", str(adapted.folders["wide"])]):
        assert main(["generate", "--bundle", bundle, "--prompt", "abcdab", *ASKED, *more]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] != texts[1]


@pytest.mark.parametrize(
    ("command", "more", "said"),
    [
        ("generate", ["--adapter", "absent"], "adapter absent does not exist, expected the folder of one"),
        ("chat", ["--adapter", "absent"], "adapter absent does not exist, expected the folder of one"),
        ("serve", ["--adapter", "a=absent"], "adapter absent does not exist, expected the folder of one"),
        ("serve", ["--adapters-from", "absent"], "--adapters-from absent is no folder; name one"),
        ("serve", ["--adapter", "absent"], "'absent', expected NAME=DIR"),
        (
            "serve",
            ["--adapters-from", ".", "--engine", "openvino-bfloat16"],
            "engine openvino-bfloat16 runs no adapters; use engine",
        ),
    ],
)
def test_what_is_no_adapter_is_refused(
    adapted: Adapted, capsys: pytest.CaptureFixture[str], command: str, more: list[str], said: str
) -> None:
    prompt = ["--prompt", "a"] if command == "generate" else []
    with suppress(SystemExit):  # the parser's own
        assert main([command, "--bundle", str(adapted.pair.bundle), *prompt, *more]) != 0
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("command", ["generate", "chat", "serve"])
def test_a_bundle_without_room_is_refused(
    llama: Pair, adapted: Adapted, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    folder = adapted.folders["wide"]
    given = f"a={folder}" if command == "serve" else str(folder)
    prompt = ["--prompt", "a"] if command == "generate" else []
    assert main([command, "--bundle", str(llama.bundle), *prompt, "--adapter", given]) != 0
    assert "has no room for adapters; export it with --adapters" in capsys.readouterr().err


def test_names_are_given_once(adapted: Adapted, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--adapter", f"a={adapted.folders['wide']}"]
    assert main(["serve", "--bundle", str(adapted.pair.bundle), *given, *given]) != 0
    assert "the name 'a' is given twice; give each model and adapter one of its own" in capsys.readouterr().err


def test_serve_takes_no_adapters_beside_a_checkpoint(adapted: Adapted, capsys: pytest.CaptureFixture[str]) -> None:
    folder: Path = adapted.folders["wide"]
    assert main(["serve", str(adapted.pair.checkpoint), "--adapter", f"a={folder}"]) != 0
    assert "adapters need a bundle that has room for them" in capsys.readouterr().err
