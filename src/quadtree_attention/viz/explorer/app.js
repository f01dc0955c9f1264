// SPDX-License-Identifier: Apache-2.0
// The page: its state, its controls, and what they show.

import { Attention } from "./attention.js";
import { readBytes, readFloats, readMap, readMask } from "./codec.js";
import { Panel, ramp } from "./paint.js";

const FULL = "full"; // full attention of the same queries and keys, in "Beside it"
const ALL = -1; // all heads, all levels
const MATCH = "#ff7a59";
const LEVEL_COLOURS = ["#ffffff", "#ffd166", "#7bdff2", "#f7a1c4"];
const MATCH_RADIUS = 12; // pixels
const HELD_BAND = 0.045; // half of the height at which a row is drawn, as a share of the image

const $ = (id) => document.getElementById(id);
const about = JSON.parse($("about").textContent);
const colours = ramp(about.ramp);
const layers = new Map(about.layers.map((layer) => [layer.id, layer]));
const state = { level: ALL, topk: {}, beside: "", held: false, ...about.start };
const frames = []; // milliseconds that the last frames took to draw
let bytes = null;
let matches = null;
let images = [];
let panels = {};
let thumbs = [];
let shown = null; // what the last frame showed
let wanted = 0; // the frame that was asked for
let linking = 0;

// --- What is to be shown ---------------------------------------------------------------------

function attentionOf(layer, index) {
  layer.cache ??= [];
  if (!layer.cache[index]) {
    const sample = layer.samples[index];
    const [cells, keys] = [sample.grid, sample.keyGrid].map(([rows, columns]) => rows * columns);
    const { heads, channels } = layer;
    layer.cache[index] = new Attention(
      layer,
      sample,
      readMap(bytes, sample.q, cells, heads, channels),
      readMap(bytes, sample.k, keys, heads, channels),
      readMask(bytes, sample.queryMask, cells),
      readMask(bytes, sample.keyMask, keys),
    );
  }
  return layer.cache[index];
}

/** Return the number of the sample whose queries are nearest to the point, or -1. */
function sampleAt(layer) {
  const height = images[state.image].naturalHeight;
  const place = (state.y + 0.5) / height;
  let best = -1;
  let nearest = Infinity;
  layer.samples.forEach((sample, i) => {
    if (sample.query !== state.image) return;
    const [top, bottom] = sample.band;
    const distance = Math.max(top - place, place - bottom, 0);
    if (distance < nearest) [best, nearest] = [i, distance];
  });
  return best;
}

/** Return the finest cell at the point. */
function cellOf(sample) {
  const image = images[state.image];
  const [rows, columns] = sample.grid;
  const [top, bottom] = sample.band;
  const y = ((state.y + 0.5) / image.naturalHeight - top) / (bottom - top);
  const x = (state.x + 0.5) / image.naturalWidth;
  const inside = (share, size) => Math.min(size - 1, Math.max(0, Math.floor(share * size)));
  return [inside(y, rows), inside(x, columns)];
}

const topkOf = (layer) => state.topk[layer.id] ?? layer.topk;

function headsOf(layer) {
  return state.head === ALL || state.head >= layer.heads
    ? Array.from({ length: layer.heads }, (_, i) => i)
    : [state.head];
}

/** Return what a layer compares at the point. */
function inspected(layer) {
  const index = sampleAt(layer);
  if (index < 0) return null;
  const attention = attentionOf(layer, index);
  const { sample } = attention;
  const [y, x] = cellOf(sample);
  const heads = headsOf(layer);
  const maps = attention.maps(y, x, heads, topkOf(layer));
  return { layer, sample, attention, heads, y, x, maps };
}

