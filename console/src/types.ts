// The messages of the service that the console reads, as proto JSON: 64-bit numbers are strings, times are RFC 3339.

export type State = "UNKNOWN" | "RUNNING" | "BUSY" | "IDLE" | "CLOSING" | "CLOSED" | "ERROR";
export type Token = { value: string };

export type Usage = {
  processCount: number;
  cpuPercent: number;
  memoryBytes: string;
  outputBytes: string;
  longRunningFlag: boolean;
  sampledAt?: string;
};

export type Summary = {
  sessionId: string;
  agentId: string;
  kind: "TERMINAL" | "SHELL";
  sandbox: string;
  state: State;
  createdAt: string;
  lastActivityAt: string;
  closedAt?: string;
  labels: Record<string, string>;
  commandsRun: string;
  closeReason: string;
  usage?: Usage;
  command: string;
  commandAt?: string;
  exitCode?: number;
  approvals: number;
  cpuHistory: number[];
};

export type Metadata = {
  sessionId: string;
  agentId: string;
  kind: "TERMINAL" | "SHELL";
  sandbox: string;
  sandboxMode: string;
  initialCwd: string;
  cwd: string;
  environment: Record<string, string>;
  policy: {
    profile: string;
    network: string;
    idleTimeoutSeconds: number;
    maxLifetimeSeconds: number;
    allowBackgroundProcesses: boolean;
    resources?: Record<string, string | number>;
  };
  createdAt: string;
  lastActivityAt: string;
  expiresAt?: string;
  closedAt?: string;
  labels: Record<string, string>;
  cols: number;
  rows: number;
  enforced: string[];
  unenforced: string[];
  commandsRun: string;
  shell: string;
  closeReason: string;
  summary: string;
  usage?: Usage;
};

export type Session = { metadata: Metadata; state: State };

export type Command = {
  commandId: string;
  number: string;
  text: string;
  by: string;
  startedAt: string;
  endedAt?: string;
  exitCode?: number;
  durationSeconds: number;
  outputBytes: string;
  excerpt: string;
};

export type Approval = {
  approvalId: string;
  sessionId: string;
  agentId: string;
  command: string;
  reason: string;
  askedAt: string;
  expiresAt: string;
  outcome: string;
  answeredBy: string;
  comment: string;
  rule: string;
};

export type AuditRecord = {
  sessionId: string;
  seq: string;
  at: string;
  agentId: string;
  kind: string;
  commandId: string;
  body: string;
  hash: string;
};

export type Frame = {
  token: Token;
  // Empty in a message without output.
  payload: Uint8Array | "";
  redraw: boolean;
  cols: number;
  rows: number;
  skippedBytes: string;
  state: State;
  ended: boolean;
};

export type Chunk = {
  token: Token;
  payload: Uint8Array | "";
  exitCode?: number;
  stream: string;
  commandId: string;
  skippedBytes: string;
  state: State;
  timestamp: string;
};

// The events that change what the page of a session shows. MODEL_CALL is sent only to subscriptions that name it.
export const PAGE_EVENTS = [
  ...["IDLE_WARNING", "IDLE_TIMEOUT", "LIFETIME_WARNING", "RESOURCE_THRESHOLD", "POLICY_VIOLATION", "SANDBOX_ENDING"],
  ...["SESSION_CREATED", "SESSION_CLOSED", "SESSION_ERROR", "APPROVAL_REQUESTED", "APPROVAL_ANSWERED", "TAKEN_OVER", "RELEASED", "MODEL_CALL"],
];
export type SessionEvent = { sessionId: string; type: string; detail: string; token: string; timestamp: string };

export type Sample = {
  sampledAt: string;
  cpuPercent: number;
  memoryBytes: string;
  processCount: number;
  outputBytes: string;
  sessions: number;
};

export type Caller = { agentId: string; role: "agent" | "operator"; version: string };

export type ModelCall = {
  callId: string;
  startedAt: string;
  model: string;
  path: string;
  status: number;
  inputTokens: string;
  outputTokens: string;
  estimated: boolean;
  money: number;
  durationSeconds: number;
  sessionId: string;
};

export type ModelTotal = { model: string; calls: string; inputTokens: string; outputTokens: string; money: number; failed: string };

export type ModelCalls = { calls: ModelCall[]; totals: ModelTotal[]; more: boolean };
