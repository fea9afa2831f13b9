// The tiles with the current values.

import { byId, make, setText } from "./dom.js";
import { NOTHING, bytes, percent, seconds, short } from "./format.js";

function ofDrafts({ mean_draft_length: length }) {
  return length === null ? "no drafts" : `of ${short(length)} tokens/draft`;
}

function memoryShares({ memory }) {
  if (memory === null) return NOTHING;
  const gpu = memory.gpu_bytes > 0 ? `GPU ${percent(memory.gpu_used_bytes / memory.gpu_bytes)}` : "no GPU";
  return `node ${percent(memory.node_usage)}, ${gpu}`;
}

/** Title, value, unit and second line of each tile, from the latest sample. */
const TILES = [
  ["Requests", (now) => short(now.requests_per_s), "/s", (now) => `${short(now.num_running)} running`],
  ["Decoding", (now) => short(now.num_decoding), "", (now) => `${short(now.num_waiting)} waiting`],
  ["Throughput", (now) => short(now.tokens_per_s), "tokens/s", () => "all replicas"],
  ["First token", (now) => seconds(now.first_token_s?.p50), "", (now) => `p95 ${seconds(now.first_token_s?.p95)}`],
  ["Inter-token", (now) => seconds(now.inter_token_s?.p50), "", (now) => `p95 ${seconds(now.inter_token_s?.p95)}`],
  ["Acceptance", (now) => percent(now.acceptance_rate), "", ofDrafts],
  ["KV cache", (now) => percent(now.kv_cache_usage), "", () => "in use"],
  ["Memory", (now) => bytes(now.memory?.process_bytes), "", memoryShares],
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
