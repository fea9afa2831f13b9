// Formats numbers with three significant digits, and times.

export const NOTHING = "–";

/** Three significant digits: 0.123, 1.23, 12.3, 123, 1.23k, 12.3M; a dash for null. */
export function short(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return NOTHING;
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 999_500) return `${digits(value / 1e6)}M`;
  if (size >= 9_995) return `${digits(value / 1e3)}k`;
  return digits(value);
}

function digits(value) {
  const size = Math.abs(value);
  if (size < 0.0005) return "0";
  const decimals = size >= 99.95 ? 0 : size >= 9.995 ? 1 : size >= 0.9995 ? 2 : 3;
  return value.toFixed(decimals).replace(/(\.\d*?)0+$/, "$1").replace(/\.$/, "");
}

/** Seconds, as milliseconds below one second: 12.3 ms, 1.23 s. */
export function seconds(value) {
  if (value === null || value === undefined) return NOTHING;
  return value < 1 ? `${short(value * 1e3)} ms` : `${short(value)} s`;
}

/** A ratio from 0 to 1 as a whole percentage. */
export function percent(value) {
  return value === null || value === undefined ? NOTHING : `${Math.round(100 * value)} %`;
}

/** Bytes in GiB or MiB: 1.23 GiB, 512 MiB. */
export function bytes(value) {
  if (value === null || value === undefined) return NOTHING;
  return value < 2 ** 30 ? `${short(value / 2 ** 20)} MiB` : `${short(value / 2 ** 30)} GiB`;
}

/** The two largest units: 42 s, 3 min 5 s, 2 h 7 min, 4 d 1 h. */
export function duration(value) {
  const total = Math.max(0, Math.floor(value));
  const parts = [
    [Math.floor(total / 86400), "d"],
    [Math.floor(total / 3600) % 24, "h"],
    [Math.floor(total / 60) % 60, "min"],
    [total % 60, "s"],
  ];
  const first = parts.findIndex(([count]) => count > 0);
  if (first < 0) return "0 s";
  return parts
    .slice(first, first + 2)
    .filter(([count]) => count > 0)
    .map(([count, unit]) => `${count} ${unit}`)
    .join(" ");
}

/** Unix time in seconds of an ISO 8601 time. */
export function secondsOf(isoTime) {
  return Date.parse(isoTime) / 1e3;
}

/** The time of day in the browser's time zone. */
export function clock(unixSeconds) {
  return new Date(unixSeconds * 1e3).toLocaleTimeString([], { hourCycle: "h23" });
}

/** The time of day, with the date if that is not today. */
export function dateTime(unixSeconds) {
  const date = new Date(unixSeconds * 1e3);
  const isToday = date.toDateString() === new Date().toDateString();
  return isToday ? clock(unixSeconds) : `${date.toLocaleDateString()} ${clock(unixSeconds)}`;
}
