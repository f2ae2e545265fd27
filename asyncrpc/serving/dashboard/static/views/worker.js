// One worker: who it is, what it serves, what its tasks and threads do, and what happened.
// Without a name: the workers to choose from.

import {
  ageColumn, codeColumn, countColumn, latencyColumn, linesColumn, rateColumn, stateColumn,
  textColumn, trafficColumn, workerColumn,
} from "../cells.js";
import { element, setText } from "../dom.js";
import { age, bytes, clock, count, latency, rate, traffic, UNKNOWN } from "../format.js";
import { showState, statePlace } from "../states.js";
import { DataTable } from "../table.js";
import { Listed } from "./listed.js";
import { Facts, Refusal, viewOf } from "./parts.js";

const CHOICE = [
  workerColumn("worker", "Worker", 24),
  stateColumn(),
  countColumn("rank", "Rank", null, { width: 7 }),
  textColumn("host", "Host", 24),
];

const FUNCTIONS = [
  codeColumn("function", "Function", 36),
  rateColumn("per_s", "Served/s", "Calls served per second"),
  rateColumn("failed_per_s", "Failed/s", "Calls failed per second"),
  latencyColumn("p50_s", "p50", "Half of the calls take at most"),
  latencyColumn("p99_s", "p99", "99 of 100 calls take at most"),
];

const TASKS = [
  codeColumn("name", "Task", 24),
  stateColumn("state", "State", 14),
  ageColumn("age_s", "Since", "In this state for"),
  textColumn("waits_for", "What it does", 28),
  linesColumn("chain", "Where", 48, "chain_left_out"),
];

const THREADS = [
  codeColumn("name", "Thread", 24),
  stateColumn("state", "State", 14),
  textColumn("waits_for", "What it does", 28),
  linesColumn("stack", "Stack", 48, "stack_left_out"),
];

const LINKS = [
  workerColumn("peer", "Peer", 18),
  stateColumn("state", "State", 14),
  textColumn("transport", "Transport", 12),
  countColumn("lanes", "Lanes", "More connections for large messages"),
  countColumn("in_flight", "In flight", "Calls made over it that are in flight", { width: 11 }),
  countColumn("served", "Serves", "Calls of the peer that are served here"),
  rateColumn("calls_per_s", "Made/s", "Calls made over it per second"),
  trafficColumn("bytes_per_s", "Traffic", "Bytes of the calls made over it per second"),
  latencyColumn("p50_s", "p50", "Half of the calls made over it take at most"),
];

const EVENTS = [
  { key: "at_s", label: "Time", width: 11, text: (row) => clock(row.at_s) },
  textColumn("kind", "Kind", 18),
  textColumn("text", "What happened", 64),
];

const NUMBERS = [
  ["made_per_s", "Calls made per second", rate],
  ["served_per_s", "Calls served per second", rate],
  ["failed_per_s", "Calls failed per second", rate],
  ["p99_s", "99 of 100 calls take at most", latency],
  ["bytes_per_s", "Traffic", traffic],
  ["lag_s", "Lag of its loop", latency],
  ["memory_bytes", "Memory", bytes],
  ["calls_under_way", "Calls under way", count],
];

const WHO = [
  ["rank", "Rank", String],
  ["host", "Host", String],
  ["pid", "Process", String],
  ["since_s", "Up for", age],
  ["versions", "Versions", (versions) => pairs(versions)],
  ["addresses", "Addresses", (addresses) => addresses?.join(", ") || UNKNOWN],
];

const pairs = (record) =>
  Object.entries(record ?? {}).map(([name, value]) => `${name} ${value}`).join(", ") || UNKNOWN;

const known = (write) => (value) => (value == null ? UNKNOWN : write(value));

class OneWorker {
  #refusal = new Refusal();
  #state = element("p", { class: "worker-state" }, statePlace(), element("span"));
  #numbers = new Facts(NUMBERS, "totals");
  #internal = element("p", { class: "note", hidden: true });
  #who = new Facts(WHO.map(([key, label, write]) => [key, label, known(write)]));
  #memory = new Named("Memory", "No memory was told of.", (value) => bytes(value));
  #settings = new Named("Options", "All options are as they come.", String);
  #tables;

