// The cards at the top: health, what drafts bring now, and the last change of the settings.

import { byId, make, setText } from "./dom.js";
import { clock, dateTime, percent, secondsOf, short } from "./format.js";
import { changeText, mark, reasonText, stateOf } from "./lists.js";

const GAIN = 1.05; // from it on drafts bring something; below its reciprocal they cost time
const BY_POLICY = new Set(["goodput", "probe", "prefill", "catching_up", "table_row"]);

/** Shows the health of the service. @param {number} numRestarts in the time of the charts */
export function showHealth(replicas, sample, numRestarts) {
  const states = replicas.map(({ report, age_s: age }) => stateOf(report, age));
  const numReady = replicas.filter(({ report }) => report.is_ready).length;
  const bad = states.filter(({ kind }) => kind !== "good").map(({ text }) => text);
  const { num_errors: errors = 0, num_rejected: rejected = 0, num_client_errors: clientErrors = 0 } = sample ?? {};
  const facts = [
    fact("ready", `${numReady} of ${replicas.length}`, replicas.length === 1 ? "replica ready" : "replicas ready", numReady < replicas.length),
    fact("errors", ...counted(errors, "error"), errors > 0),
    fact("rejected", short(rejected), "rejected (429)", rejected > 0),
    fact("client-errors", ...counted(clientErrors, "client error", "in 1 min"), false),
    fact("restarts", ...counted(numRestarts, "restart", "in 15 min"), numRestarts > 0),
  ];
  const [kind, text] = verdict(replicas.length, numReady, bad, { errors, rejected, numRestarts });
  showCard("health", kind, text, facts);
}

/** Shows that nothing is known since the connection was lost. */
export function showNoHealth(lastS) {
  const since = lastS === null ? "no data yet" : `no data since ${clock(lastS)}`;
  showCard("health", "bad", `Unknown: ${since}`, []);
}

/** Returns a number and its noun: ["1", "error in 1 min"]. */
function counted(count, noun, span = "") {
  return [short(count), `${noun}${count === 1 ? "" : "s"} ${span}`.trim()];
}

/** Returns the kind and the headline; the worst cause comes first. */
function verdict(numReplicas, numReady, bad, { errors, rejected, numRestarts }) {
  if (numReady === 0) return ["bad", `Down: ${bad[0] ?? "no replica"}`];
  if (numReady < numReplicas) return ["warn", `Degraded: ${bad[0]}`];
  if (errors > 0) return ["bad", `Failing: ${counted(errors, "error", "in 1 min").join(" ")}`];
  if (rejected > 0) return ["warn", `Overloaded: ${short(rejected)} rejected in 1 min`];
  if (bad.length > 0) return ["warn", `Degraded: ${bad[0]}`];
  if (numRestarts > 0) return ["warn", `Recovered: ${counted(numRestarts, "restart", "in 15 min").join(" ")}`];
  return ["good", "Healthy"];
}

/** Shows the mode, and what drafts bring. */
export function showSpeculation(state, replicas, sample) {
  setText(byId("mode"), modeText(state));
  const { kind, gain, details } = drafting(state, replicas, sample);
  setText(byId("gain"), gain);
  setText(byId("speculation-facts"), details);
  byId("speculation-card").dataset.kind = kind;
}

/** Returns whether the service can draft at all. */
function hasDrafter({ configured }) {
  return configured.mode !== "off" || configured.num_speculative_tokens > 0;
}

function modeText(state) {
  if (!hasDrafter(state)) return "None";
  const { in_force: control, active_rule: rule } = state;
  const names = { auto: "Auto", on: `On, k = ${control.num_speculative_tokens}`, off: "Off" };
  return names[control.mode] + (rule === null ? "" : ` by rule ${rule + 1}`);
}

function drafting(state, replicas, sample) {
  if (!hasDrafter(state)) return { kind: "", gain: "no drafts", details: "this service has no drafter" };
  const isOff = state.in_force.mode === "off" && numApplied(state, replicas) === replicas.length;
  if (isOff) return { kind: "", gain: "no drafts", details: "turned off" };
  if (sample === undefined || sample.num_steps === 0) return { kind: "", gain: "idle", details: "no steps" };
  if (sample.num_drafted_steps === 0) return { ...withoutDrafts(replicas), gain: "no drafts" };
  const share = percent(sample.num_drafted_steps / sample.num_steps);
  const details = `drafts in ${share} of steps, ${short(sample.mean_acceptance_length)} tokens per draft`;
  const { speedup } = sample;
  if (speedup === null) return { kind: "", gain: "speed-up not measured", details };
  const kind = speedup >= GAIN ? "good" : speedup * GAIN <= 1 ? "warn" : "";
  return { kind, gain: `${short(speedup)}× the speed without drafts`, details };
}

/** Returns why there are no drafts; decisions of the policy are one reason. */
function withoutDrafts(replicas) {
  const reasons = replicas.map(({ report }) => report.decision_reason).filter((reason) => reason !== "");
  const isDown = reasons.includes("drafter_unavailable");
  const texts = new Set(
    reasons.map((reason) => (BY_POLICY.has(reason) ? "drafts do not pay at this load" : reasonText(reason))),
  );
  return { kind: isDown ? "warn" : "", details: [...texts].join("; ") };
}

/** Shows who changed what. @param {object | undefined} entry the latest one of the audit log */
export function showChange(state, entry, replicas) {
  const { version, updated_at: at, updated_by: author, reason, expires_at: until } = state;
  const count = numApplied(state, replicas);
  const isPartial = count < replicas.length;
  const applied = isPartial ? [`in force on ${count} of ${replicas.length} replicas`] : [];
  const kind = isPartial ? "warn" : "";
  if (version === 0) return showCard("change", kind, "None", ["as configured", ...applied]);
  const what = entry?.version === version ? changeText(entry.change) : "settings";
  const facts = [`${author || "unknown"}, ${dateTime(secondsOf(at))}`, reason, ...applied];
  if (until !== null) facts.push(`until ${dateTime(secondsOf(until))}`);
  return showCard("change", kind, what, facts.filter((text) => text !== ""));
}

function numApplied({ version }, replicas) {
  return replicas.filter(({ report }) => report.speculation_version === version).length;
}

function fact(name, value, label, isNews) {
  return make("span", { "data-fact": name, "data-news": isNews }, make("b", {}, value), ` ${label}`);
}

/** Updates a card; texts are joined with dots. The kind is also in the words of the headline. */
function showCard(name, kind, headline, facts) {
  byId(`${name}-card`).dataset.kind = kind;
  const line = byId(name);
  if (line.textContent !== headline) line.replaceChildren(...(name === "health" ? [mark(kind)] : []), headline);
  const parts = facts.map((part) => (part instanceof Node ? part : make("span", {}, part)));
  byId(`${name}-facts`).replaceChildren(...parts);
}
