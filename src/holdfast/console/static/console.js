// The page: shows texts of view.js and lines of output.js, and calls the service for its buttons.
//
// Texts are inserted as text nodes, never as markup. The token is in the session storage of this tab, and in no URL.

import { follow } from "./follow.js";
import { Screen, visible } from "./output.js";
import { Service, ServiceError } from "./service.js";
import { approvalRow, auditRow, facts, inputWords, listRequest, OVER, sessionRow } from "./view.js";

const TOKEN = "holdfast.token";
const REFRESH_MS = 5_000; // the interval of the service's monitor
const ACTIONS = ["CTRL_C", "CTRL_D", "SIGTERM", "SIGKILL"];
const CLOSES = ["GRACEFUL", "FORCE"];

const $ = (id) => document.getElementById(id);

function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

// The browser itself never submits a form, because the typed text would be in the URL.
function on(target, type, handle) {
  target.addEventListener(type, (event) => {
    event.preventDefault();
    return handle();
  });
}

// `visible` is applied to every text, because errors quote commands, paths and names.
function setText(node, text) {
  const shown = visible(text);
  if (node.textContent !== shown) node.textContent = shown;
}

// Updates the children of `parent` to `rows`. Existing ones are changed in place, which keeps focus and input.
function keyed(parent, rows, make, update) {
  const known = new Map(Array.from(parent.children, (child) => [child.dataset.key, child]));
  rows.forEach((row, index) => {
    const child = known.get(row.id) ?? make(row);
    child.dataset.key = row.id;
    update(child, row);
    if (parent.children[index] !== child) parent.insertBefore(child, parent.children[index] ?? null);
  });
  while (parent.children.length > rows.length) parent.lastElementChild.remove();
}

const tableRow = (cells) => element("tr", {}, ...cells.map((text) => element("td", { textContent: visible(text) })));

class Page {
  constructor() {
    this.service = null;
    this.pageToken = "";
    this.nextPage = "";
    this.timer = 0;
    this.refreshing = null; // the current refresh; a newer one aborts it
    this.session = null; // the open session: { id, stop, screen, older, typing }
    on($("enter"), "submit", () => this.enter($("token").value.trim()));
    on($("leave"), "click", () => this.leave(""));
    on($("filters"), "submit", () => this.turnTo(""));
    on($("states"), "change", () => this.turnTo(""));
    on($("sessions-first"), "click", () => this.turnTo(""));
    on($("sessions-next"), "click", () => this.turnTo(this.nextPage));
    on($("following"), "change", () => this.draw());
    on($("type"), "submit", () => this.type());
    for (const action of ACTIONS) on($(action), "click", () => this.act(action));
    for (const mode of CLOSES) on($(mode), "click", () => this.close(mode));
    on($("audit-newest"), "click", () => this.audit(""));
    on($("audit-older"), "click", () => this.audit(this.session.older));
    on(window, "hashchange", () => {
      this.choose();
      return this.refresh();
    });
    on(document, "visibilitychange", () => document.hidden || this.refresh());
    const token = sessionStorage.getItem(TOKEN);
    if (token) this.enter(token);
    else $("token").focus();
  }

  // --- the token --------------------------------------------------------------------------------------------------

  enter(token) {
    // Other characters cannot be sent in a header.
    if (!/^[\x21-\x7e]+$/.test(token)) return this.leave("This is not a token.");
    this.service = new Service(token, document.baseURI);
    sessionStorage.setItem(TOKEN, token);
    $("token").value = "";
    $("enter").hidden = true;
    $("leave").hidden = $("inside").hidden = false;
    setText($("trouble"), "");
    this.choose();
    return this.refresh();
  }

  leave(why) {
    sessionStorage.removeItem(TOKEN);
    this.service = null;
    this.refreshing?.abort();
    clearTimeout(this.timer);
    this.shut();
    for (const id of ["sessions", "approvals"]) $(id).replaceChildren();
    $("enter").hidden = false;
    $("leave").hidden = $("inside").hidden = true;
    setText($("trouble"), why);
    $("token").focus();
  }

