#include "segment.h"

#include <cmath>
#include <limits>
#include <type_traits>

namespace specdec {

namespace {

// Queries and vectors of a product that stay in registers.
constexpr int64_t kGroup = kLanes == 16 ? 4 : 2;
constexpr int64_t kVectors = 4;

Range within(Range range, Range outer) {
  return {range.begin - outer.begin, range.end - outer.begin};
}

Range both(Range a, Range b) { return {std::max(a.begin, b.begin), std::min(a.end, b.end)}; }

// Calls `work` with `size`, 1 to kGroup, as a constant.
template <typename Work>
SPECDEC_INLINE void with_size(int64_t size, Work&& work) {
  switch (size) {
    case 1: return work(std::integral_constant<int, 1>());
    case 2: return work(std::integral_constant<int, 2>());
    case 3: return work(std::integral_constant<int, std::min<int>(3, kGroup)>());
    default: return work(std::integral_constant<int, kGroup>());
  }
}

// scores[q, :] = queries[q] . keys, for Q queries and V vectors of positions.
template <int Q, int V>
void score(const float* queries, const float* keys, int64_t head_dim, float* scores) {
  Floats sums[Q][V] = {};
  for (int64_t d = 0; d < head_dim; ++d) {
    Floats key[V];
    for (int v = 0; v < V; ++v) key[v] = load(keys + d * kTile + v * kLanes);
    for (int q = 0; q < Q; ++q) {
      const Floats query = broadcast(queries[q * head_dim + d]);
      for (int v = 0; v < V; ++v) sums[q][v] += query * key[v];
    }
  }
  for (int q = 0; q < Q; ++q) {
    for (int v = 0; v < V; ++v) store(scores + q * kSegment + v * kLanes, sums[q][v]);
  }
}

// sums[q, :] += weights[q, positions] . values[positions, :], position after position.
template <int Q, int V>
void accumulate(const float* weights, Range positions, const float* values, int64_t padded_dim,
                float* sums) {
  Floats sum[Q][V];
  for (int q = 0; q < Q; ++q) {
    for (int v = 0; v < V; ++v) sum[q][v] = load(sums + q * padded_dim + v * kLanes);
  }
  for (int64_t j = positions.begin; j < positions.end; ++j) {
    Floats value[V];
    for (int v = 0; v < V; ++v) value[v] = load(values + j * padded_dim + v * kLanes);
    for (int q = 0; q < Q; ++q) {
      const Floats weight = broadcast(weights[q * kSegment + j]);
      for (int v = 0; v < V; ++v) sum[q][v] += weight * value[v];
    }
  }
  for (int q = 0; q < Q; ++q) {
    for (int v = 0; v < V; ++v) store(sums + q * padded_dim + v * kLanes, sum[q][v]);
  }
}

template <int Q>
void accumulate_all(const float* weights, Range positions, const float* values, int64_t padded_dim,
                    float* sums) {
  int64_t d = 0;
  for (; d + kVectors * kLanes <= padded_dim; d += kVectors * kLanes) {
    accumulate<Q, kVectors>(weights, positions, values + d, padded_dim, sums + d);
  }
  for (; d < padded_dim; d += kLanes) {
    accumulate<Q, 1>(weights, positions, values + d, padded_dim, sums + d);
  }
}

}  // namespace

SegmentKernel::SegmentKernel(const Batch& batch, AttentionShape shape, int64_t window,
                             const KvLayer& kv, const Chain& chain, SegmentScratch scratch)
    : batch_(batch), shape_(shape), window_(window), kv_(kv), chain_(chain), scratch_(scratch) {}

// Query i is of token i / heads_per_kv: its heads stand side by side.
void SegmentKernel::load_queries(const float* q, int64_t q_stride) const {
  const int64_t heads = shape_.heads_per_kv(), dim = shape_.head_dim;
  const float scale = 1.0f / std::sqrt(float(dim));
  for (int64_t token = 0; token < chain_.num_tokens; ++token) {
    const float* from = q + (chain_.first_token + token) * q_stride + chain_.kv_head * heads * dim;
    float* to = scratch_.queries + token * heads * dim;
    for (int64_t i = 0; i < heads * dim; ++i) to[i] = from[i] * scale;
  }
}

Range SegmentKernel::positions_of(int64_t segment) const {
  const int64_t begin = (chain_.first_segment + segment) * kSegment;
  return {begin, begin + kSegment};
}

// Which of `positions` a query sees; begin may lie behind end where it sees none.
Range SegmentKernel::seen_by(int64_t query, Range positions) const {
  const int64_t own = chain_.first_position + query / shape_.heads_per_kv();
  return both(positions, {window_ ? own - window_ + 1 : 0, own + 1});
}

void SegmentKernel::compute(int64_t segment, SegmentResult result) const {
  const Range positions = positions_of(segment);
  const Range seen = {seen_by(0, positions).begin, seen_by(num_queries() - 1, positions).end};
  const auto each_tile = [&](auto&& work) {
    for (int64_t begin = positions.begin; begin < positions.end; begin += kTile) {
      const Range tile = {begin, begin + kTile}, read = both(seen, tile);
      if (read.begin < read.end) work(tile, read, scratch_.scores + begin - positions.begin);
    }
  };
  each_tile([&](Range tile, Range read, float* scores) {
    unpack_keys(read, tile.begin);
    score_tile(scores);
  });
  softmax(positions, result);
  each_tile([&](Range tile, Range read, const float* weights) {
    unpack_values(read, tile.begin);
    add_values(tile, weights, result.sums);
  });
}

// Only `positions` are read; what else is in their vectors is zero.
void SegmentKernel::unpack_keys(Range positions, int64_t tile_begin) const {
  const int64_t dim = shape_.head_dim;
  const int64_t first = positions.begin - (positions.begin - tile_begin) % kLanes;
  for (int64_t begin = first; begin < positions.end; begin += kLanes) {
    int64_t key_at[kLanes];
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      const int64_t position = begin + lane;
      const bool is_read = position >= positions.begin && position < positions.end;
      const int64_t slot = is_read ? batch_.slot(chain_.sequence, position) : 0;
      key_at[lane] = is_read ? kv_.key_at(slot, chain_.kv_head) : -1;
    }
    for (int64_t d = 0; d < dim; d += kLanes) {
      const int64_t count = std::min<int64_t>(kLanes, dim - d);
      Floats square[kLanes];
      for (int64_t lane = 0; lane < kLanes; ++lane) {
        square[lane] = key_at[lane] < 0
                           ? Floats{}
                           : read_lanes(kv_.format, kv_.data, key_at[lane] + d, count);
      }
      transpose(square);
      float* to = scratch_.tile + d * kTile + begin - tile_begin;
      for (int64_t i = 0; i < count; ++i) store(to + i * kTile, square[i]);
    }
  }
}

