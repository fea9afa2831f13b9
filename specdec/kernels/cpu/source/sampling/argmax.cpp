// Argmax of rows of logits, also of a GEMM's results, and over the parts of all ranks.
#include <cstdint>
#include <vector>

#include "base/scratch.h"
#include "collectives/allreduce.h"
#include "gemm/matrix.h"
#include "sampling/sample_argmax.h"
#include "threads/thread_team.h"

namespace specdec::sampling {
namespace {

// Output arrays, [num_rows] each.
struct ArgmaxColumns {
  float* values;
  int64_t* tokens;
  bool* has_nan;
};

void write_argmax(Argmax candidate, int64_t row, ArgmaxColumns out) {
  out.values[row] = candidate.value;
  out.tokens[row] = candidate.token;
  out.has_nan[row] = candidate.has_nan != 0;
}

template <typename T>
void write_row_argmax(const T* logits, int64_t row, int64_t stride, int64_t num_tokens,
                      ArgmaxColumns out) {
  write_argmax(argmax_of(logits + row * stride, num_tokens), row, out);
}

template <typename T>
void argmax_rows(const T* logits, int64_t num_rows, int64_t stride, int64_t num_tokens,
                 int num_threads, ArgmaxColumns out) {
  parallel_for(num_rows, num_threads,
               [&](int64_t row) { write_row_argmax(logits, row, stride, num_tokens, out); });
}

}  // namespace

// Write the argmax of each row, its logit and has_nan to arrays [num_rows].
// logits: [num_rows, num_tokens] with row stride `stride`, float32 or bfloat16.
SPECDEC_EXPORT void specdec_argmax(const void* logits, int32_t is_bfloat16, int64_t num_rows,
                                   int64_t stride, int64_t num_tokens, int32_t num_threads,
                                   float* values, int64_t* tokens, bool* has_nan) {
  const ArgmaxColumns out = {values, tokens, has_nan};
  if (is_bfloat16) {
    argmax_rows(static_cast<const uint16_t*>(logits), num_rows, stride, num_tokens, num_threads,
                out);
  } else {
    argmax_rows(static_cast<const float*>(logits), num_rows, stride, num_tokens, num_threads, out);
  }
}

// Compute logits [num_rows, num_tokens] of x [num_rows, in_features] by the output head, and their
// argmax as above, in one parallel region. Return false when no memory is available.
SPECDEC_EXPORT bool specdec_gemm_argmax(const Matrix* head, const float* x, int64_t x_stride,
                                        int64_t num_rows, float* logits, int32_t num_threads,
                                        float* values, int64_t* tokens, bool* has_nan) {
  const ArgmaxColumns out = {values, tokens, has_nan};
  const int64_t num_tokens = head->out_features;
  const Scratch scratch(scratch_bytes(*head, num_rows));
  if (!scratch.is_allocated()) return false;
  const Activations rows = {x, x_stride, num_rows, scratch.begin()};
  run_parallel(num_threads, [&](ThreadTeam team) {
    quantize_rows(*head, rows, team);
    gemm(*head, rows, logits, num_tokens, Store::kOverwrite, team);
    team.parallel_for(
        num_rows, [&](int64_t row) { write_row_argmax(logits, row, num_tokens, num_tokens, out); });
  });
  return true;
}

// Combine the argmax of vocabulary-parallel ranks through shared memory, in place, as
// `specdec/sampling` does for other ranks. values, tokens, has_nan: [num_rows]. Return false when a
// peer is lost.
SPECDEC_EXPORT bool specdec_all_ranks_argmax(Communicator* communicator, int64_t first_token,
                                             int64_t num_rows, float* values, int64_t* tokens,
                                             bool* has_nan) {
  std::vector<Argmax> local, all(num_ranks(communicator) * num_rows);
  for (int64_t row = 0; row < num_rows; ++row) {
    local.push_back({values[row], static_cast<int32_t>(first_token + tokens[row]), has_nan[row]});
  }
  const int64_t bytes = num_rows * static_cast<int64_t>(sizeof(Argmax));
  if (!all_gather(communicator, local.data(), bytes, all.data(), ThreadTeam{0, 1})) return false;
  for (int64_t row = 0; row < num_rows; ++row) {
    Argmax best = all[row];
    for (int64_t rank = 1; rank < num_ranks(communicator); ++rank) {
      const Argmax candidate = all[rank * num_rows + row];
      const bool has_nan = best.has_nan || candidate.has_nan;
      // Ties: the first rank has the lower token.
      if (candidate.value > best.value) best = candidate;
      best.has_nan = has_nan;
    }
    write_argmax(best, row, {values, tokens, has_nan});
  }
  return true;
}

}  // namespace specdec::sampling
