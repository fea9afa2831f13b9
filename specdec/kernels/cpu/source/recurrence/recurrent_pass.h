// The recurrent layers of one pass over a batch.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "attention/batch.h"
#include "base/arena.h"
#include "base/elementwise.h"
#include "recurrence/convolution.h"
#include "recurrence/delta_rule.h"
#include "recurrence/recurrence.h"
#include "recurrence/states.h"
#include "threads/thread_team.h"

namespace specdec {

// Of the norms of queries and keys, which have no weights.
constexpr float kDeltaNormEps = 1e-6f;

// Runs recurrences and commits states. All threads of a team call it. Each channel and each head of
// a sequence is computed from its own inputs alone, one token after the other, so a row's bits do
// not depend on its batch, on the chunks of its prompt or on the number of its guesses.
class RecurrentPass {
 public:
  // Takes no memory where the model has no recurrent layers.
  RecurrentPass(const RecurrentShape& shape, float norm_eps, const Batch& batch, int num_threads,
                Arena& arena)
      : shape_(shape), columns_(columns_of(shape)), norm_eps_(norm_eps), batch_(batch) {
    if (shape.kind == RecurrenceKind::kNone) return;
    int64_t num_stored = 0, num_run = 0;
    for (int64_t index = 0; index < batch.num_sequences; ++index) {
      const StateSpan& span = batch.states->spans[index];
      const int64_t first = batch.query_starts[index];
      const int64_t num_tokens = batch.query_starts[index + 1] - first;
      const int64_t end = span.num_replayed + num_tokens;
      rows_.push_back({span, first, num_tokens, num_stored, num_run,
                       tree_order(batch, index, end)});
      num_states_ = std::max(num_states_, rows_.back().tree.num_states);
      num_stored += shape.window() + span.num_replayed;
      num_run += end;
    }
    stored_ = arena.allocate_floats(num_stored * shape.num_inputs());
    const int64_t num_scalars = num_run * shape.num_heads;
    scalars_ = static_cast<TokenScalars*>(arena.allocate(num_scalars * sizeof(TokenScalars)));
    scratch_ = arena.allocate_floats(num_threads * scratch_floats());
    if (shape.kind != RecurrenceKind::kStateSpace) return;
    head_squares_ = arena.allocate_floats(batch.num_tokens * shape.num_heads);
    squares_ = arena.allocate_floats(batch.num_tokens * shape.num_keys);
  }

  // Run a layer. place: among those that are recurrent. projected: [num_tokens, stride],
  // overwritten. output: [num_tokens, num_outputs]. sum(count, data): sums over the ranks, and
  // returns whether that succeeded.
  template <typename Sum>
  void run(const RecurrentWeights& weights, int64_t place, float* projected, int64_t stride,
           float* output, ThreadTeam team, const Sum& sum) {
    const LayerRun layer = {weights, place, projected, stride, output};
    mix_inputs(layer, team);
    if (!shape_.num_heads) return;
    const int64_t num_heads = shape_.num_heads;
    team.parallel_for(batch_.num_sequences * num_heads, [&](int64_t index) {
      float* const scratch = scratch_ + team.index * scratch_floats();
      run_head_of(layer, rows_[index / num_heads], index % num_heads, scratch);
    });
    if (shape_.kind == RecurrenceKind::kStateSpace) normalize_groups(layer, team, sum);
  }

 private:
  // The tokens of one sequence, and the places of its rows in the buffers of the pass.
  struct SequenceRows {
    StateSpan span;
    int64_t first_token, num_tokens, first_stored, first_run;
    TreeOrder tree;

    int64_t num_run() const { return span.num_replayed + num_tokens; }
  };

  struct LayerRun {
    const RecurrentWeights& weights;
    int64_t place;
    float* projected;
    int64_t stride;
    float* output;
  };

  // Columns per task: whole cache lines.
  static constexpr int64_t kBlockColumns = 16;

  const RecurrentShape& shape_;
  const RecurrentColumns columns_;
  const float norm_eps_;
  const Batch& batch_;
  std::vector<SequenceRows> rows_;  // [num_sequences]
  int64_t num_states_ = 1;          // of a head that the scratch memory has at once
  float* stored_ = nullptr;         // [windows and replayed inputs of all sequences, num_inputs]
  TokenScalars* scalars_ = nullptr;  // of each sequence, [num_heads, rows that run]
  float* scratch_ = nullptr;         // [threads, scratch_floats]
  float* head_squares_ = nullptr;    // [num_tokens, num_heads], of gated outputs
  float* squares_ = nullptr;         // [num_tokens, groups]

