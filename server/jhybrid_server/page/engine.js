// The picture of the engine: tiles, lines over time, grids of who holds what, and the table of sequences.

const $ = (id) => document.getElementById(id);
const POINTS = 120;
const LEAST_POINTS = 30; // that a chart has room for, so that a young one does not jump
const [FREE, CACHED, SHARED] = [-1, -2, -3];
const NAMES = { slots: "Slots", pages: "Pages", snapshots: "Snapshots" };
const WHAT = { slots: "recurrent state of one sequence each", pages: "keys and values", snapshots: "states to start from" };
const history = { speed: [], median: [], p99: [], running: [], waiting: [], computed: [], cached: [] };
const shown = {}; // pool -> what its canvas shows, for the pointer
let before = null;
let latest = null;

export function show(status) {
  const now = performance.now() / 1000;
  if (before && status.steps < before.status.steps) before = null; // the server was started anew
  const figures = before ? between(before.status, status, now - before.at) : null;
  before = { status, at: now };
  latest = status;
  record("running", status.running);
  record("waiting", status.waiting);
  for (const name of ["speed", "median", "p99", "computed", "cached"]) record(name, figures ? figures[name] : null);
  numberColours(status.sequences);
  tiles(status, figures);
  charts();
  pools(status);
  table(status.sequences);
}

export function redraw() {
  if (latest) pools(latest);
}

function record(name, value) {
  history[name].push(value);
  if (history[name].length > POINTS) history[name].shift();
}

function between(old, now, seconds) {
  const next = counted(old.latencies.inter_token_latency_seconds, now.latencies.inter_token_latency_seconds);
  const cached = (now.prefix_cache?.hit_tokens ?? 0) - (old.prefix_cache?.hit_tokens ?? 0);
  return {
    speed: (now.output_tokens - old.output_tokens) / seconds,
    median: quantile(next, 0.5),
    p99: quantile(next, 0.99),
    computed: (now.prompt_tokens - old.prompt_tokens) / seconds,
    cached: cached / seconds,
  };
}

function counted(old, now) {
  return { bounds: now.bounds, counts: now.counts.map((count, i) => count - (old?.counts[i] ?? 0)) };
}

// By linear interpolation within the bucket where it lies; null of nothing.
function quantile({ bounds, counts }, share) {
  const total = counts.reduce((a, b) => a + b, 0);
  if (!total) return null;
  let seen = 0;
  for (let i = 0; i < counts.length; i++) {
    if (counts[i] && seen + counts[i] >= share * total) {
      const low = i ? bounds[i - 1] : 0;
      const high = bounds[i] ?? low;
      return low + ((high - low) * (share * total - seen)) / counts[i];
    }
    seen += counts[i];
  }
  return null;
}

function tile(id, value, unit = "") {
  const small = document.createElement("small");
  small.textContent = unit ? ` ${unit}` : "";
  $(id).replaceChildren(String(value), small);
}

function tiles(status, figures) {
  tile("running", status.running, status.slots ? `of ${status.slots.total}` : "");
  tile("waiting", status.waiting);
  tile("speed", figures ? number(figures.speed) : "–");
  const first = quantile(counted(null, status.latencies.time_to_first_token_seconds), 0.5);
  const next = quantile(counted(null, status.latencies.inter_token_latency_seconds), 0.5);
  tile("first", ...time(first));
  tile("next", ...time(next));
  const cache = status.prefix_cache;
  if (!cache) tile("hits", "off");
  else tile("hits", cache.query_tokens ? Math.round((100 * cache.hit_tokens) / cache.query_tokens) : 0, "%");
}

function number(value) {
  return value >= 100 || value === 0 ? Math.round(value).toLocaleString("en") : value.toPrecision(2);
}

function time(seconds) {
  if (seconds === null) return ["–"];
  return seconds < 1 ? [number(seconds * 1000), "ms"] : [seconds.toPrecision(2), "s"];
}

// charts

function charts() {
  chart("speed", [history.speed], "tokens per second", (v) => number(v));
  chart("next", [history.median, history.p99], "time per token", (v) => time(v).join(" "));
  chart("load", [history.running, history.waiting], "sequences", (v) => String(v));
  chart("hits", [history.computed, history.cached], "prompt tokens per second", (v) => number(v));
}

function chart(id, series, what, format) {
  const svg = $(`chart-${id}`);
  const top = Math.max(...series.flat().map((v) => v ?? 0)) * 1.08 || 1;
  const room = Math.max(LEAST_POINTS, series[0].length);
  svg.setAttribute("viewBox", `0 0 ${room - 1} 100`);
  svg.setAttribute("preserveAspectRatio", "none");
  const paths = series.flatMap((values, i) => {
    const points = values.map((v, j) => [room - values.length + j, v === null ? null : 100 - (v / top) * 100]);
    const made = [line(points, i ? "line-b" : "line-a")];
    if (!i) made.unshift(line(points, "line-a area", true));
    return made;
  });
  svg.replaceChildren(...paths);
  const last = series.map((values) => values.at(-1)).map((v) => (v === null ? "–" : format(v)));
  $(`chart-${id}-now`).textContent = last.join(" / ");
  svg.setAttribute("aria-label", `${what}, now ${last.join(" and ")}, at most ${format(top / 1.08)} in the last two minutes`);
}

