// Sampling of one token per row of logits: greedy, or with temperature, min-p, top-k and top-p.
//
// `specdec/sampling` defines the result, in torch. Logarithms and exponentials round differently
// here, so a token is returned only where rounding cannot change it: its margin, and the margin of
// every truncation threshold, exceed the rounding error. The caller samples the other rows by the
// torch reference, so all tokens equal the reference's.
//
// A row is read once, and its probability masses are computed once if top-p is set. Every other
// pass skips chunks of 64 tokens by their maximum, so its cost is proportional to the tokens that
// are left.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "sampling/sample_argmax.h"
#include "sampling/sample_chunks.h"
#include "sampling/sample_gumbel.h"
#include "sampling/sample_simd.h"

namespace specdec::sampling {

constexpr float kBoundTolerance = 1e-3f;  // exceeds the rounding error of bounds of scores
constexpr float kScoreTolerance = 1e-4f;  // exceeds the rounding error of perturbed scores
constexpr double kMassTolerance = 1e-11;  // exceeds the relative rounding error of sums of masses
constexpr int64_t kSortThreshold = 128;   // up to this many tokens are sorted instead of bisected

// Sampling parameters of one row; the fields of SAMPLE_PARAMS in `kernels/sample.py`.
struct SampleParams {
  double top_p;  // 1: off
  uint64_t seed;
  int64_t row;
  int64_t top_k;      // 0: off
  float temperature;  // 0: greedy; the other parameters are ignored
  float min_score;    // log(min_p); -inf: off
  uint32_t choice, position;
};

// Number of some tokens, and their total probability mass.
struct Tally {
  double mass = 0.0, count = 0.0;
};

// Samples one row at a time; one instance per thread.
class Sampler {
 public:
  // Return the token, or -1 where the reference must decide.
  // row: [num_tokens].
  template <typename T>
  int64_t sample(const SampleParams& params, const T* row, int64_t num_tokens) {
    if (params.temperature == 0.0f) return argmax_of(row, num_tokens).token;
    if (!read(row, num_tokens)) return -1;
    scale(params.temperature);
    float threshold;
    if (!find_threshold(params, num_tokens, threshold)) return -1;
    return sample_above({params.seed, params.choice, params.position}, threshold);
  }

 protected:
  struct ScoredToken {
    float score;
    Tally tally;
  };

  struct Candidate {
    int64_t chunk, offset;  // token with the chunk's largest noise
    float limit;            // upper bound of the chunk's perturbed scores
  };

  struct TopTwo {
    float best = -kInfinity, second = -kInfinity;
    int64_t token = -1;

    void add(float perturbed, int64_t its_token) {
      second = std::max(second, std::min(perturbed, best));
      if (perturbed > best) best = perturbed, token = its_token;
    }
  };

  // Find the score that tokens must have for min_score, top_k and top_p. Return false where rounding
  // could change it.
  bool find_threshold(const SampleParams& params, int64_t num_tokens, float& threshold) {
    bool is_certain = true;
    threshold = std::max(params.min_score, -std::numeric_limits<float>::max());  // never -inf
    if (params.top_k > 0 && params.top_k < num_tokens) {
      // Half a token less, so that rounding cannot matter.
      const double target = static_cast<double>(params.top_k) - 0.5;
      is_certain = raise_threshold(&Tally::count, tally(threshold), target, 0.25, threshold);
    }
    if (params.top_p < 1.0) {
      compute_masses(threshold);
      const Tally total = tally(threshold);
      const double target = params.top_p * total.mass, slack = kMassTolerance * total.mass;
      is_certain &= raise_threshold(&Tally::mass, total, target, slack, threshold);
    }
    return is_certain;
  }

