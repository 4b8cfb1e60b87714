// What the page knows: panels that were fetched, and the stream that says when they are out of date.
//
// The stream brings two things: each entry of the ledger, once and in order, by its number; and what changed of the panel
// `now`. An entry makes the visible panels be asked for again. What they mean is decided in one place, on the server.

const AGAIN_MS = 1500;
const RETRY_MS = 2000;
const CURVES_MS = 5000;
const SEQS_KEPT = 100000;

const inlined = document.getElementById("holdfast-data");
export const stored = inlined ? JSON.parse(inlined.textContent) : null;
const base = new URL(".", document.baseURI);
const asked = new URLSearchParams(location.search);

// Which panels an entry of the ledger changes.
function about(kind) {
  if (kind.startsWith("incident")) return ["timeline", "incidents", "incident", "strip", "decisions", "series"];
  if (kind === "finding") return ["findings", "incident", "decisions"];
  if (kind === "saved" || kind.startsWith("tier")) return ["checkpoints", "decisions"];
  if (kind.startsWith("node") || kind.startsWith("rebo") || kind === "formed" || kind === "started") return ["strip", "decisions", "ranks"];
  if (kind === "stall-judged") return ["stall", "decisions", "incident"];
  return ROUTINE.has(kind) ? [] : ["decisions", "incident"];
}
const ROUTINE = new Set(["snapshot", "worker-started", "worker-ready", "worker-done", "worker-exited", "collective-error", "level"]);

export class Data {
  constructor(changed) {
    this.changed = changed;
    this.job = asked.get("job") || "";
    this.now = null;          // the panel `now`, kept up to date by deltas
    this.at = 0;              // when it came, on this machine's clock
    this.panels = {};         // address -> what came
    this.errors = {};         // address -> why nothing came
    this.wanted = new Map();  // address -> [name, query] of what is shown now
    this.link = stored ? "file" : "connecting";
    this.jobs = [];
    this.more = 0;
    this.may = { act: false, map: false };
    this.seqs = [];           // numbers of all entries that came by the stream, as they came
    this.last = null;         // the newest number that is known
    this.source = null;
    this.due = null;
    this.dirty = new Set();   // addresses of what is out of date
    this.tookMs = 0;          // the last look again
    this.curvesAt = 0;
  }

  address(name, query = {}) {
    // A query that names a job is of that one, as a curve to compare with is.
    const given = new URLSearchParams(this.job ? { job: this.job, ...query } : query).toString();
    return `api/v1/${name}${given ? `?${given}` : ""}`;
  }

  async start() {
    if (stored) {
      this.now = stored.now;
      this.at = performance.now();
      this.changed();
      return;
    }
    this.ask("session").then((found) => { this.may = found || this.may; this.changed(); });
    this.ask("jobs").then((found) => { this.jobs = found ? found.jobs : []; this.more = found ? found.more : 0; this.changed(); });
    setInterval(() => document.hidden || this.ask("jobs").then((f) => { if (f) { this.jobs = f.jobs; this.more = f.more; } }), 15000);
    document.addEventListener("visibilitychange", () => (document.hidden ? this.close() : this.open()));
    await this.refresh();
    this.open();
  }

  // One panel, from the file or from the server; undefined: it could not be had.
  async ask(name, query = {}) {
    const address = this.address(name, query);
    if (stored) {
      const plain = new URLSearchParams(query).toString();
      // A window of a list is in the whole of it. What is of one thing alone is that one's, or is not there.
      const whole = "figure" in query || "id" in query || "job" in query ? undefined : stored[name];
      const found = stored[`${name}${plain ? `?${plain}` : ""}`] || whole;
      if (!found) this.errors[address] = "not in this file";
      return found;
    }
    try {
      const response = await fetch(new URL(address, base), { credentials: "same-origin" });
      if (response.status === 401) this.link = "signed out";
      if (!response.ok) throw new Error((await response.text()).trim() || response.statusText);
      delete this.errors[address];
      return await response.json();
    } catch (error) {
      this.errors[address] = error.message;
      return undefined;
    }
  }

  // What is shown needs this panel: it is fetched now, and again when something happened. Also where it was shown before:
  // of what happened meanwhile nobody has told a panel that was not shown. What came then is shown until the answer is here.
  want(name, query = {}) {
    const address = this.address(name, query);
    if (!this.wanted.has(address)) {
      this.wanted.set(address, [name, query]);
      this.fetch(address);
    }
    return this.panels[address];
  }

  unwant() {
    this.wanted.clear();
  }

  async fetch(address) {
    const [name, query] = this.wanted.get(address) || [];
    if (!name) return;
    const found = await this.ask(name, query);
    if (found !== undefined) this.panels[address] = found;
    this.changed();
  }

  async refresh() {
    const found = await this.ask("now");
    if (found) this.take(found);
  }

