// The tokens of rows of logits: the best, or samples of what min-p, top-k and top-p leave.
//
// The definition is that of `specdec/sampling`, in torch. Logarithms and exponentials round
// differently here, so a token is returned only where it is certain: it wins by more than any
// rounding, under limits that are met by more than any rounding. Whoever asks has the reference
// decide the other rows, so the tokens are the reference's, always.
//
// A row is read once, and weighed once where top-p is asked for. All else passes over chunks of 64
// tokens by their maxima, and costs in proportion to what is left.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "draw_chunks.h"
#include "draw_lanes.h"
#include "draw_noise.h"
#include "draw_peak.h"
#include "team.h"

namespace specdec::draws {
namespace {

constexpr float kRounding = 1e-3f;     // more than what bounds on perturbed scores are rounded by
constexpr float kCertain = 1e-4f;      // more than what perturbed scores are rounded by
constexpr double kCertainMass = 1e-11;  // more than what shares of a sum of masses are rounded by
constexpr int64_t kFewEntries = 128;   // so many are sorted rather than divided again

// How one row is sampled; `kernels/draws.py` has the same fields.
struct Draw {
  double top_p;  // 1: uncut
  uint64_t seed;
  int64_t row;
  int64_t top_k;      // 0: uncut
  float temperature;  // 0: the best token, and nothing else counts
  float min_score;    // the logarithm of min_p; -inf: uncut
  uint32_t choice, position;
};

// Some tokens: how many there are, and what they weigh.
struct Tally {
  double mass = 0.0, count = 0.0;
};

// Samples rows one after another, on one thread.
class Sampler {
 public:
  // Returns the token, or -1 where the reference has to say it.
  template <typename T>
  int64_t draw(const Draw& how, const T* row, int64_t num_tokens) {
    if (how.temperature == 0.0f) return peak_of(row, num_tokens).token;
    if (!read(row, num_tokens)) return -1;
    scale(how.temperature);
    float floor = std::max(how.min_score, -std::numeric_limits<float>::max());  // never -inf
    if (how.top_k > 0 && how.top_k < num_tokens) {
      // Half a token less, so that no number of tokens is near it.
      const double target = static_cast<double>(how.top_k) - 0.5;
      if (!raise_floor(&Tally::count, tally(floor), target, 0.25, floor)) return -1;
    }
    if (how.top_p < 1.0) {
      weigh(floor);
      const Tally all = tally(floor);
      const double target = how.top_p * all.mass, slack = kCertainMass * all.mass;
      if (!raise_floor(&Tally::mass, all, target, slack, floor)) return -1;
    }
    return winner({how.seed, how.choice, how.position}, floor);
  }

 private:
  struct Entry {
    float score;
    Tally tally;
  };

  struct Candidate {
    int64_t chunk, offset;  // which token has the chunk's largest noise
    float limit;            // no token of the chunk has more with its noise
  };

  struct Contest {
    float best = -kInfinity, second = -kInfinity;
    int64_t token = -1;
  };

  // Takes in a row's logits and their maxima; false for one with NaN or +inf, or with nothing.
  template <typename T>
  bool read(const T* row, int64_t num_tokens) {
    num_chunks_ = num_chunks_of(num_tokens);
    scores_.resize(num_chunks_ * kChunkTokens);
    masses_.resize(num_chunks_ * kChunkTokens);
    maxima_.assign((num_chunks_ + kFloatLanes - 1) / kFloatLanes * kFloatLanes, -kInfinity);
    IntLanes is_broken = {};
    peak_ = -kInfinity;
    for (int64_t chunk = 0; chunk < num_chunks_; ++chunk) {
      float* scores = &scores_[chunk * kChunkTokens];
      load_chunk(row, chunk, num_tokens, scores);
      maxima_[chunk] = largest_of(largest(scores, nothing(), is_broken));
      peak_ = std::max(peak_, maxima_[chunk]);
    }
    return !any(is_broken) && peak_ > -kInfinity;
  }

