// Keeps what the server sends, and shows it. What peers report is always set as text, never as HTML.

import { Graph, MANY, mix, stateColour } from "./graph.js";
import { ago, drawCharts, drawLanes, peersPerLine, percent, short, timeAt } from "./charts.js";

const $ = id => document.getElementById(id);
const ROWS = 200, EVENTS = 400, SECONDS = 900;
const GONE = ["dead", "left", "no answer"];
const FAULTS = { pause: ["Pause", "Let it go on"], slow: ["Slow down", "Full speed"], cut: ["Cut off", "Reconnect"], kill: ["Kill", "Start again"] };

const state = {
  columns: [], peers: [], points: [], lanes: [], events: [], faults: [], slow: [], letters: {}, kinds: [],
  head: {}, now: 0, heardAt: 0, span: 60, pointer: null, chosen: null, sort: ["name", 1], filter: "", all: false,
};

// --- small tools --------------------------------------------------------------------------------------

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) if (name === "class") made.className = value; else made.setAttribute(name, value);
  made.append(...children.filter(child => child !== null));
  return made;
}
function setText(node, text) { if (node.textContent !== text) node.textContent = text; }
const css = {};
function readColours() {
  const style = getComputedStyle(document.documentElement);
  for (const name of ["card", "ink", "soft", "line", "wash", "computing", "waiting", "averaging", "loss", "distance", "good", "warn", "bad", "gone"])
    css[name] = style.getPropertyValue(`--${name}`).trim();
}

// --- theme --------------------------------------------------------------------------------------------

const prefersDark = matchMedia("(prefers-color-scheme: dark)");
function theme() {
  let kept = null;
  try { kept = localStorage.getItem("p2ptrain-theme"); } catch { /* storage may be switched off */ }
  return kept || (prefersDark.matches ? "dark" : "light");
}
function applyTheme() {
  document.documentElement.dataset.theme = theme();
  setText($("theme"), theme() === "dark" ? "Light" : "Dark");
  readColours();
  legends();
  stale.all();
}
$("theme").addEventListener("click", () => {
  try { localStorage.setItem("p2ptrain-theme", theme() === "dark" ? "light" : "dark"); } catch { /* as above */ }
  applyTheme();
});
prefersDark.addEventListener("change", applyTheme);

// --- what the server sends ------------------------------------------------------------------------------

function peerOf(row, index) {
  const peer = { index, faults: [] };
  state.columns.forEach((column, k) => { peer[column] = row[k]; });
  peer.isSlow = peer.cause === "compute" || peer.cause === "link";
  return peer;
}
function putPeer(row, index) {
  state.peers[index] = peerOf(row, index);
}
function takeHead(data) {
  state.head = data;
  state.now = data.now;
  state.heardAt = performance.now();
  state.slow = data.slow;
  state.faults = data.faults;
  const lasting = new Map();
  for (const fault of data.faults) if (fault.ended === null) lasting.set(fault.peer, [...(lasting.get(fault.peer) || []), fault.kind]);
  for (const peer of state.peers) peer.faults = lasting.get(peer.name) || [];
}
function onSnapshot(data) {
  state.columns = data.columns;
  state.letters = data.letters;
  state.kinds = data.kinds;
  state.peers = [];
  data.rows.forEach(putPeer);
  state.points = data.history.points;
  state.lanes = data.history.lanes.map((letters, k) => [data.history.points[k][0], letters]);
  state.events = data.events;
  if (state.chosen !== null && !state.peers[state.chosen]) choose(null);
  takeHead(data);
  graph.reset();
  for (const [at, members] of data.pulses) if (data.now - at < 12) graph.average(members, data.now - at);
  legends();
  stale.all();
}
function onUpdate(data) {
  for (const index of Object.keys(data.rows).map(Number).sort((a, b) => a - b)) putPeer(data.rows[index], index);
  for (const [point, letters] of data.seconds) { state.points.push(point); state.lanes.push([point[0], letters]); }
  state.points.splice(0, state.points.length - SECONDS);
  state.lanes.splice(0, state.lanes.length - SECONDS);
  state.events.push(...data.events);
  state.events.splice(0, state.events.length - EVENTS);
  takeHead(data);
  // Play averages half a second late and spread, as they happened.
  for (const [at, members] of data.pulses) graph.average(members, Math.max(-1, data.now - at - 0.5));
  stale.figures = stale.graph = true;
  if (data.seconds.length || data.events.length) stale.second = true;
}

