// The calls that are not answered yet, as both of their ends know them.

import { ageColumn, codeColumn, stateColumn, textColumn, workerColumn } from "../cells.js";
import { listed } from "./listed.js";

export const calls = listed({
  title: "Calls",
  about: "Calls that are not answered yet, joined from their two ends.",
  name: "calls",
  caption: "Calls under way",
  columns: [
    codeColumn("function", "Function", 32),
    workerColumn("caller", "Caller", 18),
    workerColumn("callee", "Callee", 18),
    ageColumn("age_s", "Age"),
    stateColumn("state", "State", 22),
    textColumn("kind", "Kind", 12),
    textColumn("call_id", "Call", 20),
  ],
  keyOf: (row) => `${row.caller} ${row.callee} ${row.call_id}`,
  empty:
    "No call is under way at this moment. Short calls come and go between two looks; " +
    "one that takes long stands here.",
  why: "workers tell of so many calls, and not of more.",
});