  // Makes logits logarithms of probabilities relative to the best token's.
  void scale(float temperature) {
    for (float& score : scores_) score = (score - peak_) / temperature;
    for (float& score : maxima_) score = (score - peak_) / temperature;
  }

  // Calls function(first token, its scores) for each chunk that has a token from `floor` on.
  template <typename Function>
  void for_chunks_from(float floor, Function function) const {
    for (int64_t chunk = 0; chunk < num_chunks_; ++chunk) {
      const int64_t first = chunk * kChunkTokens;
      if (maxima_[chunk] >= floor) function(first, &scores_[first]);
    }
  }

  // Notes the probabilities, relative to the best token's, of all that can be from `floor` on.
  void weigh(float floor) {
    for_chunks_from(floor, [this](int64_t first, const float* scores) {
      for (int64_t i = 0; i < kChunkTokens; i += kDoubleLanes) {
        const DoubleLanes masses = exponential(load_doubles(scores + i));
        std::memcpy(&masses_[first + i], &masses, sizeof masses);
      }
    });
  }

  // The tokens from `floor` on; their mass means something once they have been weighed.
  Tally tally(float floor) const {
    DoubleLanes mass = {}, count = {};
    const double least = floor;
    for_chunks_from(floor, [&](int64_t first, const float* scores) {
      for (int64_t i = 0; i < kChunkTokens; i += kDoubleLanes) {
        const LongLanes is_in = load_doubles(scores + i) >= least;
        mass += is_in ? load<DoubleLanes>(&masses_[first + i]) : DoubleLanes{};
        count += is_in ? DoubleLanes{} + 1.0 : DoubleLanes{};
      }
    });
    return {sum_of(mass), sum_of(count)};
  }

  // Raises `floor`, from which on there is `all`, to the highest score from which on the tokens
  // weigh `target`; it stays where all fall short. False where `slack` more or less would change
  // it.
  bool raise_floor(double Tally::*weight, const Tally& all, double target, double slack,
                   float& floor) {
    if (all.*weight < target - slack) return true;
    // The tokens from `low` on weigh enough, or are all there are; those from `high` on do not.
    float low = std::max(-1.0f, floor), high = 1.0f;  // the best score is 0
    Tally below = tally(low), above;
    while (below.*weight < target && low > floor) {
      high = low, above = below;
      low = std::max(2.0f * low, floor);
      below = tally(low);
    }
    while (below.count - above.count > kFewEntries) {
      const float middle = 0.5f * (low + high);
      if (!(low < middle && middle < high)) break;  // all have one score
      const Tally from_middle = tally(middle);
      const bool is_enough = from_middle.*weight >= target;
      (is_enough ? low : high) = middle;
      (is_enough ? below : above) = from_middle;
    }
    return settle_floor(weight, target, slack, low, high, above.*weight, floor);
  }

  // The same among the tokens from `low` to below `high`; those from `high` on weigh `above`.
  bool settle_floor(double Tally::*weight, double target, double slack, float low, float high,
                    double above, float& floor) {
    entries_.clear();
    for_chunks_from(low, [&](int64_t first, const float* scores) {
      for (int64_t i = 0; i < kChunkTokens; ++i) {
        if (scores[i] >= low && scores[i] < high) {
          entries_.push_back({scores[i], {masses_[first + i], 1.0}});
        }
      }
    });
    std::sort(entries_.begin(), entries_.end(),
              [](const Entry& a, const Entry& b) { return a.score > b.score; });
    for (size_t next = 0; next < entries_.size();) {
      const float score = entries_[next].score;
      double reached = above;
      for (; next < entries_.size() && entries_[next].score == score; ++next) {
        reached += entries_[next].tally.*weight;
      }
      if (reached >= target) {
        floor = score;
        return above < target - slack && reached >= target + slack;
      }
      above = reached;
    }
    return false;
  }

