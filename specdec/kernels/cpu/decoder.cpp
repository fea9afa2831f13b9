#include "decoder.h"

#include <algorithm>
#include <atomic>
#include <vector>

#include "attention.h"
#include "elementwise.h"
#include "panels.h"

namespace specdec {

namespace {

// Rows whose hidden units are computed together, so that they stay near the processor.
constexpr int64_t kMlpRows = 128;

// Tokens of which a head is prepared at once: the keys of as many lie in few lines, and all that was
// computed for them in a cache.
constexpr int64_t kHeadTokens = 32;

// From so many rows a thread on, hidden units are gated row by row: fewer would divide badly.
constexpr int64_t kRowsToGateWhole = 2;

// A plan for each window that some layer has, and one more where the passes' memory begins.
std::vector<AttentionPlan> plans_of(const Decoder& model, const Batch& batch, int num_threads) {
  std::vector<AttentionPlan> plans;
  const AttentionShape shape = {model.num_heads, model.num_kv_heads, model.heads_per_kv,
                                model.first_in_group, model.head_dim};
  for (int64_t layer = 0; layer < model.num_layers; ++layer) {
    const int64_t window = model.layers[layer].window;
    const auto has_window = [&](const AttentionPlan& plan) { return plan.window() == window; };
    if (std::none_of(plans.begin(), plans.end(), has_window)) {
      plans.emplace_back(batch, shape, window, num_threads);
    }
  }
  return plans;
}

// Hands out a block of memory piece by piece, each beginning at a cache line.
class Arena {
 public:
  explicit Arena(void* memory) : begin_(static_cast<char*>(memory)) {}

  void* take(int64_t bytes) {
    void* piece = begin_ ? begin_ + used_ : nullptr;
    used_ += round_up(bytes, 64);
    return piece;
  }
  float* take_floats(int64_t count) { return static_cast<float*>(take(count * sizeof(float))); }
  int64_t used() const { return used_; }

 private:
  char* begin_;
  int64_t used_ = 0;
};

// Where a token stands in its sequence, and its KV in the pool.
struct Place {
  int64_t position, slot;
};

std::vector<Place> places_of(const Batch& batch) {
  std::vector<Place> places;
  places.reserve(batch.num_tokens);
  for (int64_t sequence = 0; sequence < batch.num_sequences; ++sequence) {
    const int64_t end = batch.context_lens[sequence];
    const int64_t count = batch.query_starts[sequence + 1] - batch.query_starts[sequence];
    for (int64_t position = end - count; position < end; ++position) {
      places.push_back({position, batch.slot(sequence, position)});
    }
  }
  return places;
}

// One forward pass. All threads of a team call its parts in the same order.
class Pass {
 public:
  Pass(const Decoder& model, const Batch& batch, KvCache cache, void* memory, int num_threads)
      : model_(model),
        batch_(batch),
        cache_(cache),
        places_(places_of(batch)),
        plans_(plans_of(model, batch, num_threads)) {
    Arena arena(memory);
    x_ = arena.take_floats(batch.num_tokens * model.hidden_size);
    normed_ = arena.take_floats(batch.num_tokens * model.hidden_size);
    heads_ = arena.take_floats(batch.num_tokens * heads_stride());
    attended_ = arena.take_floats(batch.num_tokens * attended_stride());
    units_ = arena.take_floats(mlp_rows() * units_stride());
    matrix_scratch_ = arena.take(matrix_scratch_bytes());
    attention_scratch_ = arena.take_floats(attention_scratch_floats());
    memory_bytes_ = arena.used();
  }

  int64_t memory_bytes() const { return memory_bytes_; }
  bool has_failed() const { return has_failed_; }

  void run(float* hidden, Team team) {
    embed(team);
    for (int64_t index = 0; index < model_.num_layers && !has_failed_; ++index) {
      const Layer& layer = model_.layers[index];
      attention(layer, index, team);
      if (!has_failed_) mlp(layer, team);
    }
    team.divide(batch_.num_tokens, [&](Range own) { norm(model_.final_norm, own, hidden); });
  }

 private:
  const Decoder& model_;
  const Batch& batch_;
  KvCache cache_;
  std::vector<Place> places_;  // [num_tokens]
  std::vector<AttentionPlan> plans_;
  std::atomic<bool> has_failed_{false};
  int64_t memory_bytes_;
  float* x_;         // [num_tokens, hidden_size], the residual stream
  float* normed_;    // [num_tokens, hidden_size]
  float* heads_;     // [num_tokens, query heads, then key and value heads, head_dim]
  float* attended_;  // [num_tokens, num_heads, head_dim]
  float* units_;     // [mlp_rows, 2, num_units], gates before what they gate
  void* matrix_scratch_;
  float* attention_scratch_;

  int64_t num_all_heads() const { return model_.num_heads + 2 * model_.num_kv_heads; }
  int64_t heads_stride() const { return num_all_heads() * model_.head_dim; }
  int64_t attended_stride() const { return model_.num_heads * model_.head_dim; }
  int64_t units_stride() const { return 2 * model_.num_units; }
  int64_t mlp_rows() const { return std::min(batch_.num_tokens, kMlpRows); }

