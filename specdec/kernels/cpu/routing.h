// Routing of tokens to the experts of a mixture (Shazeer et al. 2017).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace specdec {

// Rows of a batch by their experts, in caller's memory.
struct Routes {
  int32_t* experts;  // [rows, per_token], ascending in each row
  float* weights;    // [rows, per_token]
  int32_t* starts;   // [num_experts + 1], into `places`
  int32_t* places;   // [rows * per_token]: row * per_token + place, sorted by expert and row
};

// Choose the experts of a row with the largest probabilities, of equal ones the first; write them in
// ascending order with their weights. logits: [num_experts], overwritten. experts, weights:
// [per_token]. normalizes: whether the weights have the sum 1.
inline void route_row(float* logits, int64_t num_experts, int64_t per_token, bool normalizes,
                      int32_t* experts, float* weights) {
  const float largest = *std::max_element(logits, logits + num_experts);
  float sum = 0.0f;
  for (int64_t expert = 0; expert < num_experts; ++expert) {
    logits[expert] = std::exp(logits[expert] - largest);
    sum += logits[expert];
  }
  int64_t count = 0;
  for (int32_t expert = 0; expert < num_experts; ++expert) {  // best first
    int64_t place = count;
    for (; place > 0 && logits[expert] > logits[experts[place - 1]]; --place) {
      if (place < per_token) experts[place] = experts[place - 1];
    }
    if (place < per_token) experts[place] = expert;
    count = std::min(count + 1, per_token);
  }
  std::sort(experts, experts + per_token);
  float chosen = 0.0f;
  for (int64_t place = 0; place < per_token; ++place) chosen += logits[experts[place]];
  const float factor = 1.0f / (normalizes ? chosen : sum);
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
