// The page itself against the service at argv[3]: what a person does with it, and what is on it then.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { open } from "./document.mjs";
const [, , files, base, operator, agent] = process.argv;
const { Service } = await import(files + "/service.js");

const $ = open(readFileSync(new URL(files + "/index.html"), "utf8"), base);
const until = async (condition) => {
  while (!condition()) await new Promise((done) => setTimeout(done, 20));
};
const enter = async (token) => {
  $("token").value = token;
  await $("enter").fire("submit");
};
const row = (id) => $("sessions").children.find((each) => each.dataset.key === id);
const output = () => $("output").children.map((each) => each.textContent).join("\n");

const builder = new Service(agent, base);
const { sessionId } = await builder.call("CreateSession", { kind: "TERMINAL", labels: { "<b>": "<i>" } });
await import(files + "/console.js");
assert.ok(document.activeElement === $("token"));
assert.equal($("inside").hidden, true);

// A token that nobody has is forgotten, with the service's words.
await enter("hf_wrong");
await until(() => $("trouble").textContent.includes("TOKEN_UNKNOWN"));
assert.equal(sessionStorage.getItem("holdfast.token"), null);
assert.equal($("inside").hidden, true);
await enter("no tökên");
assert.equal($("trouble").textContent, "This is not a token.");

await enter(operator);
await until(() => row(sessionId));
assert.equal($("trouble").textContent, "");
assert.equal(sessionStorage.getItem("holdfast.token"), operator);
assert.equal($("token").value, "");
assert.match(row(sessionId).textContent, /builder.*terminal.*<b>=<i>/);
// The same row after the next refresh: whoever stands on it keeps standing there.
const before = row(sessionId);
await $("filters").fire("submit");
assert.ok(row(sessionId) === before);
$("agent").value = "nobody";
await $("filters").fire("submit");
assert.ok(!row(sessionId));
$("agent").value = "builder";
await $("filters").fire("submit");
assert.ok(row(sessionId));

// One session: its output as it comes, what is typed into it.
location.hash = row(sessionId).find("a")[0].href;
await window.fire("hashchange");
await until(() => $("facts").textContent.includes("filesystem") || $("facts").textContent.includes("NOT enforced"));
await until(() => output().includes("$") || output().includes("#"));
$("line").value = "echo '<script>alert(1)</script>' $((6*7))";
await $("type").fire("submit");
assert.equal($("line").value, "");
await until(() => output().includes("\n<script>alert(1)</script> 42"));
assert.equal($("output").find("script").length, 0);
await until(() => $("audit").textContent.includes("$((6*7))"));

// Lines that are typed faster than they are answered stay in their order.
let [underWay, most] = [0, 0];
const { fetch } = globalThis;
globalThis.fetch = async (address, options) => {
  const counts = address.pathname.endsWith("SendInput");
  most = Math.max(most, (underWay += counts));
  return fetch(address, options).finally(() => (underWay -= counts));
};
const typed = [1, 2, 3, 4].map((number) => {
  $("line").value = `echo line $((${number}*1))`;
  return $("type").fire("submit");
});
await Promise.all(typed);
assert.equal(most, 1);
globalThis.fetch = fetch;
await until(() => /\nline 1\n[^]*\nline 2\n[^]*\nline 3\n[^]*\nline 4\n/.test(output()));

// Held still, and then all of it.
$("following").checked = false;
const still = output();
$("line").value = "echo $((7*7)); read -s -p 'Word: '";
await $("type").fire("submit");
await until(() => $("line").type === "password");
assert.equal(output(), still);
$("following").checked = true;
await $("following").fire("change");
assert.match(output(), /\n49\n(.*\n)*Word: $/);
await $("CTRL_C").fire("click");
await until(() => $("line").type === "text");
assert.equal($("outcome").textContent, "CTRL_C was sent.");

// A command that somebody must allow, with a comment that outlives a refresh.
$("line").value = "touch waited; rm waited";
await $("type").fire("submit");
assert.match($("outcome").textContent, /^The input waits for an approval \(apr-/);
await until(() => $("approvals").children.length === 1);
assert.equal($("waiting").hidden, false);
assert.equal(document.title, "(1) Holdfast");
const [asked] = $("approvals").children;
assert.equal(asked.find("pre")[0].textContent, "touch waited; rm waited");
asked.find("input")[0].value = "looks right";
await $("filters").fire("submit");
assert.ok($("approvals").children[0] === asked);
const [allow, refuse] = asked.find("button");
assert.deepEqual([allow.textContent, refuse.textContent], ["Allow", "Refuse"]);
await allow.fire("click");
await until(() => output().includes("touch waited; rm waited"));
assert.equal($("waiting").hidden, true);
await $("audit-newest").fire("click");
assert.match($("audit").textContent, /looks right/);

// What the rules refuse, in words.
$("line").value = "nc x";
await $("type").fire("submit");
assert.match($("outcome").textContent, /^the policy does not allow this.*\(POLICY_DENIED\)$/);
assert.equal($("line").value, "nc x");

// Closed, but only if it was meant.
globalThis.confirm = () => false;
await $("GRACEFUL").fire("click");
assert.equal($("line").disabled, false);
globalThis.confirm = () => true;
await $("GRACEFUL").fire("click");
assert.match($("outcome").textContent, /^CLOSED \(closed by operator\)/);
await until(() => $("line").disabled && $("reading").textContent.startsWith("The session has ended"));
assert.ok(!row(sessionId));
location.hash = "";
await window.fire("hashchange");
assert.equal($("session").hidden, true);
assert.equal(output(), "");

// An agent's own token sees its own sessions, and not the operator's.
const theirs = await new Service(operator, base).call("CreateSession", { kind: "SHELL" });
const own = await builder.call("CreateSession", { kind: "SHELL" });
await $("leave").fire("click");
assert.equal(sessionStorage.getItem("holdfast.token"), null);
assert.equal($("sessions").children.length, 0);
await enter(agent);
await until(() => row(own.sessionId));
assert.ok(!row(theirs.sessionId));
location.hash = `#session/${theirs.sessionId}`;
await window.fire("hashchange");
await until(() => $("outcome").textContent.includes("SESSION_NOT_FOUND"));
await until(() => $("reading").textContent.includes("SESSION_NOT_FOUND"));
assert.ok(row(own.sessionId));
await $("leave").fire("click");
console.log("the page works");