  take(part) {
    const before = this.now;
    this.now = { ...(this.now || {}), ...part };
    // From now on this job, also in a link: which one is the newest may change at any time.
    if (!this.job && !stored) {
      this.job = this.now.job;
      history.replaceState(null, "", `?job=${encodeURIComponent(this.job)}${location.hash}`);
    }
    if ("t_s" in part) this.at = performance.now();
    if (this.last === null) this.last = this.now.ledger_seq;
    if (!before || before.step !== this.now.step) this.curves();
    this.changed();
  }

  // Seconds since the job's start, now: the job's clock goes on between two deltas.
  time() {
    if (!this.now) return null;
    const { simulated } = this.now;
    const speed = simulated ? (simulated.over ? 0 : simulated.reached ?? simulated.speed) : 1;
    return this.now.t_s + (this.now.live && !stored ? ((performance.now() - this.at) / 1000) * speed : 0);
  }

  // A time of the job as seconds since 1970; null: not known.
  wall(t) {
    const began = this.now ? this.now.began_utc_s : null;
    return began === null || began === undefined || t === null || t === undefined ? null : began + t;
  }

  // Whether there is such a panel to ask for: a file has what it was written with.
  has(name, query = {}) {
    return !stored || `${name}?${new URLSearchParams(query)}` in stored;
  }

  open() {
    if (stored || this.source || document.hidden || this.link === "signed out") return;
    const query = { after: this.last || 0, ledger: this.now ? this.now.ledger : "" };
    const source = new EventSource(new URL(this.address("stream", query), base));
    this.source = source;
    source.onopen = () => { this.link = "live"; this.changed(); };
    source.addEventListener("event", (message) => this.entry(JSON.parse(message.data)));
    source.addEventListener("delta", (message) => this.take(JSON.parse(message.data)));
    source.addEventListener("reset", () => this.reset());
    source.addEventListener("away", () => { this.link = "away"; this.changed(); });
    source.addEventListener("over", () => {
      this.close();
      this.link = "ended";
      this.again(0);
      this.refresh();
      setTimeout(() => this.open(), 10000);  // it may be started again
    });
    source.onerror = () => {
      this.link = "away";
      this.changed();
      // The browser connects again by itself, and says where it was, unless it was refused: then it is for us to do.
      if (source.readyState === EventSource.CLOSED && this.source === source) {
        this.source = null;
        setTimeout(() => this.refresh().then(() => this.open()), RETRY_MS);
      }
    };
  }

  close() {
    if (this.source) this.source.close();
    this.source = null;
  }

  entry(entry) {
    if (this.last !== null && entry.seq <= this.last) return;
    this.last = entry.seq;
    this.seqs.push(entry.seq);
    if (this.seqs.length > SEQS_KEPT) this.seqs.splice(0, SEQS_KEPT / 2);
    const names = about(entry.kind);
    if (names.length) this.again(AGAIN_MS, names);
  }

  // Another start of the job: nothing of what is shown is of it.
  reset() {
    this.close();
    this.panels = {};
    this.seqs = [];
    this.now = this.last = null;
    this.refresh().then(() => { this.again(0); this.open(); });
  }

  // Several entries in a row are one reason to look again. names: of panels; null: all that are shown.
  again(after, names = null) {
    for (const [address, [name]] of this.wanted) if (!names || names.includes(name)) this.dirty.add(address);
    if (this.due || !this.dirty.size) return;
    // A server or a browser that is slow is asked less often: looking takes a fifth of the time at most.
    this.due = setTimeout(async () => {
      const began = performance.now(), addresses = [...this.dirty].filter((one) => this.wanted.has(one));
      this.dirty.clear();
      await Promise.all(addresses.map((one) => this.fetch(one)));
      this.tookMs = performance.now() - began;
      this.due = null;
      if (this.dirty.size) this.again(0, []);
    }, Math.max(after, 4 * this.tookMs));
  }

  // Curves and ranks change with every step: they are asked for again at most so often.
  curves() {
    if (stored || performance.now() - this.curvesAt < CURVES_MS) return;
    this.curvesAt = performance.now();
    const seen = document.getElementById("ranks");
    const ranks = seen && seen.getBoundingClientRect().top < innerHeight && seen.getBoundingClientRect().bottom > 0;
    this.again(0, ranks ? ["series", "ranks"] : ["series"]);
  }

  async act(name, given, dry) {
    const address = this.address(`act/${name}`, dry ? { dry: "1" } : {});
    try {
      const response = await fetch(new URL(address, base), {
        method: "POST", credentials: "same-origin", headers: { "X-Holdfast": "1" }, body: JSON.stringify(given),
      });
      if (!response.ok) return { error: (await response.text()).trim() };
      return await response.json();
    } catch (error) {
      return { error: `${error.message}: look before you try again` };
    }
  }
}