  int64_t matrix_scratch_bytes() const {
    int64_t most = 0;
    for (int64_t index = 0; index < model_.num_layers; ++index) {
      const Layer& layer = model_.layers[index];
      for (const Matrix* matrix : {&layer.qkv, &layer.output}) {
        most = std::max(most, scratch_bytes(*matrix, batch_.num_tokens));
      }
      for (const Matrix* matrix : {&layer.gate_up, &layer.down}) {
        most = std::max(most, scratch_bytes(*matrix, mlp_rows()));
      }
    }
    return most;
  }

  int64_t attention_scratch_floats() const {
    int64_t most = 0;
    for (const AttentionPlan& plan : plans_) most = std::max(most, plan.scratch_floats());
    return most;
  }

  const AttentionPlan& plan_of(const Layer& layer) const {
    return *std::find_if(plans_.begin(), plans_.end(), [&](const AttentionPlan& plan) {
      return plan.window() == layer.window;
    });
  }

  KvLayer kv_of(int64_t layer) const {
    KvLayer kv = {cache_.data,       cache_.format,     model_.num_kv_heads,
                  cache_.num_blocks, batch_.block_size, model_.head_dim};
    kv.data += layer * kv.num_bytes();
    return kv;
  }

  void embed(Team team) {
    const Embedding& embedding = model_.embedding;
    team.divide(batch_.num_tokens, [&](Range own) {
      for (int64_t token = own.begin; token < own.end; ++token) {
        float* to = x_ + token * model_.hidden_size;
        const int64_t row = batch_.input_ids[token] - embedding.first_token;
        if (row < 0 || row >= embedding.num_tokens) {
          std::fill(to, to + model_.hidden_size, 0.0f);  // another rank's
        } else {
          copy_row(embedding, row, to);
        }
      }
    });
    reduce(batch_.num_tokens, x_, team);
  }

  void copy_row(const Embedding& embedding, int64_t row, float* to) {
    const PanelLayout layout(embedding.format, model_.hidden_size);
    with_format(embedding.format, [&](auto format) {
      using Element = typename Numbers<format>::Element;
      const auto* elements =
          static_cast<const Element*>(embedding.table ? embedding.table : embedding.panels);
      for (int64_t i = 0; i < model_.hidden_size; ++i) {
        const int64_t place =
            embedding.table ? row * model_.hidden_size + i : layout.place(row, i);
        to[i] = read_part<format>(elements + place, 1)[0];
      }
    });
  }

  // Writes the normalised hidden states of some tokens to `to` [num_tokens, hidden_size].
  void norm(const float* weight, Range tokens, float* to) {
    const int64_t size = model_.hidden_size;
    for (int64_t token = tokens.begin; token < tokens.end; ++token) {
      rms_norm(x_ + token * size, weight, model_.norm_eps, size, to + token * size);
    }
  }

  // A stage that normalises tokens and rounds them for the matrix that they are multiplied by.
  Rows normed_rows(const float* weight, const Matrix& matrix, Range tokens, Team team) {
    const int64_t size = model_.hidden_size;
    const Rows rows = {normed_ + tokens.begin * size, size, tokens.end - tokens.begin,
                       matrix_scratch_};
    team.divide(rows.count, [&](Range own) {
      norm(weight, {tokens.begin + own.begin, tokens.begin + own.end}, normed_);
      round_rows(matrix, rows, own);
    });
    return rows;
  }

  void attention(const Layer& layer, int64_t index, Team team) {
    const KvLayer kv = kv_of(index);
    const Range tokens = {0, batch_.num_tokens};
    const Rows normed = normed_rows(layer.input_norm, layer.qkv, tokens, team);
    multiply(layer.qkv, normed, heads_, heads_stride(), Store::kWrite, team);
    prepare_heads(layer, kv, team);
    plan_of(layer).attend(heads_, heads_stride(), kv, attended_, attended_stride(),
                          attention_scratch_, team);
    const Rows attended = {attended_, attended_stride(), batch_.num_tokens, matrix_scratch_};
    round_rows(layer.output, attended, team);
    add_to_stream(layer.output, attended, 0, team);
  }

  // Normalises and rotates queries and keys, and puts keys and values into the cache. Of a few tokens
  // head by head: a thread has most of the heads that it computed, and their keys share lines.
  void prepare_heads(const Layer& layer, const KvLayer& kv, Team team) {
    const int64_t num_parts = divide_up(batch_.num_tokens, kHeadTokens);
    team.for_each(num_parts * num_all_heads(), [&](int64_t index) {
      const int64_t head = index % num_all_heads();
      const Range tokens = Team{index / num_all_heads(), num_parts}.share(batch_.num_tokens);
      for (int64_t token = tokens.begin; token < tokens.end; ++token) {
        prepare_head(layer, kv, token, head,
                     heads_ + token * heads_stride() + head * model_.head_dim);
      }
    });
  }