  // The best token from `floor` on with its noise, or -1 where rounding might decide.
  int64_t winner(const NoiseKey& key, float floor) {
    const float reached = find_candidates(key, floor);
    Contest contest;
    for (const Candidate& candidate : candidates_) {
      if (candidate.limit >= std::max(reached, contest.best) - kRounding) {
        enter(key, floor, candidate, contest);
      }
    }
    return contest.best - contest.second > kCertain ? contest.token : -1;
  }

  // Finds the chunks that may hold the winner, and returns a perturbed score that is reached.
  float find_candidates(const NoiseKey& key, float floor) {
    const float least = std::max(floor, -kNoiseRange);
    float reached = -kInfinity;
    candidates_.clear();
    for (int64_t first = 0; first < num_chunks_; first += kFloatLanes) {
      const IntLanes is_in = load_floats(&maxima_[first]) >= least;
      if (!any(is_in)) continue;
      const RoughNoise rough = rough_largest_noise(key, static_cast<uint32_t>(first));
      for (int64_t i = 0; i < kFloatLanes; ++i) {
        if (!is_in[i]) continue;
        const int64_t chunk = first + i, offset = rough.offsets[i];
        const float score = scores_[chunk * kChunkTokens + offset];
        if (score >= floor) reached = std::max(reached, score + rough.noise[i]);
        candidates_.push_back({chunk, offset, maxima_[chunk] + rough.noise[i]});
      }
    }
    return reached;
  }

  // Has the tokens of a chunk from `floor` on compete.
  void enter(const NoiseKey& key, float floor, const Candidate& candidate, Contest& contest) const {
    const auto chunk = static_cast<uint32_t>(candidate.chunk);
    const uint32_t bits_of_chunk = key.words(kFirstChunkCounter + chunk).w0;
    const float smallest = exponential_of_bits(bits_of_chunk) / kChunkTokens;
    const float* scores = &scores_[candidate.chunk * kChunkTokens];
    for (uint32_t call = 0; call < kCallsPerChunk; ++call) {
      const Words words = key.words(chunk * kCallsPerChunk + call);
      const uint32_t bits[] = {words.w0, words.w1, words.w2, words.w3};
      for (int64_t i = 0; i < kTokensPerCall; ++i) {
        const int64_t offset = kTokensPerCall * call + i;
        if (!(scores[offset] >= floor)) continue;
        float variable = smallest;
        if (offset != candidate.offset) variable += exponential_of_bits(bits[i]);
        const float perturbed = scores[offset] - std::log(variable);
        contest.second = std::max(contest.second, std::min(perturbed, contest.best));
        if (perturbed > contest.best) {
          contest.best = perturbed;
          contest.token = candidate.chunk * kChunkTokens + offset;
        }
      }
    }
  }

  int64_t num_chunks_ = 0;
  float peak_ = 0.0f;
  std::vector<float> scores_;   // [num_chunks, kChunkTokens], -inf behind the last token
  std::vector<double> masses_;  // [num_chunks, kChunkTokens]
  std::vector<float> maxima_;   // [num_chunks], and -inf up to whole vectors
  std::vector<Entry> entries_;
  std::vector<Candidate> candidates_;
};

template <typename T>
void draw(const T* logits, int64_t stride, int64_t num_tokens, const Draw* draws, int64_t count,
          int64_t* tokens) {
  run_for_each(count, [&](int64_t index) {
    static thread_local Sampler sampler;  // keeps its memory
    const Draw& how = draws[index];
    tokens[index] = sampler.draw(how, logits + how.row * stride, num_tokens);
  });
}

}  // namespace

// logits: rows of num_tokens, `stride` apart, float32 or bfloat16. Writes a token for each of
// draws [count], or -1 where the reference has to decide.
SPECDEC_EXPORT void specdec_draw(const void* logits, int32_t is_bfloat16, int64_t stride,
                                 int64_t num_tokens, const Draw* draws, int64_t count,
                                 int64_t* tokens) {
  if (is_bfloat16) {
    draw(static_cast<const uint16_t*>(logits), stride, num_tokens, draws, count, tokens);
  } else {
    draw(static_cast<const float*>(logits), stride, num_tokens, draws, count, tokens);
  }
}

}  // namespace specdec::draws
