// Numbers, times and lists in words.  What is not known is null, and shown as a dash.

export const UNKNOWN = "–";

const WHOLE = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const TENTH = new Intl.NumberFormat("en", { maximumFractionDigits: 1 });
const CLOCK = new Intl.DateTimeFormat("en-GB", { timeStyle: "medium" });
const BYTES = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
const LISTED_MAX = 8;

const isKnown = (value) => typeof value === "number" && Number.isFinite(value);

/** A whole number, as in "1,204". */
export function count(value) {
  return isKnown(value) ? WHOLE.format(value) : UNKNOWN;
}

/** How often a second, as in "0.4" or "1,204". */
export function rate(value) {
  if (!isKnown(value)) return UNKNOWN;
  if (value === 0) return "0";
  if (value < 0.05) return "<0.1";
  return value < 9.95 ? value.toFixed(1) : WHOLE.format(value);
}

function threeDigits(value) {
  if (value >= 99.95) return WHOLE.format(value);
  return value >= 9.995 ? value.toFixed(1) : value.toFixed(2);
}

/** A short time, as a call takes it: "240 µs", "31.5 ms", "1.20 s". */
export function latency(value) {
  if (!isKnown(value) || value < 0) return UNKNOWN;
  if (value === 0) return "0";
  if (value < 9.995e-4) return `${threeDigits(value * 1e6)} µs`;
  if (value < 0.9995) return `${threeDigits(value * 1e3)} ms`;
  return value < 600 ? `${threeDigits(value)} s` : age(value);
}

/** How long something lasts, as in "41 s" or "3 h 20 min". */
export function age(value) {
  if (!isKnown(value) || value < 0) return UNKNOWN;
  if (value < 9.95) return `${value.toFixed(1)} s`;
  if (value < 120) return `${Math.round(value)} s`;
  const minutes = Math.floor(value / 60);
  if (minutes < 60) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  if (hours < 48) return `${hours} h ${minutes % 60} min`;
  return `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

/** A number of bytes, as in "1.2 MiB". */
export function bytes(value) {
  if (!isKnown(value)) return UNKNOWN;
  let size = value;
  let unit = 0;
  while (size >= 1023.5 && unit < BYTES.length - 1) {
    size /= 1024;
    unit += 1;
  }
  const shown = unit === 0 || size >= 99.5 ? WHOLE.format(size) : TENTH.format(size);
  return `${shown} ${BYTES[unit]}`;
}

/** Bytes a second, as in "1.2 MiB/s". */
export function traffic(value) {
  return isKnown(value) ? `${bytes(value)}/s` : UNKNOWN;
}

/** A share, as in "12 %". */
export function share(value) {
  return isKnown(value) ? `${Math.round(value * 100)} %` : UNKNOWN;
}

/** The time of a day, as in "12:03:11". */
export function clock(at) {
  return isKnown(at) ? CLOCK.format(new Date(at * 1000)) : UNKNOWN;
}

/** Ranks, with runs of them joined: "0–3, 5". */
export function ranks(values) {
  const runs = [];
  for (const value of [...(values ?? [])].sort((a, b) => a - b)) {
    const last = runs.at(-1);
    if (last && value === last[1] + 1) last[1] = value;
    else if (!last || value !== last[1]) runs.push([value, value]);
  }
  const shown = runs.map(([from, to]) => (from === to ? `${from}` : `${from}–${to}`));
  return shown.length ? some(shown) : "none";
}

/** The first of a list, and how many more: "a, b, and 3 more". */
export function some(texts, most = LISTED_MAX) {
  if (texts.length <= most) return texts.join(", ");
  const shown = texts.slice(0, most).join(", ");
  return `${shown}, and ${count(texts.length - most)} more`;
}

/** A number and its noun: "1 worker", "4 workers". */
export function counted(value, one, many = `${one}s`) {
  return `${count(value)} ${value === 1 ? one : many}`;
}
