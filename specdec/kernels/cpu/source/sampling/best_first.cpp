// Draft trees that grow best first; `kernels/best_first.py` defines them.
#include <cstdint>
#include <limits>
#include <queue>
#include <vector>

#include "base/elementwise.h"
#include "threads/thread_team.h"

namespace specdec::sampling {
namespace {

constexpr int64_t kBase = -1;
constexpr double kNone = -std::numeric_limits<double>::infinity();

// Tokens of one row by depth and rank, with the logarithms of their probabilities.
struct Survival {
  const double* values;  // [depth, num_children]
  int64_t depth, num_children;

  double at(int64_t level, int64_t rank) const {
    return level < depth && rank < num_children ? values[level * num_children + rank] : kNone;
  }
};

// The next child of the base or of a node.
struct Offer {
  double value;
  int64_t level, parent, rank;

  // Return whether it continues the chain of best tokens, whose nodes come first.
  bool is_chain() const { return rank == 0 && parent == level - 1; }

  // Return whether `other` comes first, as std::priority_queue orders.
  bool operator<(const Offer& other) const {
    if (is_chain() || other.is_chain()) return other.is_chain();
    if (value != other.value) return value < other.value;
    if (level != other.level) return level > other.level;
    return parent > other.parent;
  }
};

// Output of one row, [max_nodes] each.
struct Nodes {
  int64_t *parents, *depths, *ranks;

  void write(int64_t index, int64_t parent, int64_t depth, int64_t rank) const {
    parents[index] = parent, depths[index] = depth, ranks[index] = rank;
  }
};

// Write up to `num_nodes` nodes of a row; return their number.
int64_t grow(const Survival& survival, int64_t num_nodes, const Nodes& nodes) {
  std::priority_queue<Offer> offers;
  std::vector<double> values;
  const auto offer = [&](int64_t level, int64_t parent, int64_t rank) {
    const double value = survival.at(level, rank) + (parent == kBase ? 0.0 : values[parent]);
    if (value > kNone) offers.push({value, level, parent, rank});
  };
  offer(0, kBase, 0);
  while (static_cast<int64_t>(values.size()) < num_nodes && !offers.empty()) {
    const Offer best = offers.top();
    const auto index = static_cast<int64_t>(values.size());
    offers.pop();
    nodes.write(index, best.parent, best.level + 1, best.rank);
    values.push_back(best.value);
    offer(best.level, best.parent, best.rank + 1);
    offer(best.level + 1, index, 0);
  }
  return static_cast<int64_t>(values.size());
}

}  // namespace

// Grow the trees of `num_rows` rows. log_survival: [num_rows, depth, num_children]; num_nodes,
// counts: [num_rows]; parents, depths, ranks: [num_rows, max_nodes].
SPECDEC_EXPORT void specdec_best_first(const double* log_survival, int64_t num_rows, int64_t depth,
                                       int64_t num_children, const int64_t* num_nodes,
                                       int64_t max_nodes, int64_t* counts, int64_t* parents,
                                       int64_t* depths, int64_t* ranks, int32_t num_threads) {
  parallel_for(num_rows, num_threads, [&](int64_t row) {
    const Survival survival = {log_survival + row * depth * num_children, depth, num_children};
    const int64_t first = row * max_nodes;
    const Nodes nodes = {parents + first, depths + first, ranks + first};
    counts[row] = grow(survival, num_nodes[row], nodes);
    for (int64_t index = counts[row]; index < max_nodes; ++index) nodes.write(index, kBase, 0, 0);
  });
}

}  // namespace specdec::sampling
