// Training: passes, optimizer steps, buckets of gradients, and a pipeline's bubble.

import {
  ageColumn, bytesColumn, codeColumn, countColumn, latencyColumn, rateColumn, stateColumn,
  textColumn, workerColumn, workersColumn,
} from "../cells.js";
import { element } from "../dom.js";
import { StageSpans } from "../spans.js";
import { DataTable } from "../table.js";
import { Refusal, viewOf } from "./parts.js";

const COLUMNS = [
  workerColumn("worker", "Worker", 18),
  rateColumn("passes_per_s", "Passes/s", "Backward passes per second"),
  rateColumn("steps_per_s", "Steps/s", "Optimizer steps per second"),
  rateColumn("collectives_per_s", "Collectives/s", "Collectives per second", { width: 14 }),
  latencyColumn("backward_p50_s", "Backward p50", "Half of the backward passes take at most", { width: 15 }),
  latencyColumn("step_p50_s", "Step p50", "Half of the optimizer steps take at most", { width: 12 }),
];

const PASSES = [
  workerColumn("worker", "Worker", 18),
  workerColumn("root", "Begun by", 18),
  textColumn("context", "Context", 22),
  stateColumn("state", "State", 14),
  ageColumn("age_s", "Age"),
  latencyColumn("took_s", "Took"),
];

const STEPS = [
  workerColumn("worker", "Worker", 18),
  codeColumn("optimizer", "Optimizer", 18),
  workersColumn("owners", "Parameters on", "owners_left_out", 28),
  stateColumn("state", "State", 14),
  ageColumn("age_s", "Age"),
  latencyColumn("took_s", "Took"),
];

const BUCKETS = [
  workerColumn("worker", "Worker", 18),
  countColumn("bucket", "Bucket"),
  bytesColumn("bytes", "Size"),
  rateColumn("per_s", "Reduced/s", "Reductions per second", { width: 12 }),
  latencyColumn("p50_s", "p50", "Half of the reductions take at most"),
];

class Training {
  title = "Training";
  #refusal = new Refusal();
  #table;
  #passes;
  #steps;
  #buckets;
  #spans = new StageSpans();
  #noSpans = element(
    "p", { class: "empty" },
    "No stage of a pipeline was seen. Once a pipeline runs a step, what each of its " +
      "stages did stands here on one axis of time; the gaps are the bubble.",
  );

  constructor(page) {
    this.#table = new DataTable({
      page,
      name: "training",
      caption: "Workers",
      columns: COLUMNS,
      keyOf: (row) => row.worker,
      isAsked: true,
      empty: "No worker trains. A worker stands here once it runs a backward pass or a step.",
      why: "they did not tell in time.",
    });
    this.#passes = new DataTable({
      page,
      name: "passes",
      caption: "Backward passes",
      columns: PASSES,
      keyOf: (row) => `${row.worker} ${row.context} ${row.root}`,
      perPage: 10,
      empty:
        "No backward pass over several workers was seen. One stands here once a program " +
        "calls autograd.backward in a context.",
      why: "only the last ones are shown.",
    });
    this.#steps = new DataTable({
      page,
      name: "steps",
      caption: "Optimizer steps",
      columns: STEPS,
      keyOf: (row) => `${row.worker} ${row.optimizer}`,
      perPage: 10,
      empty:
        "No step of a distributed optimizer was seen. One stands here once a program " +
        "awaits its step.",
      why: "only the last ones are shown.",
    });
    this.#buckets = new DataTable({
      page,
      name: "buckets",
      caption: "Buckets of gradients",
      columns: BUCKETS,
      keyOf: (row) => `${row.worker} ${row.bucket}`,
      empty: "No bucket was reduced. They stand here once a data parallel module trains.",
      why: "workers tell of the last ones.",
    });
    this.element = viewOf(
      this.title,
      null,
      this.#refusal.element,
      this.#table.element,
      element(
        "section", { class: "table", "aria-labelledby": "bubble-title" },
        element("h2", { id: "bubble-title" }, "Pipeline"),
        this.#spans.element,
        this.#noSpans,
      ),
      this.#passes.element,
      this.#steps.element,
      this.#buckets.element,
    );
  }

  show(look) {
    this.#refusal.show(null);
    this.#table.show(look);
    this.#spans.show(look.pipeline, look.pipeline_step);
    this.#noSpans.hidden = !this.#spans.element.hidden;
    this.#passes.show({ rows: look.passes, left_out: look.passes_left_out });
    this.#steps.show({ rows: look.steps, left_out: look.steps_left_out });
    const buckets = look.rows.flatMap((row) =>
      (row.buckets ?? []).map((bucket) => ({ worker: row.worker, ...bucket })),
    );
    this.#buckets.show(buckets);
  }

  follow() {
    for (const table of [this.#table, this.#passes, this.#steps, this.#buckets]) table.follow();
  }

  refuse(why) {
    this.#refusal.show(why);
  }
}

export const training = {
  title: "Training",
  asks: () => "training",
  make: (page) => new Training(page),
};