/** Return the match of the query's cell: [x, y, confidence], or null. */
function matchOf(view) {
  const image = images[state.image];
  const [rows, columns] = view.sample.grid;
  if (view.sample.disparity) {
    const shift = readFloats(bytes, view.sample.disparity)[view.x];
    return Number.isNaN(shift) ? null : { image: 1, x: state.x - shift, y: state.y, shift };
  }
  if (!matches) return null;
  const cell = Math.max(image.naturalWidth / columns, image.naturalHeight / rows);
  let best = null;
  let nearest = Math.max(cell, MATCH_RADIUS);
  for (let i = 0; i < matches.length; i += 5) {
    const from = state.image === 0 ? i : i + 2;
    const to = state.image === 0 ? i + 2 : i;
    const distance = Math.hypot(matches[from] - state.x, matches[from + 1] - state.y);
    if (distance >= nearest) continue;
    nearest = distance;
    best = { image: 1 - state.image, x: matches[to], y: matches[to + 1], confidence: matches[i + 4] };
  }
  return best;
}

// --- Drawing ---------------------------------------------------------------------------------

const bandOf = (sample) => {
  if (!sample.flat) return sample.band;
  const middle = (sample.band[0] + sample.band[1]) / 2;
  return [Math.max(0, middle - HELD_BAND), Math.min(1, middle + HELD_BAND)];
};

/** Return a cell of a level, as [y, x, height, width], in shares of the image. */
function boxOf(view, level, cell, columns, grid) {
  const [high, wide] = view.attention.side(level);
  const [top, bottom] = bandOf(view.sample);
  const [y, x] = Array.isArray(cell) ? cell : [Math.floor(cell / columns), cell % columns];
  const part = (place, side, size) => [(place * side) / size, Math.min(side, size - place * side) / size];
  const [rowAt, rowSize] = part(y, high, grid[0]);
  const [columnAt, columnSize] = part(x, wide, grid[1]);
  return [top + rowAt * (bottom - top), columnAt, rowSize * (bottom - top), columnSize];
}

/** Return a map whose cells are bright where at least one head compared them. */
const shownOnce = (map) => ({ ...map, looked: map.looked.map((share) => (share > 0 ? 1 : 0)) });

function drawKeys(panel, view, level) {
  const { maps, attention, sample, layer } = view;
  const last = maps.length - 1;
  const all = level === ALL || level > last;
  const at = all ? last : level;
  const [high, wide] = attention.side(at);
  const map = all ? { ...maps[last], scores: view.message, looked: attention.depth(maps) } : shownOnce(maps[at]);
  const full = [sample.keyGrid[0] / high, sample.keyGrid[1] / wide];
  panel.fit(images[sample.keys]);
  panel.heat(map, full, colours, bandOf(sample));
  maps.forEach((one, i) => {
    if (i === last || (!all && i !== at)) return;
    one.kept.forEach((share, cell) => {
      if (share === 0) return;
      const box = boxOf(view, i, cell, one.columns, sample.keyGrid);
      const colour = LEVEL_COLOURS[i % LEVEL_COLOURS.length];
      panel.outline(box, { colour, line: all ? 1.5 - i / 2 : 1, opacity: 0.25 + 0.75 * share });
    });
  });
  if (layer.cross || about.images.length === 1) {
    const match = matchOf(view);
    if (match && match.image === sample.keys) panel.ring([match.x, match.y], MATCH);
  }
}

function drawQuery(view) {
  const panel = panels.query;
  const { sample, attention, layer } = view;
  panel.fit(images[state.image]);
  panel.photograph();
  for (let level = 0; level < layer.levels; level++) {
    const cell = attention.cellAt(level, view.y, view.x);
    const colour = LEVEL_COLOURS[level % LEVEL_COLOURS.length];
    panel.outline(boxOf(view, level, cell, 0, sample.grid), { colour, line: 2 });
  }
  panel.ring([state.x, state.y], state.held ? MATCH : "#fff");
}

function besideView(view) {
  if (state.beside === "") return null;
  if (state.beside !== FULL) return inspected(layers.get(state.beside));
  const scores = view.dense;
  const finest = view.maps.at(-1);
  const map = { ...finest, scores, message: scores, looked: new Float32Array(scores.length).fill(1), kept: finest.kept };
  const layer = { ...view.layer, levels: 1, kind: "softmax", label: "full attention" };
  const attention = { side: () => [1, 1], depth: () => map.looked };
  return { ...view, layer, attention, maps: [map], message: scores };
}

