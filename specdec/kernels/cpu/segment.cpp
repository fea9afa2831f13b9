#include "segment.h"

#include <cmath>
#include <limits>
#include <type_traits>

namespace specdec {

namespace {

// What of a product stays in registers: queries, and vectors of positions or of dimensions.
constexpr int kQueries = kLanes == 16 ? 6 : 2;
constexpr int kVectors = 4;

Range both(Range a, Range b) { return {std::max(a.begin, b.begin), std::min(a.end, b.end)}; }

Range within(Range range, Range outer) {
  return {range.begin - outer.begin, range.end - outer.begin};
}

// Calls `work` with `size`, 1 to kMost, as a constant.
template <int kMost, typename Work>
SPECDEC_INLINE void with_size(int64_t size, Work&& work) {
  if constexpr (kMost > 1) {
    if (size < kMost) return with_size<kMost - 1>(size, work);
  }
  work(std::integral_constant<int, kMost>());
}

// scores[q, v * kLanes + lane] = queries[q] . key of position `lane` of keys[v]. Fetches `next` as if
// it were keys too.
template <Format kFormat, int kQ, int kV>
void score_tile(const float* queries, const void* const* keys, const void* const* next,
                int64_t key_stride, int64_t head_dim, float* scores) {
  using Element = typename Numbers<kFormat>::Element;
  Floats sums[kQ][kV] = {};
  for (int64_t d = 0; d < head_dim; ++d) {
    for (int v = 0; v < kV; ++v) {
      const Floats key = read<kFormat>(static_cast<const Element*>(keys[v]) + d * key_stride);
      __builtin_prefetch(static_cast<const Element*>(next[v]) + d * key_stride);
      for (int q = 0; q < kQ; ++q) sums[q][v] += queries[q * head_dim + d] * key;
    }
  }
  for (int q = 0; q < kQ; ++q) {
    for (int v = 0; v < kV; ++v) store(scores + q * kSegment + v * kLanes, sums[q][v]);
  }
}

// sums[q, :] += weights[q, i] * values[i, :], i from `rows.begin` on, one after the other, for the
// `count` dimensions of kV vectors. Fetches `next` as if it were values too.
template <Format kFormat, int kQ, int kV>
void add_tile(const float* weights, Range rows, const void* values, const void* next,
              int64_t head_dim, int64_t count, int64_t padded_dim, float* sums) {
  using Element = typename Numbers<kFormat>::Element;
  Floats sum[kQ][kV];
  for (int q = 0; q < kQ; ++q) {
    for (int v = 0; v < kV; ++v) sum[q][v] = load(sums + q * padded_dim + v * kLanes);
  }
  for (int64_t i = rows.begin; i < rows.end; ++i) {
    const Element* row = static_cast<const Element*>(values) + i * head_dim;
    for (int v = 0; v < kV; ++v) {
      const Floats value = kV * kLanes == count
                               ? read<kFormat>(row + v * kLanes)
                               : read_part<kFormat>(row + v * kLanes, count);
      __builtin_prefetch(static_cast<const Element*>(next) + i * head_dim + v * kLanes);
      for (int q = 0; q < kQ; ++q) sum[q][v] += weights[q * kSegment + i] * value;
    }
  }
  for (int q = 0; q < kQ; ++q) {
    for (int v = 0; v < kV; ++v) store(sums + q * padded_dim + v * kLanes, sum[q][v]);
  }
}

template <Format kFormat, int kQ>
void add_rows(const float* weights, Range rows, const void* values, const void* next,
              AttentionShape shape, float* sums) {
  using Element = typename Numbers<kFormat>::Element;
  const int64_t dim = shape.head_dim, padded = shape.padded_dim();
  const auto add = [&](auto vectors, int64_t d, int64_t count) {
    add_tile<kFormat, kQ, vectors>(weights, rows, static_cast<const Element*>(values) + d,
                                   static_cast<const Element*>(next) + d, dim, count, padded,
                                   sums + d);
  };
  constexpr int64_t kWidth = kVectors * kLanes;
  int64_t d = 0;
  for (; d + kWidth <= dim; d += kWidth) add(std::integral_constant<int, kVectors>(), d, kWidth);
  for (; d < dim; d += kLanes) {
    add(std::integral_constant<int, 1>(), d, std::min<int64_t>(kLanes, dim - d));
  }
}

}  // namespace

SegmentKernel::SegmentKernel(const Batch& batch, AttentionShape shape, int64_t window,
                             const KvLayer& kv, const Chain& chain, SegmentScratch scratch)
    : batch_(batch), shape_(shape), window_(window), kv_(kv), chain_(chain), scratch_(scratch) {}

// Query i is of token i / num_heads: its heads stand side by side.
void SegmentKernel::load_queries(const float* q, int64_t q_stride) const {
  const int64_t dim = shape_.head_dim, width = chain_.num_heads() * dim;
  const float scale = 1.0f / std::sqrt(float(shape_.head_dim));
  for (int64_t token = 0; token < chain_.num_tokens; ++token) {
    const float* from = q + (chain_.first_token + token) * q_stride + chain_.heads.begin * dim;
    float* to = scratch_.queries + token * width;
    for (int64_t i = 0; i < width; ++i) to[i] = from[i] * scale;
  }
}

Range SegmentKernel::positions_of(int64_t segment) const {
  const int64_t begin = (chain_.first_segment + segment) * kSegment;
  return {begin, begin + kSegment};
}

// Which of `positions` a query sees; begin may lie behind end where it sees none.
Range SegmentKernel::seen_by(int64_t query, Range positions) const {
  const int64_t own = chain_.first_position + query / chain_.num_heads();
  return both(positions, {window_ ? own - window_ + 1 : 0, own + 1});
}

Range SegmentKernel::seen_by_any(Range positions) const {
  return {seen_by(0, positions).begin, seen_by(num_queries() - 1, positions).end};
}

void SegmentKernel::compute(int64_t segment, const SegmentKv& kv, const SegmentKv& next,
                            SegmentResult result) const {
  const Range positions = positions_of(segment);
  with_format(kv.format, [&](auto format) {
    score<format>(kv);
    softmax(positions, result);
    add_values<format>(positions, kv, next, result);
  });
}

// Blocks of the pool that hold whole vectors are read in place; others are copied.
SegmentKv SegmentKernel::locate(int64_t segment) const {
  const Range positions = positions_of(segment), seen = seen_by_any(positions);
  const Range groups = {within(seen, positions).begin / kLanes,
                        divide_up(within(seen, positions).end, kLanes)};
  const bool in_place = kv_.block_size % kLanes == 0;
  SegmentKv found = {in_place ? kv_.format : Format::kFloat32,
                     in_place ? kv_.block_size : kLanes, groups, {}, {}};
  const int32_t* table = batch_.block_tables[chain_.sequence];
  for (int64_t group = groups.begin; group < groups.end; ++group) {
    const int64_t begin = positions.begin + group * kLanes;
    if (in_place) {
      const int64_t block = table[begin / kv_.block_size], offset = begin % kv_.block_size;
      const int64_t bytes = bytes_of(kv_.format);
      found.keys[group] = kv_.keys(chain_.kv_head, block) + offset * bytes;
      found.values[group] =
          kv_.values(chain_.kv_head, block) + offset * shape_.head_dim * bytes;
    } else {
      float* keys = scratch_.keys + group * kLanes * shape_.head_dim;
      float* values = scratch_.values + group * kLanes * shape_.head_dim;
      copy_group(seen, begin, keys, values);
      found.keys[group] = keys;
      found.values[group] = values;
    }
  }
  return found;
}

void SegmentKernel::copy_group(Range seen, int64_t begin, float* keys, float* values) const {
  const int64_t dim = shape_.head_dim, block_size = kv_.block_size;
  const Range own = both(seen, {begin, begin + kLanes});
  with_format(kv_.format, [&](auto format) {
    using Element = typename Numbers<format>::Element;
    for (int64_t position = own.begin; position < own.end; ++position) {
      const int64_t slot = batch_.slot(chain_.sequence, position);
      const int64_t block = slot / block_size, offset = slot % block_size;
      const auto* key = reinterpret_cast<const Element*>(kv_.keys(chain_.kv_head, block));
      const auto* value = reinterpret_cast<const Element*>(kv_.values(chain_.kv_head, block));
      for (int64_t d = 0; d < dim; ++d) {
        keys[d * kLanes + position - begin] = read_part<format>(key + d * block_size + offset, 1)[0];
        values[(position - begin) * dim + d] = read_part<format>(value + offset * dim + d, 1)[0];
      }
    }
  });
}

// Scores of positions that a query does not see, or that were not read, are left as they come.
template <Format kFormat>
void SegmentKernel::score(const SegmentKv& kv) const {
  const int64_t dim = shape_.head_dim, count = num_queries();
  for (int64_t group = kv.groups.begin; group < kv.groups.end;) {
    const int64_t size = std::min<int64_t>(kVectors, kv.groups.end - group);
    const void* ahead[kVectors];
    for (int64_t v = 0; v < size; ++v) ahead[v] = kv.keys_or_after(group + kVectors + v);
    for (int64_t first = 0; first < count; first += kQueries) {
      with_size<kQueries>(count - first, [&](auto queries) {
        with_size<kVectors>(size, [&](auto vectors) {
          score_tile<kFormat, queries, vectors>(
              scratch_.queries + first * dim, kv.keys + group, ahead, kv.key_stride, dim,
              scratch_.scores + first * kSegment + group * kLanes);
        });
      });
    }
    group += size;
  }
}

// Turns each query's scores of what it sees into weights, the largest of them 1.
void SegmentKernel::softmax(Range positions, SegmentResult result) const {
  const float hidden = -std::numeric_limits<float>::infinity();
  for (int64_t query = 0; query < num_queries(); ++query) {
    const Range seen = within(seen_by(query, positions), positions);
    if (seen.begin >= seen.end) continue;
    float* scores = scratch_.scores + query * kSegment;
    const int64_t begin = seen.begin / kLanes * kLanes, end = round_up(seen.end, kLanes);
    std::fill(scores + begin, scores + seen.begin, hidden);
    std::fill(scores + seen.end, scores + end, hidden);
    Floats largest = broadcast(hidden);
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

// Each query adds what it sees of a group, in order and nothing else: the weight 0 of a position
// that it does not see would not undo a NaN there.
template <Format kFormat>
void SegmentKernel::add_values(Range positions, const SegmentKv& kv, const SegmentKv& next,
                               SegmentResult result) const {
  const int64_t padded = shape_.padded_dim(), count = num_queries();
  const int64_t distance = std::min<int64_t>(kVectors, kv.groups.end - kv.groups.begin);
  for (int64_t group = kv.groups.begin; group < kv.groups.end; ++group) {
    const int64_t begin = positions.begin + group * kLanes;
    const Range own = {begin, begin + kLanes};
    const void* ahead = kv.values_or_after(group + distance, next);
    const auto add = [&](int64_t query, auto queries, Range rows) {
      if (rows.begin >= rows.end) return;
      add_rows<kFormat, queries>(scratch_.scores + query * kSegment + group * kLanes, rows,
                                 kv.values[group], ahead, shape_, result.sums + query * padded);
    };
    constexpr auto kOne = std::integral_constant<int, 1>();
    for (int64_t first = 0; first < count; first += kQueries) {
      const int64_t last = std::min(first + kQueries, count) - 1;
      // What a later query sees neither begins nor ends earlier.
      const Range first_sees = within(seen_by(first, own), own);
      const Range last_sees = within(seen_by(last, own), own);
      const Range shared = {last_sees.begin, std::max(last_sees.begin, first_sees.end)};
      for (int64_t query = first; query <= last; ++query) {
        const Range seen = within(seen_by(query, own), own);
        add(query, kOne, {seen.begin, std::min(seen.end, shared.begin)});
      }
      with_size<kQueries>(last - first + 1, [&](auto size) { add(first, size, shared); });
      for (int64_t query = first; query <= last; ++query) {
        const Range seen = within(seen_by(query, own), own);
        add(query, kOne, {std::max(seen.begin, shared.end), seen.end});
      }
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
      std::copy(added, added + padded, sums);
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
    total.weights[query] = total.weights[query] * old_scale + result.weights[query] * new_scale;
    total.largest[query] = largest;
  }
}

void SegmentKernel::write(SegmentResult total, float* output, int64_t output_stride) const {
  const int64_t heads = chain_.num_heads(), dim = shape_.head_dim;
  for (int64_t query = 0; query < num_queries(); ++query) {
    const int64_t token = chain_.first_token + query / heads;
    const int64_t head = chain_.heads.begin + query % heads;
    float* to = output + token * output_stride + head * dim;
    const float* sums = total.sums + query * shape_.padded_dim();
    for (int64_t d = 0; d < dim; ++d) to[d] = sums[d] / total.weights[query];
  }
}

}  // namespace specdec
