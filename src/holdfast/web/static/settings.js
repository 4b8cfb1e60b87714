// What an address asks for: a view, the steps of the curves, and how they are drawn. A link holds all of it.

const SMOOTH = 0.9;
const MOST = 0.99;
const LOG = ["grad_norm"];

// { name, rest, before, from, to, log, smooth, full, other } of an address after `#`.
export function parse(hash) {
  const [path, query = ""] = hash.replace(/^#\/?/, "").split("?");
  const [name, ...rest] = path.split("/");
  const given = new URLSearchParams(query);
  const number = (key) => (/^\d+$/.test(given.get(key) || "") ? Number(given.get(key)) : null);
  const weight = /^0(\.\d{1,4})?$/.test(given.get("smooth") || "") ? Math.min(MOST, Number(given.get("smooth"))) : SMOOTH;
  return {
    name, rest: rest.map(decoded).join("/"), before: number("before"), from: number("from"), to: number("to"),
    log: given.has("log") ? given.getAll("log").filter(Boolean) : LOG, smooth: weight, full: given.get("range") === "all",
    other: given.get("with") || "",
  };
}

function decoded(part) {
  try { return decodeURIComponent(part); } catch { return part; }
}

// The query of an address of the curves, with what is not as it is by default: `?from=100&to=200&smooth=0`.
export function query({ from, to, log, smooth, full, other }) {
  const given = new URLSearchParams();
  if (from !== null && to !== null) { given.set("from", from); given.set("to", to); }
  if (log.length ? [...log].sort().join("\n") !== LOG.join("\n") : true) (log.length ? log : [""]).forEach((one) => given.append("log", one));
  if (smooth !== SMOOTH) given.set("smooth", smooth);
  if (full) given.set("range", "all");
  if (other) given.set("with", other);
  const text = given.toString();
  return text ? `?${text}` : "";
}

// Goes to the address that it is now with some of it changed. Of a slider's many values none is a place to come back to.
export function change(how, back = true) {
  const now = parse(location.hash);
  const address = `#/${now.name || "training"}${query({ ...now, ...how(now) })}`;
  if (back) location.hash = address;
  else location.replace(address);
}
