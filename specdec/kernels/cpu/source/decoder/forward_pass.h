// The layers of a decoder over one batch, with the steps before and after them.
#pragma once

#include <algorithm>
#include <atomic>
#include <optional>
#include <vector>

#include "base/arena.h"
#include "base/elementwise.h"
#include "decoder/decoder.h"
#include "decoder/embedding.h"
#include "decoder/hidden_units.h"
#include "decoder/latent_attention.h"
#include "decoder/layer_plans.h"
#include "decoder/lora_pass.h"
#include "decoder/mixture.h"
#include "decoder/pass_sizes.h"
#include "decoder/rope_and_cache.h"
#include "gemm/gemm_float.h"
#include "recurrence/recurrent_pass.h"

namespace specdec {

// A layer's place among all layers, and among those with attention or those with a recurrence.
struct LayerIndex {
  int64_t of_all, of_kind;
};

// Rows of an MLP pass; their hidden units stay in the cache.
constexpr int64_t kMlpRows = 128;

// One forward pass. All threads of a team call its steps in the same order.
class ForwardPass {
 public:
  // memory: null to count the bytes only. extra: blocks beside those of the cache. taps: null for
  // none.
  ForwardPass(const Decoder& model, const Batch& batch, KvCache cache, void* memory,
              int num_threads, ExtraKv extra = {}, const Taps* taps = nullptr)
      : model_(model),
        batch_(batch),
        cache_(cache),
        extra_(extra),
        taps_(taps),
        widths_(model),
        rope_and_cache_(model, batch),
        plans_(make_plans(model, batch, num_threads)) {
    Arena arena(memory);
    residual_ = arena.allocate_floats(batch.num_tokens * model.hidden_size);
    normed_ = arena.allocate_floats(batch.num_tokens * model.hidden_size);
    qkv_ = arena.allocate_floats(batch.num_tokens * widths_.projection);
    if (has_one_qk_norm()) squares_ = arena.allocate_floats(batch.num_tokens * 2);
    latent_attention_.emplace(model, rope_and_cache_, batch.num_tokens, arena);
    recurrent_.emplace(model.recurrent, model.norm_eps, batch, num_threads, arena);
    attention_output_ = arena.allocate_floats(batch.num_tokens * widths_.output);
    hidden_units_ = arena.allocate_floats(mlp_rows() * widths_.hidden_units);
    mixture_.emplace(model, mlp_rows(), arena);
    matrix_scratch_ = arena.allocate(matrix_scratch_bytes(model, batch.num_tokens, mlp_rows()));
    attention_scratch_ = arena.allocate_floats(attention_scratch_floats());
    adapters_.emplace(batch, arena);
    memory_bytes_ = arena.used();
  }

  int64_t memory_bytes() const { return memory_bytes_; }
  bool has_failed() const { return has_failed_; }

  // The residual stream [num_tokens, hidden_size]: the input and output of the layers.
  float* residual() { return residual_; }

  // Set the residual stream to the embeddings of the tokens.
  void embed(ThreadTeam team) {
    team.parallel_for_ranges(batch_.num_tokens, [&](Range own) {
      for (int64_t token = own.begin; token < own.end; ++token) {
        const int64_t size = model_.hidden_size;
        float* to = residual_ + token * size;
        load_embedding(model_.embedding, batch_.input_ids[token], size, to);
        if (model_.traits.embedding_scale != 1.0f) scale(to, model_.traits.embedding_scale, size);
      }
    });
    all_reduce(batch_.num_tokens * model_.hidden_size, residual_, team);
  }

  // Replace the residual stream by a projection whose inputs are divided over the ranks.
  // inputs: this rank's, of all tokens.
  void project(const Matrix& matrix, const float* inputs, int64_t stride, ThreadTeam team) {
    const Activations rows = {inputs, stride, batch_.num_tokens, matrix_scratch_};
    quantize_rows(matrix, rows, team);
    const int64_t size = model_.hidden_size;
    gemm(matrix, rows, residual_, size, Store::kOverwrite, team);
    adapters_->adapt({0, &LoraLayer::fusion}, {0, batch_.num_tokens}, rows, residual_, size, team);
    all_reduce(batch_.num_tokens * size, residual_, team);
  }

  // Run the layers. first_input: what the first layer projects to queries, keys and values,
  // [num_tokens, in_features]; null for the normalized residual stream.
  void run_layers(const float* first_input, ThreadTeam team) {
    int64_t num_recurrent = 0;
    for (int64_t index = 0; index < model_.num_layers && !has_failed_; ++index) {
      const Layer& layer = model_.layers[index];
      const int64_t place = layer.recurrent ? num_recurrent++ : index - num_recurrent;
      mix_tokens(layer, {index, place}, index == 0 ? first_input : nullptr, team);
      if (!has_failed_) mlp(layer, index, team);
    }
  }