// A line with gaps where nothing is known; an area ends on the ground at both sides of a gap.
function line(points, className, isArea = false) {
  let path = "";
  let from = null;
  const close = (x) => (isArea && from !== null ? `L${x} 100L${from} 100Z` : "");
  let x = 0;
  for (const [at, y] of points) {
    if (y === null) {
      path += close(x);
      from = null;
      continue;
    }
    path += `${from === null ? "M" : "L"}${at} ${y.toFixed(1)}`;
    from ??= at;
    x = at;
  }
  const made = document.createElementNS("http://www.w3.org/2000/svg", "path");
  made.setAttribute("class", className);
  made.setAttribute("d", path + close(x));
  return made;
}

// grids

const numbers = new Map(); // sequence -> number of its colour, the least that no other one running has

function key({ name, index }) {
  return `${index}:${name}`;
}

function numberColours(sequences) {
  const keys = new Set(sequences.map(key));
  for (const gone of numbers.keys()) if (!keys.has(gone)) numbers.delete(gone);
  const used = new Set(numbers.values());
  let next = 0;
  for (const name of keys) {
    if (numbers.has(name)) continue;
    while (used.has(next)) next++;
    used.add(next);
    numbers.set(name, next);
  }
}

// Hues by the golden angle, so that neighbours differ most.
function colour(sequence) {
  const hue = (numbers.get(key(sequence)) * 137.508 + 245) % 360;
  const style = getComputedStyle(document.documentElement);
  return `hsl(${hue.toFixed(0)} ${style.getPropertyValue("--sequence-s")} ${style.getPropertyValue("--sequence-l")})`;
}

function pools(status) {
  for (const [name, pool] of Object.entries(status.pools)) {
    const box = $(`pool-${name}`) ?? makePool(name);
    const facts = status[name];
    const share = pool.rows_per_cell > 1 ? `, ${pool.rows_per_cell} to a cell` : "";
    const cached = facts.cached ? `, ${facts.cached} cached` : "";
    const text = `${facts.used} of ${pool.rows} in use${cached}${share}`;
    box.querySelector(".facts").textContent = `${text}; ${WHAT[name]}`;
    const canvas = box.querySelector("canvas");
    canvas.setAttribute("aria-label", `${NAMES[name]}: ${text}`);
    draw(name, canvas, pool, status.sequences);
  }
}

function makePool(name) {
  const box = document.createElement("div");
  box.id = `pool-${name}`;
  const head = document.createElement("p");
  head.className = "pool-head";
  const title = document.createElement("b");
  title.textContent = NAMES[name];
  const facts = document.createElement("span");
  facts.className = "facts";
  const pointed = document.createElement("span");
  pointed.className = "pointed";
  head.append(title, facts, pointed);
  const canvas = document.createElement("canvas");
  canvas.setAttribute("role", "img");
  canvas.addEventListener("pointermove", (event) => (pointed.textContent = whose(name, canvas, event)));
  canvas.addEventListener("pointerleave", () => (pointed.textContent = ""));
  box.append(head, canvas);
  $("pools").append(box);
  return box;
}

function draw(name, canvas, { cells }, sequences) {
  const width = canvas.clientWidth || 600;
  const size = cells.length > 400 ? 9 : cells.length > 64 ? 12 : 18;
  const columns = Math.max(1, Math.floor((width + 2) / (size + 2)));
  const height = Math.ceil(cells.length / columns) * (size + 2) - 2;
  const scale = window.devicePixelRatio || 1;
  canvas.width = width * scale;
  canvas.height = height * scale;
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  const style = getComputedStyle(document.documentElement);
  const plain = { [FREE]: "--free", [CACHED]: "--cached", [SHARED]: "--shared" };
  const colours = sequences.map(colour);
  cells.forEach((cell, i) => {
    context.fillStyle = cell >= 0 ? colours[cell] : style.getPropertyValue(plain[cell]);
    context.beginPath();
    context.roundRect((i % columns) * (size + 2), Math.floor(i / columns) * (size + 2), size, size, 2.5);
    context.fill();
  });
  shown[name] = { cells, sequences, columns, step: size + 2 };
}

function whose(name, canvas, event) {
  const { cells, sequences, columns, step } = shown[name];
  const column = Math.floor(event.offsetX / step);
  const i = Math.floor(event.offsetY / step) * columns + column;
  if (column >= columns || i >= cells.length) return "";
  const held = { [FREE]: "free", [CACHED]: "cached", [SHARED]: "shared" }[cells[i]];
  return `${i}: ${held ?? label(sequences[cells[i]])}`;
}

// sequences

function label({ name, index }) {
  const short = name.length > 18 ? `${name.slice(0, 17)}…` : name;
  return index ? `${short} #${index}` : short;
}

function table(sequences) {
  const count = sequences.length;
  $("sequences-caption").textContent = count ? `${count} running ${count === 1 ? "sequence" : "sequences"}` : "No sequence is running";
  $("sequences").replaceChildren(...sequences.slice(0, 64).map(row));
}

function row(sequence) {
  const tr = document.createElement("tr");
  const name = document.createElement("td");
  const chip = document.createElement("i");
  chip.className = "cell";
  chip.style.background = colour(sequence);
  name.append(chip, label(sequence));
  name.title = sequence.name;
  const phase = document.createElement("td");
  phase.textContent = sequence.phase + (sequence.preemptions ? `, preempted ${sequence.preemptions}×` : "");
  const figures = ["prompt_tokens", "cached_tokens", "output_tokens", "pages"].map((field) => {
    const td = document.createElement("td");
    td.className = "number";
    td.textContent = sequence[field].toLocaleString("en");
    return td;
  });
  tr.append(name, phase, ...figures);
  return tr;
}
