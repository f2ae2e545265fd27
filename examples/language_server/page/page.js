// The page: one stream of characters while the model writes, one of figures all the time.

const at = (id) => document.getElementById(id);

const RATE_SHOWN_MS = 200; // before, it says little

let writing = null; // an AbortController while the model writes

function showButtons() {
  at("write").disabled = writing !== null;
  at("stop").disabled = writing === null;
}

function say(element, text, failed = false) {
  element.textContent = text;
  element.classList.toggle("failed", failed);
}

function span(text, kind) {
  const made = document.createElement("span");
  made.className = kind;
  made.textContent = text;
  return made;
}

// Yield {event, data} of a response that is a stream of server-sent events.  An EventSource
// would not tell the status of a refusal, and would come again after the end.
async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let left = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const blocks = (left + value).split("\n\n");
    left = blocks.pop();
    for (const block of blocks) {
      const found = { event: "message", data: "" };
      for (const line of block.split("\n")) {
        const [, name, text] = /^(\w*): ?(.*)$/.exec(line) ?? [];
        if (name === "event") found.event = text;
        if (name === "data") found.data += text;
      }
      if (found.data) yield { event: found.event, data: JSON.parse(found.data) };
    }
  }
}

// What is shown of one text, as it comes.
class Progress {
  constructor() {
    this.begunMs = performance.now();
    this.firstMs = 0;
    this.characters = 0;
    for (const id of ["first", "rate", "version", "replica"]) at(id).textContent = "–";
    at("text").replaceChildren(span(at("prompt").value, "prompt"), span("", "written"));
    say(at("outcome"), "Waiting for a replica");
  }

  on({ event, data }) {
    if (event === "message") this.onText(data.text);
    if (event === "place") {
      at("replica").textContent = data.replica;
      at("version").textContent = data.version;
      say(at("outcome"), data.moved ? "The replica was lost; this one goes on" : "Writing");
    }
    if (event === "error") throw new Error(data.message);
    if (event === "end") this.showRate(performance.now());
    return event === "end";
  }

  onText(text) {
    const nowMs = performance.now();
    if (this.characters === 0) {
      this.firstMs = nowMs;
      at("first").textContent = `${Math.round(nowMs - this.begunMs)} ms`;
    }
    this.characters += text.length;
    at("text").lastChild.textContent += text;
    if (nowMs - this.firstMs > RATE_SHOWN_MS) this.showRate(nowMs);
  }

  showRate(nowMs) {
    const tookMs = nowMs - this.firstMs;
    if (tookMs > 0) at("rate").textContent = Math.round((1000 * this.characters) / tookMs);
  }
}

async function refusal(response) {
  const after = response.headers.get("Retry-After");
  const { message } = await response.json();
  return new Error(after ? `${message}; try again in ${after} s` : message);
}

async function write(event) {
  event.preventDefault();
  if (writing !== null) return;
  writing = new AbortController();
  showButtons();
  const progress = new Progress();
  try {
    const asked = new URLSearchParams(new FormData(at("prompt-form")));
    const response = await fetch(`write?${asked}`, { signal: writing.signal });
    if (!response.ok) throw await refusal(response);
    let isWhole = false;
    for await (const told of eventsOf(response)) isWhole = progress.on(told);
    if (!isWhole) throw new Error("The connection was lost");
    say(at("outcome"), `Done: ${progress.characters} characters`);
  } catch (error) {
    if (error.name === "AbortError") say(at("outcome"), `Stopped after ${progress.characters} characters`);
    else say(at("outcome"), error.message, true);
  } finally {
    writing = null;
    showButtons();
  }
}

function row(cells) {
  const made = document.createElement("tr");
  for (const text of cells) made.append(Object.assign(document.createElement("td"), { textContent: text }));
  return made;
}

function follow() {
  const events = new EventSource("figures"); // it comes again by itself
  events.addEventListener("message", (message) => {
    const figures = JSON.parse(message.data);
    at("replicas").replaceChildren(...figures.replicas.map(row));
    say(at("training"), figures.training);
    say(at("connection"), "");
  });
  events.addEventListener("error", () => say(at("connection"), "No connection to the server", true));
}

// Ask for something by a button, and say what came of it.
async function order(button, path) {
  button.disabled = true;
  try {
    const response = await fetch(path, { method: "POST" });
    const { message } = await response.json();
    say(at("ordered"), message, !response.ok);
  } catch {
    say(at("ordered"), "No connection to the server", true);
  } finally {
    button.disabled = false;
  }
}

at("prompt-form").addEventListener("submit", write);
at("stop").addEventListener("click", () => writing?.abort());
for (const path of ["roll-back", "publish"]) {
  const button = at(path);
  button.addEventListener("click", () => order(button, path));
}
showButtons();
follow();
