#include <cstdint>

#include "draw_peak.h"
#include "team.h"

namespace specdec::draws {
namespace {

// Where the peaks of all rows go, [num_rows] each.
struct Columns {
  float* values;
  int64_t* tokens;
  bool* is_broken;
};

template <typename T>
void peaks(const T* logits, int64_t num_rows, int64_t stride, int64_t num_tokens, Columns out) {
  run_for_each(num_rows, [&](int64_t row) {
    const Peak peak = peak_of(logits + row * stride, num_tokens);
    out.values[row] = peak.value;
    out.tokens[row] = peak.token;
    out.is_broken[row] = peak.is_broken != 0;
  });
}

}  // namespace

// logits: [num_rows, num_tokens] with the rows `stride` apart, float32 or bfloat16. The best token
// of each, its logit, and whether the row is broken go to arrays [num_rows].
SPECDEC_EXPORT void specdec_peaks(const void* logits, int32_t is_bfloat16, int64_t num_rows,
                                  int64_t stride, int64_t num_tokens, float* values,
                                  int64_t* tokens, bool* is_broken) {
  const Columns out = {values, tokens, is_broken};
  if (is_bfloat16) {
    peaks(static_cast<const uint16_t*>(logits), num_rows, stride, num_tokens, out);
  } else {
    peaks(static_cast<const float*>(logits), num_rows, stride, num_tokens, out);
  }
}

}  // namespace specdec::draws
