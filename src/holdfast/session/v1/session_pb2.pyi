import datetime

from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SessionState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    UNKNOWN: _ClassVar[SessionState]
    RUNNING: _ClassVar[SessionState]
    BUSY: _ClassVar[SessionState]
    IDLE: _ClassVar[SessionState]
    CLOSING: _ClassVar[SessionState]
    CLOSED: _ClassVar[SessionState]
    ERROR: _ClassVar[SessionState]

class SessionKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SESSION_KIND_UNSPECIFIED: _ClassVar[SessionKind]
    TERMINAL: _ClassVar[SessionKind]
    SHELL: _ClassVar[SessionKind]

class CloseMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    GRACEFUL: _ClassVar[CloseMode]
    FORCE: _ClassVar[CloseMode]
UNKNOWN: SessionState
RUNNING: SessionState
BUSY: SessionState
IDLE: SessionState
CLOSING: SessionState
CLOSED: SessionState
ERROR: SessionState
SESSION_KIND_UNSPECIFIED: SessionKind
TERMINAL: SessionKind
SHELL: SessionKind
GRACEFUL: CloseMode
FORCE: CloseMode

class OutputToken(_message.Message):
    __slots__ = ("value",)
    VALUE_FIELD_NUMBER: _ClassVar[int]
    value: str
    def __init__(self, value: _Optional[str] = ...) -> None: ...

class SessionPolicy(_message.Message):
    __slots__ = ("idle_timeout_seconds", "max_lifetime_seconds", "allow_background_processes", "inherit_agent_workspace", "profile", "require", "network", "resources", "ports")
    IDLE_TIMEOUT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    MAX_LIFETIME_SECONDS_FIELD_NUMBER: _ClassVar[int]
    ALLOW_BACKGROUND_PROCESSES_FIELD_NUMBER: _ClassVar[int]
    INHERIT_AGENT_WORKSPACE_FIELD_NUMBER: _ClassVar[int]
    PROFILE_FIELD_NUMBER: _ClassVar[int]
    REQUIRE_FIELD_NUMBER: _ClassVar[int]
    NETWORK_FIELD_NUMBER: _ClassVar[int]
    RESOURCES_FIELD_NUMBER: _ClassVar[int]
    PORTS_FIELD_NUMBER: _ClassVar[int]
    idle_timeout_seconds: int
    max_lifetime_seconds: int
    allow_background_processes: bool
    inherit_agent_workspace: bool
    profile: str
    require: _containers.RepeatedScalarFieldContainer[str]
    network: str
    resources: ResourceLimits
    ports: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, idle_timeout_seconds: _Optional[int] = ..., max_lifetime_seconds: _Optional[int] = ..., allow_background_processes: _Optional[bool] = ..., inherit_agent_workspace: _Optional[bool] = ..., profile: _Optional[str] = ..., require: _Optional[_Iterable[str]] = ..., network: _Optional[str] = ..., resources: _Optional[_Union[ResourceLimits, _Mapping]] = ..., ports: _Optional[_Iterable[str]] = ...) -> None: ...

class ResourceLimits(_message.Message):
    __slots__ = ("cpu_cores", "cpu_seconds", "memory_bytes", "processes", "output_bytes", "file_size_bytes")
    CPU_CORES_FIELD_NUMBER: _ClassVar[int]
    CPU_SECONDS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    PROCESSES_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_BYTES_FIELD_NUMBER: _ClassVar[int]
    FILE_SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    cpu_cores: float
    cpu_seconds: int
    memory_bytes: int
    processes: int
    output_bytes: int
    file_size_bytes: int
    def __init__(self, cpu_cores: _Optional[float] = ..., cpu_seconds: _Optional[int] = ..., memory_bytes: _Optional[int] = ..., processes: _Optional[int] = ..., output_bytes: _Optional[int] = ..., file_size_bytes: _Optional[int] = ...) -> None: ...

class CreateSessionRequest(_message.Message):
    __slots__ = ("agent_id", "initial_cwd", "environment", "policy", "kind", "sandbox", "shell", "cols", "rows", "request_id", "labels")
    class EnvironmentEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    AGENT_ID_FIELD_NUMBER: _ClassVar[int]
    INITIAL_CWD_FIELD_NUMBER: _ClassVar[int]
    ENVIRONMENT_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    SANDBOX_FIELD_NUMBER: _ClassVar[int]
    SHELL_FIELD_NUMBER: _ClassVar[int]
    COLS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    agent_id: str
    initial_cwd: str
    environment: _containers.ScalarMap[str, str]
    policy: SessionPolicy
    kind: SessionKind
    sandbox: str
    shell: str
    cols: int
    rows: int
    request_id: str
    labels: _containers.ScalarMap[str, str]
    def __init__(self, agent_id: _Optional[str] = ..., initial_cwd: _Optional[str] = ..., environment: _Optional[_Mapping[str, str]] = ..., policy: _Optional[_Union[SessionPolicy, _Mapping]] = ..., kind: _Optional[_Union[SessionKind, str]] = ..., sandbox: _Optional[str] = ..., shell: _Optional[str] = ..., cols: _Optional[int] = ..., rows: _Optional[int] = ..., request_id: _Optional[str] = ..., labels: _Optional[_Mapping[str, str]] = ...) -> None: ...

class CreateSessionResponse(_message.Message):
    __slots__ = ("session_id", "prompt", "metadata", "token", "state")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    prompt: str
    metadata: SessionMetadata
    token: OutputToken
    state: SessionState
    def __init__(self, session_id: _Optional[str] = ..., prompt: _Optional[str] = ..., metadata: _Optional[_Union[SessionMetadata, _Mapping]] = ..., token: _Optional[_Union[OutputToken, _Mapping]] = ..., state: _Optional[_Union[SessionState, str]] = ...) -> None: ...

