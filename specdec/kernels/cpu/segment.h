// What a block of queries makes of one segment of the context.
#pragma once

#include "attention.h"

namespace specdec {

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
  float* keys;     // [kGroups, head_dim, kLanes] where the pool's blocks hold no whole vectors
  float* values;   // [kSegment, head_dim], likewise

  static int64_t floats(AttentionShape shape) {
    return shape.queries_per_block() * (shape.padded_dim() + kSegment) +
           2 * kSegment * shape.padded_dim();
  }
  SegmentScratch(float* memory, AttentionShape shape)
      : queries(memory),
        scores(memory + shape.queries_per_block() * shape.padded_dim()),
        keys(scores + shape.queries_per_block() * kSegment),
        values(keys + kSegment * shape.padded_dim()) {}
};

constexpr int64_t kGroups = kSegment / kLanes;

// Where the KV of a segment lies, for each group of kLanes positions that some query sees. Keys are
// [head_dim, kLanes] with a stride, values [kLanes, head_dim].
struct SegmentKv {
  Format format;
  int64_t key_stride;
  Range groups;  // at least one
  const void* keys[kGroups];
  const void* values[kGroups];

  // The keys of a group; beyond the last one what is read then, the values.
  const void* keys_or_after(int64_t group) const {
    return group < groups.end ? keys[group] : values[following(group, groups)];
  }

  // Likewise, and beyond the last one the keys of the segment that is `next`.
  const void* values_or_after(int64_t group, const SegmentKv& next) const {
    return group < groups.end ? values[group] : next.keys[following(group, next.groups)];
  }

 private:
  // Which of `others` is read in the place of a group behind these.
  int64_t following(int64_t group, Range others) const {
    return std::min(others.begin + group - groups.end, others.end - 1);
  }
};

// The work on one chain: its queries are loaded once, then segment after segment is computed.
class SegmentKernel {
 public:
  SegmentKernel(const Batch& batch, AttentionShape shape, int64_t window, const KvLayer& kv,
                const Chain& chain, SegmentScratch scratch);

  void load_queries(const float* q, int64_t q_stride) const;

  // Segments count from the chain's first one, here and below. Where the pool's blocks hold no whole
  // vectors, the segment is copied to the scratch memory, over the one before.
  SegmentKv locate(int64_t segment) const;

  // kv: the segment's. next: what is read after it.
  void compute(int64_t segment, const SegmentKv& kv, const SegmentKv& next,
               SegmentResult result) const;

  // Goes on from `total`, which is of all segments before this one, to that with it included.
  void merge(int64_t segment, SegmentResult total, SegmentResult result) const;
  void write(SegmentResult total, float* output, int64_t output_stride) const;

 private:
  int64_t num_queries() const { return chain_.num_tokens * chain_.num_heads(); }
  Range positions_of(int64_t segment) const;
  Range seen_by(int64_t query, Range positions) const;
  Range seen_by_any(Range positions) const;

  void copy_group(Range positions, int64_t group_begin, float* keys, float* values) const;
  template <Format>
  void score(const SegmentKv& kv) const;
  void softmax(Range positions, SegmentResult result) const;
  template <Format>
  void add_values(Range positions, const SegmentKv& kv, const SegmentKv& next,
                  SegmentResult result) const;

  const Batch& batch_;
  AttentionShape shape_;
  int64_t window_;
  const KvLayer& kv_;
  const Chain& chain_;
  SegmentScratch scratch_;
};

}  // namespace specdec
