"""Whether a confined process failed because of its confinement, as far as its end shows it; pure.

The kernel reports a refused call to the process that made it and to no other: neither a read-only mount nor the
filter leaves a trace outside. So the evidence is indirect, and the rule is stated in docs/confinement.md.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from typing import Final

from holdfast.types import Confinement, ExitStatus

#: How much of the end of each stream is searched: a message of failure is among the last lines.
EVIDENCE_BYTES: Final = 64 * 1024
#: What the C library prints for a call that the filter, a read-only mount, a mask or a rule of Landlock refused.
_REFUSED: Final = tuple(os.strerror(number) for number in (errno.EPERM, errno.EACCES, errno.EROFS))
#: And for one that found no network: by address and, where names cannot be looked up, by name.
_NO_NETWORK: Final = (
    os.strerror(errno.ENETUNREACH),
    "Temporary failure in name resolution",
    "Could not resolve host",
)


def was_denied(confinement: Confinement | None, status: ExitStatus, ends: Iterable[bytes]) -> bool:
    """Whether it failed and one of `ends`, the last bytes of its streams, has the text of a refusal."""
    if confinement is None or status.success or status.signal is not None:
        return False
    texts = [*_REFUSED, *(() if confinement.network == "host" else _NO_NETWORK)]
    wanted = [text.lower().encode() for text in texts]
    return any(text in end.lower() for end in ends for text in wanted)
