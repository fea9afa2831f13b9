// The charts, and the samples that they show.

import { byId, make } from "./dom.js";
import { percent, seconds, short } from "./format.js";
import { Plot } from "./plot.js";

const MAX_SPAN_S = 900;
const GAP_S = 45; // an idle service sends a sample every 30 seconds; a longer pause is shown as a gap
const LAST_MINUTE = "in the last minute";

const PERCENTILES = ["p50", "p95", "p99"];

function percentileLines(name) {
  return PERCENTILES.map((label) => ({ label, read: (sample) => sample[name]?.[label] }));
}

const share = (part, whole) => (whole > 0 ? part / whole : null);

/** Values about the seconds before a sample; those with `holds` are of its moment. */
const SPECS = [
  {
    title: "Requests", unit: "per second", format: short,
    lines: [{ label: "arriving", read: (sample) => sample.arrivals_per_s }],
  },
  {
    title: "Batch", unit: "requests", format: short,
    lines: [
      { label: "decoding", read: (sample) => sample.num_decoding, holds: true },
      { label: "waiting", read: (sample) => sample.num_waiting, holds: true },
    ],
  },
  {
    title: "Throughput", unit: "tokens per second", format: short,
    lines: [{ label: "generated", read: (sample) => sample.generated_per_s }],
  },
  {
    title: "Failed requests", unit: LAST_MINUTE, format: short,
    lines: [
      { label: "errors", read: (sample) => sample.num_errors },
      { label: "429", read: (sample) => sample.num_rejected },
      { label: "client", read: (sample) => sample.num_client_errors },
    ],
  },
  { title: "Time to first token", unit: "", format: seconds, lines: percentileLines("first_token_s") },
  { title: "Inter-token latency", unit: "", format: seconds, lines: percentileLines("inter_token_s") },
  {
    title: "Speed-up", unit: "vs. no drafts, estimated", format: (value) => `${short(value)}×`,
    lines: [{ label: "speed-up", read: (sample) => sample.speedup }],
  },
  {
    title: "Drafts", unit: "share", format: percent, range: [0, 1],
    lines: [
      { label: "steps with drafts", read: (sample) => share(sample.num_drafted_steps, sample.num_steps) },
      { label: "tokens accepted", read: (sample) => sample.acceptance_rate },
    ],
  },
  {
    title: "Tokens per draft", unit: "", format: short,
    lines: [
      { label: "drafted", read: (sample) => sample.mean_draft_length },
      { label: "accepted + 1", read: (sample) => sample.mean_acceptance_length },
    ],
  },
  {
    title: "Memory", unit: "in use", format: percent, range: [0, 1],
    lines: [
      { label: "KV", read: (sample) => sample.kv_cache_usage, holds: true },
      { label: "node", read: (sample) => sample.memory?.node_usage, holds: true },
      { label: "GPU", read: ({ memory }) => share(memory?.gpu_used_bytes, memory?.gpu_bytes), holds: true },
    ],
  },
];

/** The charts, and the samples of the last 15 minutes. */
export class Charts {
  constructor() {
    this.plots = SPECS.map((spec) => new Plot(spec));
    this.bars = make("ol", { class: "bars", tabindex: 0, "aria-label": "Acceptance by draft position" });
    const positions = make(
      "section",
      { class: "chart" },
      make("div", { class: "title" }, make("h3", {}, "Acceptance by position"), make("span", {}, LAST_MINUTE)),
      this.bars,
      make("p", { class: "keys" }, "of tokens drafted after accepted ones alone"),
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

  /** The latest sample; undefined before the first. */
  get last() {
    return this.samples.at(-1);
  }

  /** Restarts within the samples; another control plane counts from 0. */
  get numRestarts() {
    return this.last === undefined ? 0 : Math.max(0, this.last.num_restarts - this.samples[0].num_restarts);
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
    const { last } = this;
    if (last === undefined || document.hidden) return;
    const from = last.time_s - this.spanS;
    const shown = withGaps(this.samples.filter((sample) => sample.time_s >= from));
    this.plots.forEach((plot) => plot.show(shown, from, last.time_s));
    this.#drawPositions(last.reached_by_position, last.accepted_by_position);
  }

  #append(sample) {
    const last = this.samples.at(-1);
    if (last !== undefined && sample.time_s <= last.time_s) return;
    this.samples.push(sample);
    while (this.samples[0].time_s < sample.time_s - MAX_SPAN_S) this.samples.shift();
  }

  /** Shows acceptance given that all tokens before were accepted, with the counts. */
  #drawPositions(reached, accepted) {
    const bars = reached.filter((count) => count > 0).map((count, index) => {
      const rate = accepted[index] / count;
      const bar = make("span", { class: "bar" });
      bar.style.width = `${100 * rate}%`;
      const counts = `${short(accepted[index])} of ${short(count)}`;
      return make("li", {}, make("span", {}, index + 1), make("span", { class: "track" }, bar), make("b", {}, percent(rate)), make("span", {}, counts));
    });
    if (bars.length === 0) bars.push(make("li", { class: "empty" }, "no draft tokens"));
    this.bars.replaceChildren(...bars);
  }
}

/** Inserts empty samples at both ends of each gap, so that no line is drawn across it. */
function withGaps(samples) {
  return samples.flatMap((sample, index) => {
    const previous = samples[index - 1];
    const isGap = previous !== undefined && sample.time_s - previous.time_s > GAP_S;
    return isGap ? [{ time_s: previous.time_s + 1 }, { time_s: sample.time_s - 1 }, sample] : [sample];
  });
}
