#include <cstdint>
#include <vector>

#include "draw_peak.h"
#include "matrix.h"
#include "reduce.h"
#include "scratch.h"
#include "team.h"

namespace specdec::draws {
namespace {

// Where the peaks of all rows go, [num_rows] each.
struct Columns {
  float* values;
  int64_t* tokens;
  bool* is_broken;
};

void put(Peak peak, int64_t row, Columns out) {
  out.values[row] = peak.value;
  out.tokens[row] = peak.token;
  out.is_broken[row] = peak.is_broken != 0;
}

template <typename T>
void find_peak(const T* logits, int64_t row, int64_t stride, int64_t num_tokens, Columns out) {
  put(peak_of(logits + row * stride, num_tokens), row, out);
}

template <typename T>
void peaks(const T* logits, int64_t num_rows, int64_t stride, int64_t num_tokens, Columns out) {
  run_for_each(num_rows, [&](int64_t row) { find_peak(logits, row, stride, num_tokens, out); });
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

// Logits as products of `num_rows` rows, x [num_rows, in_features], with a head, and their peaks as
// above, in one parallel region. False where there is no memory for it.
SPECDEC_EXPORT bool specdec_multiply_peaks(const Matrix* head, const float* x, int64_t x_stride,
                                           int64_t num_rows, float* logits, int32_t num_threads,
                                           float* values, int64_t* tokens, bool* is_broken) {
  const Columns out = {values, tokens, is_broken};
  const int64_t num_tokens = head->out_features;
  const Scratch scratch(scratch_bytes(*head, num_rows));
  if (!scratch.is_there()) return false;
  const Rows rows = {x, x_stride, num_rows, scratch.begin()};
  run_team(num_threads, [&](Team team) {
    round_rows(*head, rows, team);
    multiply(*head, rows, logits, num_tokens, Store::kWrite, team);
    team.for_each(num_rows,
                  [&](int64_t row) { find_peak(logits, row, num_tokens, num_tokens, out); });
  });
  return true;
}

// What `whole_peaks` in Python says, of ranks that share memory: those of the whole vocabulary go to
// `values`, `tokens` and `is_broken`, where this rank's are. False once a peer is lost.
SPECDEC_EXPORT bool specdec_whole_peaks(Reducer* reducer, int64_t first_token, int64_t num_rows,
                                        float* values, int64_t* tokens, bool* is_broken) {
  std::vector<Peak> own, all(num_ranks(reducer) * num_rows);
  for (int64_t row = 0; row < num_rows; ++row) {
    own.push_back({values[row], static_cast<int32_t>(first_token + tokens[row]), is_broken[row]});
  }
  const int64_t bytes = num_rows * static_cast<int64_t>(sizeof(Peak));
  if (!all_gather(reducer, own.data(), bytes, all.data(), Team{0, 1})) return false;
  for (int64_t row = 0; row < num_rows; ++row) {
    Peak best = all[row];
    for (int64_t rank = 1; rank < num_ranks(reducer); ++rank) {
      const Peak peak = all[rank * num_rows + row];
      const bool is_broken = best.is_broken || peak.is_broken;
      if (peak.value > best.value) best = peak;  // of equal ones the first rank's: it is lower
      best.is_broken = is_broken;
    }
    put(best, row, {values, tokens, is_broken});
  }
  return true;
}

}  // namespace specdec::draws
