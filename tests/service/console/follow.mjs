// How output is followed, with answers from a script: what is asked, waited for, told and shown.
import assert from "node:assert/strict";
const files = process.argv[2];
const { ServiceError, toBase64 } = await import(files + "/service.js");
const { Screen } = await import(files + "/output.js");
const { follow } = await import(files + "/follow.js");

const away = new ServiceError("away", { code: "unavailable" });
const chunk = (text, more = {}) => ({ payload: toBase64(text), ...more });
const at = (token, ...chunks) => ({ chunks, token: { value: token }, state: "BUSY" });

// Runs it over `answers`; after the last one, somebody closes the page.
async function run(...answers) {
  const stop = new AbortController();
  const seen = { asked: [], paused: [], told: [] };
  const read = async (id, since) => {
    seen.asked.push(since);
    const answer = answers.shift();
    if (!answer) {
      stop.abort();
      throw new DOMException("", "AbortError");
    }
    if (answer instanceof Error) throw answer;
    return answer;
  };
  const screen = new Screen();
  const pause = async (milliseconds) => seen.paused.push(milliseconds);
  await follow({ read }, "s1", screen, stop.signal, (news) => seen.told.push(news), pause);
  return { ...seen, aborted: stop.signal.aborted, lines: screen.take().lines.map(({ kind, text }) => [kind, text]) };
}

// From token to token; with trouble in between, later and later, nothing is lost and nothing comes twice.
const troubled = await run(at("1", chunk("a")), away, away, away, away, away, away, at("2", chunk("b\n")), away);
assert.deepEqual(troubled.asked, ["", ...Array(7).fill("1"), "2", "2"]);
assert.deepEqual(troubled.paused, [1000, 2000, 4000, 8000, 15000, 15000, 1000]);
assert.deepEqual(troubled.lines, [["", "ab"]]);
assert.equal(troubled.told[1].trouble, away);

// What is no longer kept is told, and half a sequence before it does not eat what comes after.
const gap = await run(
  at("1", chunk("x\u001b]0;title")),
  at("2", chunk("rest\n", { truncated: true, skippedBytes: "77" }), { payload: "", exitCode: 0 }),
);
assert.deepEqual(gap.lines, [["", "x"], ["note", "77 bytes before this are no longer retained"], ["", "rest"], ["note", "exit code 0"]]);

// Prompts: null once something else was printed, undefined while nothing was.
const asks = { text: "Word: ", awaitingInput: true, password: true };
const prompted = await run(at("1", { payload: "", prompt: asks }), at("1"), at("2", chunk("\n")));
assert.deepEqual(prompted.told.map(({ prompt }) => prompt), [asks, undefined, null]);
// An answer with nothing that comes at once is no reason to ask without end.
assert.deepEqual(prompted.paused, [500]);

// It ends with the session, when everything is read.
const closed = { state: "CLOSED", token: { value: "2" } };
const last = { ...closed, chunks: [chunk("c")], token: { value: "3" } };
const over = await run(at("1", chunk("a")), { ...closed, chunks: [chunk("b")] }, last, { ...closed, token: last.token }, at("9"));
assert.equal(over.aborted, false);
assert.deepEqual(over.asked, ["", "1", "2", "3"]);
assert.deepEqual(over.lines, [["", "abc"]]);

// An error that does not pass is for whoever asked.
const gone = new ServiceError("no session", { code: "not_found" });
await assert.rejects(run(at("1"), gone), gone);
console.log("it follows");
