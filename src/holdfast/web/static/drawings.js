// Drawings without a library: the timeline of incidents, what each node did, phases, and where the time went.

import { Component, h } from "preact";
import htm from "htm";
import { clock, count, local, plural, seconds, share } from "holdfast/words";

export const html = htm.bind(h);

export const PHASES = ["detect", "decide", "replace", "join", "restore", "first_step"];
const LANE = 26, LABEL = 118, AXIS = 36, LEAST = 5;
const ROW = 15;

// A shape for each tone, beside its colour and its word.
export function Shape({ tone, title }) {
  const shapes = {
    good: html`<circle cx="8" cy="8" r="6.5" />`,
    busy: html`<path d="M8 1 L15 14 L1 14 Z" />`,
    bad: html`<path d="M2 2 L14 2 L14 14 L2 14 Z" />`,
    over: html`<path d="M8 1 L15 8 L8 15 L1 8 Z" />`,
  };
  return html`<svg class=${`shape ${tone}`} viewBox="0 0 16 16" aria-hidden="true">${shapes[tone] || shapes.over}</svg>`;
}

// Round times of the clock where it is known, else of the job.
function ticks(from, to, width, began) {
  const wanted = Math.max(2, Math.floor(width / 110));
  const steps = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600, 7200, 14400, 43200, 86400, 172800, 604800];
  const step = steps.find((s) => (to - from) / s <= wanted) || Math.ceil((to - from) / wanted / 86400) * 86400;
  const found = [];
  const shift = began ? began - new Date(began * 1000).getTimezoneOffset() * 60 : 0;
  for (let t = Math.ceil((from + shift) / step) * step - shift; t <= to; t += step) found.push(t);
  return found;
}

// The time by this browser's clock, and below it the time since the job's start. began: of the job, in seconds since 1970.
function Axis({ from, to, x, height, width, left, began }) {
  const found = ticks(from, to, width - left, began), known = began !== null && began !== undefined;
  const short = found.length > 1 && (found[1] - found[0]) % 60 === 0;
  let day = new Date();
  return html`<g class="axis" aria-hidden="true">
    ${found.map((t) => {
      const label = known ? local(began + t, short, day) : "";
      if (known) day = new Date((began + t) * 1000);
      const place = { x: Math.min(x(t), width - 4), "text-anchor": x(t) > width - 40 ? "end" : x(t) < 24 ? "start" : "middle" };
      return html`<g key=${t}>
      <line x1=${x(t)} x2=${x(t)} y1="0" y2=${height} />
      ${known && html`<text class="clock" ...${place} y=${height + 14}>${label}</text>`}
      <text ...${place} y=${height + (known ? 28 : 15)}>${clock(t)}</text>
    </g>`;
    })}
  </g>`;
}

// A drawing of many parts is drawn again when its data came anew, and not with every second that passes.
class Still extends Component {
  shouldComponentUpdate(next) {
    return next.data !== this.props.data || next.width !== this.props.width || next.began !== this.props.began;
  }
}

// `03:12:45 (0:00:18)`
function moment(began, t) {
  return began === null || began === undefined ? clock(t) : `${local(began + t)} (${clock(t)})`;
}

// One lane for each kind of incident; a bar from the fault to full strength, its dark part the stall. Bars that would be
// under each other are one, with a count.
export class Timeline extends Still {
  render({ data, width, began }) { return timeline(data, width, began); }
}

function timeline(data, width, began) {
  const from = data.from_s, to = Math.max(data.to_s, from + 1);
  const narrow = width < 480, left = narrow ? 8 : LABEL;
  const x = (t) => left + ((t - from) / (to - from)) * (width - left - 6);
  const lanes = [...new Set(data.bars.map((b) => b.kind))];
  const lane = narrow ? LANE + 12 : LANE;
  const height = lanes.length * lane;
  return html`<svg class="timeline" role="list" aria-label=${`${plural(data.count, "incident")} in time`} width=${width} height=${height + AXIS}>
    <${Axis} from=${from} to=${to} x=${x} height=${height} width=${width} left=${left} began=${began} />
    ${lanes.map((kind, row) => html`<g key=${kind} transform=${`translate(0 ${row * lane})`}>
      <text class="lane" x=${narrow ? left : 0} y=${narrow ? 12 : 17}>${kind}</text>
      ${merged(data.bars.filter((b) => b.kind === kind), x).map((b) => html`<${Bar} key=${b.id} bar=${b} x=${x} to=${to} top=${narrow ? 16 : 5} began=${began} />`)}
    </g>`)}
  </svg>`;
}

