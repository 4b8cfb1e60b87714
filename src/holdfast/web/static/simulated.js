// The map of a simulated cluster, and what may be done to it. Loaded only where the server says that the job is simulated.
//
// What is drawn is what the core knows. A strike is sent to the server, which strikes the simulated cluster; all that follows
// comes back as it does of a real job.

import { Component } from "preact";
import { html } from "holdfast/drawings";
import { Panel } from "holdfast/panels";
import { clock, count, plural } from "holdfast/words";

const style = document.createElement("link");
style.rel = "stylesheet";
style.href = new URL("static/simulated.css", document.baseURI);
document.head.append(style);

const CELL = 7, ROWS = 4;
// A shape for each state beside its colour, in a cell of six units: a full square trains.
const SHAPES = {
  t: "h6v6h-6z",
  w: "h6v6h-6z m1.5 1.5 v3h3v-3z",
  r: "m0 3 h6v3h-6z",
  c: "m1.5 1.5 h3v3h-3z",
  d: "h6l-6 6z",
  h: "m3 0 l3 3 l-3 3 l-3 -3z",
  l: "m1 0 l2 2 l2 -2 l1 1 l-2 2 l2 2 l-1 1 l-2 -2 l-2 2 l-1 -1 l2 -2 l-2 -2z",
};

function Cells({ letters, rows = ROWS }) {
  const columns = Math.ceil(letters.length / rows);
  const paths = {};
  [...letters].forEach((letter, i) => {
    paths[letter] = `${paths[letter] || ""}M${(i % columns) * CELL} ${Math.floor(i / columns) * CELL}${SHAPES[letter] || SHAPES.l}`;
  });
  const width = columns * CELL - 1, height = Math.min(rows, letters.length) * CELL - 1;
  return html`<svg viewBox=${`0 0 ${width} ${height}`} width=${width} height=${height} aria-hidden="true">
    ${Object.entries(paths).map(([letter, d]) => html`<path key=${letter} class=${`cell-${letter}`} fill-rule="evenodd" d=${d} />`)}</svg>`;
}

// "16 nodes: 15 training, 1 lost", in the server's words, the most frequent first.
function summary(letters, states) {
  const found = new Map();
  for (const letter of letters) found.set(letter, (found.get(letter) || 0) + 1);
  const parts = [...found].sort((a, b) => b[1] - a[1]).map(([letter, n]) => `${found.size === 1 ? "all" : count(n)} ${states[letter]}`);
  return `${plural(letters.length, "node")}: ${parts.join(", ")}`;
}

export class Cluster extends Component {
  constructor(props) {
    super(props);
    this.state = { what: "", name: "", rack: null, told: "", error: "", busy: false, at: "switch-0", sought: "" };
    this.known = "";
  }

  componentDidUpdate() {
    const { now } = this.props.data;
    const known = JSON.stringify([now.phases, now.nodes, now.generation, now.phase, now.ledger_seq]);
    if (known !== this.known) { this.known = known; this.props.data.again(200, ["map"]); }
  }

  choose(what, name, rack = null) {
    this.setState({ what, name, rack, told: "", error: "", at: what === "node" ? this.state.at : name });
  }

  seek(event) {
    event.preventDefault();
    const read = /^\s*(rack|switch|rank)?[ -]*(n)?(\d{1,7})\s*$/i.exec(this.state.sought);
    if (!read) { this.setState({ error: "Write a rank, a node, a rack or a switch: rank 17, n00017, rack 3, switch 2.", told: "" }); return; }
    const number = Number(read[3]);
    const word = (read[1] || "").toLowerCase();
    if (word === "rack") this.choose("rack", `rack-${number}`, number);
    else if (word === "switch") this.choose("switch", `switch-${number}`);
    else if (read[2]) this.choose("node", `n${String(number).padStart(5, "0")}`);
    else this.choose("node", `rank-${number}`);
  }

  async act(name, given) {
    this.setState({ busy: true, error: "", told: "" });
    const found = await this.props.data.act(name, given, false);
    this.setState({ busy: false, error: found.error || "", told: found.error ? "" : `At ${clock(found.t_s)}: ${found.would.join("; ")}.` });
    this.props.data.refresh();
    this.props.data.again(200, ["map"]);
  }

  // One stop for the Tab key; arrows go on from there.
  keys(event, order) {
    const there = order.indexOf(this.state.at), racks = order.filter((x) => x.startsWith("switch"));
    const row = order.slice(0, there + 1).filter((x) => x.startsWith("switch")).length - 1;
    const start = order.indexOf(racks[row]), jump = (to) => {
      const begin = order.indexOf(racks[to]), end = to + 1 < racks.length ? order.indexOf(racks[to + 1]) : order.length;
      return order[Math.min(begin + there - start, end - 1)];
    };
    const to = {
      ArrowRight: order[Math.min(there + 1, order.length - 1)], ArrowLeft: order[Math.max(there - 1, 0)],
      ArrowDown: jump(Math.min(row + 1, racks.length - 1)), ArrowUp: jump(Math.max(row - 1, 0)),
      Home: order[0], End: order[order.length - 1],
    }[event.key];
    if (!to) return;
    event.preventDefault();
    this.setState({ at: to }, () => { const one = document.getElementById(`map-${to}`); if (one) one.focus(); });
  }

