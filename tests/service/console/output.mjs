// Cases from stdin, as JSON: [{limit, chunks: [{stream, hex} | {note} | {forget}]} | {text}]; on stdout what a page
// shows of each that draws after every chunk.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
const { Screen, visible } = await import(process.argv[2] + "/output.js");

const cases = JSON.parse(readFileSync(0, "utf8"));
const shown = cases.map(({ limit, chunks, text }) => {
  if (text !== undefined) return visible(text);
  const screen = new Screen(limit);
  const page = [];
  for (const { hex, stream, note, forget } of chunks) {
    if (forget) screen.forget();
    else if (note) screen.note(note);
    else screen.write(Buffer.from(hex, "hex"), stream);
    const { first, from, lines } = screen.take();
    if (limit?.lines) {
      assert.ok(screen.lines.filter(Boolean).length <= limit.lines);
      assert.ok(screen.lines.length <= 2 * limit.lines + 1);
    }
    page.splice(0, page.length, ...page.filter(({ number }) => number >= first && number < from));
    page.push(...lines.map((line, index) => ({ ...line, number: from + index })));
  }
  return page.map(({ kind, text }) => [kind, text]);
});
console.log(JSON.stringify(shown));
