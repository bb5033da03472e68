// Shared behaviour of pages: loading with errors, the clock, keys.
import { useCallback, useEffect, useRef, useState } from "preact/hooks";
import { ServiceError } from "./api.ts";

export type Loaded<T> = { value: T | undefined; error: ServiceError | undefined; loading: boolean; reload: () => void };

// Loads when `key` changes; keeps the last value while it loads again, or while the service is away.
export function useLoad<T>(key: string, load: (signal: AbortSignal) => Promise<T>): Loaded<T> {
  const [state, setState] = useState<{ key: string; value?: T; error?: ServiceError; loading: boolean }>({ key, loading: true });
  const [turn, setTurn] = useState(0);
  const latest = useRef(load);
  latest.current = load;
  useEffect(() => {
    const abort = new AbortController();
    setState((before) => ({ key, value: before.key === key ? before.value : undefined, error: undefined, loading: true }));
    let timer = 0;
    latest.current(abort.signal).then(
      (value) => !abort.signal.aborted && setState({ key, value, loading: false }),
      (error) => {
        if (abort.signal.aborted) return;
        const known = error instanceof ServiceError ? error : new ServiceError(String(error));
        setState((before) => ({ key, value: before.value, error: known, loading: false }));
        if (known.transient) timer = window.setTimeout(() => setTurn((each) => each + 1), 3000);
      },
    );
    return () => {
      abort.abort();
      clearTimeout(timer);
    };
  }, [key, turn]);
  const reload = useCallback(() => setTurn((each) => each + 1), []);
  return { value: state.key === key ? state.value : undefined, error: state.error, loading: state.loading, reload };
}

// The time in milliseconds, renewed once a second while the page is visible.
export function useNow(): number {
  const [now, setNow] = useState(Date.now());
  useEffect(() => {
    const timer = setInterval(() => !document.hidden && setNow(Date.now()), 1000);
    return () => clearInterval(timer);
  }, []);
  return now;
}

// Keys of a page; not while the reader types into a field or a terminal, nor while a dialog is open. Enter and Space
// belong to the link or the button that has the focus.
export function useKeys(keys: Record<string, (event: KeyboardEvent) => void>): void {
  const latest = useRef(keys);
  latest.current = keys;
  useEffect(() => {
    const pressed = (event: KeyboardEvent) => {
      if (event.ctrlKey || event.metaKey || event.altKey || typing(event)) return;
      if ((event.key === "Enter" || event.key === " ") && (event.target as HTMLElement).closest?.("a, button, summary")) return;
      const action = latest.current[event.key];
      if (action) {
        action(event);
        event.preventDefault();
      }
    };
    addEventListener("keydown", pressed);
    return () => removeEventListener("keydown", pressed);
  }, []);
}

export function typing(event: Event): boolean {
  const target = event.target as HTMLElement | null;
  return !!target?.closest?.("input, textarea, select, [contenteditable]") || !!document.querySelector("dialog[open]");
}