function draw() {
  wanted = 0;
  const began = performance.now();
  const layer = layers.get(state.layer);
  const view = inspected(layer);
  if (!view) return;
  view.message = view.attention.message(view.maps);
  view.dense = view.attention.dense(view.y, view.x, view.heads);
  shown = view;
  drawQuery(view);
  drawKeys(panels.keys, view, state.level);
  const beside = besideView(view);
  if (beside) {
    beside.message ??= beside.attention.message(beside.maps);
    drawKeys(panels.second, beside, state.level);
  }
  thumbs.forEach(({ level, panel, words }) => {
    drawKeys(panel, view, level);
    if (level !== ALL) words.textContent = wordsOf(view, level);
  });
  write(view, beside);
  frames.push(performance.now() - began);
  if (frames.length > 240) frames.shift();
  clearTimeout(linking);
  linking = setTimeout(remember, 300);
}

function redraw() {
  if (!wanted) wanted = requestAnimationFrame(draw);
}

// --- Words -----------------------------------------------------------------------------------

const whole = (number) => number.toLocaleString("en");
const percent = (share) => `${(100 * share).toFixed(share < 0.095 ? 1 : 0)} %`;
const count = (values) => values.reduce((sum, value) => sum + (value > 0 ? 1 : 0), 0);

function wordsOf(view, level) {
  const map = view.maps[level];
  const share = map.message.reduce((a, b) => a + b, 0);
  const looked = count(map.looked);
  const parts = [`${whole(looked)} of ${whole(map.scores.length)} compared`];
  if (level < view.maps.length - 1) parts.push(`${count(map.kept)} kept`);
  if (view.layer.levels > 1) parts.push(`${percent(share)} of the message`);
  return parts.join(", ");
}

function write(view, beside) {
  const { layer, attention, maps, dense, heads } = view;
  const head = heads.length > 1 ? `mean of ${heads.length} heads` : `head ${heads[0]}`;
  const name = (i) => about.images[i].name;
  const capital = (words) => words.charAt(0).toUpperCase() + words.slice(1);
  const title = (one) => `${capital(one.layer.label)}: keys in ${name(one.sample.keys)}`;
  $("query-title").textContent = `Query in ${name(state.image)}`;
  $("keys-title").textContent = title(view);
  if (beside) $("second-title").textContent = title(beside);
  const match = matchOf(view);
  const finest = maps.at(-1);
  const spent = maps.reduce((sum, map) => sum + count(map.looked), 0);
  const sentences = [`Query at ${Math.round(state.x)}, ${Math.round(state.y)}, ${head}.`];
  if (layer.kind === "quadtree" && layer.levels > 1) {
    const mass = attention.mass(dense, maps, maps.length - 2);
    sentences.push(
      `It was compared with ${whole(spent)} cells; full attention compares ${whole(finest.scores.length)}. ` +
        `The cells kept at level ${maps.length - 2} hold ${percent(mass)} of full attention.`,
    );
  }
  if (match?.shift !== undefined) sentences.push(`Disparity: ${match.shift.toFixed(1)} pixels.`);
  else if (match) {
    sentences.push(
      `Match: ${Math.round(match.x)}, ${Math.round(match.y)} in ${name(match.image)}, ` +
        `confidence ${match.confidence.toFixed(2)}.`,
    );
  } else if (view.sample.disparity) sentences.push("Occluded.");
  else if (matches) sentences.push("No match.");
  $("readout").textContent = sentences.join(" ");
}

// --- Controls --------------------------------------------------------------------------------

function fill(select, entries, value) {
  select.replaceChildren(...entries.map(([key, label]) => new Option(label, key)));
  select.value = String(value);
}

