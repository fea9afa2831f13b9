// The control panel: what holds, what shall hold instead, and who was faster.

import { callJson } from "./api.js";
import { byId, say } from "./dom.js";
import { moment, secondsOf, short } from "./format.js";
import { reasonText } from "./lists.js";
import { RuleEditor, ruleText } from "./rules.js";

const SPECULATION = "../v1/admin/speculation";
const PREVIEW_DELAY_MS = 200;
const MODE_HINTS = {
  auto: "Drafts while it pays: by the policy, below the threshold.",
  on: "Drafts at every load.",
  off: "No request drafts, whatever it asks for.",
};

/** Everything between the panel's form and the service's state. */
export class Steer {
  constructor() {
    this.form = byId("steer");
    this.rules = new RuleEditor(() => this.#edited());
    this.state = null; // as the service told last
    this.base = null; // what the form was filled from
    this.isBusy = false;
    this.previewTimer = null;
    this.previewed = "";
    this.form.addEventListener("input", () => this.#edited());
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#apply(this.#change());
    });
    byId("discard").addEventListener("click", () => this.#fill(this.state));
    byId("reset").addEventListener("click", () => this.#apply({ reset: true }));
    byId("conflict-take").addEventListener("click", () => this.#fill(this.state));
    byId("conflict-keep").addEventListener("click", () => this.#rebase());
    byId("who").value = sessionStorage.getItem("specdec-who") ?? "";
  }

  /** Takes over what the service says of itself. */
  update(state) {
    const isNew = this.state?.version !== state.version;
    this.state = state;
    this.#showState();
    if (this.base === null) this.#fill(state);
    else if (isNew && state.version !== this.base.version && !this.isBusy) {
      if (this.#isEdited()) this.#showConflict();
      else this.#fill(state);
    }
  }

  /** What holds on the replicas, as they decided last. */
  showDecisions(replicas) {
    const box = byId("steer-state");
    const drafting = replicas.filter((each) => each.num_chosen_tokens > 0);
    const isOn = drafting.length > 0;
    box.dataset.on = String(isOn);
    const lengths = drafting.map((each) => each.num_chosen_tokens);
    const [low, high] = [Math.min(...lengths), Math.max(...lengths)];
    const k = low === high ? `k = ${low}` : `k = ${low} to ${high}`;
    const where = isOn && drafting.length < replicas.length ? ` on ${drafting.length} of ${replicas.length}` : "";
    const head = isOn ? `On${where}, ${k}` : "Off";
    const reasons = [...new Set(replicas.map((each) => reasonText(each.decision_reason)).filter(Boolean))];
    const why = reasons.join("; ") || "nothing has been decided yet";
    if (box.textContent === head + why) return;
    const strong = document.createElement("b");
    strong.textContent = head;
    box.replaceChildren(strong, why);
  }

  #showState() {
    const { version, updated_at: at, updated_by: who, reason, expires_at: until } = this.state;
    const parts = [`Version ${version}`];
    if (at !== null) parts.push(`${who || "somebody"}, ${moment(secondsOf(at))}`);
    if (reason) parts.push(reason);
    if (until !== null) parts.push(`until ${moment(secondsOf(until))}`);
    say(byId("steer-version"), parts.join(" · "));
  }

  #fill(state) {
    this.base = state;
    const base = state.without_rules;
    this.form.elements.mode.value = base.mode;
    byId("num_speculative_tokens").value = base.num_speculative_tokens;
    byId("threshold").value = base.threshold;
    byId("allow_request_override").checked = base.allow_request_override;
    this.rules.fill(state.rules);
    byId("expiry").value = "";
    byId("reason").value = "";
    byId("conflict").hidden = true;
    for (const name of ["num_speculative_tokens", "threshold"]) {
      const isSet = state.overridden.includes(name);
      this.#note(name, isSet ? `configured: ${state.configured[name]}` : "as configured");
    }
    this.#edited();
  }

  #note(name, text, kind = "") {
    const note = byId(`${name}-note`);
    note.dataset.kind = kind;
    say(note, text);
  }

  /** What the form has that the base has not. */
  #change() {
    const { without_rules: base, rules } = this.base;
    const change = {};
    const mode = this.form.elements.mode.value;
    if (mode !== base.mode) change.mode = mode;
    for (const name of ["num_speculative_tokens", "threshold"]) {
      const value = byId(name).value === "" ? null : Number(byId(name).value);
      if (value !== base[name]) change[name] = value;
    }
    const mayChoose = byId("allow_request_override").checked;
    if (mayChoose !== base.allow_request_override) change.allow_request_override = mayChoose;
    const wanted = this.rules.read();
    if (JSON.stringify(wanted) !== JSON.stringify(rules.map(plainRule))) change.rules = wanted;
    if (byId("expiry").value !== "") change.ttl_s = Number(byId("expiry").value);
    return change;
  }

  #isEdited() {
    return Object.keys(this.#change()).length > 0;
  }

  #edited() {
    const isEdited = this.#isEdited();
    byId("apply").disabled = !isEdited || this.isBusy;
    byId("discard").disabled = !isEdited || this.isBusy;
    say(byId("mode-hint"), MODE_HINTS[this.form.elements.mode.value] ?? "");
    this.#clearErrors();
    this.#schedulePreview();
  }

