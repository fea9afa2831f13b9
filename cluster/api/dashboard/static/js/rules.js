// The editor of the rules by requests per second.

import { byId, make } from "./dom.js";
import { short } from "./format.js";

const MODES = [
  ["", "unchanged"],
  ["auto", "auto"],
  ["on", "on"],
  ["off", "off"],
];

/** The rows of the rule list: a rate, and the values that apply from it on. */
export class RuleEditor {
  /** @param {() => void} onEdit called after each edit */
  constructor(onEdit) {
    this.onEdit = onEdit;
    this.list = byId("rule-list");
    this.serial = 0;
    byId("rule-add").addEventListener("click", () => {
      const rates = this.read().map((rule) => rule.min_requests_per_s ?? 0);
      const row = this.#add({ min_requests_per_s: Math.max(0, ...rates) + 10, mode: "off" });
      row.querySelector("input").focus();
      onEdit();
    });
  }

  /** Shows the rules of the service. */
  fill(rules) {
    this.list.replaceChildren();
    rules.forEach((rule) => this.#add(rule));
  }

  /** Returns the rules in the format of the service; a missing rate is null. */
  read() {
    return [...this.list.children].map((row) => {
      const [rate, mode, tokens] = row.querySelectorAll("input, select");
      const rule = { min_requests_per_s: numberIn(rate) };
      if (mode.value !== "") rule.mode = mode.value;
      if (tokens.value !== "") rule.num_speculative_tokens = Number(tokens.value);
      return rule;
    });
  }

  /** Marks the input of an invalid field. @param {string} field such as rules[1].mode */
  mark(field) {
    const index = Number(/^rules\[(\d+)\]/.exec(field)?.[1] ?? -1);
    const row = this.list.children[index];
    const name = field.split(".")[1];
    const input = row?.querySelector(`[data-field="${name}"]`) ?? row?.querySelector("input");
    input?.setAttribute("aria-invalid", "true");
    return input ?? null;
  }

  #add(rule) {
    const id = (this.serial += 1);
    const rate = make("input", {
      id: `rule-rate-${id}`, type: "number", inputmode: "decimal", min: 0, step: "any",
      value: rule.min_requests_per_s, "data-field": "min_requests_per_s",
    });
    const mode = make(
      "select",
      { id: `rule-mode-${id}`, "data-field": "mode" },
      ...MODES.map(([value, text]) => make("option", { value }, text)),
    );
    mode.value = rule.mode ?? "";
    const tokens = make("input", {
      id: `rule-tokens-${id}`, type: "number", inputmode: "numeric", min: 0, max: 32, placeholder: "unchanged",
      value: rule.num_speculative_tokens, "data-field": "num_speculative_tokens",
    });
    const remove = make("button", { type: "button", class: "quiet" }, "Remove");
    const row = make(
      "li",
      {},
      make("div", {}, make("label", { for: rate.id }, "from (/s)"), rate),
      make("div", {}, make("label", { for: mode.id }, "mode"), mode),
      make("div", {}, make("label", { for: tokens.id }, "tokens"), tokens),
      remove,
    );
    const labelButton = () => {
      remove.setAttribute("aria-label", `Remove the rule from ${rate.value || "?"} requests per second`);
    };
    row.addEventListener("input", () => {
      labelButton();
      this.onEdit();
    });
    remove.addEventListener("click", () => {
      row.remove();
      byId("rule-add").focus();
      this.onEdit();
    });
    labelButton();
    this.list.append(row);
    return row;
  }
}

function numberIn(input) {
  return input.value === "" ? null : Number(input.value);
}

/** Formats a rule: "off from 50/s", "on with k = 3 from 20/s". */
export function ruleText({ min_requests_per_s: rate, mode, num_speculative_tokens: tokens }) {
  const parts = [mode ?? null, tokens === null || tokens === undefined ? null : `k = ${tokens}`];
  return `${parts.filter((part) => part !== null).join(" with ")} from ${short(rate)}/s`;
}
