// What a block of queries makes of one segment of the context.
#pragma once

#include "attention.h"

namespace specdec {

constexpr int64_t kTile = 64;  // positions whose keys or values are unpacked at a time

// A softmax that is not divided yet, of each query of a block: over one segment, or several.
struct SegmentResult {
  float* sums;     // [queries, padded_dim] of the values, weighted
  float* weights;  // [queries], the sum of the weights
  float* largest;  // [queries], the score whose weight is 1

  static int64_t floats(AttentionShape shape) {
    return shape.queries_per_block() * (shape.padded_dim() + 2 * kLanes);
  }
  SegmentResult(float* memory, AttentionShape shape)
      : sums(memory),
        weights(memory + shape.queries_per_block() * shape.padded_dim()),
        largest(weights + shape.queries_per_block()) {}
};

// A thread's own memory for one segment after another.
struct SegmentScratch {
  float* queries;  // [queries, head_dim], scaled
  float* scores;   // [queries, kSegment], then weights
  float* tile;     // keys [head_dim, kTile] or values [kTile, padded_dim]

  static int64_t floats(AttentionShape shape) {
    return shape.queries_per_block() * (shape.padded_dim() + kSegment) +
           kTile * shape.padded_dim();
  }
  SegmentScratch(float* memory, AttentionShape shape)
      : queries(memory),
        scores(memory + shape.queries_per_block() * shape.padded_dim()),
        tile(scores + shape.queries_per_block() * kSegment) {}
};

// The work on one chain: its queries are loaded once, then segment after segment is computed.
class SegmentKernel {
 public:
  SegmentKernel(const Batch& batch, AttentionShape shape, int64_t window, const KvLayer& kv,
                const Chain& chain, SegmentScratch scratch);

  void load_queries(const float* q, int64_t q_stride) const;
  void compute(int64_t segment, SegmentResult result) const;  // `segment` counts from the chain's

  // Goes on from `total`, which is of all segments before this one, to that with it included.
  void merge(int64_t segment, SegmentResult total, SegmentResult result) const;
  void write(SegmentResult total, float* output, int64_t output_stride) const;

 private:
  Range seen_by(int64_t query, Range positions) const;
  Range positions_of(int64_t segment) const;
  int64_t num_queries() const { return chain_.num_tokens * shape_.heads_per_kv(); }
  void unpack_keys(Range positions, int64_t tile_begin) const;
  void unpack_values(Range positions, int64_t tile_begin) const;
  void score_tile(float* scores) const;
  void softmax(Range segment, SegmentResult result) const;
  void add_values(Range tile, const float* weights, float* sums) const;

  const Batch& batch_;
  AttentionShape shape_;
  int64_t window_;
  const KvLayer& kv_;
  const Chain& chain_;
  SegmentScratch scratch_;
};

}  // namespace specdec
