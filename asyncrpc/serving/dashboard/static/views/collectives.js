// Collectives: under way, and the last ones.

import {
  ageColumn, bytesColumn, countColumn, latencyColumn, stateColumn, textColumn,
} from "../cells.js";
import { element, setAttribute, setText } from "../dom.js";
import { count, ranks, some } from "../format.js";
import { listed } from "./listed.js";

const NAMED_MAX = 3;

/** Who has come: in words, for a set of ranks may be large. */
const came = {
  key: "came",
  label: "Came",
  width: 16,
  text: (row) => ranks(row.came),
};

const missing = {
  key: "missing",
  label: "Missing",
  width: 24,
  make: () => element("span", { class: "state" }),
  show: (place, row) => {
    setAttribute(place, "data-tone", row.missing.length ? "warn" : "calm");
    const parts = [row.missing.length || !row.unknown.length ? absent(row) : null];
    if (row.unknown.length) parts.push(`${ranks(row.unknown)} tell nothing`);
    if (row.ranks_left_out) parts.push(`${count(row.ranks_left_out)} left out`);
    setText(place, parts.filter(Boolean).join("; "));
  },
};

/** The ranks that have not come, with the names of their workers. */
function absent({ missing: absentRanks, workers }) {
  const names = absentRanks.map((rank) => workers[rank]).filter(Boolean);
  return names.length ? `${ranks(absentRanks)} (${some(names, NAMED_MAX)})` : ranks(absentRanks);
}

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
    latencyColumn("took_s", "Took"),
    bytesColumn("bytes", "Size", "Bytes of a rank"),
    textColumn("at", "Where", 28, { isSorted: false }),
  ],
  keyOf: (row) => `${row.group} ${row.sequence}`,
  empty:
    "No collective was seen. One stands here once the ranks of a group come together, " +
    "as in an all_reduce or a barrier.",
  why: "workers tell of their last collectives, and not of older ones.",
});
