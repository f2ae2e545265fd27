// What views are made of, besides tables and drawings.

import { element, setText } from "../dom.js";

/** A view's element, with its heading. */
export function viewOf(title, note, ...parts) {
  const heading = element("h1", { tabindex: -1 }, title);
  const place = element("section", { class: "view" }, heading);
  if (note) place.append(element("p", { class: "about" }, note));
  place.append(...parts);
  return place;
}

/** A line for why the server refuses a view; hidden if it does not. */
export class Refusal {
  element = element("p", { class: "trouble", role: "alert", hidden: true });

  show(why) {
    setText(this.element, why ?? "");
    this.element.hidden = why == null;
  }
}

/** Names and values, such as the totals of a group. */
export class Facts {
  #places = new Map();

  /** `facts` are [key, label, write]. */
  constructor(facts, kind = "facts") {
    const items = facts.map(([key, label, write]) => {
      const value = element("dd", {}, "–");
      this.#places.set(key, [value, write]);
      return element("div", {}, element("dt", {}, label), value);
    });
    this.element = element("dl", { class: kind }, items);
  }

  show(values) {
    for (const [key, [place, write]] of this.#places) setText(place, write(values[key]));
  }
}
