// Trees of guesses: what stands before each node, and the order in which their states are computed.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "attention/batch.h"

namespace specdec {

// A node, and the places in scratch memory of the state before it and of that after it. The state
// before it is at kBaseState where it follows the last known token.
struct NodeStep {
  int64_t row;  // among those that run
  int64_t from, to;
};

constexpr int64_t kBaseState = -1;

// The nodes of one sequence, which are its last rows.
struct TreeOrder {
  int64_t first = 0;             // row of the first node, among those that run
  std::vector<int64_t> parents;  // row before each node
  std::vector<NodeStep> steps;   // parents first
  int64_t num_states = 0;        // that are in scratch memory at once

  int64_t num_nodes() const { return parents.size(); }

  // Return the row before one.
  int64_t before(int64_t row) const {
    return parents.empty() || row < first ? row - 1 : parents[row - first];
  }
};

// Return the tree of a sequence whose last row is `end` - 1. A node's first child runs last, in the
// place of its state, so that few states are kept: the first path is often the longest.
inline TreeOrder tree_order(const Batch& batch, int64_t sequence, int64_t end) {
  TreeOrder order;
  const int64_t count = batch.num_nodes_of(sequence);
  if (!count) return order;
  order.first = end - count;
  std::vector<std::vector<int64_t>> children(count + 1);  // of the base, then of each node
  for (int64_t node = 0; node < count; ++node) {
    const int64_t token = batch.query_starts[sequence + 1] - count + node;
    const uint64_t others = batch.ancestors[token] & ~(uint64_t{1} << node);
    const int64_t parent = others ? 63 - __builtin_clzll(others) : -1;
    order.parents.push_back(order.first + parent);
    children[parent + 1].push_back(node);
  }
  struct Visit {
    int64_t node, from, to, free;  // free: the first place that no state before it needs
  };
  std::vector<Visit> stack;
  const auto push = [&](int64_t parent, int64_t state, int64_t free) {
    for (const int64_t child : children[parent + 1]) {
      const bool is_last = child == children[parent + 1].front() && state != kBaseState;
      stack.push_back({child, state, is_last ? state : free, is_last ? free : free + 1});
    }
  };
  push(-1, kBaseState, 0);
  while (!stack.empty()) {
    const Visit visit = stack.back();
    stack.pop_back();
    order.steps.push_back({order.first + visit.node, visit.from, visit.to});
    order.num_states = std::max(order.num_states, visit.to + 1);
    push(visit.node, visit.to, visit.free);
  }
  return order;
}

}  // namespace specdec