function connect() {
  const feed = new EventSource("feed");
  feed.addEventListener("snapshot", event => onSnapshot(JSON.parse(event.data)));
  feed.addEventListener("update", event => onUpdate(JSON.parse(event.data)));
  feed.addEventListener("open", () => live("on", "live"));
  feed.addEventListener("error", () => {
    live("off", "the server does not answer");
    if (feed.readyState === EventSource.CLOSED) setTimeout(connect, 2000);
  });
}
function live(kind, text) {
  $("live").className = kind;
  setText($("live").lastElementChild, text);
}

// --- drawing, no more often than needed -----------------------------------------------------------------

const stale = { figures: true, second: true, graph: true, all() { this.figures = this.second = this.graph = true; } };
let drawnAt = 0, tableAt = 0;
function frame(at) {
  requestAnimationFrame(frame);
  if (document.hidden || !css.ink) return;
  const pause = state.peers.length > MANY ? 120 : 33;
  if ((stale.graph || graph.isMoving) && at - drawnAt >= pause) { graph.chosen = state.chosen; graph.draw(state.peers, css); stale.graph = false; drawnAt = at; }
  if (stale.figures) { showHead(); showDetail(); showFaults(); stale.figures = false; }
  if (stale.second) { showTime(); showSlow(); showLog(); stale.second = false; tableAt = 0; }
  if (at - tableAt > 1000) { showTable(); tableAt = at; }
}

const TILES = [
  ["samples per second", p => [short(p[1])]], ["steps per second", p => [short(p[2])]], ["waiting for others", p => [percent(p[3])]],
  ["loss", p => [p[4] === null ? "–" : p[4].toPrecision(3)]], ["consensus distance", p => [short(p[5])]], ["averages per second", p => [short(smooth(6))]],
];
function smooth(column) { // the mean of the last seconds, for what comes in few pieces
  const last = state.points.slice(-5).map(point => point[column] || 0);
  return last.length ? last.reduce((a, b) => a + b, 0) / last.length : null;
}
function showHead() {
  const { head } = state, summary = $("summary");
  if (head.now === undefined) return; // nothing has come yet
  setText($("title"), head.title || "");
  const here = element("b"), gone = head.known - head.present;
  here.textContent = `${head.present.toLocaleString("en")} peer${head.present === 1 ? "" : "s"}`;
  const rest = [gone ? `${gone} gone` : "", head.algorithm, head.model_size ? `${head.model_size.toLocaleString("en")} parameters` : "", `${head.progress.toLocaleString("en")} samples trained`];
  summary.replaceChildren(here, document.createTextNode(["", ...rest.filter(Boolean)].join(" · ")));
  document.title = `${head.present} peers · ${head.algorithm || "p2ptrain"}`;
  const notice = head.why_not ? `No peer answers: ${head.why_not}` : "";
  $("notice").hidden = !notice;
  setText($("notice"), notice);
  setText($("every"), head.every_s ? `Each peer is asked every ${head.every_s} s.` : "");
  const point = state.points[state.points.length - 1] || [0, null, null, null, null, null, null, 0];
  if (!$("tiles").children.length) $("tiles").append(...TILES.map(([text]) => element("div", { class: "tile" }, element("b"), text)));
  TILES.forEach(([, figure], k) => setText($("tiles").children[k].firstChild, figure(point)[0]));
}

function timeModel() {
  return { now: state.now, span: state.span, points: state.points, events: state.events, faults: state.faults, pointer: state.pointer,
    peers: state.peers, lanes: state.lanes, letters: state.letters, chosen: state.chosen };
}
function showTime() {
  drawCharts($("charts"), timeModel(), css);
  drawLanes($("lanes"), timeModel(), css);
}
for (const id of ["charts", "lanes"]) {
  const canvas = $(id);
  canvas.addEventListener("mousemove", event => {
    state.pointer = timeAt(canvas, event, timeModel());
    setText($("pointed"), state.pointer === null ? "" : `${ago(state.now - state.pointer)} ago`);
    const near = state.pointer === null ? [] : state.events.filter(one => Math.abs(one[0] - state.pointer) < state.span / 90).slice(0, 4);
    tip(event, near.map(one => one[3]).join("\n"));
    showTime();
  });
  canvas.addEventListener("mouseleave", event => { state.pointer = null; setText($("pointed"), ""); tip(event, ""); showTime(); });
}