  void prepare_head(const Layer& layer, const KvLayer& kv, int64_t token, int64_t head,
                    float* values) {
    const int64_t dim = model_.head_dim, half = dim / 2;
    const Place place = places_[token];
    const int64_t kv_head = head - model_.num_heads;
    if (kv_head >= model_.num_kv_heads) {
      kv.write_value(kv_head - model_.num_kv_heads, place.slot, values);
      return;
    }
    const float* weight = kv_head < 0 ? layer.query_norm : layer.key_norm;
    if (weight) rms_norm(values, weight, model_.norm_eps, dim, values);
    const int64_t first = place.position * half;
    rotate(values, model_.cos + first, model_.sin + first, dim);
    if (kv_head >= 0) kv.write_key(kv_head, place.slot, values);
  }

  void mlp(const Layer& layer, Team team) {
    for (int64_t first = 0; first < batch_.num_tokens && !has_failed_; first += kMlpRows) {
      const Range tokens = {first, std::min(first + kMlpRows, batch_.num_tokens)};
      const Rows normed = normed_rows(layer.mlp_norm, layer.gate_up, tokens, team);
      multiply(layer.gate_up, normed, units_, units_stride(), Store::kWrite, team);
      const Rows gated = gated_rows(layer.down, tokens.end - first, team);
      add_to_stream(layer.down, gated, first, team);
    }
  }

  // Gates hidden units, and rounds them for the matrix that they are multiplied by: in one stage,
  // row by row. Where rows are few, or not rounded, they are divided vector by vector, so that a
  // single one is shared too, and rounded in a stage of its own.
  Rows gated_rows(const Matrix& matrix, int64_t num_rows, Team team) {
    const Rows rows = {units_, units_stride(), num_rows, matrix_scratch_};
    const int64_t per_row = divide_up(model_.num_units, kLanes);
    if (!rounds_rows(matrix) || num_rows < kRowsToGateWhole * team.size) {
      team.divide(num_rows * per_row, [&](Range own) { gate(own, per_row); });
      round_rows(matrix, rows, team);
    } else {
      team.divide(num_rows, [&](Range own) {
        gate({own.begin * per_row, own.end * per_row}, per_row);
        round_rows(matrix, rows, own);
      });
    }
    return rows;
  }

  // Of vectors of hidden units, per_row of them in a row.
  void gate(Range vectors, int64_t per_row) {
    for (int64_t i = vectors.begin; i < vectors.end;) {
      const int64_t row = i / per_row, begin = i % per_row;
      const int64_t end = std::min(per_row, begin + vectors.end - i);
      float* gates = units_ + row * units_stride() + begin * kLanes;
      gate_units(gates, gates + model_.num_units,
                 std::min(end * kLanes, model_.num_units) - begin * kLanes);
      i += end - begin;
    }
  }

  // Adds a projection of rows, its partial results summed over the ranks, to the stream from token
  // `first` on. What the stream held, equal on every rank, is the first one's to bring to the sum;
  // so is the bias.
  void add_to_stream(const Matrix& matrix, const Rows& rows, int64_t first, Team team) {
    const int64_t size = model_.hidden_size;
    multiply(matrix, rows, x_ + first * size, size,
             model_.rank == 0 ? Store::kAdd : Store::kWrite, team);
    reduce(rows.count, x_ + first * size, team);
  }

  // Sums rows of the stream over the ranks. All threads meet before it can fail: one that is behind
  // has yet to see that it did not fail before, and all must come to the same stages.
  void reduce(int64_t num_rows, float* data, Team team) {
    const int64_t count = num_rows * model_.hidden_size;
    if (model_.reducer) {
      if (!specdec::all_reduce(model_.reducer, data, count, team)) has_failed_ = true;
    } else if (model_.all_reduce) {
      team.barrier();
      if (team.index == 0 && !model_.all_reduce(data, count)) has_failed_ = true;
      team.barrier();
    }
  }
};

}  // namespace

}  // namespace specdec

// Bytes of memory that the forward pass of a batch needs besides what it reads and writes.
SPECDEC_EXPORT int64_t specdec_decoder_memory_bytes(const specdec::Decoder* model,
                                                    const specdec::Batch* batch,
                                                    int32_t num_threads) {
  return specdec::Pass(*model, *batch, {}, nullptr, num_threads).memory_bytes();
}

// Writes the batch's KV into the cache and its hidden states to `hidden` [num_tokens, hidden_size].
// memory: of memory_bytes; where that is too little, nothing is done but to say so.
SPECDEC_EXPORT specdec::PassResult specdec_decoder_forward(
    const specdec::Decoder* model, const specdec::Batch* batch, const specdec::KvCache* cache,
    void* memory, int64_t memory_bytes, float* hidden, int32_t num_threads) {
  specdec::Pass pass(*model, *batch, *cache, memory, num_threads);
  if (pass.memory_bytes() > memory_bytes) return specdec::PassResult::kNeedsMemory;
  specdec::run_team(num_threads, [&](specdec::Team team) { pass.run(hidden, team); });
  return pass.has_failed() ? specdec::PassResult::kPeerLost : specdec::PassResult::kDone;
}
