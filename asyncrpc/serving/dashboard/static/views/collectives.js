// Collectives: under way, and the last ones.

import {
  ageColumn, bytesColumn, countColumn, stateColumn, textColumn,
} from "../cells.js";
import { element, setText } from "../dom.js";
import { counted, ranks } from "../format.js";
import { listed } from "./listed.js";

/** Who has come: in words, for a set of ranks may be large. */
const came = {
  key: "came",
  label: "Came",
  width: 16,
  isSorted: false,
  text: (row) => ranks(row.came),
};

const missing = {
  key: "missing",
  label: "Missing",
  width: 24,
  isSorted: false,
  make: () => element("span", { class: "state" }),
  show: (place, row) => {
    const none = !row.missing?.length;
    place.dataset.tone = none ? "calm" : "warn";
    setText(place, none ? "none" : `${ranks(row.missing)}: ${counted(row.missing.length, "rank")}`);
  },
};

export const collectives = listed({
  title: "Collectives",
  about: "What all ranks of a group do together: under way, and the last ones.",
  name: "collectives",
  caption: "Collectives",
  columns: [
    textColumn("group", "Group", 24),
    countColumn("sequence", "Number", "Number of the collective in its group", { width: 10 }),
    textColumn("kind", "Kind", 18),
    stateColumn("state", "State", 14),
    came,
    missing,
    ageColumn("age_s", "Age"),
    bytesColumn("bytes", "Size", "Bytes of a rank"),
  ],
  keyOf: (row) => `${row.group} ${row.sequence}`,
  empty:
    "No collective was seen. One stands here once the ranks of a group come together, " +
    "as in an all_reduce or a barrier.",
  why: "workers tell of their last collectives, and not of older ones.",
});
