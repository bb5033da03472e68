"""The URLs of previews: below a host name of their own, or below `/preview/SESSION/PORT/`; pure."""

from __future__ import annotations

import ipaddress
import re
from typing import Final
from urllib.parse import urlsplit

from holdfast.service.problems import Invalid

#: The parameter of a URL that has the ticket.
TICKET: Final = "holdfast_ticket"
PREFIX: Final = "/preview/"
_PATH: Final = re.compile(rb"/preview/([A-Za-z0-9._-]{1,256})/([0-9]{1,5})(/.*)?", re.DOTALL)


class PreviewUrls:
    """The base of the URLs, `SCHEME://HOST[:PORT]`."""

    def __init__(self, base: str) -> None:
        parts = urlsplit(base)
        if (
            parts.scheme not in ("http", "https")
            or not parts.hostname
            or parts.path not in ("", "/")
            or parts.query
        ):
            raise Invalid(
                f"preview_url: {base!r} is not http://HOST[:PORT] or https://HOST[:PORT]", reason="BAD_URL"
            )
        self.secure = parts.scheme == "https"
        self._scheme = parts.scheme
        self._netloc = parts.netloc
        self._host = parts.hostname

    def of(self, preview_id: str, session_id: str, port: int, ticket: str) -> tuple[str, str]:
        """Return the URL of a preview, and its URL below the path."""
        query = f"?{TICKET}={ticket}"
        path_url = f"{self._scheme}://{self._netloc}{PREFIX}{session_id}/{port}/{query}"
        if _is_address(self._host):
            return path_url, path_url
        return f"{self._scheme}://{preview_id}.{self._netloc}/{query}", path_url

    def preview_id(self, host: str) -> str | None:
        """Return the id of a preview in a `Host` header; None for the name that all previews share."""
        name = host.strip().lower().rpartition(":")[0] if re.search(r":\d+$", host) else host.strip().lower()
        label = name.removesuffix("." + self._host)
        return None if _is_address(self._host) or label == name else label


def split_path(raw: bytes) -> tuple[str, int, bytes] | None:
    """Return the session, the port and the rest of a path below `/preview/`; None for another path."""
    match = _PATH.fullmatch(raw)
    return None if match is None else (match[1].decode("latin-1"), int(match[2]), match[3] or b"")


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
