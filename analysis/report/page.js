"use strict";
// The rounds of a run. All text from the run is set as text, never as markup.

const SVG = "http://www.w3.org/2000/svg";
const LONGEST = 18, SHOWN_AT_FIRST = 64, COLOURS = 6;
// Pixels of a row, a box, a character and a share in it: a tree that is higher than its frame is drawn smaller.
const ROOMY = { name: "roomy", row: 26, height: 20, character: 7.3, share: 34 };
const DENSE = { name: "dense", row: 16, height: 14, character: 6.1, share: 28 };
const LEAST_GAP = 34, MOST_GAP = 120; // between columns, which spread over the frame's width
const KINDS = { u1: Uint8Array, u2: Uint16Array, u4: Uint32Array, f4: Float32Array };

const $ = (id) => document.getElementById(id);
const data = JSON.parse($("data").textContent);
function bytesOf(text) {
  const characters = atob(text), bytes = new Uint8Array(characters.length);
  for (let i = 0; i < bytes.length; i++) bytes[i] = characters.charCodeAt(i);
  return bytes;
}
const unpack = ([kind, text]) => new KINDS[kind](bytesOf(text).buffer);
const nodes = Object.fromEntries(Object.entries(data.nodes).map(([name, packed]) => [name, unpack(packed)]));
const starts = unpack(data.rows.start);
const tokens = data.tokens;
const raw = tokens.bytes && { data: bytesOf(tokens.bytes.data), start: unpack(tokens.bytes.start) };

let request = 0, at = 0, selected = 0, runs = [], strip = [], drawn = null, limit = SHOWN_AT_FIRST, size = ROOMY;

function element(name, attributes, parent, text) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  if (parent) parent.append(made);
  return made;
}

const rows = () => data.requests[request].rows;
const label = (token) => tokens.labels[token];
const short = (text) => { const c = [...text]; return c.length <= LONGEST ? text : c.slice(0, LONGEST - 1).join("") + "…"; };
const width = (text) => [...text].reduce((sum, c) => sum + (c.codePointAt(0) >= 0x1100 ? 2 : 1), 0) * size.character;
const percent = (p) => (p >= 0.01 ? Math.round(100 * p) : p >= 0.0005 ? (100 * p).toFixed(1) : "<0.1") + " %";

// ---- the tree of one row

function tree(row) {
  const start = starts[row], count = starts[row + 1] - start, kept = data.rows.kept[row];
  const parent = nodes.parent.subarray(start, start + count), score = nodes.score.subarray(start, start + count);
  const share = Float64Array.from(score, (s, i) => (i ? Math.min(Math.exp(s - score[parent[i]]), 1) : 1));
  return { row, start, count, kept, parent, score, share, token: nodes.token.subarray(start, start + count) };
}

// Which nodes are drawn: the root, the likeliest, which come first, and the accepted path.
function visible(t) {
  const on = new Set(t.kept);
  for (let i = 0; i < Math.min(limit + 1, t.count); i++) on.add(i);
  return [...on].sort((a, b) => a - b);
}

// Leaves one below the other, an inner node beside its likeliest child, so that the likeliest path is a straight line
// and a long one stays in view; a column is as wide as its widest box.
function place(t, shown) {
  const children = new Map(shown.map((i) => [i, []])), depth = new Map([[0, 0]]), y = new Map(), extra = t.count;
  for (const i of shown) if (i) { children.get(t.parent[i]).push(i); depth.set(i, depth.get(t.parent[i]) + 1); }
  const last = t.kept[t.kept.length - 1];
  children.get(last).push(extra);
  children.set(extra, []);
  depth.set(extra, depth.get(last) + 1);
  const order = [], stack = [0];
  let leaf = 0;
  while (stack.length) {
    const i = stack.pop(), below = children.get(i);
    order.push(i);
    if (!below.length) y.set(i, leaf++);
    for (let k = below.length - 1; k >= 0; k--) stack.push(below[k]);
  }
  for (const i of order.reverse()) {
    const below = children.get(i);
    if (below.length) y.set(i, y.get(below[0]));
  }
  const view = $("tree"), most = parseFloat(getComputedStyle(view).maxHeight);
  size = leaf * ROOMY.row + 16 > most ? DENSE : ROOMY;
  const columns = [];
  for (const [i, d] of depth) columns[d] = Math.max(columns[d] || 0, box(t, i));
  const free = view.clientWidth - 20 - columns.reduce((sum, w) => sum + w, 0);
  const gap = Math.max(LEAST_GAP, Math.min(MOST_GAP, Math.floor(free / Math.max(columns.length - 1, 1))));
  const x = columns.reduce((xs, w, d) => (xs[d + 1] = xs[d] + w + gap, xs), [10]);
  const width = x[columns.length] - gap + 10;
  return { depth, y, x, width, leaves: leaf, extra, order: order.reverse() };
}