void SegmentKernel::unpack_values(Range positions, int64_t tile_begin) const {
  const int64_t dim = shape_.head_dim, padded = shape_.padded_dim();
  for (int64_t position = positions.begin; position < positions.end; ++position) {
    const int64_t slot = batch_.slot(chain_.sequence, position);
    const int64_t value_at = kv_.value_at(slot, chain_.kv_head);
    float* to = scratch_.tile + (position - tile_begin) * padded;
    for (int64_t d = 0; d < dim; d += kLanes) {
      const int64_t count = std::min<int64_t>(kLanes, dim - d);
      store(to + d, read_lanes(kv_.format, kv_.data, value_at + d, count));
    }
  }
}

// Scores of positions that a query does not see, or that were not read, are left as they come.
void SegmentKernel::score_tile(float* scores) const {
  const int64_t dim = shape_.head_dim, count = num_queries();
  for (int64_t v = 0; v < kTile; v += kVectors * kLanes) {
    for (int64_t first = 0; first < count; first += kGroup) {
      with_size(std::min(kGroup, count - first), [&](auto size) {
        score<size, kVectors>(scratch_.queries + first * dim, scratch_.tile + v, dim,
                              scores + first * kSegment + v);
      });
    }
  }
}

// Turns each query's scores of what it sees into weights, the largest of them 1.
void SegmentKernel::softmax(Range segment, SegmentResult result) const {
  const Floats hidden = broadcast(-std::numeric_limits<float>::infinity());
  for (int64_t query = 0; query < num_queries(); ++query) {
    const Range seen = within(seen_by(query, segment), segment);
    if (seen.begin >= seen.end) continue;
    float* scores = scratch_.scores + query * kSegment;
    const int64_t begin = seen.begin / kLanes * kLanes, end = round_up(seen.end, kLanes);
    std::fill(scores + begin, scores + seen.begin, hidden[0]);
    std::fill(scores + seen.end, scores + end, hidden[0]);
    Floats largest = hidden;
    for (int64_t j = begin; j < end; j += kLanes) largest = larger(largest, load(scores + j));
    const float top = max_of(largest);
    Floats sum = {};
    for (int64_t j = begin; j < end; j += kLanes) {
      const Floats weight = exp_of(load(scores + j) - top);
      store(scores + j, weight);
      sum += weight;
    }
    result.largest[query] = top;
    result.weights[query] = sum_of(sum);
    float* sums = result.sums + query * shape_.padded_dim();
    std::fill(sums, sums + shape_.padded_dim(), 0.0f);
  }
}

