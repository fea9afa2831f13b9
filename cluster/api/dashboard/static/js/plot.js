// One time series chart: uPlot, with its own legend of constant size.

import { make, makeSvg, setText } from "./dom.js";
import { NOTHING, clock } from "./format.js";

const HEIGHT = 132;
const TICKS_S = [10, 15, 30, 60, 120, 180, 300];
const DASHES = { 1: [], 2: [7, 4], 3: [2, 3] };

/**
 * @typedef {object} Line
 * @property {string} label
 * @property {(sample: object) => number | null} read
 * @property {boolean} [holds] a value holds until the next one, not since the one before
 */

/** A chart in #charts, with one to three lines of the same unit. */
export class Plot {
  /**
   * @param {{title: string, unit: string, lines: Line[], format: (value: number) => string,
   *   range?: [number, number]}} spec range: fixed range of the values, if any
   */
  constructor(spec) {
    this.spec = spec;
    this.values = spec.lines.map(() => make("b", {}, NOTHING));
    this.plot = make("div", { class: "plot", "aria-hidden": "true" });
    this.element = make(
      "section",
      { class: "chart", "aria-label": spec.title },
      make("div", { class: "title" }, make("h3", {}, spec.title), make("span", {}, spec.unit)),
      this.plot,
      make("p", { class: "keys" }, ...spec.lines.map((line, index) => this.#key(line, index))),
    );
    this.chart = null;
  }

  #key(line, index) {
    const stroke = { class: `series-${index + 1}`, "stroke-width": 2, "stroke-dasharray": DASHES[index + 1].join(" ") };
    const mark = makeSvg("svg", { viewBox: "0 0 18 8", "aria-hidden": "true" }, makeSvg("line", { x1: 0, x2: 18, y1: 4, y2: 4, ...stroke }));
    return make("span", { class: "key" }, mark, line.label, " ", this.values[index]);
  }

  /** Redraws the chart in the colours of the current theme. */
  restyle() {
    const data = this.chart?.data;
    this.chart?.destroy();
    this.chart = new uPlot(this.#options(), data ?? [[], ...this.spec.lines.map(() => [])], this.plot);
  }

  /**
   * Shows the samples of a time range.
   * @param {object[]} samples oldest first
   * @param {number} from Unix time in seconds
   * @param {number} to Unix time in seconds
   */
  show(samples, from, to) {
    // uPlot draws lines across undefined values, and gaps where they are null.
    const columns = this.spec.lines.map((line) => samples.map((sample) => line.read(sample) ?? null));
    this.chart.batch(() => {
      this.chart.setData([samples.map((sample) => sample.time_s), ...columns], false);
      this.chart.setScale("x", { min: from, max: to });
    });
    if (this.chart.cursor.idx === null || this.chart.cursor.idx === undefined) this.#showValues(samples.length - 1);
  }

  resize() {
    const width = this.plot.clientWidth;
    if (width > 0 && width !== this.chart.width) this.chart.setSize({ width, height: HEIGHT });
  }

  #showValues(index) {
    this.spec.lines.forEach((_, line) => {
      const value = this.chart.data[line + 1][index];
      setText(this.values[line], value === null || value === undefined ? NOTHING : this.spec.format(value));
    });
  }

  #options() {
    const axis = {
      stroke: this.#colour("--muted"),
      grid: { stroke: this.#colour("--line"), width: 1 },
      ticks: { show: false },
      font: `11px ${getComputedStyle(this.element).fontFamily}`,
    };
    return {
      width: Math.max(this.plot.clientWidth, 100),
      height: HEIGHT,
      legend: { show: false },
      padding: [8, 26, 0, 0],
      cursor: { y: false, sync: { key: "specdec" }, points: { size: 6 }, drag: { setScale: false } },
      scales: { x: { time: true }, y: { range: this.spec.range ?? fromZero } },
      axes: [
        { ...axis, size: 22, space: 64, incrs: TICKS_S, values: formatTicks },
        { ...axis, size: 46, space: 28, values: (_, splits) => splits.map((split) => this.spec.format(split)) },
      ],
      series: [{}, ...this.spec.lines.map((line, index) => this.#series(line, index))],
      hooks: {
        setCursor: [(chart) => this.#showValues(chart.cursor.idx ?? chart.data[0].length - 1)],
      },
    };
  }

  /** Resolves a custom property of the theme, which a canvas does not support, to a colour. */
  #colour(name) {
    this.plot.style.color = `var(${name})`;
    return getComputedStyle(this.plot).color;
  }

  #series(line, index) {
    return {
      label: line.label,
      stroke: this.#colour(`--series-${index + 1}`),
      width: 1.5,
      dash: DASHES[index + 1],
      points: { show: false },
      spanGaps: false,
      paths: uPlot.paths.stepped({ align: line.holds ? 1 : -1 }), // a slope would be no measurement
    };
  }
}

/** Hours and minutes, with seconds if ticks are less than a minute apart. */
function formatTicks(_chart, splits, _axis, _space, incrementS) {
  return splits.map((split) => (incrementS < 60 ? clock(split) : clock(split).slice(0, 5)));
}

/** The range from zero to 10 % above the largest value. */
function fromZero(_, low, high) {
  return [0, high > 0 ? 1.1 * high : 1];
}