  // Return the KV of one of the layers with attention, in the cache and in the extra blocks.
  KvLayer kv_layer(int64_t layer) const {
    return kv_of_layer(model_, cache_, extra_, batch_.block_size, layer);
  }

  // Run a stage that writes the hidden states after the final norm, [num_tokens, hidden_size].
  void write_hidden(float* hidden, ThreadTeam team) {
    team.parallel_for_ranges(batch_.num_tokens, [&](Range own) {
      copy_to_taps(model_.num_layers, own);
      norm(model_.final_norm, own, hidden);
    });
  }

  // Write the hidden state [hidden_size] of a token after the final norm.
  void write_hidden_row(int64_t token, float* hidden) const {
    norm_row(model_.final_norm, residual_ + token * model_.hidden_size, hidden);
  }

 private:
  const Decoder& model_;
  const Batch& batch_;
  KvCache cache_;
  ExtraKv extra_;
  const Taps* taps_;
  const Widths widths_;
  RopeAndCache rope_and_cache_;
  std::vector<AttentionPlan> plans_;
  std::atomic<bool> has_failed_{false};
  int64_t memory_bytes_;
  float* residual_;  // [num_tokens, hidden_size], the residual stream
  float* normed_;    // [num_tokens, hidden_size]
  // [num_tokens, num_heads + 2 * num_kv_heads, head_dim]: query, key, value heads, after gates if
  // any; with latents as in LatentAttention; with a recurrence as in RecurrentColumns
  float* qkv_;
  float* squares_ = nullptr;  // [num_tokens, 2], of queries and of keys; null without such a norm
  std::optional<LatentAttention> latent_attention_;  // without memory where there are no latents
  std::optional<RecurrentPass> recurrent_;  // without memory where no layer is recurrent
  float* attention_output_;  // [num_tokens, num_heads, dimensions of values]
  std::optional<LoraPass> adapters_;
  float* hidden_units_;  // [mlp_rows, 1 or 2, num_hidden_units]: gate, if any, then up projection
  std::optional<Mixture> mixture_;  // of experts; without memory where there are none
  void* matrix_scratch_;
  float* attention_scratch_;

  int64_t num_all_heads() const { return model_.num_heads + 2 * model_.num_kv_heads; }
  bool has_one_qk_norm() const { return model_.traits.qk_norm == QkNorm::kAllHeads; }
  int64_t mlp_rows() const { return std::min(batch_.num_tokens, kMlpRows); }

  int64_t attention_scratch_floats() const {
    int64_t max_size = 0;
    for (const AttentionPlan& plan : plans_) max_size = std::max(max_size, plan.scratch_floats());
    return max_size;
  }

  const AttentionPlan& plan_for(const Layer& layer) const {
    return *std::find_if(plans_.begin(), plans_.end(), [&](const AttentionPlan& plan) {
      return plan.visibility() == visibility_in(layer);
    });
  }

  // Copy the residual stream of `tokens` that enters a layer to the taps of this layer. Where a
  // stage reads these rows anyway, it calls this: a separate stage costs a barrier.
  void copy_to_taps(int64_t layer, Range tokens) const {
    if (!taps_) return;
    const int64_t size = model_.hidden_size;
    for (int64_t tap = 0; tap < taps_->count; ++tap) {
      if (taps_->layers[tap] != layer) continue;
      for (int64_t token = tokens.begin; token < tokens.end; ++token) {
        const float* from = residual_ + token * size;
        std::copy(from, from + size, taps_->output + (token * taps_->count + tap) * size);
      }
    }
  }

  // Write the normalized row x [hidden_size] to `to`, which may be x.
  void norm_row(const Norm& norm, const float* x, float* to) const {
    const int64_t size = model_.hidden_size;
    if (model_.traits.norm == NormKind::kLayer) {
      layer_norm(x, norm.weight, norm.bias, model_.norm_eps, size, to);
    } else {
      rms_norm(x, norm.weight, model_.norm_eps, size, to);
    }
  }

  // Write the normalized hidden states of `tokens` to `to` [num_tokens, hidden_size].
  void norm(const Norm& norm, Range tokens, float* to) {
    const int64_t size = model_.hidden_size;
    for (int64_t token = tokens.begin; token < tokens.end; ++token) {
      norm_row(norm, residual_ + token * size, to + token * size);
    }
  }

  // Return the quantized input of a layer's half: the residual stream, normalized if the half has a
  // norm; the MLP of a parallel layer reads what attention has read.
  Activations layer_input(const Norm& weights, const Matrix& matrix, Range tokens,
                          ThreadTeam team) {
    if (weights.weight) return normed_input(weights, matrix, tokens, std::nullopt, team);
    const int64_t size = model_.hidden_size;
    const float* x = model_.traits.is_parallel ? normed_ : residual_;
    const Activations rows = {x + tokens.begin * size, size, tokens.end - tokens.begin,
                              matrix_scratch_};
    quantize_rows(matrix, rows, team);
    return rows;
  }

