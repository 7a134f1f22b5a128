"""generate and chat show images to a model that sees."""

import io
from pathlib import Path

import pytest
from trt_spec.runtime import Decoder, SamplingParams
from trt_spec.runtime.images.opening import MOST_BYTES

from ...kit.bundles import Pair
from ...kit.images import image_file
from ...kit.seeing_models import Seeing
from ..conftest import Run, assert_refused

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}{% endfor %}"
    "{% endif %};{% endfor %}a:"
)
FIRST, SECOND = image_file(40, 31), image_file(25, 60)
ASKED = ("--max-new-tokens", 12, "--temperature", 0, "--ignore-eos")


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """Two images, beside a template that knows them."""
    (tmp_path / "t.jinja").write_text(TEMPLATE)
    first, second = tmp_path / "first.png", tmp_path / "second.png"
    first.write_bytes(FIRST)
    second.write_bytes(SECOND)
    return first, second


def text_of(llava: Seeing, prompt: str, *images: bytes) -> str:
    params = SamplingParams(max_new_tokens=12, temperature=0, ignore_eos=True)
    with Decoder.open(llava.bundle, max_batch=1) as decoder:
        return decoder.generate(prompt, params, images=[images])[0].text


def test_generate_puts_images_in_their_places(llava: Seeing, run: Run, files: tuple[Path, Path]):
    shown = [argument for file in files for argument in ("--image", file)]
    asked = ("generate", "--bundle", llava.bundle, *ASKED)
    written = run(*asked, "--prompt", "<image> or <image>?", *shown).out
    assert written == text_of(llava, "<image> or <image>?", FIRST, SECOND) + "\n"
    template = ("--chat", "--chat-template", files[0].parent / "t.jinja")
    assert (
        run(*asked, "--prompt", "what?", *shown, *template).out
        == run(*asked, "--prompt", "u:<image><image>what?;a:", *shown).out
    )


def test_chat_shows_images_with_the_next_line(
    llava: Seeing, run: Run, files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
):
    lines = f"/image {files[0]}\nwhat?\n/image absent\n/image {files[1]}\nand?\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    said = run("chat", "--bundle", llava.bundle, *ASKED, "--chat-template", files[0].parent / "t.jinja")
    first = text_of(llava, "u:<image>what?;a:", FIRST)
    second = text_of(llava, f"u:<image>what?;a:{first};u:<image>and?;a:", FIRST, SECOND)
    assert said.out == f"{first}\n{second}\n"
    assert "image absent cannot be read (No such file or directory); give another" in said.err


def test_what_is_no_image_is_refused(llava: Seeing, llama: Pair, run: Run, files: tuple[Path, Path], tmp_path: Path):
    def generate(bundle: Path, prompt: str, *images: Path) -> None:
        return run(
            "generate", "--bundle", bundle, "--prompt", prompt, *(one for file in images for one in ("--image", file))
        )

    assert_refused(generate(llama.bundle, "a", files[0]), "reads no images; leave them out")
    assert_refused(generate(llava.bundle, "a", files[0]), "the prompt has 0 places for 1 image; write <image> once")
    assert_refused(generate(llava.bundle, "<image>", tmp_path / "absent"), "absent cannot be read (No such file")
    (tmp_path / "text.png").write_text("no image")
    assert_refused(generate(llava.bundle, "<image>", tmp_path / "text.png"), "an image cannot be read (")
    with (tmp_path / "large.png").open("wb") as file:
        file.truncate(MOST_BYTES + 1)
    assert_refused(
        generate(llava.bundle, "<image>", tmp_path / "large.png"), "large.png has more than 20,971,520 bytes"
    )
