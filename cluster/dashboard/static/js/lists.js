// What happened and who runs: decisions, changes by operators, replicas.

import { byId, make, makeSvg, say } from "./dom.js";
import { clock, duration, moment, percent } from "./format.js";

/** What a decision's reason means to an operator; the names are those of DecisionReason. */
const REASONS = {
  threshold: "so many requests decode",
  table_row: "the configured row for so many requests",
  goodput: "it promises most tokens a second",
  probe: "a short look whether drafts would pay",
  operator: "an operator or the configuration says so",
  rule: "a rule on the rate of requests",
  request: "all requests have opted out",
  drafter_away: "the draft model is being started again",
  catching_up: "the draft model is catching up",
};

export function reasonText(reason) {
  return REASONS[reason] ?? reason ?? "";
}

/** The timeline of decisions, the latest first; a replica is named where there are several. */
export function showDecisions(decisions, hasSeveralReplicas) {
  const rows = decisions.map((each) => {
    const what = each.num_draft_tokens > 0 ? `k = ${each.num_draft_tokens}` : "no drafts";
    const where = hasSeveralReplicas ? ` on ${each.replica_id}` : "";
    return entry(
      each.at_s,
      clock(each.at_s),
      `${what}${where}`,
      `${reasonText(each.reason)}, ${each.num_decoding} decoding`,
    );
  });
  replaceRows(byId("decisions"), rows, "Nothing has been decided yet.");
}

/** Changes by operators, the latest first. */
export function showAudit(changes) {
  const rows = changes.map((each) => {
    const who = each.updated_by || "somebody";
    const why = each.reason ? `: ${each.reason}` : "";
    return entry(each.at_s, moment(each.at_s), each.what, `version ${each.version}, ${who}${why}`);
  });
  replaceRows(byId("audit"), rows, "Nobody has changed anything yet.");
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
  const rows = replicas.map((each) =>
    make(
      "tr",
      {},
      make("td", {}, each.replica_id),
      make("td", {}, health(each)),
      number(duration(each.uptime_s)),
      number(each.num_decoding),
      number(each.num_running),
      number(each.num_waiting),
      number(percent(each.kv_cache_usage)),
      number(each.num_draft_tokens),
      make("td", {}, reasonText(each.decision_reason)),
      number(each.speculation_version ?? "–"),
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
function health(replica) {
  let [kind, text, path] = ["good", "ready", "M2 6l3 3 5-6"];
  if (replica.age_s > SILENT_AFTER_S) {
    [kind, text, path] = ["warn", `silent for ${duration(replica.age_s)}`, "M6 2v5M6 9v1"];
  } else if (!replica.is_ready) {
    [kind, text, path] = ["bad", replica.not_ready_because || "not ready", "M3 3l6 6M9 3l-6 6"];
  }
  const mark = makeSvg("path", { d: path, fill: "none", stroke: "currentColor", "stroke-width": 2 });
  const icon = makeSvg("svg", { viewBox: "0 0 12 12", "aria-hidden": "true" }, mark);
  return make("span", { class: "health", "data-kind": kind }, icon, text);
}