function merged(bars, x) {
  const found = [];
  for (const bar of [...bars].sort((a, b) => a.t_s - b.t_s)) {
    const before = found[found.length - 1];
    if (before && x(bar.t_s) - x(before.t_s) < LEAST + 2) {
      const worse = (bar.open && !before.open) || (bar.stall_s || 0) > (before.stall_s || 0) ? bar : before;
      found[found.length - 1] = { ...worse, t_s: before.t_s, n: before.n + bar.n, open: before.open || bar.open };
    } else found.push(bar);
  }
  return found;
}

function Bar({ bar, x, to, top, began }) {
  const begin = x(bar.t_s), end = Math.max(begin + LEAST, x(bar.open ? to : bar.end_s));
  const stall = bar.stall_s === null ? 0 : Math.max(3, x(bar.t_s + bar.stall_s) - begin);
  const many = bar.n > 1 ? `${bar.n} incidents, the longest: ` : "";
  const words = `${many}incident ${bar.id}, ${bar.cause}${bar.node ? `, on ${bar.node}` : ""}, at ${moment(began, bar.t_s)}, ${bar.quiet ? "training was not disturbed" : `stood for ${seconds(bar.stall_s)}`}${bar.open ? ", open" : ""}`;
  return html`<g role="listitem"><a href=${`#/incident/${bar.id}`} aria-label=${words}>
    <title>${words}</title>
    <rect class=${bar.open ? "bar open" : bar.quiet ? "bar calm" : "bar"} x=${begin} y=${top} width=${end - begin} height="16" rx="2" />
    ${stall > 0 && !bar.quiet && html`<rect class="stall" x=${begin} y=${top} width=${Math.min(stall, end - begin)} height="16" rx="2" />`}
    ${bar.n > 1 && html`<text class="many" x=${end + 3} y=${top + 12}>×${count(bar.n)}</text>`}
  </a></g>`;
}

// The phases of one incident, nested as they overlapped; beside them the usual time of its kind.
export function Phases({ incident, wide }) {
  const parts = PHASES.map((name) => [name, incident[`${name}_s`]]).filter(([, s]) => s !== null && s !== undefined);
  const all = parts.reduce((sum, [, s]) => sum + s, 0) || 1;
  if (!parts.length) return html`<span class="quiet">phases are not known</span>`;
  return html`<div class=${wide ? "phases wide" : "phases"} role="img" aria-label=${parts.map(([n, s]) => `${n.replace("_", " ")} ${seconds(s)}`).join(", ")}>
    ${parts.map(([name, s]) => html`<span key=${name} class=${`phase ${name}`} style=${{ flexGrow: Math.max(s / all, 0.02) }} title=${`${name.replace("_", " ")} ${seconds(s)}`}>
      ${wide && html`<span class="name">${name.replace("_", " ")}<br />${seconds(s)}</span>`}
    </span>`)}
  </div>`;
}

export function PhaseLegend() {
  return html`<ul class="legend" aria-label="Phases of an incident">${PHASES.map((name) => html`<li key=${name}><span class=${`phase swatch ${name}`}></span> ${name.replace("_", " ")}</li>`)}</ul>`;
}

const PATTERNS = {
  trains: null,
  waits: "M0 4 H8",
  held: "M0 8 L8 0",
  leaving: "M0 0 L8 8",
  sick: "M0 0 L8 8 M0 8 L8 0",
  lost: "M4 0 V8 M0 4 H8",
  gone: "M1 7 h1",
};

export function Patterns() {
  return html`<svg width="0" height="0" class="hidden" aria-hidden="true"><defs>
    ${Object.entries(PATTERNS).map(([name, path]) => html`<pattern key=${name} id=${`state-${name}`} width="8" height="8" patternUnits="userSpaceOnUse">
      <rect class=${`state ${name}`} width="8" height="8" />
      ${path && html`<path class="ink" d=${path} />`}
    </pattern>`)}
  </defs></svg>`;
}

// A row is a node. A dark row is one bad machine; a dark column is all at once: network, storage, script.
export class Strip extends Still {
  render({ data, width, began }) { return strip(data, width, began); }
}

function strip(data, width, began) {
  const narrow = width < 480, left = narrow ? 74 : LABEL;
  const to = Math.max(data.to_s, 1);
  const x = (t) => left + (t / to) * (width - left - 6);
  const rows = data.rows, height = Math.max(1, rows.length) * ROW;
  return html`<div>
    <svg class="strip" role="img" aria-label=${`What ${plural(rows.length, "node")} did in time: ${rows.slice(0, 5).map(([n, bad]) => `${n} ${plural(bad, "incident")}`).join(", ")}`} width=${width} height=${height + AXIS}>
      <${Axis} from=${0} to=${to} x=${x} height=${height} width=${width} left=${left} began=${began} />
      ${rows.map(([node, bad, runs], row) => html`<g key=${node} transform=${`translate(0 ${row * ROW})`}>
        <text class=${bad ? "lane bad" : "lane"} x="0" y="11">${bad ? html`<title>${`${node} was at fault in ${plural(bad, "incident")}`}</title>` : null}${bad ? `${node} (${bad})` : node}</text>
        ${shown(runs, to).map(([since, until, state]) => html`<rect key=${since} x=${x(since)} y="1" width=${Math.max(1, x(until) - x(since))} height=${ROW - 3} fill=${`url(#state-${data.states[state]})`}>
          <title>${`${node}: ${data.states[state]} from ${moment(began, since)} to ${moment(began, until)}`}</title></rect>`)}
      </g>`)}
      ${data.stops.map(([begin, end, id]) => html`<rect key=${id} class="stop" x=${x(begin)} y="0" width=${Math.max(1.5, x(end) - x(begin))} height=${height}><title>${`incident ${id}: all stood for ${seconds(end - begin)}`}</title></rect>`)}
    </svg>
    ${data.plain > 0 && html`<p class="quiet">${plural(data.plain, "node")} more had no incident.</p>`}
    ${data.hidden > 0 && html`<p class="quiet">${plural(data.hidden, "node")} more had fewer.</p>`}
    ${rows.some(([, bad]) => bad) && html`<p class="quiet">In brackets: how many incidents were the node's fault.</p>`}
    <ul class="legend" aria-label="States">
      ${data.states.map((name) => html`<li key=${name}><svg width="16" height="12" aria-hidden="true"><rect width="16" height="12" fill=${`url(#state-${name})`} /></svg> ${name}</li>`)}
      <li><svg width="16" height="12" aria-hidden="true"><rect class="stop" x="6" width="4" height="12" /></svg> all stood</li>
    </ul>
  </div>`;
}

function shown(runs, to) {
  const newest = runs.slice(-60);
  return newest.map(([since, state], n) => [since, n + 1 < newest.length ? newest[n + 1][0] : to, state]).filter(([since, until]) => until > since);
}

// Every second of wall time in one class. Each bar begins where the one before it ended.
export function Waterfall({ part }) {
  const wall = part.wall_s || 1;
  let at = 0;
  return html`<div class="scroll" tabindex="0" role="region" aria-label="Where the wall time went"><table class="waterfall">
    <caption class="quiet">${seconds(part.wall_s)} of wall time</caption>
    <thead><tr><th scope="col">class</th><th scope="col"><span class="hidden">share</span></th><th scope="col" class="number">time</th><th scope="col" class="number">share</th></tr></thead>
    <tbody>${part.bars.map((bar) => {
      const begin = at;
      at += bar.s;
      return html`<tr key=${bar.class} title=${bar.what}>
        <th scope="row">${bar.name}</th>
        <td class="track"><span class=${`fall ${bar.class}`} style=${{ marginLeft: `${(begin / wall) * 100}%`, width: `${Math.max(0.4, (bar.s / wall) * 100)}%` }}></span></td>
        <td class="number">${seconds(bar.s)}</td><td class="number">${share(bar.s / wall)}</td>
      </tr>`;
    })}</tbody>
  </table></div>`;
}
