// The try-it box: one answer, each token coloured by who it came from.

import { call } from "./api.js";
import { byId, make, say } from "./dom.js";
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
  byId("answer").setAttribute("aria-busy", String(isBusy));
}

async function run(signal) {
  const answer = new Answer();
  clearError();
  try {
    const response = await call("generate", { method: "POST", body: request(), signal });
    for await (const { name, data } of eventsOf(response)) answer.on(name, data);
  } catch (error) {
    if (signal.aborted) answer.tell("stopped");
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
    speculation: wantedSpeculation(byId("try-speculation").value, number("try-k")),
  };
}

function wantedSpeculation(choice, numTokens) {
  if (choice === "off") return { enabled: false };
  return choice === "on" ? { enabled: true, num_speculative_tokens: numTokens } : {};
}

function clearError() {
  say(byId("try-error"), "");
  Object.values(FIELDS).forEach((id) => byId(id).removeAttribute("aria-invalid"));
}

function showError(error) {
  say(byId("try-error"), error.message);
  const id = FIELDS[error.field];
  if (id !== undefined) {
    byId(id).setAttribute("aria-invalid", "true");
    byId(id).focus();
  }
}

/** What has come of an answer, and how fast. */
class Answer {
  constructor() {
    this.box = byId("answer");
    this.box.replaceChildren();
    this.askedAt = performance.now();
    this.firstAt = null;
    this.usage = null;
    this.ending = "";
    this.tell();
  }

  on(name, data) {
    if (name === "tokens") this.#add(data);
    if (name === "error") showError(new Error(data.message));
    if (name === "end") {
      this.ending = data.finish_reason === "length" ? "reached the most tokens" : "complete";
      if (!data.is_lossless) this.ending += `, lossy verifier ${data.verifier}`;
      this.tell(this.ending);
    }
  }

  #add({ tokens, usage }) {
    this.firstAt ??= performance.now();
    this.usage = usage;
    const isAtEnd = this.box.scrollTop + this.box.clientHeight >= this.box.scrollHeight - 4;
    for (const { text, accepted } of tokens) {
      this.box.append(make("span", { class: `token ${accepted ? "accepted" : "own"}` }, text));
    }
    if (isAtEnd) this.box.scrollTop = this.box.scrollHeight;
    this.tell();
  }

  /** One line below the buttons; screen readers hear it at the end, not at each token. */
  tell(ending = "") {
    const figures = byId("try-figures");
    figures.setAttribute("aria-live", ending === "" ? "off" : "polite");
    say(figures, [...this.#speed(), ending].filter((part) => part !== "").join(" · "));
  }

  #speed() {
    if (this.usage === null) return [];
    const tokens = this.usage.completion_tokens;
    const elapsedS = (performance.now() - this.firstAt) / 1e3;
    const parts = [`${tokens} tokens`, `first after ${short((this.firstAt - this.askedAt) / 1e3)} s`];
    if (tokens > 1 && elapsedS > 0) parts.push(`${short((tokens - 1) / elapsedS)} tokens/s`);
    if (this.usage.num_draft_tokens === 0) return [...parts, "nothing drafted"];
    const rate = percent(this.usage.num_accepted_tokens / this.usage.num_draft_tokens);
    const length = 1 + this.usage.num_accepted_tokens / this.usage.num_drafts;
    return [...parts, `acceptance rate ${rate}`, `${short(length)} tokens a draft`];
  }
}
