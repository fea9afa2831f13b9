// The try-it box: streams one output, and marks accepted draft tokens.

import { call } from "./api.js";
import { byId, make, setText } from "./dom.js";
import { eventsOf } from "./events.js";
import { percent, short } from "./format.js";

const FIELDS = { prompt: "prompt", max_tokens: "try-max", temperature: "try-temperature", seed: "try-seed", "speculation.num_speculative_tokens": "try-k" };

export function startTryIt() {
  let controller = null;
  const speculation = byId("try-speculation");
  speculation.addEventListener("change", () => {
    byId("try-k").disabled = speculation.value !== "on";
  });
  byId("try-stop").addEventListener("click", () => controller?.abort());
  byId("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) byId("try").requestSubmit();
  });
  byId("try").addEventListener("submit", async (event) => {
    event.preventDefault();
    if (controller !== null) return;
    controller = new AbortController();
    setBusy(true);
    try {
      await run(controller.signal);
    } finally {
      controller = null;
      setBusy(false);
    }
  });
}

function setBusy(isBusy) {
  byId("try-start").disabled = isBusy;
  byId("try-stop").disabled = !isBusy;
  byId("output").setAttribute("aria-busy", String(isBusy));
}

async function run(signal) {
  const output = new Output();
  clearError();
  try {
    const response = await call("generate", { method: "POST", body: request(), signal });
    for await (const { name, data } of eventsOf(response)) output.onEvent(name, data);
  } catch (error) {
    if (signal.aborted) output.showFigures("stopped");
    else showError(error);
  }
}

function request() {
  const number = (id) => (byId(id).value === "" ? null : Number(byId(id).value));
  return {
    prompt: byId("prompt").value,
    as_chat: byId("try-chat").checked,
    max_tokens: number("try-max"),
    temperature: number("try-temperature"),
    seed: number("try-seed"),
    speculation: speculationOptions(byId("try-speculation").value, number("try-k")),
  };
}

function speculationOptions(choice, numTokens) {
  if (choice === "off") return { enabled: false };
  return choice === "on" ? { enabled: true, num_speculative_tokens: numTokens } : {};
}

function clearError() {
  setText(byId("try-error"), "");
  Object.values(FIELDS).forEach((id) => byId(id).removeAttribute("aria-invalid"));
}

function showError(error) {
  setText(byId("try-error"), error.message);
  const id = FIELDS[error.field];
  if (id !== undefined) {
    byId(id).setAttribute("aria-invalid", "true");
    byId(id).focus();
  }
}

/** The output of a request, with its speed. */
class Output {
  constructor() {
    this.box = byId("output");
    this.box.replaceChildren();
    this.startedAt = performance.now();
    this.firstAt = null;
    this.usage = null;
    this.showFigures();
  }

  onEvent(name, data) {
    if (name === "tokens") this.#add(data);
    if (name === "error") showError(new Error(data.message));
    if (name === "end") {
      const status = data.finish_reason === "length" ? "reached max tokens" : "complete";
      this.showFigures(data.is_lossless ? status : `${status}, lossy verifier ${data.verifier}`);
    }
  }

  #add({ tokens, usage }) {
    this.firstAt ??= performance.now();
    this.usage = usage;
    const isAtEnd = this.box.scrollTop + this.box.clientHeight >= this.box.scrollHeight - 4;
    for (const { text, accepted } of tokens) {
      this.box.append(make("span", { class: `token ${accepted ? "accepted" : "target"}` }, text));
    }
    if (isAtEnd) this.box.scrollTop = this.box.scrollHeight;
    this.showFigures();
  }

  /** Updates the line below the buttons; screen readers announce it at the end, not for each token. */
  showFigures(status = "") {
    const figures = byId("try-figures");
    figures.setAttribute("aria-live", status === "" ? "off" : "polite");
    setText(figures, [...this.#speed(), status].filter((part) => part !== "").join(" · "));
  }

  #speed() {
    if (this.usage === null) return [];
    const tokens = this.usage.completion_tokens;
    const elapsedS = (performance.now() - this.firstAt) / 1e3;
    const parts = [`${tokens} tokens`, `first after ${short((this.firstAt - this.startedAt) / 1e3)} s`];
    if (tokens > 1 && elapsedS > 0) parts.push(`${short((tokens - 1) / elapsedS)} tokens/s`);
    if (this.usage.num_draft_tokens === 0) return [...parts, "no draft tokens"];
    const rate = percent(this.usage.num_accepted_tokens / this.usage.num_draft_tokens);
    const length = 1 + this.usage.num_accepted_tokens / this.usage.num_drafts;
    return [...parts, `acceptance rate ${rate}`, `acceptance length ${short(length)}`];
  }
}
