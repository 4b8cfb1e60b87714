// The panels: each shows one answer of the server, with a link to itself, its data, and the command that says the same.

import { Component } from "preact";
import { html, PhaseLegend, Phases, Shape, Strip, Timeline, Waterfall, PHASES } from "holdfast/drawings";
import { Curve, CurveTable } from "holdfast/curves";
import { change, query as queryOf } from "holdfast/settings";
import { stored } from "holdfast/data";
import { ago, clock, count, figure, local, plural, ranks, seconds, share, size, UNKNOWN, utc } from "holdfast/words";

// query: of the link to itself, with what is shown.
export function Panel({ id, title, data, address, command, children, note, query = "" }) {
  return html`<section class="panel" id=${id} aria-labelledby=${`${id}-title`} tabindex="-1">
    <div class="head">
      <h2 id=${`${id}-title`}><a href=${`#/${id}${query}`}>${title}</a></h2>
      ${note && html`<span class="quiet">${note}</span>`}
      <span class="ways">
        ${address && !stored && html`<a href=${address} target="_blank" rel="noopener" aria-label=${`${title}: data as JSON`}>data</a>`}
        ${command && html`<code title="The command that says the same">${command}</code>`}
      </span>
    </div>
    ${data && data.errors && address && data.errors[address] ? html`<p class="trouble">${data.errors[address]}</p>` : children}
  </section>`;
}

// A moment by this browser's clock, with UTC on hover. at: seconds since 1970, or a time as text.
function At({ at, short }) {
  const when = typeof at === "string" ? Date.parse(at) / 1000 : at;
  const text = utc(when);
  return text ? html`<time title=${text} datetime=${text.replace(" UTC", "Z").replace(" ", "T")}>${local(when, short)}</time>` : UNKNOWN;
}

// A time of the job: by the clock, and since the job's start.
export function When({ data, t, short }) {
  if (t === null || t === undefined) return UNKNOWN;
  const at = data.wall(t);
  if (short && at !== null) return html`<${At} at=${at} />`;
  return html`<span class="when">${at === null ? "" : html`<${At} at=${at} /> `}<span class="since" title="since the job's start">${clock(t)}</span></span>`;
}

// The newest list of every panel that needs one, or a word that it is on its way.
function ready(found, draw) {
  return found ? draw(found) : html`<p class="quiet">…</p>`;
}

// ------------------------------------------------------------ the first screen

export function Headline({ data }) {
  const now = data.now, line = now.headline;
  const age = now.last_step_t_s === null ? null : data.time() - now.last_step_t_s;
  const pace = now.pace ?? {}; // a coordinator of another version has none
  const rate = pace.steps_per_s ? `${figure(pace.steps_per_s, 3)} steps/s` : null;
  const links = { live: "", file: "a file", ended: "", connecting: "connecting", away: "no connection: trying again", "signed out": "signed out: open a new link of holdfast ui" };
  return html`<section class=${`headline ${line.tone}`} aria-label="State of the job">
    <h1><${Shape} tone=${line.tone} /> ${now.engine === "simulated" && html`<span class="simulated">simulated</span> `}<span aria-live="polite">${line.word}</span><span class="after">, ${line.text}</span></h1>
    ${line.why && html`<p class="why">${line.why}</p>`}
    <p class="facts">
      <span>${now.live && data.link !== "away" ? html`last step <b>${ago(age)}</b>` : html`last step at <b><${When} data=${data} t=${now.last_step_t_s} /></b>`}</span>
      <span>loss <b>${figure(now.loss)}</b></span>
      <span>${rate ? html`<b>${rate}</b>` : "rate not known"}</span>
      <span>goodput <b>${share(now.goodput.share)}</b></span>
      <span>${now.live ? "running for" : "ran for"} <b>${clock(data.time())}</b>${data.wall(0) === null ? "" : html`, since <${At} at=${data.wall(0)} short=${true} />`}</span>
      ${now.live && (pace.left ?? null) !== null && html`<span><${Remaining} found=${pace} at=${data.wall(now.t_s)} /></span>`}
      ${now.live && html`<span>${plural(now.spares, "spare")}</span>`}
      ${links[data.link] && html`<span class="link">${links[data.link]}</span>`}
    </p>
  </section>`;
}

// When it will be done, at the rate beside it.
function Remaining({ found, at }) {
  if (found.left === 0) return html`all steps are done`;
  const known = at !== null && found.eta_s !== null && found.eta_s !== undefined;
  return html`<span>done in <b>${seconds(found.eta_s)}</b>${known ? html`, at <${At} at=${at + found.eta_s} short=${true} />` : ""}, ${plural(found.left, "step")} to go</span>`;
}

function Advice({ one, urgent }) {
  return html`<li class=${urgent ? "urgent" : ""}>
    <${Shape} tone=${urgent ? "bad" : "busy"} /><span><b>${urgent ? "Now: " : ""}</b>${one.text} ${one.how && html`<code>${one.how}</code>`}</span></li>`;
}

export function Todo({ data }) {
  const now = data.now;
  return html`<${Panel} id="todo" title="What you have to do" command=${`holdfast status --job ${now.job}`} address=${data.address("now")}>
    ${now.todo.length === 0 && html`<p class="nothing"><${Shape} tone="good" /> ${now.nothing}</p>`}
    <ul class="todo">${now.todo.map((one) => html`<${Advice} key=${one.text} one=${one} urgent=${one.urgent} />`)}</ul>
  <//>`;
}

