// Logits of Medusa heads (Cai et al. 2024): x <- x + silu(W x + b) for each layer of a head, then an
// output head. Rows and heads are independent, so a row's logits are the same bits in any batch.
#include <algorithm>
#include <cstdint>

#include "base/arena.h"
#include "base/elementwise.h"
#include "base/scratch.h"
#include "gemm/matrix.h"
#include "threads/thread_team.h"

namespace specdec {

// Heads of one rank that holds them all.
struct Medusa {
  int64_t hidden_size, num_heads, num_layers;
  const Matrix* layers;    // [num_heads, num_layers], each [hidden_size, hidden_size]
  const Matrix* lm_heads;  // [num_heads], or one
  int32_t has_one_lm_head;
};

namespace {

// All threads of a team call `run`.
class MedusaPass {
 public:
  // memory: null to count the bytes only.
  MedusaPass(const Medusa& heads, int64_t num_rows, int64_t count, void* memory)
      : heads_(heads), num_rows_(num_rows), count_(count) {
    Arena arena(memory);
    hidden_ = arena.allocate_floats(count * num_rows * heads.hidden_size);
    update_ = arena.allocate_floats(num_rows * heads.hidden_size);
    int64_t scratch = scratch_bytes(heads.lm_heads[0], rows_per_lm_head());
    for (int64_t i = 0; i < heads.num_heads * heads.num_layers; ++i) {
      scratch = std::max(scratch, scratch_bytes(heads.layers[i], num_rows));
    }
    matrix_scratch_ = arena.allocate(scratch);
    memory_bytes_ = arena.used();
  }

  int64_t memory_bytes() const { return memory_bytes_; }

  // x: [num_rows, hidden_size]; logits: [count, num_rows, num_tokens].
  void run(const float* x, float* logits, ThreadTeam team) {
    const int64_t size = num_rows_ * heads_.hidden_size;
    team.parallel_for(count_, [&](int64_t head) { std::copy_n(x, size, hidden_ + head * size); });
    for (int64_t head = 0; head < count_; ++head) {
      for (int64_t layer = 0; layer < heads_.num_layers; ++layer) {
        add_layer(heads_.layers[head * heads_.num_layers + layer], hidden_ + head * size, team);
      }
    }
    for (int64_t head = 0; head < (heads_.has_one_lm_head ? 1 : count_); ++head) {
      const Matrix& lm_head = heads_.lm_heads[head];
      const int64_t num_tokens = lm_head.out_features;
      multiply(lm_head, hidden_ + head * size, rows_per_lm_head(),
               logits + head * num_rows_ * num_tokens, team);
    }
  }

 private:
  const Medusa& heads_;
  int64_t num_rows_, count_, memory_bytes_;
  float* hidden_;  // [count, num_rows, hidden_size]
  float* update_;  // [num_rows, hidden_size]
  void* matrix_scratch_;

  int64_t rows_per_lm_head() const {
    return heads_.has_one_lm_head ? count_ * num_rows_ : num_rows_;
  }

  void multiply(const Matrix& matrix, const float* x, int64_t num_rows, float* y,
                ThreadTeam team) {
    const Activations rows = {x, heads_.hidden_size, num_rows, matrix_scratch_};
    quantize_rows(matrix, rows, team);
    gemm(matrix, rows, y, matrix.out_features, Store::kOverwrite, team);
  }

  void add_layer(const Matrix& layer, float* hidden, ThreadTeam team) {
    multiply(layer, hidden, num_rows_, update_, team);
    const int64_t size = heads_.hidden_size;
    team.parallel_for(num_rows_, [&](int64_t row) {
      add_silu(update_ + row * size, size, hidden + row * size);
    });
  }
};

}  // namespace
}  // namespace specdec

// Write the logits [count, num_rows, num_tokens] of the first `count` heads. x: [num_rows,
// hidden_size]. Return false when no memory is available.
SPECDEC_EXPORT bool specdec_medusa(const specdec::Medusa* heads, const float* x, int64_t num_rows,
                                   int64_t count, float* logits, int32_t num_threads) {
  const int64_t bytes = specdec::MedusaPass(*heads, num_rows, count, nullptr).memory_bytes();
  const specdec::Scratch memory(bytes);
  if (!memory.is_allocated()) return false;
  specdec::MedusaPass pass(*heads, num_rows, count, memory.begin());
  specdec::run_parallel(num_threads,
                        [&](specdec::ThreadTeam team) { pass.run(x, logits, team); });
  return true;
}
