// What each stage of a pipeline did, as spans on one axis of time: the gaps are the bubble.

import { drawn, element, KeyedList, setAttribute, setText } from "./dom.js";
import { count, counted, latency, share } from "./format.js";
import { workerAddress } from "./route.js";

const WIDE = 1000; // units of the drawing; the page stretches it
const KINDS = ["forward", "backward"];

/** How long a stage was busy between the first and the last span of all, and the rest. */
export function sharesOf(stages) {
  const spans = stages.flatMap((stage) => stage.spans);
  if (!spans.length) return null;
  const from = Math.min(...spans.map((span) => span.start_s));
  const to = Math.max(...spans.map((span) => span.end_s));
  const length = to - from;
  const busy = stages.map(({ spans: own }) =>
    length ? Math.min(1, busyS(own) / length) : null,
  );
  return { from, length, busy };
}

/** Seconds that spans cover, each moment once. */
function busyS(spans) {
  let [sum, until] = [0, -Infinity];
  for (const { start_s, end_s, kind } of [...spans].sort((a, b) => a.start_s - b.start_s)) {
    if (kind === "idle") continue;
    sum += Math.max(0, end_s - Math.max(start_s, until));
    until = Math.max(until, end_s);
  }
  return sum;
}

export class StageSpans {
  #rows = element("div", { class: "stages" });
  #lanes = new KeyedList(this.#rows, makeLane, fillLane);
  #legend = element("p", { class: "legend" });
  #scale = element("p", { class: "note" });

  constructor() {
    this.element = element("div", {}, this.#legend, this.#rows, this.#scale);
  }

  /** Show stages, and what is known of the step that they belong to. */
  show(stages, step) {
    const shares = sharesOf(stages);
    this.element.hidden = shares == null;
    if (shares == null) return;
    const { from, length, busy } = shares;
    const lanes = stages.map((stage, at) => ({ stage, from, length, busy: busy[at] }));
    this.#lanes.show(lanes, ({ stage }) => `${stage.stage} ${stage.worker}`);
    const kinds = [...new Set(stages.flatMap((stage) => stage.spans.map((span) => span.kind)))];
    const text = kinds.join(" ");
    if (this.#legend.dataset.shown !== text) {
      this.#legend.dataset.shown = text;
      this.#legend.replaceChildren(
        ...kinds.filter((kind) => kind !== "idle").map((kind) =>
          element("span", {}, element("span", { class: "swatch", "data-kind": kindOf(kind) }), ` ${kind}`),
        ),
        element("span", {}, element("span", { class: "swatch idle" }), " idle: the bubble"),
      );
    }
    setText(this.#scale, [
      step == null ? null : `Step ${count(step.number)}, schedule ${step.schedule}.`,
      `From the first span to the last: ${latency(shares.length)}.`,
      step?.bubble == null ? null : `Bubble: ${share(step.bubble)} of all stages' time.`,
      step?.left_out ? `${counted(step.left_out, "stage")} left out.` : null,
      step?.is_of_one_clock === false
        ? "The clocks of its workers are not known to agree: stages may be shifted."
        : null,
    ].filter(Boolean).join(" "));
  }
}

function makeLane() {
  const link = element("a");
  return element(
    "div",
    { class: "stage" },
    element("span", { class: "stage-name" }, element("span"), link),
    drawn("svg", { viewBox: `0 0 ${WIDE} 20`, preserveAspectRatio: "none", role: "img" }),
    element("span", { class: "stage-share" }),
  );
}

function fillLane(lane, { stage, from, length, busy }) {
  const [name, drawing, told] = lane.children;
  setText(name.firstChild, `Stage ${stage.stage}, `);
  setText(name.lastChild, stage.worker);
  setAttribute(name.lastChild, "href", workerAddress(stage.worker));
  setText(told, `busy ${share(busy)}, idle ${share(busy == null ? null : 1 - busy)}`);
  const spans = stage.spans.filter((span) => span.kind !== "idle");
  const words = `Stage ${stage.stage} on ${stage.worker}: ${wordsOf(spans)}busy ${share(busy)}`;
  setAttribute(drawing, "aria-label", words);
  const unit = length ? WIDE / length : 0;
  drawing.replaceChildren(...spans.map((span) => boxOf(span, from, unit)));
}

function boxOf({ start_s, end_s, kind }, from, unit) {
  const width = Math.max(1, (end_s - start_s) * unit);
  const x = (start_s - from) * unit;
  const title = drawn("title", {}, `${kind}, ${latency(end_s - start_s)}`);
  return drawn("rect", { x, y: 0, width, height: 20, "data-kind": kindOf(kind) }, title);
}

function wordsOf(spans) {
  const counts = new Map();
  for (const { kind } of spans) counts.set(kind, (counts.get(kind) ?? 0) + 1);
  return [...counts].map(([kind, number]) => `${number} × ${kind}, `).join("");
}

const kindOf = (kind) => (KINDS.includes(kind) ? kind : "other");
