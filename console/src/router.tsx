// Addresses of the page: a path, and filters in its query. They can be shared.
import type { ComponentChildren } from "preact";
import { useEffect, useState } from "preact/hooks";

export type Place = { path: string; query: URLSearchParams };

const listeners = new Set<() => void>();
const here = (): Place => ({ path: location.pathname, query: new URLSearchParams(location.search) });

export function go(to: string, { replace = false } = {}): void {
  history[replace ? "replaceState" : "pushState"](null, "", to);
  for (const listener of listeners) listener();
}

export function usePlace(): Place {
  const [place, setPlace] = useState(here);
  useEffect(() => {
    const changed = () => setPlace(here());
    listeners.add(changed);
    addEventListener("popstate", changed);
    return () => {
      listeners.delete(changed);
      removeEventListener("popstate", changed);
    };
  }, []);
  return place;
}

// The address of this page with some filters changed; empty values are left out.
export function withQuery(place: Place, changes: Record<string, string>): string {
  const query = new URLSearchParams(place.query);
  for (const [name, value] of Object.entries(changes)) value ? query.set(name, value) : query.delete(name);
  const text = query.toString();
  return place.path + (text ? `?${text}` : "");
}

export function Link(props: { to: string; class?: string; title?: string; current?: boolean; children: ComponentChildren }) {
  const follow = (event: MouseEvent) => {
    if (event.button || event.metaKey || event.ctrlKey || event.shiftKey) return;
    event.preventDefault();
    go(props.to);
  };
  return (
    <a href={props.to} class={props.class} title={props.title} onClick={follow} aria-current={props.current ? "page" : undefined}>
      {props.children}
    </a>
  );
}

export const sessionPath = (id: string): string => `/sessions/${encodeURIComponent(id)}`;
