// Why the group is stuck: in a sentence, and as a drawing.

import { ageColumn, textColumn } from "../cells.js";
import { element, setText } from "../dom.js";
import { counted } from "../format.js";
import { nameOf, WaitGraph } from "../graph.js";
import { DataTable } from "../table.js";
import { Refusal, viewOf } from "./parts.js";

const COLUMNS = [
  textColumn("who", "Who waits", 32),
  textColumn("label", "How", 32, { text: (row) => plain(row.label ?? "–") }),
  textColumn("whom", "For whom", 32),
  ageColumn("age_s", "Since"),
];

class Hangs {
  title = "Hangs";
  #refusal = new Refusal();
  #sentences = element("ul", { class: "sentences", "aria-label": "Why the group is stuck" });
  #nothing = element("p", { class: "empty", hidden: true });
  #graph = new WaitGraph();
  #page;
  #table;
  #note = element("p", { class: "note", hidden: true });
  #rest;
  #thorough;

  constructor(page) {
    this.#table = new DataTable({
      page,
      name: "waits",
      caption: "The waits of the drawing",
      columns: COLUMNS,
      keyOf: (row) => row.key,
      level: 3,
      empty: "Nothing of the drawing waits for something else in it.",
    });
    this.#thorough = element("input", {
      type: "checkbox",
      onchange: () => page.go({ thorough: this.#thorough.checked ? "yes" : null }),
    });
    this.#thorough.checked = page.route.params.get("thorough") === "yes";
    this.#page = page;
    this.#rest = element(
      "div", { class: "drawing" },
      element("h2", {}, "Who waits for whom"),
      this.#graph.element, this.#note,
      element("details", { class: "same" }, element("summary", {}, "The same as a table"), this.#table.element),
    );
    this.element = viewOf(
      this.title, null,
      this.#refusal.element, this.#sentences, this.#nothing,
      element(
        "label", {}, this.#thorough,
        " Find out what nothing can end, too: each look then holds each worker for some 25 ms",
      ),
      this.#rest,
    );
  }

  show(look) {
    this.#refusal.show(null);
    this.#showSentences(look.sentences);
    this.#nothing.hidden = look.sentences.length > 0;
    const after = look.after_s == null ? "so long" : `more than ${look.after_s} s`;
    setText(
      this.#nothing,
      `Nothing waits ${after} for what does not come. If something does, a sentence here ` +
        "says why, and a drawing shows who waits for whom.",
    );
    this.#rest.hidden = look.nodes.length === 0;
    if (look.nodes.length) this.#graph.show(look);
    this.#table.show(waitsOf(look));
    this.#showLeftOut(look);
  }

  #showLeftOut({ left_out: waits = 0, sentences_left_out: sentences = 0 }) {
    const parts = [
      waits
        ? `${counted(waits, "task or thread", "tasks and threads")} left out: they are not on ` +
          "the way to the verdict."
        : null,
      sentences ? `${counted(sentences, "more sentence")} left out.` : null,
    ].filter(Boolean);
    this.#note.hidden = parts.length === 0;
    setText(this.#note, parts.join(" "));
  }

  #showSentences(sentences) {
    const text = JSON.stringify(sentences);
    if (this.#sentences.dataset.shown === text) return;
    this.#sentences.dataset.shown = text;
    this.#sentences.hidden = sentences.length === 0;
    const times = new Map();
    for (const one of sentences) times.set(one, (times.get(one) ?? 0) + 1);
    const items = [...times].map(([one, number]) => {
      const again = number > 1 ? [" ", element("span", { class: "times" }, `(${number} times)`)] : [];
      return element("li", {}, marked(one), again);
    });
    this.#sentences.replaceChildren(...items);
  }

  follow() {
    this.#thorough.checked = this.#page.route.params.get("thorough") === "yes";
    this.#table.follow();
  }

  refuse(why) {
    this.#refusal.show(why);
  }
}

const plain = (words) => words.replaceAll("`", "");

/** A sentence, with what stands between backticks as code. */
function marked(sentence) {
  return sentence
    .split(/(`[^`]*`)/)
    .filter(Boolean)
    .map((part) => (/^`.*`$/s.test(part) ? element("code", {}, part.slice(1, -1)) : part));
}

function waitsOf({ nodes, edges }) {
  const byId = new Map(nodes.map((node) => [node.id, node]));
  const name = (id) => nameOf(byId.get(id));
  return edges
    .filter((edge) => byId.has(edge.from) && byId.has(edge.to))
    .map((edge) => ({
      key: `${edge.from} ${edge.to}`,
      who: name(edge.from),
      label: edge.label,
      whom: name(edge.to),
      age_s: byId.get(edge.from).age_s,
    }));
}

export const hangs = {
  title: "Hangs",
  asks: () => "hangs",
  add: (asked, { params }) => {
    if (params.get("thorough") === "yes") asked.set("thorough", "yes");
  },
  make: (page) => new Hangs(page),
};