const text = (t, i) => short(i === t.count ? label(data.rows.bonus[t.row]) : label(t.token[i]));
const box = (t, i) => width(text(t, i)) + 14 + (i && i < t.count ? size.share : 0);

function drawTree() {
  const t = tree(rows()[at]), shown = visible(t), p = place(t, shown), kept = new Set(t.kept);
  const svg = element("svg", { width: p.width, height: p.leaves * size.row + 16, class: size.name, "aria-hidden": "true" });
  const middle = (i) => 8 + (p.y.get(i) + 0.5) * size.row;
  for (const i of [...shown.filter((i) => i), p.extra]) {
    const above = i === p.extra ? t.kept[t.kept.length - 1] : t.parent[i];
    const x0 = p.x[p.depth.get(above)] + box(t, above), x1 = p.x[p.depth.get(i)], half = (x0 + x1) / 2;
    const share = i === p.extra ? 0.15 : t.share[i];
    element("path", {
      class: "edge" + (i === p.extra ? " choice" : kept.has(i) ? " kept" : ""),
      d: `M${x0} ${middle(above)}C${half} ${middle(above)} ${half} ${middle(i)} ${x1} ${middle(i)}`,
      "stroke-width": (0.7 + 5 * share).toFixed(2),
      "stroke-opacity": kept.has(i) || i === p.extra ? 1 : (0.4 + 0.6 * share).toFixed(2),
    }, svg);
  }
  drawn = { t, p, boxes: new Map() };
  for (const i of [...shown, p.extra]) {
    const x = p.x[p.depth.get(i)], y = middle(i), w = box(t, i);
    const kind = i === p.extra ? " choice" : !i ? " root" : kept.has(i) ? " kept" : "";
    const group = element("g", { class: "node" + kind, "data-node": i }, svg);
    element("rect", { x, y: y - size.height / 2, width: w, height: size.height, rx: size.height / 4 }, group);
    element("text", { x: x + 7, y: y + 4 }, group, text(t, i));
    if (i && i < t.count) element("text", { class: "share", x: x + w - 5, y: y + 4 }, group, percent(t.share[i]));
    drawn.boxes.set(i, { group, x, y, w });
  }
  $("tree").replaceChildren(svg);
  $("shown").max = t.count - 1; // the root is no drafted node, and always shown
  $("shown").value = Math.min(limit, t.count - 1);
  $("shown-count").textContent = `${shown.length - 1} of ${t.count - 1}`;
  $("shown-label").hidden = t.count <= 1;
  $("tree").setAttribute("aria-label",
    `Draft tree of ${t.count - 1} nodes; accepted: ${t.kept.slice(1).map((i) => label(t.token[i])).join(", ") || "none"}; ` +
    `the target's own: ${label(data.rows.bonus[t.row])}. Up and down move from node to node.`);
  select(t.kept[t.kept.length - 1], true);
}