function buildControls() {
  const layer = layers.get(state.layer);
  fill($("layer"), about.layers.map(({ id, label }) => [id, label]), state.layer);
  const heads = Array.from({ length: layer.heads }, (_, i) => [i, `head ${i}`]);
  if (state.head >= layer.heads) state.head = ALL;
  fill($("head"), [[ALL, `mean of ${layer.heads} heads`], ...heads], state.head);
  const others = about.layers.filter(({ id }) => id !== state.layer).map(({ id, label }) => [id, label]);
  const full = layer.kind === "quadtree" ? [[FULL, "full attention"]] : [];
  fill($("beside"), [["", "nothing"], ...full, ...others], state.beside);
  if ($("beside").selectedIndex < 0) state.beside = $("beside").value = "";
  const swappable = new Set(layer.samples.map((sample) => sample.query)).size > 1;
  $("swap").hidden = !swappable;
  $("second").hidden = state.beside === "";
  $("panels").classList.toggle("three", state.beside !== "");
  $("match-legend").hidden = !(matches || layer.samples.some((sample) => sample.disparity));
  buildLevels(layer);
  buildSliders(layer);
}

function buildLevels(layer) {
  thumbs = [];
  if (state.level >= layer.levels) state.level = ALL;
  const levels = layer.levels > 1 ? [ALL, ...Array(layer.levels).keys()] : [];
  const buttons = levels.map((level) => {
    const button = document.createElement("button");
    button.type = "button";
    button.setAttribute("aria-pressed", String(level === state.level));
    const canvas = document.createElement("canvas");
    canvas.setAttribute("aria-hidden", "true");
    const title = document.createElement("strong");
    const [rows, columns] = [0, 1].map((axis) => {
      const side = 2 ** (layer.levels - 1 - level);
      const size = layer.samples[0].keyGrid[axis];
      return axis === 0 && layer.samples[0].flat ? 1 : Math.ceil(size / side);
    });
    title.textContent = level === ALL ? "All levels" : `Level ${level}: ${rows === 1 ? "" : `${rows} × `}${columns} cells`;
    const words = document.createElement("span");
    words.textContent = level === ALL ? "shares of the message" : "";
    button.append(canvas, title, words);
    button.addEventListener("click", () => set({ level }));
    thumbs.push({ level, panel: new Panel(canvas), words, button });
    return button;
  });
  $("levels").replaceChildren(...buttons);
}

function buildSliders(layer) {
  const topk = topkOf(layer);
  const parts = layer.topk.map((trained, level) => {
    const label = document.createElement("label");
    const words = document.createElement("span");
    const slider = document.createElement("input");
    slider.type = "range";
    slider.min = "1";
    slider.max = String(Math.max(64, 2 * trained));
    slider.value = String(topk[level]);
    const tell = () => {
      words.textContent = `K at level ${level}: ${slider.value}${Number(slider.value) === trained ? " (the network's)" : ""}`;
    };
    tell();
    slider.addEventListener("input", () => {
      const values = [...topkOf(layer)];
      values[level] = Number(slider.value);
      state.topk[layer.id] = values;
      tell();
      redraw();
    });
    label.append(words, slider);
    return label;
  });
  if (parts.length) {
    const reset = document.createElement("button");
    reset.type = "button";
    reset.textContent = "Network's K";
    reset.addEventListener("click", () => {
      delete state.topk[layer.id];
      buildSliders(layer);
      redraw();
    });
    parts.push(reset);
  }
  $("sliders").replaceChildren(...parts);
}

/** Change the state, and what shows it. */
function set(changes) {
  Object.assign(state, changes);
  const layer = layers.get(state.layer);
  if (!layer.samples.some((sample) => sample.query === state.image)) {
    state.image = layer.samples[0].query;
  }
  const image = images[state.image];
  state.x = Math.min(image.naturalWidth - 1, Math.max(0, state.x));
  state.y = Math.min(image.naturalHeight - 1, Math.max(0, state.y));
  if (["layer", "beside", "topk"].some((key) => key in changes)) buildControls();
  $("head").value = String(state.head);
  for (const { level, button } of thumbs) button.setAttribute("aria-pressed", String(level === state.level));
  redraw();
}

function changeK(times) {
  const layer = layers.get(state.layer);
  const most = (trained) => Math.max(64, 2 * trained);
  const values = topkOf(layer).map((k, level) => {
    const next = times > 1 ? k + Math.max(1, Math.round(k / 4)) : k - Math.max(1, Math.round(k / 5));
    return Math.min(most(layer.topk[level]), Math.max(1, next));
  });
  set({ topk: { ...state.topk, [layer.id]: values } });
}