const INJECTED = "put in on purpose, by --fault or holdfast fault; no machine and no script is to blame";

export function Incidents({ data, width }) {
  const now = data.now;
  const drawn = data.want("timeline"), list = data.want("incidents", { count: 8 });
  return html`<${Panel} id="incidents" title="Incidents" data=${data} address=${data.address("timeline")} command=${`holdfast why --job ${now.job}`} note=${list ? plural(list.all, "incident") : ""}>
    ${now.open.map((one) => html`<${Open} key=${one.id} data=${data} incident=${one} />`)}
    ${ready(drawn, (found) => found.count ? html`<${Timeline} data=${found} width=${width} began=${data.wall(0)} />${found.older > 0 && html`<p class="quiet">${plural(found.older, "older incident")} are in <a href="#/all-incidents">the list</a>.</p>`}` : html`<p class="quiet">None.</p>`)}
    ${list && list.incidents.length > 0 && html`<div class="scroll" tabindex="0" role="region" aria-label="Newest incidents"><table class="cards">
      <thead><tr><th scope="col" class="number">no.</th><th scope="col">at</th><th scope="col">what</th><th scope="col">where</th><th scope="col" class="number">stood</th><th scope="col">phases</th><th scope="col" class="number">steps lost</th></tr></thead>
      <tbody>${list.incidents.map((one) => html`<tr key=${one.id}>
        <td class="number"><a href=${`#/incident/${one.id}`} aria-label=${`incident ${one.id}`}>${one.id}</a></td>
        <td><${When} data=${data} t=${one.first_t_s} /></td>
        <td class="text">${one.open ? html`<b>open: </b>` : ""}${one.cause}${one.injected ? html` <span class="quiet" title=${INJECTED}>(injected)</span>` : ""}</td>
        <td>${one.node || UNKNOWN}${one.ranks && one.ranks.length ? `, rank ${ranks(one.ranks)}` : ""}</td>
        <td class="number">${one.quiet ? "not at all" : seconds(one.stall_s)}</td>
        <td class="bars">${one.quiet ? html`<span class="quiet">${one.verdict || ""}</span>` : html`<${Phases} incident=${one} />`}</td>
        <td class="number">${count(one.lost_steps)}</td></tr>`)}</tbody></table></div>
      <${PhaseLegend} />
      ${list.incidents.some((one) => one.injected) && html`<p class="quiet">(injected): ${INJECTED}.</p>`}
      ${list.more && html`<p><a href="#/all-incidents">All ${count(list.all)} incidents</a></p>`}`}
  <//>`;
}

// The open incident, as it runs, beside the usual time of its kind.
function Open({ data, incident }) {
  const age = data.time() - incident.t_s;
  const usual = incident.usual_s;
  return html`<div class="open-incident"><p><b>Open: <a href=${`#/incident/${incident.id}`}>incident ${incident.id}</a></b>, ${incident.cause}${incident.node ? ` on ${incident.node}` : ""}. For <b>${seconds(age)}</b>, since <${When} data=${data} t=${incident.t_s} />${usual ? `; its kind usually takes ${seconds(usual)}` : ""}.</p>
    <ol class="steps">${PHASES.map((name) => { const s = incident[`${name}_s`]; return html`<li key=${name} class=${s === null || s === undefined ? "" : "done"}>${name.replace("_", " ")}: ${s === null || s === undefined ? "not yet" : seconds(s)}</li>`; })}</ol></div>`;
}

// What health rules found: each with the meaning of its words, and its incident if it led to one.
function FindingRows({ data, findings }) {
  const meanings = new Map(findings.filter((one) => one.severity_what).map((one) => [one.severity, one.severity_what]));
  return html`<ol class="decisions">${findings.map((one) => html`<li key=${one.seq}>
      <${When} data=${data} t=${one.t_s} /><span><${Finding} one=${one} /></span></li>`)}</ol>
    ${meanings.size > 0 && html`<p class="quiet">${[...meanings].map(([word, what]) => `${word}: ${what}`).join(". ")}.</p>`}`;
}

function Finding({ one }) {
  const about = [one.node, one.subject].filter(Boolean).join(", ");
  return html`<${Shape} tone=${one.dry_run || one.severity === "info" ? "over" : one.severity === "fatal" || one.severity === "error" ? "bad" : "busy"} />
    ${one.incident ? html` <a href=${`#/incident/${one.incident}`}>incident ${one.incident}</a>: ` : " "}<b>${about ? `${about}: ` : ""}${one.rule}</b>, ${one.severity}${one.condition === "unknown" ? ", could not be told" : ""}${one.shared ? ", on many nodes at once" : ""}${one.dry_run ? ", on trial: nothing is done about it" : ""}: ${one.evidence || "no text"}
    <span class="quiet"> read from ${one.source}${one.count > 1 ? `, ${count(one.count)} times` : ""}; asks for ${one.remedy}: ${one.remedy_what}</span>`;
}

// The newest few, or all of them, window by window.
export function Findings({ data, all, before }) {
  const query = { count: all ? 100 : 5, ...(before ? { before } : {}) };
  const found = data.want("findings", query);
  return html`<${Panel} id=${all ? "all-findings" : "findings"} title=${all ? "All findings" : "What health rules found"} data=${data} address=${data.address("findings", query)} command=${`holdfast events --job ${data.now.job} --kind finding`}>
    ${ready(found, ({ findings, more, older }) => html`${findings.length === 0 ? html`<p class="quiet">Nothing so far.</p>` : html`<${FindingRows} data=${data} findings=${all ? findings : findings.slice(0, 5)} />`}
      ${more && html`<p><a href=${all ? `#/all-findings?before=${findings[findings.length - 1].seq}` : "#/all-findings"}>${all ? "Older" : "More"} findings</a></p>`}
      ${all && older && !more && html`<p class="quiet">Older ones: the command above.</p>`}`)}
    ${all && html`<p><a href="#/">Back</a></p>`}
  <//>`;
}

export function Decisions({ data, count: shown = 8 }) {
  const found = data.want("decisions", { count: shown });
  return html`<${Panel} id="decisions" title="Decisions, and why" data=${data} address=${data.address("decisions")} command=${`holdfast events --job ${data.now.job}`}>
    ${ready(found, ({ decisions, more }) => html`<ol class="decisions">${decisions.map((one) => html`<li key=${one.seq}>
      <${When} data=${data} t=${one.t_s} />
      <span>${one.incident ? html`<a href=${`#/incident/${one.incident}`}>incident ${one.incident}</a>${one.node ? `, ${one.node}` : ""}: ` : ""}<b>${one.text}</b>${one.reason ? `, because ${one.reason}` : ""}
        ${one.would && html`<br /><span class="quiet">otherwise: ${one.would}; against it: ${one.against}</span>`}
        ${one.weighed && one.weighed.length > 0 && html`<details><summary>weighed</summary><ul>${one.weighed.map((w) => html`<li key=${w}>${w}</li>`)}</ul></details>`}
      </span></li>`)}</ol>
      ${decisions.length === 0 && html`<p class="quiet">None.</p>`}
      ${more && shown < 100 && html`<p><a href="#/all-decisions">More decisions</a></p>`}`)}
  <//>`;
}

export function Tiers({ data }) {
  const now = data.now, since = data.time() - now.t_s;
  return html`<${Panel} id="tiers" title=${now.phase === "ended" ? "What is saved" : "If all died now"} address=${data.address("now")} command="holdfast checkpoint ls" note="what each place has, the nearest first">
    ${now.tiers.length === 0 && html`<p class="trouble"><${Shape} tone="busy" /> ${now.phase === "ended" ? "Nothing is saved: all steps are lost." : "Nothing is saved anywhere yet: all steps would be lost."}</p>`}
    ${now.tiers.length > 0 && html`<div class="scroll" tabindex="0" role="region" aria-label="Tiers"><table>
      <thead><tr><th scope="col">where</th><th scope="col">state</th><th scope="col" class="number">step</th><th scope="col" class="number">age</th><th scope="col" class="number" title="steps, and how long they took at the rate of the headline">would be lost</th><th scope="col" class="number">copies</th><th scope="col"></th></tr></thead>
      <tbody>${now.tiers.map((one) => html`<tr key=${one.name}>
        <th scope="row" class="text">${one.name}</th>
        <td><${Shape} tone=${one.state === "good" ? "good" : one.state === "one copy" || one.state === "nothing yet" ? "busy" : "bad"} /> ${one.state}</td>
        <td class="number">${count(one.step)}</td><td class="number">${one.age_s === null ? UNKNOWN : html`${ago(one.age_s + since)}${data.wall(0) === null ? "" : html`, <${At} at=${data.wall(now.t_s - one.age_s)} />`}`}</td>
        <td class="number">${one.lag_steps === null ? UNKNOWN : `${plural(one.lag_steps, "step")}${one.lag_s === null ? "" : `, ${seconds(one.lag_s)}`}`}</td>
        <td class="number">${count(one.copies)}</td><td class="quiet">${one.note}${one.nbytes && !now.simulated ? `, ${size(one.nbytes)}` : ""}</td></tr>`)}</tbody></table></div>`}
  <//>`;
}

export function Nodes({ data, width }) {
  const found = data.want("strip");
  return html`<${Panel} id="nodes" title="Nodes in time" data=${data} address=${data.address("strip")} command=${`holdfast events --job ${data.now.job} --kind node-lost`} note="the worst first; a row is one machine, a column is all at once">
    ${data.now.leave && html`<p><${Shape} tone=${data.now.leave.yes ? "good" : "busy"} /> May a node be taken away? <b>${data.now.leave.yes ? "Yes" : "Not without harm"}</b>: ${data.now.leave.text}.</p>`}
    ${ready(found, (strip) => html`<${Strip} data=${strip} width=${width} began=${data.wall(0)} />`)}
  <//>`;
}

// The newest hang: where each rank stood, and who waited for whom.
export function Stall({ data }) {
  const found = data.want("stall");
  return html`<${Panel} id="stall" title="Who holds it up" data=${data} address=${data.address("stall")} command=${`holdfast why --job ${data.now.job}`} note="the newest hang">
    ${ready(found, ({ stall }) => stall === null ? html`<p class="quiet">Nothing stood still so far. When something does, the stacks of all ranks are compared.</p>` : html`
      <p><${When} data=${data} t=${stall.t_s} /> ${stall.workers.length ? html`<b>${stall.workers.join(", ")}</b> held up the others: ` : html`<b>No rank is found at fault</b>: `}${stall.reason}${stall.incident ? html` (<a href=${`#/incident/${stall.incident}`}>incident ${stall.incident}</a>)` : ""}</p>
      <ul class="stall">${stall.lines.map((line) => html`<li key=${line}>${line}</li>`)}</ul>`)}
  <//>`;
}

const ROW = 28, WINDOW = 40;

// Only rows that can be seen are in the page, however many ranks there are.
export class Ranks extends Component {
  constructor(props) {
    super(props);
    this.state = { q: "", first: 0 };
  }

  render({ data }, { q, first }) {
    const begin = Math.max(0, Math.floor(first / 20) * 20 - 10);
    const query = { first: begin, count: WINDOW, ...(q ? { q } : {}) };
    const found = data.want("ranks", query) || this.before;
    this.before = found;
    const total = found ? found.count : 0;
    const columns = ["rank", "node", "state", "step", "step time", "against peers"];
    return html`<${Panel} id="ranks" title="Ranks" data=${data} address=${data.address("ranks", query)} command=${`holdfast status --job ${data.now.job}`} note=${found ? plural(found.all, "worker") : ""}>
      <label class="filter">Filter <input type="search" value=${q} placeholder="slow, waits, node:node3, …" onInput=${(e) => this.setState({ q: e.target.value.slice(0, 200), first: 0 })} /></label>
      ${found && total === 0 && html`<p class="quiet">${found.all ? "No rank matches." : data.now.live ? "No worker is there yet." : "The job is over: there are no workers."}</p>`}
      ${total > 0 && html`<div class="grid" role="table" aria-label="Ranks" aria-rowcount=${total + 1} aria-colcount=${columns.length}>
        <div role="rowgroup"><div class="line top" role="row" aria-rowindex="1">${columns.map((name) => html`<span key=${name} role="columnheader">${name}</span>`)}</div></div>
        <div class="window" role="rowgroup" tabindex="0" aria-label="Rows of the table of ranks" style=${{ height: `${Math.min(total, 10) * ROW}px` }} onScroll=${(e) => this.setState({ first: Math.floor(e.target.scrollTop / ROW) })}>
          <div role="presentation" style=${{ height: `${total * ROW}px`, position: "relative" }}>
            ${found.ranks.map((one, n) => html`<div class="line" role="row" key=${one.worker} aria-rowindex=${found.first + n + 2} style=${{ position: "absolute", top: `${(found.first + n) * ROW}px` }}>
              <span role="cell">${one.rank === null ? UNKNOWN : one.rank}</span>
              <span role="cell"><a href=${`#/log/${encodeURIComponent(one.worker)}`} title=${`the log of ${one.worker}`}>${one.node}</a></span>
              <span role="cell" title=${one.cause || ""}><${Shape} tone=${one.ratio ? "bad" : one.state === "training" ? "good" : one.state === "spare" ? "over" : "busy"} /> ${one.ratio ? "slow" : one.state}${one.restored ? ` ${size(one.restored[0])} of ${size(one.restored[1])}` : ""}</span>
              <span role="cell">${count(one.step)}</span><span role="cell">${seconds(one.median_s)}</span>
              <span role="cell">${one.ratio ? `${one.ratio.toFixed(2)} ×` : UNKNOWN}</span></div>`)}
          </div></div></div>`}
    <//>`;
  }
}

// ------------------------------------------------------------ the researcher's view

// With the curves of another job behind them, at the same steps, where one is chosen. What is chosen is in the address.
export class Curves extends Component {
  render({ data, width, settings, theme }) {
    const { from, to, log, smooth, full, other: baseline } = settings;
    const steps = from !== null && to !== null ? { from, to } : {};
    const query = steps;
    const found = data.want("series", query);
    const others = { ...steps, job: baseline };
    const other = baseline ? data.want("series", others) : null;
    const trouble = baseline && data.errors[data.address("series", others)];
    const go = (begin, end) => change(() => ({ from: begin === null ? null : Math.max(0, begin), to: end === null ? null : Math.max(0, end) }));
    const choices = data.jobs.filter((one) => one.job !== data.now.job);
    const baselines = baseline && !choices.some((one) => one.job === baseline) ? [...choices, { job: baseline }] : choices;
    const onLog = (name) => change((now) => ({ log: now.log.includes(name) ? now.log.filter((one) => one !== name) : [...now.log, name] }));
    const compare = (name) => { data.wanted.delete(data.address("series", others)); change(() => ({ other: name })); };
    const common = {
      smooth, full, theme, width: columnsOf(width), onRange: go,
      onMark: (mark) => { location.hash = mark.id ? `#/incident/${mark.id}` : "#/all-findings"; },
    };
    const show = html`<a href=${`#/training${queryOf({ ...settings, from: null, to: null })}`}>show all</a>`;
    return html`<${Panel} id="loss" title="Curves" data=${data} address=${data.address("series", query)} command=${`holdfast report --job ${data.now.job}`} query=${queryOf(settings)} note=${from === null ? "drag to zoom in, click a mark for what it stands for" : html`steps ${count(from)} to ${count(to)} ${show}`}>
      <div class="controls">
        <label class="filter">Smoothing <input type="range" min="0" max="0.99" step="0.01" value=${smooth} aria-valuetext=${smooth ? `weight ${smooth}` : "none"} onInput=${(e) => change(() => ({ smooth: Number(e.target.value) }), false)} /> <output>${smooth ? smooth.toFixed(2) : "none"}</output></label>
        <label class="filter"><input type="checkbox" checked=${full} onChange=${(e) => { const { checked } = e.target; change(() => ({ full: checked })); }} /> Outliers on the axis</label>
        ${baselines.length > 0 && html`<label class="filter">Compare with <select value=${baseline} onChange=${(e) => compare(e.target.value)}><option value="">no other job</option>${baselines.map((one) => html`<option key=${one.job} value=${one.job}>${one.job}</option>`)}</select></label>`}
      </div>
      ${trouble && html`<p class="trouble">${baseline}: ${trouble}</p>`}
      ${ready(found, ({ columns, marks, figures }) => columns.step.length === 0 ? html`<p class="quiet">No step was committed yet.</p>` : html`
        <div class="curves">${drawn(columns).map(([value, title, note, unit, { plain, ...options }]) => html`<${Curve} key=${value} ...${common} ...${options} value=${value} title=${title} note=${note} unit=${unit} columns=${columns} other=${other && other.columns} log=${log.includes(value)} onLog=${() => onLog(value)} smooth=${plain ? 0 : smooth} marks=${marks} />`)}${(figures || []).map((name) => html`<${Logged} key=${`logged ${name}`} data=${data} name=${name} steps=${steps} baseline=${other && (other.figures || []).includes(name) ? baseline : ""} common=${common} log=${log.includes(name)} onLog=${() => onLog(name)} marks=${marks} />`)}</div>
        <p class="quiet"><span class="mark incident" aria-hidden="true">▼</span> incident <span class="mark change" aria-hidden="true">■</span> change of the size <span class="mark finding" aria-hidden="true">◆</span> finding of a health rule. ${smooth ? `The strong line is an exponential moving average with weight ${smooth}, the faint one the values themselves. ` : ""}${other ? `The dashed line is ${baseline}. ` : ""}${columns.step.length > 1 && columns.step[1] - columns.step[0] > 1 ? `A point is ${count(columns.step[1] - columns.step[0])} steps: their mean, with the least and the most as a band.` : ""}</p>
        <${MarksList} marks=${marks} from=${from} to=${to} />
        <${CurveTable} columns=${columns} other=${other && other.columns} name=${baseline} logged=${(figures || []).map((name) => data.panels[data.address("series", { ...(stored ? {} : steps), figure: name })]).filter(Boolean).map((one) => one.figure)} />`)}
    <//>`;
  }
}

// What the script logs under one name. Asked for only while it can be seen: a script may log sixty.
class Logged extends Component {
  constructor(props) {
    super(props);
    this.state = { seen: false };
  }

  componentDidMount() {
    this.watch = new IntersectionObserver((found) => this.setState({ seen: found[found.length - 1].isIntersecting }), { rootMargin: "200px" });
    this.watch.observe(this.box);
  }

  componentWillUnmount() { this.watch.disconnect(); }

  ask(query, seen) {
    const { data } = this.props, address = data.address("series", query);
    if (seen) return data.want("series", query);
    data.wanted.delete(address);
    return data.panels[address];
  }

  render({ data, name, steps, baseline, common, log, onLog, marks }, { seen }) {
    // A file has all of it, whichever steps are shown.
    const query = { ...(stored ? {} : steps), figure: name };
    const found = this.ask(query, seen), other = baseline ? this.ask({ ...query, job: baseline }, seen) : null;
    const trouble = data.errors[data.address("series", query)];
    const columns = found && found.figure.columns;
    return html`<div class="logged" ref=${(e) => { this.box = e || this.box; }}>${columns && columns.step.length > 0
      ? html`<${Curve} ...${common} value="value" title=${name} note="as the script logged it" unit="" columns=${columns} other=${other && other.figure.columns} band=${isWide(columns)} log=${log} onLog=${onLog} marks=${marks} />`
      : html`<p><b>${name}</b></p><p class=${trouble ? "trouble" : "quiet"}>${trouble || (found ? "Nothing was logged in these steps." : "…")}</p>`}</div>`;
  }
}

const MARKS_LISTED = 100;

// The same marks for a keyboard, and for those who do not see the curves.
function MarksList({ marks, from, to }) {
  const there = marks.filter((m) => from === null || (m.step >= from && m.step <= to)).sort((a, b) => a.step - b.step);
  if (!there.length) return null;
  const word = { incident: "incident", change: "change of the size", finding: "finding" };
  return html`<details><summary>The marks as a list (${count(there.length)})</summary><ul class="marks">${there.slice(-MARKS_LISTED).map((m) => html`<li key=${`${m.what} ${m.id} ${m.step} ${m.text}`}>step ${count(m.step)}, ${m.what === "change" ? word.change : html`<a href=${m.id ? `#/incident/${m.id}` : "#/all-findings"}>${word[m.what]}${m.id ? ` ${m.id}` : ""}</a>`}: ${m.text}</li>`)}</ul></details>`;
}

// Two beside each other where there is room.
function columnsOf(width) {
  return width > 1000 ? Math.floor((width - 24) / 2) : width;
}

// Whether a point stands for more than one step.
function isWide(columns) {
  return columns.step.length > 1 && columns.step[1] - columns.step[0] > 1;
}

// Each: the column, its title, what it is, its unit; plain: it is no noise that could be smoothed; zero: its axis begins there.
function drawn(columns) {
  const known = (name) => columns[name].some((v) => v !== null);
  const wide = isWide(columns);
  const found = [["loss", "Loss", "", "", { band: wide }]];
  if (known("grad_norm")) found.push(["grad_norm", "Gradient norm", "before clipping", "", { band: wide }]);
  if (known("lr")) found.push(["lr", "Learning rate", "", "", { plain: true, zero: true }]);
  if (known("weight_per_s")) found.push(["weight_per_s", "Throughput of steps", "tokens or samples per second, within steps", "/s", { zero: true }]);
  if (known("step_s")) found.push(["step_s", "Step time", "", "s", { band: wide, zero: true }]);
  found.push(["world", "Workers", "that compute", "", { plain: true, zero: true }]);
  return found;
}

export class Goodput extends Component {
  constructor(props) {
    super(props);
    this.state = { recent: false };
  }

  render({ data }, { recent }) {
    const found = data.now.goodput, part = recent ? found.recent : found;
    return html`<${Panel} id="goodput" title="Where the time went" address=${data.address("now")} command=${`holdfast report --job ${data.now.job}`} note=${found.words}>
      <div class="choice" role="group" aria-label="Which time">${[[false, "since the start"], [true, "last hour"]].map(([is, name]) => html`<button key=${name} type="button" aria-pressed=${recent === is} onClick=${() => this.setState({ recent: is })}>${name}</button>`)}</div>
      ${part.bars.length ? html`<${Waterfall} part=${part} />` : html`<p class="quiet">Nothing was counted yet.</p>`}
      ${(found.losses || []).length > 0 && html`<ul class="todo">${found.losses.map((one) => html`<${Advice} key=${one.class} one=${one} />`)}</ul>`}
    <//>`;
  }
}

// What safety has cost, and whether another interval between snapshots would cost less.
export function Cost({ data }) {
  const found = data.want("cost");
  const row = (name, value) => html`<tr key=${name}><th scope="row">${name}</th><td class="number">${value}</td></tr>`;
  return html`<${Panel} id="cost" title="What safety costs" data=${data} address=${data.address("cost")} command=${`holdfast plan calibrate ${data.now.job}`} note="by this job's own figures">
    ${ready(found, (one) => html`<p>${one.words}</p><table>
      <tbody>${row("between two failures", seconds(one.mtbf_s))}${row("one failure took", seconds(one.each_s))}${row("snapshots", count(one.snapshots))}${row("one snapshot held the steps up for", seconds(one.snapshot_s))}
        ${one.now && row(`kept with one every ${seconds(one.now.every_s)}, as now`, share(one.now.share))}${one.best && row(`kept with one every ${seconds(one.best.every_s)}`, share(one.best.share))}</tbody></table>`)}
  <//>`;
}

export function Checkpoints({ data }) {
  const found = data.want("checkpoints");
  return html`<${Panel} id="checkpoints" title="Checkpoints" data=${data} address=${data.address("checkpoints")} command="holdfast checkpoint ls">
    ${ready(found, ({ checkpoints }) => checkpoints.length === 0 ? html`<p class="quiet">None in a durable tier.</p>` : html`<div class="scroll" tabindex="0" role="region" aria-label="Checkpoints"><table>
      <thead><tr><th scope="col" class="number">step</th><th scope="col">at</th><th scope="col" class="number">took</th><th scope="col" class="number">skipped before</th><th scope="col">read back</th><th scope="col">where</th></tr></thead>
      <tbody>${checkpoints.slice(0, 20).map((one) => html`<tr key=${`${one.step} ${one.url} ${one.t_s}`}><td class="number">${count(one.step)}</td><td><${When} data=${data} t=${one.t_s} short=${true} /></td><td class="number">${seconds(one.took_s)}</td><td class="number">${count(one.skipped)}</td><td title=${one.why}><${ReadBack} one=${one} /></td><td class="text">${one.url}</td></tr>`)}</tbody></table></div>
      <p class="quiet">Read back: every byte was compared with its checksum, by <code>${`holdfast checkpoint verify --job ${data.now.job}`}</code>.</p>`)}
  <//>`;
}

export function Figures({ data }) {
  const now = data.now, names = Object.entries(now.figures || {});
  return html`<${Panel} id="figures" title="What the script logged" address=${data.address("now")} command=${`holdfast status --job ${now.job}`}>
    ${names.length === 0 && html`<p class="quiet">Nothing but the loss: <code>run.log(name=value)</code> adds to it.</p>`}
    <ul class="figures">${names.map(([name, one]) => html`<li key=${name}>${name} <b>${figure(one.value)}</b> <span class="quiet">of step ${count(one.step)}</span></li>`)}</ul>
    <p class="quiet">${plural(now.steps.committed || 0, "step")} committed, ${now.steps.lost === null ? "it is not known how many were" : count(now.steps.lost)} done again; generation ${count(now.generation)}.</p>
  <//>`;
}

// Whether a checkpoint's bytes were read again since it was saved. Not read is not the same as damaged.
function ReadBack({ one }) {
  if (one.whole === null) return html`<span class="quiet">not known</span>`;
  const when = html`<${At} at=${one.verified_utc} short=${true} />`;
  return html`<${Shape} tone=${one.whole ? "good" : "bad"} /> ${one.whole ? "" : "damaged, "}${when}`;
}

// Whether every sample came once: what the newest check found, and how far the job is since.
export function Samples({ data }) {
  const found = data.want("samples");
  return html`<${Panel} id="samples" title="Every sample once?" data=${data} address=${data.address("samples")} command=${`holdfast data samples --job ${data.now.job}`} note="by the record of run.steps(ledger=)">
    ${ready(found, (one) => html`<p><${Shape} tone=${one.once === null ? "busy" : one.once ? "good" : "bad"} /> <b>${one.once === null ? "Not known" : one.once ? "Yes" : "No"}</b>: ${one.why}.</p>
      ${one.checked_utc && html`<p class="quiet">Checked at <${At} at=${one.checked_utc} />${one.steps === null ? "" : `, up to step ${count(one.steps)} of ${one.step === null ? UNKNOWN : count(one.step)}`}.</p>`}
      ${one.epochs.length > 0 && html`<div class="scroll" tabindex="0" role="region" aria-label="Epochs"><table>
        <thead><tr><th scope="col" class="number">epoch</th><th scope="col" class="number">came</th><th scope="col" class="number">more than once</th><th scope="col" class="number">not at all</th></tr></thead>
        <tbody>${one.epochs.slice(-20).map((e) => html`<tr key=${e.epoch}><td class="number">${count(e.epoch)}</td><td class="number">${count(e.came)}</td><td class="number">${count(e.repeated)}</td><td class="number">${count(e.missing)}</td></tr>`)}</tbody></table></div>`}`)}
  <//>`;
}

export function Launches({ data }) {
  const found = data.want("launches");
  return html`<${Panel} id="launches" title="Starts and changes" data=${data} address=${data.address("launches")} command=${`holdfast report --job ${data.now.job}`} note="what was asked for differently">
    ${ready(found, ({ launches }) => html`<ol class="launches">${launches.map((one) => html`<li key=${one.number}>
      <b>Start ${one.number}</b>${one.utc ? html`, <${At} at=${one.utc} />` : ""}${one.steps === null ? "" : `, ${plural(one.steps, "step")}`}${one.outcome ? `, ${one.outcome}` : ""}
      ${one.changes === null ? html`<span class="quiet">${one.number === 1 ? "" : "; the start before it is not known"}</span>` : one.changes.length === 0 ? html`<span class="quiet">; as the one before</span>` : html`<ul>${one.changes.map(([name, before, now]) => html`<li key=${name}><code>${name}</code>: ${before} → <b>${now}</b></li>`)}</ul>`}</li>`)}</ol>`)}
  <//>`;
}

// ------------------------------------------------------------ one thing

// Lines of a file, or why there are none.
function Lines({ title, note, lines, label }) {
  return html`<h3>${title}</h3>${note && html`<p class="quiet">${note}</p>`}
    ${lines.length > 0 && html`<pre class="story" tabindex="0" role="region" aria-label=${label}>${lines.join("\n")}</pre>`}`;
}

function Output({ job, output }) {
  const { worker, log, stack } = output;
  const whose = worker ? `of ${worker}` : "of the worker that failed";
  return html`<${Lines} title=${`Stack ${whose}`} label="Stack" lines=${stack.lines} note=${stack.lines.length ? stack.source : `None: ${stack.note}.`} />
    <${Lines} title=${`End of the log ${whose}`} label="End of the log" lines=${log.lines} note=${log.lines.length ? html`${log.path}${log.note ? `: ${log.note}` : ""}` : `None: ${log.note}${log.path ? `: ${log.path}` : ""}.`} />
    ${worker && !stored && html`<p><a href=${`#/log/${encodeURIComponent(worker)}`}>More of this log</a>, or <code>${`holdfast logs --job ${job} --node ${worker.slice(0, worker.lastIndexOf("."))}`}</code></p>`}`;
}

// What health rules had found on the node, of this incident or before it.
function Before({ data, node, found }) {
  const { own, before } = found;
  return html`<h3>Findings</h3>
    ${own.length > 0 && html`<${FindingRows} data=${data} findings=${own} />`}
    ${before && html`<p>Before it, ${seconds(before.ago_s)} earlier at <${When} data=${data} t=${before.t_s} />: <${Finding} one=${before} /></p>`}
    ${!before && html`<p class="quiet">${node ? `Before it no health rule had found anything on ${node}, as far as it is kept.` : "It names no node that something could have been found on before."}</p>`}`;
}

function Beside({ data, previous, next }) {
  const link = (number, word) => number !== null && data.has("incident", { id: number }) && html`<a href=${`#/incident/${number}`}>${word}: incident ${number}</a>`;
  return html`<nav class="beside" aria-label="Incidents beside this one">${link(previous, "previous") || html`<span class="quiet">no earlier incident</span>`}${link(next, "next") || html`<span class="quiet">no later incident</span>`}<a href="#/">Back</a></nav>`;
}

export function Incident({ data, id }) {
  const found = data.want("incident", { id });
  const address = data.address("incident", { id });
  return html`<${Panel} id=${`incident/${id}`} title=${`Incident ${id}`} data=${data} address=${address} command=${`holdfast why ${id} --job ${data.now.job}`}>
    ${ready(found, ({ incident, story, findings, previous, next, output }) => html`
      <${Beside} data=${data} previous=${previous} next=${next} />
      <p>Began <${When} data=${data} t=${incident.first_t_s} />${incident.quiet ? "; training was not disturbed" : incident.stall_s === null || incident.stall_s === undefined ? "; training stands" : html`; training stood for <b>${seconds(incident.stall_s)}</b>${incident.t_s === null ? "" : html`, until <${When} data=${data} t=${incident.t_s + incident.stall_s} />`}`}${incident.quiet || incident.full_strength_s === null || incident.full_strength_s === undefined ? "" : html`; full strength after <b>${seconds(incident.full_strength_s)}</b>`}.</p>
      ${!incident.quiet && html`<${Phases} incident=${incident} wide=${true} />`}
      <${Before} data=${data} node=${incident.node} found=${findings} />
      <${Lines} title="Story" label="Story" lines=${story} />
      <${Output} job=${data.now.job} output=${output} />
      ${incident.at_step !== null && incident.at_step !== undefined && html`<p><a href=${`#/training?from=${Math.max(0, incident.at_step - 100)}&to=${incident.at_step + 100}`}>The curves around step ${count(incident.at_step)}</a></p>`}`)}
    ${!found && html`<p><a href="#/">Back</a></p>`}
  <//>`;
}

export function AllIncidents({ data, before }) {
  const query = { count: 100, ...(before ? { before } : {}) };
  const found = data.want("incidents", query);
  return html`<${Panel} id="all-incidents" title="All incidents" data=${data} address=${data.address("incidents", query)} command=${`holdfast why --job ${data.now.job}`}>
    ${ready(found, ({ incidents, more }) => html`<ol class="decisions">${incidents.map((one) => html`<li key=${one.id}><${When} data=${data} t=${one.first_t_s} /><span><a href=${`#/incident/${one.id}`}>incident ${one.id}</a>: ${one.node ? `${one.node}: ` : ""}${one.cause}; ${one.quiet ? "not disturbed" : `stood for ${seconds(one.stall_s)}`}</span></li>`)}</ol>
      <p>${before ? html`<a href="#/all-incidents">newest</a> ` : ""}${more && html`<a href=${`#/all-incidents?before=${incidents[incidents.length - 1].id}`}>older</a>`}</p>`)}
    <p><a href="#/">Back</a></p>
  <//>`;
}

export function Log({ data, worker }) {
  const found = data.want("log", { worker });
  return html`<${Panel} id=${`log/${worker}`} title=${`Log of ${worker}`} data=${data} address=${data.address("log", { worker })} command=${`holdfast logs --job ${data.now.job}`}>
    ${ready(found, ({ path, lines, note }) => html`<p class="quiet">${path}${note ? `${path ? ": " : ""}${note}.` : ""}</p>${lines.length > 0 && html`<pre class="story" tabindex="0" role="region" aria-label="End of the log">${lines.join("\n")}</pre>`}`)}
    <p><a href="#/ranks">Back</a></p>
  <//>`;
}

// ------------------------------------------------------------ what may be changed

const FORMS = {
  drain: { title: "Drain a node", field: "node", label: "Node" },
  resize: { title: "Resize", field: "nodes", label: "Nodes" },
  clear: { title: "Clear a machine", field: "machine", label: "Machine" },
  stop: { title: "Stop the job", field: null, label: "" },
};

// Nothing is sent before the page has said what it would do.
export class Actions extends Component {
  constructor(props) {
    super(props);
    this.state = { name: null, value: "", dry: null, busy: false };
  }

  async look(event) {
    event.preventDefault();
    this.setState({ busy: true });
    const found = await this.props.data.act(this.state.name, this.given(), true);
    this.setState({ busy: false, dry: found });
  }

  async really() {
    this.setState({ busy: true });
    const found = await this.props.data.act(this.state.name, this.given(), false);
    this.setState({ busy: false, dry: { ...found, done: !found.error } });
  }

  given() {
    const { field } = FORMS[this.state.name];
    return field ? { [field]: this.state.value.trim() } : {};
  }

  render({ data }, { name, value, dry, busy }) {
    const form = name ? FORMS[name] : null;
    return html`<${Panel} id="actions" title="Change something" note="each says first what it would do">
      <div class="choice" role="group" aria-label="Which action">${Object.entries(FORMS).map(([one, { title }]) => html`<button key=${one} type="button" aria-pressed=${name === one} onClick=${() => this.setState({ name: one, value: one === "resize" ? String(data.now.least.wanted) : "", dry: null })}>${title}</button>`)}</div>
      ${form && html`<form onSubmit=${(e) => this.look(e)}>
        ${form.field && html`<label>${form.label} <input value=${value} required maxlength="200" onInput=${(e) => this.setState({ value: e.target.value, dry: null })} /></label>`}
        <button type="submit" disabled=${busy}>What would happen?</button></form>`}
      ${dry && dry.error && html`<p class="trouble" role="alert"><${Shape} tone="bad" /> ${dry.error}</p>`}
      ${dry && !dry.error && html`<div role="status"><ul>${dry.would.map((line) => html`<li key=${line}>${line}</li>`)}</ul>
        ${dry.command && html`<p><code>${dry.command}</code></p>`}
        ${dry.done ? html`<p><b>It is on its way.</b></p>` : html`<button type="button" class="really" disabled=${busy} onClick=${() => this.really()}>${form.title}: yes</button>`}</div>`}
    <//>`;
  }
}
