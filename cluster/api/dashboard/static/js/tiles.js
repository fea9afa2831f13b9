// The tiles with the current values.

import { byId, make, setText } from "./dom.js";
import { NOTHING, percent, seconds, short } from "./format.js";

const times = (value) => (value === null ? NOTHING : `${short(value)}×`);

/** Title, value, unit and second line of each tile, from the latest sample. */
const TILES = [
  ["Requests", (now) => short(now.requests_per_s), "/s", (now) => `${short(now.num_replicas)} replica${now.num_replicas === 1 ? "" : "s"}`],
  ["Decoding", (now) => short(now.num_decoding), "", (now) => `${short(now.num_waiting)} waiting`],
  ["Throughput", (now) => short(now.tokens_per_s), "tokens/s", () => "all replicas"],
  ["First token", (now) => seconds(now.first_token_s?.p50), "", (now) => `p95 ${seconds(now.first_token_s?.p95)}`],
  ["Inter-token", (now) => seconds(now.inter_token_s?.p50), "", (now) => `p95 ${seconds(now.inter_token_s?.p95)}`],
  ["Draft tokens", (now) => short(now.num_chosen_tokens), "per step", (now) => `${short(now.mean_acceptance_length)} tokens/draft`],
  ["Acceptance", (now) => percent(now.acceptance_rate), "", (now) => `speed-up ${times(now.estimated_speedup)}`],
  ["KV cache", (now) => percent(now.kv_cache_usage), "", () => "in use"],
];

export class Tiles {
  constructor() {
    this.tiles = TILES.map(([title, , unit]) => {
      const value = make("span", {}, NOTHING);
      const more = make("p", { class: "more" }, NOTHING);
      const line = make("p", { class: "value" }, value, " ", make("span", { class: "unit" }, unit));
      byId("tiles").append(make("div", { class: "tile" }, make("h2", {}, title), line, more));
      return { value, more };
    });
  }

  show(sample) {
    TILES.forEach(([, value, , more], index) => {
      setText(this.tiles[index].value, value(sample));
      setText(this.tiles[index].more, more(sample));
    });
  }
}
