// The figures of the moment, in words and large.

import { byId, make, say } from "./dom.js";
import { NOTHING, percent, seconds, short } from "./format.js";

const times = (value) => (value === null ? NOTHING : `${short(value)}×`);

/** Title, value, unit and a second line, each read from the latest figures. */
const TILES = [
  ["Requests", (now) => short(now.requests_per_s), "/s", (now) => `${short(now.num_replicas)} replica${now.num_replicas === 1 ? "" : "s"}`],
  ["Decoding", (now) => short(now.num_decoding), "", (now) => `${short(now.num_waiting)} waiting`],
  ["Throughput", (now) => short(now.tokens_per_s), "tokens/s", () => "all replicas"],
  ["First token", (now) => seconds(now.first_token_s?.p50), "", (now) => `p95 ${seconds(now.first_token_s?.p95)}`],
  ["Between tokens", (now) => seconds(now.inter_token_s?.p50), "", (now) => `p95 ${seconds(now.inter_token_s?.p95)}`],
  ["Draft tokens", (now) => short(now.num_chosen_tokens), "a step", (now) => `${short(now.mean_acceptance_length)} tokens a draft`],
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

  show(figures) {
    TILES.forEach(([, value, , more], index) => {
      say(this.tiles[index].value, value(figures));
      say(this.tiles[index].more, more(figures));
    });
  }
}
