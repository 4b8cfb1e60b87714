// Figures as people read them, as protocol/units.py has them. Unknown is a dash, never 0.

export const UNKNOWN = "–";

const WHOLE = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });

export function count(value) {
  return value === null || value === undefined ? UNKNOWN : WHOLE.format(value);
}

export function seconds(value) {
  if (value === null || value === undefined) return UNKNOWN;
  if (value < 0.0995) return value >= 0.01 || value === 0 ? `${Math.round(value * 1e3)} ms` : `${(value * 1e3).toFixed(1)} ms`;
  if (value < 9.995) return `${value.toFixed(2)} s`;
  if (value < 119.95) return `${value.toFixed(1)} s`;
  const minutes = Math.floor(value / 60);
  if (minutes < 120) return `${minutes} min ${String(Math.floor(value % 60)).padStart(2, "0")} s`;
  if (minutes < 2880) return `${Math.floor(minutes / 60)} h ${String(minutes % 60).padStart(2, "0")} min`;
  return `${(minutes / 1440).toFixed(1)} days`;
}

// An age: coarser than a duration, because it grows while it is read.
export function ago(value) {
  if (value === null || value === undefined) return UNKNOWN;
  if (value < 10) return `${Math.max(0, value).toFixed(1)} s ago`;
  if (value < 120) return `${Math.round(value)} s ago`;
  if (value < 7200) return `${Math.round(value / 60)} min ago`;
  if (value < 172800) return `${Math.round(value / 3600)} h ago`;
  return `${Math.round(value / 86400)} days ago`;
}

// A time since the job's start.
export function clock(value) {
  if (value === null || value === undefined) return UNKNOWN;
  const all = Math.floor(value);
  const tail = `${String(Math.floor(all / 60) % 60).padStart(2, "0")}:${String(all % 60).padStart(2, "0")}`;
  return all < 86400 ? `${Math.floor(all / 3600)}:${tail}` : `${Math.floor(all / 86400)}d ${Math.floor(all / 3600) % 24}:${tail}`;
}

// A moment, in seconds since 1970, by this browser's clock: with the date where that is not today.
const HOUR = { hour: "2-digit", minute: "2-digit", hour12: false };
const TIME = new Intl.DateTimeFormat("en-GB", { ...HOUR, second: "2-digit" });
const MINUTE = new Intl.DateTimeFormat("en-GB", HOUR);
const DAY = new Intl.DateTimeFormat("en-GB", { day: "numeric", month: "short" });
const YEAR = new Intl.DateTimeFormat("en-GB", { day: "numeric", month: "short", year: "numeric" });

export function local(at, short = false, today = new Date()) {
  if (at === null || at === undefined || Number.isNaN(at)) return UNKNOWN;
  const when = new Date(at * 1000), time = (short ? MINUTE : TIME).format(when);
  if (when.toDateString() === today.toDateString()) return time;
  return `${(when.getFullYear() === today.getFullYear() ? DAY : YEAR).format(when)} ${time}`;
}

export function utc(at) {
  return at === null || at === undefined || Number.isNaN(at) ? "" : `${new Date(at * 1000).toISOString().replace("T", " ").slice(0, 19)} UTC`;
}

export function share(value) {
  return value === null || value === undefined ? UNKNOWN : `${(value * 100).toFixed(1)}%`;
}

export function figure(value, digits = 4) {
  if (value === null || value === undefined) return UNKNOWN;
  if (value !== 0 && (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e6)) return value.toExponential(2);
  return String(Number(value.toPrecision(digits)));
}

export function size(bytes) {
  if (bytes === null || bytes === undefined) return UNKNOWN;
  const units = ["B", "kB", "MB", "GB", "TB", "PB"];
  let value = bytes, unit = 0;
  while (value >= 999.5 && unit < units.length - 1) { value /= 1000; unit += 1; }
  return unit === 0 ? `${bytes} B` : `${value < 9.995 ? value.toFixed(2) : value < 99.95 ? value.toFixed(1) : Math.round(value)} ${units[unit]}`;
}

export function plural(number, noun) {
  return `${count(number)} ${noun}${number === 1 ? "" : "s"}`;
}

export function ranks(numbers) {
  if (!numbers || !numbers.length) return UNKNOWN;
  const runs = [];
  for (const n of [...numbers].sort((a, b) => a - b)) {
    if (runs.length && n === runs[runs.length - 1][1] + 1) runs[runs.length - 1][1] = n;
    else runs.push([n, n]);
  }
  return runs.map(([a, b]) => (a === b ? `${a}` : `${a}-${b}`)).join(",");
}
