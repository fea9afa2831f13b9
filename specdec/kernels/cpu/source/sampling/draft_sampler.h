// Sampling of one draft token per row of logits, with the noise of the target's tokens.
#pragma once

#include "sampling/sampler.h"

namespace specdec::sampling {

// A draft token, as the target's, and its perturbed score.
struct ScoredDraft {
  float score;
  int32_t token;
};

// A draft token, as the target's, and the estimated probability that the target takes it.
struct WeighedDraft {
  double confidence;
  int32_t token;
};

constexpr size_t kNumWeighed = 32;  // NUM_WEIGHED in `sampling/device/device_children.py`

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
    float threshold;
    if (!prepare(params, row, target_tokens, num_tokens, threshold)) {
      return {-kInfinity, target_tokens[0], true};
    }
    const TopTwo top = best_of_groups(key_of(params), threshold, target_tokens);
    return {top.best + max_logit_ / params.temperature, static_cast<int32_t>(top.token), false};
  }

  // Find the draft tokens that the noise favors most, best first, at most `limit`; with a
  // temperature above 0. Arguments and scores as in `draft`. A row without valid logits has none.
  template <typename T>
  const std::vector<ScoredDraft>& best_drafts(const SampleParams& params, const T* row,
                                              const int32_t* target_tokens, int64_t num_tokens,
                                              int64_t limit) {
    best_.clear();
    float threshold;
    if (!prepare(params, row, target_tokens, num_tokens, threshold)) return best_;
    find_best_of_groups(key_of(params), threshold, target_tokens, static_cast<size_t>(limit));
    std::sort_heap(best_.begin(), best_.end(), is_better);
    for (ScoredDraft& each : best_) each.score += max_logit_ / params.temperature;
    return best_;
  }

  // Find up to `limit` children of a node, best first, as `best_children` in
  // `sampling/device/device_children.py`; rounding may decide. A row without valid logits has none.
  template <typename T>
  std::vector<WeighedDraft> children(const SampleParams& params, const T* row,
                                     const int32_t* target_tokens, int64_t num_tokens,
                                     size_t limit) {
    const bool is_greedy = params.temperature == 0.0f;
    const auto& best = is_greedy ? likeliest_drafts(row, target_tokens, num_tokens, limit)
                                 : best_drafts(params, row, target_tokens, num_tokens,
                                               std::max(limit, kNumWeighed));
    std::vector<WeighedDraft> found;
    double total = 0.0;
    for (const ScoredDraft& each : best) {
      const double scale = is_greedy ? 1.0 : params.temperature;
      const double offset = is_greedy ? 0.0 : best[0].score;
      found.push_back({std::exp((each.score - offset) * scale), each.token});
      if (found.size() <= kNumWeighed) total += found.back().confidence;
    }
    found.resize(std::min(found.size(), limit));
    for (WeighedDraft& each : found) each.confidence /= is_greedy ? total_mass_ : total;
    return found;
  }

 private:
  // Find the `limit` most likely draft tokens, best first, with the logarithms of their
  // probabilities relative to the first one; total_mass_ is the sum of all tokens' probabilities.
  template <typename T>
  const std::vector<ScoredDraft>& likeliest_drafts(const T* row, const int32_t* target_tokens,
                                                   int64_t num_tokens, size_t limit) {
    best_.clear();
    if (!read(row, num_tokens)) return best_;
    scale(1.0f);
    constexpr float kAll = -std::numeric_limits<float>::max();
    compute_masses(kAll);
    total_mass_ = tally(kAll).mass;
    for_each_chunk_above(kAll, [&](int64_t first, const float* scores) {
      if (best_.size() == limit && chunk_maxima_[first / kChunkTokens] < best_.front().score) return;
      for (int64_t i = first; i < std::min(first + kChunkTokens, num_tokens); ++i) {
        const float score = scores[i - first];
        if (score >= kAll) add_to_best({score, target_tokens[i]}, limit);
      }
    });
    std::sort_heap(best_.begin(), best_.end(), is_better);
    return best_;
  }

  // Consecutive draft tokens whose target tokens are in one chunk.
  struct Group {
    int64_t begin = 0, end = 0;
  };

  static GumbelKey key_of(const SampleParams& params) {
    return {params.seed, params.choice, params.position};
  }

  // An order of heaps whose front is the worst.
  static bool is_better(const ScoredDraft& a, const ScoredDraft& b) {
    return a.score != b.score ? a.score > b.score : a.token < b.token;
  }

  // Read and scale a row, find its threshold and group its tokens; return false as `read` does.
  template <typename T>
  bool prepare(const SampleParams& params, const T* row, const int32_t* target_tokens,
               int64_t num_tokens, float& threshold) {
    if (!read(row, num_tokens)) return false;
    scale(params.temperature);
    find_threshold(params, num_tokens, threshold);
    group_by_chunk(target_tokens, num_tokens);
    return true;
  }

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
      const float bound = std::max(lower_bound, top.best) - kBoundTolerance;
      if (candidate.limit < bound) continue;
      score_group(key, std::max(threshold, least_score(candidate, bound)), candidate, target_tokens,
                  [&](float score, int64_t token) { top.add(score, token); });
    }
    return top;
  }

  // Collect in best_, a heap, the `limit` draft tokens with the largest perturbed scores above
  // `threshold`. Groups run in the descending order of the bounds of their scores, until the next
  // one cannot hold one of the best.
  void find_best_of_groups(const GumbelKey& key, float threshold, const int32_t* target_tokens,
                           size_t limit) {
    candidates_.clear();
    for (int64_t first = 0; first < int64_t(chunk_maxima_.size()); first += kFloatLanes) {
      const IntLanes is_included = load_floats(&chunk_maxima_[first]) >= threshold;
      if (!any(is_included)) continue;
      const ApproxChunkMax approx = approx_chunk_max(key, static_cast<uint32_t>(first));
      for (int64_t i = 0; i < kFloatLanes; ++i) {
        if (!is_included[i]) continue;
        const int64_t chunk = first + i;
        candidates_.push_back({chunk, approx.offsets[i], chunk_maxima_[chunk] + approx.gumbel[i]});
      }
    }
    std::sort(candidates_.begin(), candidates_.end(),
              [](const Candidate& a, const Candidate& b) { return a.limit > b.limit; });
    for (const Candidate& candidate : candidates_) {
      const bool is_full = best_.size() == limit;
      if (is_full && candidate.limit < best_.front().score - kBoundTolerance) break;
      score_group(key, threshold, candidate, target_tokens, [&](float score, int64_t token) {
        add_to_best({score, static_cast<int32_t>(token)}, limit);
      });
    }
  }

  void add_to_best(const ScoredDraft& scored, size_t limit) {
    if (best_.size() == limit) {
      if (!is_better(scored, best_.front())) return;
      std::pop_heap(best_.begin(), best_.end(), is_better);
      best_.pop_back();
    }
    best_.push_back(scored);
    std::push_heap(best_.begin(), best_.end(), is_better);
  }

  // Return the draft token of an offset in a target's chunk, or -1.
  int64_t find_in_group(int64_t chunk, int64_t offset, const int32_t* target_tokens) const {
    const Group group = groups_[chunk];
    const int32_t* begin = target_tokens + group.begin;
    const int32_t* end = target_tokens + group.end;
    const int32_t* found = std::find(begin, end, chunk * kChunkTokens + offset);
    return found == end ? -1 : group.begin + (found - begin);
  }

  // Call add(perturbed score, the target's token) for a group's tokens above `threshold`.
  template <typename Add>
  void score_group(const GumbelKey& key, float threshold, const Candidate& candidate,
                   const int32_t* target_tokens, Add add) const {
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
      add(scores_[i] - std::log(variable), token);
    }
  }

  double total_mass_ = 0.0;
  std::vector<ScoredDraft> best_;
  std::vector<Group> groups_;  // by chunk of the target's vocabulary
};

}  // namespace specdec::sampling
