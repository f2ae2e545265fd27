// The links between workers: a row for who sends, a column for who receives.  The arrow
// keys go from cell to cell, and the line below says what the cell is about.

import { element, setAttribute, setText } from "./dom.js";
import { count, counted, latency, rate, traffic } from "./format.js";
import { workerAddress } from "./route.js";
import { shapeOf, toneOf } from "./states.js";

const LEVELS = 4; // of the shade
const WIDE_MAX = 8; // so many workers have room for numbers in the cells

const MEASURES = {
  bytes_per_s: ["Traffic", traffic],
  calls_per_s: ["Calls per second", rate],
  in_flight: ["Calls in flight", count],
  p50_s: ["Half of the calls take at most", latency],
};

export class LinkMatrix {
  #page;
  #links = { workers: [], cells: [], left_out: 0 };
  #at = [0, 1]; // the cell that Tab leads to
  #grid = element("table", { class: "matrix", role: "grid" });
  #scroll = element("div", { class: "scroll" }, this.#grid);
  #legend = element("p", { class: "legend" });
  #line = element("p", { class: "told", id: "link-told" });
  #note = element("p", { class: "note", hidden: true });
  #empty = element("p", { class: "empty", hidden: true });
  #choice;
  #names = null; // the workers that the grid has rows for

