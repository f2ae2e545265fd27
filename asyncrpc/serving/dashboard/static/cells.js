// What a column of a table holds, by kind.  Each returns a column for `DataTable`.

import { element, setAttribute, setText } from "./dom.js";
import { age, bytes, count, latency, rate, some, traffic } from "./format.js";
import { workerAddress } from "./route.js";
import { showState, statePlace } from "./states.js";

const number = (write, width) => (key, label, full, more) => ({
  key,
  label,
  full,
  width,
  isNumber: true,
  text: (row) => write(row[key]),
  ...more,
});

export const rateColumn = number(rate, 9);
export const countColumn = number(count, 9);
export const latencyColumn = number(latency, 10);
export const ageColumn = number(age, 11);
export const bytesColumn = number(bytes, 10);
export const trafficColumn = number(traffic, 12);

/** Plain text. */
export function textColumn(key, label, width = 16, more = {}) {
  return { key, label, width, text: (row) => String(row[key] ?? "–"), ...more };
}

/** Text as it stands in a program. */
export function codeColumn(key, label, width = 24, more = {}) {
  return {
    key,
    label,
    width,
    make: () => element("code"),
    show: (cell, row) => setText(cell, String(row[key] ?? "–")),
    ...more,
  };
}

/** The name of a worker, which leads to its view. */
export function workerColumn(key, label, width = 16, more = {}) {
  return {
    key,
    label,
    width,
    make: () => element("a"),
    show: (link, row) => showWorker(link, row[key]),
    ...more,
  };
}

function showWorker(link, name) {
  setText(link, name ?? "–");
  setAttribute(link, "href", name == null ? null : workerAddress(name));
}

/** Names of workers, the first few of which lead to their views. */
export function workersColumn(key, label, leftOutKey, width = 24) {
  return {
    key,
    label,
    width,
    isSorted: false,
    make: () => element("span", { class: "names" }),
    show: (place, row) => showNames(place, row[key] ?? [], row[leftOutKey] ?? 0),
  };
}

function showNames(place, names, leftOut) {
  const text = JSON.stringify([names, leftOut]);
  if (place.dataset.shown === text) return;
  place.dataset.shown = text;
  const nodes = names.flatMap((name, index) => [
    index ? ", " : "",
    element("a", { href: workerAddress(name) }, name),
  ]);
  if (leftOut) nodes.push(` and ${count(leftOut)} more`);
  place.replaceChildren(...(nodes.length ? nodes : ["nobody"]));
}

/** A state, with a shape. */
export function stateColumn(key = "state", label = "State", width = 12, more = {}) {
  return {
    key,
    label,
    width,
    make: statePlace,
    show: (place, row) => showState(place, row[key]),
    ...more,
  };
}

/** A first line, and the other lines on demand. */
export function linesColumn(key, label, width = 40, leftOutKey = null) {
  return {
    key,
    label,
    width,
    isSorted: false,
    make: () =>
      element("details", { class: "lines" }, element("summary"), element("pre")),
    show: (place, row) => showLines(place, row[key] ?? [], row[leftOutKey] ?? 0),
  };
}

function showLines(place, lines, leftOut) {
  const [summary, rest] = place.children;
  setText(summary, lines[0] ?? "–");
  const more = leftOut ? [`and ${count(leftOut)} more`] : [];
  setText(rest, [...lines.slice(1), ...more].join("\n"));
  place.classList.toggle("alone", lines.length < 2);
}

/** A list of texts on one line. */
export function listColumn(key, label, width = 24) {
  return {
    key,
    label,
    width,
    isSorted: false,
    text: (row) => some((row[key] ?? []).map(String)) || "–",
  };
}
