// Draws the swarm's figures, the faults and events, and every peer's timeline over one time axis.

import { mix } from "./graph.js";

const FONT = '12px system-ui, -apple-system, "Segoe UI", "Liberation Sans", "DejaVu Sans", sans-serif';
const LEFT = 58, RIGHT = 12, AXIS = 20;

export function short(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size >= 1e9) return +(value / 1e9).toPrecision(3) + "G";
  if (size >= 1e6) return +(value / 1e6).toPrecision(3) + "M";
  if (size >= 1e4) return +(value / 1e3).toPrecision(3) + "k";
  if (size >= 100) return Math.round(value).toLocaleString("en");
  return String(+value.toPrecision(3));
}
export const percent = value => value === null || value === undefined ? "–" : `${Math.round(value * 100)} %`;
export function ago(seconds) {
  const s = Math.max(0, Math.round(seconds));
  return s < 60 ? `${s} s` : `${Math.floor(s / 60)} min ${s % 60 ? `${s % 60} s` : ""}`.trim();
}

const PANELS = [
  { at: 1, title: "samples/s", colour: "computing", fromZero: true, filled: true, show: short },
  { at: 3, title: "waiting", colour: "waiting", fromZero: true, filled: true, top: 1, show: percent },
  { at: 4, title: "loss", colour: "loss", show: short },
  { at: 5, title: "consensus distance", colour: "distance", fromZero: true, show: short },
];

function fit(canvas, height) {
  const ratio = Math.min(2, devicePixelRatio || 1), W = canvas.clientWidth;
  if (canvas.style.height !== `${height}px`) canvas.style.height = `${height}px`;
  const w = Math.round(W * ratio), h = Math.round(height * ratio);
  if (canvas.width !== w) canvas.width = w;
  if (canvas.height !== h) canvas.height = h;
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, W, height);
  pen.font = FONT;
  return { pen, W };
}

function ticks(low, high, count) {
  const raw = (high - low || 1) / count, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map(f => f * power).find(s => s >= raw * 0.999), found = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k++) found.push(+(k * step).toPrecision(12));
  return found;
}

// model: { now, span, points, events, faults, pointer } ; times in seconds since the view began
export function drawCharts(canvas, model, css) {
  const panel = canvas.clientWidth < 500 ? 74 : 92, gap = 14, strip = 16;
  const height = PANELS.length * (panel + gap) + strip + 6;
  const { pen, W } = fit(canvas, height);
  const begin = model.now - model.span, X = at => LEFT + (at - begin) / model.span * (W - LEFT - RIGHT);
  const shown = model.points.filter(point => point[0] >= begin - 2);
  PANELS.forEach((one, k) => {
    const top = k * (panel + gap) + 14, bottom = top + panel - 14;
    const values = shown.map(point => point[one.at]).filter(v => v !== null);
    let low = Math.min(...values), high = Math.max(...values);
    if (!values.length) { low = 0; high = 1; }
    if (one.fromZero) low = 0;
    if (one.top) high = one.top;
    if (high - low < 1e-12) { high = low + (Math.abs(low) || 1) * 0.1; if (!one.fromZero) low -= (Math.abs(low) || 1) * 0.1; }
    if (!one.top) { const room = (high - low) * 0.08; high += room; if (!one.fromZero) low -= room; }
    const Y = v => bottom - (v - low) / (high - low) * (bottom - top);
    for (const fault of model.faults) band(pen, css, X, LEFT, W - RIGHT, fault, model.now, top, bottom);
    pen.strokeStyle = css.line; pen.lineWidth = 1;
    pen.fillStyle = css.soft; pen.textAlign = "right"; pen.textBaseline = "middle";
    for (const tick of ticks(low, high, 3)) {
      const y = Math.round(Y(tick)) + 0.5;
      pen.beginPath(); pen.moveTo(LEFT, y); pen.lineTo(W - RIGHT, y); pen.stroke();
      pen.fillText(one.show(tick), LEFT - 8, y);
    }
    pen.save();
    pen.beginPath(); pen.rect(LEFT, top - 4, W - LEFT - RIGHT, bottom - top + 8); pen.clip();
    line(pen, shown, one, X, Y, css, bottom);
    for (const event of model.events) if (event[0] >= begin && event[1] !== "note") {
      pen.strokeStyle = css[event[1]]; pen.globalAlpha = 0.45; pen.lineWidth = 1;
      pen.beginPath(); pen.moveTo(X(event[0]), top - 4); pen.lineTo(X(event[0]), bottom + 4); pen.stroke(); pen.globalAlpha = 1;
    }
    pen.restore();
    pen.textAlign = "left"; pen.textBaseline = "alphabetic"; pen.fillStyle = css.soft;
    pen.fillText(one.title, LEFT, top - 4);
    const last = nearest(shown, model.pointer), value = last ? last[one.at] : null;
    pen.font = FONT.replace("12px", "600 12px"); pen.fillStyle = css.ink; pen.textAlign = "right";
    pen.fillText(one.show(value), W - RIGHT, top - 4); pen.font = FONT;
  });
  const y = PANELS.length * (panel + gap) + strip / 2 + 2;
  pen.fillStyle = css.soft; pen.textAlign = "right"; pen.textBaseline = "middle"; pen.fillText("events", LEFT - 8, y);
  for (const event of model.events) if (event[0] >= begin) mark(pen, css, X(event[0]), y, event[1]);
  crosshair(pen, css, model, X, LEFT, W - RIGHT, 0, height);
}

