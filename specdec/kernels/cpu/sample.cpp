#include <cstdint>

#include "sampler.h"
#include "thread_team.h"

namespace specdec::sampling {
namespace {

template <typename T>
void sample(const T* logits, int64_t stride, int64_t num_tokens, const SampleParams* params,
            int64_t count, int64_t* tokens) {
  parallel_for(count, [&](int64_t index) {
    static thread_local Sampler sampler;  // reuses its memory
    const SampleParams& own = params[index];
    tokens[index] = sampler.sample(own, logits + own.row * stride, num_tokens);
  });
}

}  // namespace

// Sample a token for each of params [count], or -1 where the reference must decide.
// logits: rows of num_tokens with row stride `stride`, float32 or bfloat16; tokens: [count].
SPECDEC_EXPORT void specdec_sample(const void* logits, int32_t is_bfloat16, int64_t stride,
                                   int64_t num_tokens, const SampleParams* params, int64_t count,
                                   int64_t* tokens) {
  if (is_bfloat16) {
    sample(static_cast<const uint16_t*>(logits), stride, num_tokens, params, count, tokens);
  } else {
    sample(static_cast<const float*>(logits), stride, num_tokens, params, count, tokens);
  }
}

}  // namespace specdec::sampling
