// The group at a glance: its totals, their last minutes, its workers and their links.

import {
  ageColumn, bytesColumn, countColumn, latencyColumn, rateColumn, stateColumn, textColumn,
  trafficColumn, workerColumn,
} from "../cells.js";
import { LineChart } from "../chart.js";
import { element } from "../dom.js";
import { bytes, count, latency, rate, traffic } from "../format.js";
import { LinkMatrix } from "../matrix.js";
import { DataTable } from "../table.js";
import { Facts, Refusal, viewOf } from "./parts.js";

const COLUMNS = [
  workerColumn("worker", "Worker", 18),
  stateColumn(),
  countColumn("rank", "Rank", null, { width: 7 }),
  rateColumn("made_per_s", "Made/s", "Calls made per second"),
  rateColumn("served_per_s", "Served/s", "Calls served per second"),
  rateColumn("failed_per_s", "Failed/s", "Calls failed per second"),
  latencyColumn("p50_s", "p50", "Half of the calls made take at most"),
  latencyColumn("p99_s", "p99", "99 of 100 calls made take at most"),
  trafficColumn("bytes_per_s", "Traffic", "Bytes of the calls made per second"),
  latencyColumn("lag_s", "Loop lag", "How late the event loop is"),
  countColumn("calls_under_way", "Under way", "Calls under way", { width: 11 }),
  countColumn("tasks", "Tasks", null, { width: 8 }),
  countColumn("references", "Refs", "References held"),
  bytesColumn("memory_bytes", "Memory", "Memory of the process"),
  bytesColumn("slab_bytes", "Slab", "Shared memory held for messages"),
  textColumn("host", "Host", 16),
  countColumn("pid", "Process", null, { width: 10, text: (row) => String(row.pid ?? "–") }),
  ageColumn("since_s", "Up for", "Time since its start"),
];

const TOTALS = [
  ["calls_made_per_s", "Calls made per second", rate],
  ["calls_served_per_s", "Calls served per second", rate],
  ["failed_per_s", "Calls failed per second", rate],
  ["bytes_per_s", "Traffic", traffic],
  ["memory_bytes", "Memory", bytes],
  ["references", "References", count],
];

class Overview {
  title = "Overview";
  #refusal = new Refusal();
  #totals = new Facts(TOTALS, "totals");
  #made = new LineChart("Calls made per second", rate);
  #slow = new LineChart("99 of 100 calls take at most", latency);
  #memory = new LineChart("Memory", bytes, 2);
  #table;
  #links;

  constructor(page) {
    this.#table = new DataTable({
      page,
      name: "workers",
      caption: "Workers",
      columns: COLUMNS,
      keyOf: (row) => row.worker,
      isAsked: true,
      empty: "No worker is known. A worker stands here once it has joined the group.",
      why: "they did not tell in time.",
    });
    this.#links = new LinkMatrix(page);
    const charts = [this.#made, this.#slow, this.#memory].map((chart) => chart.element);
    this.element = viewOf(
      this.title,
      null,
      this.#refusal.element,
      this.#totals.element,
      element("div", { class: "charts" }, charts),
      this.#table.element,
      this.#links.element,
    );
  }

  show(look) {
    this.#refusal.show(null);
    this.#totals.show(look.totals);
    const { at_s: times, made_per_s: made, p99_s: slow, memory_bytes: memory } = look.history;
    this.#made.show(times, made);
    this.#slow.show(times, slow);
    this.#memory.show(times, memory);
    this.#table.show(look);
    this.#links.show(look.links);
  }

  follow() {
    this.#table.follow();
    this.#links.follow();
  }

  refuse(why) {
    this.#refusal.show(why);
  }
}

export const overview = {
  title: "Overview",
  asks: () => "overview",
  make: (page) => new Overview(page),
};