  constructor(page) {
    this.#page = page;
    this.#choice = element(
      "select",
      { onchange: () => page.go({ link: this.#choice.value }, { isNoted: false }) },
      Object.entries(MEASURES).map(([key, [label]]) => element("option", { value: key }, label)),
    );
    const heading = element("h2", { id: "links-title" }, "Links");
    setAttribute(this.#grid, "aria-labelledby", "links-title");
    setAttribute(this.#grid, "aria-describedby", "link-told");
    this.element = element(
      "section",
      { class: "table links", "aria-labelledby": "links-title" },
      element(
        "div", { class: "table-head" },
        heading, element("label", {}, "Shade by ", this.#choice),
      ),
      this.#scroll, this.#empty, this.#line, this.#legend, this.#note,
    );
    this.#listen();
  }

  show(links) {
    this.#links = links;
    const { workers, left_out: leftOut } = links;
    if (JSON.stringify(workers) !== JSON.stringify(this.#names)) this.#make(workers);
    this.#fill();
    this.#empty.hidden = workers.length > 1;
    this.#scroll.hidden = this.#line.hidden = this.#legend.hidden = workers.length < 2;
    setText(this.#empty, "One worker has no link. With a second one, its links stand here.");
    const rest =
      `${counted(leftOut, "worker")} left out: the matrix has those of this page of the ` +
      "table, and 32 at most.";
    setText(this.#note, leftOut ? rest : "");
    this.#note.hidden = !leftOut;
  }

  follow() {
    this.#fill();
  }

  #measure() {
    const chosen = this.#page.route.params.get("link");
    return chosen in MEASURES ? chosen : "bytes_per_s";
  }

  // --- the grid --------------------------------------------------------------------

  #make(workers) {
    const hadFocus = this.#grid.contains(document.activeElement);
    this.#names = workers;
    this.#grid.classList.toggle("wide", workers.length <= WIDE_MAX);
    const heads = workers.map((name) =>
      element("th", { scope: "col" }, element("span", { title: name }, name)),
    );
    const corner = element("td", { class: "corner" }, "from \\ to");
    const rows = workers.map((from, row) =>
      element(
        "tr",
        {},
        element("th", { scope: "row", title: from }, element("a", { href: workerAddress(from) }, from)),
        workers.map((_, column) => this.#makeCell(row, column)),
      ),
    );
    this.#grid.replaceChildren(
      element("thead", {}, element("tr", {}, corner, heads)),
      element("tbody", {}, rows),
    );
    this.#at = this.#at.map((place) => Math.max(0, Math.min(place, workers.length - 1)));
    this.#point(this.#at, hadFocus);
  }

  #makeCell(row, column) {
    const shape = element("span", { class: "shape", "aria-hidden": "true" });
    const words = element("span", { "aria-hidden": "true" });
    return element(
      "td",
      { role: "gridcell", tabindex: -1, "data-at": `${row} ${column}` },
      shape,
      words,
    );
  }

  #fill() {
    const key = this.#measure();
    if (document.activeElement !== this.#choice) this.#choice.value = key;
    const [, write] = MEASURES[key];
    const values = this.#links.cells.flat().map((cell) => cell?.[key] ?? 0);
    const highest = Math.max(0, ...values);
    const states = new Set();
    this.#links.cells.forEach((cells, row) => {
      cells.forEach((cell, column) => {
        this.#fillCell(this.#cell(row, column), cell, { row, column, key, write, highest });
        if (cell && toneOf(cell.state) !== "good") states.add(cell.state);
      });
    });
    this.#showLegend(write, highest, [...states].sort());
    this.#tell();
  }

  #fillCell(node, cell, { row, column, key, write, highest }) {
    if (node == null) return;
    const isSelf = row === column;
    const value = cell?.[key];
    setAttribute(node, "data-level", cell ? levelOf(value, highest) : null);
    setAttribute(node, "data-self", isSelf);
    setAttribute(node, "aria-label", this.#words(row, column));
    const [shape, words] = node.children;
    const isOdd = cell != null && toneOf(cell.state) !== "good";
    setAttribute(shape, "data-shape", isOdd ? shapeOf(cell.state) : "none");
    setAttribute(node, "data-tone", isOdd ? toneOf(cell.state) : null);
    const isWide = this.#names.length <= WIDE_MAX;
    setText(words, isWide && cell && value != null ? write(value) : "");
  }

  #words(row, column) {
    const [from, to] = [this.#names[row], this.#names[column]];
    const cell = this.#links.cells[row]?.[column];
    if (row === column && cell == null) return `${from} itself`;
    if (cell == null) return `${from} to ${to}: no link`;
    const told = Object.entries(MEASURES)
      .filter(([key]) => cell[key] != null)
      .map(([key, [label, write]]) => `${label.toLowerCase()} ${write(cell[key])}`);
    return `${from} to ${to}: ${[cell.state, ...told].filter(Boolean).join(", ")}`;
  }

  #showLegend(write, highest, states) {
    const text = JSON.stringify([write(highest), states]);
    if (this.#legend.dataset.shown === text) return;
    this.#legend.dataset.shown = text;
    const shades = Array.from({ length: LEVELS + 1 }, (_, level) =>
      element("span", { class: "swatch", "data-level": level }),
    );
    const shapes = states.map((state) =>
      element(
        "span", { class: "state", "data-tone": toneOf(state) },
        element("span", { class: "shape", "data-shape": shapeOf(state) }), state,
      ),
    );
    this.#legend.replaceChildren(
      element("span", {}, "Shade: 0 ", shades, ` ${write(highest)}`),
      element("span", {}, element("span", { class: "swatch none" }), " no link"),
      ...shapes,
    );
  }

  // --- pointer and keys ------------------------------------------------------------

  #cell(row, column) {
    return this.#grid.tBodies[0]?.rows[row]?.cells[column + 1];
  }

  #listen() {
    const placeOf = (event) => event.target.closest("[data-at]")?.dataset.at.split(" ").map(Number);
    this.#grid.addEventListener("keydown", (event) => this.#onKey(event));
    this.#grid.addEventListener("focusin", (event) => {
      const place = placeOf(event);
      if (place) this.#point(place);
    });
    this.#grid.addEventListener("pointerover", (event) => {
      const place = placeOf(event);
      if (place) this.#tell(place);
    });
    this.#grid.addEventListener("pointerleave", () => this.#tell());
    this.#grid.addEventListener("click", (event) => {
      const place = placeOf(event);
      if (place) this.#point(place, true);
    });
  }

  #onKey(event) {
    if (!event.target.closest("[data-at]")) return;
    const [row, column] = this.#at;
    const last = this.#names.length - 1;
    const isFar = event.ctrlKey || event.metaKey;
    const moved = {
      ArrowUp: [row - 1, column], ArrowDown: [row + 1, column],
      ArrowLeft: [row, column - 1], ArrowRight: [row, column + 1],
      Home: [isFar ? 0 : row, 0], End: [isFar ? last : row, last],
      PageUp: [0, column], PageDown: [last, column],
    }[event.key];
    if (moved == null) return;
    event.preventDefault();
    this.#point(moved.map((place) => Math.min(last, Math.max(0, place))), true);
  }

  /** Make a cell the one that Tab leads to, and perhaps go there. */
  #point(place, hasFocus = false) {
    this.#cell(...this.#at)?.setAttribute("tabindex", "-1");
    this.#at = place;
    const cell = this.#cell(...place);
    cell?.setAttribute("tabindex", "0");
    if (hasFocus) cell?.focus();
    this.#tell();
  }

  #tell(place = this.#at) {
    setText(this.#line, this.#names?.length > 1 ? this.#words(...place) : "");
  }
}

/** The step of the shade: 0 for nothing, then by the share of the highest. */
function levelOf(value, highest) {
  if (!value || !highest) return 0;
  return Math.max(1, Math.ceil((value / highest) * LEVELS));
}
