// Turns the output of a session into lines of text. Pure: bytes in, lines out, bounded.
// This is not a terminal emulator: it handles lines, moves back in a line (\r, \b) and clearing in it (CSI K), for
// prompts and progress bars. Every other escape sequence is removed. `holdfast screen` has the exact screen.

// The limit of a control string (a window title, a picture): without an end, it would hide all output after it.
const LONGEST_CONTROL = 4096;
// A longer line is broken, because a change of a line redraws all of it.
const LONGEST_LINE = 8192;
// CSI 1 K and CSI 2 K cost one step for each column left of the cursor. A line is broken when the steps reach this sum,
// so that a megabyte of these sequences takes a tenth of a second and not four seconds.
const MOST_CLEARED = 64 * LONGEST_LINE;
// Combining marks on one character that are drawn as such. Written languages need up to three; hundreds of them cover
// the lines around, and their layout takes seconds.
const MOST_MARKS = 4;
// Characters that reverse the direction of text: with these, a command can be displayed as another one.
const reverses = (code) => (code >= 0x202a && code <= 0x202e) || (code >= 0x2066 && code <= 0x2069);
// Invisible characters: controls, blanks other than the space (U+2800 is one), fillers.
const INVISIBLE = /(?! )[\p{Cc}\p{Cf}\p{Co}\p{Cs}\p{Z}\p{Default_Ignorable_Code_Point}\u2800]/gu;
const MARKS = new RegExp(`\\p{M}(?<=\\p{M}{${MOST_MARKS + 1}})`, "gu");

const escaped = (character) => `\\u{${character.codePointAt(0).toString(16)}}`;

// Escapes the invisible characters of an untrusted text, except line ends and tabs.
export function visible(text) {
  const marked = text.replace(MARKS, escaped);
  return marked.replace(INVISIBLE, (character) => ("\n\t".includes(character) ? character : escaped(character)));
}

export class Screen {
  // Retains the latest `characters` and `lines`.
  constructor({ characters = 256 * 1024, lines = 5000 } = {}) {
    this.limit = { characters, lines };
    this.lines = []; // complete lines, { kind, text }
    this.base = 0; // the number of the first element
    this.dropped = 0; // elements at the front that were dropped, and are null
    this.characters = 0;
    this.changed = 0; // lines from this number on have changed since the last `take`
    this.decoders = new Map();
    this.forget();
    this.begin("");
  }

  // After a gap, discards an incomplete character or sequence.
  forget() {
    this.decoders.clear();
    this.state = "text";
    this.parameters = "";
  }

  begin(kind) {
    this.kind = kind;
    this.line = []; // code points
    this.column = 0;
    this.cleared = 0; // steps of CSI 1 K and CSI 2 K
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

  // Adds a line of the page itself, with the kind `note`, which output cannot have.
  note(text) {
    if (this.line.length) this.end();
    this.kind = "note";
    this.line = Array.from(visible(text).replaceAll("\n", " "));
    this.end();
    this.kind = "";
  }

  // Returns the changes since the last call. Lines before `first` were dropped; `lines` begin at the number `from`.
  take() {
    const first = this.base + this.dropped;
    const from = Math.max(this.changed, first);
    const lines = this.lines.slice(from - this.base);
    if (this.line.length) lines.push({ kind: this.kind, text: this.text() });
    this.changed = this.base + this.lines.length;
    return { first, from, lines };
  }

  // The text of the current line. Marks are counted here, because \b can put one beside another in any order.
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
    // In large steps, because removing elements from the front moves all others.
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
      this.line[this.column++] = reverses(code) ? escaped(character) : character;
    } else this.introduce(code);
  }

  // Handles a control character that may begin a sequence; the one-byte forms are U+0080 to U+009F.
  introduce(code) {
    this.parameters = "";
    if (code === 0x1b) this.state = "escape";
    else if (code === 0x9b) this.state = "csi";
    else if ([0x90, 0x98, 0x9d, 0x9e, 0x9f].includes(code)) this.state = "string";
    else this.state = "text";
  }

  control(character, code) {
    if (code === 0x18 || code === 0x1a) this.state = "text"; // CAN and SUB cancel the sequence
    else if (code === 0x1b) this.introduce(code); // so does the next sequence, such as ST, the end of a string
    else if (this.state === "escape") this.escape(character, code);
    else if (this.state === "csi") this.csi(character, code);
    else this.string(character, code);
  }

  escape(character, code) {
    if (character === "[") this.introduce(0x9b);
    else if ("PX]^_".includes(character)) this.introduce(0x9d);
    else if (code < 0x20 || code > 0x7e) this.again(character);
    else if (code > 0x2f) this.state = "text"; // lower codes are intermediates, as in `ESC ( B`
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

  // Ends an invalid sequence: its last character is handled as text.
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
