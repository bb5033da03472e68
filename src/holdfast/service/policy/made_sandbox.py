"""Parses and decides requests for sandboxes that are made for a session; pure.

`ENGINE:new[?template=NAME]` is a new one, `pool:NAME` one of a pool. A profile names the engines, templates and
pools of its sessions; everything else is denied. The addresses of sandboxes that exist already are
not decided here (`allowed_sandboxes`).
"""

from __future__ import annotations

import re
from typing import Final, get_args

import msgspec

from holdfast.fleet.template import Template
from holdfast.service.policy.engine import Decision, refusal
from holdfast.service.policy.profiles import EngineName, PolicyRules, Profile
from holdfast.service.problems import Invalid
from holdfast.service.types import ServiceStruct, SessionPolicy

_NEW: Final = re.compile(r"([a-z]+):new(?:\?(.*))?")
_TEMPLATE: Final = "template="
_POOL: Final = "pool:"


class MadeSandbox(ServiceStruct, frozen=True):
    """A sandbox that is to be made for one session."""

    engine: EngineName
    template: Template = Template()
    #: Its name in the rules; empty if the request has none.
    template_name: str = ""
    #: The pool that it is taken from; empty if it is made for the session alone.
    pool: str = ""

    @property
    def placement(self) -> str:
        """An address of the same kind, which determines the default directories of the session."""
        return f"{self.engine}:new"


def is_made(address: str) -> bool:
    """True for an address that requests a new sandbox, or one of a pool."""
    return _NEW.fullmatch(address) is not None or address.startswith(_POOL)


def find_made_sandbox(rules: PolicyRules, address: str) -> MadeSandbox | None:
    """Return the sandbox that an address requests; None for the address of an existing one."""
    if address.startswith(_POOL):
        return _find_pool(rules, address)
    match = _NEW.fullmatch(address)
    if match is None:
        return None
    engine, option = match[1], match[2] or ""
    if engine not in get_args(EngineName):
        raise _invalid(address, f"the engine is not one of {', '.join(get_args(EngineName))}", "UNKNOWN_ENGINE")
    if not option:
        return MadeSandbox(engine)  # type: ignore[arg-type]
    name = option.removeprefix(_TEMPLATE)
    if name == option or name not in rules.templates:
        raise _invalid(address, "the rules have no such template (ENGINE:new?template=NAME)", "UNKNOWN_TEMPLATE")
    return MadeSandbox(engine, rules.templates[name].template, name)  # type: ignore[arg-type]


def _find_pool(rules: PolicyRules, address: str) -> MadeSandbox:
    name = address.removeprefix(_POOL)
    if name not in rules.pools:
        raise _invalid(address, "the rules have no such pool (pool:NAME)", "UNKNOWN_POOL")
    pool = rules.pools[name]
    template = rules.templates[pool.template].template if pool.template else Template()
    return MadeSandbox(pool.engine, template, pool.template, name)


def decide_made_sandbox(rules: PolicyRules, profile: Profile, made: MadeSandbox) -> Decision:
    """Decide whether sessions of a profile may have this sandbox."""
    allowed = profile.sandbox
    if made.pool:
        # The operator chose the engine and the template of a pool; a profile that has the pool may have both.
        return _decision(profile, "sandbox.pools", made.pool in allowed.pools, f"pool {made.pool!r}")
    if not made.template_name:
        return _decision(
            profile, "sandbox.engines", made.engine in allowed.engines, f"engine {made.engine!r} without a template"
        )
    if made.template_name not in allowed.templates:
        return _decision(profile, "sandbox.templates", False, f"template {made.template_name!r}")
    engine = rules.templates[made.template_name].engine
    fits = made.engine == engine if engine else made.engine in allowed.engines
    return _decision(
        profile, "sandbox.engines", fits, f"template {made.template_name!r} with engine {made.engine!r}"
    )


def check_made_sandbox(rules: PolicyRules, profile: Profile, made: MadeSandbox) -> None:
    """Raise `Denied` unless sessions of the profile may have this sandbox."""
    decision = decide_made_sandbox(rules, profile, made)
    if not decision.allowed:
        raise refusal(decision)


def narrow_policy(policy: SessionPolicy, template: Template) -> SessionPolicy:
    """Return the policy within the lifetime and the idle time of a template.

    The session ends at either of them, so that it closes in order before its sandbox is removed.
    """
    return msgspec.structs.replace(
        policy,
        max_lifetime=min(policy.max_lifetime, template.lifetime or policy.max_lifetime),
        idle_timeout=min(policy.idle_timeout, template.idle or policy.idle_timeout),
    )


def _decision(profile: Profile, rule: str, allowed: bool, what: str) -> Decision:
    key = f"profiles.{profile.name}.{rule}"
    if allowed:
        return Decision("allow", f"{what} is allowed", key, profile.location(rule))
    return Decision("deny", f"sandbox: {what} is not in {rule} of the profile", key, profile.location(rule))


def _invalid(address: str, why: str, reason: str) -> Invalid:
    return Invalid(f"sandbox {address!r}: {why}", reason=reason, field="sandbox")