function band(pen, css, X, left, right, fault, now, top, bottom) {
  const from = Math.max(left, X(fault.began)), to = Math.min(right, X(fault.ended === null ? now : fault.ended));
  if (to < left || from > right) return;
  pen.fillStyle = css.warn; pen.globalAlpha = 0.13; pen.fillRect(from, top - 2, Math.max(1, to - from), bottom - top + 4); pen.globalAlpha = 1;
}

function line(pen, points, one, X, Y, css, bottom) {
  const runs = [[]];
  let before = null;
  for (const point of points) {
    const v = point[one.at];
    if (v === null || (before !== null && point[0] - before > 5)) runs.push([]);
    if (v !== null) runs[runs.length - 1].push([X(point[0]), Y(v)]);
    before = point[0];
  }
  pen.lineJoin = "round";
  for (const run of runs) {
    if (!run.length) continue;
    pen.beginPath();
    run.forEach(([x, y], k) => k ? pen.lineTo(x, y) : pen.moveTo(x, y));
    pen.strokeStyle = css[one.colour]; pen.lineWidth = 1.8; pen.stroke();
    if (one.filled) {
      pen.lineTo(run[run.length - 1][0], bottom); pen.lineTo(run[0][0], bottom); pen.closePath();
      pen.fillStyle = css[one.colour]; pen.globalAlpha = 0.14; pen.fill(); pen.globalAlpha = 1;
    }
  }
}

function mark(pen, css, x, y, level) {
  pen.fillStyle = level === "note" ? css.soft : css[level];
  pen.beginPath();
  if (level === "bad") { pen.moveTo(x, y - 5); pen.lineTo(x + 5, y); pen.lineTo(x, y + 5); pen.lineTo(x - 5, y); }
  else if (level === "warn") { pen.moveTo(x, y - 5); pen.lineTo(x + 5, y + 4); pen.lineTo(x - 5, y + 4); }
  else pen.arc(x, y, 3.2, 0, 2 * Math.PI);
  pen.fill();
}

function nearest(points, at) {
  if (!points.length) return null;
  if (at === null) return points[points.length - 1];
  return points.reduce((best, point) => Math.abs(point[0] - at) < Math.abs(best[0] - at) ? point : best);
}

function crosshair(pen, css, model, X, left, right, top, bottom) {
  if (model.pointer === null) return;
  const x = X(model.pointer);
  if (x < left || x > right) return;
  pen.strokeStyle = css.ink; pen.globalAlpha = 0.5; pen.lineWidth = 1; pen.setLineDash([2, 3]);
  pen.beginPath(); pen.moveTo(x, top); pen.lineTo(x, bottom); pen.stroke(); pen.setLineDash([]); pen.globalAlpha = 1;
}

// --- a line per peer ----------------------------------------------------------------------------------

const image = document.createElement("canvas");

function laneColours(letters, css) {
  const named = Object.fromEntries(Object.entries(letters).map(([state, letter]) => [letter, state]));
  const fixed = { joins: css.line, done: mix(css.card, css.good, 0.35), silent: css.bad, suspect: css.warn, "no answer": mix(css.card, css.bad, 0.4), dead: css.gone, left: css.wash };
  const computing = solid(mix(css.card, css.computing, 0.55));
  return letter => letter >= "0" && letter <= "9" ? mix(computing, css.waiting, Math.min(1, +letter / 8)) : fixed[named[letter]];
}

const LINES = 220; // more lines cannot be told apart: then one stands for several peers, and shows the worst
const WORSE = "ldjsnx!"; // after all digits
export const peersPerLine = count => Math.max(1, Math.ceil(count / LINES));

function worst(letters, from, to) {
  let sum = 0, digits = 0, rank = -1;
  for (let k = from; k < to; k++) {
    const letter = letters[k];
    if (letter >= "0" && letter <= "9") { sum += +letter; digits++; }
    else rank = Math.max(rank, WORSE.indexOf(letter));
  }
  return rank >= 2 ? WORSE[rank] : digits ? String(Math.round(sum / digits)) : rank >= 0 ? WORSE[rank] : " ";
}

