// One view's looks, as the server tells them: by server-sent events, with a connection
// that comes back, and a word on how old the last look is.

const FIRST_WAIT_S = 1;
const LONGEST_WAIT_S = 30;
const LATE_AFTER_S = 10; // at least; a look of a large group takes its time
const DEAD_AFTER_S = 60; // then the connection is made anew
const TICK_MS = 1000;

/**
 * The state of a connection:
 *   connecting  not yet a look
 *   live        looks come
 *   late        connected, but the last look is old
 *   lost        no connection; `retryAt` says when the next attempt is
 *   refused     the server says no, and why: trying again would not help
 *   paused      by the user, or because nobody sees the page
 */
export class LiveLook {
  #source = null;
  #address = null; // {path, query}
  #state = { kind: "paused" };
  #attempts = 0;
  #retry = null;
  #heardAt = 0;
  #isPaused = false;
  #told;

  /** `told` has `look(look)`, `state(state)` and `signIn(terms)`. */
  constructor(told) {
    this.#told = told;
    setInterval(() => this.#tick(), TICK_MS);
    addEventListener("online", () => this.retryNow());
    document.addEventListener("visibilitychange", () => this.#onVisibility());
  }

  /** Watch a view, such as `api/calls` with a query; null: watch nothing. */
  watch(address) {
    this.#address = address;
    this.#attempts = 0;
    this.#connect();
  }

  /** Take no looks, or take them again. */
  setPaused(isPaused) {
    this.#isPaused = isPaused;
    if (isPaused) this.#disconnect({ kind: "paused" });
    else this.#connect();
  }

  /** Try again at once, if the connection is lost. */
  retryNow() {
    if (this.#state.kind === "lost" || this.#state.kind === "refused") this.#connect();
  }

  #connect() {
    this.#close();
    if (this.#address == null || this.#isPaused) return;
    if (this.#state.kind !== "lost") this.#enter({ kind: "connecting" });
    const { path, query } = this.#address;
    const source = new EventSource(`${path}/live?${query}`);
    this.#source = source;
    this.#heardAt = now();
    source.addEventListener("look", (event) => this.#onLook(JSON.parse(event.data)));
    source.addEventListener("trouble", (event) => this.#onTrouble(event.data));
    source.addEventListener("error", () => this.#onError(source));
  }

  #onLook(look) {
    this.#attempts = 0;
    this.#heardAt = now();
    this.#enter({ kind: "live", everyS: look.every_s ?? 2 });
    this.#told.look(look);
  }

  #onTrouble(data) {
    this.#heardAt = now();
    this.#enter({ kind: "late", why: JSON.parse(data).why });
  }

  async #onError(source) {
    if (source !== this.#source) return;
    this.#close();
    const refusal = await whyNot(this.#address);
    if (this.#source != null || this.#isPaused) return; // meanwhile it went on
    if (refusal.terms) {
      this.#enter({ kind: "refused", why: "Sign in to look at the group." });
      this.#told.signIn(refusal.terms);
    } else if (refusal.why) {
      this.#enter({ kind: "refused", why: refusal.why });
    } else {
      this.#retryLater();
    }
  }

  #retryLater() {
    const wait = Math.min(LONGEST_WAIT_S, FIRST_WAIT_S * 2 ** this.#attempts);
    this.#attempts += 1;
    const waitMs = wait * (0.75 + Math.random() / 2) * 1000;
    this.#enter({ kind: "lost", retryAt: now() + waitMs });
    this.#retry = setTimeout(() => this.#connect(), waitMs);
  }

  #onVisibility() {
    if (document.hidden) this.#disconnect({ kind: "paused" });
    else if (this.#source == null && this.#state.kind === "paused") this.#connect();
  }

  #tick() {
    const silentS = (now() - this.#heardAt) / 1000;
    if (this.#source != null && silentS > DEAD_AFTER_S) {
      this.#close();
      this.#retryLater();
    } else if (this.#state.kind === "live") {
      const lateS = Math.max(LATE_AFTER_S, 4 * this.#state.everyS);
      if (silentS > lateS) this.#enter({ kind: "late", why: "No look has come since." });
    } else if (this.#state.kind === "lost") {
      this.#told.state(this.#state);
    }
  }

  /** The state changes, or `retryAt` comes nearer. */
  #enter(state) {
    this.#state = state;
    this.#told.state(state);
  }

  #disconnect(state) {
    this.#close();
    this.#enter(state);
  }

  #close() {
    clearTimeout(this.#retry);
    this.#source?.close();
    this.#source = null;
  }
}

const now = () => performance.now();

/** Ask why a stream ended: {terms} to sign in by, {why} of a refusal; or neither. */
async function whyNot({ path, query }) {
  try {
    const answer = await fetch(`${path}?${query}`);
    if (answer.status === 401) return { terms: await askTerms() };
    if (answer.ok || answer.status >= 500) return {};
    return { why: (await answer.json()).error ?? `The server says ${answer.status}.` };
  } catch {
    return {};
  }
}

/** Ask what the server wants to know of who looks. */
export async function askTerms() {
  const answer = await fetch("login", { headers: { Accept: "application/json" } });
  return answer.json();
}