  // Read a row and the maxima of its chunks; return false if it holds NaN or +inf, or only -inf.
  template <typename T>
  bool read(const T* row, int64_t num_tokens) {
    num_chunks_ = num_chunks_of(num_tokens);
    scores_.resize(num_chunks_ * kChunkTokens);
    masses_.resize(num_chunks_ * kChunkTokens);
    chunk_maxima_.assign((num_chunks_ + kFloatLanes - 1) / kFloatLanes * kFloatLanes, -kInfinity);
    IntLanes has_nan = {};
    max_logit_ = -kInfinity;
    for (int64_t chunk = 0; chunk < num_chunks_; ++chunk) {
      float* scores = &scores_[chunk * kChunkTokens];
      load_chunk(row, chunk, num_tokens, scores);
      chunk_maxima_[chunk] = max_of(max_of_chunk(scores, negative_infinity(), has_nan));
      max_logit_ = std::max(max_logit_, chunk_maxima_[chunk]);
    }
    return !any(has_nan) && max_logit_ > -kInfinity;
  }

  // Convert logits to log probabilities relative to the most likely token.
  void scale(float temperature) {
    for (float& score : scores_) score = (score - max_logit_) / temperature;
    for (float& score : chunk_maxima_) score = (score - max_logit_) / temperature;
  }

  // Call function(first token, scores) for each chunk with a score of at least `threshold`.
  template <typename Function>
  void for_each_chunk_above(float threshold, Function function) const {
    for (int64_t chunk = 0; chunk < num_chunks_; ++chunk) {
      const int64_t first = chunk * kChunkTokens;
      if (chunk_maxima_[chunk] >= threshold) function(first, &scores_[first]);
    }
  }

  // Compute the probabilities, relative to the most likely token, of tokens above `threshold`.
  void compute_masses(float threshold) {
    for_each_chunk_above(threshold, [this](int64_t first, const float* scores) {
      for (int64_t i = 0; i < kChunkTokens; i += kDoubleLanes) {
        const DoubleLanes masses = exponential(load<ScoreLanes>(scores + i));
        std::memcpy(&masses_[first + i], &masses, sizeof masses);
      }
    });
  }

  // Count and sum up the tokens above `threshold`; the mass is valid after compute_masses.
  Tally tally(float threshold) const {
    DoubleLanes mass = {};
    LongLanes count = {};
    for_each_chunk_above(threshold, [&](int64_t first, const float* scores) {
      for (int64_t i = 0; i < kChunkTokens; i += kDoubleLanes) {
        const auto is_included =
            __builtin_convertvector(load<ScoreLanes>(scores + i) >= threshold, LongLanes);
        mass += bits_of<DoubleLanes>(is_included & load<LongLanes>(&masses_[first + i]));
        count -= is_included;
      }
    });
    return {sum_of(mass), sum_of(count)};
  }

  // Raise `threshold`, above which the tokens have `total`, to the highest score above which they
  // reach `target` in `measure`; unchanged where all of them do not. Return false if a `target`
  // that differs by `slack` could give another threshold. Bisects, then sorts.
  bool raise_threshold(double Tally::*measure, const Tally& total, double target, double slack,
                       float& threshold) {
    if (total.*measure < target - slack) return true;
    // Invariant: the tokens above `low` reach the target, or are all tokens; those above `high` do
    // not.
    float low = std::max(-1.0f, threshold), high = 1.0f;  // the largest score is 0
    Tally below = tally(low), above;
    while (below.*measure < target && low > threshold) {
      high = low, above = below;
      low = std::max(2.0f * low, threshold);
      below = tally(low);
    }
    while (below.count - above.count > kSortThreshold) {
      const float middle = 0.5f * (low + high);
      if (!(low < middle && middle < high)) break;  // all have the same score
      const Tally from_middle = tally(middle);
      const bool is_enough = from_middle.*measure >= target;
      (is_enough ? low : high) = middle;
      (is_enough ? below : above) = from_middle;
    }
    return settle_threshold(measure, target, slack, low, high, above.*measure, threshold);
  }

  // Find the threshold among the tokens with scores in [low, high); those above `high` reach
  // `above`.
  bool settle_threshold(double Tally::*measure, double target, double slack, float low, float high,
                        double above, float& threshold) {
    entries_.clear();
    for_each_chunk_above(low, [&](int64_t first, const float* scores) {
      for (int64_t i = 0; i < kChunkTokens; ++i) {
        if (scores[i] >= low && scores[i] < high) {
          entries_.push_back({scores[i], {masses_[first + i], 1.0}});
        }
      }
    });
    std::sort(entries_.begin(), entries_.end(),
              [](const ScoredToken& a, const ScoredToken& b) { return a.score > b.score; });
    for (size_t next = 0; next < entries_.size();) {
      const float score = entries_[next].score;
      double cumulative = above;
      for (; next < entries_.size() && entries_[next].score == score; ++next) {
        cumulative += entries_[next].tally.*measure;
      }
      if (cumulative >= target) {
        threshold = score;
        return above < target - slack && cumulative >= target + slack;
      }
      above = cumulative;
    }
    return false;
  }

