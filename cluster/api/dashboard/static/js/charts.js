// Which charts there are, and the samples behind them.

import { byId, make } from "./dom.js";
import { percent, seconds, short } from "./format.js";
import { Plot } from "./plot.js";

const LONGEST_S = 900;
const GAP_S = 45; // at rest a point comes every 30 seconds; a longer pause is shown as one

const PERCENTILES = ["p50", "p95", "p99"];

function percentilesOf(name) {
  return PERCENTILES.map((label) => ({ label, read: (each) => each[name]?.[label] ?? null }));
}

const SPECS = [
  {
    title: "Requests", unit: "per second", format: short,
    lines: [{ label: "arriving", read: (each) => each.requests_per_s }],
  },
  {
    title: "Batch", unit: "requests", format: short,
    lines: [
      { label: "decoding", read: (each) => each.num_decoding },
      { label: "waiting", read: (each) => each.num_waiting },
    ],
  },
  {
    title: "Throughput", unit: "tokens per second", format: short,
    lines: [{ label: "generated", read: (each) => each.tokens_per_s }],
  },
  { title: "Time to first token", unit: "", format: seconds, lines: percentilesOf("first_token_s") },
  { title: "Inter-token latency", unit: "", format: seconds, lines: percentilesOf("inter_token_s") },
  {
    title: "Draft length", unit: "tokens", format: short,
    lines: [
      { label: "chosen k", read: (each) => each.num_chosen_tokens, steps: true },
      { label: "accepted + 1", read: (each) => each.mean_acceptance_length },
    ],
  },
  {
    title: "Acceptance rate", unit: "accepted of drafted", format: percent, range: [0, 1],
    lines: [{ label: "accepted", read: (each) => each.acceptance_rate }],
  },
  {
    title: "Estimated speed-up", unit: "over no speculation", format: (value) => `${short(value)}×`,
    lines: [{ label: "speed-up", read: (each) => each.estimated_speedup }],
  },
  {
    title: "KV cache", unit: "of all blocks", format: percent, range: [0, 1],
    lines: [{ label: "in use", read: (each) => each.kv_cache_usage }],
  },
];

/** The charts, and the figures of the last quarter of an hour. */
export class Charts {
  constructor() {
    this.plots = SPECS.map((spec) => new Plot(spec));
    this.bars = make("ol", { class: "bars", "aria-label": "Acceptance by position of the draft" });
    const positions = make(
      "section",
      { class: "chart" },
      make("div", { class: "title" }, make("h3", {}, "Acceptance by position"), make("span", {}, "the last minute")),
      this.bars,
      make("p", { class: "keys" }),
    );
    byId("charts").append(...this.plots.map((plot) => plot.element), positions);
    this.plots.forEach((plot) => plot.restyle());
    new ResizeObserver(() => this.plots.forEach((plot) => plot.resize())).observe(byId("charts"));
    this.samples = [];
    this.spanS = 300;
    for (const choice of document.querySelectorAll('input[name="span"]')) {
      choice.addEventListener("change", () => {
        this.spanS = Number(choice.value);
        this.draw();
      });
    }
  }

  restyle() {
    this.plots.forEach((plot) => plot.restyle());
    this.draw();
  }

  /** Takes over what the service remembers; what is known already is left out. */
  load(history) {
    history.forEach((figures) => this.#append(figures));
    this.draw();
  }

  add(figures) {
    this.#append(figures);
    this.draw();
  }

  draw() {
    const last = this.samples.at(-1);
    if (last === undefined || document.hidden) return;
    const from = last.time_s - this.spanS;
    const shown = withGaps(this.samples.filter((each) => each.time_s >= from));
    this.plots.forEach((plot) => plot.show(shown, from, last.time_s));
    this.#drawPositions(last.acceptance_by_position);
  }

  #append(figures) {
    const last = this.samples.at(-1);
    if (last !== undefined && figures.time_s <= last.time_s) return;
    this.samples.push(figures);
    while (this.samples[0].time_s < figures.time_s - LONGEST_S) this.samples.shift();
  }

  #drawPositions(rates) {
    const bars = rates.map((rate, position) => {
      const bar = make("span", { class: "bar" });
      bar.style.height = `${Math.round(78 * rate)}%`;
      return make("li", {}, percent(rate), bar, position + 1);
    });
    if (bars.length === 0) bars.push(make("li", { class: "empty" }, "nothing was drafted"));
    this.bars.replaceChildren(...bars);
  }
}

/** Puts an empty sample where samples are missing, so that no line is drawn over it. */
function withGaps(samples) {
  return samples.flatMap((each, index) => {
    const before = samples[index - 1];
    const isGap = before !== undefined && each.time_s - before.time_s > GAP_S;
    return isGap ? [{ time_s: before.time_s + 1 }, each] : [each];
  });
}
