"""Fetches images from the hosts that the server's owner has named, within bounds of time and bytes.

A name is resolved once, and that address is connected to: what a name means may change between a look and a fetch.
"""

import socket
import ssl
import threading
from collections.abc import Collection
from contextlib import suppress
from http.client import HTTPConnection, HTTPException
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Self
from urllib.parse import SplitResult, urljoin, urlsplit

from ...engines import RequestError
from ...engines.errors import first_line
from ...runtime.images.opening import MOST_BYTES

SECONDS = 10.0  # from the look-up of the first name to the last byte of the last place
STAND_FOR_IPV4 = (ip_network("64:ff9b::/96"), ip_network("::/96"))  # an address in the last four bytes
MOST_REDIRECTS = 3
REDIRECTS = (301, 302, 303, 307, 308)
PORTS = {"http": 80, "https": 443}


def fetch(url: str, hosts: Collection[str]) -> bytes:
    """Return what is at a URL of one of these hosts, each a HOST or HOST:PORT."""
    end = monotonic() + SECONDS
    for _ in range(MOST_REDIRECTS + 1):
        place = _allowed(url, hosts)
        found = _get(place, hosts, end)
        if isinstance(found, bytes):
            return found
        url = found
    raise RequestError(f"an image is redirected more than {MOST_REDIRECTS} times; give its own URL", "images")


def _allowed(url: str, hosts: Collection[str]) -> SplitResult:
    try:
        place = urlsplit(url)
        host, port = place.hostname or "", place.port
    except ValueError as error:
        raise RequestError(f"an image has no valid URL ({error}); correct it", "images") from error
    if place.scheme not in PORTS or not host or "@" in place.netloc:
        raise RequestError("an image has a URL that is neither data: nor http(s)://HOST/…; correct it", "images")
    named = host if port in (None, PORTS[place.scheme]) else f"{host}:{port}"
    if named not in hosts:
        raise RequestError(
            f"images from {named} are not fetched here; send the image as a data URL, or name the host by "
            f"--image-hosts {named}",
            "images",
        )
    return place


def _get(place: SplitResult, hosts: Collection[str], end: float) -> bytes | str:
    """Return the content at a place, or where it is said to be, before the clock shows the end."""
    host, port = place.hostname or "", place.port or PORTS[place.scheme]
    try:
        address = _address(host, port, hosts, _left(end))
        with _Pinned(host, port, address, place.scheme == "https", _left(end)) as connection:
            path = (place.path or "/") + (f"?{place.query}" if place.query else "")
            connection.request("GET", path, headers={"Accept": "image/*", "User-Agent": "trt-spec"})
            answer = connection.getresponse()
            if answer.status in REDIRECTS and (onward := answer.getheader("Location")):
                return urljoin(place.geturl(), onward)
            if answer.status != 200:
                raise RequestError(
                    f"{host} answers {answer.status} for an image, expected 200; correct the URL", "images"
                )
            content = answer.read(MOST_BYTES + 1)
            if connection.cut or (answer.length and len(content) <= MOST_BYTES):
                raise TimeoutError("its end did not come")
    except (OSError, HTTPException, ValueError) as error:
        raise RequestError(
            f"an image cannot be fetched from {host} within {SECONDS:g} s ({first_line(error)}); send it as a data URL",
            "images",
        ) from error
    if len(content) > MOST_BYTES:
        raise RequestError(f"an image from {host} has more than {MOST_BYTES:,} bytes; send a smaller one", "images")
    return content


def _left(end: float) -> float:
    if (left := end - monotonic()) <= 0:
        raise TimeoutError("the time is up")
    return left


def _address(host: str, port: int, hosts: Collection[str], seconds: float) -> str:
    """Return the host's address; one that is not of the public internet has to be named itself."""
    found = _looked_up(host, port, seconds)
    for address in found:
        if not _is_public(address) and not {address, f"{address}:{port}"} & {*hosts}:
            raise RequestError(
                f"{host} has the address {address}, which is not of the public internet; name it by --image-hosts, too",
                "images",
            )
    return found[0]


def _looked_up(host: str, port: int, seconds: float) -> list[str]:
    """Return a host's addresses. A look-up cannot be cut, so that it is left to itself where it takes too long."""
    answers: SimpleQueue[list[str] | OSError] = SimpleQueue()

    def look() -> None:
        try:
            answers.put([str(each[4][0]) for each in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)])
        except (OSError, UnicodeError) as error:
            answers.put(OSError(str(error)))

    threading.Thread(target=look, name="trt-spec-look-up", daemon=True).start()
    try:
        found = answers.get(timeout=seconds)
    except Empty:
        raise TimeoutError("its name is not resolved") from None
    if isinstance(found, OSError):
        raise found
    return found


def _is_public(address: str) -> bool:
    """Whether an address is of the public internet, whatever address of the older kind it may stand for."""
    found = ip_address(address.partition("%")[0])
    if isinstance(found, IPv6Address):
        within = found.ipv4_mapped or found.sixtofour or (found.teredo or (None, None))[1]
        if within is None and any(found in network for network in STAND_FOR_IPV4):
            within = IPv4Address(int(found) & 0xFFFFFFFF)
        found = found if within is None else within
    return found.is_global and not found.is_multicast


class _Pinned(HTTPConnection):
    """A connection to an address that was looked at. Once its time is up, it is cut, whatever still comes."""

    def __init__(self, host: str, port: int, address: str, secure: bool, seconds: float) -> None:
        super().__init__(host, port, timeout=seconds)
        self._address, self._secure, self._seconds = address, secure, seconds
        self._line: socket.socket | None = None  # `sock` is let go once an answer begins
        self.cut = False
        self._end = threading.Timer(seconds, self._cut)
        self._end.daemon = True
        self.default_port = PORTS["https" if secure else "http"]

    def connect(self) -> None:
        self._end.start()
        self._line = self.sock = socket.create_connection((self._address, self.port), self._seconds)
        if self._secure:
            secure = ssl.create_default_context().wrap_socket(
                self.sock, server_hostname=self.host, do_handshake_on_connect=False
            )
            self._line = self.sock = secure
            secure.do_handshake()
        if self.cut:  # before there was a line to cut
            raise TimeoutError("it does not answer")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._end.cancel()
        self.close()

    def _cut(self) -> None:
        self.cut = True
        with suppress(OSError):  # it has ended by itself
            if self._line is not None:
                self._line.shutdown(socket.SHUT_RDWR)
