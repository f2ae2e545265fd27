// The drawing of who waits for whom.  Its nodes are buttons over a drawing of the edges:
// the arrow keys follow the waits, and Enter, or a click, shows what a node does.

import { drawn, element, KeyedList, setAttribute, setText } from "./dom.js";
import { age, count } from "./format.js";
import { inLines, layOut, partsOf } from "./layers.js";
import { workerAddress } from "./route.js";

const NODE_WIDTH = 232;
const GAPS = { gapX: 40, gapY: 44 };
const MARGIN = { x: 14, y: 30 }; // an edge may pass below the last row, and above the first
const LANE = 18; // between edges that lead upwards, on the right side
const ENTRY = 24; // beside the middle of a node, where these leave and come
const CORNER = 9;

export class WaitGraph {
  #nodes = [];
  #edges = [];
  #cycle = new Set();
  #fault = null;
  #alike = new Map(); // by first node: how many parts more that look the same
  #chosen = null;
  #current = null; // the node that Tab leads to
  #lines = drawn("svg", { "aria-hidden": "true" });
  #layer = element("div", { class: "nodes" });
  #boxes;
  #canvas;
  #panel = element("section", { class: "node-told", "aria-live": "off" });
  #shape = null; // of the graph that is laid out

  constructor() {
    this.#boxes = new KeyedList(
      this.#layer,
      (node) => this.#makeBox(node),
      (box, node) => this.#fillBox(box, node),
    );
    this.#canvas = element("div", { class: "canvas" }, this.#lines, this.#layer);
    const hint = element(
      "p",
      { class: "note", id: "graph-hint" },
      "Arrow down: what it waits for. Arrow up: who waits for it. Enter: what it does.",
    );
    const scroll = element(
      "div",
      {
        class: "scroll graph",
        role: "group",
        "aria-label": "Who waits for whom",
        "aria-describedby": "graph-hint",
      },
      this.#canvas,
    );
    this.element = element("div", { class: "graph-place" }, hint, scroll, this.#panel);
    this.#canvas.addEventListener("keydown", (event) => this.#onKey(event));
    new ResizeObserver(() => this.#place()).observe(scroll);
  }

  /** Show `nodes` and `edges`, with the ids of a cycle, and of who is at fault. */
  show({ nodes: told, edges, cycle, at_fault: fault }) {
    const all = new Set(told.map((node) => node.id));
    const inside = edges.filter((edge) => all.has(edge.from) && all.has(edge.to));
    const parts = onceEach(partsOf(told, inside), new Set([...cycle, fault]));
    const nodes = parts.flatMap((part) => part.nodes);
    const known = new Set(nodes.map((node) => node.id));
    this.#nodes = nodes;
    this.#edges = parts.flatMap((part) => part.edges);
    this.#alike = new Map(parts.map((part) => [part.nodes[0].id, part.alike]));
    this.#cycle = new Set(cycle);
    this.#fault = fault;
    if (!known.has(this.#chosen)) this.#chosen = null;
    if (!known.has(this.#current)) this.#current = nodes[0]?.id ?? null;
    this.#boxes.show(nodes, (node) => node.id);
    this.#place();
    this.#showPanel();
  }

  // --- a node ----------------------------------------------------------------------

  #makeBox(node) {
    const box = element(
      "button",
      {
        type: "button",
        "data-id": node.id,
        onclick: () => this.#choose(node.id),
        onfocus: () => this.#point(node.id),
      },
      element("span", { class: "who" }),
      element("code"),
      element("span", { class: "since" }),
      element("strong"),
      element("span", { class: "alike" }),
    );
    box.style.width = `${NODE_WIDTH}px`;
    return box;
  }

  #fillBox(box, node) {
    const [who, label, since, verdict, alike] = box.children;
    setText(who, [node.worker, node.kind].filter(Boolean).join(" · "));
    setText(label, shortLabel(node));
    setText(alike, this.#alikeWords(node.id));
    setText(since, this.#waitLine(node));
    setText(verdict, this.#verdict(node.id));
    setAttribute(box, "data-role", this.#role(node.id));
    setAttribute(box, "aria-pressed", String(node.id === this.#chosen));
    setAttribute(box, "tabindex", node.id === this.#current ? 0 : -1);
    setAttribute(box, "aria-label", this.#name(node));
  }

  /** For how long a node waits, and for what. */
  #waitLine(node) {
    const own = this.#edges.filter((edge) => edge.from === node.id);
    const whats = [...new Set(own.map((edge) => edge.label).filter(Boolean))].map(plain);
    const since = node.age_s == null ? "" : age(node.age_s);
    if (node.trouble) return [node.trouble, since].filter(Boolean).join(", ");
    if (!own.length) return [plain(node.detail?.[0] ?? ""), since].filter(Boolean).join(", ");
    return ["waits", since, whats.length ? `for ${whats.join("; ")}` : ""].filter(Boolean).join(" ");
  }

  #alikeWords(id) {
    const alike = this.#alike.get(id) ?? 0;
    return alike ? `and ${count(alike)} more alike, not drawn` : "";
  }

  #role(id) {
    if (this.#cycle.has(id)) return "cycle"; // all of it is at fault
    return id === this.#fault ? "fault" : null;
  }

  #verdict(id) {
    return { fault: "at fault", cycle: "in the cycle" }[this.#role(id)] ?? "";
  }

  #name(node) {
    const waits = this.#edges
      .filter((edge) => edge.from === node.id)
      .map((edge) => this.#waitWords(edge));
    const parts = [
      nameOf(node),
      node.age_s == null ? null : `for ${age(node.age_s)}`,
      this.#verdict(node.id),
      this.#alikeWords(node.id),
      ...waits,
    ];
    return parts.filter(Boolean).join(", ");
  }

  #waitWords(edge) {
    const to = this.#nodes.find((node) => node.id === edge.to);
    const words = nameOf(to);
    return edge.label ? `${plain(edge.label)}: ${words}` : `waits for ${words}`;
  }

  // --- places ----------------------------------------------------------------------

  #place() {
    if (!this.#nodes.length || !this.#layer.offsetParent) return;
    const nodes = this.#nodes.map(({ id }) => ({
      id,
      width: NODE_WIDTH,
      height: this.#boxes.node(id).offsetHeight,
    }));
    const room = this.element.clientWidth;
    const shape = JSON.stringify([nodes, this.#edges, [...this.#cycle], this.#fault, room]);
    if (shape === this.#shape) return;
    this.#shape = shape;
    const found = partsOf(nodes, this.#edges).map((part) => ({
      ...part,
      ...layOut(part.nodes, part.edges, GAPS),
    }));
    const sizes = found.map(sizeOf);
    const lines = inLines(sizes, { width: room, gap: GAPS.gapX / 2 });
    this.#canvas.style.width = `${lines.width}px`;
    this.#canvas.style.height = `${lines.height}px`;
    setAttribute(this.#lines, "width", lines.width);
    setAttribute(this.#lines, "height", lines.height);
    const ways = found.map((part, at) => this.#placePart(part, lines.places[at]));
    this.#lines.replaceChildren(drawn("defs", {}, tip("tip"), tip("tip-cycle")), ...ways);
  }

  #placePart(part, { x, y }) {
    for (const { id } of part.nodes) {
      const place = part.places.get(id);
      const { style } = this.#boxes.node(id);
      style.left = `${x + place.x + MARGIN.x}px`;
      style.top = `${y + place.y + MARGIN.y}px`;
    }
    let turns = 0;
    const ways = part.edges.map((edge) => {
      const isTurned = part.turned.has(edge) || edge.from === edge.to;
      const isIn = this.#cycle.has(edge.from) && this.#cycle.has(edge.to);
      const kinds = ["edge", isIn && "cycle", edge.is_sure === false && "unsure"];
      return drawn("path", {
        d: isTurned ? upwards(edge, part, (turns += 1)) : downwards(edge, part),
        class: kinds.filter(Boolean).join(" "),
        "marker-end": `url(#${isIn ? "tip-cycle" : "tip"})`,
      });
    });
    return drawn("g", { transform: `translate(${x} ${y})` }, ways);
  }

  // --- pointer and keys ------------------------------------------------------------

  #onKey(event) {
    const id = event.target.closest("[data-id]")?.dataset.id;
    if (id == null) return;
    const next = {
      ArrowDown: () => this.#edges.find((edge) => edge.from === id)?.to,
      ArrowUp: () => this.#edges.find((edge) => edge.to === id)?.from,
      ArrowLeft: () => this.#beside(id, -1),
      ArrowRight: () => this.#beside(id, 1),
      Home: () => this.#nodes[0].id,
      End: () => this.#fault ?? this.#nodes.at(-1).id,
    }[event.key]?.();
    if (next == null) return;
    event.preventDefault();
    this.#boxes.node(next).focus();
  }

  /** The next node to the left or right, in the same layer. */
  #beside(id, way) {
    const at = (one) => this.#boxes.node(one).getBoundingClientRect();
    const here = at(id);
    return this.#nodes
      .map((node) => node.id)
      .filter((one) => one !== id && Math.abs(at(one).top - here.top) < 1)
      .filter((one) => (at(one).left - here.left) * way > 0)
      .sort((one, other) => (at(one).left - at(other).left) * way)[0];
  }

  #point(id) {
    if (this.#current != null) this.#boxes.node(this.#current)?.setAttribute("tabindex", "-1");
    this.#current = id;
    this.#boxes.node(id).setAttribute("tabindex", "0");
  }

  #choose(id) {
    this.#chosen = this.#chosen === id ? null : id;
    for (const node of this.#nodes) this.#fillBox(this.#boxes.node(node.id), node);
    this.#showPanel();
  }

  #showPanel() {
    const node = this.#nodes.find((one) => one.id === this.#chosen);
    this.#panel.hidden = node == null;
    if (node == null) return;
    const lines = node.detail?.length ? node.detail.join("\n") : "Nothing more is known of it.";
    const text = JSON.stringify([node.id, lines]);
    if (this.#panel.dataset.shown === text) return;
    this.#panel.dataset.shown = text;
    const name = nameOf(node);
    this.#panel.replaceChildren(
      element("h3", {}, name),
      element("pre", { tabindex: 0, "aria-label": `What ${name} does` }, lines),
    );
    if (node.worker) {
      const link = element("a", { href: workerAddress(node.worker) }, `All of ${node.worker}`);
      this.#panel.append(element("p", {}, link));
    }
  }
}

/** Words without the marks of code. */
const plain = (words) => words.replaceAll("`", "");

/** A node's label, without its kind in front, and without the marks of code. */
function shortLabel({ kind, label }) {
  const words = plain(label ?? "");
  return kind && words.startsWith(`${kind} `) ? words.slice(kind.length + 1) : words;
}

/** What a node is called: "ps task evict". */
export function nameOf(node) {
  return [node.worker, node.kind, shortLabel(node)].filter(Boolean).join(" ");
}

/** Of parts that look the same the first, with the number of the others; those of the
 * verdict stay. */
function onceEach(parts, verdict) {
  const found = new Map();
  for (const part of parts) {
    const isKept = part.nodes.some((node) => verdict.has(node.id));
    const look = isKept ? part.nodes[0].id : lookOf(part);
    const first = found.get(look);
    if (first == null) found.set(look, { ...part, alike: 0 });
    else first.alike += 1;
  }
  return [...found.values()];
}

function lookOf({ nodes, edges }) {
  const number = new Map(nodes.map((node, at) => [node.id, at]));
  return JSON.stringify([
    nodes.map((node) => [node.worker, node.kind, node.label, node.trouble]),
    edges.map((edge) => [number.get(edge.from), number.get(edge.to), edge.label, edge.is_sure]),
  ]);
}

/** The room that a part needs, with that for edges upwards. */
function sizeOf({ width, height, edges, turned }) {
  const turns = edges.filter((edge) => turned.has(edge) || edge.from === edge.to).length;
  const side = turns ? LANE * (turns + 1) : 0;
  return { width: width + 2 * MARGIN.x + side, height: height + 2 * MARGIN.y };
}

/** From the bottom of a node to the top of one below it. */
function downwards(edge, { places, ways }) {
  const [from, to] = [places.get(edge.from), places.get(edge.to)];
  const points = [[middleOf(from), from.y + from.height]];
  for (const bend of ways.get(edge) ?? []) {
    points.push([middleOf(bend), bend.y], [middleOf(bend), bend.y + bend.height]);
  }
  points.push([middleOf(to), to.y - 2]);
  const moved = points.map(([x, y]) => [x + MARGIN.x, y + MARGIN.y]);
  const hops = moved.slice(1).map(([x, y], index) => {
    const [x0, y0] = moved[index];
    const middle = (y0 + y) / 2;
    return `C${x0} ${middle} ${x} ${middle} ${x} ${y}`;
  });
  return `M${moved[0].join(" ")}${hops.join("")}`;
}

/** The way of an edge that closes a cycle: through the gaps, and up the right side. */
function upwards(edge, { places, width, bottoms }, turn) {
  const [from, to] = [places.get(edge.from), places.get(edge.to)];
  const lane = width + LANE * turn;
  const shift = ENTRY + 4 * (turn - 1);
  const low = bottoms.get(edge.from) + GAPS.gapY / 2 - 4;
  const high = to.y - GAPS.gapY / 2 + 4;
  return rounded([
    [middleOf(from) + shift, from.y + from.height],
    [middleOf(from) + shift, low],
    [lane, low],
    [lane, high],
    [middleOf(to) + shift, high],
    [middleOf(to) + shift, to.y - 2],
  ].map(([x, y]) => [x + MARGIN.x, y + MARGIN.y]));
}

const middleOf = ({ x, width }) => x + width / 2;

/** A way of straight parts, with round corners. */
function rounded(points) {
  const parts = [`M${points[0].join(" ")}`];
  for (let at = 1; at < points.length - 1; at += 1) {
    const corner = points[at];
    parts.push(`L${toward(corner, points[at - 1])}Q${corner.join(" ")} ${toward(corner, points[at + 1])}`);
  }
  parts.push(`L${points.at(-1).join(" ")}`);
  return parts.join("");
}

/** The point that is a corner's radius from `corner` on the way to `other`. */
function toward([x, y], [x1, y1]) {
  const length = Math.hypot(x1 - x, y1 - y) || 1;
  const share = Math.min(CORNER, length / 2) / length;
  return `${x + (x1 - x) * share} ${y + (y1 - y) * share}`;
}

function tip(id) {
  return drawn(
    "marker",
    {
      id, viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 8, markerHeight: 8,
      orient: "auto-start-reverse", markerUnits: "userSpaceOnUse",
    },
    drawn("path", { d: "M0 0 8 4 0 8Z" }),
  );
}