  int64_t scratch_floats() const {
    return num_states_ * shape_.key_dim * kMemoryVectors * kLanes;
  }

  InputRows inputs_of(const LayerRun& layer, const SequenceRows& rows) const {
    const int64_t size = shape_.num_inputs();
    return {stored_ + rows.first_stored * size, shape_.window() + rows.span.num_replayed, size,
            layer.projected + rows.first_token * layer.stride + columns_.inputs, layer.stride};
  }

  // Return the first input of a slot, in the format of the pool.
  template <typename Element>
  Element* slot_inputs(const LayerRun& layer, int64_t slot) const {
    const StatePool& states = *batch_.states;
    const int64_t first = (layer.place * states.num_slots + slot) * states.slot_size;
    return static_cast<Element*>(states.inputs) + first * shape_.num_inputs();
  }

  // Run a stage that stores the inputs which later rows need, and convolves channels.
  void mix_inputs(const LayerRun& layer, ThreadTeam team) const {
    const int64_t size = shape_.num_inputs();
    dispatch_format(batch_.states->format, [&](auto format) {
      team.parallel_for_ranges(ceil_div(size, kBlockColumns), [&](Range blocks) {
        const Range own = {blocks.begin * kBlockColumns,
                           std::min(blocks.end * kBlockColumns, size)};
        for (const SequenceRows& rows : rows_) mix_columns<format>(layer, rows, own);
      });
    });
  }

  template <Format kFormat>
  void mix_columns(const LayerRun& layer, const SequenceRows& sequence, Range own) const {
    using Element = typename FormatTraits<kFormat>::Element;
    const InputRows rows = inputs_of(layer, sequence);
    const int64_t size = shape_.num_inputs(), count = own.end - own.begin;
    Element* const slot = slot_inputs<Element>(layer, sequence.span.slot) + own.begin;
    for (int64_t i = 0; i < rows.num_stored; ++i) {
      load_numbers<kFormat>(slot + i * size, count, rows.row(i) + own.begin);
    }
    const int64_t end = rows.num_stored + sequence.num_tokens;
    for (int64_t i = rows.num_stored; i < end; ++i) {
      float* const x = rows.row(i) + own.begin;
      if (!shape_.num_heads) scale_by_weight(x, 1.0f, x + 2 * size, count);  // gate * value
      round_numbers<kFormat>(x, count);
    }
    const int64_t num_kept = shape_.window() + sequence.span.num_kept;
    for (int64_t i = 0; i < num_kept; ++i) {
      const float* const x = rows.row(sequence.span.num_committed() + i) + own.begin;
      store_numbers<kFormat>(x, count, slot + i * size);
    }
    const Range channels = {std::max(own.begin - columns_.channels, int64_t{0}),
                            std::min(own.end - columns_.channels, shape_.num_channels)};
    if (channels.begin >= channels.end) return;
    const int64_t begin = shape_.num_heads ? shape_.window() : rows.num_stored;
    convolve(shape_, layer.weights, rows, begin, end, sequence.tree, channels, columns_.channels);
    if (!shape_.num_heads) gate_channels(layer, sequence, own);
  }

  // Write the gated results of a short convolution.
  void gate_channels(const LayerRun& layer, const SequenceRows& sequence, Range own) const {
    const int64_t first = sequence.first_token, count = own.end - own.begin;
    for (int64_t token = first; token < first + sequence.num_tokens; ++token) {
      const float* const x = layer.projected + token * layer.stride + own.begin;
      float* const to = layer.output + token * shape_.num_channels + own.begin;
      std::copy_n(x, count, to);
      scale_by_weight(to, 1.0f, x + columns_.gates, count);
    }
  }

