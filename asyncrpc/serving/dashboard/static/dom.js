// Make nodes of the page, and change them only where something differs, so that focus,
// scrolling and selected text outlive an update.  Nothing here reads text as markup:
// names of workers and functions are what their program calls them.

const SVG = "http://www.w3.org/2000/svg";

function build(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else setAttribute(node, name, value);
  }
  node.append(...children.flat(Infinity).filter((child) => child != null));
  return node;
}

/** Make an element; attributes that begin with "on" are listeners. */
export function element(tag, attributes, ...children) {
  return build(document.createElement(tag), attributes, children);
}

/** Make an element of a drawing. */
export function drawn(tag, attributes, ...children) {
  return build(document.createElementNS(SVG, tag), attributes, children);
}

/** Give a node a text, unless it has it. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** Give a node an attribute, unless it has it; null and false take it away. */
export function setAttribute(node, name, value) {
  if (value == null || value === false) {
    if (node.hasAttribute(name)) node.removeAttribute(name);
    return;
  }
  const text = value === true ? "" : String(value);
  if (node.getAttribute(name) !== text) node.setAttribute(name, text);
}

/** Make `nodes`, in this order, the children of `parent`.  A child that has the focus
 * is not moved, the others are moved around it: a move would take the focus away. */
export function arrange(parent, nodes) {
  const wanted = new Set(nodes);
  for (const child of [...parent.children]) if (!wanted.has(child)) child.remove();
  const held = nodes.findIndex((node) => node.contains(document.activeElement));
  let next = parent.firstElementChild;
  nodes.forEach((node, index) => {
    if (node === next) {
      next = next.nextElementSibling;
    } else if (index !== held) {
      parent.insertBefore(node, index < held ? earlier(next, nodes[held]) : next);
    } else {
      next = node.nextElementSibling;
    }
  });
}

function earlier(one, other) {
  if (one == null) return other;
  const follows = one.compareDocumentPosition(other) & Node.DOCUMENT_POSITION_FOLLOWING;
  return follows ? one : other;
}

/** Nodes by key: makes those that are new, changes those that stay, drops the others. */
export class KeyedList {
  #parent;
  #make;
  #change;
  #nodes = new Map();

  /** `make(item)` returns a node, `change(node, item)` brings it up to date. */
  constructor(parent, make, change) {
    this.#parent = parent;
    this.#make = make;
    this.#change = change;
  }

  /** Show `items`; two with one key (`keyOf(item)`) are told apart by their order. */
  show(items, keyOf) {
    const nodes = new Map();
    for (const item of items) {
      let key = String(keyOf(item));
      while (nodes.has(key)) key += "'";
      const node = this.#nodes.get(key) ?? this.#make(item);
      this.#change(node, item);
      nodes.set(key, node);
    }
    this.#nodes = nodes;
    arrange(this.#parent, [...nodes.values()]);
  }

  /** The node of a key, or undefined. */
  node(key) {
    return this.#nodes.get(String(key));
  }
}
