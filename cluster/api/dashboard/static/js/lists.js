// The lists of decisions, of audit log entries, and of replicas.

import { byId, make, makeSvg, setText } from "./dom.js";
import { NOTHING, bytes, clock, dateTime, duration, percent, secondsOf } from "./format.js";
import { ruleText } from "./rules.js";

/** Descriptions of the values of DecisionReason. */
const REASONS = {
  threshold: "threshold on decoding requests",
  table_row: "configured length for the batch size",
  goodput: "highest expected throughput",
  probe: "probe of another draft length",
  prefill: "drafts do not pay beside a prompt",
  operator: "set by an operator or configured",
  rule: "rule on requests per second",
  request: "all requests have opted out",
  drafter_unavailable: "draft worker is restarting",
  catching_up: "draft model is catching up",
};

export function reasonText(reason) {
  return REASONS[reason] ?? reason ?? "";
}

/** Reasons between which the policy changes by itself, often several times per second. */
const OF_POLICY = new Set(["goodput", "probe", "prefill", "catching_up", "table_row", "request"]);

/** Returns what changes are grouped by; each one by an operator stands alone. */
function groupOf({ reason }, index) {
  if (reason === "operator") return `operator ${index}`;
  return OF_POLICY.has(reason) ? "policy" : reason;
}

/** Groups the successive changes of a replica that have one cause; the latest group comes first. */
function groupsOf({ replica_id: replica, decision_changes: changes }) {
  const groups = [];
  changes.forEach((change, index) => {
    const name = groupOf(change, index);
    if (groups[0]?.name !== name) groups.unshift({ name, replica, changes: [] });
    groups[0].changes.unshift(change);
  });
  return groups;
}

/** Shows groups of decisions, latest first; with the replica if there are several. */
export function showDecisions(reports) {
  const groups = reports.flatMap(groupsOf);
  groups.sort((a, b) => Date.parse(b.changes[0].at) - Date.parse(a.changes[0].at));
  const rows = groups.map((group) => decisionItem(group, reports.length > 1));
  replaceRows(byId("decisions"), rows, "No decisions yet.");
}

function decisionItem({ replica, changes }, hasSeveralReplicas) {
  const [at, since] = [changes[0], changes.at(-1)].map((change) => secondsOf(change.at));
  const lengths = changes.map((change) => change.num_draft_tokens);
  const length = lengths[0] > 0 ? `k = ${lengths[0]}` : "no drafts";
  const where = hasSeveralReplicas ? ` on ${replica}` : "";
  const reasons = [...new Set(changes.map(({ reason }) => reasonText(reason)))].join("; ");
  const decoding = rangeText(changes.map((change) => change.num_decoding));
  const details = [`${reasons}, ${decoding} decoding`];
  if (changes.length > 1) details.push(`${changes.length} changes since ${clock(since)}, k = ${rangeText(lengths)}`);
  return listItem(at, clock(at), `${length}${where}`, details.join(" · "));
}

function rangeText(values) {
  const [low, high] = [Math.min(...values), Math.max(...values)];
  return low === high ? String(low) : `${low} to ${high}`;
}

/** Shows changes by operators, latest first. */
export function showAudit(entries) {
  const rows = entries.map((entry) => {
    const at = secondsOf(entry.at);
    const author = entry.updated_by || "unknown";
    const reason = entry.reason ? `: ${entry.reason}` : "";
    const details = `version ${entry.version}, ${author}${reason}`;
    return listItem(at, dateTime(at), changeText(entry.change), details);
  });
  replaceRows(byId("audit"), rows, "No changes yet.");
}

/** Formats a change of the audit log: "mode: off, threshold: 8". */
export function changeText(change) {
  const { reset, ...values } = change;
  const parts = Object.entries(values).map(([name, value]) => `${nameText(name)}: ${valueText(name, value)}`);
  if (reset) parts.unshift("reset to the configured values");
  return parts.join(", ");
}

function nameText(name) {
  return name === "ttl_s" ? "expires after" : name.replaceAll("_", " ");
}

function valueText(name, value) {
  if (name === "rules") return value.map(ruleText).join(", ") || "none";
  if (name === "ttl_s") return value === 0 ? "never" : duration(value);
  return Array.isArray(value) ? value.join(" ") : value;
}

function listItem(atS, timeText, title, details) {
  const time = make("time", { datetime: new Date(atS * 1e3).toISOString() }, timeText);
  return make("li", {}, time, make("span", { class: "title" }, title), make("span", { class: "details" }, details));
}

/** Replaces the rows only if they differ, so that the scroll position stays. */
function replaceRows(list, rows, emptyText) {
  const key = rows.map((row) => row.textContent).join("\n");
  if (list.dataset.key === key) return;
  list.dataset.key = key;
  list.replaceChildren(...(rows.length > 0 ? rows : [make("li", {}, make("span", { class: "empty" }, emptyText))]));
}

/** Shows the table of replicas. @param {object[]} replicas */
export function showReplicas(replicas, numLost) {
  setText(byId("lost"), numLost > 0 ? `${numLost} lost since the control plane started` : "");
  const rows = replicas.map(({ report, uptime_s: uptime, age_s: age }) =>
    make(
      "tr",
      {},
      make("th", { scope: "row" }, report.replica_id),
      make("td", {}, health(report, age)),
      number(duration(uptime)),
      number(report.num_decoding),
      number(report.num_running),
      number(report.num_waiting),
      number(percent(report.kv_cache_usage)),
      number(bytes(report.memory?.process_bytes)),
      number(report.memory?.gpu_bytes > 0 ? bytes(report.memory.gpu_used_bytes) : NOTHING),
      number(report.counts.num_target_restarts + report.counts.num_draft_restarts),
      number(report.num_decoding > 0 ? report.num_chosen_tokens : NOTHING),
      make("td", {}, report.num_decoding > 0 ? reasonText(report.decision_reason) : NOTHING),
      number(report.speculation_version ?? NOTHING),
    ),
  );
  const none = make("tr", {}, make("td", { class: "empty", colspan: 13 }, "No replica has reported yet."));
  byId("replicas").replaceChildren(...(rows.length > 0 ? rows : [none]));
}

function number(value) {
  return make("td", { class: "number" }, value);
}

const REPORT_TIMEOUT_S = 40; // an idle replica reports every 30 seconds

/** Returns the kind and the text of a replica's state. */
export function stateOf(report, age) {
  if (age > REPORT_TIMEOUT_S) return { kind: "warn", text: `no report for ${duration(age)}` };
  if (!report.is_ready) return { kind: "bad", text: report.reason || "not ready" };
  if (report.is_draft_worker_up === false) return { kind: "warn", text: "draft worker down" };
  return { kind: "good", text: "ready" };
}

/** Shows the state as text and icon, not as colour alone. */
function health(report, age) {
  const { kind, text } = stateOf(report, age);
  return make("span", { class: "health", "data-kind": kind }, mark(kind), text);
}

const MARKS = { good: "M2 6l3 3 5-6", warn: "M6 2v5M6 9v1", bad: "M3 3l6 6M9 3l-6 6" };

/** Returns the icon of a kind of state. */
export function mark(kind) {
  const path = makeSvg("path", { d: MARKS[kind], fill: "none", stroke: "currentColor", "stroke-width": 2 });
  return makeSvg("svg", { viewBox: "0 0 12 12", "aria-hidden": "true" }, path);
}
