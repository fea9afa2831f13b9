// Attention of a flat batch over paged KV: prefill chunks, decode rows and drafts alike.
//
// A sequence's context is cut into segments at fixed positions. Within a segment a query's softmax
// takes two passes, over scores and over values; the segments' results are merged one after the
// other, as in online softmax (Milakov and Gimelshein 2018). What a query comes to is therefore a
// matter of the positions that it sees: the same bits with other queries beside it, in other
// chunks, and by any number of threads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "batch.h"
#include "kv_cache.h"
#include "team.h"

namespace specdec {

constexpr int64_t kSegment = 256;    // positions
constexpr int64_t kMaxQueries = 64;  // in a block: tokens times the heads that share a KV head

struct AttentionShape {
  int64_t num_heads, num_kv_heads;
  int64_t heads_per_kv;    // of the model: another rank may have some of the first and the last
  int64_t first_in_group;  // the place of the first head among those of its KV head
  int64_t head_dim;

  // The heads that read a KV head.
  Range heads_of(int64_t kv_head) const {
    const int64_t begin = kv_head * heads_per_kv - first_in_group;
    return {std::max<int64_t>(0, begin), std::min(num_heads, begin + heads_per_kv)};
  }
  int64_t tokens_per_block() const { return std::max<int64_t>(1, kMaxQueries / heads_per_kv); }
  int64_t queries_per_block() const { return tokens_per_block() * heads_per_kv; }
  int64_t padded_dim() const { return round_up(head_dim, kLanes); }
};

// A block of consecutive tokens of one sequence, one KV head, and the segments that they see.
struct Chain {
  int64_t sequence, kv_head;
  Range heads;                      // that read it
  int64_t first_token, num_tokens;  // of the flat batch
  int64_t first_position;           // that of the first token
  int64_t first_segment, num_segments;
  int64_t segment_cost, cost_before;  // in positions times queries; the latter of earlier chains

  int64_t num_heads() const { return heads.end - heads.begin; }
};

// Where one share of a batch's attention ends and the next begins.
struct Boundary {
  int64_t chain, segment;  // the first that is the next one's; segments count from the chain's
};

// What of a batch's attention is computed together; the same for all layers with one window.
//
// There are more shares than threads, so that one can take over from another. A share begins and
// ends between any two segments. The chain that it begins inside was begun by an earlier share,
// which merges all segments in their order, so its own are kept apart; the one that it ends inside
// waits for the segments of later shares.
class AttentionPlan {
 public:
  // window: how many tokens a query sees, itself included; 0 for all before it. num_threads: most
  // that `attend` together.
  AttentionPlan(const Batch& batch, AttentionShape shape, int64_t window, int64_t num_threads);

  int64_t window() const { return window_; }

  // Floats of scratch memory that `attend` needs, on all threads together.
  int64_t scratch_floats() const {
    return num_threads_ * floats_per_thread() + num_shares_ * floats_per_share();
  }

  // Every thread of the team calls it, with q [num_tokens, num_heads, head_dim] complete and this
  // pass's KV in the cache; `output` is shaped alike.
  void attend(const float* q, int64_t q_stride, const KvLayer& kv, float* output,
              int64_t output_stride, float* scratch, Team team) const;

 private:
  bool is_divided() const { return most_apart_ > 0; }  // whether any chain is
  int64_t count_segments() const;
  int64_t longest_cost() const;
  void cut_blocks();
  void add_all_chains(int64_t parts_of_block);
  void add_chain(int64_t sequence, int64_t kv_head, Range tokens);
  Boundary boundary(int64_t share) const;
  Range segments_of(int64_t share, int64_t chain) const;
  int64_t left_open(int64_t share) const;  // the chain that a share begins and others end, or -1
  int64_t floats_per_thread() const;
  int64_t floats_per_share() const;

  template <typename Work>
  void each_piece(int64_t share, Work&& work) const {
    for (int64_t chain = boundaries_[share].chain; chain <= boundaries_[share + 1].chain; ++chain) {
      const Range segments = segments_of(share, chain);
      if (segments.begin < segments.end) work(chain, segments);
    }
  }

  Batch batch_;
  AttentionShape shape_;
  int64_t window_, num_threads_, num_shares_;
  int64_t total_cost_ = 0;
  int64_t most_apart_ = 0;  // segments that a share keeps for an earlier one
  std::vector<Chain> chains_;
  std::vector<Boundary> boundaries_;  // [num_shares + 1]
};

}  // namespace specdec
