// The page: shows the view that the address names, and gives it each look that comes.

import { element } from "./dom.js";
import { Freshness, GroupState, say, ViewLinks } from "./header.js";
import { askTerms, LiveLook } from "./live.js";
import { loginForm, offerLeave, signInByLink, signOut } from "./login.js";
import { changed, parse, write } from "./route.js";
import { calls } from "./views/calls.js";
import { collectives } from "./views/collectives.js";
import { hangs } from "./views/hangs.js";
import { overview } from "./views/overview.js";
import { references } from "./views/references.js";
import { training } from "./views/training.js";
import { worker } from "./views/worker.js";

const VIEWS = { overview, worker, calls, references, training, collectives, hangs };
const ASKED = ["sort", "order", "page", "per_page", "find"]; // of the server

const main = document.getElementById("main");
const leave = document.getElementById("leave");
const links = new ViewLinks(VIEWS);
const group = new GroupState();
const freshness = new Freshness();

/** What a view may do with the page around it. */
const page = {
  route: parse(location.hash),
  /** Change parameters of the address, and look anew; `isNoted`: "Back" undoes it. */
  go(changes, { isNoted = true } = {}) {
    const params = changed(this.route.params, changes);
    const address = write({ ...this.route, params });
    if (isNoted) history.pushState(null, "", address);
    else history.replaceState(null, "", address);
    follow();
  },
  say,
};

let shown = null; // {key, view, asked}
let followed = null; // the address that is shown

const live = new LiveLook({
  look(look) {
    if (shown == null || look.view !== shown.asked) return;
    freshness.show(look);
    group.show(look);
    shown.view.show(look);
    main.setAttribute("aria-busy", "false");
  },
  state(state) {
    freshness.enter(state);
    if (state.kind !== "refused") return;
    shown?.view.refuse?.(state.why);
    main.setAttribute("aria-busy", "false");
  },
  signIn,
});

/** Ask who looks; then show what the address names. */
function signIn(terms, why) {
  offerLeave(leave, terms);
  if (shown?.key === "login") return;
  const form = loginForm(terms, start, why);
  put({ key: "login", asked: null, view: {} }, form, "Sign in");
  (form.querySelector("input") ?? form.querySelector("h1")).focus();
}

/** Show what the address names, if the server lets one look. */
async function start() {
  shown = null;
  const why = await signInByLink();
  const terms = await askTerms().catch(() => null); // then the stream will say why
  offerLeave(leave, terms);
  if (terms == null || terms.signed_in) follow();
  else signIn(terms, why);
}

/** Show what the address names. */
function follow() {
  followed = location.hash;
  page.route = parse(followed);
  const { view: name, name: what } = page.route;
  const kind = VIEWS[name];
  links.mark(name);
  if (kind == null) {
    put({ key: name, view: {} }, missing(name), "No such view");
    live.watch(null);
    return;
  }
  const key = `${name}/${what ?? ""}`;
  if (shown?.key !== key) {
    const isFirst = shown == null;
    const view = kind.make(page);
    put({ key, view, asked: kind.asks(page.route) }, view.element, view.title);
    if (!isFirst) view.element.querySelector("h1").focus();
  } else {
    shown.view.follow?.();
  }
  main.setAttribute("aria-busy", "true");
  live.watch({ path: `api/${kind.asks(page.route)}`, query: query(kind) });
}

function put(what, node, title) {
  shown = what;
  main.replaceChildren(node);
  document.title = `${title} · asyncrpc dashboard`;
}

function query(kind) {
  const asked = new URLSearchParams();
  for (const key of ASKED) {
    const value = page.route.params.get(key);
    if (value != null) asked.set(key, value);
  }
  kind.add?.(asked, page.route);
  return asked;
}

function missing(name) {
  return element(
    "section",
    {},
    element("h1", { tabindex: -1 }, "No such view"),
    element("p", {}, `There is no view "${name}". `),
    element("p", {}, element("a", { href: "#/overview" }, "Go to the overview")),
  );
}

function onPause(event) {
  const isPaused = event.currentTarget.getAttribute("aria-pressed") !== "true";
  event.currentTarget.setAttribute("aria-pressed", String(isPaused));
  live.setPaused(isPaused);
}

async function onLeave() {
  live.watch(null);
  await signOut();
  await start();
}

/** Going back and forth tells both, or either. */
function onAddress() {
  if (/^#(ticket|token)=/.test(location.hash)) start();
  else if (location.hash !== followed && shown?.key !== "login") follow();
}

addEventListener("hashchange", onAddress);
addEventListener("popstate", onAddress);
document.getElementById("pause").addEventListener("click", onPause);
leave.addEventListener("click", onLeave);
document.getElementById("retry").addEventListener("click", () => live.retryNow());
document.getElementById("skip").addEventListener("click", (event) => {
  event.preventDefault(); // the part behind the # says which view is shown
  main.focus();
});
start();
