"""The images of requests: found in messages, decoded or fetched, and read one after another."""

import asyncio
import binascii
from base64 import b64decode
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Self

from anyio import CapacityLimiter, to_thread
from starlette.concurrency import run_in_threadpool

from ...engines import RequestError
from ...runtime import Decoder
from ...runtime.images.opening import MOST_BYTES, MOST_IMAGES, numbered
from ...runtime.images.picture import Picture, more_tokens
from ...runtime.images.reader import ImageReader
from .bodies import ImagePart, Message
from .errors import ApiError, in_terms_of, unavailable
from .fetching import fetch
from .held_pictures import HeldPictures

MOST_CHARACTERS = 4 * (MOST_BYTES // 3 + 1)  # of base64
MOST_HELD_BYTES = 2**31  # of pictures of all requests that have not ended
MOST_FETCHING = 8  # images, in threads of their own
NAMES = {"images": "messages"}  # as the API calls them


def images_in(messages: Iterable[Message]) -> list[str]:
    """Return the URLs of all images, in their order."""
    return [
        part.image_url.url
        for message in messages
        if isinstance(message.content, list)
        for part in message.content
        if isinstance(part, ImagePart)
    ]


@dataclass(frozen=True)
class ImageLoader:
    """Makes pictures of what URLs name, one at a time for all clients: that takes cores and memory from the rounds."""

    reader: ImageReader | None  # None: the model reads text alone
    max_length: int  # of a prompt, in tokens
    hosts: frozenset[str] = frozenset()  # from which images may be fetched
    one: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(1))  # picture, or huge text, at a time
    held: HeldPictures = field(default_factory=HeldPictures)
    fetching: CapacityLimiter = field(default_factory=lambda: CapacityLimiter(MOST_FETCHING))

    @classmethod
    def of(cls, decoder: Decoder, hosts: Iterable[str]) -> Self:
        """Load images for a decoder, from these hosts, too, if it sees."""
        named = frozenset(map(str.lower, hosts))
        if named and decoder.images is None:
            raise RequestError("--image-hosts names hosts of images, but the model reads text alone; leave it out")
        return cls(decoder.images, decoder.bundle.max_length, named)

    async def pictures(self, urls: Sequence[str]) -> list[Picture]:
        """Read images, or refuse them as the images of messages."""
        if not urls:
            return []
        if self.reader is None:
            raise ApiError(
                400, "the model reads text alone; leave images out of the content", "messages", "unsupported_content"
            )
        if len(urls) > MOST_IMAGES:
            raise ApiError(400, f"there are {len(urls)} images, expected at most {MOST_IMAGES}; send less", "messages")
        with in_terms_of(NAMES):
            pictures: list[Picture] = []
            for number, url in enumerate(urls, 1):
                self._refuse_more()
                with numbered(number, len(urls)):
                    content = await to_thread.run_sync(_content, url, self.hosts, limiter=self.fetching)
                    async with self.one:
                        pictures.append(await run_in_threadpool(self.read, self.reader, content))
                if more_tokens(pictures) > self.max_length:  # the others need not be read
                    raise ApiError(
                        400,
                        f"the images have more tokens than the {self.max_length} that the model takes; send fewer or "
                        "smaller ones",
                        "messages",
                        "context_length_exceeded",
                    )
            return pictures

    def expanded(self, prompt: list[int], pictures: Sequence[Picture]) -> list[int]:
        """Return a prompt with the tokens of pictures in their places."""
        return prompt if self.reader is None or not pictures else self.reader.expand(prompt, pictures)

    def read(self, reader: ImageReader, content: bytes) -> Picture:
        """Read an image, one at a time, and count it before the next is read."""
        self._refuse_more()
        picture = reader.read(content)
        self.held.add(picture)
        _ = picture.digest  # computed here, and not while the event loop waits
        return picture

    def _refuse_more(self) -> None:
        if self.held.bytes > MOST_HELD_BYTES:
            raise unavailable("the server holds as many images as it may; try again soon", "busy")


def _content(url: str, hosts: frozenset[str]) -> bytes:
    """Return the file that a URL names, or is."""
    if url[:5].lower() != "data:":
        return fetch(url, hosts)
    kind, found, data = url.partition(",")
    if not found or not kind.lower().endswith(";base64"):
        raise RequestError("an image has a data URL without ;base64, before its content; correct it", "images")
    if len(data) > MOST_CHARACTERS:
        raise RequestError(f"an image has more than {MOST_BYTES:,} bytes; send a smaller one", "images")
    try:
        return b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RequestError(f"an image has a data URL that is not base64 ({error}); correct it", "images") from error
