"""The rules in force, asked by session: finds the profile of a session's policy and takes the decision there.

The rules may be replaced while the service runs; a session keeps the policy that it was made with, and is judged by
what its profile says now. Pure but for holding the current rules.
"""

from __future__ import annotations

import msgspec

from holdfast.service.api import ControlType, CreateRequest
from holdfast.service.policy.deadlines import Deadline, next_deadline
from holdfast.service.policy.engine import (
    Decision,
    decide_command,
    decide_cwd,
    decide_environment,
    decide_shell,
    decide_signal,
    refusal,
    resolve,
)
from holdfast.service.policy.profiles import PolicyRules, Profile
from holdfast.service.policy.typed_lines import InputDecision, LineBuffer, decide_input
from holdfast.service.types import Policy, SessionRecord


class Rulebook:
    """What the sessions ask of the rules."""

    def __init__(self, rules: PolicyRules) -> None:
        self.rules = rules

    def profile(self, policy: Policy) -> Profile:
        """The policy's; `Denied` if the rules have it no longer."""
        return self.rules.profile(policy.profile)

    def max_sessions(self, agent_id: str) -> int:
        return self.rules.agent(agent_id).sessions

    def resolve(self, agent_id: str, request: CreateRequest, *, operator: bool) -> Policy:
        """The policy of a new session; `request.sandbox` is where it will be."""
        rules = self.rules.within(request.sandbox)
        return resolve(rules, agent_id, request.policy, initial_cwd=request.initial_cwd, operator=operator)

    def environment(self, policy: Policy, asked: dict[str, str]) -> dict[str, str]:
        """What a session gets; `Denied` for a variable that is refused."""
        decided = decide_environment(self.profile(policy), asked)
        if decided.refused:
            raise refusal(decided.decision)
        return decided.environment

    def shell(self, policy: Policy, asked: str) -> str:
        """The same, if it may be the shell. Nobody is asked about one: there is no session yet."""
        decided = decide_shell(self.profile(policy), asked)
        if not decided.allowed:
            raise refusal(decided)
        return asked

    def cwd(self, policy: Policy, asked: str) -> str:
        """Where a session begins: the first allowed directory, if nobody says. `Denied` outside of them."""
        directory = asked or next(iter((*policy.writable, *policy.readable)), "")
        if directory:
            decided = decide_cwd(self.profile(policy), policy, directory)
            if not decided.allowed:
                raise refusal(decided)
        return directory

    def is_guarded(self, record: SessionRecord) -> bool:
        """Whether any command could be refused."""
        return self.profile(record.policy).guarded

    def command(self, record: SessionRecord, text: str, cwd: str) -> Decision:
        return decide_command(
            self.profile(record.policy),
            text,
            cwd,
            shell=_shell(record),
            interactive=record.kind == "terminal",
        )

    def input(self, record: SessionRecord, buffer: LineBuffer, data: bytes, cwd: str) -> InputDecision:
        return decide_input(self.profile(record.policy), buffer, data, cwd, shell=_shell(record))

    def signal(self, record: SessionRecord, control: ControlType) -> Decision:
        return decide_signal(self.profile(record.policy), control)

    def deadline(self, record: SessionRecord, now: float, *, busy: bool, lifetime_warned: bool) -> Deadline | None:
        """What is due next for a session that runs."""
        now_record = msgspec.structs.replace(record, state="BUSY" if busy else "IDLE")
        return next_deadline(now_record, now, lifetime_warned=lifetime_warned)


def _shell(record: SessionRecord) -> str:
    return record.shell.rpartition("/")[2] or "bash"
