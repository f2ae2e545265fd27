// Where the nodes of a graph stand: each below those that wait for it, so that one reads
// from who waits down to who is at fault.  A cycle is cut where it closes.  An edge that
// passes a layer gets a bend there, between the nodes, so that it hides behind none.
//
// It knows sizes and no page.

const BEND_WIDTH = 16;
const ROUNDS = 6;

/**
 * Lay a graph out.
 *
 * `nodes` are {id, width, height}, `edges` {from, to}.  Returns `places` (id -> {x, y,
 * width, height}), `bottoms` (id -> where its row ends), `ways` (edge -> places of its
 * bends), `width`, `height` and `turned`: the edges that lead upwards.
 */
export function layOut(nodes, edges, { gapX, gapY }) {
  const turned = backEdges(nodes, edges);
  const down = edges.filter((edge) => !turned.has(edge) && edge.from !== edge.to);
  const layerOf = layersOf(nodes, down);
  const rows = rowsOf(nodes, layerOf);
  const bends = addBends(rows, down, layerOf);
  const hops = down.flatMap((edge) => hopsOf(edge, bends.get(edge)));
  for (let round = 0; round < ROUNDS; round += 1) untangle(rows, hops, round % 2 === 0);
  const { places, bottoms, width, height } = placesOf(rows, { gapX, gapY });
  const ways = new Map();
  for (const [edge, row] of bends) ways.set(edge, row.map((bend) => places.get(bend.id)));
  return { places, bottoms, ways, width, height, turned };
}

/** The parts of a graph that no edge joins, in the order of their first nodes. */
export function partsOf(nodes, edges) {
  const near = new Map(nodes.map(({ id }) => [id, []]));
  for (const { from, to } of edges) {
    near.get(from).push(to);
    near.get(to).push(from);
  }
  const partOf = new Map();
  const parts = [];
  for (const { id } of nodes) {
    if (partOf.has(id)) continue;
    const open = [id];
    partOf.set(id, parts.length);
    for (let at = open.pop(); at != null; at = open.pop()) {
      for (const other of near.get(at)) {
        if (partOf.has(other)) continue;
        partOf.set(other, parts.length);
        open.push(other);
      }
    }
    parts.push({ nodes: [], edges: [] });
  }
  for (const node of nodes) parts[partOf.get(node.id)].nodes.push(node);
  for (const edge of edges) parts[partOf.get(edge.from)].edges.push(edge);
  return parts;
}

/** Put boxes of {width, height} in lines; returns the place of each, and the whole. */
export function inLines(boxes, { width, gap }) {
  const whole = { width: 0, height: 0 };
  let [x, y, tallest] = [0, 0, 0];
  const places = boxes.map((box) => {
    if (x > 0 && x + box.width > width) {
      y += tallest + gap;
      [x, tallest] = [0, 0];
    }
    const place = { x, y };
    x += box.width + gap;
    tallest = Math.max(tallest, box.height);
    whole.width = Math.max(whole.width, x - gap);
    whole.height = Math.max(whole.height, y + tallest);
    return place;
  });
  return { places, ...whole };
}

/** Edges that close a cycle, as one meets them from the first node on. */
function backEdges(nodes, edges) {
  const from = groupBy(edges, (edge) => edge.from);
  const found = new Set();
  const state = new Map(); // "open": on the way; "done"
  for (const { id } of nodes) {
    if (state.has(id)) continue;
    const way = [[id, 0]];
    state.set(id, "open");
    while (way.length) {
      const top = way.at(-1);
      const edge = (from.get(top[0]) ?? [])[top[1]];
      top[1] += 1;
      if (edge == null) {
        state.set(top[0], "done");
        way.pop();
      } else if (state.get(edge.to) === "open") {
        found.add(edge);
      } else if (!state.has(edge.to)) {
        state.set(edge.to, "open");
        way.push([edge.to, 0]);
      }
    }
  }
  return found;
}

/** The layer of each node: one below the lowest that waits for it. */
function layersOf(nodes, down) {
  const layerOf = new Map(nodes.map(({ id }) => [id, 0]));
  for (let round = 0; round < nodes.length; round += 1) {
    let isSettled = true;
    for (const { from, to } of down) {
      const wanted = layerOf.get(from) + 1;
      if (layerOf.get(to) < wanted) {
        layerOf.set(to, wanted);
        isSettled = false;
      }
    }
    if (isSettled) break;
  }
  return layerOf;
}

function rowsOf(nodes, layerOf) {
  const rows = [];
  for (const node of nodes) (rows[layerOf.get(node.id)] ??= []).push(node);
  return rows;
}

/** Put bends into the rows that edges pass; returns them by edge. */
function addBends(rows, down, layerOf) {
  const bends = new Map();
  down.forEach((edge, number) => {
    const passed = [];
    for (let layer = layerOf.get(edge.from) + 1; layer < layerOf.get(edge.to); layer += 1) {
      const bend = { id: `bend ${number} ${layer}`, width: BEND_WIDTH, height: 0 };
      rows[layer].push(bend);
      passed.push(bend);
    }
    bends.set(edge, passed);
  });
  return bends;
}

function hopsOf(edge, bends) {
  const ids = [edge.from, ...bends.map((bend) => bend.id), edge.to];
  return ids.slice(1).map((to, index) => ({ from: ids[index], to }));
}

/** Order each row by where its neighbours above, or below, stand. */
function untangle(rows, hops, isDownwards) {
  const neighbours = groupBy(hops, (hop) => (isDownwards ? hop.to : hop.from));
  const order = isDownwards ? rows : [...rows].reverse();
  const place = new Map();
  for (const row of order) row.forEach((node, index) => place.set(node.id, index));
  for (const row of order) {
    const middle = new Map();
    row.forEach((node, index) => {
      const near = neighbours.get(node.id) ?? [];
      const at = near.map((hop) => place.get(isDownwards ? hop.from : hop.to));
      const sum = at.reduce((total, one) => total + one, 0);
      middle.set(node.id, at.length ? sum / at.length : index);
    });
    row.sort((one, other) => middle.get(one.id) - middle.get(other.id));
    row.forEach((node, index) => place.set(node.id, index));
  }
}

function placesOf(rows, { gapX, gapY }) {
  const widths = rows.map(
    (row) => row.reduce((sum, node) => sum + node.width, 0) + gapX * (row.length - 1),
  );
  const width = Math.max(...widths);
  const places = new Map();
  const bottoms = new Map();
  let y = 0;
  let height = 0;
  rows.forEach((row, layer) => {
    let x = (width - widths[layer]) / 2;
    const tallest = Math.max(...row.map((node) => node.height));
    for (const node of row) {
      places.set(node.id, { x, y, width: node.width, height: node.height || tallest });
      x += node.width + gapX;
    }
    height = y + tallest;
    for (const node of row) bottoms.set(node.id, height);
    y = height + gapY;
  });
  return { places, bottoms, width, height };
}

function groupBy(items, keyOf) {
  const groups = new Map();
  for (const item of items) {
    const key = keyOf(item);
    if (!groups.has(key)) groups.set(key, []);
    groups.get(key).push(item);
  }
  return groups;
}
