"""Approvals of commands: the rules of the session service decide, or leave the decision to the client's user.

A command that the rules deny, or that needs an approval which the client cannot give, is refused. Typed text can be
spread over calls, so that no rule recognizes it: under rules for commands, all of it needs an approval.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final, cast

from mcp.server.mcpserver import Context, Elicit
from mcp.server.mcpserver.exceptions import ToolError
from pydantic import BaseModel, Field

from holdfast.service.policy.engine import Decision, decide_command, refusal
from holdfast.service.policy.profiles import PolicyRules, Profile
from holdfast.service.problems import Problem
from holdfast.service.rules_file import read_rules

#: The agent's name in the rules, which determines its profile.
AGENT: Final = "mcp"
#: Typed text that only interrupts or ends: Ctrl-C, Ctrl-D, Ctrl-Z, Ctrl-\.
_ENDING: Final = frozenset("\x03\x04\x1a\x1c")
#: The part of a text that a question shows.
_SHOWN_CHARACTERS: Final = 2_000


class Approval(BaseModel):
    """The answer of the client's user."""

    approve: bool = Field(description="Whether this may be done, once.")


ALLOWED: Final = Approval(approve=True)


class Approvals:
    """Decisions on commands and typed text; without rules everything is allowed."""

    def __init__(self, profile: Profile | None = None) -> None:
        self._profile = profile

    @classmethod
    def of_rules(cls, rules: PolicyRules, agent: str = AGENT) -> Approvals:
        """The profile that the rules give to the agent of this name."""
        return cls(rules.profile(rules.agent(agent).profile))

    @classmethod
    def of_file(cls, path: str, agent: str = AGENT) -> Approvals:
        return cls.of_rules(read_rules(path), agent)

    async def command(self, text: str, cwd: str = "", *, interactive: bool = False) -> Decision | None:
        """The decision on a command for a shell; None if no rule restricts commands."""
        if self._profile is None or not self._profile.guarded:
            return None
        # In a thread: a command may have megabytes.
        return await asyncio.to_thread(decide_command, self._profile, text, cwd, interactive=interactive)

    def typed(self, text: str) -> Decision | None:
        """The decision on text for a running program."""
        if self._profile is None or not self._profile.guarded or set(text) <= _ENDING:
            return None
        return Decision("ask", "typed text may be a command", f"profiles.{self._profile.name}.commands")


def question(
    ctx: Context[Any, Any], decision: Decision | None, action: str, text: str
) -> Approval | Elicit[Approval]:
    """The approval, or the question for it. `ToolError` for a refusal, and where the client cannot answer."""
    if decision is None or decision.allowed:
        return ALLOWED
    if decision.verdict == "deny":
        raise ToolError(cast(Problem, refusal(decision)).message)
    offered = ctx.client_capabilities.elicitation if ctx.client_capabilities is not None else None
    if offered is None or (offered.form is None and offered.url is not None):
        raise ToolError(f"{decision.reason}: it needs an approval, which this client does not offer (elicitation)")
    shown = text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]} … ({len(text)} characters)"
    return Elicit(f"{action}\n\n{shown}\n\n{decision.reason} ({decision.location})", Approval)


def check(answer: Any) -> None:
    """Raise `ToolError` unless the answer to a question is an approval."""
    if answer.action != "accept":
        raise ToolError(f"not approved: the request was answered with {answer.action!r}")
    if not answer.data.approve:
        raise ToolError("not approved: the user refused it")
