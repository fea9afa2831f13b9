// The control panel: the form that changes the settings, and conflicting changes.

import { callJson } from "./api.js";
import { byId, setText } from "./dom.js";
import { dateTime, secondsOf, short } from "./format.js";
import { RuleEditor, ruleText } from "./rules.js";

const SPECULATION = "../v1/admin/speculation";
const PREVIEW_DELAY_MS = 200;
const MODE_HINTS = {
  auto: "The policy chooses the draft length, below the threshold.",
  on: "Speculation is on at every load.",
  off: "Speculation is off, also for requests that ask for it.",
};

/** Connects the form of the panel with the state of the service. */
export class ControlPanel {
  constructor() {
    this.form = byId("control");
    this.rules = new RuleEditor(() => this.#onEdit());
    this.state = null; // the latest state of the service
    this.base = null; // the state that the form was filled from
    this.isBusy = false;
    this.previewTimer = null;

    this.form.addEventListener("input", () => this.#onEdit());
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#apply(this.#change());
    });
    byId("discard").addEventListener("click", () => this.#fill(this.state));
    byId("reset").addEventListener("click", () => this.#apply({ reset: true }));
    byId("conflict-take").addEventListener("click", () => this.#fill(this.state));
    byId("conflict-keep").addEventListener("click", () => this.#rebase());
    byId("author").value = sessionStorage.getItem("specdec-author") ?? "";
  }

  /** Shows a new state of the service. */
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

  #showState() {
    const { version, updated_at: at, updated_by: author, reason, expires_at: until } = this.state;
    const parts = [`Version ${version}`];
    if (at !== null) parts.push(`${author || "unknown"}, ${dateTime(secondsOf(at))}`);
    if (reason) parts.push(reason);
    if (until !== null) parts.push(`until ${dateTime(secondsOf(until))}`);
    setText(byId("control-version"), parts.join(" · "));
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
    this.#onEdit();
  }

  #note(name, text, kind = "") {
    const note = byId(`${name}-note`);
    note.dataset.kind = kind;
    setText(note, text);
  }

  /** Returns the values of the form that differ from the base. */
  #change() {
    const { without_rules: base, rules } = this.base;
    const change = {};
    const mode = this.form.elements.mode.value;
    if (mode !== base.mode) change.mode = mode;
    for (const name of ["num_speculative_tokens", "threshold"]) {
      const value = byId(name).value === "" ? null : Number(byId(name).value);
      if (value !== base[name]) change[name] = value;
    }
    const allowOverride = byId("allow_request_override").checked;
    if (allowOverride !== base.allow_request_override) change.allow_request_override = allowOverride;
    const editedRules = this.rules.read();
    if (JSON.stringify(editedRules) !== JSON.stringify(rules.map(plainRule))) change.rules = editedRules;
    if (byId("expiry").value !== "") change.ttl_s = Number(byId("expiry").value);
    return change;
  }

  #isEdited() {
    return Object.keys(this.#change()).length > 0;
  }

  #onEdit() {
    const isEdited = this.#isEdited();
    byId("apply").disabled = !isEdited || this.isBusy;
    byId("discard").disabled = !isEdited || this.isBusy;
    setText(byId("mode-hint"), MODE_HINTS[this.form.elements.mode.value] ?? "");
    this.#clearErrors();
    this.#schedulePreview();
  }

