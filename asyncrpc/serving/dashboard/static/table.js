// A table: sorted, in pages, with a field to find rows by, and a word on what it leaves
// out.  Its rows are changed in place.
//
// The server sorts and pages the table that a view is about (`isAsked`).  The smaller
// tables of a view come as a whole; those are sorted here, and their parameters in the
// address begin with the table's name.

import { element, KeyedList, setAttribute, setText } from "./dom.js";
import { count } from "./format.js";
import { Pager } from "./pager.js";

const PER_PAGE = 50;
const BROAD = 24; // a first column wider than this moves along on a small screen
const STRETCH = 2; // so much wider than it must be a table may get that ends in a number
const FIND_AFTER_MS = 250;
let made = 0;

/**
 * A column: `key` of the row; `label`; `full`, if the label is short; `width` in digits;
 * `isNumber`; `make()` returns what a cell holds, and `show(cell, row)` fills it; or
 * `text(row)` alone.  `isSorted: false`: no order of it makes sense.
 */
export class DataTable {
  #columns;
  #options;
  #body = element("tbody");
  #rows;
  #heads = new Map();
  #scroll;
  #empty = element("p", { class: "empty", hidden: true });
  #note = element("p", { class: "note", hidden: true });
  #amount = element("span", { class: "amount" });
  #pager;
  #find = null;
  #whole = []; // the rows of a table that is not asked for

  /** Options: page, name, caption, columns, keyOf, empty, isAsked, canFind, level, perPage. */
  constructor(options) {
    this.#options = {
      canFind: options.isAsked, level: 2, perPage: PER_PAGE, keyOf: (row) => row.key, ...options,
    };
    this.#columns = options.columns;
    this.#rows = new KeyedList(this.#body, () => this.#makeRow(), (row, item) => this.#change(row, item));
    this.#pager = new Pager(options.caption, (changes) => this.#go(changes));
    this.#scroll = this.#makeTable();
    this.element = this.#make();
    watchWidth(this.#scroll);
  }

