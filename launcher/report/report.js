"use strict";
// Draws what the page's data hold; nothing is fetched. Lines are SVG, timelines and matrices canvas.
(() => {
const data = JSON.parse(document.getElementById("data").textContent);
const INK = "#1c1f24", SOFT = "#555c66", LINE = "#d9dde2";
const COMPUTING = "#0072B2", WAITING = "#F0C05A", AVERAGING = "#CC3377", FAULT = "#B3261E";
// Okabe and Ito; dashes tell apart what colour may not. The first is what others are compared with.
const STYLES = [["#555555", "7 4"], ["#009E73", ""], ["#D55E00", "9 3 2 3"], ["#0072B2", ""],
  ["#CC79A7", "2 3"], ["#B07F00", "12 4"], ["#56B4E9", ""], ["#000000", "1 3"]];
const style = index => {
  const [colour, dash] = STYLES[index % STYLES.length];
  return { colour, dash: index < STYLES.length ? dash : "4 2 1 2" };
};
const FONT = '12px system-ui, -apple-system, "Segoe UI", "Liberation Sans", "DejaVu Sans", sans-serif';
const escape = text => String(text).replace(/[&<>"]/g, c => `&#${c.charCodeAt(0)};`);

// --- numbers --------------------------------------------------------------------------------------

function ticks(low, high, count) {
  const span = high - low || 1, raw = span / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map(f => f * power).find(s => s >= raw * 0.999);
  const found = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k++) found.push(+(k * step).toPrecision(12));
  return found;
}
function short(value) {
  const size = Math.abs(value);
  if (size >= 1e9) return +(value / 1e9).toPrecision(4) + "G";
  if (size >= 1e6) return +(value / 1e6).toPrecision(4) + "M";
  if (size >= 1e4) return +(value / 1e3).toPrecision(4) + "k";
  return String(+value.toPrecision(4));
}
const duration = s => s < 0.9995 ? `${+(s * 1e3).toPrecision(3)} ms` : `${s.toFixed(2)} s`;

// --- the tip --------------------------------------------------------------------------------------

const tip = document.getElementById("tip");
function showTip(event, html) {
  tip.innerHTML = html;
  tip.style.display = "block";
  const box = tip.getBoundingClientRect();
  const left = event.clientX + 16 + box.width > innerWidth ? event.clientX - box.width - 12 : event.clientX + 16;
  tip.style.left = `${Math.max(4, left)}px`;
  tip.style.top = `${Math.min(innerHeight - box.height - 4, event.clientY + 14)}px`;
}
const hideTip = () => { tip.style.display = "none"; };

// --- lines ----------------------------------------------------------------------------------------

function lineChart(figure, chart) {
  const series = chart.series.filter(s => s.x.length);
  const W = 560, H = 300, top = 12, bottom = 44, left = 52;
  const longest = Math.max(0, ...series.map(s => s.name.length));
  const right = Math.min(130, 16 + longest * 7);
  const head = `<figcaption>${escape(chart.title)}</figcaption>`;
  if (!series.length) { figure.innerHTML = `${head}<p class="caption">No figures.</p>`; return; }
  const all = series.flatMap(s => [...s.y, ...(s.low || []), ...(s.high || [])]).filter(v => v !== null);
  if (chart.target != null) all.push(chart.target);
  let low = chart.fromZero ? 0 : Math.min(...all), high = Math.max(...all);
  if (high === low) high = low + (Math.abs(low) || 1);
  const logarithmic = chart.mayBeLog && low > 0 && high / low > 30;
  if (!logarithmic) { const pad = (high - low) * 0.05; high += pad; if (!chart.fromZero) low -= pad; if (chart.most != null) high = Math.min(high, Math.max(chart.most, high - pad)); }
  const xHigh = Math.max(...series.map(s => s.x[s.x.length - 1])) || 1;
  const x = v => left + v / xHigh * (W - left - right);
  const scale = logarithmic ? v => (Math.log(v) - Math.log(low)) / (Math.log(high) - Math.log(low)) : v => (v - low) / (high - low);
  const y = v => H - bottom - scale(v) * (H - top - bottom);
  const yTicks = logarithmic ? logTicks(low, high) : ticks(low, high, 5);
  let svg = "";
  const marks = [];  // faults that begin at one place share their mark
  for (const f of chart.faults || []) {
    const from = x(f.at), to = x(Math.min(xHigh, f.until ?? f.at)), last = marks[marks.length - 1];
    svg += `<rect x="${from}" y="${top}" width="${Math.max(1, to - from)}" height="${H - bottom - top}" fill="${FAULT}" fill-opacity="${(f.until ?? f.at) === f.at ? 0.6 : 0.13}"/>`;
    if (last && from - last.x < 12) last.numbers.push(f.number); else marks.push({ x: from, numbers: [f.number] });
  }
  for (const mark of marks) svg += `<text class="soft" x="${mark.x + 2}" y="${top + 9}">${mark.numbers.join(", ")}</text>`;
  for (const c of chart.changes || []) svg += `<line class="change" x1="${x(c.at)}" x2="${x(c.at)}" y1="${top}" y2="${H - bottom}" stroke="${c.colour}" stroke-width="1.5" stroke-dasharray="6 3"><title>${escape(c.text)}</title></line>`;
  for (const v of yTicks) svg += `<line x1="${left}" x2="${W - right}" y1="${y(v)}" y2="${y(v)}" stroke="${LINE}"/><text class="soft" x="${left - 8}" y="${y(v) + 4}" text-anchor="end">${short(v)}</text>`;
  for (const v of ticks(0, xHigh, 6)) svg += `<line x1="${x(v)}" x2="${x(v)}" y1="${H - bottom}" y2="${H - bottom + 4}" stroke="${SOFT}"/><text class="soft" x="${x(v)}" y="${H - bottom + 18}" text-anchor="middle">${short(v)}</text>`;
  svg += `<line x1="${left}" x2="${W - right}" y1="${H - bottom}" y2="${H - bottom}" stroke="#9aa1aa"/>`;
  svg += `<text class="soft" x="${(left + W - right) / 2}" y="${H - 6}" text-anchor="middle">${escape(chart.xLabel)}</text>`;
  if (chart.target != null) svg += `<line x1="${left}" x2="${W - right}" y1="${y(chart.target)}" y2="${y(chart.target)}" stroke="${INK}" stroke-dasharray="1 3"/>`;
  for (const s of series) {
    if (s.low) svg += `<path d="${path(s.x, s.high, x, y)}${path([...s.x].reverse(), [...s.low].reverse(), x, y).replace("M", "L")}Z" fill="${s.colour}" fill-opacity="0.14"/>`;
  }
  for (const s of series) svg += `<path d="${path(s.x, s.y, x, y)}" fill="none" stroke="${s.colour}" stroke-width="2" stroke-dasharray="${s.dash}" stroke-linejoin="round"/>`;
  for (const s of series) if (s.mark) svg += `<circle cx="${x(s.mark[0])}" cy="${y(s.mark[1])}" r="4.5" fill="${s.colour}" stroke="#fff" stroke-width="1.5"/>`;
  if (chart.target != null) svg += outlined(W - right, y(chart.target) + (scale(chart.target) > 0.9 ? 15 : -5), "end", `target ${chart.target}`);
  svg += endLabels(series, x, y, top, H - bottom);
  svg += `<g class="hover"></g>`;
  figure.innerHTML = `${head}<svg viewBox="0 0 ${W} ${H}" role="img" aria-label="${escape(chart.title)}">${svg}</svg>`;
  const drawn = figure.querySelector("svg"), hover = drawn.querySelector(".hover");
  drawn.addEventListener("pointermove", event => {
    const box = drawn.getBoundingClientRect();
    const at = ((event.clientX - box.left) / box.width * W - left) / (W - left - right) * xHigh;
    if (at < 0 || at > xHigh) { hover.innerHTML = ""; hideTip(); return; }
    let marks = `<line x1="${x(at)}" x2="${x(at)}" y1="${top}" y2="${H - bottom}" stroke="#9aa1aa"/>`;
    let text = `<b>${escape(chart.at(at))}</b>`;
    for (const s of series) {
      const k = nearest(s.x, at);
      if (Math.abs(s.x[k] - at) > xHigh * 0.03 || s.y[k] === null) continue;
      marks += `<circle cx="${x(s.x[k])}" cy="${y(s.y[k])}" r="3.5" fill="${s.colour}"/>`;
      text += `\n${escape(s.name)}: ${chart.format(s.y[k])}${s.low ? ` (${chart.format(s.low[k])} to ${chart.format(s.high[k])})` : ""}`;
    }
    hover.innerHTML = marks;
    showTip(event, text);
  });
  drawn.addEventListener("pointerleave", () => { hover.innerHTML = ""; hideTip(); });
}
const outlined = (x, y, anchor, text) => `<text x="${x}" y="${y}" text-anchor="${anchor}" stroke="#fff" stroke-width="4" paint-order="stroke">${escape(text)}</text>`;
function path(xs, ys, x, y) {
  let d = "", pen = "M";
  xs.forEach((v, k) => {
    if (ys[k] === null) { pen = "M"; return; }
    d += `${pen}${x(v).toFixed(1)} ${y(ys[k]).toFixed(1)}`;
    pen = "L";
  });
  return d;
}
function logTicks(low, high) {
  const found = [];
  for (let p = Math.floor(Math.log10(low)); p <= Math.ceil(Math.log10(high)); p++)
    for (const f of high / low > 1e3 ? [1] : [1, 3]) { const v = +(f * 10 ** p).toPrecision(3); if (v >= low && v <= high) found.push(v); }
  return found;
}
// Names at the ends of their lines, pushed apart where they would overlap.
function endLabels(series, x, y, top, bottom) {
  const labels = series.map(s => { let k = s.y.length - 1; while (k > 0 && s.y[k] === null) k--; return { s, x: x(s.x[k]), at: y(s.y[k]), y: y(s.y[k]) }; });
  labels.sort((a, b) => a.y - b.y);
  const gap = 14;
  labels.forEach((l, k) => { if (k) l.y = Math.max(l.y, labels[k - 1].y + gap); });
  const over = labels.length ? labels[labels.length - 1].y - bottom : 0;
  if (over > 0) labels[labels.length - 1].y -= over;
  for (let k = labels.length - 2; k >= 0; k--) labels[k].y = Math.max(top, Math.min(labels[k].y, labels[k + 1].y - gap));
  const edge = Math.max(...labels.map(l => l.x));
  return labels.map(l => {
    const end = edge + 8, leads = edge - l.x > 1 && Math.abs(l.y - l.at) < 8;
    const lead = leads ? `<line x1="${l.x + 3}" y1="${l.at}" x2="${end - 3}" y2="${l.y}" stroke="${l.s.colour}" stroke-width="1" stroke-opacity="0.45" stroke-dasharray="2 3"/>` : "";
    return `${lead}<circle cx="${l.x}" cy="${l.at}" r="2.5" fill="${l.s.colour}"/><text x="${end}" y="${l.y + 4}" style="font-weight:600;fill:${l.s.colour}">${escape(l.s.name)}</text>`;
  }).join("");
}
function nearest(xs, at) {
  let a = 0, b = xs.length - 1;
  while (b - a > 1) { const m = (a + b) >> 1; if (xs[m] < at) a = m; else b = m; }
  return Math.abs(xs[a] - at) < Math.abs(xs[b] - at) ? a : b;
}

const CHARTS = {
  "accuracy-time": { title: "Held-out accuracy against wall time", x: "at", y: "accuracy", target: data.target.accuracy, mark: true, most: 1 },
  "accuracy-samples": { title: "Held-out accuracy against samples", x: "samples", y: "accuracy", target: data.target.accuracy, mark: true, most: 1 },
  "loss-time": { title: "Held-out loss against wall time", x: "at", y: "loss", target: data.target.loss, mark: true, mayBeLog: true },
  "loss-samples": { title: "Held-out loss against samples", x: "samples", y: "loss", target: data.target.loss, mark: true, mayBeLog: true },
  "distance": { title: "Consensus distance of all peers (distance from their mean)", x: "at", y: "distance", fromZero: true },
};
function drawCharts() {
  for (const figure of document.querySelectorAll("[data-chart]")) {
    const kind = figure.dataset.chart, chart = CHARTS[kind];
    const bySamples = kind.endsWith("-samples");
    const common = {
      xLabel: bySamples ? "samples, of all peers" : "seconds since the first step",
      at: v => bySamples ? `${Math.round(v).toLocaleString("en")} samples` : `${v.toFixed(1)} s`,
      format: v => v === null ? "–" : String(+v.toPrecision(4)),
    };
    if (!bySamples) common.changes = data.algorithms.flatMap((a, k) => a.changes.map(c => ({ ...c, colour: style(k).colour })));
    if (kind === "throughput") {
      lineChart(figure, { ...common, title: "Samples per second, of all peers", fromZero: true, faults: data.algorithms[0].faults, format: v => Math.round(v).toLocaleString("en"),
        series: data.algorithms.map((a, k) => ({ name: a.name, ...style(k), x: a.throughput.at, y: a.throughput.rate })) });
    } else if (kind === "consensus_distance") {
      lineChart(figure, { ...common, title: "Consensus distance in groups (distance from the group's mean)", fromZero: true,
        series: data.algorithms.map((a, k) => ({ name: a.name, ...style(k), x: a.consensus_distance.at, y: a.consensus_distance.middle, low: a.consensus_distance.low, high: a.consensus_distance.high })) });
    } else {
      lineChart(figure, { ...common, ...chart, series: data.algorithms.map((a, k) => ({ name: a.name, ...style(k), x: a.curve[chart.x].slice(0, a.curve[chart.y].length), y: a.curve[chart.y], mark: chart.mark && reached(a, chart) })) });
    }
  }
  for (const key of document.querySelectorAll("[data-key]")) {
    const { colour, dash } = style(+key.dataset.key);
    key.innerHTML = `<svg width="26" height="10"><line x1="0" x2="26" y1="5" y2="5" stroke="${colour}" stroke-width="2.5" stroke-dasharray="${dash}"/></svg>`;
  }
}
function reached(algorithm, chart) {
  if (algorithm.reached_s === null || !algorithm.curve[chart.y].length || chart.target == null) return null;
  const k = nearest(algorithm.curve.at, algorithm.reached_s);
  return [algorithm.curve[chart.x][k], algorithm.curve[chart.y][k]];
}

// --- timelines ------------------------------------------------------------------------------------

function prepare(canvas, width, height) {
  const dense = Math.max(2, devicePixelRatio || 1);  // 2 at least, so that a print is sharp
  canvas.width = Math.round(width * dense);
  canvas.height = Math.round(height * dense);
  canvas.style.height = `${height}px`;
  const pen = canvas.getContext("2d");
  pen.setTransform(dense, 0, 0, dense, 0, 0);
  pen.font = FONT;
  pen.textBaseline = "middle";
  return pen;
}

// Differences become moments, once.
function unpack(line, unit) {
  const steps = [], averages = [];
  let at = 0;
  for (let k = 0; k < line.steps.length; k += 3) {
    const began = at + line.steps[k], computed = began + line.steps[k + 1];
    at = computed + line.steps[k + 2];
    steps.push([began / unit, computed / unit, at / unit]);
  }
  at = 0;
  for (let k = 0; k < line.averages.length; k += 3) {
    at += line.averages[k];
    averages.push([at / unit, (at + line.averages[k + 1]) / unit, line.averages[k + 2]]);
  }
  const degrees = text => Array.from(text, c => parseInt(c, 36) / 35);
  return { ...line, steps, averages, longest: averages.reduce((m, a) => Math.max(m, a[1] - a[0]), 0),
    compute: degrees(line.compute), wait: degrees(line.wait), average: degrees(line.average) };
}
function firstAfter(list, moment, key) {
  let a = 0, b = list.length;
  while (a < b) { const m = (a + b) >> 1; if (list[m][key] > moment) b = m; else a = m + 1; }
  return a;
}

class Timeline {
  constructor(box, algorithm) {
    this.wall = algorithm.wall_s || 1;
    this.data = algorithm.timeline;
    this.faults = algorithm.faults;
    this.lines = this.data.rows.map(line => unpack(line, this.data.units_per_s));
    this.map = box.appendChild(Object.assign(document.createElement("canvas"), { className: "map" }));
    this.canvas = box.appendChild(Object.assign(document.createElement("canvas"), { className: "rows" }));
    this.map.setAttribute("role", "img");
    this.map.setAttribute("aria-label", `${algorithm.name}: shares of time over the whole run`);
    this.canvas.setAttribute("role", "img");
    this.canvas.setAttribute("aria-label", `${algorithm.name}: what each peer did`);
    this.box = box;
    const n = this.lines.length;
    this.rowHeight = n <= 6 ? 30 : n <= 16 ? 22 : n <= 32 ? 15 : 12;
    this.listen();
  }
  show(width, middle = this.wall / 2) {
    this.span = Math.min(this.wall, Math.max(0.01, width));
    this.from = Math.min(this.wall - this.span, Math.max(0, middle - this.span / 2));
    this.draw();
  }
  draw() {
    const width = this.box.clientWidth, rows = this.lines.length;
    if (!width) return;
    const height = rows * this.rowHeight + 40;
    const pen = prepare(this.canvas, width, height);
    pen.font = this.rowHeight < 15 ? FONT.replace("12px", "10px") : FONT;
    this.left = Math.ceil(Math.max(...this.lines.map(l => pen.measureText(l.label).width))) + 10;
    this.right = width - 14;
    this.scale = (this.right - this.left) / this.span;
    const isExact = this.from >= this.data.exact_from - 1e-6 && this.from + this.span <= this.data.exact_to + 1e-6;
    this.lines.forEach((line, k) => {
      const y = k * this.rowHeight + 4;
      pen.fillStyle = /slow|lost/.test(line.label) ? INK : SOFT;
      pen.textAlign = "right";
      pen.fillText(line.label, this.left - 8, y + this.rowHeight * 0.45);
      this.drawLine(pen, line, y, isExact);
    });
    this.drawFaults(pen);
    this.drawAxis(pen, rows * this.rowHeight + 6);
    this.drawMap(width);
  }
  drawLine(pen, line, y, isExact) {
    const bar = this.rowHeight * 0.58, thin = this.rowHeight * 0.2, below = y + bar + (this.rowHeight > 16 ? 1.5 : 0.5);
    pen.fillStyle = "#f3f4f6";
    pen.fillRect(this.left, y, this.right - this.left, bar);
    const to = this.from + this.span;
    const first = firstAfter(line.steps, this.from, 2), last = firstAfter(line.steps, to, 0);
    const pixels = this.right - this.left;
    if (isExact && last - first <= pixels / 2.5) {
      const gap = (last - first) < pixels / 9 ? 0.8 : 0.3;
      for (let k = first; k < last; k++) {
        const [began, computed, ended] = line.steps[k];
        this.rect(pen, COMPUTING, began, computed, y, bar, gap);
        if (ended > computed) this.rect(pen, WAITING, computed, ended, y, bar, 0);
      }
    } else {
      this.drawShares(pen, line, y, bar, isExact ? line.steps.slice(first, last) : null);
    }
    if (isExact) {
      for (let k = firstAfter(line.averages, this.from - line.longest, 0); k < line.averages.length && line.averages[k][0] < to; k++)
        if (line.averages[k][1] > this.from) this.rect(pen, AVERAGING, line.averages[k][0], line.averages[k][1], below, thin, 0);
    } else {
      pen.fillStyle = AVERAGING;
      this.eachBin((left, width, k) => pen.fillRect(left, below + thin * (1 - line.average[k]), width, thin * line.average[k]));
    }
  }
  rect(pen, colour, from, to, y, height, gap) {
    const a = Math.max(this.left, this.x(from)), b = Math.min(this.right, this.x(to));
    if (b < this.left || a > this.right) return;
    pen.fillStyle = colour;
    pen.fillRect(a, y, Math.max(b - a - gap, 0.7), height);
  }
  // A frame around the peers that a fault hit, for as long as it did, with its number.
  drawFaults(pen) {
    pen.strokeStyle = FAULT;
    pen.textAlign = "center";
    for (const fault of this.faults) {
      const until = fault.until ?? this.wall;
      if (until < this.from || fault.at > this.from + this.span) continue;
      const from = Math.max(this.left, this.x(fault.at)), to = Math.min(this.right, this.x(until));
      this.lines.forEach((line, k) => {
        if (!fault.ranks.includes(line.rank)) return;
        pen.strokeRect(from, k * this.rowHeight + 2.5, Math.max(1, to - from), this.rowHeight - 3);
        const width = pen.measureText(fault.number).width + 6;
        pen.fillStyle = FAULT;
        pen.fillRect(from, k * this.rowHeight + 2.5, width, Math.min(14, this.rowHeight - 3));
        pen.fillStyle = "#fff";
        pen.fillText(fault.number, from + width / 2, k * this.rowHeight + 3 + Math.min(14, this.rowHeight - 3) / 2);
      });
    }
  }
  x(at) { return this.left + (at - this.from) * this.scale; }
  at(x) { return this.from + (x - this.left) / this.scale; }
  eachBin(draw) {
    const bins = this.lines[0].compute.length, each = this.wall / bins;
    for (let k = Math.floor(this.from / each); k < bins && k * each < this.from + this.span; k++) {
      const a = Math.max(this.left, this.x(k * each)), b = Math.min(this.right, this.x((k + 1) * each));
      draw(a, b - a + 0.2, k);
    }
  }
  // Steps too short to draw: for each two pixels the heights are shares of the time.
  drawShares(pen, line, y, bar, steps) {
    const stack = (left, width, compute, wait) => {
      pen.fillStyle = COMPUTING;
      pen.fillRect(left, y + bar * (1 - compute), width, bar * compute);
      pen.fillStyle = WAITING;
      pen.fillRect(left, y + bar * (1 - compute - wait), width, bar * wait);
    };
    if (!steps) { this.eachBin((left, width, k) => stack(left, width, line.compute[k], Math.min(line.wait[k], 1 - line.compute[k]))); return; }
    const columns = Math.floor((this.right - this.left) / 2), each = this.span / columns;
    const compute = new Float64Array(columns), wait = new Float64Array(columns);
    const spread = (into, a, b) => {
      for (let k = Math.max(0, Math.floor((a - this.from) / each)); k < columns && this.from + k * each < b; k++)
        into[k] += Math.max(0, Math.min(b, this.from + (k + 1) * each) - Math.max(a, this.from + k * each)) / each;
    };
    for (const [began, computed, ended] of steps) { spread(compute, began, computed); spread(wait, computed, ended); }
    for (let k = 0; k < columns; k++) stack(this.left + 2 * k, 2.2, Math.min(1, compute[k]), Math.min(wait[k], Math.max(0, 1 - compute[k])));
  }
  drawAxis(pen, y) {
    pen.font = FONT;
    pen.strokeStyle = "#9aa1aa";
    pen.fillStyle = SOFT;
    pen.beginPath();
    pen.moveTo(this.left, y); pen.lineTo(this.right, y);
    const marks = ticks(this.from, this.from + this.span, Math.max(2, Math.floor((this.right - this.left) / 110)));
    for (const v of marks) { pen.moveTo(this.x(v), y); pen.lineTo(this.x(v), y + 4); }
    pen.stroke();
    pen.textAlign = "center";
    marks.forEach((v, k) => {
      const text = `${+v.toPrecision(8)}${k === marks.length - 1 ? " s" : ""}`;
      const half = pen.measureText(text).width / 2;
      pen.fillText(text, Math.min(this.right + 12 - half, Math.max(this.left + half - 6, this.x(v))), y + 16);
    });
  }
  drawMap(width) {
    const height = 22, pen = prepare(this.map, width, height), bins = this.lines[0].compute.length;
    const each = (this.right - this.left) / bins, mean = (key, k) => this.lines.reduce((sum, l) => sum + l[key][k], 0) / this.lines.length;
    pen.textAlign = "right";
    pen.fillStyle = SOFT;
    pen.font = FONT.replace("12px", this.left < 50 ? "10px" : "11px");
    pen.fillText(pen.measureText("whole run").width > this.left - 10 ? "all" : "whole run", this.left - 8, height / 2);
    // Bins are often narrower than a step: without smoothing the strip would show their beat.
    const reach = Math.ceil(this.data.window_s / 8 / (this.wall / bins)), smooth = key => {
      const raw = Array.from({ length: bins }, (_, k) => mean(key, k));
      return raw.map((_, k) => { const near = raw.slice(Math.max(0, k - reach), k + reach + 1); return near.reduce((a, b) => a + b, 0) / near.length; });
    };
    const computes = smooth("compute"), waits = smooth("wait");
    for (let k = 0; k < bins; k++) {
      const compute = computes[k], wait = Math.min(waits[k], 1 - compute), h = height - 6;
      pen.fillStyle = COMPUTING; pen.globalAlpha = 0.6;
      pen.fillRect(this.left + k * each, 3 + h * (1 - compute), each + 0.3, h * compute);
      pen.fillStyle = WAITING;
      pen.fillRect(this.left + k * each, 3 + h * (1 - compute - wait), each + 0.3, h * wait);
    }
    pen.globalAlpha = 1;
    const a = this.left + this.from / this.wall * (this.right - this.left), b = a + this.span / this.wall * (this.right - this.left);
    pen.strokeStyle = INK; pen.lineWidth = 1.5;
    pen.strokeRect(a, 1, Math.max(3, b - a), height - 2);
  }
  describe(x, y) {
    const line = this.lines[Math.floor((y - 4) / this.rowHeight)];
    if (!line || x < this.left || x > this.right) return null;
    const at = this.at(x), within = (y - 4) % this.rowHeight;
    const name = `<b>${escape(line.label)}</b> at ${at.toFixed(3)} s`;
    const isExact = at >= this.data.exact_from && at <= this.data.exact_to;
    if (!isExact) {
      const k = Math.min(line.compute.length - 1, Math.floor(at / this.wall * line.compute.length));
      return `${name}\ncomputing ${Math.round(100 * line.compute[k])} %, waiting ${Math.round(100 * line.wait[k])} %, averaging ${Math.round(100 * line.average[k])} %`;
    }
    const near = 3 / this.scale;
    const average = line.averages.find(a => a[0] - near <= at && at <= a[1] + near);
    const said = average ? `\naveraging ${duration(average[1] - average[0])} ${average[2] >= 0 ? `with ${escape(this.nameOf(average[2]))}` : `in a group of ${-average[2]}`}` : "";
    if (within > this.rowHeight * 0.58) return name + (said || "\nno averaging");
    const k = firstAfter(line.steps, at, 2), step = line.steps[k];
    if (!step || at < step[0]) return `${name}\nbetween steps${said}`;
    return `${name}\nstep ${line.first + k}: computed ${duration(step[1] - step[0])}, waited ${duration(step[2] - step[1])}${said}`;
  }
  nameOf(rank) { return rank < names.length ? names[rank] : `rank ${rank}`; }
  listen() {
    let held = null;
    const local = (canvas, event) => { const box = canvas.getBoundingClientRect(); return [event.clientX - box.left, event.clientY - box.top]; };
    this.canvas.addEventListener("pointerdown", event => { held = [event.clientX, this.from]; this.canvas.setPointerCapture(event.pointerId); hideTip(); });
    this.canvas.addEventListener("pointerup", () => { held = null; });
    this.canvas.addEventListener("pointerleave", hideTip);
    this.canvas.addEventListener("pointermove", event => {
      if (held) { this.show(this.span, held[1] + this.span / 2 - (event.clientX - held[0]) / this.scale); return; }
      const text = this.describe(...local(this.canvas, event));
      if (text) showTip(event, text); else hideTip();
    });
    this.canvas.addEventListener("wheel", event => {
      if (!event.ctrlKey) return;
      event.preventDefault();
      const at = this.at(local(this.canvas, event)[0]), factor = Math.exp(event.deltaY * 0.004);
      const span = Math.min(this.wall, Math.max(0.01, this.span * factor));
      this.show(span, at + (this.from + this.span / 2 - at) * span / this.span);
    }, { passive: false });
    const go = event => this.show(this.span, (local(this.map, event)[0] - this.left) / (this.right - this.left) * this.wall);
    this.map.addEventListener("pointerdown", event => { this.map.setPointerCapture(event.pointerId); go(event); });
    this.map.addEventListener("pointermove", event => { if (event.buttons) go(event); });
  }
}

// --- who met whom ---------------------------------------------------------------------------------

function drawMatrix(figure, met, shade) {
  const n = met.labels.length, cell = n <= 6 ? 44 : n <= 12 ? 32 : n <= 24 ? 18 : Math.max(5, Math.floor(384 / n));
  const canvas = figure.querySelector("canvas") || figure.appendChild(document.createElement("canvas"));
  const label = prepare(canvas, 10, 10);
  const every = n <= 32 ? 1 : 8, shown = met.labels.map((text, k) => k % every ? "" : text.split(" to ")[0]);
  const small = cell < 15 ? FONT.replace("12px", "10px") : FONT;
  label.font = small;
  const left = Math.ceil(Math.max(...shown.map(text => label.measureText(text).width))) + 8;
  const isTurned = cell < Math.max(...shown.map(text => label.measureText(text).width)) + 6 && every === 1;
  const top = isTurned ? left : 20, width = left + n * cell + 30, height = top + n * cell + 40;
  canvas.style.width = `${width}px`;
  const pen = prepare(canvas, width, height);
  pen.font = small;
  pen.fillStyle = SOFT;
  shown.forEach((text, k) => {
    if (!text) return;
    pen.textAlign = "right";
    pen.fillStyle = SOFT;
    pen.fillText(text, left - 6, top + (k + 0.5) * cell);
    pen.save();
    if (isTurned) { pen.translate(left + (k + 0.5) * cell, top - 6); pen.rotate(-Math.PI / 2); pen.textAlign = "left"; pen.fillText(text, 0, 0); }
    else { pen.textAlign = every === 1 ? "center" : "left"; pen.fillText(text, left + (every === 1 ? (k + 0.5) * cell : k * cell), top - 9); }
    pen.restore();
  });
  const highest = Math.max(1e-9, ...met.counts.flat());
  const colour = v => mix(v / highest);
  for (let i = 0; i < n; i++) for (let j = 0; j < n; j++) {
    const v = met.counts[i][j], isSelf = i === j && !/ to /.test(met.labels[i]);
    pen.fillStyle = isSelf ? "#e9ebee" : colour(v);
    pen.fillRect(left + j * cell, top + i * cell, cell - (cell > 8 ? 1 : 0), cell - (cell > 8 ? 1 : 0));
    if (cell >= 30 && !isSelf) {
      pen.fillStyle = v / highest > 0.45 ? "#fff" : INK;
      pen.textAlign = "center";
      pen.fillText(short(v), left + (j + 0.5) * cell, top + (i + 0.5) * cell);
    }
  }
  const y = top + n * cell + 16;
  pen.font = FONT;
  for (let k = 0; k < 80; k++) { pen.fillStyle = mix(k / 79); pen.fillRect(left + 14 + k, y, 1.3, 9); }
  pen.fillStyle = SOFT;
  pen.textAlign = "right";
  pen.fillText("0", left + 9, y + 5);
  pen.textAlign = "left";
  pen.fillText(`${short(highest)} times`, left + 100, y + 5);
  canvas.onpointermove = event => {
    const box = canvas.getBoundingClientRect();
    const j = Math.floor((event.clientX - box.left - left) / cell), i = Math.floor((event.clientY - box.top - top) / cell);
    if (i >= 0 && j >= 0 && i < n && j < n) showTip(event, `<b>${escape(met.labels[i])}</b> met <b>${escape(met.labels[j])}</b>\n${short(met.counts[i][j])} times`); else hideTip();
  };
  canvas.onpointerleave = hideTip;
}
// White to a dark blue, by way of the blue of computing: darker is more, whatever one's eyes.
function mix(share) {
  const stops = [[247, 249, 251], [143, 190, 219], [0, 94, 150], [0, 40, 80]];
  const at = Math.min(0.9999, Math.max(0, share)) * (stops.length - 1), k = Math.floor(at), f = at - k;
  return `rgb(${stops[k].map((v, c) => Math.round(v + (stops[k + 1][c] - v) * f)).join(",")})`;
}

// --- go -------------------------------------------------------------------------------------------

drawCharts();
const names = [];
for (const line of data.algorithms[0].timeline.rows) names[line.rank] = line.name;
const timelines = [...document.querySelectorAll("[data-timeline]")].map(box => new Timeline(box, data.algorithms[+box.dataset.timeline]));
// A dozen steps of the slowest peer, the same number of seconds for all, so that bars compare.
const dozen = Math.min(Math.max(...data.algorithms.map(a => a.timeline.window_s)), ...data.algorithms.map(a => a.wall_s || 1));
// Faults are told apart over the whole run, steps only from near.
for (const timeline of timelines) timeline.show(timeline.faults.length ? timeline.wall : dozen);
const ZOOM = {
  steps: t => t.show(dozen), all: t => t.show(t.wall),
  in: t => t.show(t.span / 2, t.from + t.span / 2), out: t => t.show(t.span * 2, t.from + t.span / 2),
};
for (const button of document.querySelectorAll("[data-zoom]")) button.addEventListener("click", () => timelines.forEach(ZOOM[button.dataset.zoom]));
for (const figure of document.querySelectorAll("[data-matrix]")) drawMatrix(figure, data.algorithms[+figure.dataset.matrix].met);
addEventListener("resize", () => timelines.forEach(t => t.draw()));
addEventListener("beforeprint", () => timelines.forEach(t => t.draw()));
})();