  // Return the token above `threshold` with the largest perturbed score (Gumbel-max), or -1 where
  // rounding might decide.
  int64_t sample_above(const GumbelKey& key, float threshold) {
    const float lower_bound = find_candidate_chunks(key, threshold);
    TopTwo top;
    for (const Candidate& candidate : candidates_) {
      const float bound = std::max(lower_bound, top.best) - kBoundTolerance;
      if (candidate.limit < bound) continue;
      score_chunk(key, std::max(threshold, least_score(candidate, bound)), candidate, top);
    }
    return top.best - top.second > kScoreTolerance ? top.token : -1;
  }

  // Return a lower bound of the scores whose perturbed score may reach `bound`.
  float least_score(const Candidate& candidate, float bound) const {
    return bound - (candidate.limit - chunk_maxima_[candidate.chunk]);
  }

  // Find the chunks that may hold the maximum; return a lower bound of the largest perturbed score.
  float find_candidate_chunks(const GumbelKey& key, float threshold) {
    const float least = std::max(threshold, -kGumbelRange);
    float lower_bound = -kInfinity;
    candidates_.clear();
    for (int64_t first = 0; first < num_chunks_; first += kFloatLanes) {
      const IntLanes is_included = load_floats(&chunk_maxima_[first]) >= least;
      if (!any(is_included)) continue;
      const ApproxChunkMax approx = approx_chunk_max(key, static_cast<uint32_t>(first));
      for (int64_t i = 0; i < kFloatLanes; ++i) {
        if (!is_included[i]) continue;
        const int64_t chunk = first + i, offset = approx.offsets[i];
        const float score = scores_[chunk * kChunkTokens + offset];
        if (score >= threshold) lower_bound = std::max(lower_bound, score + approx.gumbel[i]);
        candidates_.push_back({chunk, offset, chunk_maxima_[chunk] + approx.gumbel[i]});
      }
    }
    return lower_bound;
  }

  // Compute the perturbed scores of a chunk's tokens above `threshold`, and update the top two.
  void score_chunk(const GumbelKey& key, float threshold, const Candidate& candidate,
                   TopTwo& top) const {
    const auto chunk = static_cast<uint32_t>(candidate.chunk);
    const uint32_t bits_of_chunk = key.random_words(kFirstChunkCounter + chunk).w0;
    const float smallest = exponential_of_bits(bits_of_chunk) / kChunkTokens;
    const float* scores = &scores_[candidate.chunk * kChunkTokens];
    const auto is_included = [&](float score) { return score >= threshold; };
    for (uint32_t call = 0; call < kCallsPerChunk; ++call) {
      const float* const own = scores + kTokensPerCall * call;
      if (std::none_of(own, own + kTokensPerCall, is_included)) continue;
      const Words words = key.random_words(chunk * kCallsPerChunk + call);
      const uint32_t bits[] = {words.w0, words.w1, words.w2, words.w3};
      for (int64_t i = 0; i < kTokensPerCall; ++i) {
        const int64_t offset = kTokensPerCall * call + i;
        if (!is_included(scores[offset])) continue;
        float variable = smallest;
        if (offset != candidate.offset) variable += exponential_of_bits(bits[i]);
        top.add(scores[offset] - std::log(variable), candidate.chunk * kChunkTokens + offset);
      }
    }
  }

  int64_t num_chunks_ = 0;
  float max_logit_ = 0.0f;
  std::vector<float> scores_;        // [num_chunks, kChunkTokens], padded with -inf
  std::vector<double> masses_;       // [num_chunks, kChunkTokens]
  std::vector<float> chunk_maxima_;  // [num_chunks], padded to whole vectors with -inf
  std::vector<ScoredToken> entries_;
  std::vector<Candidate> candidates_;
};

}  // namespace specdec::sampling
