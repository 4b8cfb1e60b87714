// Curves of the steps, by uPlot: one cursor over all, the band from the least to the most of each bucket, and marks where
// something happened to the job. A smoothed curve has the values themselves behind it, and an axis that leaves outliers out
// has a mark at its edge for each.

import { Component } from "preact";
import { html } from "holdfast/drawings";
import { count, figure, plural, seconds } from "holdfast/words";

const SYNC = "holdfast";
const HEIGHT = 190;
const TAIL = 0.01;          // of the values at either end may be outliers, of the edges of a band
const BAND_TAIL = 0.05;     // more: each of its points has the worst of many steps;
const RULED = 2;            // and are, where with them the axis would be so many times as long
const APART = 6;            // pixels between two marks at an edge

function ink(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

// Exponential moving average, without the pull towards 0 at its beginning: of Adam's kind of correction. Unknown stays unknown.
export function smoothed(values, weight) {
  if (!weight) return values;
  let sum = 0, whole = 0;
  return values.map((v) => {
    if (v === null || v === undefined) return null;
    sum = weight * sum + (1 - weight) * v;
    whole = weight * whole + (1 - weight);
    return sum / whole;
  });
}

function quantile(sorted, q) {
  return sorted[Math.min(sorted.length - 1, Math.max(0, Math.round(q * (sorted.length - 1))))];
}

// From where to where an axis goes, and whether that leaves values out. rows: lists of values; log: only those above 0.
export function axisOf(rows, { log, zero, full, tail = TAIL }) {
  const size = (v) => (log ? Math.log10(v) : v);
  const sorted = rows.flatMap((row) => row.filter((v) => v !== null && v !== undefined && Number.isFinite(v) && (!log || v > 0)).map(size)).sort((a, b) => a - b);
  if (!sorted.length) return { from: log ? 0.1 : 0, to: 1, cut: false };
  let from = sorted[0], to = sorted[sorted.length - 1], cut = false;
  if (!full && sorted.length >= 20) {
    const low = quantile(sorted, tail), high = quantile(sorted, 1 - tail), room = (high - low) / 4;
    const least = Math.max(from, low - room), most = Math.min(to, high + room);
    // Of values that are nearly all equal any other one is far away, and that is what is to be seen.
    if (most > least && to - from > RULED * (most - least)) [from, to, cut] = [least, most, true];
  }
  const room = to > from ? (to - from) / 20 : log ? 0.2 : Math.abs(to) / 2 || 1;
  if (log) return { from: 10 ** (from - room), to: 10 ** (to + room), cut };
  return { from: zero && from >= 0 ? 0 : from - room, to: to + room, cut };
}

// 1, 2 and 5 of each decade; of more than three decades their beginnings alone.
function decades(from, to) {
  const first = Math.floor(Math.log10(from)), last = Math.ceil(Math.log10(to));
  const parts = last - first > 3 ? [1] : [1, 2, 5], every = Math.max(1, Math.ceil((last - first) / 8)), found = [];
  for (let n = first; n <= last; n += every) for (const part of parts) { const v = part * 10 ** n; if (v >= from && v <= to) found.push(v); }
  return found.length ? found : [from, to];
}

const SHAPES = {
  incident: (c, x, y, r) => { c.moveTo(x - r, y); c.lineTo(x + r, y); c.lineTo(x, y + 1.6 * r); },
  change: (c, x, y, r) => c.rect(x - r, y, 2 * r, 2 * r),
  finding: (c, x, y, r) => { c.moveTo(x, y); c.lineTo(x + r, y + r); c.lineTo(x, y + 2 * r); c.lineTo(x - r, y + r); },
};

// Marks by a draw hook: a line with a triangle for an incident, a square for a change of the size, a diamond for a finding.
function drawMarks(u, marks) {
  const { left, top, width, height } = u.bbox;
  const ratio = devicePixelRatio;
  u.ctx.save();
  const inks = { incident: ink("--bad"), change: ink("--busy"), finding: ink("--found") };
  for (const mark of marks) {
    const x = u.valToPos(mark.step, "x", true);
    if (x < left || x > left + width) continue;
    u.ctx.strokeStyle = u.ctx.fillStyle = inks[mark.what];
    u.ctx.globalAlpha = 0.45;
    u.ctx.lineWidth = ratio;
    u.ctx.beginPath();
    u.ctx.moveTo(x, top);
    u.ctx.lineTo(x, top + height);
    u.ctx.stroke();
    u.ctx.globalAlpha = 1;
    u.ctx.beginPath();
    SHAPES[mark.what](u.ctx, x, top, 4 * ratio);
    u.ctx.fill();
  }
  u.ctx.restore();
}

// An open arrow at the edge for what is beyond it; several near each other are one.
function drawBeyond(u, steps, values, axis) {
  const { left, top, width, height } = u.bbox, ratio = devicePixelRatio, r = 3.5 * ratio;
  u.ctx.save();
  u.ctx.strokeStyle = ink("--text");
  u.ctx.lineWidth = 1.5 * ratio;
  const before = { up: -Infinity, down: -Infinity };
  values.forEach((v, n) => {
    if (v === null || (v >= axis.from && v <= axis.to)) return;
    const x = u.valToPos(steps[n], "x", true), way = v > axis.to ? "up" : "down";
    if (x < left || x > left + width || x - before[way] < APART * ratio) return;
    before[way] = x;
    const tip = way === "up" ? top + 12 * ratio : top + height - ratio, back = way === "up" ? r : -r;
    u.ctx.beginPath();
    u.ctx.moveTo(x - r, tip + back);
    u.ctx.lineTo(x, tip);
    u.ctx.lineTo(x + r, tip + back);
    u.ctx.stroke();
  });
  u.ctx.restore();
}

// Values of another job at these steps: of its newest point at or before each, and unknown where it has none near.
export function alongside(steps, other, value) {
  const found = [];
  const width = other.step.length > 1 ? other.step[1] - other.step[0] : 1;
  let n = -1;
  for (const step of steps) {
    while (n + 1 < other.step.length && other.step[n + 1] <= step) n += 1;
    found.push(n >= 0 && step - other.step[n] < 2 * width ? other[value][n] : null);
  }
  return found;
}

// What of a curve's properties makes another drawing, and not only other values.
const FORM = ["width", "theme", "log", "smooth", "full", "band"];

export class Curve extends Component {
  constructor(props) {
    super(props);
    this.box = null;
    this.plot = null;
  }

  shouldComponentUpdate(next) {
    const same = (name) => next[name] === this.props[name];
    if (!FORM.every(same) || !same("columns") || !same("other") || !same("marks")) {
      this.later = FORM.every(same) && !next.other === !this.props.other && this.plot ? "data" : "all";
      return true;
    }
    return false;
  }

  componentDidMount() { this.draw(); }
  componentDidUpdate() { if (this.later === "data") this.plot.setData(this.data(), true); else this.draw(); }
  componentWillUnmount() { if (this.plot) this.plot.destroy(); }

  // The values, and the axis that goes with them.
  measured() {
    const { columns, value, band, log, other, smooth, full, zero } = this.props;
    if (this.known && this.known.of.every((one, n) => one === [columns, other, log, smooth, full][n])) return this.known;
    const above = (row) => (log ? row.map((v) => (v === null || v <= 0 ? null : v)) : row);
    const raw = above(columns[value]), least = band ? above(columns[`${value}_min`]) : null, most = band ? above(columns[`${value}_max`]) : null;
    const beside = other ? smoothed(above(alongside(columns.step, other, value)), smooth) : null;
    const rows = band ? [least, most] : [raw];
    const axis = axisOf([...rows, ...(beside ? [beside] : [])], { log, zero, full, tail: band ? BAND_TAIL : TAIL });
    const out = (v) => v !== null && (v > axis.to || v < axis.from);
    const beyond = axis.cut ? raw.filter((_, n) => rows.some((row) => out(row[n]))).length : 0;
    this.known = { of: [columns, other, log, smooth, full], steps: columns.step, raw, least, most, beside, line: smoothed(raw, smooth), axis, beyond, rows };
    return this.known;
  }

  // The curve itself is the last one: it is drawn on top. The values that it was made of are before it.
  data() {
    const { steps, raw, least, most, beside, line } = this.measured();
    return [steps, ...(least ? [least, most] : []), ...(beside ? [beside] : []), ...(this.props.smooth ? [raw] : []), line];
  }

  draw() {
    if (this.plot) this.plot.destroy();
    const { title, width, band, onRange, onMark, log, smooth, other } = this.props;
    const colour = ink("--line");
    const axis = { stroke: ink("--text"), grid: { stroke: ink("--rule"), width: 1 }, ticks: { stroke: ink("--rule") }, font: "12px system-ui, sans-serif" };
    const line = { label: title, stroke: colour, width: 1.8, points: { show: false }, spanGaps: false };
    const edge = { stroke: "transparent", points: { show: false } };
    const range = () => { const { from, to } = this.measured().axis; return [from, to]; };
    this.plot = new uPlot({
      width, height: HEIGHT,
      cursor: { sync: { key: SYNC }, drag: { x: true, y: false, setScale: false } },
      legend: { show: false },
      scales: { x: { time: false }, y: log ? { distr: 3, range } : { range } },
      axes: [{ ...axis, size: 34, values: (_, all) => all.map((v) => (v === null ? "" : count(v))) }, { ...axis, size: 62, ...(log ? { splits: (u, n, from, to) => decades(from, to), filter: (u, splits) => splits } : {}), values: (_, all) => all.map((v) => (v === null ? "" : figure(v, 3))) }],
      series: [{}, ...(band ? [{ ...edge, label: "least" }, { ...edge, label: "most" }] : []), ...(other ? [{ ...line, label: "baseline", stroke: ink("--text"), width: 1.2, dash: [6, 4] }] : []), ...(smooth ? [{ ...line, label: "values", stroke: ink("--faint"), width: 1 }] : []), line],
      bands: band ? [{ series: [2, 1], fill: ink("--band") }] : [],
      hooks: {
        draw: [(u) => { const { steps, rows, axis: drawn } = this.measured(); drawMarks(u, this.props.marks); if (drawn.cut) rows.forEach((row) => drawBeyond(u, steps, row, drawn)); }],
        setCursor: [(u) => this.tell(u)],
        setSelect: [(u) => {
          if (u.select.width > 8) onRange(Math.round(u.posToVal(u.select.left, "x")), Math.round(u.posToVal(u.select.left + u.select.width, "x")));
          u.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
        }],
      },
    }, this.data(), this.box);
    this.plot.over.addEventListener("dblclick", () => onRange(null, null));
    this.plot.over.addEventListener("click", (event) => {
      const near = this.near(event.offsetX);
      if (near) onMark(near);
    });
  }

  near(offset) {
    let best = null, least = 8;
    for (const mark of this.props.marks) {
      const far = Math.abs(this.plot.valToPos(mark.step, "x") - offset);
      if (far < least && mark.what !== "change") { best = mark; least = far; }
    }
    return best;
  }

  tell(u) {
    const { idx } = u.cursor;
    if (!this.words) return;
    if (idx === null || idx === undefined) { this.words.textContent = ""; return; }
    const { steps, raw, line } = this.measured(), unit = this.props.unit ? ` ${this.props.unit}` : "";
    this.words.textContent = `step ${count(steps[idx])}: ${figure(raw[idx])}${unit}${this.props.smooth ? `, smoothed ${figure(line[idx])}` : ""}`;
  }

  render({ title, note, log, onLog }) {
    const { beyond } = this.measured();
    return html`<figure class="curve">
      <figcaption><span class="title">${title}</span> <button type="button" class="small" aria-pressed=${Boolean(log)} aria-label=${`${title}: logarithmic scale`} onClick=${onLog}>log</button> <span class="quiet">${note}</span>
        ${beyond > 0 && html`<span class="quiet">${plural(beyond, "point")} beyond the axis, marked at its edge</span>`}
        <span class="cursor" ref=${(e) => { this.words = e; }}></span></figcaption>
      <div ref=${(e) => { this.box = e; }} role="img" aria-label=${`${title}; its figures are in the table below`}></div>
    </figure>`;
  }
}

// The same figures for those who do not see the curve: at most forty rows. logged: name and columns of what the script logs.
export function CurveTable({ columns, other, name, logged }) {
  const baseline = other ? alongside(columns.step, other, "loss") : null;
  const own = logged.map((one) => [one.name, alongside(columns.step, one.columns, "value")]);
  const every = Math.max(1, Math.ceil(columns.step.length / 40));
  const rows = columns.step.map((s, n) => n).filter((n) => n % every === 0 || n === columns.step.length - 1);
  return html`<details><summary>The figures as a table</summary><div class="scroll" tabindex="0" role="region" aria-label="Figures of the curves"><table>
    <thead><tr>${["step", "loss", "least", "most", "gradient norm", "learning rate", "step time", "per second", "workers", ...(baseline ? [`loss of ${name}`] : []), ...own.map(([n]) => n)].map((n) => html`<th scope="col" class="number" key=${n}>${n}</th>`)}</tr></thead>
    <tbody>${rows.map((n) => html`<tr key=${n}>
      <td class="number">${count(columns.step[n])}</td>
      ${["loss", "loss_min", "loss_max", "grad_norm", "lr"].map((c) => html`<td class="number" key=${c}>${figure(columns[c][n])}</td>`)}
      <td class="number">${seconds(columns.step_s[n])}</td><td class="number">${figure(columns.weight_per_s[n])}</td><td class="number">${count(columns.world[n])}</td>${baseline && html`<td class="number">${figure(baseline[n])}</td>`}${own.map(([key, values]) => html`<td class="number" key=${key}>${figure(values[n])}</td>`)}
    </tr>`)}</tbody></table></div></details>`;
}
