// Entry points of sampling: a token for each row of logits, or its best draft tokens.
#include <cstdint>

#include "sampling/draft_sampler.h"
#include "sampling/sampler.h"
#include "threads/thread_team.h"

namespace specdec::sampling {
namespace {

template <typename T>
void sample(const T* logits, int64_t stride, int64_t num_tokens, const SampleParams* params,
            int64_t count, int64_t* tokens, int num_threads) {
  parallel_for(count, num_threads, [&](int64_t index) {
    static thread_local Sampler sampler;  // reuses its memory
    const SampleParams& own = params[index];
    tokens[index] = sampler.sample(own, logits + own.row * stride, num_tokens);
  });
}

template <typename T>
void best_drafts(const T* logits, int64_t stride, int64_t num_tokens, const int32_t* target_tokens,
                 const SampleParams* params, int64_t count, int64_t num_best, float* scores,
                 int64_t* tokens, int num_threads) {
  parallel_for(count, num_threads, [&](int64_t index) {
    static thread_local DraftSampler sampler;  // reuses its memory
    const SampleParams& own = params[index];
    const auto& best = sampler.best_drafts(own, logits + own.row * stride, target_tokens,
                                           num_tokens, num_best);
    for (size_t place = 0; place < best.size(); ++place) {
      scores[index * num_best + place] = best[place].score;
      tokens[index * num_best + place] = best[place].token;
    }
  });
}

}  // namespace

// Sample a token for each of params [count], or -1 where the reference must decide.
// logits: rows of num_tokens with row stride `stride`, float32 or bfloat16; tokens: [count].
SPECDEC_EXPORT void specdec_sample(const void* logits, int32_t is_bfloat16, int64_t stride,
                                   int64_t num_tokens, const SampleParams* params, int64_t count,
                                   int64_t* tokens, int32_t num_threads) {
  const auto sample_as = [&](auto* rows) {
    sample(rows, stride, num_tokens, params, count, tokens, num_threads);
  };
  if (is_bfloat16) {
    sample_as(static_cast<const uint16_t*>(logits));
  } else {
    sample_as(static_cast<const float*>(logits));
  }
}

// Find the num_best draft tokens of rows with the largest perturbed scores, best first.
// logits, params: as above, with temperatures above 0. target_tokens: of the draft tokens
// [num_tokens], ascending. scores, tokens (the target's): [count, num_best]; places after the last
// draft token of a row keep their values.
SPECDEC_EXPORT void specdec_best_drafts(const void* logits, int32_t is_bfloat16, int64_t stride,
                                        int64_t num_tokens, const int32_t* target_tokens,
                                        const SampleParams* params, int64_t count,
                                        int64_t num_best, float* scores, int64_t* tokens,
                                        int32_t num_threads) {
  const auto best_drafts_of = [&](auto* rows) {
    best_drafts(rows, stride, num_tokens, target_tokens, params, count, num_best, scores, tokens,
                num_threads);
  };
  if (is_bfloat16) {
    best_drafts_of(static_cast<const uint16_t*>(logits));
  } else {
    best_drafts_of(static_cast<const float*>(logits));
  }
}

}  // namespace specdec::sampling