  /** Show what a look told: `{rows, total, first, left_out, sort, order}`, or rows. */
  show(told) {
    if (this.#options.isAsked) this.#show(told);
    else this.#showWhole(told);
  }

  /** Show the rows again: the address has changed. */
  follow() {
    if (this.#find && document.activeElement !== this.#find) {
      this.#find.value = this.#given("find") ?? "";
    }
    if (!this.#options.isAsked) this.#showWhole(this.#whole);
  }

  // --- what is shown ---------------------------------------------------------------

  #show({ rows, total, first, left_out: leftOut, sort, order }) {
    this.#rows.show(rows, this.#options.keyOf);
    this.#mark(sort, order);
    const perPage = Number(this.#given("per_page")) || this.#options.perPage;
    this.#pager.show({ total, first, shown: rows.length, perPage });
    setText(this.#amount, count(total));
    const found = this.#given("find");
    setText(this.#empty, found ? `Nothing has "${found}" in it.` : this.#options.empty);
    this.#empty.hidden = rows.length > 0;
    this.#scroll.hidden = rows.length === 0;
    setText(this.#note, leftOut ? `${count(leftOut)} left out: ${this.#options.why}` : "");
    this.#note.hidden = !leftOut;
  }

  #showWhole(told) {
    this.#whole = told;
    const { rows, left_out } = Array.isArray(told) ? { rows: told } : told;
    const sort = this.#given("sort") ?? this.#options.sort;
    const order = this.#given("order") ?? this.#options.order ?? "up";
    const sorted = sort ? ordered(rows, sort, order) : rows;
    const perPage = Number(this.#given("per_page")) || this.#options.perPage;
    const pages = Math.max(1, Math.ceil(rows.length / perPage));
    const at = Math.min(pages, Math.max(1, Number(this.#given("page")) || 1));
    const from = (at - 1) * perPage;
    this.#show({
      rows: sorted.slice(from, from + perPage),
      total: rows.length,
      first: rows.length ? from + 1 : 0,
      left_out,
      sort,
      order,
    });
  }

  #mark(sort, order) {
    for (const [key, head] of this.#heads) {
      const direction = order === "down" ? "descending" : "ascending";
      setAttribute(head, "aria-sort", key === sort ? direction : null);
    }
  }

  // --- what it is made of ----------------------------------------------------------

  #make() {
    const { caption, level, canFind, name, isAsked } = this.#options;
    const id = `table-${name}-${(made += 1)}`;
    const heading = element(`h${level}`, { id }, caption, " ", this.#amount);
    this.#scroll.setAttribute("aria-labelledby", id);
    this.#scroll.firstChild.setAttribute("aria-labelledby", id);
    const head = element("div", { class: "table-head" }, heading);
    if (canFind && isAsked) head.append(this.#makeFind());
    return element(
      "section",
      { class: "table", "aria-labelledby": id },
      head,
      this.#scroll,
      this.#empty,
      this.#note,
      this.#pager.element,
    );
  }

  #makeFind() {
    let waiting = null;
    this.#find = element("input", {
      type: "search",
      value: this.#given("find"),
      autocomplete: "off",
      spellcheck: "false",
      oninput: () => {
        clearTimeout(waiting);
        waiting = setTimeout(() => this.#findNow(), FIND_AFTER_MS);
      },
    });
    return element("label", { class: "find" }, "Find ", this.#find);
  }

  #findNow() {
    const find = this.#find.value.trim();
    if (find !== (this.#given("find") ?? "")) this.#go({ find, page: null }, false);
  }

  #makeTable() {
    const columns = this.#columns.map((column) => {
      const place = element("col");
      place.style.width = `${column.width}ch`;
      return place;
    });
    const heads = this.#columns.map((column) => this.#makeHead(column));
    const table = element(
      "table",
      {},
      element("colgroup", {}, columns),
      element("thead", {}, element("tr", {}, heads)),
      this.#body,
    );
    const width = this.#columns.reduce((sum, column) => sum + column.width, 0);
    table.classList.toggle("broad", this.#columns[0].width > BROAD);
    table.style.minWidth = `${width}ch`;
    if (this.#columns.at(-1).isNumber) table.style.maxWidth = `${STRETCH * width}ch`;
    return element("div", { class: "scroll", role: "region" }, table);
  }

  #makeHead(column) {
    const cell = element("th", { scope: "col", class: column.isNumber ? "number" : null });
    const label = column.full
      ? [
          element("span", { "aria-hidden": "true" }, column.label),
          element("span", { class: "unseen" }, column.full),
        ]
      : [column.label];
    const title = column.full ?? null;
    if (column.isSorted === false) {
      cell.append(element("span", { title }, label));
      return cell;
    }
    const press = () => this.#sortBy(column, cell.getAttribute("aria-sort"));
    const arrow = element("span", { class: "arrow", "aria-hidden": "true" });
    const parts = column.isNumber ? [arrow, label] : [label, arrow];
    cell.append(element("button", { type: "button", title, onclick: press }, parts));
    this.#heads.set(column.key, cell);
    return cell;
  }

  #makeRow() {
    const cells = this.#columns.map((column, index) => {
      const kind = column.isNumber ? "number" : null;
      const cell = index
        ? element("td", { class: kind })
        : element("th", { scope: "row", class: kind });
      if (column.make) cell.append(column.make());
      return cell;
    });
    return element("tr", {}, cells);
  }

  #change(row, item) {
    this.#columns.forEach((column, index) => {
      const cell = row.children[index];
      if (column.show) column.show(cell.firstChild, item);
      else setText(cell, column.text(item));
    });
    this.#options.onRow?.(row, item);
  }

  // --- the address -----------------------------------------------------------------

  #parameter(key) {
    return this.#options.isAsked ? key : `${this.#options.name}.${key}`;
  }

  #given(key) {
    return this.#options.page.route.params.get(this.#parameter(key));
  }

  #go(changes, isNoted = true) {
    const named = Object.entries(changes).map(([key, value]) => [this.#parameter(key), value]);
    this.#options.page.go(Object.fromEntries(named), { isNoted });
  }

  #sortBy(column, sorted) {
    const first = column.isNumber ? "down" : "up";
    const other = first === "down" ? "up" : "down";
    const isFirst = sorted === (first === "down" ? "descending" : "ascending");
    const order = isFirst ? other : first;
    this.#go({ sort: column.key, order, page: null });
    const way = order === "down" ? "largest first" : "smallest first";
    this.#options.page.say(`Sorted by ${column.full ?? column.label}, ${way}`);
  }
}

/** Rows in order of a key; what is not known comes last either way. */
function ordered(rows, key, order) {
  const sign = order === "down" ? -1 : 1;
  const compare = (one, other) => {
    const [a, b] = [one[key], other[key]];
    if (a == null || b == null) return (a == null) - (b == null);
    if (typeof a === "number" && typeof b === "number") return sign * (a - b);
    return sign * String(a).localeCompare(String(b), "en", { numeric: true });
  };
  return [...rows].sort(compare);
}

/** Let the keyboard scroll what is wider or higher than its place. */
function watchWidth(scroll) {
  const look = () => {
    const isCut =
      scroll.scrollWidth > scroll.clientWidth || scroll.scrollHeight > scroll.clientHeight;
    setAttribute(scroll, "tabindex", isCut ? 0 : null);
  };
  const watcher = new ResizeObserver(look);
  watcher.observe(scroll);
  watcher.observe(scroll.firstChild);
}
