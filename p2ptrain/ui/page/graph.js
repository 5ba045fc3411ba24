// Draws the peers: on a circle up to MANY of them, with every average as it happens; beyond that as a grid of cells.

export const MANY = 128;
const FADE_S = 12; // a chord is visible for so long after its average
const FLASH_S = 1.1;
const TURN = 2 * Math.PI;
const FONT = 'system-ui, -apple-system, "Segoe UI", "Liberation Sans", "DejaVu Sans", sans-serif';

export function stateColour(state, slow, css) {
  if (state === "silent") return css.bad;
  if (state === "no answer") return css.bad;
  if (state === "suspect") return css.warn;
  if (state === "dead" || state === "left") return css.gone;
  if (state === "done") return css.good;
  if (state === "joins" || state === "new") return css.soft;
  return slow ? css.warn : css.computing;
}

export class Graph {
  constructor(canvas, choose, hover) {
    this.canvas = canvas;
    this.pen = canvas.getContext("2d");
    this.chords = new Map(); // "a b" -> when it was last seen, and how often
    this.flashes = [];
    this.mode = "state";
    this.chosen = null;
    this.spots = [];
    this.still = matchMedia("(prefers-reduced-motion: reduce)").matches;
    canvas.addEventListener("click", event => choose(this.at(event)));
    canvas.addEventListener("mousemove", event => hover(event, this.at(event)));
    canvas.addEventListener("mouseleave", event => hover(event, null));
  }

  reset() { this.chords.clear(); this.flashes = []; }

  average(members, ageS) {
    const at = performance.now() / 1000 - ageS;
    if (ageS < FLASH_S + 1) this.flashes.push({ at, members });
    if (members.length === 2) {
      const key = members[0] + " " + members[1];
      const chord = this.chords.get(key) || { a: members[0], b: members[1], at: 0, count: 0 };
      chord.at = Math.max(chord.at, at);
      chord.count += 1;
      this.chords.set(key, chord);
    } else if (ageS < FADE_S) this.chords.set(members.join(" "), { members, at, count: 1 });
    if (this.flashes.length > 600) this.flashes.splice(0, this.flashes.length - 600);
  }

  get isMoving() { return this.flashes.length > 0 || this.chords.size > 0; }

  at(event) {
    const box = this.canvas.getBoundingClientRect();
    const x = event.clientX - box.left, y = event.clientY - box.top;
    let best = null, nearest = Infinity;
    for (const spot of this.spots) {
      const d = Math.hypot(spot.x - x, spot.y - y);
      if (d < nearest && d <= Math.max(spot.r + 5, 9)) { best = spot.index; nearest = d; }
    }
    return best;
  }

  draw(peers, css) {
    const box = this.canvas.getBoundingClientRect(), ratio = Math.min(2, devicePixelRatio || 1);
    const W = box.width, H = box.height;
    if (!W || !H) return;
    if (this.canvas.width !== Math.round(W * ratio)) this.canvas.width = Math.round(W * ratio);
    if (this.canvas.height !== Math.round(H * ratio)) this.canvas.height = Math.round(H * ratio);
    this.pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.pen.clearRect(0, 0, W, H);
    const now = performance.now() / 1000;
    this.flashes = this.flashes.filter(flash => now - flash.at < FLASH_S);
    for (const [key, chord] of this.chords) if (now - chord.at > FADE_S) this.chords.delete(key);
    if (peers.length > MANY) this.grid(peers, css, W, H, now);
    else this.circle(peers, css, W, H, now);
  }

  // --- up to MANY -----------------------------------------------------------------------------------

