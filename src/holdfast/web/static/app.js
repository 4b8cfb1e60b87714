// The page as a whole: which view the address asks for, light or dark, and how wide it is.

import { Component, render } from "preact";
import { html, Patterns } from "holdfast/drawings";
import { Data, stored } from "holdfast/data";
import { Actions, AllIncidents, Checkpoints, Cost, Curves, Decisions, Figures, Findings, Goodput, Headline, Incident, Incidents, Launches, Log, Nodes, Ranks, Samples, Stall, Tiers, Todo } from "holdfast/panels";
import { parse, query } from "holdfast/settings";
import { share } from "holdfast/words";

const ZONE = Intl.DateTimeFormat().resolvedOptions().timeZone || "local time";
const THEMES = ["auto", "light", "dark"];
const OF_TRAINING = new Set(["training", "loss", "goodput", "checkpoints", "figures", "launches", "cost", "samples"]);

function kept(name, fallback) {
  try { return localStorage.getItem(name) || fallback; } catch { return fallback; }
}

class App extends Component {
  constructor(props) {
    super(props);
    this.data = new Data(() => { this.more(); this.setState({}); });
    window.holdfast = this.data;  // for whoever looks at the page with a program
    this.training = "#/training";  // as it was left
    this.state = { route: parse(location.hash), theme: kept("holdfast-theme", "auto"), width: this.width() };
  }

  width() {
    return Math.max(260, Math.min(document.documentElement.clientWidth, 1400) - (document.documentElement.clientWidth < 600 ? 44 : 66));
  }

  // What draws a simulated cluster is loaded where there is one.
  more() {
    if (!this.data.may.map || this.asked) return;
    this.asked = true;
    import("holdfast/simulated").then(({ Cluster }) => this.setState({ Cluster }));
  }

  componentDidMount() {
    this.data.start();
    this.show(this.state.theme);
    addEventListener("hashchange", () => this.moved());
    addEventListener("resize", () => this.setState({ width: this.width() }));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.show(this.state.theme));
    setInterval(() => document.hidden || this.data.link === "file" || this.setState({}), 1000);
    // Drawings end where they were asked for: an open incident and the newest minutes are in the next ones.
    setInterval(() => document.hidden || this.data.link !== "live" || this.data.again(0, ["timeline", "strip"]), 15000);
    setTimeout(() => this.go(), 300);
  }

  moved() {
    const before = this.state.route, route = parse(location.hash);
    const same = ["name", "rest", "before"].every((key) => before[key] === route[key]);
    // Where only the drawing of the curves changes, a person goes on where they are, and nothing is asked for again.
    if (!same || before.from !== route.from || before.to !== route.to) this.data.unwant();
    this.setState({ route }, () => same || this.go());
  }

  // To the panel that the address names; a keyboard goes on from there.
  go() {
    const { name, rest } = this.state.route;
    const at = name && document.getElementById(rest ? `${name}/${rest}` : name);
    if (at) { at.focus({ preventScroll: true }); at.scrollIntoView(); }
    else if (!name || name === "training") scrollTo(0, 0);
  }

  show(theme) {
    const dark = theme === "dark" || (theme === "auto" && matchMedia("(prefers-color-scheme: dark)").matches);
    document.documentElement.dataset.theme = dark ? "dark" : "light";
    this.setState({ theme, drawn: dark ? "dark" : "light" });
  }

  choose() {
    const next = THEMES[(THEMES.indexOf(this.state.theme) + 1) % THEMES.length];
    try { localStorage.setItem("holdfast-theme", next); } catch { /* a page from a file keeps nothing */ }
    this.show(next);
  }

  render(_, state) {
    const data = this.data, now = data.now;
    document.title = now ? `${now.headline.word} · ${now.job}${now.engine === "simulated" ? " (simulated)" : ""} · Holdfast` : "Holdfast";
    if (!now) {
      const why = data.errors[data.address("now")];
      return html`<main><p class=${why ? "trouble" : "quiet"}>${why || "Loading…"}</p></main>`;
    }
    const here = OF_TRAINING.has(state.route.name) ? "training" : "";
    if (here) this.training = `#/training${query(state.route)}`;
    return html`<${Patterns} /><a class="skip" href="#todo" onClick=${(e) => { e.preventDefault(); const at = document.querySelector("main section"); at && at.focus(); }}>To the content</a>
      <header>
        <span class="brand">Holdfast</span>
        <${Jobs} data=${data} />
        <nav aria-label="Views"><a href="#/" aria-current=${here === "" ? "page" : null}>Job</a><a href=${this.training} aria-current=${here ? "page" : null}>Training</a></nav>
        <button type="button" class="theme" onClick=${() => this.choose()}>${state.theme === "auto" ? "light or dark: as the system" : state.theme}</button>
      </header>
      <main><${Headline} data=${data} />${this.view(state)}</main>
      <footer class="quiet">${stored ? "Written by holdfast ui --html." : "The same in a terminal: holdfast status, why, events, report."} Times are by this browser's clock (${ZONE}), with UTC on hover; beside them is the time since the job's start.</footer>`;
  }

  view({ route: at, width, drawn, Cluster }) {
    const data = this.data;
    if (at.name === "incident") return html`<${Incident} data=${data} id=${at.rest} />`;
    if (at.name === "log") return html`<${Log} data=${data} worker=${at.rest} />`;
    if (at.name === "all-incidents") return html`<${AllIncidents} data=${data} before=${at.before} />`;
    if (at.name === "all-findings") return html`<${Findings} data=${data} all=${true} before=${at.before} />`;
    if (at.name === "all-decisions") return html`<${Decisions} data=${data} count=${200} /><p><a href="#/">Back</a></p>`;
    if (OF_TRAINING.has(at.name)) {
      return html`<${Curves} data=${data} width=${width} settings=${at} theme=${drawn} />
        <div class="two"><div><${Goodput} data=${data} /><${Cost} data=${data} /></div><div><${Checkpoints} data=${data} /><${Samples} data=${data} /><${Figures} data=${data} /><${Launches} data=${data} /></div></div>`;
    }
    return html`${Cluster && html`<${Cluster} data=${data} />`}<${Todo} data=${data} /><${Incidents} data=${data} width=${width} /><${Findings} data=${data} />
      <${Decisions} data=${data} /><${Tiers} data=${data} />
      <${Nodes} data=${data} width=${width} /><${Ranks} data=${data} /><${Stall} data=${data} />
      ${data.may.act && data.now.live && html`<${Actions} data=${data} />`}`;
  }
}

function Jobs({ data }) {
  if (data.jobs.length < 2) return html`<span class="job">${data.now.job}</span>`;
  const go = (event) => { location.search = `?job=${encodeURIComponent(event.target.value)}`; };
  return html`<label class="job"><span class="hidden">Job</span><select onChange=${go} value=${data.now.job}>
    ${data.jobs.map((one) => html`<option key=${one.job} value=${one.job}>${one.job}: ${one.state}${one.goodput === null ? "" : `, ${share(one.goodput)}`}</option>`)}
    ${data.more > 0 && html`<option disabled>and ${data.more} older ones: holdfast ls --all</option>`}</select></label>`;
}

export function start() {
  const place = document.getElementById("page");
  place.replaceChildren();
  render(html`<${App} />`, place);
}