class SessionMetadata(_message.Message):
    __slots__ = ("session_id", "agent_id", "kind", "sandbox", "sandbox_mode", "initial_cwd", "cwd", "environment", "policy", "created_at", "last_activity_at", "expires_at", "closed_at", "labels", "cols", "rows", "enforced", "unenforced", "commands_run", "shell", "close_reason", "summary", "usage")
    class EnvironmentEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    AGENT_ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    SANDBOX_FIELD_NUMBER: _ClassVar[int]
    SANDBOX_MODE_FIELD_NUMBER: _ClassVar[int]
    INITIAL_CWD_FIELD_NUMBER: _ClassVar[int]
    CWD_FIELD_NUMBER: _ClassVar[int]
    ENVIRONMENT_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    CREATED_AT_FIELD_NUMBER: _ClassVar[int]
    LAST_ACTIVITY_AT_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_AT_FIELD_NUMBER: _ClassVar[int]
    CLOSED_AT_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    COLS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    ENFORCED_FIELD_NUMBER: _ClassVar[int]
    UNENFORCED_FIELD_NUMBER: _ClassVar[int]
    COMMANDS_RUN_FIELD_NUMBER: _ClassVar[int]
    SHELL_FIELD_NUMBER: _ClassVar[int]
    CLOSE_REASON_FIELD_NUMBER: _ClassVar[int]
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    agent_id: str
    kind: SessionKind
    sandbox: str
    sandbox_mode: str
    initial_cwd: str
    cwd: str
    environment: _containers.ScalarMap[str, str]
    policy: SessionPolicy
    created_at: _timestamp_pb2.Timestamp
    last_activity_at: _timestamp_pb2.Timestamp
    expires_at: _timestamp_pb2.Timestamp
    closed_at: _timestamp_pb2.Timestamp
    labels: _containers.ScalarMap[str, str]
    cols: int
    rows: int
    enforced: _containers.RepeatedScalarFieldContainer[str]
    unenforced: _containers.RepeatedScalarFieldContainer[str]
    commands_run: int
    shell: str
    close_reason: str
    summary: str
    usage: ResourceUsage
    def __init__(self, session_id: _Optional[str] = ..., agent_id: _Optional[str] = ..., kind: _Optional[_Union[SessionKind, str]] = ..., sandbox: _Optional[str] = ..., sandbox_mode: _Optional[str] = ..., initial_cwd: _Optional[str] = ..., cwd: _Optional[str] = ..., environment: _Optional[_Mapping[str, str]] = ..., policy: _Optional[_Union[SessionPolicy, _Mapping]] = ..., created_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., last_activity_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., expires_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., closed_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., labels: _Optional[_Mapping[str, str]] = ..., cols: _Optional[int] = ..., rows: _Optional[int] = ..., enforced: _Optional[_Iterable[str]] = ..., unenforced: _Optional[_Iterable[str]] = ..., commands_run: _Optional[int] = ..., shell: _Optional[str] = ..., close_reason: _Optional[str] = ..., summary: _Optional[str] = ..., usage: _Optional[_Union[ResourceUsage, _Mapping]] = ...) -> None: ...

class ResourceUsage(_message.Message):
    __slots__ = ("process_count", "cpu_percent", "cpu_seconds", "memory_bytes", "read_bytes", "written_bytes", "session_idle", "long_running_flag", "sampled_at", "output_bytes")
    PROCESS_COUNT_FIELD_NUMBER: _ClassVar[int]
    CPU_PERCENT_FIELD_NUMBER: _ClassVar[int]
    CPU_SECONDS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    READ_BYTES_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    SESSION_IDLE_FIELD_NUMBER: _ClassVar[int]
    LONG_RUNNING_FLAG_FIELD_NUMBER: _ClassVar[int]
    SAMPLED_AT_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_BYTES_FIELD_NUMBER: _ClassVar[int]
    process_count: int
    cpu_percent: float
    cpu_seconds: float
    memory_bytes: int
    read_bytes: int
    written_bytes: int
    session_idle: bool
    long_running_flag: bool
    sampled_at: _timestamp_pb2.Timestamp
    output_bytes: int
    def __init__(self, process_count: _Optional[int] = ..., cpu_percent: _Optional[float] = ..., cpu_seconds: _Optional[float] = ..., memory_bytes: _Optional[int] = ..., read_bytes: _Optional[int] = ..., written_bytes: _Optional[int] = ..., session_idle: _Optional[bool] = ..., long_running_flag: _Optional[bool] = ..., sampled_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., output_bytes: _Optional[int] = ...) -> None: ...

