// What stands above every view: how the group is, how fresh the page is, and where one is.

import { element, setAttribute, setText } from "./dom.js";
import { clock, count, counted } from "./format.js";
import { workerAddress, write } from "./route.js";

const at = (id) => document.getElementById(id);

/** The row of views; `mark` says which one is shown. */
export class ViewLinks {
  #links = new Map();

  constructor(views) {
    const items = Object.entries(views).map(([name, view]) => {
      const link = element("a", { href: write({ view: name }) }, view.title);
      this.#links.set(name, link);
      return element("li", {}, link);
    });
    at("views").append(element("ul", {}, items));
  }

  mark(name) {
    for (const [view, link] of this.#links) {
      setAttribute(link, "aria-current", view === name ? "page" : null);
    }
  }
}

/** Say one thing to who cannot see the page; the same thing only once in a row. */
export function say(text) {
  setText(at("said"), text);
}

/** The group in words. */
export class GroupState {
  #silent = null; // names, of the last look

  show(look) {
    const { workers, answering, silent } = look.group;
    const words = silent
      ? `${count(answering)} of ${counted(workers, "worker")} answer, ${count(silent)} silent`
      : (["No worker is known", "The one worker answers", "Both workers answer"][workers] ??
        `All ${counted(workers, "worker")} answer`);
    setText(at("group-words"), words);
    const shape = at("group").querySelector(".shape");
    setAttribute(shape, "data-shape", silent ? "cross" : "dot");
    setAttribute(at("group"), "data-tone", silent ? "bad" : "good");
    this.#list(look);
    this.#tell(look);
  }

  #list(look) {
    const items = look.silent.map((one) =>
      element(
        "li",
        {},
        element("a", { href: workerAddress(one.worker) }, one.worker),
        ` ${one.why ?? one.trouble}`,
      ),
    );
    if (look.silent_left_out) {
      items.push(element("li", {}, `and ${count(look.silent_left_out)} more`));
    }
    const list = element("ul", {}, items);
    const text = items.length
      ? list
      : element("p", {}, "Workers that do not answer would be listed here, with the reason.");
    const place = at("group-list");
    if (place.textContent !== text.textContent) place.replaceChildren(text);
  }

  #tell(look) {
    const names = new Set(look.silent.map((one) => one.worker));
    const before = this.#silent;
    this.#silent = names;
    if (before == null) return;
    const lost = look.silent.filter((one) => !before.has(one.worker));
    const back = [...before].filter((name) => !names.has(name));
    if (lost.length) {
      const more = lost.length > 1 ? `, and ${lost.length - 1} more` : "";
      say(`no answer from ${lost[0].worker}: ${lost[0].why ?? lost[0].trouble}${more}`);
    } else if (back.length) {
      say(`${back[0]} is silent no more`);
    }
  }
}

/** How fresh the page is. */
export class Freshness {
  #takenAt = null;
  #kind = null;

  /** A look came. */
  show(look) {
    this.#takenAt = look.taken_at_s;
    setText(at("live-words"), `Live, ${clock(look.taken_at_s)}`);
    const took = `The look took ${look.took_s.toFixed(2)} s`;
    setAttribute(at("live"), "title", took);
  }

  /** The connection is in another state; see `LiveLook`. */
  enter(state) {
    const [words, shape, tone] = WORDS[state.kind];
    if (state.kind !== "live") setText(at("live-words"), words);
    setAttribute(at("live"), "data-tone", tone);
    setAttribute(at("live").querySelector(".shape"), "data-shape", shape);
    const isStale = state.kind === "lost" || state.kind === "late";
    document.body.classList.toggle("stale", isStale);
    at("lost").hidden = !isStale;
    setText(at("lost-words"), isStale ? this.#lost(state) : "");
    at("retry").hidden = state.kind !== "lost";
    if (this.#kind !== state.kind) this.#tell(state);
    this.#kind = state.kind;
  }

  #lost(state) {
    const shown = this.#takenAt
      ? `What you see is of ${clock(this.#takenAt)}.`
      : "Nothing was seen yet.";
    if (state.kind === "late") return `The looks are late. ${shown} ${state.why ?? ""}`;
    const seconds = Math.max(0, Math.ceil((state.retryAt - performance.now()) / 1000));
    return `The dashboard's server does not answer. ${shown} Next attempt in ${seconds} s.`;
  }

  #tell(state) {
    if (state.kind === "lost") say("Connection lost; what is shown is old.");
    else if (state.kind === "late") say("The looks are late; what is shown is old.");
    else if (state.kind === "live" && (this.#kind === "lost" || this.#kind === "late")) {
      say("Connected again.");
    }
  }
}

const WORDS = {
  connecting: ["Connecting", "ring", "calm"],
  live: ["Live", "dot", "good"],
  late: ["Late", "triangle", "warn"],
  lost: ["Not connected", "cross", "bad"],
  refused: ["Not connected", "square", "calm"],
  paused: ["Paused", "square", "calm"],
};