function showSlow() {
  const list = $("slow");
  if (!state.slow.length) return list.replaceChildren(element("li", { class: "none" }, state.peers.length ? "All peers compute about equally fast." : "Nothing is known yet."));
  list.replaceChildren(...state.slow.slice(0, 40).map(text => element("li", { class: / waits? for others/.test(text) ? "waits" : "" }, text)));
}
function showLog() {
  const latest = state.events.slice(-120).reverse();
  if (!latest.length) return $("log").replaceChildren(element("li", { class: "none" }, element("time"), element("i"), element("span", {}, "Nothing has happened yet.")));
  $("log").replaceChildren(...latest.map(([at, level, , text]) =>
    element("li", { class: level }, element("time", {}, clock(at)), element("i", { title: level }), element("span", {}, text))));
}
function clock(at) {
  const then = new Date(Date.now() - (state.now - at) * 1000);
  return then.toLocaleTimeString("en-GB");
}

// --- one peer -------------------------------------------------------------------------------------------

function choose(index) {
  state.chosen = index === state.chosen ? null : index;
  $("fault-error").hidden = true;
  stale.all();
}
function showDetail() {
  const peer = state.chosen === null ? null : state.peers[state.chosen];
  $("detail").hidden = !peer;
  if (!peer) return;
  setText($("detail-name"), peer.name);
  setText($("detail-doing"), GONE.includes(peer.state) ? `${peer.state}${peer.doing ? `: ${peer.doing}` : ""}` : `${peer.doing || peer.state}${peer.why ? `; ${peer.why}` : ""}`);
  const figures = [
    ["Address", peer.address], ["State", peer.state], ["Steps", peer.steps.toLocaleString("en")], ["Samples/s", short(peer.samples_per_s)], ["Waiting", percent(peer.waiting)],
    ["Loss", short(peer.loss)], ["Distance", short(peer.distance)], ["Averages", averages(peer)], ["Last met", met(peer) || "–"], ["Link", peer.link_mbit ? `${short(peer.link_mbit)} Mbit/s` : "–"],
  ];
  const list = $("detail-figures");
  if (list.children.length !== 2 * figures.length) list.replaceChildren(...figures.flatMap(([name]) => [element("dt", {}, name), element("dd")]));
  figures.forEach(([, value], k) => setText(list.children[2 * k + 1], value));
  const buttons = $("fault-buttons");
  if (buttons.children.length !== state.kinds.length) {
    buttons.replaceChildren(...state.kinds.map(kind => {
      const button = element("button", { "data-kind": kind });
      button.addEventListener("click", () => orderFault(kind));
      return button;
    }));
  }
  for (const button of buttons.children) {
    const isOn = peer.faults.includes(button.dataset.kind), [begin, end] = FAULTS[button.dataset.kind] || [button.dataset.kind, `End ${button.dataset.kind}`];
    button.setAttribute("aria-pressed", String(isOn));
    setText(button, isOn ? end : begin);
  }
}
async function orderFault(kind) {
  const peer = state.peers[state.chosen];
  const body = JSON.stringify({ kind, peer: peer.name, on: !peer.faults.includes(kind) });
  const answer = await fetch("fault", { method: "POST", headers: { "Content-Type": "application/json" }, body }).catch(() => null);
  const isRefused = !answer || !answer.ok;
  $("fault-error").hidden = !isRefused;
  if (isRefused) setText($("fault-error"), answer ? await answer.text() : "The server does not answer.");
}
$("detail-close").addEventListener("click", () => choose(null));

function showFaults() {
  $("faults").hidden = !state.kinds.length && !state.faults.length;
  $("faults-hint").hidden = !state.kinds.length;
  $("faults-list").replaceChildren(...state.faults.slice(-12).reverse().map(fault => {
    const kept = fault.before ? (fault.during || 0) / fault.before : null;
    const when = fault.ended === null ? `for ${ago(state.now - fault.began)}` : `${ago(fault.ended - fault.began)}, ended ${ago(state.now - fault.ended)} ago`;
    const bar = element("span");
    bar.style.width = `${Math.min(100, 100 * (kept || 0))}%`;
    const text = kept === null ? "" : `${short(fault.during)} of ${short(fault.before)} samples/s${fault.after !== null ? `, ${short(fault.after)} afterwards` : ""}`;
    return element("li", { class: "fault" }, element("span", {}, element("b", {}, `${fault.peer}: ${fault.kind}`), ` ${when}`),
      element("em", { title: "of the throughput before" }, kept === null ? "–" : percent(kept)), element("div", { class: "meter" }, bar), element("span", { class: "soft" }, text));
  }));
}

