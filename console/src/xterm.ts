// xterm.js under `style-src 'self'`: its elements get their styles through the CSSOM, which the policy allows.
//
// xterm.js writes rules as the text of <style> elements, and colours of cells as style attributes; the policy forbids
// both, as it must: markup from output could carry them too. Its option `documentOverride` takes a document, so it gets
// this page's document with another `createElement`: the text of a <style> goes to a constructed style sheet, and a
// style attribute to `element.style`.
import { Terminal, type ITerminalInitOnlyOptions, type ITerminalOptions, type ITheme } from "@xterm/xterm";
import "@xterm/xterm/css/xterm.css";

type CreateElement = (tag: string) => HTMLElement;

function styledElements(sheets: Set<CSSStyleSheet>): CreateElement {
  const create = Document.prototype.createElement.bind(document) as CreateElement;
  return (tag) => {
    // In place of a <style>, of which even an empty one is refused, stands an element without any effect.
    const element = create(tag === "style" ? "template" : tag);
    if (tag === "style") {
      const sheet = new CSSStyleSheet();
      sheets.add(sheet);
      document.adoptedStyleSheets = [...document.adoptedStyleSheets, sheet];
      Object.defineProperty(element, "textContent", { set: (text: string) => sheet.replaceSync(text), get: () => "" });
    } else {
      const setAttribute = element.setAttribute.bind(element);
      element.setAttribute = (name: string, value: string) => {
        if (name === "style") element.style.cssText = value;
        else setAttribute(name, value);
      };
    }
    return element;
  };
}

function styledDocument(createElement: CreateElement): Document {
  return new Proxy(document, {
    get(target, name) {
      if (name === "createElement") return createElement;
      const value = Reflect.get(target, name, target) as unknown;
      return typeof value === "function" ? (value as Function).bind(target) : value;
    },
  });
}

// The same palette in light and dark: output is made for a dark terminal.
export const PALETTE = [
  "#23272e", "#f2777a", "#8fd18b", "#f0c674", "#7aa6f7", "#c594e8", "#6ccfd6", "#c9ced6",
  "#6a7280", "#ff9a9c", "#aee8a9", "#ffdc96", "#9dc0ff", "#dcb2f7", "#93e6ec", "#f4f6f8",
];
export const BACKGROUND = "#14171c";
export const FOREGROUND = "#dfe3e9";
const NAMES = ["black", "red", "green", "yellow", "blue", "magenta", "cyan", "white"];
const THEME: ITheme = {
  background: BACKGROUND,
  foreground: FOREGROUND,
  cursor: "#dfe3e9",
  selectionBackground: "#3c4a6b",
  ...Object.fromEntries(NAMES.map((name, index) => [name, PALETTE[index]])),
  ...Object.fromEntries(NAMES.map((name, index) => [`bright${name[0]!.toUpperCase()}${name.slice(1)}`, PALETTE[index + 8]])),
};
export const MONOSPACE = 'ui-monospace, "SF Mono", "Cascadia Mono", "JetBrains Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace';

export type Screen = { terminal: Terminal; open: (box: HTMLElement) => void; dispose: () => void };

export function makeTerminal(options: ITerminalOptions & ITerminalInitOnlyOptions): Screen {
  const sheets = new Set<CSSStyleSheet>();
  const createElement = styledElements(sheets);
  const terminal = new Terminal({
    theme: THEME,
    fontFamily: MONOSPACE,
    scrollback: 5000,
    cursorBlink: false,
    // Links of programs (OSC 8) open nothing: their text need not be their address.
    linkHandler: { activate: () => undefined },
    documentOverride: styledDocument(createElement),
    ...options,
  } as ITerminalOptions);
  // Programs must not query what the page shows, set its clipboard (OSC 52) or move its window.
  for (const code of [4, 10, 11, 12, 52]) terminal.parser.registerOscHandler(code, () => true);
  terminal.parser.registerCsiHandler({ final: "t" }, () => true);
  terminal.attachCustomKeyEventHandler((event) => takesKey(terminal, event));
  return {
    terminal,
    open(box) {
      // The style of the scroll bar does not pass through `documentOverride`, so it is made here, while this replaces it.
      Object.defineProperty(document, "createElement", { value: createElement, configurable: true });
      try {
        terminal.open(box);
      } finally {
        delete (document as { createElement?: unknown }).createElement;
      }
      // Tab passes a terminal that is only watched.
      terminal.textarea!.tabIndex = -1;
    },
    dispose() {
      terminal.dispose();
      document.adoptedStyleSheets = document.adoptedStyleSheets.filter((each) => !sheets.has(each));
    },
  };
}

// A terminal that is only watched takes the keys that scroll it; the others, as Tab, stay with the browser.
export const takesKey = (terminal: Terminal, event: KeyboardEvent): boolean =>
  !terminal.options.disableStdin || (event.shiftKey && event.key.startsWith("Page"));

// The largest font with which a terminal fits into this width and most of the window's height. Not smaller than can be
// read: a narrow window scrolls sideways instead.
export function fittingFont(cols: number, rows: number, width: number): number {
  const font = Math.min(width / (cols * 0.6025), (0.72 * innerHeight) / (rows * 1.22), 24);
  return Math.max(7, Math.floor(10 * font) / 10);
}

export const write = (terminal: Terminal, data: Uint8Array | string): Promise<void> =>
  new Promise((resolve) => terminal.write(data, resolve));
