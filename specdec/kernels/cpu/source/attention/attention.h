// Attention of a flat batch over a paged KV cache: prefill chunks, decode rows and draft tokens in
// one call.
//
// Split-KV attention: the context of a sequence is divided into splits at fixed positions. Within a
// split the softmax takes two passes, over the scores and over the values; the partial results are
// merged in order, as in online softmax (Milakov and Gimelshein 2018). A query's result therefore
// depends on the visible positions only: it is the same bits in any batch, with any chunking of the
// prompt and with any number of threads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "attention/batch.h"
#include "attention/kv_cache.h"
#include "threads/thread_team.h"

namespace specdec {

constexpr int64_t kSplitSize = 256;      // KV positions per split
constexpr int64_t kMaxTileQueries = 64;  // in a tile: tokens times the query heads per KV head

// The positions that a query sees.
struct Visibility {
  int64_t window;   // number of tokens up to the query, itself included; 0 for no limit
  bool sees_ahead;  // whether the tokens after it in the pass are visible too; not in a tree

  bool operator==(const Visibility& other) const {
    return window == other.window && sees_ahead == other.sees_ahead;
  }
};

struct AttentionShape {
  int64_t num_heads, num_kv_heads;
  int64_t heads_per_kv;  // of the model; other ranks may hold some heads of the first and the last
                         // KV head
  int64_t first_in_group;  // index of the first query head within its KV group
  int64_t head_dim;        // of queries and keys
  int64_t value_dim;       // of values
  int64_t first_position;  // that has KV
  float scale;             // of scores
  float softcap;           // bound c of scores s, which become c tanh(s / c); 0 for none

  // Return the first position that is visible to a query. window: 0 for no limit.
  int64_t first_visible(int64_t position, int64_t window) const {
    return window ? std::max(first_position, position - window + 1) : first_position;
  }

  // Return the query heads that read a KV head.
  Range heads_of(int64_t kv_head) const {
    const int64_t begin = kv_head * heads_per_kv - first_in_group;
    return {std::max<int64_t>(0, begin), std::min(num_heads, begin + heads_per_kv)};
  }
  int64_t tokens_per_tile() const { return std::max<int64_t>(1, kMaxTileQueries / heads_per_kv); }
  int64_t queries_per_tile() const { return tokens_per_tile() * heads_per_kv; }
  int64_t padded_dim() const { return round_up(head_dim, kLanes); }
  int64_t padded_value_dim() const { return round_up(value_dim, kLanes); }
};

// Consecutive tokens of one sequence with the query heads of one KV head, and the KV splits that
// are visible to them. A tile of a tree has nodes of it, and perhaps its base; all of them see the
// *prefix*, the positions up to the base, and each sees the nodes on its own path.
struct QueryTile {
  int64_t sequence, kv_head;
  Range heads;                      // query heads of the KV head
  int64_t first_token, num_tokens;  // in the flat batch
  int64_t first_position;           // position of first_token in its sequence; of a tree, the base
  bool is_tree;
  int64_t first_split, num_splits;
  int64_t split_cost, cost_before;  // in positions times queries; sum over the earlier tiles

  int64_t num_heads() const { return heads.end - heads.begin; }
};

// Start of a share of the batch's attention.
struct Boundary {
  int64_t tile, split;  // `split` is relative to the first split of the tile
};

// Assignment of a batch's attention to shares of equal cost; valid for all layers with the same
// visibility.
//
// There are several shares per thread, so that threads can steal work. A share may start and end
// between any two splits. When it starts inside a tile, an earlier share started that tile and
// merges all its splits in order, so this share stores separate partial results. When it ends
// inside a tile, a second stage merges the partial results of the later shares.
class AttentionPlan {
 public:
  // num_threads: maximum number of threads that call `attend`.
  AttentionPlan(const Batch& batch, AttentionShape shape, Visibility visibility,
                int64_t num_threads);

  Visibility visibility() const { return visibility_; }

  // Return the scratch memory of `attend` for all threads, in floats.
  int64_t scratch_floats() const {
    return num_threads_ * floats_per_thread() + num_shares_ * floats_per_share();
  }

  // Compute attention. Every thread of the team calls it. q: [num_tokens, num_heads, head_dim],
  // complete; the KV of this pass must be in the cache. sinks: [num_heads], or null. output:
  // [num_tokens, num_heads, value_dim].
  void attend(const float* q, int64_t q_stride, const KvLayer& kv, const float* sinks,
              float* output, int64_t output_stride, float* scratch, ThreadTeam team) const;

 private:
  class Execution;

  bool has_spanning_tile() const { return max_partials_ > 0; }
  int64_t count_splits() const;
  int64_t critical_path_cost() const;
  void split_tiles();
  void build_tiles(int64_t parts_per_tile);
  void add_tiles(int64_t sequence, Range tokens, int64_t parts_per_tile, bool is_tree);
  void add_tile(int64_t sequence, int64_t kv_head, Range tokens, bool is_tree);
  Boundary boundary(int64_t share) const;
  Range splits_of(int64_t share, int64_t tile) const;
  int64_t spanning_tile(int64_t share) const;  // or -1
  int64_t floats_per_thread() const;
  int64_t floats_per_share() const;

  template <typename Work>
  void for_each_tile(int64_t share, Work&& work) const {
    for (int64_t tile = boundaries_[share].tile; tile <= boundaries_[share + 1].tile; ++tile) {
      const Range splits = splits_of(share, tile);
      if (splits.begin < splits.end) work(tile, splits);
    }
  }

  Batch batch_;
  AttentionShape shape_;
  Visibility visibility_;
  int64_t num_threads_, num_shares_;
  int64_t total_cost_ = 0;
  int64_t max_partials_ = 0;  // maximum number of partial results per share
  std::vector<QueryTile> tiles_;
  std::vector<Boundary> boundaries_;  // [num_shares + 1]
};

}  // namespace specdec
