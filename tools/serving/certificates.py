"""The certificate of a server that speaks https, which can be read again while it runs."""

from pathlib import Path
from ssl import Purpose, SSLContext, create_default_context

from ...engines import RequestError
from ...engines.errors import first_line


def tls_context(certificate: Path, key: Path | None) -> SSLContext:
    """Read a certificate and its key now, so that wrong ones are refused in a sentence."""
    context = create_default_context(Purpose.CLIENT_AUTH)
    load_certificate(context, certificate, key)
    return context


def load_certificate(context: SSLContext, certificate: Path, key: Path | None) -> None:
    """Let handshakes from now on show this certificate."""
    try:
        context.load_cert_chain(certificate, key, lambda: "")
    except (OSError, ValueError) as error:  # SSLError is an OSError
        given = f"{certificate} and {key} are no" if key else f"{certificate} is no"
        raise RequestError(
            f"{given} certificate and its key ({first_line(error)}); give PEM files that belong together, the "
            "key without a password"
        ) from error
