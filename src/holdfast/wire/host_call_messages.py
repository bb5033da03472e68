"""Parameters and results of `service/*`: calls from programs in the sandbox to functions of the host; pure data."""

from __future__ import annotations

from holdfast.types import Struct
from holdfast.wire.messages import Empty
from holdfast.wire.methods import WireMethod


class HostCallBegun(Struct, frozen=True, tag="called", tag_field="kind"):
    """A program in the sandbox calls; the host answers under `call_id`."""

    seq: int
    call_id: str
    method: str
    body: bytes


class HostCallCancelled(Struct, frozen=True, tag="cancelled", tag_field="kind"):
    """The caller has disconnected, or cancelled the call."""

    seq: int
    call_id: str


HostCallEvent = HostCallBegun | HostCallCancelled


class HostOfferParams(Struct, frozen=True, omit_defaults=True):
    """Offer `service`; callers need the instance, which is a hash of `key`.

    A long poll: the reply has the events after `after_seq`, and acknowledges those up to it.
    """

    service: str
    key: str
    #: From the last reply; it changes when the server restarts, and `seq` then begins again.
    epoch: str = ""
    after_seq: int = 0
    wait_ms: int = 0


class HostOfferResult(Struct, frozen=True):
    epoch: str
    events: tuple[HostCallEvent, ...]


class HostAnswerParams(Struct, frozen=True, omit_defaults=True):
    """The next pieces of an answer, numbered from 1, so that a repeated request adds them once."""

    call_id: str
    key: str
    #: The number of the first piece.
    seq: int
    data: bytes = b""
    #: Further pieces of the same message.
    more: tuple[bytes, ...] = ()
    end: bool = False
    #: Ends the answer with an error for the caller.
    error: HostCallFailure | None = None


class HostCallFailure(Struct, frozen=True):
    code: int
    message: str


class HostAnswerResult(Struct, frozen=True):
    """Sent once there is room for the next piece. `wanted` is false if the caller is gone."""

    wanted: bool


class HostWithdrawParams(Struct, frozen=True):
    service: str
    key: str


class HostCallParams(Struct, frozen=True, omit_defaults=True):
    """Call a service of the host. The reply waits up to `wait_ms` for the first pieces of the answer."""

    service: str
    instance: str
    method: str
    body: bytes = b""
    wait_ms: int = 0
    #: Chosen by the caller, so that it can cancel before the first reply. None: the server chooses.
    call_id: str | None = None


class HostReceiveParams(Struct, frozen=True, omit_defaults=True):
    """Request the pieces after `after_seq`, and acknowledge those up to it."""

    call_id: str
    after_seq: int = 0
    wait_ms: int = 0


class HostAnswerPieces(Struct, frozen=True, omit_defaults=True):
    """Pieces of an answer; `seq` is the number of the last. A failed answer is an error reply instead."""

    call_id: str
    seq: int
    pieces: tuple[bytes, ...] = ()
    ended: bool = False


class HostCancelParams(Struct, frozen=True):
    call_id: str


# --- rows of the method table -----------------------------------------------------------------------------------

HOST_OFFER = WireMethod("service/offer", HostOfferParams, HostOfferResult)
HOST_ANSWER = WireMethod("service/answer", HostAnswerParams, HostAnswerResult)
HOST_WITHDRAW = WireMethod("service/withdraw", HostWithdrawParams, Empty)
HOST_CALL = WireMethod("service/call", HostCallParams, HostAnswerPieces)
HOST_RECEIVE = WireMethod("service/receive", HostReceiveParams, HostAnswerPieces)
HOST_CANCEL = WireMethod("service/cancel", HostCancelParams, Empty)