  // Return the normalized and quantized residual stream; copy it to the taps of a layer, if given.
  Activations normed_input(const Norm& weights, const Matrix& matrix, Range tokens,
                           std::optional<int64_t> tapped_layer, ThreadTeam team) {
    const int64_t size = model_.hidden_size;
    const Activations rows = {normed_ + tokens.begin * size, size, tokens.end - tokens.begin,
                              matrix_scratch_};
    team.parallel_for_ranges(rows.count, [&](Range own) {
      const Range own_tokens = {tokens.begin + own.begin, tokens.begin + own.end};
      if (tapped_layer) copy_to_taps(*tapped_layer, own_tokens);
      norm(weights, own_tokens, normed_);
      quantize_rows(matrix, rows, own);
    });
    return rows;
  }

  // Return the quantized input of attention: `rows` if given, else that of the layer.
  Activations attention_input(const Layer& layer, int64_t index, const float* rows,
                              ThreadTeam team) {
    const Range tokens = {0, batch_.num_tokens};
    if (!rows && layer.input_norm.weight) {
      return normed_input(layer.input_norm, layer.qkv, tokens, index, team);
    }
    if (taps_) {
      team.parallel_for_ranges(tokens.end, [&](Range own) { copy_to_taps(index, own); });
    }
    if (!rows) return layer_input(layer.input_norm, layer.qkv, tokens, team);
    const Activations input = {rows, layer.qkv.in_features, batch_.num_tokens, matrix_scratch_};
    quantize_rows(layer.qkv, input, team);
    return input;
  }

  // Run a stage that sums the squares of each token's queries and keys, over all ranks.
  void sum_head_squares(ThreadTeam team) {
    const int64_t dim = model_.head_dim, num_heads = model_.num_heads;
    const int64_t first_key = num_heads + model_.first_counted_kv_head;
    const int64_t num_keys = num_heads + model_.num_kv_heads - first_key;
    team.parallel_for_ranges(batch_.num_tokens, [&](Range own) {
      for (int64_t token = own.begin; token < own.end; ++token) {
        const float* heads = qkv_ + token * widths_.qkv + widths_.gates;
        squares_[2 * token] = sum_squares(heads, num_heads * dim);
        squares_[2 * token + 1] = sum_squares(heads + first_key * dim, num_keys * dim);
      }
    });
    all_reduce(batch_.num_tokens * 2, squares_, team);
  }

  // Run the half of a layer that mixes tokens: attention, or a recurrence.
  void mix_tokens(const Layer& layer, LayerIndex index, const float* input_rows, ThreadTeam team) {
    const Activations input = attention_input(layer, index.of_all, input_rows, team);
    const int64_t stride = layer.recurrent ? layer.qkv.out_features : widths_.qkv;
    gemm(layer.qkv, input, qkv_, stride, Store::kOverwrite, team);
    adapters_->adapt({index.of_all, &LoraLayer::qkv}, {0, batch_.num_tokens}, input, qkv_, stride,
                     team);
    if (layer.recurrent) {
      recur(layer, index.of_kind, team);
    } else {
      layer.latent ? attend_to_latents(layer, index, team)
                   : attend_to_heads(layer, index.of_kind, team);
    }
    if (has_failed_) return;
    const Activations rows = {attention_output_, layer.output.in_features, batch_.num_tokens,
                              matrix_scratch_};
    quantize_rows(layer.output, rows, team);
    project_to_residual(layer.output, {index.of_all, &LoraLayer::output}, rows, 0,
                        layer.attention_output_norm, team);
  }

  // Write the outputs of a recurrence, and the states after it.
  void recur(const Layer& layer, int64_t place, ThreadTeam team) {
    recurrent_->run(*layer.recurrent, place, qkv_, layer.qkv.out_features, attention_output_, team,
                    [&](int64_t count, float* data) {
                      all_reduce(count, data, team);
                      return !has_failed_;
                    });
  }

  // Write the KV of the projections, and attention's output.
  void attend_to_heads(const Layer& layer, int64_t place, ThreadTeam team) {
    const KvLayer kv = kv_layer(place);
    if (has_one_qk_norm()) sum_head_squares(team);
    if (has_failed_) return;
    float* const heads = qkv_ + widths_.gates;
    rope_and_cache_.run(layer, kv, {0, num_all_heads()}, heads, widths_.qkv, squares_, team);
    plan_for(layer).attend(heads, widths_.qkv, kv, layer.sinks, attention_output_,
                           widths_.attention_output, attention_scratch_, team);
    if (!widths_.gates) return;
    team.parallel_for_ranges(batch_.num_tokens, [&](Range own) {
      for (int64_t token = own.begin; token < own.end; ++token) {
        multiply_by_sigmoid(qkv_ + token * widths_.qkv, widths_.gates,
                            attention_output_ + token * widths_.gates);
      }
    });
  }