// --- the table ------------------------------------------------------------------------------------------

const averages = peer => peer.averages === null ? "–" : `${peer.averages.toLocaleString("en")}${peer.failed ? ` (${short(peer.failed)} failed)` : ""}`;
const met = peer => peer.partners.slice(0, 3).join(", ") + (peer.partners.length > 3 ? " …" : "");
const TABLE = [
  { key: "name", title: "peer" }, { key: "state", title: "state" }, { key: "steps", title: "steps", number: true, show: p => p.steps.toLocaleString("en") },
  { key: "samples_per_s", title: "samples/s", number: true, show: p => short(p.samples_per_s) }, { key: "waiting", title: "waiting", number: true },
  { key: "loss", title: "loss", number: true, show: p => p.loss === null ? "–" : p.loss.toPrecision(4) }, { key: "distance", title: "distance", number: true, show: p => short(p.distance) },
  { key: "averages", title: "averages", number: true, show: averages }, { key: "partners", title: "last met", show: met },
  { key: "link_mbit", title: "link, Mbit/s", number: true, show: p => p.link_mbit ? short(p.link_mbit) : "–" }, { key: "why", title: "slow because it", show: p => p.why }, { key: "address", title: "address" },
];
$("columns").append(...TABLE.map(column => {
  const button = element("button", {}, column.title), head = element("th", { scope: "col", "data-key": column.key, class: column.number ? "n" : "" }, button);
  button.addEventListener("click", () => {
    state.sort = [column.key, state.sort[0] === column.key ? -state.sort[1] : column.number ? -1 : 1];
    tableAt = 0;
  });
  return head;
}));
const rows = new Map();
function showTable() {
  const [key, way] = state.sort, wanted = state.filter.toLowerCase();
  const value = peer => { const v = peer[key]; return Array.isArray(v) ? v.join() : v; };
  const found = state.peers.filter(peer => !wanted || peer.name.toLowerCase().includes(wanted) || peer.state.includes(wanted) || peer.cause.includes(wanted));
  found.sort((a, b) => {
    const x = value(a), y = value(b);
    if (x === null || y === null || x === y) return (x === null) - (y === null) || (a.name < b.name ? -1 : 1);
    return (x < y ? -1 : 1) * way;
  });
  for (const head of $("columns").children) if (head.dataset.key === key) head.setAttribute("aria-sort", way > 0 ? "ascending" : "descending"); else head.removeAttribute("aria-sort");
  const shown = state.all ? found : found.slice(0, ROWS);
  const wantedRows = shown.map(peer => fill(rows.get(peer.index) || newRow(peer.index), peer));
  const body = $("rows");
  if (body.children.length !== wantedRows.length || wantedRows.some((row, k) => body.children[k] !== row)) body.replaceChildren(...wantedRows);
  setText($("rows-note"), shown.length < state.peers.length ? `${shown.length.toLocaleString("en")} of ${state.peers.length.toLocaleString("en")} peers` : "");
  $("rows-all").hidden = found.length <= ROWS || state.all;
}
function newRow(index) {
  const row = element("tr", {}, ...TABLE.map(column => element("td", { class: column.number ? "n" : "" })));
  row.tabIndex = 0;
  row.addEventListener("click", () => choose(index));
  row.addEventListener("keydown", event => { if (event.key === "Enter") choose(index); });
  row.children[1].append(element("span", { class: "mark" }), document.createTextNode(""));
  row.children[4].append(document.createTextNode(""), element("span", { class: "share" }, element("span")));
  rows.set(index, row);
  return row;
}
function fill(row, peer) {
  row.className = `${GONE.includes(peer.state) ? "gone" : ""} ${state.chosen === peer.index ? "chosen" : ""}`.trim();
  TABLE.forEach((column, k) => {
    const cell = row.children[k];
    if (column.key === "state") {
      const colour = stateColour(peer.state, peer.isSlow, css);
      if (cell.firstChild.dataset.colour !== colour) { cell.firstChild.dataset.colour = colour; cell.firstChild.style.background = colour; }
      if (cell.lastChild.data !== peer.state) cell.lastChild.data = peer.state;
    } else if (column.key === "waiting") {
      const text = percent(peer.waiting);
      if (cell.firstChild.data !== text) { cell.firstChild.data = text; cell.lastChild.firstChild.style.width = `${Math.round(100 * (peer.waiting || 0))}%`; cell.lastChild.hidden = peer.waiting === null; }
    } else setText(cell, column.show ? column.show(peer) : String(peer[column.key] ?? ""));
  });
  return row;
}
$("filter").addEventListener("input", event => { state.filter = event.target.value; tableAt = 0; });
$("rows-all").addEventListener("click", () => { state.all = true; tableAt = 0; });

