// A view that is one table, which the server sorts and pages.

import { DataTable } from "../table.js";
import { Refusal, viewOf } from "./parts.js";

/** One table, with a title. */
export class Listed {
  #refusal = new Refusal();
  #table;

  constructor(page, { title, about, ...table }) {
    this.title = title;
    this.#table = new DataTable({ page, isAsked: true, ...table });
    this.element = viewOf(title, about, this.#refusal.element, this.#table.element);
  }

  show(look) {
    this.#refusal.show(null);
    this.#table.show(look);
  }

  follow() {
    this.#table.follow();
  }

  refuse(why) {
    this.#refusal.show(why);
  }
}

/** A view of one table; `options` are those of `DataTable`, `title` and `about`. */
export function listed(options) {
  return {
    title: options.title,
    asks: () => options.name,
    make: (page) => new Listed(page, options),
  };
}
