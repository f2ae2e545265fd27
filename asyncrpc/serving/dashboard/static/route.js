// Where one is, as it stands behind the # of the address: `#/worker/NAME?sort=lag_s`.
// All that a view can be asked for is in it, so that it can be linked, and so that
// "Back" goes back.

/** Read the part of an address behind its #. */
export function parse(hash) {
  const [path, query = ""] = split(hash.replace(/^#\/?/, ""), "?");
  const [view, ...rest] = path.split("/");
  return {
    view: decode(view) || "overview",
    name: decode(rest.join("/")) || null,
    params: new URLSearchParams(query),
  };
}

/** Write what `parse` reads. */
export function write({ view, name, params }) {
  const path = name == null ? view : `${view}/${encodeURIComponent(name)}`;
  const query = params?.toString() ?? "";
  return `#/${path}${query ? `?${query}` : ""}`;
}

/** The address of a worker's view. */
export function workerAddress(name) {
  return write({ view: "worker", name });
}

/** Parameters with some of them changed; null takes one away. */
export function changed(params, changes) {
  const result = new URLSearchParams(params);
  for (const [key, value] of Object.entries(changes)) {
    if (value == null || value === "") result.delete(key);
    else result.set(key, value);
  }
  return result;
}

function split(text, mark) {
  const at = text.indexOf(mark);
  return at < 0 ? [text] : [text.slice(0, at), text.slice(at + 1)];
}

function decode(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}
