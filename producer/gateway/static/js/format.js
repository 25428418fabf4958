// Numbers, durations and times as people read them.
const WHOLE = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const SHORT = new Intl.NumberFormat("en", {
  notation: "compact", maximumFractionDigits: 1,
});
const CLOCK = new Intl.DateTimeFormat(undefined, {
  hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23",
});
const DAY = new Intl.DateTimeFormat(undefined, {
  month: "short", day: "numeric", hour: "2-digit", minute: "2-digit", hourCycle: "h23",
});

export const NONE = "–";

export function count(value) {
  if (!isNumber(value)) return NONE;
  return Math.abs(value) < 100_000 ? WHOLE.format(value) : SHORT.format(value);
}

/** A count of things: `1 letter`, `12 letters`. */
export function countOf(value, thing) {
  return `${count(value)} ${thing}${value === 1 ? "" : "s"}`;
}

/** A rate: as many digits as mean something. */
export function rate(value) {
  if (!isNumber(value)) return NONE;
  if (value === 0) return "0";
  return value < 10 ? value.toFixed(1) : count(value);
}

export function percent(share) {
  return isNumber(share) ? `${(share * 100).toFixed(share < 0.1 ? 1 : 0)} %` : NONE;
}

/** A duration in milliseconds with the unit that suits it. */
export function duration(ms) {
  if (!isNumber(ms)) return NONE;
  const value = Math.max(ms, 0);
  if (value < 10) return `${trim(value.toFixed(1))} ms`;
  if (value < 1000) return `${Math.round(value)} ms`;
  if (value < 60_000) return `${trim((value / 1000).toFixed(value < 10_000 ? 2 : 1))} s`;
  const minutes = Math.floor(value / 60_000);
  if (minutes < 60) return `${minutes} min ${Math.floor((value % 60_000) / 1000)} s`;
  const hours = Math.floor(minutes / 60);
  if (hours < 48) return `${hours} h ${minutes % 60} min`;
  return `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

function trim(text) {
  return text.includes(".") ? text.replace(/\.?0+$/, "") : text;
}

/** Local time of day, with the date where it is not today. */
export function clock(ms) {
  const at = new Date(ms);
  const isToday = at.toDateString() === new Date().toDateString();
  return (isToday ? CLOCK : DAY).format(at);
}

export function clockMinutes(ms) {
  return clock(ms).slice(0, 5);
}

/** Shows a moment in a `<time>`: local, the exact time in UTC as its title. */
export function showTime(element, ms) {
  if (!isNumber(ms)) {
    if (element.textContent !== NONE) element.textContent = NONE;
    element.removeAttribute("datetime");
    element.removeAttribute("title");
    return;
  }
  const utc = new Date(ms).toISOString();
  if (element.getAttribute("datetime") === utc) return;
  element.setAttribute("datetime", utc);
  element.title = `${utc.slice(0, 10)} ${utc.slice(11, 23)} UTC`;
  element.textContent = clock(ms);
}

export function isNumber(value) {
  return typeof value === "number" && Number.isFinite(value);
}

/** The end of an id, where the ids of a model differ. */
export function shortId(id) {
  const dot = id.lastIndexOf(".");
  return id.length > 30 && dot > 0 ? `${id.slice(0, dot + 1)}…${id.slice(-10)}` : id;
}

const TONES = {
  dispatched: "active", running: "active", succeeded: "good", failed: "bad",
  cancelled: "warn", expired: "warn", retrying: "warn", unreadable: "bad",
  open: "active", waiting: "warn", complete: "good", cancelling: "warn",
  ready: "good", draining: "warn", silent: "bad",
};

export function toneOf(state) {
  return TONES[state] ?? "quiet";
}
