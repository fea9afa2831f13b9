"""Certificate files of servers: they are read again when they change."""

from __future__ import annotations

import logging
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

import grpc

from cluster.config.network import check_certificate
from specdec.types.errors import InvalidValueError

logger = logging.getLogger(__name__)

T = TypeVar("T")


def grpc_credentials(key_file: Path, certificate_file: Path) -> Any:
    """Return credentials of a gRPC server that follow their files, from the next connection on.

    Files that do not belong together, as while they are replaced, change nothing until they do.
    Raises OSError for files that cannot be used now.
    """
    files = _Files(key_file, certificate_file, _configuration)
    return grpc.dynamic_ssl_server_credentials(files.read(), files.read_if_changed)


def _configuration(key: bytes, certificate: bytes) -> Any:
    return grpc.ssl_server_certificate_configuration([(key, certificate)])


def http_context(
    key_file: Path, certificate_file: Path, new_context: Callable[[], ssl.SSLContext]
) -> ssl.SSLContext:
    """Return the context of an HTTP server, which follows its files as `grpc_credentials` do.

    A client that resumes a session keeps the certificate that it knows. new_context: returns one
    with the present files.
    """
    files = _Files(key_file, certificate_file, lambda _key, _certificate: new_context())
    present = listening = files.read()

    def use_present(connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        nonlocal present
        present = files.read_if_changed() or present
        connection.context = present

    listening.sni_callback = use_present  # called at each handshake, also without a name
    return listening


class _Files(Generic[T]):
    """Reads a key and its certificate; `read_if_changed` is called at each handshake.

    use: makes what the server needs of both; it may read the files again.
    """

    def __init__(
        self, key_file: Path, certificate_file: Path, use: Callable[[bytes, bytes], T]
    ) -> None:
        self._files = key_file, certificate_file
        self._use = use
        self._pair = b"", b""
        self._refused: object = None  # files that were not used, or why they could not be read

    def read(self) -> T:
        """Return what `use` makes of the present files. Raises OSError if it cannot."""
        key_file, certificate_file = self._files
        present = key_file.read_bytes(), certificate_file.read_bytes()
        try:
            check_certificate(certificate_file, key_file)
        except InvalidValueError as error:
            raise OSError(str(error)) from error
        made = self._use(*present)
        self._pair, self._refused = present, None
        return made

    def read_if_changed(self) -> T | None:
        """Return what `use` makes of changed files, or None to keep the last one."""
        key_file, certificate_file = self._files
        present: tuple[bytes, ...] = ()
        try:
            present = key_file.read_bytes(), certificate_file.read_bytes()
            if present in (self._pair, self._refused):
                return None
            check_certificate(certificate_file, key_file)
            made = self._use(*present)
        except (OSError, InvalidValueError) as error:
            # Another error, such as too many open files, may pass.
            is_final = isinstance(error.__cause__, ssl.SSLError | ValueError)
            refused = present if is_final else str(error)
            if refused != self._refused:
                logger.warning("the certificate is not read again: %s", error)
            self._refused = refused
            return None
        self._pair, self._refused = present, None
        logger.info("the certificate is read again: %s", certificate_file)
        return made