// --- legends, tip, switches -------------------------------------------------------------------------------

function sample(kind, colour, text) {
  const key = element("i", { class: kind });
  key.style[kind === "ring" ? "borderColor" : "background"] = colour;
  return element("span", {}, key, text);
}
function legends() {
  if (!css.ink) return;
  const isGrid = state.peers.length > MANY;
  $("colour").hidden = !isGrid;
  const grid = { state: [["", css.computing, "trains"], ["", css.warn, "slow or suspected"], ["", css.bad, "silent or no answer"], ["", css.gone, "dead or left"]],
    rate: [["", css.computing, "fastest"], ["", css.wash, "slowest"]], waiting: [["", css.computing, "computes"], ["", css.waiting, "waits"]] }[graph.mode];
  const circle = [["ring", css.computing, "computes"], ["ring", css.waiting, "waits"], ["round", css.computing, "disc: samples/s"], ["stroke", css.averaging, "averages"], ["ring", css.warn, "slow, or suspected"], ["ring", css.bad, "silent"], ["ring", css.gone, "gone"]];
  $("legend").replaceChildren(...(isGrid ? [...grid, ["", css.averaging, "averages"]] : circle).map(one => sample(...one)));
  $("lanes-legend").replaceChildren(...[["", mix(css.card, css.computing, 0.55), "computes"], ["", css.waiting, "waits"], ["", css.bad, "silent"], ["", css.warn, "suspected"], ["", mix(css.card, css.bad, 0.4), "no answer"], ["", css.gone, "dead"]].map(one => sample(...one)));
  const each = peersPerLine(state.peers.length);
  if (each > 1) $("lanes-legend").append(element("span", {}, `a line is ${each} peers, and shows the worst of them`));
}
function tip(event, text) {
  const box = $("tip");
  box.style.display = text ? "block" : "none";
  if (!text) return;
  setText(box, text);
  const { width, height } = box.getBoundingClientRect();
  box.style.left = `${Math.max(4, event.clientX + 16 + width > innerWidth ? event.clientX - width - 12 : event.clientX + 16)}px`;
  box.style.top = `${Math.min(innerHeight - height - 4, event.clientY + 14)}px`;
}
function hover(event, index) {
  const peer = index === null ? null : state.peers[index];
  tip(event, peer ? `${peer.name}: ${peer.doing || peer.state}\n${short(peer.samples_per_s)} samples/s, waits ${percent(peer.waiting)}${peer.why ? `\n${peer.why}` : ""}` : "");
}
function pressed(group, attribute, value) {
  for (const button of $(group).children) button.setAttribute("aria-pressed", String(button.dataset[attribute] === String(value)));
}
$("span").addEventListener("click", event => {
  if (!event.target.dataset.seconds) return;
  state.span = +event.target.dataset.seconds;
  pressed("span", "seconds", state.span);
  stale.second = true;
});
$("colour").addEventListener("click", event => {
  if (!event.target.dataset.colour) return;
  graph.mode = event.target.dataset.colour;
  pressed("colour", "colour", graph.mode);
  legends();
  stale.graph = true;
});
addEventListener("resize", () => stale.all());

const graph = new Graph($("graph"), index => { if (index !== null) choose(index); }, hover);
pressed("span", "seconds", state.span);
pressed("colour", "colour", "state");
applyTheme();
connect();
requestAnimationFrame(frame);
window.p2ptrain = { state, graph, css }; // for tests and the curious
