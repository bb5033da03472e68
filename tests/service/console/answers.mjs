// Calls to a server of our own, which answers as the service does on a bad day.
import assert from "node:assert/strict";
import { createServer } from "node:http";
const { Service, ServiceError } = await import(process.argv[2] + "/service.js");

const script = []; // of each request, in order: null cuts the connection, else [status, body]
const seen = [];
const server = createServer((request, response) => {
  let body = "";
  request.on("data", (piece) => (body += piece));
  request.on("end", () => {
    seen.push({ path: request.url, token: request.headers.authorization, body: JSON.parse(body) });
    const answer = script.shift();
    if (answer === null) request.socket.destroy();
    else response.writeHead(answer[0]).end(answer[1]);
  });
});
await new Promise((done) => server.listen(0, "127.0.0.1", done));
// Under a path of its own, as behind a proxy.
const service = new Service("hf_x", `http://127.0.0.1:${server.address().port}/sessions/#session/s1`);
const error = (code, message, ...debug) => JSON.stringify({ code, message, details: debug.map((each) => ({ debug: each })) });
const failing = async (call) => {
  const caught = await call.then(() => assert.fail("it went well"), (each) => each);
  assert.ok(caught instanceof ServiceError, String(caught));
  return caught;
};

script.push([429, error("resource_exhausted", "too many calls", { reason: "RATE_LIMIT" }, { retryDelay: "1.500s" })]);
const busy = await failing(service.call("ListSessions", { pageSize: 1 }));
assert.equal(busy.words, "too many calls; try again in 1.5 s (RATE_LIMIT)");
assert.equal(busy.transient, true);
const [{ path, token, body }] = seen;
assert.equal(path, "/sessions/holdfast.session.v1.SessionService/ListSessions");
assert.equal(token, "Bearer hf_x");
assert.deepEqual(body, { pageSize: 1 });

// A proxy's own pages: one passes, one does not.
script.push([502, "<h1>Bad Gateway</h1>"], [200, "<h1>Sign in</h1>"], [400, "null"]);
for (const [words, transient] of [["HTTP 502", true], ["HTTP 200", false], ["HTTP 400", false]]) {
  const caught = await failing(service.call("ListSessions"));
  assert.equal(caught.words, `${words}, which is not an answer of the service`);
  assert.equal(caught.transient, transient);
}

// Input whose answer was lost is sent again once, with the same id; one that was refused is not.
seen.length = 0;
script.push(null, [200, '{"accepted": true}'], null, null, [403, error("permission_denied", "no", { reason: "POLICY_DENIED" })]);
assert.equal((await service.send("s1", { text: "ls\n" })).accepted, true);
assert.equal((await failing(service.send("s1", { text: "ls\n" }))).words, "the service does not answer: it is unreachable");
assert.equal((await failing(service.send("s1", { actions: ["CTRL_C"] }))).words, "no (POLICY_DENIED)");
const ids = seen.map((each) => each.body.requestId);
assert.equal(ids.length, 5);
assert.deepEqual([ids[0] === ids[1], ids[1] === ids[2], ids[2] === ids[3], ids[3] === ids[4]], [true, false, true, false]);
assert.match(ids[0], /^[0-9a-f]{32}$/);
assert.equal(seen[0].body.data, "bHMK");
assert.deepEqual(seen[4].body.actions, [{ type: "CTRL_C" }]);
server.close();
server.closeAllConnections();
console.log("all of it is told in words");
