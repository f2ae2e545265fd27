// Pages of a table: which rows are shown, of how many.

import { element, setAttribute, setText } from "./dom.js";
import { count } from "./format.js";

const CHOICES = [10, 25, 50, 100, 200];
const USUAL = 50;

/** Buttons for the first, previous, next and last page; hidden if one page has all. */
export class Pager {
  #words = element("span", { class: "shown" });
  #size;
  #buttons;
  #at = { page: 1, pages: 1 };

  /** `go(changes)` changes the parameters `page` and `per_page`. */
  constructor(caption, go) {
    const button = (label, target) =>
      element(
        "button",
        {
          type: "button",
          onclick: () => {
            const page = target(this.#at);
            if (page >= 1 && page <= this.#at.pages && page !== this.#at.page) go({ page });
          },
        },
        label,
      );
    this.#buttons = [
      [button("First", () => 1), ({ page }) => page > 1],
      [button("Previous", ({ page }) => page - 1), ({ page }) => page > 1],
      [button("Next", ({ page }) => page + 1), ({ page, pages }) => page < pages],
      [button("Last", ({ pages }) => pages), ({ page, pages }) => page < pages],
    ];
    const options = CHOICES.map((size) => element("option", { value: size }, String(size)));
    this.#size = element(
      "select",
      { onchange: () => go({ per_page: this.#size.value, page: null }) },
      options,
    );
    this.element = element(
      "nav",
      { class: "pager", "aria-label": `Pages of ${caption}` },
      this.#words,
      this.#buttons.map(([node]) => node),
      element("label", {}, "Rows ", this.#size),
    );
  }

  /** Show where in a table one is. */
  show({ total, first, shown, perPage }) {
    const pages = Math.max(1, Math.ceil(total / perPage));
    const page = first ? Math.floor((first - 1) / perPage) + 1 : 1;
    this.#at = { page, pages };
    const rows = `${count(first)} to ${count(first + shown - 1)} of ${count(total)}`;
    setText(this.#words, rows);
    for (const [node, isOpen] of this.#buttons) {
      setAttribute(node, "aria-disabled", isOpen(this.#at) ? null : "true");
    }
    const size = String(perPage);
    if (![...this.#size.options].some((option) => option.value === size)) {
      this.#size.append(element("option", { value: size }, size));
    }
    if (document.activeElement !== this.#size) this.#size.value = size;
    this.element.hidden = pages === 1 && perPage <= USUAL;
  }
}
