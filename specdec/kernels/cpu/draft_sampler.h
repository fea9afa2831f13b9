// Sampling of one draft token per row of logits, with the noise of the target's tokens.
#pragma once

#include "sampler.h"

namespace specdec::sampling {

// Samples rows of a draft vocabulary, a subset of the target's tokens in ascending order.
class DraftSampler : public Sampler {
 public:
  // Sample a draft token with the noise of the target's tokens; rounding may decide. Return the
  // target's token, and its score, which is comparable over the shards of a vocabulary where
  // top_k, top_p and min_score are off. A row with has_nan has no token.
  // row: logits of draft tokens [num_tokens]; target_tokens: [num_tokens], ascending.
  template <typename T>
  Argmax draft(const SampleParams& params, const T* row, const int32_t* target_tokens,
               int64_t num_tokens) {
    if (params.temperature == 0.0f) {
      const Argmax best = argmax_of(row, num_tokens);
      return {best.value, target_tokens[best.token], best.has_nan};
    }
    if (!read(row, num_tokens)) return {-kInfinity, target_tokens[0], true};
    scale(params.temperature);
    float threshold;
    find_threshold(params, num_tokens, threshold);
    group_by_chunk(target_tokens, num_tokens);
    const GumbelKey key = {params.seed, params.choice, params.position};
    const TopTwo top = best_of_groups(key, threshold, target_tokens);
    return {top.best + max_logit_ / params.temperature, static_cast<int32_t>(top.token), false};
  }

 private:
  // Consecutive draft tokens whose target tokens are in one chunk.
  struct Group {
    int64_t begin = 0, end = 0;
  };

  // Group draft tokens by the target's chunks, and replace the maxima of chunks by those of groups.
  void group_by_chunk(const int32_t* target_tokens, int64_t num_tokens) {
    const int64_t num_chunks = num_chunks_of(target_tokens[num_tokens - 1] + 1);
    groups_.assign(num_chunks, {});
    chunk_maxima_.assign((num_chunks + kFloatLanes - 1) / kFloatLanes * kFloatLanes, -kInfinity);
    for (int64_t begin = 0; begin < num_tokens;) {
      const int64_t chunk = target_tokens[begin] / kChunkTokens;
      const int64_t last = (chunk + 1) * kChunkTokens;
      float best = scores_[begin];
      int64_t end = begin + 1;
      for (; end < num_tokens && target_tokens[end] < last; ++end) {
        best = std::max(best, scores_[end]);
      }
      groups_[chunk] = {begin, end};
      chunk_maxima_[chunk] = best;
      begin = end;
    }
  }

  // Return the draft token with the largest perturbed score above `threshold`; `token` is the
  // target's.
  TopTwo best_of_groups(const GumbelKey& key, float threshold, const int32_t* target_tokens) {
    const float least = std::max(threshold, -kGumbelRange);
    float lower_bound = -kInfinity;
    candidates_.clear();
    for (int64_t first = 0; first < int64_t(chunk_maxima_.size()); first += kFloatLanes) {
      const IntLanes is_included = load_floats(&chunk_maxima_[first]) >= least;
      if (!any(is_included)) continue;
      const ApproxChunkMax approx = approx_chunk_max(key, static_cast<uint32_t>(first));
      for (int64_t i = 0; i < kFloatLanes; ++i) {
        if (!is_included[i]) continue;
        const int64_t chunk = first + i, offset = approx.offsets[i];
        const float limit = chunk_maxima_[chunk] + approx.gumbel[i];
        if (limit < lower_bound - kBoundTolerance) continue;
        candidates_.push_back({chunk, offset, limit});
        const int64_t token = find_in_group(chunk, offset, target_tokens);
        if (token >= 0 && scores_[token] >= threshold) {
          lower_bound = std::max(lower_bound, scores_[token] + approx.gumbel[i]);
        }
      }
    }
    TopTwo top;
    for (const Candidate& candidate : candidates_) {
      if (candidate.limit >= std::max(lower_bound, top.best) - kBoundTolerance) {
        score_group(key, threshold, candidate, target_tokens, top);
      }
    }
    return top;
  }

  // Return the draft token of an offset in a target's chunk, or -1.
  int64_t find_in_group(int64_t chunk, int64_t offset, const int32_t* target_tokens) const {
    const Group group = groups_[chunk];
    const int32_t* begin = target_tokens + group.begin;
    const int32_t* end = target_tokens + group.end;
    const int32_t* found = std::find(begin, end, chunk * kChunkTokens + offset);
    return found == end ? -1 : group.begin + (found - begin);
  }

  // Compute the perturbed scores of a group's tokens above `threshold`, and update the top two.
  void score_group(const GumbelKey& key, float threshold, const Candidate& candidate,
                   const int32_t* target_tokens, TopTwo& top) const {
    const auto chunk = static_cast<uint32_t>(candidate.chunk);
    const uint32_t bits_of_chunk = key.random_words(kFirstChunkCounter + chunk).w0;
    const float smallest = exponential_of_bits(bits_of_chunk) / kChunkTokens;
    for (int64_t i = groups_[candidate.chunk].begin; i < groups_[candidate.chunk].end; ++i) {
      if (!(scores_[i] >= threshold)) continue;
      const int64_t token = target_tokens[i];
      float variable = smallest;
      if (token % kChunkTokens != candidate.offset) {
        const Words words = key.random_words(static_cast<uint32_t>(token / kTokensPerCall));
        const uint32_t bits[] = {words.w0, words.w1, words.w2, words.w3};
        variable += exponential_of_bits(bits[token % kTokensPerCall]);
      }
      top.add(scores_[i] - std::log(variable), token);
    }
  }

  std::vector<Group> groups_;  // by chunk of the target's vocabulary
};

}  // namespace specdec::sampling