// Each query adds what it sees of the tile, in order and nothing else: the weight 0 of a position
// that it does not see would not undo a NaN there.
void SegmentKernel::add_values(Range tile, const float* weights, float* sums) const {
  const int64_t padded = shape_.padded_dim(), count = num_queries();
  const auto add = [&](int64_t query, auto size, Range positions) {
    if (positions.begin >= positions.end) return;
    accumulate_all<size>(weights + query * kSegment, positions, scratch_.tile, padded,
                         sums + query * padded);
  };
  constexpr auto kOne = std::integral_constant<int, 1>();
  for (int64_t first = 0; first < count; first += kGroup) {
    const int64_t last = std::min(first + kGroup, count) - 1;
    // What a later query sees neither begins nor ends earlier.
    const Range first_sees = within(seen_by(first, tile), tile);
    const Range last_sees = within(seen_by(last, tile), tile);
    const Range shared = {last_sees.begin, std::max(last_sees.begin, first_sees.end)};
    for (int64_t query = first; query <= last; ++query) {
      const Range seen = within(seen_by(query, tile), tile);
      add(query, kOne, {seen.begin, std::min(seen.end, shared.begin)});
    }
    with_size(last - first + 1, [&](auto size) { add(first, size, shared); });
    for (int64_t query = first; query <= last; ++query) {
      const Range seen = within(seen_by(query, tile), tile);
      add(query, kOne, {std::max(seen.begin, shared.end), seen.end});
    }
  }
}

__attribute__((noinline)) void SegmentKernel::merge(int64_t segment, SegmentResult total,
                                                    SegmentResult result) const {
  const int64_t padded = shape_.padded_dim();
  const Range positions = positions_of(segment);
  for (int64_t query = 0; query < num_queries(); ++query) {
    const Range seen = seen_by(query, positions);
    if (seen.begin >= seen.end) continue;
    float* sums = total.sums + query * padded;
    const float* added = result.sums + query * padded;
    const bool is_first = seen_by(query, {0, positions.begin}).begin >= positions.begin;
    if (is_first) {
      std::memcpy(sums, added, padded * sizeof(float));
      total.largest[query] = result.largest[query];
      total.weights[query] = result.weights[query];
      continue;
    }
    const float largest = std::max(total.largest[query], result.largest[query]);
    const float old_scale = exp_of(broadcast(total.largest[query] - largest))[0];
    const float new_scale = exp_of(broadcast(result.largest[query] - largest))[0];
    for (int64_t d = 0; d < padded; d += kLanes) {
      store(sums + d, load(sums + d) * old_scale + load(added + d) * new_scale);
    }
    total.weights[query] =
        total.weights[query] * old_scale + result.weights[query] * new_scale;
    total.largest[query] = largest;
  }
}

void SegmentKernel::write(SegmentResult total, float* output, int64_t output_stride) const {
  const int64_t heads = shape_.heads_per_kv(), dim = shape_.head_dim;
  for (int64_t query = 0; query < num_queries(); ++query) {
    const int64_t token = chain_.first_token + query / heads;
    const int64_t head = chain_.kv_head * heads + query % heads;
    float* to = output + token * output_stride + head * dim;
    const float* sums = total.sums + query * shape_.padded_dim();
    for (int64_t d = 0; d < dim; ++d) to[d] = sums[d] / total.weights[query];
  }
}

}  // namespace specdec