  // Runs `work`, and shows an error in the element `place`. A token that the service refuses is removed.
  async attempt(work, place) {
    try {
      await work();
    } catch (error) {
      if (error.name === "AbortError") return;
      const words = error instanceof ServiceError ? error.words : `an error of this page: ${error.message}`;
      if (error.code === "unauthenticated") this.leave(words);
      else setText($(place), words);
      if (!(error instanceof ServiceError)) throw error;
    }
  }

  // --- the list ---------------------------------------------------------------------------------------------------

  turnTo(pageToken) {
    this.pageToken = pageToken;
    return this.refresh();
  }

  async refresh() {
    if (!this.service) return;
    clearTimeout(this.timer);
    this.refreshing?.abort();
    const mine = (this.refreshing = new AbortController());
    await this.attempt(async () => {
      const request = listRequest({ states: $("states").value, agent: $("agent").value }, this.pageToken);
      const [found, waiting] = await Promise.all([
        this.service.call("ListSessions", request, mine.signal),
        this.service.call("ListApprovals", {}, mine.signal),
        this.session && this.attempt(() => this.showDetails(mine.signal), "outcome"),
      ]);
      if (mine.signal.aborted) return;
      this.showSessions(found.sessions ?? [], found.nextPageToken);
      this.showApprovals(waiting.approvals ?? []);
      setText($("trouble"), "");
    }, "trouble");
    if (this.refreshing !== mine || !this.service) return;
    // A hidden page does not refresh; it refreshes at once when it becomes visible.
    this.timer = setTimeout(() => document.hidden || this.refresh(), REFRESH_MS);
  }

  showSessions(sessions, nextPage) {
    const rows = sessions.map((each) => sessionRow(each, Date.now()));
    this.nextPage = nextPage ?? "";
    $("sessions-first").disabled = !this.pageToken;
    $("sessions-next").disabled = !this.nextPage;
    setText($("count"), `${rows.length} shown${this.nextPage ? ", there are more" : ""}, oldest first`);
    const make = (row) => {
      const link = element("a", { href: `#session/${row.id}`, textContent: row.id });
      const made = tableRow(["", ...row.cells]);
      made.children[0].append(link);
      return made;
    };
    keyed($("sessions"), rows, make, (child, row) => {
      row.cells.forEach((text, index) => setText(child.children[index + 1], text));
      child.children[1].className = row.state;
      child.className = row.id === this.session?.id ? "chosen" : "";
    });
  }

  showApprovals(approvals) {
    const rows = approvals.map((each) => approvalRow(each, Date.now()));
    $("waiting").hidden = rows.length === 0;
    document.title = rows.length ? `(${rows.length}) Holdfast` : "Holdfast";
    const make = (row) => {
      const comment = element("input", { autocomplete: "off" });
      const answer = (approve) => this.answer(row.id, approve, comment.value);
      const allow = element("button", { type: "button", textContent: "Allow", onclick: () => answer(true) });
      const refuse = element("button", { type: "button", textContent: "Refuse", onclick: () => answer(false) });
      const label = element("label", {}, "Comment ", comment);
      const about = element("a", { href: `#session/${row.sessionId}`, textContent: "the session" });
      const bar = element("div", { className: "bar" }, label, allow, refuse, about, element("span"));
      return element("li", {}, element("div"), element("pre"), bar);
    };
    keyed($("approvals"), rows, make, (child, row) => {
      setText(child.children[0], row.words);
      setText(child.children[1], row.command);
      setText(child.children[2].lastElementChild, row.left);
    });
  }

  async answer(approvalId, approve, comment) {
    await this.attempt(async () => {
      await this.service.call("AnswerApproval", { approvalId, approve, comment });
      await this.refresh();
    }, "trouble");
  }

  // --- one session ------------------------------------------------------------------------------------------------

  choose() {
    const [, id] = /^#session\/([\w-]+)$/.exec(location.hash) ?? [];
    if (id === this.session?.id || !this.service) return;
    this.shut();
    if (!id) return;
    const stop = new AbortController();
    const session = (this.session = { id, stop, screen: new Screen(), older: "", typing: Promise.resolve() });
    setText($("session-title"), id);
    setText($("reading"), "reading…");
    $("following").checked = true;
    $("session").hidden = false;
    $("session-title").focus();
    this.enable(true);
    this.attempt(async () => {
      await follow(this.service, id, session.screen, stop.signal, (news) => this.read(session, news));
      if (this.session === session) setText($("reading"), "The session has ended; this is its retained output.");
    }, "reading");
    this.audit("");
  }

