// Curves of the steps, by uPlot: one cursor over all, the band from the least to the most of each bucket, and marks where
// something happened to the job.

import { Component } from "preact";
import { html } from "holdfast/drawings";
import { count, figure, seconds } from "holdfast/words";

const SYNC = "holdfast";
const HEIGHT = 190;

function ink(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

// Marks by a draw hook: a line with a triangle for an incident, a square for a change of the size.
function drawMarks(marks) {
  return (u) => {
    const { left, top, width, height } = u.bbox;
    const ratio = devicePixelRatio;
    u.ctx.save();
    const inks = { incident: ink("--bad"), change: ink("--busy") };
    for (const mark of marks) {
      const x = u.valToPos(mark.step, "x", true);
      if (x < left || x > left + width) continue;
      u.ctx.strokeStyle = u.ctx.fillStyle = inks[mark.what];
      u.ctx.globalAlpha = 0.55;
      u.ctx.lineWidth = ratio;
      u.ctx.beginPath();
      u.ctx.moveTo(x, top);
      u.ctx.lineTo(x, top + height);
      u.ctx.stroke();
      u.ctx.globalAlpha = 1;
      u.ctx.beginPath();
      const r = 4 * ratio;
      if (mark.what === "incident") { u.ctx.moveTo(x - r, top); u.ctx.lineTo(x + r, top); u.ctx.lineTo(x, top + 1.6 * r); }
      else u.ctx.rect(x - r, top, 2 * r, 2 * r);
      u.ctx.fill();
    }
    u.ctx.restore();
  };
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

export class Curve extends Component {
  constructor(props) {
    super(props);
    this.box = null;
    this.plot = null;
  }

  shouldComponentUpdate(next) {
    const same = next.columns === this.props.columns && next.other === this.props.other && next.width === this.props.width && next.theme === this.props.theme;
    if (!same) {
      const onlyData = !next.other === !this.props.other && next.width === this.props.width && next.theme === this.props.theme && this.plot;
      this.props = next;
      if (onlyData) this.plot.setData(this.data(), true);
      else this.draw();
    }
    return false;
  }

  componentDidMount() { this.draw(); }
  componentWillUnmount() { if (this.plot) this.plot.destroy(); }

  data() {
    const { columns, value, band } = this.props;
    const of = (name) => columns[name].map((v) => (v === null || (this.props.log && v <= 0) ? null : v));
    const own = band ? [columns.step, of(`${value}_min`), of(`${value}_max`), of(value)] : [columns.step, of(value)];
    // The baseline before the curve itself: the last one is drawn on top, and is what the cursor tells.
    if (this.props.other) own.splice(-1, 0, alongside(columns.step, this.props.other, value));
    return own;
  }

  draw() {
    if (this.plot) this.plot.destroy();
    const { title, width, band, marks, onRange, onMark, log, unit } = this.props;
    const colour = ink("--line"), faint = ink("--band");
    const axis = { stroke: ink("--text"), grid: { stroke: ink("--rule"), width: 1 }, ticks: { stroke: ink("--rule") }, font: "12px system-ui, sans-serif" };
    const line = { label: title, stroke: colour, width: 1.6, points: { show: false }, spanGaps: false };
    const edge = { stroke: "transparent", points: { show: false } };
    this.plot = new uPlot({
      width, height: HEIGHT,
      cursor: { sync: { key: SYNC }, drag: { x: true, y: false, setScale: false } },
      legend: { show: false },
      scales: { x: { time: false }, y: log ? { distr: 3 } : {} },
      axes: [{ ...axis, size: 34, values: (_, all) => all.map((v) => (v === null ? "" : count(v))) }, { ...axis, size: 62, values: (_, all) => all.map((v) => (v === null ? "" : figure(v, 3))) }],
      series: [{}, ...(band ? [{ ...edge, label: "least" }, { ...edge, label: "most" }] : []), ...(this.props.other ? [{ ...line, label: "baseline", stroke: ink("--text"), width: 1.2, dash: [6, 4] }] : []), line],
      bands: band ? [{ series: [2, 1], fill: faint }] : [],
      hooks: {
        draw: [(u) => drawMarks(this.props.marks)(u)],
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
    void [marks, unit];
  }

  near(offset) {
    let best = null, least = 8;
    for (const mark of this.props.marks) {
      const far = Math.abs(this.plot.valToPos(mark.step, "x") - offset);
      if (far < least && mark.what === "incident") { best = mark; least = far; }
    }
    return best;
  }

  tell(u) {
    const { idx } = u.cursor;
    if (!this.words) return;
    const at = idx === null || idx === undefined ? null : idx;
    const values = u.data[u.data.length - 1];
    this.words.textContent = at === null ? "" : `step ${count(u.data[0][at])}: ${figure(values[at])}${this.props.unit ? ` ${this.props.unit}` : ""}`;
  }

  render({ title, note }) {
    return html`<figure class="curve">
      <figcaption><span class="title">${title}</span> <span class="quiet">${note}</span> <span class="cursor" ref=${(e) => { this.words = e; }}></span></figcaption>
      <div ref=${(e) => { this.box = e; }} role="img" aria-label=${`${title}; its figures are in the table below`}></div>
    </figure>`;
  }
}

// The same figures for those who do not see the curve: at most forty rows.
export function CurveTable({ columns, other, name, own }) {
  const baseline = other ? alongside(columns.step, other, "loss") : null;
  const logged = own ? alongside(columns.step, own.columns, "value") : null;
  const every = Math.max(1, Math.ceil(columns.step.length / 40));
  const rows = columns.step.map((s, n) => n).filter((n) => n % every === 0 || n === columns.step.length - 1);
  return html`<details><summary>The figures as a table</summary><div class="scroll" tabindex="0" role="region" aria-label="Figures of the curves"><table>
    <thead><tr>${["step", "loss", "least", "most", "gradient norm", "learning rate", "step time", "per second", "workers", ...(baseline ? [`loss of ${name}`] : []), ...(logged ? [own.name] : [])].map((n) => html`<th scope="col" class="number" key=${n}>${n}</th>`)}</tr></thead>
    <tbody>${rows.map((n) => html`<tr key=${n}>
      <td class="number">${count(columns.step[n])}</td>
      ${["loss", "loss_min", "loss_max", "grad_norm", "lr"].map((c) => html`<td class="number" key=${c}>${figure(columns[c][n])}</td>`)}
      <td class="number">${seconds(columns.step_s[n])}</td><td class="number">${figure(columns.weight_per_s[n])}</td><td class="number">${count(columns.world[n])}</td>${baseline && html`<td class="number">${figure(baseline[n])}</td>`}${logged && html`<td class="number">${figure(logged[n])}</td>`}
    </tr>`)}</tbody></table></div></details>`;
}