function select(i, scroll) {
  const { t, p, boxes } = drawn;
  if (boxes.has(selected)) boxes.get(selected).group.classList.remove("selected");
  selected = i;
  const { group, x, y, w } = boxes.get(i), view = $("tree");
  group.classList.add("selected");
  if (scroll) {
    // the whole accepted path if it fits, else its end
    const ys = [y, ...t.kept.map((j) => boxes.get(j).y)], top = Math.min(...ys), bottom = Math.max(...ys);
    view.scrollTop = (bottom - top < view.clientHeight - 60 ? (top + bottom) / 2 : y) - view.clientHeight / 2;
    view.scrollLeft = x + w + 120 > view.clientWidth ? x + w + 120 - view.clientWidth : 0;
  }
  describe(t, i, i === p.extra);
}

function describe(t, i, own) {
  const parts = [], code = (token) => { const c = document.createElement("code"); c.textContent = label(token); return c; };
  if (own) {
    const last = t.kept[t.kept.length - 1];
    const child = drawn.p.order.find((j) => j && j < t.count && t.parent[j] === last && t.token[j] === data.rows.bonus[t.row]);
    parts.push(code(data.rows.bonus[t.row]), ` is the target's own token after `, code(t.token[last]), ": ");
    parts.push(data.rows.finished[t.row] ? "the request ends with it." :
      child === undefined ? "no drawn child has it, so the walk ends here, and it is emitted too." : "it is in the tree.");
  } else {
    parts.push(code(t.token[i]), ` token ${tokens.ids[t.token[i]]}. `);
    if (!i) parts.push("The last token committed: the root. ");
    else {
      parts.push(`Candidate ${nodes.rank[t.start + i] + 1} of depth ${drawn.p.depth.get(i)}, probability ${percent(t.share[i])}; `);
      parts.push(`path to here ${percent(Math.exp(t.score[i]))}. ${t.kept.includes(i) ? "Accepted" : "Not accepted"}. `);
    }
    parts.push("After it the target says ", code(nodes.choice[t.start + i]), ".");
  }
  $("details").replaceChildren(...parts);
}

// ---- the text

// Half a character at the end of a round goes to the next one, as bytes do not end where tokens do.
function textOf(list, decoder, last) {
  if (!raw) return list.map((token) => label(token) + " ").join("");
  const out = list.map((token) => decoder.decode(raw.data.subarray(raw.start[token], raw.start[token + 1]), { stream: true }));
  return out.join("") + (last ? decoder.decode() : "");
}

function span(parent, kind, content) {
  const made = document.createElement("span");
  made.className = kind;
  made.textContent = content;
  parent.append(made);
  return made;
}

function writeText() {
  const { prompt, first, rows: those } = data.requests[request], decoder = new TextDecoder();
  const all = document.createDocumentFragment();
  span(all, "prompt", textOf(prompt, decoder));
  span(span(all, "first", ""), "own", textOf([first], decoder, !those.length));
  runs = those.map((row, k) => {
    const kept = data.rows.kept[row].slice(1).map((i) => nodes.token[starts[row] + i]);
    const run = span(all, `run c${k % COLOURS}`, textOf(kept, decoder));
    run.dataset.round = k;
    span(run, "own", textOf([data.rows.bonus[row]], decoder, k === those.length - 1));
    return run;
  });
  $("text").replaceChildren(all);
}

// ---- moving about

function writeStrip() {
  const lengths = rows().map((row) => data.rows.kept[row].length), most = Math.max(...lengths, 1);
  const svg = $("strip");
  svg.setAttribute("viewBox", `0 0 ${Math.max(lengths.length, 1)} ${most}`);
  svg.setAttribute("aria-label", `Tokens by round, 1 to ${most}: ${lengths.slice(0, 60).join(", ")}${lengths.length > 60 ? ", …" : ""}`);
  svg.replaceChildren();
  const gap = lengths.length > 200 ? 0 : 0.08;
  for (const y of most % 2 ? [0] : [0, most / 2]) element("path", { class: "grid", d: `M0 ${y}H${lengths.length}` }, svg);
  $("strip-most").textContent = most;
  $("strip-half").textContent = most % 2 ? "" : most / 2;
  $("strip-first").textContent = lengths.length ? 1 : "";
  $("strip-last").textContent = lengths.length > 1 ? lengths.length : "";
  strip = lengths.map((n, k) => element("rect", { x: k + gap, y: most - n, width: 1 - 2 * gap, height: n }, svg));
}

