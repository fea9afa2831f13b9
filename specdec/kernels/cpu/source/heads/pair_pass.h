// One pass of a draft head over a batch of pairs.
#pragma once

#include <algorithm>
#include <cstdint>

#include "base/arena.h"
#include "base/elementwise.h"
#include "decoder/forward_pass.h"
#include "heads/draft_head.h"

namespace specdec {

// All threads of a team call its steps in the same order.
class PairPass {
 public:
  // memory: null to count the bytes only.
  PairPass(const DraftHead& head, const Batch& batch, KvCache cache, void* memory, int num_threads)
      : head_(head), num_tokens_(batch.num_tokens), arena_(memory),
        inputs_(arena_.allocate_floats(num_input_floats())),
        pass_(head.decoder, batch, cache, arena_.rest(), num_threads) {}

  int64_t memory_bytes() const { return arena_.used() + pass_.memory_bytes(); }
  bool has_failed() const { return pass_.has_failed(); }

  // Write the KV of the pairs, and compute their states. features: [num_tokens, hidden_size], if
  // the head reads them.
  void run(const float* features, ThreadTeam team) {
    pass_.embed(team);
    if (!head_.reads_features) {
      pass_.run_layers(nullptr, team);
      return;
    }
    team.parallel_for_ranges(num_tokens_, [&](Range own) {
      for (int64_t token = own.begin; token < own.end; ++token) {
        join(token, features + token * hidden_size());
      }
    });
    if (head_.fusion.packed) {
      pass_.project(head_.fusion, inputs_ + head_.first_input, 2 * hidden_size(), team);
    }
    pass_.run_layers(head_.fusion.packed ? nullptr : inputs_, team);
  }

  // Write the state after a pair: what the output head reads, and the feature of the next pair, if
  // the head reads them. hidden, feature: [hidden_size].
  void write_state(int64_t token, float* hidden, float* feature) {
    if (!head_.reads_features) {
      pass_.write_hidden_row(token, hidden);
      return;
    }
    const float* output = pass_.residual() + token * hidden_size();
    normalize(output, head_.decoder.final_norm.weight, hidden);
    std::copy_n(head_.returns_normed ? hidden : output, hidden_size(), feature);
  }

 private:
  const DraftHead& head_;
  int64_t num_tokens_;
  Arena arena_;
  float* inputs_;  // [num_tokens, 2, hidden_size], normalized; empty without features
  ForwardPass pass_;

  int64_t hidden_size() const { return head_.decoder.hidden_size; }
  int64_t num_input_floats() const {
    return head_.reads_features ? num_tokens_ * 2 * hidden_size() : 0;
  }

  void normalize(const float* x, const float* weight, float* to) const {
    if (weight) {
      rms_norm(x, weight, head_.decoder.norm_eps, hidden_size(), to);
    } else {
      std::copy_n(x, hidden_size(), to);
    }
  }

  // Write both halves of a pair's input, and the residual stream.
  void join(int64_t token, const float* feature) {
    const int64_t size = hidden_size();
    float* input = inputs_ + token * 2 * size;
    float* normed_embedding = input + (head_.is_feature_first ? size : 0);
    float* normed_feature = input + (head_.is_feature_first ? 0 : size);
    float* residual = pass_.residual() + token * size;  // the embedding
    normalize(residual, head_.embedding_norm, normed_embedding);
    normalize(feature, head_.feature_norm, normed_feature);
    std::copy_n(head_.adds_to_normed ? normed_feature : feature, size, residual);
  }
};

}  // namespace specdec
