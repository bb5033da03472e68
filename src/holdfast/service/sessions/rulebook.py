"""Applies the current rules to sessions: finds the profile of a session's policy and decides by it.

The rules can be replaced while the service runs. A session keeps its policy, and its commands are judged by the
current version of its profile. Holds the current rules, otherwise pure.
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
    decide_takeover,
    refusal,
    resolve,
)
from holdfast.service.policy.made_sandbox import (
    MadeSandbox,
    check_made_sandbox,
    find_made_sandbox,
    narrow_policy,
)
from holdfast.service.policy.profiles import PolicyRules, Profile
from holdfast.service.policy.typed_lines import InputDecision, LineBuffer, decide_input
from holdfast.service.types import SessionPolicy, SessionRecord


class Rulebook:
    """The decisions of the rules that sessions need."""

    def __init__(self, rules: PolicyRules) -> None:
        self.rules = rules

    def profile(self, policy: SessionPolicy) -> Profile:
        """Return the profile of a policy; `Denied` if the rules no longer have it."""
        return self.rules.profile(policy.profile)

    def max_sessions(self, agent_id: str) -> int:
        return self.rules.agent(agent_id).sessions

    def resolve(
        self, agent_id: str, request: CreateRequest, *, operator: bool, assigned: str = ""
    ) -> SessionPolicy:
        """Return the policy of a new session in `request.sandbox`.

        `assigned` is the profile that an operator gave to the agent; it replaces the agent's profile in the rules.
        """
        rules = self.rules.within(request.sandbox)
        if assigned:
            agent = msgspec.structs.replace(self.rules.agent(agent_id), profile=assigned)
            rules = msgspec.structs.replace(rules, agents={**rules.agents, agent_id: agent})
        return resolve(rules, agent_id, request.policy, initial_cwd=request.initial_cwd, operator=operator)

    def made_sandbox(self, address: str) -> MadeSandbox | None:
        """Return the sandbox that an address requests to be made; None for the address of an existing one."""
        return find_made_sandbox(self.rules, address)

    def within_template(self, policy: SessionPolicy, made: MadeSandbox) -> SessionPolicy:
        """Return the policy within a sandbox that is made; `Denied` if the profile does not allow the sandbox."""
        check_made_sandbox(self.rules, self.profile(policy), made)
        return narrow_policy(policy, made.template)

    def environment(self, policy: SessionPolicy, requested: dict[str, str]) -> dict[str, str]:
        """Return the environment of a session; `Denied` for a refused variable."""
        decided = decide_environment(self.profile(policy), requested)
        if decided.refused:
            raise refusal(decided.decision)
        return decided.environment

    def shell(self, policy: SessionPolicy, requested: str) -> str:
        """Return the shell if it is allowed, else raise `Denied`. There is no approval without a session."""
        decided = decide_shell(self.profile(policy), requested)
        if not decided.allowed:
            raise refusal(decided)
        return requested

    def cwd(self, policy: SessionPolicy, requested: str) -> str:
        """Return the initial directory, by default the first allowed one. `Denied` for other directories."""
        directory = requested or next(iter((*policy.writable, *policy.readable)), "")
        if directory:
            decided = decide_cwd(self.profile(policy), policy, directory)
            if not decided.allowed:
                raise refusal(decided)
        return directory

    def is_guarded(self, record: SessionRecord) -> bool:
        """Return whether the profile can refuse a command."""
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

    def takeover(self, record: SessionRecord) -> Decision:
        return decide_takeover(self.profile(record.policy))

    def deadline(self, record: SessionRecord, now: float, *, busy: bool, lifetime_warned: bool) -> Deadline | None:
        """Return the next deadline of an open session."""
        now_record = msgspec.structs.replace(record, state="BUSY" if busy else "IDLE")
        return next_deadline(now_record, now, lifetime_warned=lifetime_warned)


def _shell(record: SessionRecord) -> str:
    return record.shell.rpartition("/")[2] or "bash"
