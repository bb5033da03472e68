// What a session printed, as lines of text for a screen. Pure: bytes in, lines out, bounded.
//
// This is no terminal: it writes lines, goes back in a line (\r, \b) and clears the rest of it (CSI K), so that
// prompts and progress bars read well. Every other escape sequence is taken out. `holdfast screen` has the real screen.

// A control string (a window title, a picture) without an end would hide all that follows it.
const LONGEST_CONTROL = 4096;
// A line that never ends is broken here: what is changed on the page is at most one line.
const LONGEST_LINE = 8192;
// CSI 1 K and CSI 2 K cost as many steps as there are columns left of the cursor. A line is broken when they add up to
// this, so that a megabyte of them takes a tenth of a second and not four seconds.
const MOST_CLEARED = 64 * LONGEST_LINE;
// Combining marks on one character that are drawn as such. Written languages need up to three; hundreds of them draw
// a column over the lines around, and their layout takes seconds.
const MOST_MARKS = 4;
// Characters that turn the order of the text around them: with these, a command can read as another one.
const turns = (code) => (code >= 0x202a && code <= 0x202e) || (code >= 0x2066 && code <= 0x2069);
// Characters without ink or without a glyph of their own: controls, blanks other than the space (U+2800 is one), fillers.
const UNSEEN = /(?! )[\p{Cc}\p{Cf}\p{Co}\p{Cs}\p{Z}\p{Default_Ignorable_Code_Point}\u2800]/gu;
const MARKS = new RegExp(`\\p{M}(?<=\\p{M}{${MOST_MARKS + 1}})`, "gu");

const escaped = (character) => `\\u{${character.codePointAt(0).toString(16)}}`;

// A text of an agent or a program, with everything in it to be seen; line ends and tabs stay.
export function visible(text) {
  const marked = text.replace(MARKS, escaped);
  return marked.replace(UNSEEN, (character) => ("\n\t".includes(character) ? character : escaped(character)));
}

export class Screen {
  // The latest `characters` and `lines` are kept.
  constructor({ characters = 256 * 1024, lines = 5000 } = {}) {
    this.limit = { characters, lines };
    this.lines = []; // { kind, text }; those that are complete
    this.base = 0; // the number of the first of them
    this.dropped = 0; // so many of them are no longer kept, and null
    this.characters = 0;
    this.changed = 0; // lines from this number on are new since the last `take`
    this.decoders = new Map();
    this.forget();
    this.begin("");
  }

  // After a gap, nothing is known of what came before: no half character, no half sequence.
  forget() {
    this.decoders.clear();
    this.state = "text";
    this.parameters = "";
  }

  begin(kind) {
    this.kind = kind;
    this.line = []; // code points
    this.column = 0;
    this.cleared = 0; // columns that CSI 1 K and CSI 2 K went over
  }

  // Bytes of a stream: "" of a terminal, `stdout` or `stderr` of a shell.
  write(bytes, stream = "") {
    const kind = stream === "stderr" ? "stderr" : "";
    if (kind !== this.kind) {
      if (this.line.length) this.end();
      this.kind = kind;
    }
    if (!this.decoders.has(stream)) this.decoders.set(stream, new TextDecoder("utf-8", { ignoreBOM: true }));
    for (const character of this.decoders.get(stream).decode(bytes, { stream: true })) this.put(character);
  }

  // A line of our own: `kind` note, which no output can have.
  note(text) {
    if (this.line.length) this.end();
    this.kind = "note";
    this.line = Array.from(visible(text).replaceAll("\n", " "));
    this.end();
    this.kind = "";
  }

  // What changed since the last call: { first, from, lines }. Those before `first` are gone; `lines` begin at `from`.
  take() {
    const first = this.base + this.dropped;
    const from = Math.max(this.changed, first);
    const lines = this.lines.slice(from - this.base);
    if (this.line.length) lines.push({ kind: this.kind, text: this.text() });
    this.changed = this.base + this.lines.length;
    return { first, from, lines };
  }

  // The current line. Marks are counted here and not as they come: \b puts one beside another in any order.
  text() {
    return this.line.join("").replace(MARKS, escaped);
  }

  end() {
    const text = this.text();
    this.lines.push({ kind: this.kind, text });
    this.characters += text.length + 1;
    while (this.lines.length - this.dropped > this.limit.lines || this.characters > this.limit.characters) {
      this.characters -= this.lines[this.dropped].text.length + 1;
      this.lines[this.dropped++] = null;
    }
    // As many at a time as are kept: taking them off the front moves the others, and a flood of lines is one of moves.
    if (this.dropped > this.limit.lines) {
      this.lines.splice(0, this.dropped);
      this.base += this.dropped;
      this.dropped = 0;
    }
    this.begin(this.kind);
  }

  put(character) {
    const code = character.codePointAt(0);
    if (this.state !== "text") this.control(character, code);
    else if (code === 0x0a) this.end();
    else if (code === 0x0d) this.column = 0;
    else if (code === 0x08) this.column = Math.max(0, this.column - 1);
    else if (code === 0x09 || (code >= 0x20 && code < 0x7f) || code > 0x9f) {
      if (this.line.length >= LONGEST_LINE) this.end();
      this.line[this.column++] = turns(code) ? escaped(character) : character;
    } else this.introduce(code);
  }

  // A control character that may begin a sequence; the one-byte forms come as U+0080 to U+009F.
  introduce(code) {
    this.parameters = "";
    if (code === 0x1b) this.state = "escape";
    else if (code === 0x9b) this.state = "csi";
    else if ([0x90, 0x98, 0x9d, 0x9e, 0x9f].includes(code)) this.state = "string";
    else this.state = "text";
  }

  control(character, code) {
    if (code === 0x18 || code === 0x1a) this.state = "text"; // CAN and SUB break off
    else if (code === 0x1b) this.introduce(code); // so does the next sequence; ST, the end of a string, is one
    else if (this.state === "escape") this.escape(character, code);
    else if (this.state === "csi") this.csi(character, code);
    else this.string(character, code);
  }

  escape(character, code) {
    if (character === "[") this.introduce(0x9b);
    else if ("PX]^_".includes(character)) this.introduce(0x9d);
    else if (code < 0x20 || code > 0x7e) this.again(character);
    else if (code > 0x2f) this.state = "text"; // below are intermediates, as in `ESC ( B`
  }

  csi(character, code) {
    if (code >= 0x40 && code <= 0x7e) {
      this.state = "text";
      if (character === "K") this.clear(this.parameters);
    } else if (code < 0x20 || code > 0x7e || this.parameters.length >= LONGEST_CONTROL) this.again(character);
    else this.parameters += character;
  }

  string(character, code) {
    if (code === 0x07 || code === 0x9c) this.state = "text";
    else if (this.parameters.length >= LONGEST_CONTROL) this.again(character);
    else this.parameters += character;
  }

  // It was no sequence after all: what broke it counts.
  again(character) {
    this.state = "text";
    this.put(character);
  }

  clear(how) {
    if (how === "" || how === "0") this.line.length = Math.min(this.line.length, this.column);
    else if (how === "1") this.line.fill(" ", 0, this.column + 1);
    else if (how === "2") this.line = Array(this.column).fill(" ");
    this.cleared += how === "1" || how === "2" ? this.column : 0;
    if (this.cleared > MOST_CLEARED) this.end();
  }
}
