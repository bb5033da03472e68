"""`holdfast.sync.ServiceClient`: `ServiceClient` for code without an event loop.

One thread runs an event loop for each client; every call runs there while the calling thread waits.
"""

from __future__ import annotations

from typing import Any

from holdfast.service.client import service_client
from holdfast.sync.facade import Blocking, Closing, LoopThread, Streaming


class ServiceClient(Closing[service_client.ServiceClient]):
    """`holdfast.ServiceClient`, blocking, for use from any number of threads.

    Leaving its `with` block, or `close`, closes the connection. Sessions stay open.
    """

    def __init__(self, address: str | None = None, **options: Any) -> None:
        """`address` and `options` are those of `holdfast.ServiceClient`."""
        inner = service_client.ServiceClient(address, **options)
        super().__init__(LoopThread(), inner)

    def close(self) -> None:
        """Close the connection. Closing twice is no error."""
        if not self._loop.closed:
            try:
                self._loop.run(self._inner.aclose())
            finally:
                self._loop.close()

    create_session = Blocking(service_client.ServiceClient.create_session)
    get_session = Blocking(service_client.ServiceClient.get_session)
    list_sessions = Blocking(service_client.ServiceClient.list_sessions)
    close_session = Blocking(service_client.ServiceClient.close_session)
    create_preview = Blocking(service_client.ServiceClient.create_preview)
    send_input = Blocking(service_client.ServiceClient.send_input)
    read_output = Blocking(service_client.ServiceClient.read_output)
    stream_output = Streaming(service_client.ServiceClient.stream_output)
    run_command = Blocking(service_client.ServiceClient.run_command)
    events = Streaming(service_client.ServiceClient.events)
    audit = Streaming(service_client.ServiceClient.audit)
    list_approvals = Blocking(service_client.ServiceClient.list_approvals)
    answer_approval = Blocking(service_client.ServiceClient.answer_approval)
    record_model_calls = Blocking(service_client.ServiceClient.record_model_calls)
