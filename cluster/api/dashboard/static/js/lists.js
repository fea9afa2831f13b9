// The lists of decisions, of audit log entries, and of replicas.

import { byId, make, makeSvg, setText } from "./dom.js";
import { NOTHING, clock, dateTime, duration, percent, secondsOf } from "./format.js";
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

/** Shows decisions, latest first; with the replica if there are several. */
export function showDecisions(decisions, hasSeveralReplicas) {
  const rows = decisions.map((decision) => {
    const at = secondsOf(decision.at);
    const length = decision.num_draft_tokens > 0 ? `k = ${decision.num_draft_tokens}` : "no drafts";
    const replica = hasSeveralReplicas ? ` on ${decision.replica_id}` : "";
    const details = `${reasonText(decision.reason)}, ${decision.num_decoding} decoding`;
    return listItem(at, clock(at), `${length}${replica}`, details);
  });
  replaceRows(byId("decisions"), rows, "No decisions yet.");
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
function changeText(change) {
  const { reset, ...values } = change;
  const parts = Object.entries(values).map(([name, value]) => `${name}: ${valueText(name, value)}`);
  if (reset) parts.unshift("reset to the configured values");
  return parts.join(", ");
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
      number(report.num_chosen_tokens),
      make("td", {}, reasonText(report.decision_reason)),
      number(report.speculation_version ?? NOTHING),
    ),
  );
  const none = make("tr", {}, make("td", { class: "empty", colspan: 10 }, "No replica has reported yet."));
  byId("replicas").replaceChildren(...(rows.length > 0 ? rows : [none]));
}

function number(value) {
  return make("td", { class: "number" }, value);
}

const REPORT_TIMEOUT_S = 40; // an idle replica reports every 30 seconds

/** Shows the state as text and icon, not as colour alone. */
function health(report, age) {
  let [kind, text, path] = ["good", "ready", "M2 6l3 3 5-6"];
  if (age > REPORT_TIMEOUT_S) {
    [kind, text, path] = ["warn", `no report for ${duration(age)}`, "M6 2v5M6 9v1"];
  } else if (!report.is_ready) {
    [kind, text, path] = ["bad", report.reason || "not ready", "M3 3l6 6M9 3l-6 6"];
  } else if (report.is_draft_worker_up === false) {
    [kind, text, path] = ["warn", "draft worker down", "M6 2v5M6 9v1"];
  }
  const mark = makeSvg("path", { d: path, fill: "none", stroke: "currentColor", "stroke-width": 2 });
  const icon = makeSvg("svg", { viewBox: "0 0 12 12", "aria-hidden": "true" }, mark);
  return make("span", { class: "health", "data-kind": kind }, icon, text);
}
