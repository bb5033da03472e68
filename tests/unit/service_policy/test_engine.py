"""Permission checks: what a session may be, and what may be done in it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from holdfast.service.api import PolicyRequest
from holdfast.service.policy.engine import (
    decide_command,
    decide_cwd,
    decide_environment,
    decide_shell,
    decide_signal,
    is_inside,
    normal,
    refusal,
    resolve,
)
from holdfast.service.policy.profiles import MIB, PolicyRules, Profile
from holdfast.service.policy.rules import default_rules, load_rules
from holdfast.service.problems import Denied, Invalid
from holdfast.service.types import Resources, SessionPolicy

RULES = """\
workspaces = "/srv"
[profiles.build]
background = { start = "ask", outlive = true }
directories.writable = ["{workspace}", "/var/cache/{agent}"]
directories.readable = ["/opt/data"]
signals.allow = ["CTRL_C", "SIGINT"]
environment.allow = ["PATH", "LANG*", "BUILD_TOKEN"]
environment.set = { CI = "1" }
network = { mode = "allow-list", hosts = ["pypi.org"] }
resources = { memory_bytes = "1GiB", processes = 10 }
sandbox.require = ["filesystem"]
idle.timeout = 100
lifetime.limit = 1000

[[profiles.build.commands.rules]]
verdict = "deny"
program = "git"
arguments = ["push"]
reason = "only people push"

[[profiles.build.commands.rules]]
verdict = "ask"
program = ["curl", "wget"]

[[profiles.build.commands.rules]]
verdict = "deny"
pattern = "(^| )--no-verify( |$)"

[profiles.strict]
extends = "default"
commands.default = "deny"

[[profiles.strict.commands.rules]]
verdict = "allow"
program = ["git", "ls", "/srv/tools/*"]

[[profiles.strict.commands.rules]]
verdict = "allow"
program = "pip"
arguments = ["install", "-r"]

[profiles.jobs]
background.start = "deny"

