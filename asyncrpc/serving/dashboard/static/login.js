// Sign in.  The group's secret stays in the page, which sends the token that it makes of it.

import { element, setText } from "./dom.js";

const NAMES = {
  secret: "The group's secret",
  token: "The dashboard's token",
  either: "The dashboard's token, or the group's secret",
};

/** Return a form; `onSignedIn` is called when it has succeeded; `why`: it is needed. */
export function loginForm(terms, onSignedIn, why) {
  if (terms.takes === "nothing") return refusal(terms.why);
  const canDerive = globalThis.crypto?.subtle != null;
  const input = element("input", {
    id: "login-word",
    type: "password",
    autocomplete: "current-password",
    required: true,
    "aria-describedby": "login-note login-trouble",
  });
  const trouble = element("p", { id: "login-trouble", role: "alert", class: "trouble" }, why ?? "");
  const button = element("button", { type: "submit", class: "first" }, "Sign in");
  const form = element(
    "form",
    { class: "login" },
    element("h1", { tabindex: -1 }, "Sign in"),
    element("label", { for: "login-word" }, canDerive ? NAMES[terms.takes] : NAMES.token),
    input,
    element("p", { id: "login-note" }, note(canDerive, terms)),
    trouble,
    button,
  );
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    button.setAttribute("aria-busy", "true");
    const word = input.value.trim();
    const why = await signIn(async () => ({ token: canDerive ? await tokenOf(word) : word }));
    button.removeAttribute("aria-busy");
    setText(trouble, why ?? "");
    if (why == null) onSignedIn();
    else input.select();
  });
  return form;
}

/** There is nothing to sign in by. */
function refusal(why) {
  return element(
    "section",
    { class: "login" },
    element("h1", { tabindex: -1 }, "You may not look"),
    element("p", { role: "alert" }, why ?? "The server does not say why."),
  );
}

function note(canDerive, terms) {
  if (canDerive) {
    const where =
      terms.takes === "token"
        ? ""
        : " The secret is what ASYNCRPC_SECRET gives the workers. If asyncrpc run has made it, " +
          "asyncrpc dashboard, started on a terminal there, prints a link that signs you in.";
    return `What you type is not sent: the page sends a token that it makes of it.${where}`;
  }
  const token =
    terms.takes === "secret"
      ? "This dashboard has no token"
      : "Only type the dashboard's token here, never the group's secret; it will travel as it is";
  return (
    "This page came by plain HTTP from another host, where a browser cannot make a token " +
    `of a secret: it would send the secret. ${token}. Better, use HTTPS, or a tunnel: ` +
    `ssh -L 8080:localhost:${location.port || 80} ${location.hostname}, and then ` +
    "http://localhost:8080."
  );
}

/** Sign in by the link that opened the page; return why not, or null. */
export async function signInByLink() {
  const [, kind, word] = /^#(ticket|token)=(.+)$/.exec(location.hash) ?? [];
  if (kind == null) return null;
  history.replaceState(null, "", location.pathname + location.search); // nobody reads it there
  return signIn(() => ({ [kind]: word }));
}

/** Try to sign in; return why not, or null. */
async function signIn(content) {
  try {
    const answer = await fetch("login", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(await content()),
    });
    if (answer.ok) return null;
    return (await answer.json()).error ?? `The server says ${answer.status}.`;
  } catch {
    return "The server does not answer. Try again.";
  }
}

/** Return the token of who knows a word: the server makes it likewise. */
async function tokenOf(word) {
  const encoder = new TextEncoder();
  const algorithm = { name: "HMAC", hash: "SHA-256" };
  const key = await crypto.subtle.importKey(
    "raw", encoder.encode(word), algorithm, false, ["sign"],
  );
  const made = await crypto.subtle.sign("HMAC", key, encoder.encode("asyncrpc dashboard"));
  return [...new Uint8Array(made)].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** End the session. */
export async function signOut() {
  await fetch("logout", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: "{}",
  });
}

/** Offer to end the session, if there is one to end. */
export function offerLeave(button, terms) {
  button.hidden = !terms?.signed_in || terms.takes === "nothing";
}
