// A draft tree that grows best first; `specdec/worker/head/path_tree.py` defines it.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <vector>

#include "sampling/draft_sampler.h"

namespace specdec {

constexpr int64_t kBase = -1;

// parent: its place among the nodes, or kBase. parent_row: its place in the frontier before.
struct TreeNode {
  double log_survival;
  int64_t parent, depth, parent_row;
  int32_t token;
  bool is_chain;
};

class PathTree {
 public:
  PathTree(int64_t num_nodes, int64_t depth)
      : num_nodes_(num_nodes), depth_(depth), frontier_{kBase} {}

  const std::vector<TreeNode>& nodes() const { return nodes_; }
  // Return the places of the nodes whose children come next.
  const std::vector<int64_t>& frontier() const { return frontier_; }
  // Return the most children of a node.
  int64_t num_ranks() const { return num_nodes_ - depth_ + 1; }
  // Return the number of nodes, in order, that may have children: the most of a frontier.
  int64_t num_parents() const { return std::max(num_nodes_ / 2, depth_); }

  // Add the children of the frontier. children_of(row): those of a node of it, best first.
  template <typename ChildrenOf>
  void add_level(ChildrenOf children_of) {
    std::vector<TreeNode> every = nodes_;
    for (size_t row = 0; row < frontier_.size(); ++row) add_children(row, children_of(row), every);
    std::vector<int64_t> order(every.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
      if (every[a].is_chain != every[b].is_chain) return every[a].is_chain;
      return !every[a].is_chain && every[a].log_survival > every[b].log_survival;
    });
    order.resize(std::min<size_t>(order.size(), num_nodes_));
    keep(every, order);
  }

 private:
  using Children = std::vector<sampling::WeighedDraft>;

  int64_t num_nodes_, depth_, level_ = 0;
  std::vector<TreeNode> nodes_;
  std::vector<int64_t> frontier_;

  void add_children(int64_t row, const Children& children, std::vector<TreeNode>& every) const {
    const int64_t parent = frontier_[row];
    const double above = parent == kBase ? 0.0 : nodes_[parent].log_survival;
    const int64_t count = std::min<int64_t>(children.size(), num_ranks());
    for (int64_t rank = 0; rank < count && children[rank].confidence > 0.0; ++rank) {
      const bool is_chain = row == 0 && rank == 0 && parent == level_ - 1;
      every.push_back({above + std::log(children[rank].confidence), parent, level_ + 1, row,
                       children[rank].token, is_chain});
    }
  }

  // Keep nodes in an order, and find the next frontier.
  void keep(const std::vector<TreeNode>& every, const std::vector<int64_t>& order) {
    std::vector<int64_t> places(every.size(), kBase);
    nodes_.clear(), frontier_.clear(), ++level_;
    for (const int64_t index : order) {
      TreeNode node = every[index];
      const auto place = static_cast<int64_t>(nodes_.size());
      places[index] = place;
      if (node.parent != kBase) node.parent = places[node.parent];
      nodes_.push_back(node);
      const bool is_next = node.depth == level_ && level_ < depth_;
      if (is_next && place < num_parents()) frontier_.push_back(place);
    }
  }
};

}  // namespace specdec