  circle(peers, css, W, H, now) {
    const pen = this.pen, n = peers.length;
    const size = Math.min(W, H), longest = Math.max(0, ...peers.map(p => Math.min(12, p.name.length)));
    const text = n <= 40 ? 12 : n <= 80 ? 10.5 : 9;
    const largest = n <= 8 ? 34 : 26;
    const isSpoked = n > 16; // names along the spokes
    const margin = isSpoked ? longest * text * 0.66 + (n <= 40 ? 40 : 26) : largest + 18 + longest * text * 0.62;
    const R = Math.max(20, size / 2 - margin);
    const r = n === 1 ? 30 : Math.max(3, Math.min(largest, R * Math.sin(Math.PI / n) * 0.78));
    const spots = this.spots = peers.map((peer, k) => {
      const angle = (k / n) * TURN - Math.PI / 2;
      return { index: peer.index, angle, x: n === 1 ? W / 2 : W / 2 + R * Math.cos(angle), y: n === 1 ? H / 2 : H / 2 + R * Math.sin(angle), r };
    });
    const where = new Map(spots.map(spot => [spot.index, spot]));
    const centre = { x: W / 2, y: H / 2 };
    pen.lineCap = "round";
    for (const chord of this.chords.values()) this.chord(chord, where, centre, css, now, n);
    for (const flash of this.flashes) this.flash(flash, where, centre, css, now);
    const most = Math.max(1e-9, ...peers.map(p => p.samples_per_s || 0));
    peers.forEach((peer, k) => this.node(peer, spots[k], css, most));
    pen.font = `${text}px ${FONT}`;
    peers.forEach((peer, k) => this.name(peer, spots[k], css, isSpoked, centre));
  }

  chord(chord, where, centre, css, now, n) {
    const pen = this.pen, left = 1 - (now - chord.at) / FADE_S;
    pen.strokeStyle = css.averaging;
    pen.globalAlpha = 0.05 + 0.34 * left * left;
    pen.lineWidth = n <= 24 ? 1.6 : 1;
    if (chord.members) {
      const spots = chord.members.map(m => where.get(m)).filter(Boolean), mid = middle(spots);
      pen.globalAlpha *= chord.members.length > 8 ? 0.5 : 1;
      pen.beginPath();
      for (const spot of spots) { pen.moveTo(spot.x, spot.y); pen.lineTo(mid.x, mid.y); }
      pen.stroke();
    } else {
      const a = where.get(chord.a), b = where.get(chord.b);
      if (a && b) { pen.beginPath(); curve(pen, a, b, centre); pen.stroke(); }
    }
    pen.globalAlpha = 1;
  }

  flash(flash, where, centre, css, now) {
    const age = (now - flash.at) / FLASH_S, pen = this.pen;
    if (age < 0) return;
    const spots = flash.members.map(m => where.get(m)).filter(Boolean);
    if (spots.length < 2) return;
    const glow = age < 0.35 ? age / 0.35 : 1 - (age - 0.35) / 0.65;
    pen.strokeStyle = pen.fillStyle = css.averaging;
    pen.globalAlpha = 0.85 * glow;
    pen.lineWidth = spots.length > 16 ? 1 : 2.2;
    pen.beginPath();
    if (spots.length === 2) curve(pen, spots[0], spots[1], centre);
    else { const mid = middle(spots); for (const spot of spots) { pen.moveTo(spot.x, spot.y); pen.lineTo(mid.x, mid.y); } }
    pen.stroke();
    if (!this.still) {
      const way = Math.min(1, age / 0.5), dot = spots.length > 16 ? 1.8 : 3.2;
      const mid = spots.length === 2 ? null : middle(spots);
      spots.forEach((spot, k) => {
        const point = mid ? { x: spot.x + (mid.x - spot.x) * way, y: spot.y + (mid.y - spot.y) * way }
          : along(spots[k], spots[1 - k], centre, way / 2);
        pen.beginPath(); pen.arc(point.x, point.y, dot, 0, TURN); pen.fill();
      });
    }
    pen.globalAlpha = 0.35 * glow;
    for (const spot of spots) { pen.beginPath(); pen.arc(spot.x, spot.y, spot.r + 5, 0, TURN); pen.stroke(); }
    pen.globalAlpha = 1;
  }

