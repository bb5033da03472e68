// Cases from stdin, as JSON: [{limit, chunks: [{stream, hex} | {note} | {forget}]}]; what is on the screen after each, on stdout.
import { readFileSync } from "node:fs";
const { Screen, visible } = await import(process.argv[2] + "/output.js");

const cases = JSON.parse(readFileSync(0, "utf8"));
const shown = cases.map(({ limit, chunks, text }) => {
  if (text !== undefined) return visible(text);
  const screen = new Screen(limit);
  const page = []; // what a page shows that draws after each chunk
  for (const { hex, stream, note, forget } of chunks) {
    if (forget) screen.forget();
    else if (note) screen.note(note);
    else screen.write(Buffer.from(hex, "hex"), stream);
    const { first, from, lines } = screen.take();
    page.splice(0, page.length, ...page.filter(({ number }) => number >= first && number < from));
    page.push(...lines.map((line, index) => ({ ...line, number: from + index })));
  }
  return page.map(({ kind, text }) => [kind, text]);
});
console.log(JSON.stringify(shown));