  #schedulePreview() {
    clearTimeout(this.previewTimer);
    this.previewTimer = setTimeout(() => this.preview(), PREVIEW_DELAY_MS);
  }

  /** Says what the form would mean at the load of the moment. */
  async preview() {
    const change = this.base === null ? {} : this.#change();
    try {
      const told = await callJson(`${SPECULATION}/preview`, { method: "POST", body: change });
      say(byId("preview"), previewText(told));
    } catch (error) {
      if (error.status === 400) this.#showError(error);
    }
  }

  async #apply(change) {
    if (this.isBusy) return;
    sessionStorage.setItem("specdec-who", byId("who").value);
    this.isBusy = true;
    this.#edited();
    try {
      const body = { ...change, updated_by: byId("who").value, reason: byId("reason").value, expected_version: this.base.version };
      const edits = JSON.stringify(this.#change());
      const state = await callJson(SPECULATION, { method: "PUT", body });
      this.isBusy = false;
      this.state = state;
      this.#showState();
      // What was edited while the call was on its way stays, upon what it has made.
      if (JSON.stringify(this.#change()) === edits) this.#fill(state);
      else this.#rebase();
    } catch (error) {
      this.isBusy = false;
      this.#edited();
      if (error.status === 409) await this.#onConflict();
      else this.#showError(error);
    }
  }

  async #onConflict() {
    this.state = await callJson(SPECULATION);
    this.#showState();
    this.#showConflict();
  }

  #showConflict() {
    const { version, updated_at: at, updated_by: who, reason } = this.state;
    const theirs = differences(this.base, this.state);
    const when = at === null ? "" : ` at ${moment(secondsOf(at))}`;
    const why = reason ? ` (${reason})` : "";
    say(byId("conflict-text"), `${who || "Somebody"} changed this${when}${why}, now version ${version}: ${theirs}. Nothing of yours has been applied.`);
    byId("conflict").hidden = false;
  }

  /** What was edited here, upon what somebody else has made of the rest meanwhile. */
  #rebase() {
    const mine = this.#change();
    const ttl = byId("expiry").value;
    const reason = byId("reason").value;
    this.#fill(this.state);
    if (mine.mode !== undefined) this.form.elements.mode.value = mine.mode;
    for (const name of ["num_speculative_tokens", "threshold"]) {
      if (mine[name] !== undefined) byId(name).value = mine[name] ?? "";
    }
    if (mine.allow_request_override !== undefined) byId("allow_request_override").checked = mine.allow_request_override;
    if (mine.rules !== undefined) this.rules.fill(mine.rules);
    byId("expiry").value = ttl;
    byId("reason").value = reason;
    this.#edited();
    byId("apply").focus();
  }

  #clearErrors() {
    say(byId("steer-error"), "");
    this.form.querySelectorAll("[aria-invalid]").forEach((each) => each.removeAttribute("aria-invalid"));
  }

  #showError(error) {
    say(byId("steer-error"), error.message);
    const field = error.field ?? "";
    const input = field.startsWith("rules") ? this.rules.mark(field) : this.form.querySelector(`#${CSS.escape(field)}`);
    input?.setAttribute("aria-invalid", "true");
  }
}

/** A rule with what it says alone, in the order in which the editor says it. */
function plainRule(rule) {
  const plain = { min_requests_per_s: rule.min_requests_per_s };
  if (rule.mode !== null) plain.mode = rule.mode;
  if (rule.num_speculative_tokens !== null) plain.num_speculative_tokens = rule.num_speculative_tokens;
  return plain;
}

/** What differs between two states, in words: "mode is off, threshold is 8". */
function differences(before, after) {
  const names = ["mode", "num_speculative_tokens", "threshold", "method", "allow_request_override"];
  const changed = names
    .filter((name) => before.without_rules[name] !== after.without_rules[name])
    .map((name) => `${name.replaceAll("_", " ")} is ${after.without_rules[name] ?? "as loaded"}`);
  const [was, now] = [before, after].map((state) => state.rules.map(ruleText).join(", "));
  if (was !== now) changed.push(now === "" ? "no rules" : `rules are ${now}`);
  return changed.join("; ") || "the same values again";
}

/** "At the current load, 12.3 requests/s, this means k = 3: rule 2 holds." */
function previewText({ requests_per_s: rate, num_decoding: decoding, in_force: control, active_rule: rule }) {
  const load = `At the current load, ${short(rate)} requests/s and ${short(decoding)} decoding,`;
  const k = control.num_speculative_tokens;
  const by = rule === null ? "" : ` Rule ${rule + 1} holds.`;
  if (control.mode === "off" || k === 0) return `${load} this means no drafts.${by}`;
  if (control.mode === "on") return `${load} this means k = ${k}.${by}`;
  const within = `k = ${k} at most, and less where that promises more, on replicas with up to ${control.threshold} decoding`;
  return `${load} this means ${within}.${by}`;
}