  // Run the recurrence of a head over the rows of a sequence, and write its gated outputs.
  void run_head_of(const LayerRun& layer, const SequenceRows& sequence, int64_t head,
                   float* scratch) const {
    const int64_t key = shape_.key_of(head) * shape_.key_dim;
    const int64_t slot = layer.place * batch_.states->num_slots + sequence.span.slot;
    const int64_t num_outputs = shape_.num_values(), of_head = head * shape_.value_dim;
    TokenScalars* const scalars =
        scalars_ + sequence.first_run * shape_.num_heads + head * sequence.num_run();
    HeadRun run;
    run.has_delta = shape_.kind == RecurrenceKind::kGatedDelta;
    run.key_dim = shape_.key_dim, run.value_dim = shape_.value_dim;
    run.rows = inputs_of(layer, sequence), run.first = shape_.window();
    run.num_run = sequence.num_run(), run.num_committed = sequence.span.num_committed();
    run.num_replayed = sequence.span.num_replayed, run.tree = &sequence.tree;
    run.query = columns_.queries + key, run.key = columns_.keys + key;
    run.value = columns_.values + of_head;
    run.scalars = scalars, run.scratch = scratch;
    run.memory = batch_.states->memory + slot * shape_.memory_size() +
                 of_head * shape_.key_dim;
    run.outputs = layer.output + sequence.first_token * num_outputs + of_head;
    run.output_stride = num_outputs;
    for (int64_t i = 0; i < run.num_run; ++i) {
      scalars[i] = scalars_of(layer, run, run.rows.row(run.first + i), head);
    }
    run_head(run);
    for (int64_t i = 0; i < sequence.num_tokens; ++i) {
      gate_output(layer, run, sequence.first_token + i, head,
                  run.rows.row(run.rows.num_stored + i));
    }
  }

  TokenScalars scalars_of(const LayerRun& layer, const HeadRun& run, const float* input,
                          int64_t head) const {
    const float step = softplus(input[columns_.decays + head] + layer.weights.step_biases[head]);
    const float decay = std::exp(-layer.weights.decay_rates[head] * step);
    if (!run.has_delta) return {decay, step, 1.0f, 1.0f};
    const float share = 1.0f / (1.0f + std::exp(-input[columns_.shares + head]));
    const float query = scale_of(input + run.query), key = scale_of(input + run.key);
    return {decay, share, query / std::sqrt(float(run.key_dim)), key};
  }

  // Return the factor of a query or key that normalizes it.
  float scale_of(const float* key) const {
    return 1.0f / std::sqrt(sum_squares(key, shape_.key_dim) + kDeltaNormEps);
  }

  static float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

  // Normalize and gate the output of a head in place; with groups, which are normalized over
  // several heads, only gate it. input: of the token.
  void gate_output(const LayerRun& layer, const HeadRun& run, int64_t token, int64_t head,
                   const float* input) const {
    const int64_t size = shape_.value_dim, of_head = head * size;
    float* const output = layer.output + token * shape_.num_values() + of_head;
    const float* const gates = layer.projected + token * layer.stride + columns_.gates + of_head;
    if (run.has_delta) {
      rms_norm(output, layer.weights.norm, norm_eps_, size, output);
      return multiply_by_silu(gates, size, output);
    }
    add_scaled(input + run.value, layer.weights.skips[head], size, output);
    multiply_by_silu(gates, size, output);
    head_squares_[token * shape_.num_heads + head] = sum_squares(output, size);
  }

  // Run stages that normalize outputs over the heads of each group, of all ranks.
  template <typename Sum>
  void normalize_groups(const LayerRun& layer, ThreadTeam team, const Sum& sum) const {
    const int64_t num_heads = shape_.num_heads, num_groups = shape_.num_keys;
    const int64_t size = shape_.value_dim;
    team.parallel_for_ranges(batch_.num_tokens, [&](Range own) {
      std::fill(squares_ + own.begin * num_groups, squares_ + own.end * num_groups, 0.0f);
      for (int64_t i = own.begin * num_heads; i < own.end * num_heads; ++i) {
        squares_[i / num_heads * num_groups + shape_.key_of(i % num_heads)] += head_squares_[i];
      }
    });
    if (!sum(batch_.num_tokens * num_groups, squares_)) return;
    team.parallel_for_ranges(batch_.num_tokens * num_heads, [&](Range own) {
      for (int64_t i = own.begin; i < own.end; ++i) {
        const int64_t head = i % num_heads;
        const float mean = squares_[i / num_heads * num_groups + shape_.key_of(head)] /
                           float(shape_.heads_per_key * size);
        scale_by_weight(layer.output + i * size, 1.0f / std::sqrt(mean + norm_eps_),
                        layer.weights.norm + head * size, size);
      }
    });
  }
};

}  // namespace specdec
