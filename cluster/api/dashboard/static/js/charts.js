// The charts, and the samples that they show.

import { byId, make } from "./dom.js";
import { percent, seconds, short } from "./format.js";
import { Plot } from "./plot.js";

const MAX_SPAN_S = 900;
const GAP_S = 45; // an idle service sends a sample every 30 seconds; a longer pause is shown as a gap

const PERCENTILES = ["p50", "p95", "p99"];

function percentileLines(name) {
  return PERCENTILES.map((label) => ({ label, read: (sample) => sample[name]?.[label] ?? null }));
}

const SPECS = [
  {
    title: "Requests", unit: "per second", format: short,
    lines: [{ label: "arriving", read: (sample) => sample.requests_per_s }],
  },
  {
    title: "Batch", unit: "requests", format: short,
    lines: [
      { label: "decoding", read: (sample) => sample.num_decoding },
      { label: "waiting", read: (sample) => sample.num_waiting },
    ],
  },
  {
    title: "Throughput", unit: "tokens per second", format: short,
    lines: [{ label: "generated", read: (sample) => sample.tokens_per_s }],
  },
  { title: "Time to first token", unit: "", format: seconds, lines: percentileLines("first_token_s") },
  { title: "Inter-token latency", unit: "", format: seconds, lines: percentileLines("inter_token_s") },
  {
    title: "Draft length", unit: "tokens", format: short,
    lines: [
      { label: "chosen k", read: (sample) => sample.num_chosen_tokens, steps: true },
      { label: "accepted + 1", read: (sample) => sample.mean_acceptance_length },
    ],
  },
  {
    title: "Acceptance rate", unit: "accepted / drafted", format: percent, range: [0, 1],
    lines: [{ label: "accepted", read: (sample) => sample.acceptance_rate }],
  },
  {
    title: "Estimated speed-up", unit: "vs. no speculation", format: (value) => `${short(value)}×`,
    lines: [{ label: "speed-up", read: (sample) => sample.estimated_speedup }],
  },
  {
    title: "KV cache", unit: "of all blocks", format: percent, range: [0, 1],
    lines: [{ label: "in use", read: (sample) => sample.kv_cache_usage }],
  },
];

/** The charts, and the samples of the last 15 minutes. */
export class Charts {
  constructor() {
    this.plots = SPECS.map((spec) => new Plot(spec));
    this.bars = make("ol", { class: "bars", "aria-label": "Acceptance rate by draft position" });
    const positions = make(
      "section",
      { class: "chart" },
      make("div", { class: "title" }, make("h3", {}, "Acceptance by position"), make("span", {}, "last minute")),
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

  /** Adds the history of the service, without the samples that are already loaded. */
  load(history) {
    history.forEach((sample) => this.#append(sample));
    this.draw();
  }


  draw() {
    const last = this.samples.at(-1);
    if (last === undefined || document.hidden) return;
    const from = last.time_s - this.spanS;
    const shown = withGaps(this.samples.filter((sample) => sample.time_s >= from));
    this.plots.forEach((plot) => plot.show(shown, from, last.time_s));
    this.#drawPositions(last.acceptance_by_position);
  }

  #append(sample) {
    const last = this.samples.at(-1);
    if (last !== undefined && sample.time_s <= last.time_s) return;
    this.samples.push(sample);
    while (this.samples[0].time_s < sample.time_s - MAX_SPAN_S) this.samples.shift();
  }

  #drawPositions(rates) {
    const bars = rates.map((rate, position) => {
      const bar = make("span", { class: "bar" });
      bar.style.height = `${Math.round(78 * rate)}%`;
      return make("li", {}, percent(rate), bar, position + 1);
    });
    if (bars.length === 0) bars.push(make("li", { class: "empty" }, "no draft tokens"));
    this.bars.replaceChildren(...bars);
  }
}

/** Inserts an empty sample into each gap, so that no line is drawn across it. */
function withGaps(samples) {
  return samples.flatMap((sample, index) => {
    const previous = samples[index - 1];
    const isGap = previous !== undefined && sample.time_s - previous.time_s > GAP_S;
    return isGap ? [{ time_s: previous.time_s + 1 }, sample] : [sample];
  });
}
