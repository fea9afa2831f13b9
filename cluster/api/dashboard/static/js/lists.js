// What happened and who runs: decisions, changes by operators, replicas.

import { byId, make, makeSvg, say } from "./dom.js";
import { NOTHING, clock, duration, moment, percent, secondsOf } from "./format.js";
import { ruleText } from "./rules.js";

/** What a decision's reason means to an operator; the names are those of DecisionReason. */
const REASONS = {
  threshold: "threshold on decoding requests",
  table_row: "configured row for the batch size",
  goodput: "most tokens a second expected",
  probe: "a look at another number",
  operator: "set by an operator, or configured",
  rule: "rule on requests per second",
  request: "all requests have opted out",
  drafter_away: "draft model is being restarted",
  catching_up: "draft model is catching up",
};

export function reasonText(reason) {
  return REASONS[reason] ?? reason ?? "";
}

/** The timeline of decisions, the latest first; a replica is named where there are several. */
export function showDecisions(decisions, hasSeveralReplicas) {
  const rows = decisions.map((each) => {
    const at = secondsOf(each.at);
    const what = each.num_draft_tokens > 0 ? `k = ${each.num_draft_tokens}` : "no drafts";
    const where = hasSeveralReplicas ? ` on ${each.replica_id}` : "";
    return entry(
      at,
      clock(at),
      `${what}${where}`,
      `${reasonText(each.reason)}, ${each.num_decoding} decoding`,
    );
  });
  replaceRows(byId("decisions"), rows, "Nothing has been decided yet.");
}

/** Changes by operators, the latest first. */
export function showAudit(entries) {
  const rows = entries.map((each) => {
    const at = secondsOf(each.at);
    const who = each.updated_by || "nobody named";
    const why = each.reason ? `: ${each.reason}` : "";
    return entry(at, moment(at), changeText(each.change), `version ${each.version}, ${who}${why}`);
  });
  replaceRows(byId("audit"), rows, "Nobody has changed anything yet.");
}

/** "mode: off, threshold: 8", as the audit log has it. */
function changeText(change) {
  const { reset, ...values } = change;
  const parts = Object.entries(values).map(([name, value]) => `${name}: ${valueText(name, value)}`);
  if (reset) parts.unshift("reset to the configured values");
  return parts.join(", ");
}

function valueText(name, value) {
  if (name === "rules") return value.map(ruleText).join(", ") || "none";
  if (name === "ttl_s") return value === 0 ? "for good" : duration(value);
  return Array.isArray(value) ? value.join(" ") : value;
}

function entry(atS, when, what, why) {
  const time = make("time", { datetime: new Date(atS * 1e3).toISOString() }, when);
  return make("li", {}, time, make("span", { class: "what" }, what), make("span", { class: "why" }, why));
}

/** Keeps what is there where nothing is new, so that a reader's place in the list stays. */
function replaceRows(list, rows, nothing) {
  const key = rows.map((row) => row.textContent).join("\n");
  if (list.dataset.key === key) return;
  list.dataset.key = key;
  list.replaceChildren(...(rows.length > 0 ? rows : [make("li", {}, make("span", { class: "empty" }, nothing))]));
}

/** The table of replicas. @param {object[]} replicas */
export function showReplicas(replicas, numLost) {
  say(byId("lost"), numLost > 0 ? `${numLost} lost since the control plane started` : "");
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

const SILENT_AFTER_S = 40; // an idle replica reports every 30

/** State by word and shape, not by colour alone. */
function health(report, age) {
  let [kind, text, path] = ["good", "ready", "M2 6l3 3 5-6"];
  if (age > SILENT_AFTER_S) {
    [kind, text, path] = ["warn", `silent for ${duration(age)}`, "M6 2v5M6 9v1"];
  } else if (!report.is_ready) {
    [kind, text, path] = ["bad", report.reason || "not ready", "M3 3l6 6M9 3l-6 6"];
  } else if (report.is_draft_worker_up === false) {
    [kind, text, path] = ["warn", "draft worker away", "M6 2v5M6 9v1"];
  }
  const mark = makeSvg("path", { d: path, fill: "none", stroke: "currentColor", "stroke-width": 2 });
  const icon = makeSvg("svg", { viewBox: "0 0 12 12", "aria-hidden": "true" }, mark);
  return make("span", { class: "health", "data-kind": kind }, icon, text);
}