  #schedulePreview() {
    clearTimeout(this.previewTimer);
    this.previewTimer = setTimeout(() => this.preview(), PREVIEW_DELAY_MS);
  }

  /** Shows the effect of the form at the current load. */
  async preview() {
    const change = this.base === null ? {} : this.#change();
    try {
      const preview = await callJson(`${SPECULATION}/preview`, { method: "POST", body: change });
      setText(byId("preview"), previewText(preview));
    } catch (error) {
      if (error.status === 400) this.#showError(error);
    }
  }

  async #apply(change) {
    if (this.isBusy) return;
    sessionStorage.setItem("specdec-author", byId("author").value);
    this.isBusy = true;
    this.#onEdit();
    try {
      const body = { ...change, updated_by: byId("author").value, reason: byId("reason").value, expected_version: this.base.version };
      const edits = JSON.stringify(this.#change());
      const state = await callJson(SPECULATION, { method: "PUT", body });
      this.isBusy = false;
      this.state = state;
      this.#showState();
      // Keep edits that were made during the call, on top of the new state.
      if (JSON.stringify(this.#change()) === edits) this.#fill(state);
      else this.#rebase();
    } catch (error) {
      this.isBusy = false;
      this.#onEdit();
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
    const { version, updated_at: at, updated_by: author, reason } = this.state;
    const changes = differences(this.base, this.state);
    const time = at === null ? "" : ` at ${dateTime(secondsOf(at))}`;
    const details = reason ? ` (${reason})` : "";
    const text = `${author || "Another operator"} changed this${time}${details}, now version ${version}: ${changes}. Your changes were not applied.`;
    setText(byId("conflict-text"), text);
    byId("conflict").hidden = false;
  }

  /** Fills the form from the latest state, and applies the local edits to it. */
  #rebase() {
    const edits = this.#change();
    const ttl = byId("expiry").value;
    const reason = byId("reason").value;
    this.#fill(this.state);
    if (edits.mode !== undefined) this.form.elements.mode.value = edits.mode;
    for (const name of ["num_speculative_tokens", "threshold"]) {
      if (edits[name] !== undefined) byId(name).value = edits[name] ?? "";
    }
    if (edits.allow_request_override !== undefined) byId("allow_request_override").checked = edits.allow_request_override;
    if (edits.rules !== undefined) this.rules.fill(edits.rules);
    byId("expiry").value = ttl;
    byId("reason").value = reason;
    this.#onEdit();
    byId("apply").focus();
  }

  #clearErrors() {
    setText(byId("control-error"), "");
    this.form.querySelectorAll("[aria-invalid]").forEach((input) => input.removeAttribute("aria-invalid"));
  }

  #showError(error) {
    setText(byId("control-error"), error.message);
    const field = error.field ?? "";
    const input = field.startsWith("rules") ? this.rules.mark(field) : this.form.querySelector(`#${CSS.escape(field)}`);
    input?.setAttribute("aria-invalid", "true");
  }
}

/** Returns a rule without its null values, with the key order of the editor. */
function plainRule(rule) {
  const plain = { min_requests_per_s: rule.min_requests_per_s };
  if (rule.mode !== null) plain.mode = rule.mode;
  if (rule.num_speculative_tokens !== null) plain.num_speculative_tokens = rule.num_speculative_tokens;
  return plain;
}

/** Describes the differences between two states: "mode is off; threshold is 8". */
function differences(before, after) {
  const names = ["mode", "num_speculative_tokens", "threshold", "method", "allow_request_override"];
  const changed = names
    .filter((name) => before.without_rules[name] !== after.without_rules[name])
    .map((name) => `${name.replaceAll("_", " ")} is ${after.without_rules[name] ?? "as loaded"}`);
  const [oldRules, newRules] = [before, after].map((state) => state.rules.map(ruleText).join(", "));
  if (oldRules !== newRules) changed.push(newRules === "" ? "no rules" : `rules are ${newRules}`);
  return changed.join("; ") || "the same values";
}

/** Formats a preview: "At the current load, 12.3 requests/s and 6 decoding, this means k = 3. Rule 1 applies." */
function previewText({ requests_per_s: rate, num_decoding: decoding, in_force: control, active_rule: rule }) {
  const load = `At the current load, ${short(rate)} requests/s and ${short(decoding)} decoding,`;
  const k = control.num_speculative_tokens;
  const applied = rule === null ? "" : ` Rule ${rule + 1} applies.`;
  if (control.mode === "off" || k === 0) return `${load} this means no drafts.${applied}`;
  if (control.mode === "on") return `${load} this means k = ${k}.${applied}`;
  const range = `k = 0 to ${k}, as the policy chooses, on replicas with up to ${control.threshold} decoding`;
  return `${load} this means ${range}.${applied}`;
}
