// States in words and shapes: colour alone would not do.

import { element, setAttribute, setText } from "./dom.js";

// Of workers, links, tasks, calls and collectives: word -> [shape, tone].
const STATES = {
  well: ["dot", "good"],
  busy: ["half", "warn"],
  stalled: ["triangle", "warn"],
  blocked: ["triangle", "bad"],
  silent: ["cross", "bad"],
  stopped: ["square", "bad"],
  gone: ["cross", "bad"],
  lost: ["cross", "bad"],
  broken: ["cross", "bad"],
  draining: ["half", "calm"],
  closed: ["square", "calm"],
  suspect: ["triangle", "warn"],
  connecting: ["half", "calm"],
  open: ["dot", "good"],
  runs: ["dot", "good"],
  failed: ["cross", "bad"],
  done: ["dot", "calm"],
  ok: ["dot", "good"],
  live: ["dot", "good"],
  committed: ["dot", "good"],
  waits: ["ring", "calm"],
  "under way": ["half", "calm"],
};

/** The shape of a state. */
export function shapeOf(state) {
  return STATES[state]?.[0] ?? "ring";
}

/** How a state is to be taken: "good", "calm", "warn" or "bad". */
export function toneOf(state) {
  return STATES[state]?.[1] ?? "calm";
}

/** A place for a state; `showState` fills it. */
export function statePlace() {
  const shape = element("span", { class: "shape", "aria-hidden": "true" });
  return element("span", { class: "state" }, shape, element("span"));
}

/** Show a state, and more words on it. */
export function showState(place, state, words = state) {
  const [shape, text] = place.children;
  setAttribute(place, "data-tone", toneOf(state));
  setAttribute(shape, "data-shape", shapeOf(state));
  setText(text, words ?? "not known");
}
