// A line over the last minutes, with its axes, and a reading of any point of it by the
// pointer or by the arrow keys.

import { drawn, element, setAttribute, setText } from "./dom.js";
import { clock } from "./format.js";

const HEIGHT = 132;
const EDGE = { top: 8, right: 10, bottom: 22, left: 62 };
// The axis is the first of these that holds all points, in so many steps.
const SPANS_S = [60, 120, 300, 600];
const SPAN_STEPS = { 60: 4, 120: 4, 300: 5, 600: 5 };
const STEPS = [1, 2, 2.5, 5, 10];

export class LineChart {
  #words;
  #write;
  #base;
  #axes = drawn("g", { class: "axes" });
  #line = drawn("path", { class: "line" });
  #area = drawn("path", { class: "area" });
  #mark = drawn("g", { class: "mark" }, drawn("line"), drawn("circle", { r: 3.5 }));
  #drawing;
  #value = element("span", { class: "value" });
  #when = element("span", { class: "when" });
  #points = []; // {at, value}, oldest first
  #read = null; // the point that is read; null: the last one
  #width = 0;

  /** `write(value)` shows a value; `base` is what its ticks are round in: 10, or 2. */
  constructor(title, write, base = 10) {
    this.#words = title;
    this.#write = write;
    this.#base = base;
    this.#mark.setAttribute("visibility", "hidden");
    this.#drawing = drawn(
      "svg",
      { height: HEIGHT, tabindex: 0, role: "slider", "aria-orientation": "horizontal" },
      this.#axes, this.#area, this.#line, this.#mark,
    );
    setAttribute(this.#drawing, "aria-label", `${title}, over the last minutes`);
    this.element = element(
      "figure",
      { class: "chart", "aria-label": title },
      element("figcaption", {}, element("span", {}, title), this.#value, this.#when),
      this.#drawing,
    );
    this.#listen();
    new ResizeObserver(() => this.#draw()).observe(this.element);
  }

  /** Show values by their times. */
  show(times, values) {
    const read = this.#read == null ? null : this.#points[this.#read]?.at;
    this.#points = times.map((at, index) => ({ at, value: values[index] }));
    if (read != null) {
      const at = this.#points.findIndex((point) => point.at >= read);
      this.#read = at < 0 ? null : at;
    }
    this.#draw();
  }

  // --- the drawing -----------------------------------------------------------------

  #draw() {
    this.#width = this.element.clientWidth;
    if (this.#width === 0) return;
    setAttribute(this.#drawing, "width", this.#width);
    const ticks = ticksFor(this.#highest(), this.#base);
    this.#axes.replaceChildren(...this.#valueAxis(ticks), ...this.#timeAxis());
    const y = this.#y(ticks.at(-1));
    const runs = this.#runs().map((run) => run.map((one) => [this.#x(one.at), y(one.value)]));
    setAttribute(this.#line, "d", runs.map(pathOf).join(""));
    const bottom = HEIGHT - EDGE.bottom;
    setAttribute(this.#area, "d", runs.map((run) => areaOf(run, bottom)).join(""));
    this.#showReading(y);
  }

  #valueAxis(ticks) {
    const y = this.#y(ticks.at(-1));
    return ticks.flatMap((tick) => [
      drawn("line", { x1: EDGE.left, x2: this.#width - EDGE.right, y1: y(tick), y2: y(tick) }),
      drawn(
        "text",
        { x: EDGE.left - 6, y: y(tick) + 4, "text-anchor": "end" },
        this.#write(tick),
      ),
    ]);
  }

  #timeAxis() {
    const span = this.#span();
    const steps = SPAN_STEPS[span];
    return Array.from({ length: steps + 1 }, (_, index) => {
      const ago = span - (span * index) / steps;
      const anchor = index === steps ? "end" : "middle";
      const x = this.#x(this.#now() - ago);
      return drawn("text", { x, y: HEIGHT - 6, "text-anchor": anchor }, agoOf(ago));
    });
  }

  #x(at) {
    const width = this.#width - EDGE.left - EDGE.right;
    return EDGE.left + width * (1 - (this.#now() - at) / this.#span());
  }

  #y(top) {
    const height = HEIGHT - EDGE.top - EDGE.bottom;
    return (value) => EDGE.top + height * (1 - value / top);
  }

  #now() {
    return this.#points.at(-1)?.at ?? 0;
  }

  #span() {
    const length = this.#now() - (this.#points[0]?.at ?? 0);
    return SPANS_S.find((span) => length <= span) ?? SPANS_S.at(-1);
  }

  #highest() {
    return Math.max(0, ...this.#points.map((point) => point.value ?? 0));
  }

  /** Points that are known, cut where one is not. */
  #runs() {
    const from = this.#now() - this.#span();
    const runs = [[]];
    for (const point of this.#points) {
      if (point.value == null) runs.push([]);
      else if (point.at >= from) runs.at(-1).push(point);
    }
    return runs.filter((run) => run.length);
  }

  // --- the reading -----------------------------------------------------------------

  #listen() {
    const drawing = this.#drawing;
    drawing.addEventListener("pointermove", (event) => {
      const x = event.clientX - drawing.getBoundingClientRect().left;
      this.#readAt(this.#nearest(x));
    });
    drawing.addEventListener("pointerleave", () => this.#readAt(null));
    drawing.addEventListener("blur", () => this.#readAt(null));
    drawing.addEventListener("keydown", (event) => {
      const last = this.#points.length - 1;
      const at = this.#read ?? last;
      const moved = {
        ArrowLeft: at - 1, ArrowDown: at - 1, ArrowRight: at + 1, ArrowUp: at + 1,
        PageDown: at - 10, PageUp: at + 10, Home: 0, End: last,
      }[event.key];
      if (moved == null) return;
      event.preventDefault();
      this.#readAt(Math.min(last, Math.max(0, moved)));
    });
  }

  #nearest(x) {
    let best = null;
    this.#points.forEach((point, index) => {
      const far = Math.abs(this.#x(point.at) - x);
      if (best == null || far < best.far) best = { far, index };
    });
    return best?.index ?? null;
  }

  #readAt(index) {
    this.#read = index;
    this.#showReading(this.#y(ticksFor(this.#highest(), this.#base).at(-1)));
  }

  #showReading(y) {
    const last = this.#points.length - 1;
    const at = this.#read ?? last;
    const point = this.#points[at];
    setText(this.#value, this.#write(point?.value));
    setText(this.#when, this.#read == null || !point ? "now" : clock(point.at));
    setAttribute(this.#drawing, "aria-valuemin", 0);
    setAttribute(this.#drawing, "aria-valuemax", Math.max(0, last));
    setAttribute(this.#drawing, "aria-valuenow", Math.max(0, at));
    const words = point ? `${this.#write(point.value)} at ${clock(point.at)}` : "nothing yet";
    setAttribute(this.#drawing, "aria-valuetext", words);
    const isSeen = this.#read != null && point?.value != null && this.#width > 0;
    setAttribute(this.#mark, "visibility", isSeen ? "visible" : "hidden");
    if (!isSeen) return;
    const [line, dot] = this.#mark.children;
    const x = this.#x(point.at);
    const ends = { x1: x, x2: x, y1: EDGE.top, y2: HEIGHT - EDGE.bottom };
    for (const [name, value] of Object.entries(ends)) setAttribute(line, name, value);
    setAttribute(dot, "cx", x);
    setAttribute(dot, "cy", y(point.value));
  }
}

/** Three round values, from 0 to at least the highest. */
function ticksFor(highest, base) {
  if (highest <= 0) return [0, 1];
  if (base === 2) {
    const top = 2 ** Math.ceil(Math.log2(highest));
    const fitting = top * 0.75 >= highest ? top * 0.75 : top;
    return [0, fitting / 2, fitting];
  }
  const size = 10 ** Math.floor(Math.log10(highest / 2));
  const step = STEPS.map((one) => one * size).find((one) => one * 2 >= highest) ?? 10 * size;
  return [0, step, 2 * step];
}

function agoOf(seconds) {
  if (seconds === 0) return "now";
  return seconds < 60 || seconds % 60 ? `−${seconds} s` : `−${seconds / 60} min`;
}

const place = ([x, y]) => `${x.toFixed(1)} ${y.toFixed(1)}`;

function pathOf(run) {
  if (run.length === 1) return `M${place(run[0])}h0.1`;
  return `M${run.map(place).join("L")}`;
}

function areaOf(run, bottom) {
  const [from, to] = [run[0][0], run.at(-1)[0]];
  return `M${from.toFixed(1)} ${bottom}L${run.map(place).join("L")}L${to.toFixed(1)} ${bottom}Z`;
}