// model as above, with { peers, lanes: [[at, letters]], letters, chosen }
export function drawLanes(canvas, model, css) {
  const each = peersPerLine(model.peers.length), count = Math.ceil(model.peers.length / each);
  const row = Math.max(2, Math.min(20, 440 / Math.max(1, count))), height = Math.max(20, count * row) + AXIS + 4;
  const { pen, W } = fit(canvas, height);
  const begin = model.now - model.span, right = W - RIGHT, seconds = Math.ceil(model.span) + 1;
  const colourOf = laneColours(model.letters, css), known = new Map();
  image.width = seconds; image.height = Math.max(1, count);
  const brush = image.getContext("2d");
  const bytes = brush.createImageData(seconds, Math.max(1, count));
  const rgb = letter => {
    if (!known.has(letter)) known.set(letter, parse(colourOf(letter)));
    return known.get(letter);
  };
  let filled = -1;
  for (const [at, letters] of model.lanes) {
    const column = Math.floor(at - begin);
    if (column < 0 || column >= seconds) continue;
    const from = filled >= 0 && column - filled <= 3 ? filled + 1 : column; // a second may fall between two columns
    for (let x = from; x <= column; x++)
      for (let k = 0; k * each < letters.length; k++) {
        const colour = rgb(each === 1 ? letters[k] : worst(letters, k * each, Math.min(letters.length, (k + 1) * each)));
        if (!colour) continue;
        const offset = 4 * (k * seconds + x);
        bytes.data[offset] = colour[0]; bytes.data[offset + 1] = colour[1]; bytes.data[offset + 2] = colour[2]; bytes.data[offset + 3] = 255;
      }
    filled = column;
  }
  brush.putImageData(bytes, 0, 0);
  pen.save();
  pen.beginPath(); pen.rect(LEFT, 0, right - LEFT, count * row); pen.clip();
  pen.imageSmoothingEnabled = false;
  pen.drawImage(image, LEFT, 0, (right - LEFT) * seconds / model.span, count * row);
  if (row >= 5) { pen.fillStyle = css.card; for (let k = 1; k < count; k++) pen.fillRect(LEFT, Math.round(k * row) - (row > 9 ? 1 : 0.5), right - LEFT, row > 9 ? 2 : 1); }
  pen.restore();
  pen.textAlign = "right"; pen.textBaseline = "middle";
  const every = Math.max(1, Math.ceil(13 / row));
  for (let k = 0; k < count; k += every) {
    pen.fillStyle = model.chosen === model.peers[k * each].index ? css.ink : css.soft;
    pen.fillText(model.peers[k * each].name.slice(0, 8), LEFT - 8, Math.max(7, (k + 0.5) * row + (every > 1 ? 3 : 0)));
  }
  if (model.chosen !== null) {
    const k = Math.floor(model.chosen / each);
    if (k < count) { pen.strokeStyle = css.ink; pen.lineWidth = 1.5; pen.strokeRect(LEFT - 1, k * row - 0.5, right - LEFT + 2, Math.max(3, row)); }
  }
  axis(pen, css, model, count * row + 4, W);
  crosshair(pen, css, model, at => LEFT + (at - begin) / model.span * (right - LEFT), LEFT, right, 0, count * row);
}

function axis(pen, css, model, top, W) {
  const steps = { 60: 10, 300: 60, 900: 180 }[model.span] * (W < 500 ? 2 : 1), right = W - RIGHT;
  pen.fillStyle = css.soft; pen.strokeStyle = css.soft; pen.lineWidth = 1; pen.textBaseline = "top";
  for (let back = 0; back <= model.span; back += steps) {
    const x = right - back / model.span * (right - LEFT);
    pen.beginPath(); pen.moveTo(x, top - 3); pen.lineTo(x, top + 1); pen.stroke();
    pen.textAlign = back === 0 ? "right" : back >= model.span ? "left" : "center";
    pen.fillText(back === 0 ? "now" : model.span > 60 ? `−${back / 60} min` : `−${back} s`, x, top + 4);
  }
}

export function timeAt(canvas, event, model) {
  const box = canvas.getBoundingClientRect(), share = (event.clientX - box.left - LEFT) / (box.width - LEFT - RIGHT);
  return share < 0 || share > 1 ? null : model.now - model.span + share * model.span;
}

const solid = colour => "#" + parse(colour).map(v => v.toString(16).padStart(2, "0")).join("");

function parse(colour) {
  if (!colour) return null;
  if (colour[0] === "#") return [1, 3, 5].map(k => parseInt(colour.slice(k, k + 2), 16));
  return colour.match(/\d+/g).slice(0, 3).map(Number);
}
