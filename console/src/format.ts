// Texts of the page: sizes, durations, times, and untrusted texts with every character visible. Pure.

// Combining marks on one character that are drawn as such; hundreds of them would cover the lines around.
const MOST_MARKS = 4;
// Controls, blanks other than the space, fillers, and characters that reverse the direction of text.
const INVISIBLE = /(?! )[\p{Cc}\p{Cf}\p{Co}\p{Cs}\p{Z}\p{Default_Ignorable_Code_Point}\u2800]/gu;
const MARKS = new RegExp(`\\p{M}(?<=\\p{M}{${MOST_MARKS + 1}})`, "gu");

const escaped = (character: string) => `\\u{${character.codePointAt(0)!.toString(16)}}`;

// An untrusted text with its invisible characters as code points, except line ends and tabs.
export function visible(text: unknown): string {
  return String(text ?? "")
    .replace(MARKS, escaped)
    .replace(INVISIBLE, (character) => ("\n\t".includes(character) ? character : escaped(character)));
}

// The same on one line, and short. The line end that Enter adds to a typed command is left out.
export function oneLine(text: unknown, longest = 300): string {
  const shown = visible(String(text ?? "").slice(0, 4 * longest).replace(/\n+$/, "")).replace(/[\n\t]+/g, " ⏎ ");
  return shown.length > longest ? `${shown.slice(0, longest)}…` : shown;
}

// Output of a program as text: escape sequences are removed.
export function plainOutput(text: string): string {
  return text
    .replace(/\x1b(?:\[[0-?]*[ -/]*[@-~]|[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)?|[ -/]*[0-~])/g, "")
    .replace(/\r+\n/g, "\n")
    .replace(/[^\n]*\r(?!\n)/g, "");
}

export function size(bytes: number | string | undefined): string {
  let left = Number(bytes ?? 0);
  if (left < 1000) return `${left} B`;
  for (const unit of ["kB", "MB", "GB", "TB"]) {
    left /= 1000;
    if (left < 999.5 || unit === "TB") return `${left < 9.95 ? left.toFixed(1) : Math.round(left)} ${unit}`;
  }
  return "";
}

export function duration(seconds: number): string {
  if (seconds < 0.0995) return `${Math.max(0, Math.round(seconds * 1000))} ms`;
  if (seconds < 9.95) return `${seconds.toFixed(1)} s`;
  const whole = Math.round(seconds);
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)}m${String(whole % 60).padStart(2, "0")}s`;
  if (whole < 86400) return `${Math.floor(whole / 3600)}h${String(Math.floor((whole % 3600) / 60)).padStart(2, "0")}m`;
  return `${Math.floor(whole / 86400)}d${Math.floor((whole % 86400) / 3600)}h`;
}

// HH:MM:SS since the start, as a player shows it.
export function clockSpan(seconds: number): string {
  const whole = Math.max(0, Math.floor(seconds));
  const [hours, minutes, rest] = [Math.floor(whole / 3600), Math.floor((whole % 3600) / 60), whole % 60];
  const tail = `${String(minutes).padStart(hours ? 2 : 1, "0")}:${String(rest).padStart(2, "0")}`;
  return hours ? `${hours}:${tail}` : tail;
}

export const secondsOf = (time: string | undefined): number => (time ? Date.parse(time) / 1000 : 0);

const CLOCK = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", second: "2-digit", hour12: false });
const DAY = new Intl.DateTimeFormat(undefined, { month: "short", day: "numeric" });
const WHOLE = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "long" });

export function clock(time: string | undefined): string {
  if (!time || Number.isNaN(Date.parse(time))) return "";
  const date = new Date(time);
  const today = new Date().toDateString() === date.toDateString();
  return today ? CLOCK.format(date) : `${DAY.format(date)} ${CLOCK.format(date)}`;
}

// With the zone, for a tooltip.
export const wholeTime = (time: string | undefined): string =>
  time && !Number.isNaN(Date.parse(time)) ? WHOLE.format(new Date(time)) : "";

// "CLOSED (closed by boss): closed; open for 3 s; 1 command" without its repetitions.
export const endWords = (summary: string): string => summary.replace(/^[A-Z]+ \(([^)]*)\): (?:\w+; )?/, "$1; ");

export function labelTexts(labels: Record<string, string> | undefined): string[] {
  return Object.entries(labels ?? {}).map(([name, value]) => oneLine(`${name}=${value}`, 60));
}

export const plural = (count: number, word: string, many = `${word}s`): string => `${count.toLocaleString()} ${count === 1 ? word : many}`;

// 950, 12k, 1.4M: counts of tokens.
export function count(value: number | string): string {
  const whole = Number(value);
  if (whole < 1000) return String(whole);
  const [scaled, unit] = whole < 999_500 ? [whole / 1000, "k"] : [whole / 1_000_000, "M"];
  return `${scaled < 9.95 ? scaled.toFixed(1) : Math.round(scaled)}${unit}`;
}

// An amount in the currency of the bridge's prices, which name none.
export const money = (value: number): string => (value === 0 ? "–" : value < 0.01 ? "< 0.01" : value.toFixed(2));
