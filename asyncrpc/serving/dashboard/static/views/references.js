// References, and who holds them.

import {
  ageColumn, codeColumn, countColumn, stateColumn, workerColumn, workersColumn,
} from "../cells.js";
import { showState } from "../states.js";
import { listed } from "./listed.js";

/** The state, and which holder tells it if the owner has not answered. */
function showWord(place, row) {
  const isSure = row.is_owners_word !== false;
  showState(place, row.state, isSure ? row.state : `${row.state}, says a holder`);
}

export const references = listed({
  title: "References",
  about:
    "Values that workers own for others. One that grows old, and is held by who should " +
    "be done with it, is a leak.",
  name: "references",
  caption: "References",
  columns: [
    codeColumn("reference", "Reference", 24),
    codeColumn("type", "Type", 20),
    workerColumn("owner", "Owner", 18),
    ageColumn("age_s", "Age"),
    workersColumn("holders", "Held by", "holders_left_out", 32),
    countColumn("local_users", "Handles", "Python objects that refer to it at its owner"),
    countColumn("lent", "Lent", "Copies on their way between two others"),
    workerColumn("creator", "Made by", 16),
    stateColumn("state", "State", 12, { show: showWord }),
  ],
  keyOf: (row) => `${row.owner} ${row.reference}`,
  empty:
    "No reference is held. One stands here once a worker makes a remote object, or " +
    "returns a reference.",
  why: "workers tell of so many references, and not of more.",
});
