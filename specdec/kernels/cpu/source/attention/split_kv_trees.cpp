// Attention to the nodes of a tree of drafts, whose KV is not in the order of their positions.
#include "attention/attention_tiles.h"
#include "attention/split_kv_attention.h"

namespace specdec {

// Call work(position, index) for the nodes on a query's path that are visible to it and have one of
// `positions`, in order; index: of the node's KV in its sequence.
template <typename Work>
SPECDEC_INLINE void SplitKvAttention::for_each_node(int64_t query, Range positions,
                                                    Work&& work) const {
  const Range visible = visible_to(query, positions);
  const int64_t first_node = tile_.first_position + 1;
  int64_t position = first_node;
  for (uint64_t left = path_of(query); left; left &= left - 1, ++position) {
    if (position >= visible.begin && position < visible.end) {
      work(position, first_node + __builtin_ctzll(left));
    }
  }
}

// Compute the scores of all nodes up to the tile's last token, by slot from the first whole vector.
void SplitKvAttention::compute_node_scores() const {
  const int64_t dim = shape_.head_dim, padded = shape_.padded_dim();
  const int64_t first_node = tile_.first_position + 1;
  const int64_t last_token = tile_.first_token + tile_.num_tokens - 1;
  const int64_t end = batch_.context_lens[tile_.sequence] -
                      (batch_.query_starts[tile_.sequence + 1] - 1 - last_token);
  const int64_t first_group = first_node / kLanes * kLanes;
  const bool in_place = kv_.block_size % kLanes == 0;
  for (int64_t begin = first_group; begin < end; begin += kLanes) {
    const void* keys = scratch_.node_keys;
    if (in_place) {
      const int64_t block = batch_.block_tables[tile_.sequence][begin / kv_.block_size];
      const int64_t key_bytes = (kv_.is_latent() ? dim : 1) * element_bytes(kv_.format);
      keys = kv_.keys(tile_.kv_head, block) + begin % kv_.block_size * key_bytes;
    } else {
      gather_group({first_node, end}, begin, scratch_.node_keys,
                   scratch_.node_keys + kLanes * dim);
    }
    float* const scores = scratch_.node_scores + begin - first_group;
    dispatch_format(in_place ? kv_.format : Format::kFloat32, [&](auto format) {
      if (kv_.is_latent()) {
        return latent_scores<format>(scratch_.queries, num_queries(), keys, dim, scores);
      }
      for (int64_t first = 0; first < num_queries(); first += kQueries) {
        dispatch_size<kQueries>(num_queries() - first, [&](auto queries) {
          qk_tile<format, queries, 1>(scratch_.queries + first * padded, padded, &keys, &keys,
                                      in_place ? kv_.block_size : kLanes, dim,
                                      scores + first * kSplitSize);
        });
      }
    });
  }
}

void SplitKvAttention::score_nodes(Range positions) const {
  compute_node_scores();
  const int64_t first_group = (tile_.first_position + 1) / kLanes * kLanes;
  for (int64_t query = 0; query < num_queries(); ++query) {
    float* scores = scratch_.scores + query * kSplitSize;
    const float* by_slot = scratch_.node_scores + query * kSplitSize;
    for_each_node(query, positions, [&](int64_t position, int64_t index) {
      scores[position - positions.begin] = by_slot[index - first_group];
    });
  }
}

// The nodes stand after the prefix, so that each query's sums run over positions in order.
void SplitKvAttention::accumulate_nodes(Range positions, SplitResult result) const {
  const int64_t padded = shape_.padded_value_dim(), heads = tile_.num_heads();
  const int64_t value_bytes = shape_.head_dim * element_bytes(kv_.format);
  for (int64_t token = 0; token < tile_.num_tokens; ++token) {
    const int64_t own = token * heads;  // its queries have the same path
    for_each_node(own, positions, [&](int64_t position, int64_t index) {
      const int64_t slot = batch_.slot(tile_.sequence, index);
      const void* value = kv_.values(tile_.kv_head, slot / kv_.block_size) +
                          slot % kv_.block_size * value_bytes;
      dispatch_format(kv_.format, [&](auto format) {
        for (int64_t first = 0; first < heads; first += kQueries) {
          dispatch_size<kQueries>(heads - first, [&](auto queries) {
            accumulate_rows<format, queries>(
                scratch_.scores + (own + first) * kSplitSize + position - positions.begin, {0, 1},
                value, value, shape_, result.sums + (own + first) * padded);
          });
        }
      });
    });
  }
}

}  // namespace specdec
