// As much of a browser's document as console.js uses, made from index.html, so that the page itself runs in a test.
//
// No markup is ever parsed after the start: there is no innerHTML here, so a page that used it would show nothing.

class Node {
  constructor(tag) {
    Object.assign(this, { tag, parent: null, nodes: [], dataset: {}, listeners: {}, value: "", className: "" });
    Object.assign(this, { hidden: false, disabled: false, checked: false, scrollTop: 0, scrollHeight: 0 });
  }
  get children() {
    return this.nodes.filter((each) => each instanceof Node);
  }
  get firstElementChild() {
    return this.children[0] ?? null;
  }
  get lastElementChild() {
    return this.children.at(-1) ?? null;
  }
  get textContent() {
    return this.nodes.map((each) => (each instanceof Node ? each.textContent : each)).join("");
  }
  set textContent(text) {
    this.nodes = text === "" ? [] : [String(text)];
  }
  append(...nodes) {
    for (const each of nodes) this.insertBefore(each, null);
  }
  insertBefore(node, before) {
    if (node instanceof Node) {
      node.remove();
      node.parent = this;
    }
    this.nodes.splice(before ? this.nodes.indexOf(before) : this.nodes.length, 0, node);
  }
  replaceChildren(...nodes) {
    this.nodes = [];
    this.append(...nodes);
  }
  remove() {
    if (this.parent) this.parent.nodes.splice(this.parent.nodes.indexOf(this), 1);
    this.parent = null;
  }
  focus() {
    document.activeElement = this;
  }
  addEventListener(type, listener) {
    (this.listeners[type] ??= []).push(listener);
  }
  // What a person does to it; resolves when the page has dealt with it.
  async fire(type) {
    const event = { preventDefault() {} };
    if (this.disabled) throw new Error(`${this.id ?? this.tag} is disabled`);
    await Promise.all([...(this.listeners[type] ?? []), this[`on${type}`]].map((listener) => listener?.(event)));
  }
  find(tag) {
    return this.children.flatMap((each) => [...(each.tag === tag ? [each] : []), ...each.find(tag)]);
  }
}

export function open(html, base) {
  const byId = new Map();
  for (const [, tag, attributes] of html.matchAll(/<(\w+)([^<>]*)>/g)) {
    const node = new Node(tag);
    node.id = /\bid="([^"]*)"/.exec(attributes)?.[1];
    node.hidden = /\bhidden\b/.test(attributes);
    if (node.id) byId.set(node.id, node);
  }
  byId.get("states").value = "open";
  const stored = new Map();
  const page = new Node("document");
  Object.assign(globalThis, {
    document: Object.assign(page, {
      baseURI: base,
      title: "",
      createElement: (tag) => new Node(tag),
      getElementById: (id) => byId.get(id) ?? null,
    }),
    window: new Node("window"),
    location: { hash: "" },
    confirm: () => true,
    sessionStorage: {
      getItem: (name) => stored.get(name) ?? null,
      setItem: (name, value) => stored.set(name, value),
      removeItem: (name) => stored.delete(name),
    },
  });
  return (id) => byId.get(id);
}