[agents.bob]
profile = "build"
profiles = ["default"]
sessions = 2
idle = 60
"""


@pytest.fixture
def rules() -> PolicyRules:
    return load_rules(RULES, "rules.toml")


@pytest.fixture
def build(rules: PolicyRules) -> Profile:
    return rules.profile("build")


@pytest.fixture
def strict(rules: PolicyRules) -> Profile:
    return rules.profile("strict")


# --- resolve ------------------------------------------------------------------------------------------------------


def test_a_session_gets_its_profile_narrowed_by_its_agent(rules: PolicyRules) -> None:
    policy = resolve(rules, "bob", PolicyRequest())
    assert policy == SessionPolicy(
        profile="build",
        idle_timeout=60,
        max_lifetime=1_000,
        idle_grace=60,
        writable=("/srv/bob", "/var/cache/bob"),
        readable=("/opt/data",),
        sandbox_mode="bubblewrap",
        network="allow-list",
        allowed_hosts=("pypi.org",),
        resources=Resources(memory_bytes=1024 * MIB, processes=10, output_bytes=1024 * MIB),
        require=("filesystem",),
    )


def test_a_request_may_narrow(rules: PolicyRules) -> None:
    fewer = Resources(processes=3, cpu_seconds=7)
    requested = PolicyRequest(idle_timeout=5, max_lifetime=9, network="none", resources=fewer, require=("network",))
    policy = resolve(rules, "bob", requested)
    assert (policy.idle_timeout, policy.max_lifetime, policy.network) == (5, 9, "none")
    assert (policy.resources.processes, policy.resources.cpu_seconds) == (3, 7)
    assert policy.require == ("filesystem", "network")


@pytest.mark.parametrize(
    ("requested", "rule", "location"),
    [
        (PolicyRequest(idle_timeout=61), "profiles.build.idle.timeout", "rules.toml:12"),
        (PolicyRequest(max_lifetime=1_001), "profiles.build.lifetime.limit", "rules.toml:13"),
        (PolicyRequest(network="host"), "profiles.build.network.mode", "rules.toml:9"),
        (PolicyRequest(resources=Resources(processes=11)), "profiles.build.resources.processes", "rules.toml:10"),
        (PolicyRequest(profile="strict"), "agents.profiles", "rules.toml:47"),
        (
            PolicyRequest(profile="default", allow_background=True),
            "profiles.default.background.outlive",
            "built-in",
        ),
    ],
)
def test_a_request_may_not_widen(rules: PolicyRules, requested: PolicyRequest, rule: str, location: str) -> None:
    with pytest.raises(Denied) as caught:
        resolve(rules, "bob", requested)
    assert caught.value.reason == "POLICY_DENIED"
    assert (caught.value.details["rule"], caught.value.details["place"]) == (rule, location)
    assert rule in caught.value.message


@pytest.mark.parametrize(
    ("agent", "requested", "reason"),
    [
        ("bob", PolicyRequest(idle_timeout=-1), "INVALID_LIMIT"),
        ("bob", PolicyRequest(idle_timeout=float("nan")), "INVALID_LIMIT"),
        ("bob", PolicyRequest(resources=Resources(memory_bytes=0)), "INVALID_LIMIT"),
        ("bob", PolicyRequest(resources=Resources(cpu_cores=float("nan"))), "INVALID_LIMIT"),
        ("bob", PolicyRequest(require=("wifi",)), "UNKNOWN_GUARD"),
        ("bob", PolicyRequest(profile="nothing"), "UNKNOWN_PROFILE"),
        ("bob", PolicyRequest(network="lan"), "INVALID_NETWORK"),  # type: ignore[arg-type]
        ("../bob", PolicyRequest(), "INVALID_AGENT"),
        ("..", PolicyRequest(), "INVALID_AGENT"),
        ("", PolicyRequest(), "INVALID_AGENT"),
    ],
)
def test_a_request_that_makes_no_sense_is_invalid(
    rules: PolicyRules, agent: str, requested: PolicyRequest, reason: str
) -> None:
    with pytest.raises(Invalid) as caught:
        resolve(rules, agent, requested)
    assert caught.value.reason == reason


def test_rules_that_deny_by_default_amount_to_a_list_of_programs(rules: PolicyRules) -> None:
    strict = resolve(rules, "bob", PolicyRequest(profile="strict"), operator=True).programs
    assert strict is not None
    assert strict[:4] == ("git", "ls", "/srv/tools/*", "pip")
    # Programs that need no rule because they only run others; not one binary that contains all programs.
    assert {"bash", "env", "timeout", "xargs"} <= set(strict)
    assert not {"sudo", "busybox", "find", "rm"} & set(strict)
    # Where approval may be needed, or no program is named, there is no list.
    for section in (
        "default = 'allow'",
        "default = 'ask'",
        "default = 'deny'\nunknown = 'ask'",
        "default = 'deny'\nrules = [{ verdict = 'allow', pattern = 'x' }]",
        "default = 'deny'\nrules = [{ verdict = 'ask', program = '*' }]",
    ):
        loaded = load_rules(f"[profiles.default.commands]\n{section}\n", "r")
        assert resolve(loaded, "bob", PolicyRequest()).programs is None
    denied = load_rules(
        "[profiles.default.commands]\ndefault = 'deny'\nrules = [{ verdict = 'deny', pattern = 'x' }]", "r"
    )
    assert resolve(denied, "bob", PolicyRequest()).programs is not None


def test_an_operator_may_use_any_profile(rules: PolicyRules) -> None:
    assert resolve(rules, "bob", PolicyRequest(profile="strict"), operator=True).profile == "strict"


def test_without_the_workspace_a_session_gets_its_own_directory_of_it(rules: PolicyRules) -> None:
    alone = resolve(rules, "bob", PolicyRequest(), initial_cwd="/srv/bob/x/../task-1")
    assert alone.writable == ("/srv/bob/task-1", "/var/cache/bob")
    shared = resolve(rules, "bob", PolicyRequest(inherit_workspace=True), initial_cwd="/srv/bob/task-1")
    assert shared.writable == ("/srv/bob", "/var/cache/bob")
    outside = resolve(rules, "bob", PolicyRequest(), initial_cwd="/srv/bobby")
    assert outside.writable == ("/srv/bob", "/var/cache/bob")


LIMITS = st.one_of(st.none(), st.floats(0.001, 1e9))


@settings(max_examples=100)
@given(
    LIMITS, LIMITS, st.sampled_from([None, "none", "allow-list", "host"]), st.one_of(st.none(), st.integers(1, 99))
)
def test_whatever_is_asked_for_the_profile_is_never_left(
    idle: float, life: float, network: str, count: int
) -> None:
    rules = load_rules(RULES, "rules.toml")
    requested = PolicyRequest(
        idle_timeout=idle, max_lifetime=life, network=network, resources=Resources(processes=count)  # type: ignore[arg-type]
    )  # fmt: skip
    try:
        policy = resolve(rules, "bob", requested)
    except Denied:
        return
    assert policy.idle_timeout <= 60
    assert policy.max_lifetime <= 1_000
    assert policy.network in ("none", "allow-list")
    assert policy.resources.processes is not None
    assert policy.resources.processes <= 10


# --- workspace directory enforcement ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cwd", "allowed"),
    [
        ("/srv/bob", True),
        ("/srv/bob/", True),
        ("/srv/bob/a/b", True),
        ("/srv/bob/a/../b", True),
        ("/srv/bob/./a", True),
        ("//srv//bob", True),
        ("/opt/data/set", True),
        ("/var/cache/bob", True),
        ("/srv/bob/..", False),
        ("/srv/bob/../alice", False),
        ("/srv/bob/a/../../alice", False),
        ("/srv/bobby", False),
        ("/srv/bo", False),
        ("/", False),
        ("/etc", False),
        ("/opt/database", False),
        ("bob", False),
        ("", False),
        ("~", False),
        ("/srv/bob\0/x", False),
    ],
)
def test_workspace_directory_enforcement(rules: PolicyRules, build: Profile, cwd: str, allowed: bool) -> None:
    decision = decide_cwd(build, resolve(rules, "bob", PolicyRequest()), cwd)
    assert decision.allowed is allowed
    assert decision.location == ("rules.toml:5" if cwd.startswith("/opt/data/") else "rules.toml:4")


@given(st.lists(st.sampled_from(["..", ".", "", "a", "srv", "bob", "alice"]), max_size=8))
def test_no_spelling_of_a_path_leaves_its_directory(parts: list[str]) -> None:
    path = normal("/srv/bob/" + "/".join(parts))
    assert path.startswith("/")
    assert not {"..", "."} & set(path.split("/"))
    assert is_inside(path, "/srv/bob") == (path.split("/")[1:3] == ["srv", "bob"])


# --- background job policy ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["sleep 100 &", "nohup sleep 1", "setsid sleep 1", "sh -c 'sleep 1 &'", "(a &)", "disown"]
)
def test_background_job_policy(rules: PolicyRules, build: Profile, text: str) -> None:
    denied = decide_command(rules.profile("jobs"), text)
    assert denied.verdict == "deny"
    assert "background" in denied.reason
    assert denied.rule == "profiles.jobs.background.start"
    assert denied.location == "rules.toml:43"
    assert denied.background
    assert decide_command(build, text).verdict == "ask"
    assert decide_command(Profile(), text).allowed


def test_a_job_in_the_foreground_is_allowed_where_background_is_not(rules: PolicyRules) -> None:
    assert decide_command(rules.profile("jobs"), "make -j4 2>&1 | tee log && echo '&'").allowed


def test_background_processes_may_outlive_a_session_only_if_both_say_so(rules: PolicyRules) -> None:
    assert resolve(rules, "bob", PolicyRequest(allow_background=True)).allow_background
    assert not resolve(rules, "bob", PolicyRequest()).allow_background
    with pytest.raises(Denied):
        resolve(default_rules(), "bob", PolicyRequest(allow_background=True))


# --- commands -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "verdict", "rule"),
    [
        ("make test", "allow", "commands.default"),
        ("git status", "allow", "commands.default"),
        ("git push", "deny", "commands.rules.0"),
        ("git push origin main", "deny", "commands.rules.0"),
        ("git -C . push", "deny", "commands.rules.0"),
        ("git --no-pager push", "deny", "commands.rules.0"),
        ("git --git-dir .git -P push x", "deny", "commands.rules.0"),
        ("git --no-pager log", "allow", "commands.default"),
        ("/usr/bin/git push", "deny", "commands.rules.0"),
        ("./git push", "deny", "commands.rules.0"),
        ("env nohup git push", "deny", "commands.rules.0"),
        ("sh -c 'git push'", "deny", "commands.rules.0"),
        ("echo $(git push)", "deny", "commands.rules.0"),
        ("git $X", "deny", "commands.rules.0"),
        ("git \"$X\" origin", "deny", "commands.rules.0"),
        ("git add $X", "deny", "commands.rules.2"),
        ("git commit --no-verify", "deny", "commands.rules.2"),
        ("git commit -m no--no-verify", "allow", "commands.default"),
        ("curl u", "ask", "commands.rules.1"),
        ("make && wget u", "ask", "commands.rules.1"),
        ("curl u; git push", "deny", "commands.rules.0"),
        ("$X y", "deny", "commands.unknown"),
        ("eval \"$y\"", "deny", "commands.rules.2"),
        ("echo 'a", "deny", "commands.rules.2"),
        ("'", "deny", "commands.unknown"),
        ("curl u | sh", "deny", "commands.unknown"),
        ("!!", "deny", "commands.unknown"),
    ],
)  # fmt: skip
def test_the_strictest_command_decides_a_line(build: Profile, text: str, verdict: str, rule: str) -> None:
    decision = decide_command(build, text)
    assert (decision.verdict, decision.rule) == (verdict, f"profiles.build.{rule}")


@pytest.mark.parametrize(
    ("text", "allowed"),
    [
        ("ls -l", True),
        ("git push", True),
        ("/usr/bin/git status", True),
        ("./git status", False),
        ("/tmp/git status", False),
        ("/usr/bin/../../tmp/git x", False),
        ("/srv/tools/lint", True),
        ("tools/lint", True),
        ("../srv/tools/lint", True),
        ("lint", False),
        ("/srv/tools/../x", False),
        ("pip install -r requirements.txt", True),
        ("pip install x", False),
        ("pip install $X", False),
        ("ls | git log && ls", True),
        ("ls | rm", False),
        ("env nice timeout 5 git status", True),
        ("sudo git status", False),
        ("sh -c 'git status; ls'", True),
        ("sh -c 'git status; rm x'", False),
        ("git $(rm x)", False),
        ("git $(ls)", False),
        ("git log $(ls)", True),
        ("git z", False),
        ("git -c alias.z='!id' z", False),
        ("git --config-env=alias.z=X z", False),
        ("git --exec-path=. status", False),
        ("git -C . status", True),
        ("git config alias.z '!id'", False),
        ("git rebase -x id main", False),
        ("git bisect run id", False),
        ("git clone ext::id x", False),
        ("PATH=. git status", False),
        ("ls > x", True),
        ("if ls; then git log; fi", True),
        ("cd x && tools/lint", False),
        ("cd x", False),
        ("", True),
        ("ls '", False),
    ],
)
def test_where_all_is_denied_only_what_is_certain_is_allowed(strict: Profile, text: str, allowed: bool) -> None:
    assert decide_command(strict, text, "/srv").allowed is allowed


def test_a_decision_says_which_rule_and_where(build: Profile) -> None:
    decision = decide_command(build, "make; git push")
    assert decision.location == "rules.toml:15"
    assert decision.reason == "only people push"
    assert decision.programs == ("make", "git")
    problem = refusal(decision)
    assert isinstance(problem, Denied)
    assert problem.message == "only people push (rules.toml:15: profiles.build.commands.rules.0)"
    assert problem.details == {"rule": "profiles.build.commands.rules.0", "place": "rules.toml:15"}


def test_without_rules_for_commands_everything_is_allowed() -> None:
    decision = decide_command(Profile(), "$X; eval $y; '")
    assert decision.allowed
    assert decision.location == "built-in"


def test_what_cannot_be_known_has_the_verdict_that_the_rules_give_it() -> None:
    text = "[profiles.p]\ncommands = { unknown = '%s', rules = [{ verdict = 'deny', program = 'rm' }] }"
    for verdict in ("allow", "ask", "deny"):
        profile = load_rules(text % verdict, "r").profile("p")
        assert decide_command(profile, "$X y").verdict == verdict
        assert decide_command(profile, "$X y; rm x").verdict == "deny"
    asking = load_rules("[profiles.p]\ncommands.default = 'ask'", "r").profile("p")
    assert decide_command(asking, "$X y").verdict == "ask"


def test_a_shell_whose_language_is_not_read_runs_nothing_where_rules_are_set(build: Profile) -> None:
    assert decide_command(build, "ls", shell="zsh").verdict == "deny"
    assert decide_command(Profile(), "ls", shell="zsh").allowed


# --- environment, signals, limits ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "allowed"),
    [
        ("EDITOR", True),
        ("PATH", True),
        ("GITHUB_TOKEN", False),
        ("my_token", False),
        ("AWS_SECRET_ACCESS_KEY", False),
        ("DB_PASSWORD", False),
        ("OPENAI_API_KEY", False),
        ("LD_PRELOAD", False),
        ("BASH_ENV", False),
        ("BASH_FUNC_ls%%", False),
        ("HOLDFAST_MARK", False),
        ("A=B", False),
        ("", False),
        ("1A", False),
    ],
)
def test_variables_that_hold_secrets_or_change_what_runs_are_refused(name: str, allowed: bool) -> None:
    decided = decide_environment(Profile(), {"LANG": "C", name: "x"})
    assert decided.refused == (() if allowed else (name,))
    assert decided.decision.allowed is allowed
    assert (name in decided.environment) is allowed
    assert "LANG" in decided.environment


def test_a_profile_says_which_variables_may_be_given(build: Profile) -> None:
    decided = decide_environment(build, {"LANG": "C", "EDITOR": "vi", "BUILD_TOKEN": "t", "OTHER_TOKEN": "t"})
    assert decided.refused == ("EDITOR", "OTHER_TOKEN")
    assert decided.environment == {"LANG": "C", "BUILD_TOKEN": "t", "CI": "1"}
    assert decided.decision.location == "rules.toml:7"
    assert decide_environment(build, {"CI": "0"}).refused == ("CI",)
    assert decide_environment(build, {"LANG": "a\0b"}).refused == ("LANG",)


@pytest.mark.parametrize("name", ["HOME", "PS1", "PS4", "INPUTRC", "IFS", "PATH", "histchars"])
def test_where_commands_have_rules_no_variable_may_decide_what_runs(
    rules: PolicyRules, build: Profile, name: str
) -> None:
    assert decide_environment(rules.profiles["strict"], {name: "x"}).refused == (name,)
    assert decide_environment(Profile(), {name: "x"}).refused == ()
    assert decide_environment(build, {"PATH": "x"}).refused == ()  # named by the rules


@pytest.mark.parametrize(
    ("shell", "allowed"),
    [
        ("", True),
        ("bash", True),
        ("/bin/bash", True),
        ("/usr/bin/dash", True),
        ("/srv/ann/bash", False),
        ("./bash", False),
        ("/bin/../srv/ann/bash", False),
        ("/usr/bin/python3", False),
        ("zsh", False),
    ],
)
def test_where_commands_have_rules_the_shell_is_one_whose_language_is_read(
    rules: PolicyRules, shell: str, allowed: bool
) -> None:
    assert decide_shell(rules.profiles["strict"], shell).allowed is allowed
    assert decide_shell(Profile(), shell).allowed


def test_signals_are_those_of_the_profile(build: Profile) -> None:
    assert decide_signal(build, "CTRL_C").allowed
    assert decide_signal(build, "RESIZE").allowed
    refused = decide_signal(build, "SIGKILL")
    assert (refused.verdict, refused.location) == ("deny", "rules.toml:6")
    assert decide_signal(Profile(), "SIGKILL").allowed
