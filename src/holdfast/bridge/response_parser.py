"""One HTTP/1.1 response of a provider, parsed by llhttp: bytes in, the head and the body out. Pure.

llhttp refuses what two parsers could read differently. This module adds the bounds that llhttp lacks.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import httptools

#: Most bytes without a part of the body: a head with its interim responses, chunk extensions, or trailers.
MAX_SILENT_BYTES: Final = 100 * 1024
#: Responses whose body is empty, whatever their headers declare (RFC 9112, section 6.3).
_BODILESS: Final = (204, 304)


class ResponseHead(NamedTuple):
    status: int
    headers: list[tuple[bytes, bytes]]


class MalformedResponse(Exception):
    """The bytes are not a response, or the connection ended in its middle."""


class ResponseParser:
    """Feed it until `is_complete`. The parts of the body of one read are one piece."""

    def __init__(self, method: str) -> None:
        self._is_head_request = method == "HEAD"
        self._llhttp = httptools.HttpResponseParser(self)
        self._headers: list[tuple[bytes, bytes]] = []
        self._pieces: list[bytes] = []
        self._silent_bytes = 0
        self._ends_with_connection = False
        self.head: ResponseHead | None = None
        self.is_complete = False
        #: False if the connection cannot take another request: the provider closes it, or has sent more than asked.
        self.stays_open = False
        self.held_bytes = 0

    def feed(self, data: bytes) -> None:
        """Parse bytes of the connection; `MalformedResponse` if they are not a response."""
        if self.is_complete:
            self.stays_open = False
            return
        self._silent_bytes += len(data)
        try:
            self._llhttp.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            # After the end of the response, the error is about bytes that nothing requested.
            if not self.is_complete:
                raise MalformedResponse(str(error.__context__ or error)) from None
            self.stays_open = False
        if self._silent_bytes > MAX_SILENT_BYTES and not self.is_complete:
            raise MalformedResponse(f"more than {MAX_SILENT_BYTES} bytes without a part of a body")

    def end(self) -> None:
        """Handle the end of the connection; `MalformedResponse` if the response is not complete."""
        if self._ends_with_connection:
            self.is_complete = True
        if not self.is_complete:
            raise MalformedResponse("the connection ended in the middle of a response")

    def take(self) -> bytes:
        """Return the parts of the body since the last call, which may be none."""
        pieces, self._pieces = self._pieces, []
        self.held_bytes = 0
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    # --- called by llhttp ------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self.is_complete:
            self.stays_open = False

    def on_header(self, name: bytes, value: bytes) -> None:
        # Trailers, which come after the head, are dropped.
        if self.head is None:
            self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        status = self._llhttp.get_status_code()
        if self.is_complete or status < 200:
            # An interim response, such as 103, precedes the response itself.
            self._headers = []
            return
        framing = {name.lower(): value.strip() for name, value in self._headers}
        coding = framing.get(b"transfer-encoding")
        if coding is not None and coding.lower() != b"chunked":
            raise MalformedResponse(f"the transfer coding {coding.decode(errors='replace')!r} is not supported")
        is_sized = coding is not None or b"content-length" in framing
        self._ends_with_connection = not is_sized and status not in _BODILESS
        self.head = ResponseHead(status, self._headers)
        # llhttp does not know the request and would wait for a body.
        self.is_complete = self._is_head_request

    def on_body(self, body: bytes) -> None:
        self._silent_bytes = 0
        if not self.is_complete:
            self._pieces.append(body)
            self.held_bytes += len(body)

    def on_message_complete(self) -> None:
        if self.head is not None and not self.is_complete:
            self.is_complete = True
            self.stays_open = self._llhttp.should_keep_alive()