  node(peer, spot, css, most) {
    const pen = this.pen, { x, y, r } = spot, isGone = ["dead", "left", "no answer"].includes(peer.state);
    const colour = stateColour(peer.state, peer.isSlow, css);
    pen.fillStyle = css.card;
    pen.beginPath(); pen.arc(x, y, r + 1.5, 0, TURN); pen.fill();
    if (isGone) {
      pen.fillStyle = css.wash; pen.beginPath(); pen.arc(x, y, r, 0, TURN); pen.fill();
      pen.strokeStyle = colour; pen.lineWidth = Math.max(1, r * 0.14);
      pen.setLineDash([3, 3]); pen.beginPath(); pen.arc(x, y, r, 0, TURN); pen.stroke(); pen.setLineDash([]);
      if (r >= 5) cross(pen, x, y, r * 0.38);
    } else {
      const ring = Math.max(1.6, r * 0.3), waits = peer.waiting || 0, start = -Math.PI / 2;
      pen.lineCap = "butt"; pen.lineWidth = ring;
      pen.strokeStyle = peer.state === "trains" || peer.state === "silent" || peer.state === "suspect" ? css.computing : css.gone;
      pen.beginPath(); pen.arc(x, y, r - ring / 2, 0, TURN); pen.stroke();
      if (waits > 0.005) { pen.strokeStyle = css.waiting; pen.beginPath(); pen.arc(x, y, r - ring / 2, start, start + TURN * Math.min(1, waits)); pen.stroke(); }
      pen.lineCap = "round";
      const inner = r - ring - 1;
      if (inner > 1) {
        pen.fillStyle = colour; pen.globalAlpha = 0.9;
        pen.beginPath(); pen.arc(x, y, inner * Math.sqrt(Math.min(1, (peer.samples_per_s || 0) / most)), 0, TURN); pen.fill();
        pen.globalAlpha = 1;
      }
      if (peer.isSlow || peer.state === "silent" || peer.state === "suspect") {
        pen.strokeStyle = colour; pen.lineWidth = 2; pen.beginPath(); pen.arc(x, y, r + 3.5, 0, TURN); pen.stroke();
      }
    }
    if (peer.faults.length) {
      pen.strokeStyle = css.warn; pen.lineWidth = 2; pen.setLineDash([4, 3]);
      pen.beginPath(); pen.arc(x, y, r + 7, 0, TURN); pen.stroke(); pen.setLineDash([]);
    }
    if (this.chosen === peer.index) {
      pen.strokeStyle = css.ink; pen.lineWidth = 2; pen.beginPath(); pen.arc(x, y, r + 5, 0, TURN); pen.stroke();
    }
  }

  name(peer, spot, css, isSpoked, centre) {
    const pen = this.pen, label = peer.name.length > 12 ? peer.name.slice(0, 11) + "…" : peer.name;
    const isBad = peer.isSlow || ["silent", "suspect", "no answer"].includes(peer.state);
    pen.fillStyle = isBad ? stateColour(peer.state, peer.isSlow, css) : peer.state === "dead" || peer.state === "left" ? css.gone : css.soft;
    pen.textBaseline = "middle";
    if (!isSpoked) {
      const cos = Math.cos(spot.angle), sin = Math.sin(spot.angle), away = spot.r + 12;
      pen.textAlign = Math.abs(cos) < 0.3 ? "center" : cos > 0 ? "left" : "right";
      pen.fillText(label, spot.x + cos * away, spot.y + sin * (away + 2));
      return;
    }
    pen.save();
    pen.translate(spot.x, spot.y);
    const isLeft = Math.cos(spot.angle) < -1e-9;
    pen.rotate(spot.angle + (isLeft ? Math.PI : 0));
    pen.textAlign = isLeft ? "right" : "left";
    pen.fillText(label, (isLeft ? -1 : 1) * (spot.r + 8), 0);
    pen.restore();
  }

  // --- beyond ---------------------------------------------------------------------------------------

