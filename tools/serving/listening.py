"""Takes the addresses at which the server listens, and names them."""

import socket
from collections.abc import Iterable
from contextlib import ExitStack
from ssl import SSLContext

from ...engines import RequestError


def listen(host: str, port: int) -> socket.socket:
    """Take the address now, so that one that is taken is refused in a sentence."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        reason = reason.partition(" (while")[0]  # Python goes on to name the address
        raise RequestError(
            f"cannot listen on {host} port {port} ({reason}); choose another --host or --port"
        ) from error


def refuse_unheard(host: str, ports: Iterable[int]) -> None:
    """Refuse addresses that cannot be had, and let them go again: the model may have to be made first."""
    with ExitStack() as taken:
        for port in ports:
            taken.enter_context(listen(host, port))


def address(listener: socket.socket, tls: SSLContext | None = None) -> str:
    scheme = "http" if tls is None else "https"
    host, port = listener.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
