"""A call of a service that the host offers, from inside: its answer comes in pieces, as the host makes them.

Touches only the connection. A call is never repeated by itself: whether the host did its work twice would be
nobody's to tell. So open the connection with a `reconnect_deadline` of 0.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import AsyncGenerator
from typing import Final

from holdfast.client.connection import Connection
from holdfast.errors import HoldfastError
from holdfast.wire import messages as m, methods

#: How long one request waits for pieces: it is made again at once.
WAIT_MS: Final = 30_000


async def call_service(
    connection: Connection, service: str, instance: str, method: str, body: bytes
) -> AsyncGenerator[bytes, None]:
    """The pieces of the answer, as they come. Who reads on only when there is room slows the host down.

    Close the generator (`contextlib.aclosing`): a call that is left before its end is called off.
    """
    # Our own id: until the first reply there would be nothing to call it off by.
    call_id = secrets.token_hex(16)
    is_over = False
    try:
        params = m.ServiceCallParams(service, instance, method, body, WAIT_MS, call_id)
        got = await connection.call(methods.SERVICE_CALL, params)
        while True:
            for piece in got.pieces:
                yield piece
            if got.ended:
                is_over = True
                return
            further = m.ServiceReceiveParams(call_id, got.seq, WAIT_MS)
            got = await connection.call(methods.SERVICE_RECEIVE, further)
    except HoldfastError:
        is_over = True
        raise
    finally:
        if not is_over:
            with contextlib.suppress(HoldfastError):  # without a connection it is called off anyway
                await connection.call(methods.SERVICE_CANCEL, m.ServiceCancelParams(call_id))