  constructor(page) {
    this.title = page.route.name;
    const table = (name, caption, columns, empty, more) =>
      new DataTable({ page, name, caption, columns, empty, keyOf: byName(columns), ...more });
    this.#tables = {
      functions: table("functions", "Functions served", FUNCTIONS,
        "It served no call lately. Functions stand here once others call them.",
        { sort: "per_s", order: "down", why: "the busiest are shown." }),
      tasks: table("tasks", "Tasks", TASKS, "It has no task that waits or runs.",
        { sort: "age_s", order: "down", perPage: 25, why: "the worker tells of so many tasks." }),
      threads: table("threads", "Threads", THREADS, "It told of no thread.",
        { why: "the worker tells of so many threads." }),
      links: table("links", "Links", LINKS,
        "It has no link. One is made by the first call to, or from, another worker.",
        { why: "the worker tells of so many links." }),
      events: table("events", "What happened lately", EVENTS, "Nothing happened yet.",
        { keyOf: (row) => `${row.at_s} ${row.kind} ${row.text}`, perPage: 25, why: "only the last ones are shown." }),
    };
    this.element = viewOf(
      this.title, null,
      this.#refusal.element, this.#state, this.#who.element, this.#numbers.element,
      ...Object.values(this.#tables).map((one) => one.element), this.#internal,
      element("div", { class: "pair" }, this.#memory.element, this.#settings.element),
    );
  }

  show(look) {
    this.#refusal.show(null);
    const [state, words] = this.#state.children;
    showState(state, look.state);
    const why = look.why ?? look.trouble;
    setText(words, why ? `: ${why}` : "");
    this.#who.show(look);
    this.#numbers.show(look);
    const internal = look.internal_left_out ?? 0;
    this.#internal.hidden = internal === 0;
    setText(this.#internal, `${count(internal)} of asyncrpc's own tasks and threads are left out.`);
    for (const [name, table] of Object.entries(this.#tables)) {
      table.show({ rows: look[name] ?? [], left_out: look[`${name}_left_out`] });
    }
    this.#memory.show(look.memory);
    this.#settings.show(look.options);
  }

  follow() {
    for (const table of Object.values(this.#tables)) table.follow();
  }

  refuse(why) {
    this.#refusal.show(why);
  }
}

const byName = (columns) => (row) => `${row[columns[0].key]} ${row.id ?? ""}`;

/** Names and values that are not known beforehand. */
class Named {
  #list = element("dl", { class: "facts" });
  #empty;

  constructor(title, empty, write) {
    this.write = write;
    this.#empty = element("p", { class: "empty" }, empty);
    this.element = element("section", {}, element("h2", {}, title), this.#list, this.#empty);
  }

  show(record) {
    const entries = Object.entries(record ?? {});
    const items = entries.map(([name, value]) => [
      name.replace(/_bytes$/, "").replaceAll("_", " "),
      value == null ? UNKNOWN : this.write(value),
    ]);
    this.#empty.hidden = items.length > 0;
    const text = JSON.stringify(items);
    if (this.#list.dataset.shown === text) return;
    this.#list.dataset.shown = text;
    this.#list.replaceChildren(
      ...items.map(([name, value]) =>
        element("div", {}, element("dt", {}, name), element("dd", {}, value)),
      ),
    );
  }
}

/** The workers to choose from. */
const CHOICE_OPTIONS = {
  title: "Worker",
  about: "Choose the worker to look at.",
  name: "choice",
  caption: "Workers",
  columns: CHOICE,
  keyOf: (row) => row.worker,
  empty: "No worker is known. A worker stands here once it has joined the group.",
  why: "they did not tell in time.",
};

export const worker = {
  title: "Worker",
  asks: ({ name }) => (name == null ? "overview" : "worker"),
  add: (asked, { name }) => {
    if (name != null) asked.set("worker", name);
  },
  make: (page) => (page.route.name == null ? new Listed(page, CHOICE_OPTIONS) : new OneWorker(page)),
};