function nextOf(list, value) {
  return list[(list.indexOf(value) + 1) % list.length];
}

function pressed(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const layer = layers.get(state.layer);
  const sample = layer.samples[sampleAt(layer)];
  const image = images[state.image];
  const times = event.shiftKey ? 4 : 1;
  const stepX = (times * image.naturalWidth) / sample.grid[1];
  const rows = sample.flat ? layer.samples.filter(({ query }) => query === state.image).length : sample.grid[0];
  const stepY = (times * image.naturalHeight) / rows;
  const actions = {
    ArrowLeft: () => set({ x: state.x - stepX }),
    ArrowRight: () => set({ x: state.x + stepX }),
    ArrowUp: () => set({ y: state.y - stepY }),
    ArrowDown: () => set({ y: state.y + stepY }),
    Enter: () => set({ held: !state.held }),
    " ": () => set({ held: !state.held }),
    "[": () => changeK(0.8),
    "]": () => changeK(1.25),
    l: () => set({ layer: nextOf([...layers.keys()], state.layer) }),
    h: () => set({ head: nextOf([ALL, ...Array(layer.heads).keys()], state.head) }),
    a: () => set({ level: ALL }),
    s: save,
  };
  let action = actions[event.key];
  if (/^[0-9]$/.test(event.key) && Number(event.key) < layer.levels) {
    action = () => set({ level: Number(event.key) });
  }
  if (!action) return;
  event.preventDefault();
  action();
}

function pointed(event) {
  const image = images[state.image];
  const box = panels.query.canvas.getBoundingClientRect();
  set({
    x: ((event.clientX - box.left) / box.width) * image.naturalWidth - 0.5,
    y: ((event.clientY - box.top) / box.height) * image.naturalHeight - 0.5,
  });
}

function listen() {
  const canvas = panels.query.canvas;
  canvas.addEventListener("pointermove", (event) => {
    if (!state.held || event.buttons) pointed(event);
  });
  canvas.addEventListener("pointerdown", (event) => {
    pointed(event);
    if (event.pointerType === "mouse") set({ held: !state.held });
  });
  canvas.addEventListener("keydown", pressed);
  $("layer").addEventListener("change", (event) => set({ layer: event.target.value }));
  $("head").addEventListener("change", (event) => set({ head: Number(event.target.value) }));
  $("beside").addEventListener("change", (event) => set({ beside: event.target.value }));
  $("swap").addEventListener("click", () => {
    const match = shown && matchOf(shown);
    const image = 1 - state.image;
    set(match?.image === image ? { image, x: match.x, y: match.y } : { image });
  });
  $("link").addEventListener("click", copyLink);
  $("save").addEventListener("click", save);
  globalThis.addEventListener("resize", redraw);
  globalThis.addEventListener("hashchange", () => set(restored()));
}

// --- Links and pictures ----------------------------------------------------------------------

function hash() {
  const values = new URLSearchParams({
    layer: state.layer,
    image: state.image,
    x: state.x.toFixed(1),
    y: state.y.toFixed(1),
    head: state.head === ALL ? "mean" : state.head,
    level: state.level === ALL ? "all" : state.level,
  });
  if (state.topk[state.layer]) values.set("k", state.topk[state.layer].join(","));
  if (state.beside) values.set("beside", state.beside);
  if (state.held) values.set("held", "1");
  return `#${values}`;
}