  grid(peers, css, W, H, now) {
    const pen = this.pen, n = peers.length, across = Math.ceil(Math.sqrt(n)), down = Math.ceil(n / across);
    const gutter = 8 + Math.min(12, Math.max(...peers.map(p => p.name.length))) * 6.4;
    const cell = Math.min((W - gutter) / across, (H - 4) / down), gap = cell > 7 ? 1.5 : 0.6;
    const left = gutter + (W - gutter - cell * across) / 2, top = (H - cell * down) / 2;
    const most = Math.max(1e-9, ...peers.map(p => p.samples_per_s || 0));
    const lit = new Map();
    for (const flash of this.flashes) {
      const age = (now - flash.at) / FLASH_S;
      if (age >= 0) for (const m of flash.members) lit.set(m, Math.max(lit.get(m) || 0, 1 - age));
    }
    pen.font = `10px ${FONT}`;
    pen.textAlign = "right"; pen.textBaseline = "middle"; pen.fillStyle = css.soft;
    const every = Math.max(1, Math.ceil(13 / cell));
    for (let row = 0; row < down; row += every) pen.fillText(peers[row * across].name.slice(0, 12), left - 7, top + (row + 0.5) * cell);
    this.spots = peers.map((peer, k) => {
      const x = left + (k % across) * cell, y = top + Math.floor(k / across) * cell, side = cell - gap;
      pen.fillStyle = this.cellColour(peer, css, most);
      pen.fillRect(x, y, side, side);
      if (peer.state === "dead" || peer.state === "left" || peer.state === "no answer") {
        pen.strokeStyle = css.card; pen.lineWidth = 1.2; cross(pen, x + side / 2, y + side / 2, side * 0.28);
      }
      const glow = lit.get(peer.index);
      if (glow) { pen.globalAlpha = glow; pen.strokeStyle = css.averaging; pen.lineWidth = 2; pen.strokeRect(x + 1, y + 1, side - 2, side - 2); pen.globalAlpha = 1; }
      if (this.chosen === peer.index) { pen.strokeStyle = css.ink; pen.lineWidth = 2; pen.strokeRect(x - 1, y - 1, side + 2, side + 2); }
      return { index: peer.index, x: x + side / 2, y: y + side / 2, r: side / 2 };
    });
  }

  cellColour(peer, css, most) {
    if (["dead", "left"].includes(peer.state)) return css.gone;
    if (peer.state === "no answer" || peer.state === "silent") return css.bad;
    if (peer.samples_per_s === null) return css.line;
    if (this.mode === "rate") return mix(css.wash, css.computing, peer.samples_per_s / most);
    if (this.mode === "waiting") return mix(css.computing, css.waiting, peer.waiting || 0);
    const colour = stateColour(peer.state, peer.isSlow, css);
    return colour === css.computing ? mix(css.card, css.computing, 0.55) : colour;
  }
}

export function mix(from, to, share) {
  const part = colour => [1, 3, 5].map(k => parseInt(colour.slice(k, k + 2), 16));
  const a = part(from), b = part(to), t = Math.min(1, Math.max(0, share));
  return `rgb(${a.map((v, k) => Math.round(v + (b[k] - v) * t)).join(" ")})`;
}
function bend(a, b, centre) { // the middle of a chord, drawn towards the centre of the circle
  return { x: (a.x + b.x) / 2 * 0.55 + centre.x * 0.45, y: (a.y + b.y) / 2 * 0.55 + centre.y * 0.45 };
}
function curve(pen, a, b, centre) { const m = bend(a, b, centre); pen.moveTo(a.x, a.y); pen.quadraticCurveTo(m.x, m.y, b.x, b.y); }
function along(a, b, centre, t) {
  const m = bend(a, b, centre), s = 1 - t;
  return { x: s * s * a.x + 2 * s * t * m.x + t * t * b.x, y: s * s * a.y + 2 * s * t * m.y + t * t * b.y };
}
function middle(spots) {
  return { x: spots.reduce((sum, s) => sum + s.x, 0) / spots.length, y: spots.reduce((sum, s) => sum + s.y, 0) / spots.length };
}
function cross(pen, x, y, d) {
  pen.beginPath(); pen.moveTo(x - d, y - d); pen.lineTo(x + d, y + d); pen.moveTo(x + d, y - d); pen.lineTo(x - d, y + d); pen.stroke();
}
