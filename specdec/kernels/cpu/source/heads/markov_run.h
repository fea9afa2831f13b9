// The Markov head of DSpark over the tokens of a draft.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>

#include "base/arena.h"
#include "base/elementwise.h"
#include "collectives/allreduce.h"
#include "decoder/embedding.h"
#include "gemm/matrix.h"
#include "heads/block_head.h"

namespace specdec {

// Adds the bias of a Markov head to logits, token by token of `num_rows` drafts. Ranks share
// memory. All threads of a team call `begin`, then `add_bias` for each token; between the levels of
// trees, whose nodes are the rows, one calls `set_num_rows` and all call `follow`.
class MarkovRun {
 public:
  MarkovRun(const Markov& markov, int64_t hidden_size, Communicator* communicator,
            int64_t num_rows, Arena& arena)
      : markov_(markov),
        hidden_size_(hidden_size),
        communicator_(communicator),
        num_rows_(num_rows),
        embedded_(arena.allocate_floats(num_rows * markov.size)) {
    int64_t scratch = scratch_bytes(markov.output, num_rows);
    if (has_projection()) {
      inputs_ = arena.allocate_floats(num_rows * num_inputs());
      projected_ = arena.allocate_floats(num_rows * num_projected());
      memory_ = arena.allocate_floats(num_rows * markov.size);
      memory_before_ = arena.allocate_floats(num_rows * markov.size);
      scratch = std::max(scratch, scratch_bytes(markov.projection, num_rows));
    }
    matrix_scratch_ = arena.allocate(scratch);
  }

  // Run a stage before the first token.
  void begin(ThreadTeam team) {
    if (!is_recurrent()) return;
    team.parallel_for_ranges(num_rows_ * markov_.size, [&](Range own) {
      std::fill(memory_ + own.begin, memory_ + own.end, 0.0f);
    });
  }

  // Use the first `num_rows` of the rows that there is memory for. One thread calls it, in a stage
  // that all threads have reached.
  void set_num_rows(int64_t num_rows) { num_rows_ = num_rows; }

  // Run stages that give each row the state of one of the rows before.
  void follow(const int64_t* rows_before, ThreadTeam team) {
    if (!is_recurrent()) return;
    team.parallel_for(1, [&](int64_t) { std::swap(memory_, memory_before_); });
    team.parallel_for(num_rows_, [&](int64_t row) {
      const int64_t size = markov_.size;
      std::copy_n(memory_before_ + rows_before[row] * size, size, memory_ + row * size);
    });
  }

  // Add the bias to logits [num_rows, num_tokens]. tokens: the target's ids of the tokens before,
  // [num_rows]. outputs: of the slots of the block, [num_rows, hidden_size]. Return false, on every
  // thread, when a peer is lost.
  bool add_bias(const int32_t* tokens, const float* outputs, float* logits, ThreadTeam team) {
    team.parallel_for(num_rows_, [&](int64_t row) {
      load_embedding(markov_.embedding, tokens[row], markov_.size, embedded(row));
    });
    if (!sum_over_ranks(embedded_, markov_.size, team)) return false;
    if (has_projection() && !project(outputs, team)) return false;
    multiply(markov_.output, embedded_, markov_.size, logits, Store::kAccumulate, team);
    return true;
  }

 private:
  const Markov& markov_;
  int64_t hidden_size_;
  Communicator* communicator_;
  int64_t num_rows_;
  float* embedded_;             // [num_rows, size], then the latent state
  float* inputs_ = nullptr;     // [num_rows, num_inputs]
  float* projected_ = nullptr;  // [num_rows, num_projected]
  float* memory_ = nullptr;     // [num_rows, size], of kRecurrent
  float* memory_before_ = nullptr;
  void* matrix_scratch_;

  bool is_recurrent() const { return markov_.kind == MarkovKind::kRecurrent; }
  bool has_projection() const { return is_recurrent() || markov_.kind == MarkovKind::kGated; }
  int64_t num_inputs() const { return hidden_size_ + (is_recurrent() ? 2 : 1) * markov_.size; }
  int64_t num_projected() const { return (is_recurrent() ? 3 : 1) * markov_.size; }
  float* embedded(int64_t row) const { return embedded_ + row * markov_.size; }

  // Replace the embeddings by the latent states.
  bool project(const float* outputs, ThreadTeam team) {
    team.parallel_for(num_rows_, [&](int64_t row) { join(row, outputs + row * hidden_size_); });
    multiply(markov_.projection, inputs_ + markov_.first_input, num_inputs(), projected_,
             Store::kOverwrite, team);
    if (!sum_over_ranks(projected_, num_projected(), team)) return false;
    team.parallel_for(num_rows_, [&](int64_t row) {
      const int64_t size = markov_.size;
      const float* from = projected_ + row * num_projected();
      if (is_recurrent()) {
        update_memory(from, from + size, size, memory_ + row * size);
        tanh_of(from + 2 * size, size, embedded(row));
      } else {
        multiply_by_sigmoid(from, size, embedded(row));
      }
    });
    return true;
  }

  // Write the inputs of the projection.
  void join(int64_t row, const float* output) {
    const int64_t size = markov_.size;
    float* to = inputs_ + row * num_inputs();
    if (is_recurrent()) {
      to = std::copy_n(memory_ + row * size, size, to);
      to = std::copy_n(embedded(row), size, to);
      std::copy_n(output, hidden_size_, to);
    } else {
      to = std::copy_n(output, hidden_size_, to);
      std::copy_n(embedded(row), size, to);
    }
  }

  void multiply(const Matrix& matrix, const float* x, int64_t stride, float* y, Store store,
                ThreadTeam team) {
    const Activations rows = {x, stride, num_rows_, matrix_scratch_};
    quantize_rows(matrix, rows, team);
    gemm(matrix, rows, y, matrix.out_features, store, team);
  }

  bool sum_over_ranks(float* rows, int64_t size, ThreadTeam team) {
    return !communicator_ || all_reduce(communicator_, rows, num_rows_ * size, team);
  }
};

}  // namespace specdec