  shut() {
    this.session?.stop.abort();
    this.session = null;
    $("session").hidden = true;
    for (const id of ["output", "facts", "audit"]) $(id).replaceChildren();
    for (const id of ["outcome", "reading"]) setText($(id), "");
    $("line").value = "";
    $("line").type = "text";
  }

  read(session, { state, prompt, trouble }) {
    if (this.session !== session) return;
    if (trouble) return setText($("reading"), `${trouble.words}; retrying`);
    setText($("reading"), state);
    // Programs do not echo a password, so neither does the page.
    if (prompt !== undefined) $("line").type = prompt?.password ? "password" : "text";
    this.draw();
  }

  // While paused, output is collected in memory, bounded.
  draw() {
    if (!this.session || !$("following").checked) return;
    const { first, from, lines } = this.session.screen.take();
    const output = $("output");
    const number = (child) => Number(child.dataset.number);
    while (output.firstElementChild && number(output.firstElementChild) < first) output.firstElementChild.remove();
    while (output.lastElementChild && number(output.lastElementChild) >= from) output.lastElementChild.remove();
    lines.forEach(({ kind, text }, index) => {
      const line = element("div", { className: kind, textContent: text });
      line.dataset.number = from + index;
      output.append(line);
    });
    output.scrollTop = output.scrollHeight;
  }

  async showDetails(signal) {
    const session = this.session;
    const found = await this.service.call("GetSession", { sessionId: session.id }, signal);
    if (this.session !== session) return;
    this.enable(!OVER.includes(found.state));
    const parts = facts(found, Date.now()).flatMap(([name, text]) => [
      { id: `name of ${name}`, tag: "dt", className: "", text: name },
      { id: name, tag: "dd", className: name === "NOT enforced" ? "unenforced" : name === "state" ? text : "", text },
    ]);
    keyed($("facts"), parts, ({ tag }) => element(tag), (child, { className, text }) => {
      child.className = className;
      setText(child, text);
    });
  }

  enable(alive) {
    for (const id of ["line", "send", ...ACTIONS, ...CLOSES]) $(id).disabled = !alive;
  }

  // Runs an operation on the session, and shows its outcome.
  async do(work, session = this.session) {
    setText($("outcome"), "…");
    await this.attempt(async () => {
      const words = await work(session.id);
      if (this.session === session) setText($("outcome"), words);
    }, "outcome");
    if (this.session === session) await this.audit("");
    return this.refresh();
  }

  // Sends lines in the order of typing; a line that was not accepted returns to the input field.
  type() {
    const [line, session] = [$("line"), this.session];
    const text = line.value;
    line.value = "";
    const send = async (id) => {
      try {
        return inputWords(await this.service.send(id, { text: `${text}\n` }));
      } catch (error) {
        if (this.session === session) line.value ||= text;
        throw error;
      }
    };
    session.typing = session.typing.then(() => this.session === session && this.do(send, session));
    return session.typing;
  }

  act(action) {
    if (action === "SIGKILL" && !confirm(`Send SIGKILL to the processes of ${this.session.id}?`)) return undefined;
    return this.do(async (id) => inputWords(await this.service.send(id, { actions: [action] })) || `${action} was sent.`);
  }

  close(mode) {
    const how = mode === "FORCE" ? "Its processes are killed at once." : "Its processes get TERM, then KILL.";
    if (!confirm(`Close ${this.session.id}? ${how}`)) return undefined;
    return this.do(async (sessionId) => (await this.service.call("CloseSession", { sessionId, mode })).summary);
  }

  async audit(pageToken) {
    const session = this.session;
    const request = { sessionId: session.id, newestFirst: true, pageSize: 50, pageToken };
    await this.attempt(async () => {
      const found = await this.service.call("ListAudit", request, session.stop.signal);
      if (this.session !== session) return;
      session.older = found.nextPageToken ?? "";
      $("audit-older").disabled = !session.older;
      $("audit").replaceChildren(...(found.records ?? []).map((each) => tableRow(auditRow(each).cells)));
    }, "outcome");
  }
}

new Page();