/** Return the state that the address holds; what it does not hold, or holds wrongly, is left out. */
function restored() {
  const values = new URLSearchParams(location.hash.slice(1));
  const found = {};
  const number = (key) => (values.has(key) && values.get(key) !== "" ? Number(values.get(key)) : NaN);
  if (layers.has(values.get("layer"))) found.layer = values.get("layer");
  const layer = layers.get(found.layer ?? state.layer);
  for (const key of ["x", "y"]) if (Number.isFinite(number(key))) found[key] = number(key);
  if (number("image") in images) found.image = number("image");
  if (values.get("head") === "mean") found.head = ALL;
  else if (number("head") >= 0 && number("head") < layer.heads) found.head = Math.floor(number("head"));
  if (values.get("level") === "all") found.level = ALL;
  else if (number("level") >= 0 && number("level") < layer.levels) found.level = Math.floor(number("level"));
  const topk = (values.get("k") ?? "").split(",").map(Number);
  if (topk.length === layer.topk.length && topk.every((k) => Number.isInteger(k) && k >= 1)) {
    found.topk = { ...state.topk, [layer.id]: topk };
  }
  const beside = values.get("beside");
  if (beside === FULL || layers.has(beside)) found.beside = beside;
  if (values.get("held") === "1") found.held = true;
  return found;
}

function remember() {
  try {
    history.replaceState(null, "", hash());
  } catch {
    // Inside of a notebook's frame addresses cannot be changed
  }
}

async function copyLink() {
  remember();
  const link = location.href;
  try {
    await navigator.clipboard.writeText(link);
    $("link").textContent = "Copied";
  } catch {
    $("link").textContent = "In the address bar";
  }
  setTimeout(() => {
    $("link").textContent = "Copy link";
  }, 1500);
}

/** Save the large pictures, beside each other, with their titles. */
function save() {
  const shownPanels = [["query-title", panels.query], ["keys-title", panels.keys]];
  if (state.beside) shownPanels.push(["second-title", panels.second]);
  const [gap, title] = [16, 40];
  const sheet = document.createElement("canvas");
  sheet.width = shownPanels.reduce((sum, [, panel]) => sum + panel.canvas.width + gap, gap);
  sheet.height = title + gap + Math.max(...shownPanels.map(([, panel]) => panel.canvas.height));
  const pen = sheet.getContext("2d");
  pen.fillStyle = "#16181d";
  pen.fillRect(0, 0, sheet.width, sheet.height);
  pen.font = "18px system-ui, sans-serif";
  let x = gap;
  for (const [id, panel] of shownPanels) {
    pen.fillStyle = "#f0f0f0";
    pen.fillText($(id).textContent, x, 26, panel.canvas.width);
    pen.drawImage(panel.canvas, x, title);
    x += panel.canvas.width + gap;
  }
  sheet.toBlob((blob) => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(blob);
    link.download = "attention.png";
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  });
}

// --- Start -----------------------------------------------------------------------------------

async function loaded(source) {
  const image = new Image();
  image.src = source;
  await image.decode();
  return image;
}

async function start() {
  if (typeof DecompressionStream === "undefined") {
    throw new Error("This browser cannot unpack the page's data; use one of 2023 or later.");
  }
  images = await Promise.all(about.images.map(({ source }) => loaded(source)));
  bytes = await readBytes($("data").textContent);
  matches = about.matches ? readFloats(bytes, about.matches) : null;
  panels = {
    query: new Panel($("query")),
    keys: new Panel($("keys")),
    second: new Panel($("second-keys")),
  };
  const stops = about.ramp.map((colour) => `rgb(${colour.join(" ")})`);
  $("ramp").style.background = `linear-gradient(90deg, ${stops.join(", ")})`;
  $("explorer").hidden = false;
  $("still").hidden = true;
  set({ ...restored(), layer: restored().layer ?? state.layer });
  buildControls();
  listen();
  redraw();
}

/** What the page shows, for tests and for the console. */
globalThis.explorer = {
  state,
  frames,
  set,
  /** Return what the last frame showed: attention, maps, query, samples. */
  shown: () => shown,
  images: () => images,
  /** Return the kept cells [y, x] per level that the last frame showed. */
  kept() {
    draw();
    return shown.maps.slice(0, -1).map((map) =>
      Array.from(map.kept.keys())
        .filter((cell) => map.kept[cell] > 0)
        .map((cell) => [Math.floor(cell / map.columns), cell % map.columns]),
    );
  },
};

start().catch((error) => {
  $("problem").hidden = false;
  $("problem").textContent = error.message;
});
