// Routing of tokens to the experts of a mixture (Shazeer et al. 2017).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "decoder/decoder.h"

namespace specdec {

// Rows of a batch by their experts, in caller's memory.
struct Routes {
  int32_t* experts;  // [rows, per_token], ascending in each row
  float* weights;    // [rows, per_token]
  int32_t* starts;   // [num_experts + 1], into `places`
  int32_t* places;   // [rows * per_token]: row * per_token + place, sorted by expert and row
};

// Write the indices of the `count` largest values, of equal ones the first, in ascending order.
inline void find_largest(const float* values, int64_t num_values, int64_t count,
                         int32_t* indices) {
  int64_t found = 0;
  for (int32_t index = 0; index < num_values; ++index) {  // best first
    int64_t place = found;
    for (; place > 0 && values[index] > values[indices[place - 1]]; --place) {
      if (place < count) indices[place] = indices[place - 1];
    }
    if (place < count) indices[place] = index;
    found = std::min(found + 1, count);
  }
  std::sort(indices, indices + count);
}

// Turn the logits of a row into the scores of experts in place, and return what they are divided by
// for weights that are not normalized.
inline float score_experts(const Traits& traits, float* logits) {
  if (traits.scores_by_sigmoid) {
    for (int64_t expert = 0; expert < traits.num_experts; ++expert) {
      logits[expert] = 1.0f / (1.0f + std::exp(-logits[expert]));
    }
    return 1.0f;
  }
  const float largest = *std::max_element(logits, logits + traits.num_experts);
  float sum = 0.0f;
  for (int64_t expert = 0; expert < traits.num_experts; ++expert) {
    logits[expert] = std::exp(logits[expert] - largest);
    sum += logits[expert];
  }
  return sum;
}

// Return the score of a group of experts by those of its experts: the sum of the two best
// (DeepSeek-V3, arXiv 2412.19437, section 2.1.2), or the best one (DeepSeek-V2).
inline float score_group(const Traits& traits, const float* scores, int64_t size) {
  if (!traits.adds_two_best) return *std::max_element(scores, scores + size);
  float best = -std::numeric_limits<float>::infinity(), second = best;
  for (int64_t expert = 0; expert < size; ++expert) {
    second = std::max(second, std::min(best, scores[expert]));
    best = std::max(best, scores[expert]);
  }
  return best + second;
}

// Set the scores of groups of experts that are not chosen to -inf. group_scores: [num groups];
// chosen: [num chosen groups]; both overwritten.
inline void mask_groups(const Traits& traits, float* scores, float* group_scores,
                        int32_t* chosen) {
  const int64_t count = traits.num_expert_groups, size = traits.num_experts / count;
  for (int64_t group = 0; group < count; ++group) {
    group_scores[group] = score_group(traits, scores + group * size, size);
  }
  find_largest(group_scores, count, traits.num_chosen_groups, chosen);
  for (int64_t group = 0; group < count; ++group) {
    if (std::binary_search(chosen, chosen + traits.num_chosen_groups, group)) continue;
    std::fill_n(scores + group * size, size, -std::numeric_limits<float>::infinity());
  }
}

// Temporary memory for the choice of a row, [num_experts] each.
struct ChoiceScratch {
  float *choices, *group_scores;
  int32_t* groups;
};

// Choose the experts of a row with the largest scores, of equal ones the first; write them in
// ascending order with their weights. logits: [num_experts], overwritten. bias: [num_experts], added
// to the scores in choices, or null. experts, weights: [experts_per_token].
inline void route_row(const Traits& traits, const float* bias, float* logits, ChoiceScratch scratch,
                      int32_t* experts, float* weights) {
  const int64_t count = traits.num_experts, per_token = traits.experts_per_token;
  const float sum = score_experts(traits, logits);
  const float* choices = logits;
  if (bias || traits.num_expert_groups > 1) {
    for (int64_t expert = 0; expert < count; ++expert) {
      scratch.choices[expert] = bias ? logits[expert] / sum + bias[expert] : logits[expert];
    }
    if (traits.num_expert_groups > 1) {
      mask_groups(traits, scratch.choices, scratch.group_scores, scratch.groups);
    }
    choices = scratch.choices;
  }
  find_largest(choices, count, per_token, experts);
  float chosen = 0.0f;
  for (int64_t place = 0; place < per_token; ++place) chosen += logits[experts[place]];
  const float factor = traits.routing_scale / (traits.normalizes_experts ? chosen : sum);
  for (int64_t place = 0; place < per_token; ++place) {
    weights[place] = logits[experts[place]] * factor;
  }
}

// Sort the rows by expert (counting sort).
inline void group_rows(const Routes& routes, int64_t rows, int64_t num_experts,
                       int64_t per_token) {
  std::fill(routes.starts, routes.starts + num_experts + 1, 0);
  const int64_t count = rows * per_token;
  for (int64_t place = 0; place < count; ++place) ++routes.starts[routes.experts[place] + 1];
  for (int64_t expert = 0; expert < num_experts; ++expert) {
    routes.starts[expert + 1] += routes.starts[expert];
  }
  // Each start moves to the next one while its places are filled, and back.
  for (int64_t place = 0; place < count; ++place) {
    routes.places[routes.starts[routes.experts[place]]++] = int32_t(place);
  }
  for (int64_t expert = num_experts; expert > 0; --expert) {
    routes.starts[expert] = routes.starts[expert - 1];
  }
  routes.starts[0] = 0;
}

}  // namespace specdec