  render({ data }, state) {
    const { simulated } = data.now;
    const found = data.want("map");
    if (!simulated) return null;
    return html`<${Panel} id="cluster" title="The simulated cluster" data=${data} address=${data.address("map")}
      note=${`${count(simulated.nodes)} nodes and ${plural(simulated.spares, "spare")}; no machine is touched, and the coordinator's own code decides`}>
      <${Speed} simulated=${simulated} time=${data.time()} choose=${(speed) => this.act("speed", { speed: String(speed) })} />
      ${found ? html`<div class="cluster"><div>${this.map(found, state)}</div>${this.chosen(found, state)}</div>` : html`<p class="quiet">…</p>`}
    <//>`;
  }

  map({ switches, states }, { at, name }) {
    const order = [];
    let rack = 0;
    const drawn = switches.map((racks, number) => {
      const own = `switch-${number}`;
      order.push(own);
      const tiles = racks.map((letters) => {
        const mine = rack++, id = `rack-${mine}`;
        order.push(id);
        return html`<button key=${id} id=${`map-${id}`} type="button" class="tile" tabindex=${at === id ? 0 : -1} aria-pressed=${name === id}
          title=${id} aria-label=${`${id}: ${summary(letters, states)}`} onClick=${() => this.choose("rack", id, mine)}><${Cells} letters=${letters} /></button>`;
      });
      return html`<div class="under" key=${own}><button id=${`map-${own}`} type="button" class="switch" tabindex=${at === own ? 0 : -1} aria-pressed=${name === own}
        aria-label=${`${own}: ${summary(racks.join(""), states)}`} onClick=${() => this.choose("switch", own)}>switch ${number}</button>
        <div class="racks">${tiles}</div></div>`;
    });
    return html`<div class="map" role="group" aria-label="Switches and their racks. Arrow keys move, Enter chooses." onKeyDown=${(e) => this.keys(e, order)}>${drawn}</div>
      <ul class="legend">${Object.entries(states).map(([letter, words]) => html`<li key=${letter}><${Cells} letters=${letter} rows=${1} /> ${words}</li>`)}</ul>`;
  }

  chosen({ strikes, states, switches }, { what, name, rack, told, error, busy, sought }) {
    const { data } = this.props;
    const nodes = rack === null ? null : data.want("map", { rack: String(rack) });
    const racks = what === "switch" ? switches[Number(name.slice(7))] : null;
    return html`<div class="chosen">
      <form class="seek" onSubmit=${(e) => this.seek(e)}><label>Rank, node, rack or switch<br /><input value=${sought} maxlength="20" placeholder="rank 17" onInput=${(e) => this.setState({ sought: e.target.value })} /></label>
        <button type="submit">Choose</button></form>
      ${!name && html`<p class="quiet">Choose a rack or a switch on the map, or a rank here. Then choose what happens to it.</p>`}
      ${name && html`<h3>${name.replace("-", " ")}${what === "node" && rack !== null ? html` <span class="quiet">in rack ${rack}</span>` : ""}</h3>`}
      ${racks && html`<p>${plural(racks.length, "rack")}, ${summary(racks.join(""), states)}</p>`}
      ${name && html`<div class="choice" role="group" aria-label=${`What happens to ${name}`}>${Object.entries(strikes[what]).map(([kind, words]) => html`<button key=${kind} type="button" class="really" disabled=${busy} onClick=${() => this.act("strike", { target: name, kind })}>${words}</button>`)}</div>`}
      <p role="status" class="told">${told}</p>
      ${error && html`<p class="trouble" role="alert">${error}</p>`}
      ${nodes && html`<ul class="nodes" aria-label=${`Nodes of rack ${rack}`}>${nodes.nodes.map((one) => html`<li key=${one.place}>${one.node
        ? html`<button type="button" aria-pressed=${name === one.node} onClick=${() => this.choose("node", one.node, rack)}><${Cells} letters=${one.state} rows=${1} /> ${one.node} <span class="quiet">${one.rank === null ? states[one.state] : `rank ${count(one.rank)}`}</span></button>`
        : html`<span class="nobody"><${Cells} letters="l" rows=${1} /> <span class="quiet">no node</span></span>`}</li>`)}</ul>`}
    </div>`;
  }
}

function Speed({ simulated, time, choose }) {
  const word = (speed) => (speed === 0 ? "Pause" : `${speed}×`);
  return html`<div class="speed"><span class="choice" role="group" aria-label="Speed of the simulated time">${simulated.speeds.map((speed) => html`<button key=${speed} type="button" aria-pressed=${speed === simulated.speed} onClick=${() => choose(speed)}>${word(speed)}</button>`)}</span>
    <span>simulated time <b>${clock(time)}</b></span>
    ${simulated.over ? html`<span>the job is over: no time passes</span>` : simulated.speed === 0 ? html`<span>the time stands still</span>` : ""}
    ${simulated.reached !== null && html`<span class="trouble">this machine reaches ${simulated.reached}×</span>`}</div>`;
}
