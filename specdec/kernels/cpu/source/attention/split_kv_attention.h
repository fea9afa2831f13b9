// Split-KV attention: computes the partial softmax of one query tile over one split of the context.
#pragma once

#include "attention/attention.h"

namespace specdec {

// Unnormalized softmax of each query of a tile, over one or more splits.
struct SplitResult {
  float* sums;         // [queries, padded_value_dim], weighted sums of the values
  float* weight_sums;  // [queries], sums of the weights
  float* max_scores;   // [queries], the score that has weight 1

  static int64_t floats(AttentionShape shape) {
    return shape.queries_per_tile() * (shape.padded_value_dim() + 2 * kLanes);
  }
  SplitResult(float* memory, AttentionShape shape)
      : sums(memory),
        weight_sums(memory + shape.queries_per_tile() * shape.padded_value_dim()),
        max_scores(weight_sums + shape.queries_per_tile()) {}
};

// Scratch memory of one thread, reused for each split.
struct SplitScratch {
  float* queries;  // [queries, padded_dim], scaled, zeros after head_dim
  float* scores;   // [queries, kSplitSize], then the weights
  float* keys;     // [kGroups, head_dim, kLanes]; only where KV blocks do not hold whole vectors
  float* values;   // [kSplitSize, head_dim]; only where KV blocks do not hold whole vectors
  float* node_scores;  // [queries, kSplitSize], of the nodes of a tree, by slot
  float* node_keys;    // [head_dim, kLanes], then values [kLanes, head_dim]; only where KV blocks
                       // do not hold whole vectors

  static int64_t floats(AttentionShape shape) {
    return shape.queries_per_tile() * (shape.padded_dim() + 2 * kSplitSize) +
           2 * (kSplitSize + kLanes) * shape.padded_dim();
  }
  SplitScratch(float* memory, AttentionShape shape)
      : queries(memory),
        scores(memory + shape.queries_per_tile() * shape.padded_dim()),
        keys(scores + shape.queries_per_tile() * kSplitSize),
        values(keys + kSplitSize * shape.padded_dim()),
        node_scores(values + kSplitSize * shape.padded_dim()),
        node_keys(node_scores + shape.queries_per_tile() * kSplitSize) {}
};

constexpr int64_t kGroups = kSplitSize / kLanes;

// Addresses of a split's KV, for each group of kLanes positions that is visible to some query; of a
// tree, the prefix only, or one group where the split has none of it. Keys of a group: [head_dim,
// kLanes] with a stride; values: [kLanes, head_dim]. Latents of a group: [kLanes, head_dim].
struct SplitKv {
  Format format;
  int64_t key_stride;
  Range groups;  // not empty
  const void* keys[kGroups];
  const void* values[kGroups];

  // Return the keys of a group; past the last group the values, which are read next.
  const void* keys_or_next(int64_t group) const {
    return group < groups.end ? keys[group] : values[following(group, groups)];
  }

  // Return the values of a group; past the last group the keys of `next`, which are read next.
  const void* values_or_next(int64_t group, const SplitKv& next) const {
    return group < groups.end ? values[group] : next.keys[following(group, next.groups)];
  }

 private:
  // Return the index in `others` that corresponds to a group past the end.
  int64_t following(int64_t group, Range others) const {
    return std::min(others.begin + group - groups.end, others.end - 1);
  }
};

// Attention of one query tile. The queries are loaded once; then one split after another is
// computed.
class SplitKvAttention {
 public:
  SplitKvAttention(const Batch& batch, AttentionShape shape, Visibility visibility,
                   const KvLayer& kv, const QueryTile& tile, SplitScratch scratch);

  void load_queries(const float* q, int64_t q_stride) const;

  // Return the addresses of a split's KV. Splits are relative to the tile's first split, here and
  // below. Where KV blocks do not hold whole vectors, the KV is gathered into the scratch memory,
  // which overwrites the previous split.
  SplitKv locate_kv(int64_t split) const;

  // Compute the partial result of a split. kv: the split's KV. next: the KV to prefetch.
  void compute(int64_t split, const SplitKv& kv, const SplitKv& next, SplitResult result) const;

  // Merge the result of a split into `running`, which holds all earlier splits.
  void merge(int64_t split, SplitResult running, SplitResult result) const;
  void write(SplitResult running, const float* sinks, float* output,
             int64_t output_stride) const;

 private:
  int64_t num_queries() const { return tile_.num_tokens * tile_.num_heads(); }
  Range positions_of(int64_t split) const;
  Range visible_to(int64_t query, Range positions) const;
  Range visible_to_any(Range positions) const;
  Range shared_by(int64_t first, int64_t last, Range positions) const;
  int64_t position_of(int64_t query) const;
  uint64_t path_of(int64_t query) const;
  Range prefix_of(Range positions) const;
  bool has_nodes(Range positions) const;

  void gather_group(Range positions, int64_t group_begin, float* keys, float* values) const;
  template <Format>
  void compute_scores(const SplitKv& kv) const;
  void cap(float* scores, int64_t begin, int64_t end) const;
  void softmax(Range positions, SplitResult result) const;
  template <Format>
  void accumulate_values(Range positions, const SplitKv& kv, const SplitKv& next,
                         SplitResult result) const;

  // The nodes of a tree. Scores are computed by slot, as if the nodes were a chain, and then put
  // where the positions on each query's path are; so all sums run over positions in the order of
  // a chain, and have its bits.
  void score_nodes(Range positions) const;
  void compute_node_scores() const;
  void accumulate_nodes(Range positions, SplitResult result) const;
  template <typename Work>
  void for_each_node(int64_t query, Range positions, Work&& work) const;

  const Batch& batch_;
  AttentionShape shape_;
  Visibility visibility_;
  const KvLayer& kv_;
  const QueryTile& tile_;
  SplitScratch scratch_;
};

}  // namespace specdec
