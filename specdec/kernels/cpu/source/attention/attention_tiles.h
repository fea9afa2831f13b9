// Micro-kernels of split-KV attention: scores of a few queries, and sums of values.
#pragma once

#include <algorithm>
#include <type_traits>

#include "attention/attention.h"
#include "gemm/format_convert.h"

namespace specdec {

// Register tile of the micro-kernels: queries, and vectors of positions or of dimensions.
constexpr int kQueries = kLanes == 16 ? 6 : 2;
constexpr int kVectors = 4;

// Call `work` with `size`, from 1 to kMax, as a compile-time constant.
template <int kMax, typename Work>
SPECDEC_INLINE void dispatch_size(int64_t size, Work&& work) {
  if constexpr (kMax > 1) {
    if (size < kMax) return dispatch_size<kMax - 1>(size, work);
  }
  work(std::integral_constant<int, kMax>());
}

// QK^T: scores[q, v * kLanes + lane] = queries[q] . key of position `lane` of keys[v]. Prefetches
// `next` with the same layout. queries: [kQ, query_stride]; scores: [kQ, kSplitSize].
template <Format kFormat, int kQ, int kV>
void qk_tile(const float* queries, int64_t query_stride, const void* const* keys,
             const void* const* next, int64_t key_stride, int64_t head_dim, float* scores) {
  using Element = typename FormatTraits<kFormat>::Element;
  Floats sums[kQ][kV] = {};
  for (int64_t d = 0; d < head_dim; ++d) {
    for (int v = 0; v < kV; ++v) {
      const Floats key =
          load_as_float<kFormat>(static_cast<const Element*>(keys[v]) + d * key_stride);
      __builtin_prefetch(static_cast<const Element*>(next[v]) + d * key_stride);
      for (int q = 0; q < kQ; ++q) sums[q][v] += queries[q * query_stride + d] * key;
    }
  }
  for (int q = 0; q < kQ; ++q) {
    for (int v = 0; v < kV; ++v) store(scores + q * kSplitSize + v * kLanes, sums[q][v]);
  }
}

// Write the sums of the lanes of each of kCount vectors, in one fixed order.
template <int kCount>
SPECDEC_INLINE void reduce_sums(const Floats (&vectors)[kCount], float* sums) {
  constexpr int kQuarter = 4;
  using Quarter = float __attribute__((vector_size(kQuarter * sizeof(float))));
  SPECDEC_UNROLL
  for (int i = 0; i < kCount; ++i) {
    float lanes[kLanes];
    store(lanes, vectors[i]);
    Quarter part = load<Quarter>(lanes);
    for (int lane = kQuarter; lane < kLanes; lane += kQuarter) part += load<Quarter>(lanes + lane);
    sums[i] = (part[0] + part[2]) + (part[1] + part[3]);
  }
}

// Add the products of one vector of dimensions to sums[q][p]. keys: of the positions.
template <int kQ, int kP>
SPECDEC_INLINE void add_products(const float* queries, int64_t query_stride,
                                 const Floats (&keys)[kP], Floats (&sums)[kQ][kP]) {
  SPECDEC_UNROLL
  for (int q = 0; q < kQ; ++q) {
    const Floats query = load(queries + q * query_stride);
    SPECDEC_UNROLL
    for (int p = 0; p < kP; ++p) sums[q][p] += query * keys[p];
  }
}

// QK^T of latents, which have a row each: scores[q, p] = queries[q] . keys[p]. queries: [kQ, dim
// rounded up to vectors], zeros after `dim`; keys: [kP, dim]; scores: [kQ, kSplitSize].
template <Format kFormat, int kQ, int kP>
void latent_qk_tile(const float* queries, const typename FormatTraits<kFormat>::Element* keys,
                    int64_t dim, float* scores) {
  const int64_t query_stride = round_up(dim, kLanes), whole = dim / kLanes * kLanes;
  Floats sums[kQ][kP] = {}, key[kP];
  for (int64_t d = 0; d < whole; d += kLanes) {
    SPECDEC_UNROLL
    for (int p = 0; p < kP; ++p) key[p] = load_as_float<kFormat>(keys + p * dim + d);
    add_products(queries + d, query_stride, key, sums);
  }
  if (whole < dim) {
    SPECDEC_UNROLL
    for (int p = 0; p < kP; ++p) {
      key[p] = load_part_as_float<kFormat>(keys + p * dim + whole, dim - whole);
    }
    add_products(queries + whole, query_stride, key, sums);
  }
  SPECDEC_UNROLL
  for (int q = 0; q < kQ; ++q) reduce_sums(sums[q], scores + q * kSplitSize);
}

// Compute the scores of kLanes latents, [kLanes, dim], for `count` queries. A few rows at a time,
// which stay in the first-level cache while the queries pass.
template <Format kFormat>
void latent_scores(const float* queries, int64_t count, const void* keys, int64_t dim,
                   float* scores) {
  constexpr int kRows = 4;
  static_assert(kLanes % kRows == 0);
  const auto* rows = static_cast<const typename FormatTraits<kFormat>::Element*>(keys);
  const int64_t query_stride = round_up(dim, kLanes);
  for (int64_t row = 0; row < kLanes; row += kRows) {
    for (int64_t first = 0; first < count; first += kQueries) {
      dispatch_size<kQueries>(count - first, [&](auto size) {
        latent_qk_tile<kFormat, size, kRows>(queries + first * query_stride, rows + row * dim, dim,
                                             scores + first * kSplitSize + row);
      });
    }
  }
}

// PV: sums[q, :] += weights[q, i] * values[i, :] for i in `rows`, in order, and for the `count`
// dimensions of kV vectors, of which several are whole. Prefetches `next` with the same layout.
// weights: [kQ, kSplitSize]; values: rows value_stride apart; sums: [kQ, padded_dim].
template <Format kFormat, int kQ, int kV>
void pv_tile(const float* weights, Range rows, const void* values, const void* next,
             int64_t value_stride, int64_t count, int64_t padded_dim, float* sums) {
  using Element = typename FormatTraits<kFormat>::Element;
  // A branch on the count in the loop would keep the sums in memory.
  const auto load_value = [&](const Element* from) {
    if constexpr (kV > 1) return load_as_float<kFormat>(from);
    return count == kLanes ? load_as_float<kFormat>(from)
                           : load_part_as_float<kFormat>(from, count);
  };
  Floats sum[kQ][kV];
  SPECDEC_UNROLL
  for (int q = 0; q < kQ; ++q) {
    SPECDEC_UNROLL
    for (int v = 0; v < kV; ++v) sum[q][v] = load(sums + q * padded_dim + v * kLanes);
  }
  for (int64_t i = rows.begin; i < rows.end; ++i) {
    const Element* row = static_cast<const Element*>(values) + i * value_stride;
    SPECDEC_UNROLL
    for (int v = 0; v < kV; ++v) {
      const Floats value = load_value(row + v * kLanes);
      __builtin_prefetch(static_cast<const Element*>(next) + i * value_stride + v * kLanes);
      SPECDEC_UNROLL
      for (int q = 0; q < kQ; ++q) sum[q][v] += weights[q * kSplitSize + i] * value;
    }
  }
  SPECDEC_UNROLL
  for (int q = 0; q < kQ; ++q) {
    SPECDEC_UNROLL
    for (int v = 0; v < kV; ++v) store(sums + q * padded_dim + v * kLanes, sum[q][v]);
  }
}

template <Format kFormat, int kQ>
void accumulate_rows(const float* weights, Range rows, const void* values, const void* next,
                     AttentionShape shape, float* sums) {
  using Element = typename FormatTraits<kFormat>::Element;
  const int64_t dim = shape.value_dim, padded = shape.padded_value_dim();
  const auto add = [&](auto vectors, int64_t d, int64_t count) {
    pv_tile<kFormat, kQ, vectors>(weights, rows, static_cast<const Element*>(values) + d,
                                  static_cast<const Element*>(next) + d, shape.head_dim, count,
                                  padded, sums + d);
  };
  constexpr int64_t kWidth = kVectors * kLanes;
  int64_t d = 0;
  for (; d + kWidth <= dim; d += kWidth) add(std::integral_constant<int, kVectors>(), d, kWidth);
  for (; d < dim; d += kLanes) {
    add(std::integral_constant<int, 1>(), d, std::min<int64_t>(kLanes, dim - d));
  }
}

}  // namespace specdec