class ControlAction(_message.Message):
    __slots__ = ("type", "cols", "rows")
    class Type(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        CTRL_C: _ClassVar[ControlAction.Type]
        CTRL_D: _ClassVar[ControlAction.Type]
        SIGINT: _ClassVar[ControlAction.Type]
        SIGTERM: _ClassVar[ControlAction.Type]
        SIGKILL: _ClassVar[ControlAction.Type]
        RESIZE: _ClassVar[ControlAction.Type]
    CTRL_C: ControlAction.Type
    CTRL_D: ControlAction.Type
    SIGINT: ControlAction.Type
    SIGTERM: ControlAction.Type
    SIGKILL: ControlAction.Type
    RESIZE: ControlAction.Type
    TYPE_FIELD_NUMBER: _ClassVar[int]
    COLS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    type: ControlAction.Type
    cols: int
    rows: int
    def __init__(self, type: _Optional[_Union[ControlAction.Type, str]] = ..., cols: _Optional[int] = ..., rows: _Optional[int] = ...) -> None: ...

class SendInputRequest(_message.Message):
    __slots__ = ("session_id", "data", "actions", "request_id")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    ACTIONS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    data: bytes
    actions: _containers.RepeatedCompositeFieldContainer[ControlAction]
    request_id: str
    def __init__(self, session_id: _Optional[str] = ..., data: _Optional[bytes] = ..., actions: _Optional[_Iterable[_Union[ControlAction, _Mapping]]] = ..., request_id: _Optional[str] = ...) -> None: ...

class SendInputResponse(_message.Message):
    __slots__ = ("accepted", "command_id", "state", "approval_id", "queue_busy")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    COMMAND_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    APPROVAL_ID_FIELD_NUMBER: _ClassVar[int]
    QUEUE_BUSY_FIELD_NUMBER: _ClassVar[int]
    accepted: bool
    command_id: str
    state: SessionState
    approval_id: str
    queue_busy: bool
    def __init__(self, accepted: _Optional[bool] = ..., command_id: _Optional[str] = ..., state: _Optional[_Union[SessionState, str]] = ..., approval_id: _Optional[str] = ..., queue_busy: _Optional[bool] = ...) -> None: ...

class PromptInfo(_message.Message):
    __slots__ = ("text", "awaiting_input", "password")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    AWAITING_INPUT_FIELD_NUMBER: _ClassVar[int]
    PASSWORD_FIELD_NUMBER: _ClassVar[int]
    text: str
    awaiting_input: bool
    password: bool
    def __init__(self, text: _Optional[str] = ..., awaiting_input: _Optional[bool] = ..., password: _Optional[bool] = ...) -> None: ...

class ReadOutputRequest(_message.Message):
    __slots__ = ("session_id", "since", "max_bytes", "wait_timeout_ms")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    MAX_BYTES_FIELD_NUMBER: _ClassVar[int]
    WAIT_TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    since: OutputToken
    max_bytes: int
    wait_timeout_ms: int
    def __init__(self, session_id: _Optional[str] = ..., since: _Optional[_Union[OutputToken, _Mapping]] = ..., max_bytes: _Optional[int] = ..., wait_timeout_ms: _Optional[int] = ...) -> None: ...

class OutputChunk(_message.Message):
    __slots__ = ("session_id", "token", "payload", "truncated", "exit_code", "prompt", "state", "timestamp", "stream", "command_id", "skipped_bytes")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    TRUNCATED_FIELD_NUMBER: _ClassVar[int]
    EXIT_CODE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    TIMESTAMP_FIELD_NUMBER: _ClassVar[int]
    STREAM_FIELD_NUMBER: _ClassVar[int]
    COMMAND_ID_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_BYTES_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    token: OutputToken
    payload: bytes
    truncated: bool
    exit_code: int
    prompt: PromptInfo
    state: SessionState
    timestamp: _timestamp_pb2.Timestamp
    stream: str
    command_id: str
    skipped_bytes: int
    def __init__(self, session_id: _Optional[str] = ..., token: _Optional[_Union[OutputToken, _Mapping]] = ..., payload: _Optional[bytes] = ..., truncated: _Optional[bool] = ..., exit_code: _Optional[int] = ..., prompt: _Optional[_Union[PromptInfo, _Mapping]] = ..., state: _Optional[_Union[SessionState, str]] = ..., timestamp: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., stream: _Optional[str] = ..., command_id: _Optional[str] = ..., skipped_bytes: _Optional[int] = ...) -> None: ...

class ReadOutputResponse(_message.Message):
    __slots__ = ("chunks", "state", "token", "more")
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    chunks: _containers.RepeatedCompositeFieldContainer[OutputChunk]
    state: SessionState
    token: OutputToken
    more: bool
    def __init__(self, chunks: _Optional[_Iterable[_Union[OutputChunk, _Mapping]]] = ..., state: _Optional[_Union[SessionState, str]] = ..., token: _Optional[_Union[OutputToken, _Mapping]] = ..., more: _Optional[bool] = ...) -> None: ...

class StreamOutputRequest(_message.Message):
    __slots__ = ("session_id", "since")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    since: OutputToken
    def __init__(self, session_id: _Optional[str] = ..., since: _Optional[_Union[OutputToken, _Mapping]] = ...) -> None: ...

class GetSessionRequest(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    def __init__(self, session_id: _Optional[str] = ...) -> None: ...

class GetSessionResponse(_message.Message):
    __slots__ = ("metadata", "state")
    METADATA_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    metadata: SessionMetadata
    state: SessionState
    def __init__(self, metadata: _Optional[_Union[SessionMetadata, _Mapping]] = ..., state: _Optional[_Union[SessionState, str]] = ...) -> None: ...

class ListSessionsRequest(_message.Message):
    __slots__ = ("agent_id", "states", "labels", "page_size", "page_token")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    AGENT_ID_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    agent_id: str
    states: _containers.RepeatedScalarFieldContainer[SessionState]
    labels: _containers.ScalarMap[str, str]
    page_size: int
    page_token: str
    def __init__(self, agent_id: _Optional[str] = ..., states: _Optional[_Iterable[_Union[SessionState, str]]] = ..., labels: _Optional[_Mapping[str, str]] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListSessionsResponse(_message.Message):
    __slots__ = ("sessions", "next_page_token")
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    sessions: _containers.RepeatedCompositeFieldContainer[GetSessionResponse]
    next_page_token: str
    def __init__(self, sessions: _Optional[_Iterable[_Union[GetSessionResponse, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class CloseSessionRequest(_message.Message):
    __slots__ = ("session_id", "mode")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    mode: CloseMode
    def __init__(self, session_id: _Optional[str] = ..., mode: _Optional[_Union[CloseMode, str]] = ...) -> None: ...

class CloseSessionResponse(_message.Message):
    __slots__ = ("final_state", "summary")
    FINAL_STATE_FIELD_NUMBER: _ClassVar[int]
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    final_state: SessionState
    summary: str
    def __init__(self, final_state: _Optional[_Union[SessionState, str]] = ..., summary: _Optional[str] = ...) -> None: ...

class SubscribeSessionEventsRequest(_message.Message):
    __slots__ = ("session_id", "since", "types")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    TYPES_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    since: str
    types: _containers.RepeatedScalarFieldContainer[SessionEvent.Type]
    def __init__(self, session_id: _Optional[str] = ..., since: _Optional[str] = ..., types: _Optional[_Iterable[_Union[SessionEvent.Type, str]]] = ...) -> None: ...

class SessionEvent(_message.Message):
    __slots__ = ("session_id", "type", "detail", "token", "timestamp", "approval_id", "state")
    class Type(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        IDLE_WARNING: _ClassVar[SessionEvent.Type]
        IDLE_TIMEOUT: _ClassVar[SessionEvent.Type]
        RESOURCE_THRESHOLD: _ClassVar[SessionEvent.Type]
        POLICY_VIOLATION: _ClassVar[SessionEvent.Type]
        SESSION_CLOSED: _ClassVar[SessionEvent.Type]
        SESSION_CREATED: _ClassVar[SessionEvent.Type]
        APPROVAL_REQUESTED: _ClassVar[SessionEvent.Type]
        APPROVAL_ANSWERED: _ClassVar[SessionEvent.Type]
        LIFETIME_WARNING: _ClassVar[SessionEvent.Type]
        SESSION_ERROR: _ClassVar[SessionEvent.Type]
        COMMAND_ENDED: _ClassVar[SessionEvent.Type]
        TAKEN_OVER: _ClassVar[SessionEvent.Type]
        RELEASED: _ClassVar[SessionEvent.Type]
        SANDBOX_ENDING: _ClassVar[SessionEvent.Type]
        MODEL_CALL: _ClassVar[SessionEvent.Type]
    IDLE_WARNING: SessionEvent.Type
    IDLE_TIMEOUT: SessionEvent.Type
    RESOURCE_THRESHOLD: SessionEvent.Type
    POLICY_VIOLATION: SessionEvent.Type
    SESSION_CLOSED: SessionEvent.Type
    SESSION_CREATED: SessionEvent.Type
    APPROVAL_REQUESTED: SessionEvent.Type
    APPROVAL_ANSWERED: SessionEvent.Type
    LIFETIME_WARNING: SessionEvent.Type
    SESSION_ERROR: SessionEvent.Type
    COMMAND_ENDED: SessionEvent.Type
    TAKEN_OVER: SessionEvent.Type
    RELEASED: SessionEvent.Type
    SANDBOX_ENDING: SessionEvent.Type
    MODEL_CALL: SessionEvent.Type
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    TIMESTAMP_FIELD_NUMBER: _ClassVar[int]
    APPROVAL_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    type: SessionEvent.Type
    detail: str
    token: str
    timestamp: _timestamp_pb2.Timestamp
    approval_id: str
    state: SessionState
    def __init__(self, session_id: _Optional[str] = ..., type: _Optional[_Union[SessionEvent.Type, str]] = ..., detail: _Optional[str] = ..., token: _Optional[str] = ..., timestamp: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., approval_id: _Optional[str] = ..., state: _Optional[_Union[SessionState, str]] = ...) -> None: ...

class RunCommandRequest(_message.Message):
    __slots__ = ("session_id", "create", "command", "timeout_ms", "max_bytes", "request_id")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    CREATE_FIELD_NUMBER: _ClassVar[int]
    COMMAND_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    MAX_BYTES_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    create: CreateSessionRequest
    command: str
    timeout_ms: int
    max_bytes: int
    request_id: str
    def __init__(self, session_id: _Optional[str] = ..., create: _Optional[_Union[CreateSessionRequest, _Mapping]] = ..., command: _Optional[str] = ..., timeout_ms: _Optional[int] = ..., max_bytes: _Optional[int] = ..., request_id: _Optional[str] = ...) -> None: ...

class RunCommandResponse(_message.Message):
    __slots__ = ("command_id", "exit_code", "stdout", "stderr", "timed_out", "truncated", "duration_ms", "state", "cwd", "approval_id")
    COMMAND_ID_FIELD_NUMBER: _ClassVar[int]
    EXIT_CODE_FIELD_NUMBER: _ClassVar[int]
    STDOUT_FIELD_NUMBER: _ClassVar[int]
    STDERR_FIELD_NUMBER: _ClassVar[int]
    TIMED_OUT_FIELD_NUMBER: _ClassVar[int]
    TRUNCATED_FIELD_NUMBER: _ClassVar[int]
    DURATION_MS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    CWD_FIELD_NUMBER: _ClassVar[int]
    APPROVAL_ID_FIELD_NUMBER: _ClassVar[int]
    command_id: str
    exit_code: int
    stdout: bytes
    stderr: bytes
    timed_out: bool
    truncated: bool
    duration_ms: int
    state: SessionState
    cwd: str
    approval_id: str
    def __init__(self, command_id: _Optional[str] = ..., exit_code: _Optional[int] = ..., stdout: _Optional[bytes] = ..., stderr: _Optional[bytes] = ..., timed_out: _Optional[bool] = ..., truncated: _Optional[bool] = ..., duration_ms: _Optional[int] = ..., state: _Optional[_Union[SessionState, str]] = ..., cwd: _Optional[str] = ..., approval_id: _Optional[str] = ...) -> None: ...

class ListAuditRequest(_message.Message):
    __slots__ = ("session_id", "agent_id", "kinds", "command_id", "since", "until", "contains", "page_size", "page_token", "newest_first")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    AGENT_ID_FIELD_NUMBER: _ClassVar[int]
    KINDS_FIELD_NUMBER: _ClassVar[int]
    COMMAND_ID_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    UNTIL_FIELD_NUMBER: _ClassVar[int]
    CONTAINS_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    NEWEST_FIRST_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    agent_id: str
    kinds: _containers.RepeatedScalarFieldContainer[str]
    command_id: str
    since: _timestamp_pb2.Timestamp
    until: _timestamp_pb2.Timestamp
    contains: str
    page_size: int
    page_token: str
    newest_first: bool
    def __init__(self, session_id: _Optional[str] = ..., agent_id: _Optional[str] = ..., kinds: _Optional[_Iterable[str]] = ..., command_id: _Optional[str] = ..., since: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., until: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., contains: _Optional[str] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ..., newest_first: _Optional[bool] = ...) -> None: ...

class AuditRecord(_message.Message):
    __slots__ = ("session_id", "seq", "at", "agent_id", "kind", "command_id", "body", "hash")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    AGENT_ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    COMMAND_ID_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    HASH_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    seq: int
    at: _timestamp_pb2.Timestamp
    agent_id: str
    kind: str
    command_id: str
    body: str
    hash: str
    def __init__(self, session_id: _Optional[str] = ..., seq: _Optional[int] = ..., at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., agent_id: _Optional[str] = ..., kind: _Optional[str] = ..., command_id: _Optional[str] = ..., body: _Optional[str] = ..., hash: _Optional[str] = ...) -> None: ...

class ListAuditResponse(_message.Message):
    __slots__ = ("records", "next_page_token")
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    records: _containers.RepeatedCompositeFieldContainer[AuditRecord]
    next_page_token: str
    def __init__(self, records: _Optional[_Iterable[_Union[AuditRecord, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class ListApprovalsRequest(_message.Message):
    __slots__ = ("session_id", "ended")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    ended: bool
    def __init__(self, session_id: _Optional[str] = ..., ended: _Optional[bool] = ...) -> None: ...

class Approval(_message.Message):
    __slots__ = ("approval_id", "session_id", "agent_id", "command", "reason", "asked_at", "expires_at", "outcome", "answered_by", "comment", "rule", "command_id")
    APPROVAL_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    AGENT_ID_FIELD_NUMBER: _ClassVar[int]
    COMMAND_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    ASKED_AT_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_AT_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    ANSWERED_BY_FIELD_NUMBER: _ClassVar[int]
    COMMENT_FIELD_NUMBER: _ClassVar[int]
    RULE_FIELD_NUMBER: _ClassVar[int]
    COMMAND_ID_FIELD_NUMBER: _ClassVar[int]
    approval_id: str
    session_id: str
    agent_id: str
    command: str
    reason: str
    asked_at: _timestamp_pb2.Timestamp
    expires_at: _timestamp_pb2.Timestamp
    outcome: str
    answered_by: str
    comment: str
    rule: str
    command_id: str
    def __init__(self, approval_id: _Optional[str] = ..., session_id: _Optional[str] = ..., agent_id: _Optional[str] = ..., command: _Optional[str] = ..., reason: _Optional[str] = ..., asked_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., expires_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., outcome: _Optional[str] = ..., answered_by: _Optional[str] = ..., comment: _Optional[str] = ..., rule: _Optional[str] = ..., command_id: _Optional[str] = ...) -> None: ...

class ListApprovalsResponse(_message.Message):
    __slots__ = ("approvals",)
    APPROVALS_FIELD_NUMBER: _ClassVar[int]
    approvals: _containers.RepeatedCompositeFieldContainer[Approval]
    def __init__(self, approvals: _Optional[_Iterable[_Union[Approval, _Mapping]]] = ...) -> None: ...

class AnswerApprovalRequest(_message.Message):
    __slots__ = ("approval_id", "approve", "comment")
    APPROVAL_ID_FIELD_NUMBER: _ClassVar[int]
    APPROVE_FIELD_NUMBER: _ClassVar[int]
    COMMENT_FIELD_NUMBER: _ClassVar[int]
    approval_id: str
    approve: bool
    comment: str
    def __init__(self, approval_id: _Optional[str] = ..., approve: _Optional[bool] = ..., comment: _Optional[str] = ...) -> None: ...

class AnswerApprovalResponse(_message.Message):
    __slots__ = ("outcome",)
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    outcome: str
    def __init__(self, outcome: _Optional[str] = ...) -> None: ...

class CreatePreviewRequest(_message.Message):
    __slots__ = ("session_id", "port", "lifetime_seconds")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    LIFETIME_SECONDS_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    port: int
    lifetime_seconds: int
    def __init__(self, session_id: _Optional[str] = ..., port: _Optional[int] = ..., lifetime_seconds: _Optional[int] = ...) -> None: ...

class CreatePreviewResponse(_message.Message):
    __slots__ = ("preview_id", "session_id", "port", "url", "path_url", "expires_at")
    PREVIEW_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    URL_FIELD_NUMBER: _ClassVar[int]
    PATH_URL_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_AT_FIELD_NUMBER: _ClassVar[int]
    preview_id: str
    session_id: str
    port: int
    url: str
    path_url: str
    expires_at: _timestamp_pb2.Timestamp
    def __init__(self, preview_id: _Optional[str] = ..., session_id: _Optional[str] = ..., port: _Optional[int] = ..., url: _Optional[str] = ..., path_url: _Optional[str] = ..., expires_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class GetCallerRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetCallerResponse(_message.Message):
    __slots__ = ("agent_id", "role", "version")
    AGENT_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    agent_id: str
    role: str
    version: str
    def __init__(self, agent_id: _Optional[str] = ..., role: _Optional[str] = ..., version: _Optional[str] = ...) -> None: ...

class ListSummariesRequest(_message.Message):
    __slots__ = ("agent_id", "states", "labels", "search", "sandbox", "oldest_first", "page_size", "page_token")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    AGENT_ID_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    SEARCH_FIELD_NUMBER: _ClassVar[int]
    SANDBOX_FIELD_NUMBER: _ClassVar[int]
    OLDEST_FIRST_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    agent_id: str
    states: _containers.RepeatedScalarFieldContainer[SessionState]
    labels: _containers.ScalarMap[str, str]
    search: str
    sandbox: str
    oldest_first: bool
    page_size: int
    page_token: str
    def __init__(self, agent_id: _Optional[str] = ..., states: _Optional[_Iterable[_Union[SessionState, str]]] = ..., labels: _Optional[_Mapping[str, str]] = ..., search: _Optional[str] = ..., sandbox: _Optional[str] = ..., oldest_first: _Optional[bool] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class SessionSummary(_message.Message):
    __slots__ = ("session_id", "agent_id", "kind", "sandbox", "state", "created_at", "last_activity_at", "closed_at", "labels", "commands_run", "close_reason", "usage", "command", "command_at", "exit_code", "approvals", "cpu_history")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    AGENT_ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    SANDBOX_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    CREATED_AT_FIELD_NUMBER: _ClassVar[int]
    LAST_ACTIVITY_AT_FIELD_NUMBER: _ClassVar[int]
    CLOSED_AT_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    COMMANDS_RUN_FIELD_NUMBER: _ClassVar[int]
    CLOSE_REASON_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    COMMAND_FIELD_NUMBER: _ClassVar[int]
    COMMAND_AT_FIELD_NUMBER: _ClassVar[int]
    EXIT_CODE_FIELD_NUMBER: _ClassVar[int]
    APPROVALS_FIELD_NUMBER: _ClassVar[int]
    CPU_HISTORY_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    agent_id: str
    kind: SessionKind
    sandbox: str
    state: SessionState
    created_at: _timestamp_pb2.Timestamp
    last_activity_at: _timestamp_pb2.Timestamp
    closed_at: _timestamp_pb2.Timestamp
    labels: _containers.ScalarMap[str, str]
    commands_run: int
    close_reason: str
    usage: ResourceUsage
    command: str
    command_at: _timestamp_pb2.Timestamp
    exit_code: int
    approvals: int
    cpu_history: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, session_id: _Optional[str] = ..., agent_id: _Optional[str] = ..., kind: _Optional[_Union[SessionKind, str]] = ..., sandbox: _Optional[str] = ..., state: _Optional[_Union[SessionState, str]] = ..., created_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., last_activity_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., closed_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., labels: _Optional[_Mapping[str, str]] = ..., commands_run: _Optional[int] = ..., close_reason: _Optional[str] = ..., usage: _Optional[_Union[ResourceUsage, _Mapping]] = ..., command: _Optional[str] = ..., command_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., exit_code: _Optional[int] = ..., approvals: _Optional[int] = ..., cpu_history: _Optional[_Iterable[float]] = ...) -> None: ...

class ListSummariesResponse(_message.Message):
    __slots__ = ("sessions", "next_page_token", "counts")
    class CountsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    sessions: _containers.RepeatedCompositeFieldContainer[SessionSummary]
    next_page_token: str
    counts: _containers.ScalarMap[str, int]
    def __init__(self, sessions: _Optional[_Iterable[_Union[SessionSummary, _Mapping]]] = ..., next_page_token: _Optional[str] = ..., counts: _Optional[_Mapping[str, int]] = ...) -> None: ...

class WatchSessionsRequest(_message.Message):
    __slots__ = ("session_ids", "only")
    SESSION_IDS_FIELD_NUMBER: _ClassVar[int]
    ONLY_FIELD_NUMBER: _ClassVar[int]
    session_ids: _containers.RepeatedScalarFieldContainer[str]
    only: bool
    def __init__(self, session_ids: _Optional[_Iterable[str]] = ..., only: _Optional[bool] = ...) -> None: ...

class SessionChange(_message.Message):
    __slots__ = ("session", "reload")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    RELOAD_FIELD_NUMBER: _ClassVar[int]
    session: SessionSummary
    reload: bool
    def __init__(self, session: _Optional[_Union[SessionSummary, _Mapping]] = ..., reload: _Optional[bool] = ...) -> None: ...

class StreamTerminalRequest(_message.Message):
    __slots__ = ("session_id", "since")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    since: OutputToken
    def __init__(self, session_id: _Optional[str] = ..., since: _Optional[_Union[OutputToken, _Mapping]] = ...) -> None: ...

class TerminalFrame(_message.Message):
    __slots__ = ("token", "payload", "redraw", "cols", "rows", "skipped_bytes", "state", "timestamp", "ended")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    REDRAW_FIELD_NUMBER: _ClassVar[int]
    COLS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_BYTES_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    TIMESTAMP_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    token: OutputToken
    payload: bytes
    redraw: bool
    cols: int
    rows: int
    skipped_bytes: int
    state: SessionState
    timestamp: _timestamp_pb2.Timestamp
    ended: bool
    def __init__(self, token: _Optional[_Union[OutputToken, _Mapping]] = ..., payload: _Optional[bytes] = ..., redraw: _Optional[bool] = ..., cols: _Optional[int] = ..., rows: _Optional[int] = ..., skipped_bytes: _Optional[int] = ..., state: _Optional[_Union[SessionState, str]] = ..., timestamp: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., ended: _Optional[bool] = ...) -> None: ...

class GetScreensRequest(_message.Message):
    __slots__ = ("session_ids",)
    SESSION_IDS_FIELD_NUMBER: _ClassVar[int]
    session_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, session_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class TerminalScreen(_message.Message):
    __slots__ = ("session_id", "cols", "rows", "drawing", "text", "problem")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    COLS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    DRAWING_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    cols: int
    rows: int
    drawing: bytes
    text: str
    problem: str
    def __init__(self, session_id: _Optional[str] = ..., cols: _Optional[int] = ..., rows: _Optional[int] = ..., drawing: _Optional[bytes] = ..., text: _Optional[str] = ..., problem: _Optional[str] = ...) -> None: ...

class GetScreensResponse(_message.Message):
    __slots__ = ("screens",)
    SCREENS_FIELD_NUMBER: _ClassVar[int]
    screens: _containers.RepeatedCompositeFieldContainer[TerminalScreen]
    def __init__(self, screens: _Optional[_Iterable[_Union[TerminalScreen, _Mapping]]] = ...) -> None: ...

class ListCommandsRequest(_message.Message):
    __slots__ = ("session_id", "page_token")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    page_token: str
    def __init__(self, session_id: _Optional[str] = ..., page_token: _Optional[str] = ...) -> None: ...

class SessionCommand(_message.Message):
    __slots__ = ("command_id", "number", "text", "by", "started_at", "ended_at", "exit_code", "duration_seconds", "output_bytes", "excerpt", "start")
    COMMAND_ID_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    BY_FIELD_NUMBER: _ClassVar[int]
    STARTED_AT_FIELD_NUMBER: _ClassVar[int]
    ENDED_AT_FIELD_NUMBER: _ClassVar[int]
    EXIT_CODE_FIELD_NUMBER: _ClassVar[int]
    DURATION_SECONDS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_BYTES_FIELD_NUMBER: _ClassVar[int]
    EXCERPT_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    command_id: str
    number: int
    text: str
    by: str
    started_at: _timestamp_pb2.Timestamp
    ended_at: _timestamp_pb2.Timestamp
    exit_code: int
    duration_seconds: float
    output_bytes: int
    excerpt: str
    start: OutputToken
    def __init__(self, command_id: _Optional[str] = ..., number: _Optional[int] = ..., text: _Optional[str] = ..., by: _Optional[str] = ..., started_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., ended_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., exit_code: _Optional[int] = ..., duration_seconds: _Optional[float] = ..., output_bytes: _Optional[int] = ..., excerpt: _Optional[str] = ..., start: _Optional[_Union[OutputToken, _Mapping]] = ...) -> None: ...

class ListCommandsResponse(_message.Message):
    __slots__ = ("commands", "next_page_token")
    COMMANDS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    commands: _containers.RepeatedCompositeFieldContainer[SessionCommand]
    next_page_token: str
    def __init__(self, commands: _Optional[_Iterable[_Union[SessionCommand, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class ReadRecordingRequest(_message.Message):
    __slots__ = ("session_id", "since", "max_bytes")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    MAX_BYTES_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    since: OutputToken
    max_bytes: int
    def __init__(self, session_id: _Optional[str] = ..., since: _Optional[_Union[OutputToken, _Mapping]] = ..., max_bytes: _Optional[int] = ...) -> None: ...

class RecordedEvent(_message.Message):
    __slots__ = ("time", "code", "data", "token")
    TIME_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    time: float
    code: str
    data: bytes
    token: OutputToken
    def __init__(self, time: _Optional[float] = ..., code: _Optional[str] = ..., data: _Optional[bytes] = ..., token: _Optional[_Union[OutputToken, _Mapping]] = ...) -> None: ...

class ReadRecordingResponse(_message.Message):
    __slots__ = ("events", "token", "more", "started_at", "cols", "rows")
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    STARTED_AT_FIELD_NUMBER: _ClassVar[int]
    COLS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[RecordedEvent]
    token: OutputToken
    more: bool
    started_at: _timestamp_pb2.Timestamp
    cols: int
    rows: int
    def __init__(self, events: _Optional[_Iterable[_Union[RecordedEvent, _Mapping]]] = ..., token: _Optional[_Union[OutputToken, _Mapping]] = ..., more: _Optional[bool] = ..., started_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., cols: _Optional[int] = ..., rows: _Optional[int] = ...) -> None: ...

class ListUsageRequest(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    def __init__(self, session_id: _Optional[str] = ...) -> None: ...

class UsageSample(_message.Message):
    __slots__ = ("sampled_at", "cpu_percent", "memory_bytes", "process_count", "output_bytes", "sessions")
    SAMPLED_AT_FIELD_NUMBER: _ClassVar[int]
    CPU_PERCENT_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    PROCESS_COUNT_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_BYTES_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    sampled_at: _timestamp_pb2.Timestamp
    cpu_percent: float
    memory_bytes: int
    process_count: int
    output_bytes: int
    sessions: int
    def __init__(self, sampled_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., cpu_percent: _Optional[float] = ..., memory_bytes: _Optional[int] = ..., process_count: _Optional[int] = ..., output_bytes: _Optional[int] = ..., sessions: _Optional[int] = ...) -> None: ...

class ListUsageResponse(_message.Message):
    __slots__ = ("samples",)
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    samples: _containers.RepeatedCompositeFieldContainer[UsageSample]
    def __init__(self, samples: _Optional[_Iterable[_Union[UsageSample, _Mapping]]] = ...) -> None: ...

class ListSandboxesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class EngineState(_message.Message):
    __slots__ = ("name", "installed", "sandboxes", "problem")
    NAME_FIELD_NUMBER: _ClassVar[int]
    INSTALLED_FIELD_NUMBER: _ClassVar[int]
    SANDBOXES_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    name: str
    installed: bool
    sandboxes: int
    problem: str
    def __init__(self, name: _Optional[str] = ..., installed: _Optional[bool] = ..., sandboxes: _Optional[int] = ..., problem: _Optional[str] = ...) -> None: ...

class SandboxState(_message.Message):
    __slots__ = ("address", "engine", "state", "labels", "created_at", "expires_at", "sessions", "connected", "session_id", "pool")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    CREATED_AT_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_AT_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    CONNECTED_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    address: str
    engine: str
    state: str
    labels: _containers.ScalarMap[str, str]
    created_at: _timestamp_pb2.Timestamp
    expires_at: _timestamp_pb2.Timestamp
    sessions: int
    connected: bool
    session_id: str
    pool: str
    def __init__(self, address: _Optional[str] = ..., engine: _Optional[str] = ..., state: _Optional[str] = ..., labels: _Optional[_Mapping[str, str]] = ..., created_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., expires_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., sessions: _Optional[int] = ..., connected: _Optional[bool] = ..., session_id: _Optional[str] = ..., pool: _Optional[str] = ...) -> None: ...

class ListSandboxesResponse(_message.Message):
    __slots__ = ("engines", "sandboxes", "pools")
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    SANDBOXES_FIELD_NUMBER: _ClassVar[int]
    POOLS_FIELD_NUMBER: _ClassVar[int]
    engines: _containers.RepeatedCompositeFieldContainer[EngineState]
    sandboxes: _containers.RepeatedCompositeFieldContainer[SandboxState]
    pools: _containers.RepeatedCompositeFieldContainer[PoolState]
    def __init__(self, engines: _Optional[_Iterable[_Union[EngineState, _Mapping]]] = ..., sandboxes: _Optional[_Iterable[_Union[SandboxState, _Mapping]]] = ..., pools: _Optional[_Iterable[_Union[PoolState, _Mapping]]] = ...) -> None: ...

class PoolState(_message.Message):
    __slots__ = ("name", "engine", "warm", "taken", "creating", "waiting", "warm_wanted", "max", "open")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    WARM_FIELD_NUMBER: _ClassVar[int]
    TAKEN_FIELD_NUMBER: _ClassVar[int]
    CREATING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    WARM_WANTED_FIELD_NUMBER: _ClassVar[int]
    MAX_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    name: str
    engine: str
    warm: int
    taken: int
    creating: int
    waiting: int
    warm_wanted: int
    max: int
    open: bool
    def __init__(self, name: _Optional[str] = ..., engine: _Optional[str] = ..., warm: _Optional[int] = ..., taken: _Optional[int] = ..., creating: _Optional[int] = ..., waiting: _Optional[int] = ..., warm_wanted: _Optional[int] = ..., max: _Optional[int] = ..., open: _Optional[bool] = ...) -> None: ...

class VerifyAuditRequest(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    def __init__(self, session_id: _Optional[str] = ...) -> None: ...

class VerifyAuditResponse(_message.Message):
    __slots__ = ("holds", "rows", "sessions", "breaks", "verified_at", "head_seq", "head_hash")
    HOLDS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    BREAKS_FIELD_NUMBER: _ClassVar[int]
    VERIFIED_AT_FIELD_NUMBER: _ClassVar[int]
    HEAD_SEQ_FIELD_NUMBER: _ClassVar[int]
    HEAD_HASH_FIELD_NUMBER: _ClassVar[int]
    holds: bool
    rows: int
    sessions: int
    breaks: _containers.RepeatedScalarFieldContainer[str]
    verified_at: _timestamp_pb2.Timestamp
    head_seq: int
    head_hash: str
    def __init__(self, holds: _Optional[bool] = ..., rows: _Optional[int] = ..., sessions: _Optional[int] = ..., breaks: _Optional[_Iterable[str]] = ..., verified_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., head_seq: _Optional[int] = ..., head_hash: _Optional[str] = ...) -> None: ...

class TakeOverRequest(_message.Message):
    __slots__ = ("session_id", "release")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    release: bool
    def __init__(self, session_id: _Optional[str] = ..., release: _Optional[bool] = ...) -> None: ...

class TakeOverResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ModelCall(_message.Message):
    __slots__ = ("call_id", "started_at", "model", "path", "status", "input_tokens", "output_tokens", "cached_tokens", "estimated", "money", "duration_seconds", "session_id", "by")
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    STARTED_AT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    INPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ESTIMATED_FIELD_NUMBER: _ClassVar[int]
    MONEY_FIELD_NUMBER: _ClassVar[int]
    DURATION_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    BY_FIELD_NUMBER: _ClassVar[int]
    call_id: str
    started_at: _timestamp_pb2.Timestamp
    model: str
    path: str
    status: int
    input_tokens: int
    output_tokens: int
    cached_tokens: int
    estimated: bool
    money: float
    duration_seconds: float
    session_id: str
    by: str
    def __init__(self, call_id: _Optional[str] = ..., started_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., model: _Optional[str] = ..., path: _Optional[str] = ..., status: _Optional[int] = ..., input_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., estimated: _Optional[bool] = ..., money: _Optional[float] = ..., duration_seconds: _Optional[float] = ..., session_id: _Optional[str] = ..., by: _Optional[str] = ...) -> None: ...

class RecordModelCallsRequest(_message.Message):
    __slots__ = ("session_id", "calls")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    CALLS_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    calls: _containers.RepeatedCompositeFieldContainer[ModelCall]
    def __init__(self, session_id: _Optional[str] = ..., calls: _Optional[_Iterable[_Union[ModelCall, _Mapping]]] = ...) -> None: ...

class RecordModelCallsResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListModelCallsRequest(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    def __init__(self, session_id: _Optional[str] = ...) -> None: ...

class ModelTotal(_message.Message):
    __slots__ = ("model", "calls", "input_tokens", "output_tokens", "money", "failed")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    CALLS_FIELD_NUMBER: _ClassVar[int]
    INPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MONEY_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    model: str
    calls: int
    input_tokens: int
    output_tokens: int
    money: float
    failed: int
    def __init__(self, model: _Optional[str] = ..., calls: _Optional[int] = ..., input_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., money: _Optional[float] = ..., failed: _Optional[int] = ...) -> None: ...

class ListModelCallsResponse(_message.Message):
    __slots__ = ("calls", "totals", "more")
    CALLS_FIELD_NUMBER: _ClassVar[int]
    TOTALS_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    calls: _containers.RepeatedCompositeFieldContainer[ModelCall]
    totals: _containers.RepeatedCompositeFieldContainer[ModelTotal]
    more: bool
    def __init__(self, calls: _Optional[_Iterable[_Union[ModelCall, _Mapping]]] = ..., totals: _Optional[_Iterable[_Union[ModelTotal, _Mapping]]] = ..., more: _Optional[bool] = ...) -> None: ...
