"""Takes secrets out of what passes: whole texts, and streams in which a secret may be cut in two; pure.

The key of a provider is known, so it is looked for as it is; a provider that echoes it must not bring it into the
sandbox or into a record.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Final
from urllib.parse import quote

REDACTED: Final = b"[redacted]"
#: What looks like a provider's key, whoever's it is: for records alone, since an agent may well write such text.
_LOOKS_LIKE_A_KEY: Final = re.compile(
    r"\b(?:sk|pk|rk|xai|gsk|hf)[-_][A-Za-z0-9_-]{16,}|\bAIza[A-Za-z0-9_-]{30,}|\b(?:[Bb]earer|BEARER)\s+[A-Za-z0-9._~+/=-]{16,}"
)
#: One of these is in whatever the pattern finds; most texts have none, and to look for them is a tenth of the work.
_SIGNS: Final = ("sk-", "sk_", "pk-", "pk_", "rk-", "rk_", "xai", "gsk", "hf_", "hf-", "AIza", "earer", "EARER")
#: A shorter text is no secret worth hiding, and would be found in every other word.
MIN_SECRET: Final = 6


class Redaction:
    """The secrets, in every way in which they are likely to be written."""

    def __init__(self, secrets: Iterable[str]) -> None:
        forms = {
            form.encode()
            for secret in secrets
            if len(secret) >= MIN_SECRET
            for form in (secret, json.dumps(secret)[1:-1], secret.replace("/", "\\/"), quote(secret, safe=""))
        }
        # The longest first, so that no part of it is left over when a shorter form is part of a longer.
        self._forms = sorted(forms, key=len, reverse=True)

    @staticmethod
    def joined(parts: Iterable[Redaction]) -> Redaction:
        """The secrets of all of them."""
        whole = Redaction(())
        whole._forms = sorted({form for part in parts for form in part._forms}, key=len, reverse=True)
        return whole

    def whole(self, data: bytes) -> bytes:
        for form in self._forms:
            if form in data:
                data = data.replace(form, REDACTED)
        return data

    def text(self, text: str) -> str:
        return self.whole(text.encode(errors="replace")).decode()

    def for_record(self, data: bytes) -> str:
        """As text, without the secrets and without anything that looks like one."""
        text = self.whole(data).decode(errors="replace")
        if not any(sign in text for sign in _SIGNS):
            return text
        return _LOOKS_LIKE_A_KEY.sub(REDACTED.decode(), text)

    def held(self, data: bytes) -> int:
        """How many bytes at the end of `data` may be the beginning of a secret."""
        longest = 0
        for form in self._forms:
            at = max(0, len(data) - len(form) + 1)
            while (at := data.find(form[:1], at)) >= 0:
                if form.startswith(data[at:]):
                    longest = max(longest, len(data) - at)
                    break
                at += 1
        return longest


class RedactedStream:
    """Pieces in, pieces out. Only what may be the beginning of a secret waits for the next piece."""

    def __init__(self, redaction: Redaction) -> None:
        self._redaction = redaction
        self._rest = b""

    def feed(self, piece: bytes) -> bytes:
        data = self._redaction.whole(self._rest + piece if self._rest else piece)
        held = self._redaction.held(data)
        self._rest = data[len(data) - held :]
        return data[: len(data) - held] if held else data

    def end(self) -> bytes:
        rest, self._rest = self._rest, b""
        return rest
