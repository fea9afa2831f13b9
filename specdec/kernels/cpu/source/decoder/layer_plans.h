// Plans of attention for the layers of a decoder.
#pragma once

#include <algorithm>
#include <vector>

#include "attention/attention.h"
#include "decoder/decoder.h"

namespace specdec {

inline Visibility visibility_in(const Layer& layer) {
  return {layer.window, layer.sees_ahead != 0};
}

// Return one plan for each distinct visibility of the layers.
inline std::vector<AttentionPlan> make_plans(const Decoder& model, const Batch& batch,
                                             int num_threads) {
  std::vector<AttentionPlan> plans;
  const AttentionShape shape = {
      model.num_heads,
      model.num_kv_heads,
      model.heads_per_kv,
      model.first_in_group,
      model.head_dim,
      model.latent.rank ? model.latent.rank : model.head_dim,
      model.first_position,
      model.traits.attention_scale,
      model.traits.attention_softcap};
  for (int64_t layer = 0; layer < model.num_layers; ++layer) {
    if (model.layers[layer].recurrent) continue;
    const Visibility visibility = visibility_in(model.layers[layer]);
    const auto has_it = [&](const AttentionPlan& plan) { return plan.visibility() == visibility; };
    if (std::none_of(plans.begin(), plans.end(), has_it)) {
      plans.emplace_back(batch, shape, visibility, num_threads);
    }
  }
  return plans;
}

}  // namespace specdec
