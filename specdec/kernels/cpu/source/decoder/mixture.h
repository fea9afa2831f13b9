// A mixture of experts over the rows of a batch.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "base/arena.h"
#include "base/elementwise.h"
#include "decoder/decoder.h"
#include "decoder/hidden_units.h"
#include "decoder/routing.h"

namespace specdec {

// Call visit(matrix) for each matrix of a layer's MLP, or of its mixture.
template <typename Visit>
void for_each_mlp_matrix(const Layer& layer, const Visit& visit) {
  if (!layer.experts) {
    visit(layer.gate_up);
    visit(layer.down);
    return;
  }
  visit(layer.router);
  const auto visit_expert = [&](const Expert& expert) {
    visit(expert.gate_up);
    visit(expert.down);
  };
  if (layer.shared) visit_expert(*layer.shared);
  for (int64_t own = 0; own < layer.num_own_experts; ++own) visit_expert(layer.experts[own]);
}

// Routes rows to experts and adds the experts' results to those of shared experts, in the order of
// the experts. Each operation works on one row, so a row's result is the same bits in any batch.
//
// The experts run one after the other, each over its rows: all threads share its products.
class Mixture {
 public:
  // max_rows: of one call. Takes no memory where the model has no experts.
  Mixture(const Decoder& model, int64_t max_rows, Arena& arena) : model_(model) {
    const int64_t count = model.traits.num_experts, per_token = model.traits.experts_per_token;
    if (count == 0) return;
    const int64_t size = model.hidden_size;
    logits_ = arena.allocate_floats(max_rows * count);
    choices_ = arena.allocate_floats(max_rows * 2 * count);
    groups_ = allocate_ints(arena, max_rows * count);
    inputs_ = arena.allocate_floats(max_rows * size);
    const int64_t num_units = std::max(model.num_expert_units, model.num_shared_units);
    units_ = arena.allocate_floats(max_rows * units_stride(model.traits, num_units));
    results_ = arena.allocate_floats(max_rows * size);
    mixed_ = arena.allocate_floats(max_rows * size);
    routes_.weights = arena.allocate_floats(max_rows * per_token);
    routes_.experts = allocate_ints(arena, max_rows * per_token);
    routes_.places = allocate_ints(arena, max_rows * per_token);
    routes_.starts = allocate_ints(arena, count + 1);
  }

  // Return the sum of the results of each row's experts on this rank, [rows, hidden_size]. input:
  // rows that are quantized for the router.
  float* run(const Layer& layer, const Activations& input, ThreadTeam team) {
    const Traits& traits = model_.traits;
    gemm(layer.router, input, logits_, traits.num_experts, Store::kOverwrite, team);
    route(layer, input.count, team);
    if (layer.shared) start_with_shared(layer, input, team);
    for (int64_t own = 0; own < layer.num_own_experts; ++own) {
      const int64_t expert = layer.first_expert + own;
      const Range places = {routes_.starts[expert], routes_.starts[expert + 1]};
      if (places.begin < places.end) add(layer.experts[own], input, places, team);
    }
    // Which stages run depends on routes_.starts: every thread has read them before the next call
    // changes them, or another pass that shares this memory.
    team.barrier();
    return mixed_;
  }

 private:
  const Decoder& model_;
  float* logits_ = nullptr;   // [rows, num_experts]
  float* choices_ = nullptr;  // [rows, 2, num_experts]: scores in choices, and of groups
  int32_t* groups_ = nullptr;  // [rows, num_experts]: chosen groups
  float* inputs_ = nullptr;   // [rows, hidden_size], of one expert
  float* units_ = nullptr;    // [rows, 1 or 2, num_expert_units], of one expert
  float* results_ = nullptr;  // [rows, hidden_size], of one expert
  float* mixed_ = nullptr;    // [rows, hidden_size]
  Routes routes_ = {};

  static int32_t* allocate_ints(Arena& arena, int64_t count) {
    return static_cast<int32_t*>(arena.allocate(count * sizeof(int32_t)));
  }

  // Run stages that choose the experts of all rows and set their sums to zero.
  void route(const Layer& layer, int64_t num_rows, ThreadTeam team) {
    const Traits& traits = model_.traits;
    const int64_t count = traits.num_experts, per_token = traits.experts_per_token;
    const int64_t size = model_.hidden_size;
    team.parallel_for_ranges(num_rows, [&](Range own) {
      for (int64_t row = own.begin; row < own.end; ++row) {
        float* const choices = choices_ + row * 2 * count;
        route_row(traits, layer.choice_bias, logits_ + row * count,
                  {choices, choices + count, groups_ + row * count},
                  routes_.experts + row * per_token, routes_.weights + row * per_token);
      }
      std::fill(mixed_ + own.begin * size, mixed_ + own.end * size, 0.0f);
    });
    team.parallel_for(1, [&](int64_t) {
      group_rows(routes_, num_rows, traits.num_experts, per_token);
    });
  }

  // Set the sums of all rows to the results of the experts that each token has, by its gate if any.
  void start_with_shared(const Layer& layer, const Activations& input, ThreadTeam team) {
    quantize_rows(layer.shared->gate_up, input, team);
    run_expert(*layer.shared, input, model_.num_shared_units, mixed_, team);
    if (!layer.shared_gate) return;
    const int64_t size = model_.hidden_size;
    team.parallel_for_ranges(input.count, [&](Range own) {
      for (int64_t row = own.begin; row < own.end; ++row) {
        const float gate = dot(input.x + row * input.stride, layer.shared_gate, size);
        scale(mixed_ + row * size, 1.0f / (1.0f + std::exp(-gate)), size);
      }
    });
  }

  // Run the products of an expert over quantized rows, and write the results to `to`.
  void run_expert(const Expert& expert, const Activations& rows, int64_t num_units, float* to,
                  ThreadTeam team) {
    const Traits& traits = model_.traits;
    gemm(expert.gate_up, rows, units_, units_stride(traits, num_units), Store::kOverwrite, team);
    const Activations units = activate_and_quantize(traits, expert.down,
                                                    {units_, num_units, rows.count}, rows.scratch,
                                                    team);
    gemm(expert.down, units, to, model_.hidden_size, Store::kOverwrite, team);
  }

  // Run an expert over its rows, and add the results.
  void add(const Expert& expert, const Activations& input, Range places, ThreadTeam team) {
    const int64_t size = model_.hidden_size, count = places.end - places.begin;
    const int64_t per_token = model_.traits.experts_per_token;
    const bool scales_inputs = model_.traits.scales_expert_inputs;
    const Activations rows = {inputs_, size, count, input.scratch};
    team.parallel_for_ranges(count, [&](Range own) {
      for (int64_t i = own.begin; i < own.end; ++i) {
        const int64_t place = routes_.places[places.begin + i];
        std::copy_n(input.x + place / per_token * input.stride, size, inputs_ + i * size);
        if (scales_inputs) scale(inputs_ + i * size, routes_.weights[place], size);
      }
      quantize_rows(expert.gate_up, rows, own);
    });
    run_expert(expert, rows, model_.num_expert_units, results_, team);
    team.parallel_for_ranges(count, [&](Range own) {
      for (int64_t i = own.begin; i < own.end; ++i) {
        const int64_t place = routes_.places[places.begin + i];
        add_scaled(results_ + i * size, scales_inputs ? 1.0f : routes_.weights[place], size,
                   mixed_ + place / per_token * size);
      }
    });
  }
};

}  // namespace specdec