  void attend_to_latents(const Layer& layer, LayerIndex layer_index, ThreadTeam team) {
    const int64_t index = layer_index.of_all;
    const KvLayer kv = kv_layer(layer_index.of_kind);
    LatentAttention& latents = *latent_attention_;
    latents.project(layer, index, *adapters_, kv, qkv_, matrix_scratch_, team);
    plan_for(layer).attend(latents.absorbed(), latents.absorbed_stride(), kv, layer.sinks,
                           latents.attended(), latents.attended_stride(), attention_scratch_, team);
    latents.expand(layer, index, *adapters_, attention_output_, team);
  }

  void mlp(const Layer& layer, int64_t index, ThreadTeam team) {
    for (int64_t first = 0; first < batch_.num_tokens && !has_failed_; first += kMlpRows) {
      const Range tokens = {first, std::min(first + kMlpRows, batch_.num_tokens)};
      if (layer.experts) {
        mix_experts(layer, tokens, team);
        continue;
      }
      const Activations input = layer_input(layer.mlp_norm, layer.gate_up, tokens, team);
      gemm(layer.gate_up, input, hidden_units_, widths_.hidden_units, Store::kOverwrite, team);
      adapters_->adapt({index, &LoraLayer::gate_up}, tokens, input, hidden_units_,
                       widths_.hidden_units, team);
      const Activations gated = activate_and_quantize(
          model_.traits, layer.down,
          {hidden_units_, model_.num_hidden_units, input.count, layer.activation},
          matrix_scratch_, team);
      project_to_residual(layer.down, {index, &LoraLayer::down}, gated, first,
                          layer.mlp_output_norm, team);
    }
  }

  // Add the results of the tokens' experts, summed over the ranks, to the residual stream.
  void mix_experts(const Layer& layer, Range tokens, ThreadTeam team) {
    const int64_t size = model_.hidden_size, count = tokens.end - tokens.begin;
    const Activations input = layer_input(layer.mlp_norm, layer.router, tokens, team);
    float* mixed = mixture_->run(layer, input, team);
    all_reduce(count * size, mixed, team);
    add_to_residual(mixed, tokens, layer.mlp_output_norm, team);
  }

  // Run a stage that normalizes, scales and adds rows x [hidden_size] to those of the residual
  // stream.
  void add_to_residual(float* x, Range tokens, const Norm& output_norm, ThreadTeam team) {
    const int64_t size = model_.hidden_size;
    team.parallel_for_ranges(tokens.end - tokens.begin, [&](Range own) {
      for (int64_t row = own.begin; row < own.end; ++row) {
        float* from = x + row * size;
        if (output_norm.weight) norm_row(output_norm, from, from);
        add_scaled(from, model_.traits.residual_scale, size,
                   residual_ + (tokens.begin + row) * size);
      }
    });
  }

  // Add a projection and its update by adapters, summed over the ranks, to the residual stream from
  // token `first` on. The residual, equal on every rank, and the bias enter the sum on rank 0 only.
  // Where the projection is normalized or scaled first, it is summed in the memory of its input,
  // which is not needed any more.
  void project_to_residual(const Matrix& matrix, LoraTarget target, const Activations& rows,
                           int64_t first, const Norm& output_norm, ThreadTeam team) {
    const int64_t size = model_.hidden_size;
    const Range tokens = {first, first + rows.count};
    if (!output_norm.weight && model_.traits.residual_scale == 1.0f) {
      float* to = residual_ + first * size;
      gemm(matrix, rows, to, size, model_.rank == 0 ? Store::kAccumulate : Store::kOverwrite, team);
      adapters_->adapt(target, tokens, rows, to, size, team);
      all_reduce(rows.count * size, to, team);
      return;
    }
    float* projected = normed_ + first * size;
    gemm(matrix, rows, projected, size, Store::kOverwrite, team);
    adapters_->adapt(target, tokens, rows, projected, size, team);
    all_reduce(rows.count * size, projected, team);
    add_to_residual(projected, tokens, output_norm, team);
  }

  // Sum data [count] over the ranks. The barriers make every thread read has_failed_ before it can
  // change, so that all threads run the same stages.
  void all_reduce(int64_t count, float* data, ThreadTeam team) {
    if (model_.communicator) {
      if (!specdec::all_reduce(model_.communicator, data, count, team)) has_failed_ = true;
    } else if (model_.all_reduce) {
      team.barrier();
      if (team.index == 0 && !model_.all_reduce(data, count)) has_failed_ = true;
      team.barrier();
    }
  }
};

}  // namespace specdec
