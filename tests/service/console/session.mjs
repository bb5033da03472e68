// One session through the page's own modules, from its creation to its end, against the service at argv[3].
import assert from "node:assert/strict";
const [, , files, base, token] = process.argv;
const { Service, ServiceError, fromBase64, toBase64 } = await import(files + "/service.js");
const { Screen } = await import(files + "/output.js");
const { follow } = await import(files + "/follow.js");
const { auditRow, facts, sessionRow } = await import(files + "/view.js");

const service = new Service(token, base);
const made = await service.call("CreateSession", { kind: "TERMINAL", labels: { task: "17" } });
const id = made.sessionId;
const stop = new AbortController();
const screen = new Screen();
const text = () => screen.lines.map((line) => `${line.kind}|${line.text}`).join("\n");
let resolve;
const prompts = { count: 0 };
const over = follow(service, id, screen, stop.signal, ({ prompt, trouble }) => {
  assert.equal(trouble, undefined);
  if (prompt?.awaitingInput) prompts.count += 1;
  resolve?.();
});
const until = async (condition) => {
  while (!condition()) await new Promise((done) => (resolve = done));
};

await until(() => prompts.count > 0);
const sent = await service.send(id, { text: "printf '\\033[31mgr\\303\\274n\\033[0m %s\\n' $((6*7)); (exit 3)\n" });
assert.equal(sent.accepted, true);
await until(() => text().includes("\n|grün 42") && text().includes("note|exit code 3"));
await service.send(id, { text: "cat\n" });
await until(() => text().includes("cat"));
await service.send(id, { actions: ["CTRL_C"] });
await until(() => text().includes("exit code 130"));

const found = await service.call("GetSession", { sessionId: id });
const { sessions } = await service.call("ListSessions", {});
const row = sessionRow(sessions.find((each) => each.metadata.sessionId === id), Date.now());
const { records } = await service.call("ListAudit", { sessionId: id, newestFirst: true });
const closed = await service.call("CloseSession", { sessionId: id, mode: "GRACEFUL" });
await over;

const errors = {};
const fails = async (name, call) => {
  const error = await call.then(() => assert.fail(`${name} went well`), (each) => each);
  assert.ok(error instanceof ServiceError, String(error));
  errors[name] = { words: error.words, code: error.code, transient: error.transient };
};
await fails("wrong token", new Service("hf_wrong", base).call("ListSessions"));
await fails("no session", service.call("GetSession", { sessionId: "ses-none" }));
await fails("closed", service.send(id, { text: "ls\n" }));
await fails("no service", new Service(token, "http://127.0.0.1:9/").call("ListSessions"));
await fails("no answer of ours", new Service(token, new URL("metrics/", base)).call("ListSessions"));

const aborted = new AbortController();
const waiting = service.read(id, "", 0, aborted.signal);
aborted.abort();
const abort = await waiting.catch((error) => error.name);
assert.equal(new TextDecoder().decode(fromBase64(toBase64("grün\0"))), "grün\0");

const said = { id, closed, facts: Object.fromEntries(facts(found, Date.now())), row, abort, errors, screen: text() };
console.log(JSON.stringify({ ...said, audit: records.map((each) => auditRow(each).cells) }));
