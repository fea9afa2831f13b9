// Partial softmax of a query tile over the splits of a context.
#include "attention/split_kv_attention.h"

#include <limits>

#include "attention/attention_tiles.h"

namespace specdec {

namespace {

Range intersect(Range a, Range b) { return {std::max(a.begin, b.begin), std::min(a.end, b.end)}; }

Range relative_to(Range range, Range outer) {
  return {range.begin - outer.begin, range.end - outer.begin};
}

}  // namespace

SplitKvAttention::SplitKvAttention(const Batch& batch, AttentionShape shape, Visibility visibility,
                                   const KvLayer& kv, const QueryTile& tile, SplitScratch scratch)
    : batch_(batch),
      shape_(shape),
      visibility_(visibility),
      kv_(kv),
      tile_(tile),
      scratch_(scratch) {}

// Query i belongs to token i / num_heads: the heads of a token are adjacent.
void SplitKvAttention::load_queries(const float* q, int64_t q_stride) const {
  const int64_t dim = shape_.head_dim, padded = shape_.padded_dim(), heads = tile_.num_heads();
  const float scale = shape_.scale;
  for (int64_t query = 0; query < num_queries(); ++query) {
    const float* from = q + (tile_.first_token + query / heads) * q_stride +
                        (tile_.heads.begin + query % heads) * dim;
    float* to = scratch_.queries + query * padded;
    for (int64_t i = 0; i < dim; ++i) to[i] = from[i] * scale;
    std::fill(to + dim, to + padded, 0.0f);
  }
}

Range SplitKvAttention::positions_of(int64_t split) const {
  const int64_t begin = (tile_.first_split + split) * kSplitSize;
  return {begin, begin + kSplitSize};
}

int64_t SplitKvAttention::position_of(int64_t query) const {
  const int64_t token = query / tile_.num_heads();
  return tile_.first_position +
         (tile_.is_tree ? batch_.depth_of(tile_.first_token + token) : token);
}

// Return the nodes on the path to a query of a tree.
uint64_t SplitKvAttention::path_of(int64_t query) const {
  return batch_.ancestors[tile_.first_token + query / tile_.num_heads()];
}

// Return which of `positions` are visible to a query; begin may exceed end where none is.
Range SplitKvAttention::visible_to(int64_t query, Range positions) const {
  const int64_t own = position_of(query);
  const int64_t end = visibility_.sees_ahead ? batch_.context_lens[tile_.sequence] : own + 1;
  return intersect(positions, {shape_.first_visible(own, visibility_.window), end});
}

// Return the positions to load: of a tree those of the prefix, or one where there are none.
Range SplitKvAttention::visible_to_any(Range positions) const {
  if (!tile_.is_tree) {
    return {visible_to(0, positions).begin, visible_to(num_queries() - 1, positions).end};
  }
  const int64_t first = shape_.first_visible(tile_.first_position, visibility_.window);
  const int64_t begin = std::max(positions.begin, std::min(first, positions.end - 1));
  return {begin, std::max(begin + 1, prefix_of(positions).end)};
}

// Return the positions that are visible to all queries from `first` to `last`.
Range SplitKvAttention::shared_by(int64_t first, int64_t last, Range positions) const {
  int64_t begin = visible_to(last, positions).begin;
  if (tile_.is_tree) {
    for (int64_t query = first; query < last; ++query) {
      begin = std::max(begin, visible_to(query, positions).begin);
    }
  }
  // The visible range of a later query of a chain starts and ends at the same position or later;
  // the prefix of a tree ends at the same position for all.
  return {begin, std::max(begin, visible_to(first, positions).end)};
}

// Return the positions whose KV is in the order of the sequence.
Range SplitKvAttention::prefix_of(Range positions) const {
  if (!tile_.is_tree) return positions;
  return {positions.begin, std::min(positions.end, tile_.first_position + 1)};
}

// Return whether some of `positions` may be those of nodes.
bool SplitKvAttention::has_nodes(Range positions) const {
  return tile_.is_tree && positions.end > tile_.first_position + 1;
}

void SplitKvAttention::compute(int64_t split, const SplitKv& kv, const SplitKv& next,
                               SplitResult result) const {
  const Range positions = positions_of(split);
  dispatch_format(kv.format, [&](auto format) {
    compute_scores<format>(kv);
    if (has_nodes(positions)) score_nodes(positions);
    softmax(positions, result);
    accumulate_values<format>(positions, kv, next, result);
  });
  if (has_nodes(positions)) accumulate_nodes(positions, result);
}

// KV blocks that hold whole vectors are read in place; others are gathered.
SplitKv SplitKvAttention::locate_kv(int64_t split) const {
  const Range positions = positions_of(split), visible = visible_to_any(positions);
  const Range groups = {relative_to(visible, positions).begin / kLanes,
                        ceil_div(relative_to(visible, positions).end, kLanes)};
  const bool in_place = kv_.block_size % kLanes == 0;
  SplitKv located = {
      in_place ? kv_.format : Format::kFloat32, in_place ? kv_.block_size : kLanes, groups, {}, {}};
  const int32_t* table = batch_.block_tables[tile_.sequence];
  for (int64_t group = groups.begin; group < groups.end; ++group) {
    const int64_t begin = positions.begin + group * kLanes;
    if (in_place) {
      const int64_t block = table[begin / kv_.block_size], offset = begin % kv_.block_size;
      const int64_t bytes = element_bytes(kv_.format);
      const int64_t key_bytes = (kv_.is_latent() ? shape_.head_dim : 1) * bytes;
      located.keys[group] = kv_.keys(tile_.kv_head, block) + offset * key_bytes;
      located.values[group] = kv_.values(tile_.kv_head, block) + offset * shape_.head_dim * bytes;
    } else {
      float* keys = scratch_.keys + group * kLanes * shape_.head_dim;
      float* values = scratch_.values + group * kLanes * shape_.head_dim;
      gather_group(visible, begin, keys, values);
      located.keys[group] = keys;
      located.values[group] =
          kv_.is_latent() ? keys + shape_.head_dim - shape_.value_dim : values;
    }
  }
  return located;
}

void SplitKvAttention::gather_group(Range visible, int64_t begin, float* keys,
                                    float* values) const {
  const int64_t dim = shape_.head_dim, block_size = kv_.block_size;
  const Range own = intersect(visible, {begin, begin + kLanes});
  dispatch_format(kv_.format, [&](auto format) {
    using Element = typename FormatTraits<format>::Element;
    for (int64_t position = own.begin; position < own.end; ++position) {
      const int64_t slot = batch_.slot(tile_.sequence, position);
      const int64_t block = slot / block_size, offset = slot % block_size;
      const auto* key = reinterpret_cast<const Element*>(kv_.keys(tile_.kv_head, block));
      if (kv_.is_latent()) {
        float* const row = keys + (position - begin) * dim;
        for (int64_t d = 0; d < dim; ++d) {
          row[d] = load_part_as_float<format>(key + offset * dim + d, 1)[0];
        }
        continue;
      }
      const auto* value = reinterpret_cast<const Element*>(kv_.values(tile_.kv_head, block));
      for (int64_t d = 0; d < dim; ++d) {
        keys[d * kLanes + position - begin] =
            load_part_as_float<format>(key + d * block_size + offset, 1)[0];
        values[(position - begin) * dim + d] =
            load_part_as_float<format>(value + offset * dim + d, 1)[0];
      }
    }
  });
}

// Scores of positions that are not visible to a query, or were not loaded, are left undefined.
template <Format kFormat>
void SplitKvAttention::compute_scores(const SplitKv& kv) const {
  if (kv_.is_latent()) {
    for (int64_t group = kv.groups.begin; group < kv.groups.end; ++group) {
      latent_scores<kFormat>(scratch_.queries, num_queries(), kv.keys[group], shape_.head_dim,
                             scratch_.scores + group * kLanes);
    }
    return;
  }
  const int64_t dim = shape_.head_dim, padded = shape_.padded_dim(), count = num_queries();
  for (int64_t group = kv.groups.begin; group < kv.groups.end;) {
    const int64_t size = std::min<int64_t>(kVectors, kv.groups.end - group);
    const void* prefetch[kVectors];
    for (int64_t v = 0; v < size; ++v) prefetch[v] = kv.keys_or_next(group + kVectors + v);
    for (int64_t first = 0; first < count; first += kQueries) {
      dispatch_size<kQueries>(count - first, [&](auto queries) {
        dispatch_size<kVectors>(size, [&](auto vectors) {
          qk_tile<kFormat, queries, vectors>(scratch_.queries + first * padded, padded,
                                             kv.keys + group, prefetch, kv.key_stride, dim,
                                             scratch_.scores + first * kSplitSize + group * kLanes);
        });
      });
    }
    group += size;
  }
}

// Bound the scores of whole vectors of positions; values of positions that are not visible may be
// undefined.
void SplitKvAttention::cap(float* scores, int64_t begin, int64_t end) const {
  const float softcap = shape_.softcap, factor = 1.0f / softcap;
  for (int64_t j = begin; j < end; j += kLanes) {
    store(scores + j, softcap * vec_tanh(load(scores + j) * factor));
  }
}

// Turn each query's scores of visible positions into weights, of which the largest is 1.
void SplitKvAttention::softmax(Range positions, SplitResult result) const {
  const float masked = -std::numeric_limits<float>::infinity();
  for (int64_t query = 0; query < num_queries(); ++query) {
    const Range visible = relative_to(visible_to(query, positions), positions);
    if (visible.begin >= visible.end) continue;
    float* scores = scratch_.scores + query * kSplitSize;
    const int64_t begin = visible.begin / kLanes * kLanes, end = round_up(visible.end, kLanes);
    if (shape_.softcap != 0.0f) cap(scores, begin, end);
    std::fill(scores + begin, scores + visible.begin, masked);
    std::fill(scores + visible.end, scores + end, masked);
    Floats maxima = broadcast(masked);
    for (int64_t j = begin; j < end; j += kLanes) maxima = vec_max(maxima, load(scores + j));
    const float max_score = reduce_max(maxima);
    Floats sum = {};
    for (int64_t j = begin; j < end; j += kLanes) {
      const Floats weight = vec_exp(load(scores + j) - max_score);
      store(scores + j, weight);
      sum += weight;
    }
    result.max_scores[query] = max_score;
    result.weight_sums[query] = reduce_sum(sum);
    float* sums = result.sums + query * shape_.padded_value_dim();
    std::fill(sums, sums + shape_.padded_value_dim(), 0.0f);
  }
}

// Each query accumulates exactly the visible positions of a group, in order: a weight of 0 for a
// masked position would still propagate a NaN.
template <Format kFormat>
void SplitKvAttention::accumulate_values(Range positions, const SplitKv& kv, const SplitKv& next,
                                         SplitResult result) const {
  const int64_t padded = shape_.padded_value_dim(), count = num_queries();
  const int64_t distance = std::min<int64_t>(kVectors, kv.groups.end - kv.groups.begin);
  for (int64_t group = kv.groups.begin; group < kv.groups.end; ++group) {
    const int64_t begin = positions.begin + group * kLanes;
    const Range own = {begin, begin + kLanes}, readable = prefix_of(own);
    const void* prefetch = kv.values_or_next(group + distance, next);
    const auto add = [&](int64_t query, auto queries, Range rows) {
      if (rows.begin >= rows.end) return;
      accumulate_rows<kFormat, queries>(scratch_.scores + query * kSplitSize + group * kLanes, rows,
                                        kv.values[group], prefetch, shape_,
                                        result.sums + query * padded);
    };
    constexpr auto kOne = std::integral_constant<int, 1>();
    for (int64_t first = 0; first < count; first += kQueries) {
      const int64_t last = std::min(first + kQueries, count) - 1;
      const Range shared = relative_to(shared_by(first, last, readable), own);
      for (int64_t query = first; query <= last; ++query) {
        const Range visible = relative_to(visible_to(query, readable), own);
        add(query, kOne, {visible.begin, std::min(visible.end, shared.begin)});
      }
      dispatch_size<kQueries>(last - first + 1, [&](auto size) { add(first, size, shared); });
      for (int64_t query = first; query <= last; ++query) {
        const Range visible = relative_to(visible_to(query, readable), own);
        add(query, kOne, {std::max(visible.begin, shared.end), visible.end});
      }
    }
  }
}

__attribute__((noinline)) void SplitKvAttention::merge(int64_t split, SplitResult running,
                                                       SplitResult result) const {
  const int64_t padded = shape_.padded_value_dim();
  const Range positions = positions_of(split);
  for (int64_t query = 0; query < num_queries(); ++query) {
    const Range visible = visible_to(query, positions);
    if (visible.begin >= visible.end) continue;
    float* sums = running.sums + query * padded;
    const float* added = result.sums + query * padded;
    const bool is_first = visible_to(query, {0, positions.begin}).begin >= positions.begin;
    if (is_first) {
      std::copy(added, added + padded, sums);
      running.max_scores[query] = result.max_scores[query];
      running.weight_sums[query] = result.weight_sums[query];
      continue;
    }
    const float max_scores = std::max(running.max_scores[query], result.max_scores[query]);
    const float old_scale = vec_exp(broadcast(running.max_scores[query] - max_scores))[0];
    const float new_scale = vec_exp(broadcast(result.max_scores[query] - max_scores))[0];
    for (int64_t d = 0; d < padded; d += kLanes) {
      store(sums + d, load(sums + d) * old_scale + load(added + d) * new_scale);
    }
    running.weight_sums[query] =
        running.weight_sums[query] * old_scale + result.weight_sums[query] * new_scale;
    running.max_scores[query] = max_scores;
  }
}

// A sink adds its weight to the sum by which weights are divided, and no value.
void SplitKvAttention::write(SplitResult running, const float* sinks, float* output,
                             int64_t output_stride) const {
  const int64_t heads = tile_.num_heads(), dim = shape_.value_dim;
  for (int64_t query = 0; query < num_queries(); ++query) {
    const int64_t token = tile_.first_token + query / heads;
    const int64_t head = tile_.heads.begin + query % heads;
    float* to = output + token * output_stride + head * dim;
    const float* sums = running.sums + query * shape_.padded_value_dim();
    float weight_sum = running.weight_sums[query];
    if (sinks) weight_sum += vec_exp(broadcast(sinks[head] - running.max_scores[query]))[0];
    for (int64_t d = 0; d < dim; ++d) to[d] = sums[d] / weight_sum;
  }
}

}  // namespace specdec
