// Load balancing of attention: shares of equal cost that start and end between any two splits.
#include <cassert>

#include "attention/attention.h"

namespace specdec {

namespace {

constexpr int64_t kKvLoadCost =
    4;  // loading and converting a KV position costs as much as 4 queries
constexpr int64_t kSharesPerThread = 4;
constexpr int64_t kMinSplitsPerThread = 4;  // fewer splits per thread balance badly
constexpr int64_t kMaxParts = 4;            // per tile

}  // namespace

AttentionPlan::AttentionPlan(const Batch& batch, AttentionShape shape, Visibility visibility,
                             int64_t num_threads)
    : batch_(batch),
      shape_(shape),
      visibility_(visibility),
      num_threads_(num_threads),
      num_shares_(num_threads > 1 ? num_threads * kSharesPerThread : 1) {
  build_tiles(1);
  const bool is_divisible =
      batch.num_tokens > batch.num_sequences;  // some sequence has more than one token
  if (is_divisible && num_threads > 1 && count_splits() < kMinSplitsPerThread * num_threads) {
    split_tiles();
  }
  for (int64_t share = 0; share <= num_shares_; ++share) boundaries_.push_back(boundary(share));
  for (int64_t share = 0; share < num_shares_; ++share) {
    const Boundary begin = boundaries_[share];
    if (begin.split == 0) continue;
    const Range splits = splits_of(share, begin.tile);
    max_partials_ = std::max(max_partials_, splits.end - splits.begin);
  }
}

int64_t AttentionPlan::count_splits() const {
  int64_t count = 0;
  for (const QueryTile& tile : tiles_) count += tile.num_splits;
  return count;
}

// Return the cost of the thread with the most splits, assuming splits of equal cost.
int64_t AttentionPlan::critical_path_cost() const {
  const int64_t count = count_splits();
  assert(count > 0);  // a batch has tokens
  return ceil_div(count, num_threads_) * (total_cost_ / count);
}

// Divide the tiles further, where the critical path gets shorter although each part loads the KV
// again: with three tiles on two threads, one thread would idle for half of the time.
void AttentionPlan::split_tiles() {
  int64_t best_parts = 1, least_cost = critical_path_cost();
  for (int64_t parts = 2; parts <= kMaxParts; ++parts) {
    build_tiles(parts);
    const int64_t cost = critical_path_cost();
    if (cost < least_cost) best_parts = parts, least_cost = cost;
  }
  build_tiles(best_parts);
}

// Tiles that read the same KV are consecutive, so that the KV is still in the cache.
void AttentionPlan::build_tiles(int64_t parts_per_tile) {
  tiles_.clear();
  total_cost_ = 0;
  for (int64_t sequence = 0; sequence < batch_.num_sequences; ++sequence) {
    const int64_t begin = batch_.query_starts[sequence], end = batch_.query_starts[sequence + 1];
    const int64_t num_nodes = batch_.num_nodes_of(sequence);
    const int64_t tree = num_nodes ? std::max(begin, end - num_nodes - 1) : end;
    if (begin < tree) add_tiles(sequence, {begin, tree}, parts_per_tile, false);
    if (tree < end) add_tiles(sequence, {tree, end}, parts_per_tile, true);
  }
}

void AttentionPlan::add_tiles(int64_t sequence, Range tokens, int64_t parts_per_tile,
                              bool is_tree) {
  const int64_t max_tokens = ceil_div(
      std::min(shape_.tokens_per_tile(), tokens.end - tokens.begin), parts_per_tile);
  for (int64_t kv_head = 0; kv_head < shape_.num_kv_heads; ++kv_head) {
    for (int64_t first = tokens.begin; first < tokens.end; first += max_tokens) {
      add_tile(sequence, kv_head, {first, std::min(first + max_tokens, tokens.end)}, is_tree);
    }
  }
}

void AttentionPlan::add_tile(int64_t sequence, int64_t kv_head, Range tokens, bool is_tree) {
  const int64_t num_tokens = tokens.end - tokens.begin, base = batch_.base_of(sequence);
  int64_t position =
      batch_.context_lens[sequence] - (batch_.query_starts[sequence + 1] - tokens.begin);
  int64_t last_position = visibility_.sees_ahead ? batch_.context_lens[sequence] - 1
                                                 : position + num_tokens - 1;
  if (is_tree) {
    position = last_position = base;
    for (int64_t token = tokens.begin; token < tokens.end; ++token) {
      last_position = std::max(last_position, base + batch_.depth_of(token));
    }
  }
  const int64_t first_visible = shape_.first_visible(position, visibility_.window);
  const int64_t first_split = first_visible / kSplitSize;
  const int64_t num_splits = last_position / kSplitSize - first_split + 1;
  const int64_t num_visible = (last_position + 1 - first_visible) / num_splits;
  const Range heads = shape_.heads_of(kv_head);
  const int64_t num_queries = num_tokens * (heads.end - heads.begin);
  const int64_t cost = num_visible * (num_queries + kKvLoadCost);
  tiles_.push_back({sequence, kv_head, heads, tokens.begin, num_tokens, position, is_tree,
                    first_split, num_splits, cost, total_cost_});
  total_cost_ += num_splits * cost;
}

Boundary AttentionPlan::boundary(int64_t share) const {
  const int64_t num_tiles = tiles_.size();
  if (share == num_shares_) return {num_tiles, 0};
  const int64_t cost = total_cost_ * share / num_shares_;
  const auto next_tile = std::upper_bound(
      tiles_.begin(), tiles_.end(), cost,
      [](int64_t value, const QueryTile& tile) { return value < tile.cost_before; });
  const int64_t index = next_tile - tiles_.begin() - 1;
  const QueryTile& tile = tiles_[index];
  const int64_t split = (cost - tile.cost_before + tile.split_cost / 2) / tile.split_cost;
  return split < tile.num_splits ? Boundary{index, split} : Boundary{index + 1, 0};
}

Range AttentionPlan::splits_of(int64_t share, int64_t tile) const {
  const Boundary begin = boundaries_[share], end = boundaries_[share + 1];
  if (tile < begin.tile || tile > end.tile || tile == int64_t(tiles_.size())) return {0, 0};
  return {tile == begin.tile ? begin.split : 0,
          tile == end.tile ? end.split : tiles_[tile].num_splits};
}

int64_t AttentionPlan::spanning_tile(int64_t share) const {
  const int64_t tile = boundaries_[share + 1].tile;
  const Range splits = splits_of(share, tile);
  return splits.begin == 0 && splits.end > 0 ? tile : -1;
}

}  // namespace specdec