function go(to) {
  const count = rows().length;
  if (!count) {
    $("where").textContent = "There was no round: the first token ended it.";
    $("tree").replaceChildren();
    $("details").textContent = "";
    for (const id of ["first", "back", "next", "last", "slider", "shown"]) $(id).disabled = true;
    return;
  }
  for (const run of [runs[at], strip[at]]) if (run) run.classList.remove("now");
  at = Math.max(0, Math.min(count - 1, to));
  runs.forEach((run, k) => run.classList.toggle("later", k > at));
  runs[at].classList.add("now");
  strip[at].classList.add("now");
  $("slider").disabled = $("shown").disabled = false;
  $("slider").max = count - 1;
  $("slider").value = at;
  const n = data.rows.kept[rows()[at]].length, ends = at === count - 1 ? data.requests[request].finish : "";
  const how = ends === "stop" ? ", a stop token" : ends ? ", all that were asked for" : "";
  $("where").textContent = `${at + 1} of ${count}: ${n} ${n === 1 ? "token" : "tokens"}${how}`;
  $("slider").setAttribute("aria-valuetext", $("where").textContent);
  $("first").disabled = $("back").disabled = at === 0;
  $("next").disabled = $("last").disabled = at === count - 1;
  drawTree();
  const view = $("text"), run = runs[at];
  view.scrollTop = run.offsetTop - view.offsetTop + run.offsetHeight - view.clientHeight * 0.7;
}

function choose(which) {
  request = which;
  at = 0;
  writeText();
  writeStrip();
  go(0);
}

const ACTIONS = {
  first: () => go(0), back: () => go(at - 1), next: () => go(at + 1), last: () => go(Infinity),
};
for (const [id, action] of Object.entries(ACTIONS)) $(id).addEventListener("click", action);
$("slider").addEventListener("input", () => go(Number($("slider").value)));
$("shown").addEventListener("input", () => { limit = Number($("shown").value); drawTree(); });
$("request").addEventListener("change", () => choose(Number($("request").value)));
$("text").addEventListener("click", (event) => {
  const run = event.target.closest(".run");
  if (run) go(Number(run.dataset.round));
});
$("strip").addEventListener("click", (event) => {
  const frame = $("strip").getBoundingClientRect();
  go(Math.floor(((event.clientX - frame.left) / frame.width) * rows().length));
});
window.addEventListener("resize", () => { if (rows().length) drawTree(); });
for (const kind of ["click", "pointerover"]) {
  $("tree").addEventListener(kind, (event) => {
    const node = event.target.closest(".node");
    if (node) select(Number(node.dataset.node), false);
  });
}
document.addEventListener("keydown", (event) => {
  if (event.altKey || event.ctrlKey || event.metaKey || event.target.matches("select, #shown, #slider")) return;
  const moves = { ArrowLeft: "back", ArrowRight: "next", Home: "first", End: "last" };
  if (moves[event.key] && rows().length) {
    event.preventDefault();
    ACTIONS[moves[event.key]]();
  } else if (event.target === $("tree") && ["ArrowUp", "ArrowDown"].includes(event.key) && drawn) {
    event.preventDefault();
    const { order } = drawn.p, here = order.indexOf(selected) + (event.key === "ArrowDown" ? 1 : -1);
    select(order[Math.max(0, Math.min(order.length - 1, here))], true);
  }
});

data.requests.forEach((r, i) => {
  const option = document.createElement("option");
  option.value = i;
  option.textContent = `${i + 1} of ${data.requests.length}`;
  $("request").append(option);
});
$("request-label").hidden = data.requests.length < 2;
if (data.requests.length) choose(0);
document.documentElement.dataset.ready = "yes";
